"""Faults that are planted one by one, to see that tests catch them: `make mutants`.

Each is a mistake that people make (off by one, a factor forgotten, a check dropped, arguments swapped), written as a
text that stands once in a file of the package and what stands there instead. It is planted in a copy of the repository
and the tests that should see it are run there; a fault that no test sees has slipped through.

    python -m tests.mutants                      # all of them, two at a time
    python -m tests.mutants --only order,zero1   # those whose names hold one of these
    python -m tests.mutants --list               # only say whether every text is still there, once
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
LEAST_CAUGHT = 0.95
PASSED, FAILED = 0, 1
"""What pytest exits with."""
SECONDS = 400
"""For the tests of one fault: one that hangs is caught as well."""


@dataclass(frozen=True)
class Mutant:
    """One fault: in `file` of the package `right` becomes `wrong`, and `tests` should fail."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]

    @property
    def path(self) -> str:
        """The file in the repository."""
        return f"src/lockstep/{self.file}"

    def is_there(self, root: Path) -> bool:
        """Whether the right text stands in its file exactly once."""
        path = root / self.path
        return path.is_file() and path.read_text(encoding="utf-8").count(self.right) == 1


MUTANTS = (
    # ---- data
    Mutant(
        "order: a step larger than what is worked out at once is cut short",
        "data/order.py",
        "max(end, min(consumed + AHEAD, self.size))",
        "min(consumed + AHEAD, self.size)",
        ("tests/unit/test_order.py",),
    ),
    Mutant(
        "order: the window is filled once an epoch",
        "data/order.py",
        "if end > first + len(known):",
        "if not len(known):",
        ("tests/unit/test_order.py",),
    ),
    # ---- checkup and links
    Mutant(
        "collectives: NaN is taken for right",
        "checkup/check_collectives.py",
        "wrong = ((got.double() - expected.double()).abs() > room) | got.double().isnan()",
        "wrong = (got.double() - expected.double()).abs() > room",
        ("tests/unit/test_check_collectives.py",),
    ),
    Mutant(
        "doctor: a name that leads nowhere is only a note on many nodes",
        "links/findings.py",
        '"note" if nodes == 1 else "slow"',
        '"note"',
        ("tests/unit/test_findings.py",),
    ),
    # ---- checkpoint
    Mutant(
        "verify: the last block of a tensor is not read",
        "checkpoint/disk/files.py",
        "for at in range(0, size, self._block):",
        "for at in range(0, max(1, size // self._block) * self._block, self._block):",
        ("tests/unit/test_checkpoint_blocks.py",),
    ),
    # ---- planner
    Mutant(
        "planner: the buffers of a pipeline are one way only",
        "planner/cost/memory.py",
        "found += 2 * rank.samples * job.model.blocks.border * residual / rows",
        "found += rank.samples * job.model.blocks.border * residual / rows",
        ("tests/unit/test_planner_memory.py",),
    ),
    # ---- launch and cli
    Mutant(
        "submit: a part of a node's GPUs takes all of its CPUs",
        "cli/submit.py",
        "max(1, node.cpus * gpus // node.gpus) if gpus and node.gpus else node.cpus",
        "node.cpus",
        ("tests/cli/test_job_script.py",),
    ),
    # ---- page
    Mutant(
        "page: efficiency as if the smallest run had one rank",
        "page/sections/comparison.py",
        "return speed_up * self.base.world_size / run.world_size",
        "return speed_up / run.world_size",
        ("tests/unit/test_page_comparison.py",),
    ),
)


def copy_repository(into: Path) -> Path:
    """All files of the repository as they are in the work tree, without what git ignores."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.split("\0"):
        source = ROOT / name
        if name and source.is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, into / name)
    return into


def run_tests(root: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests on the package of a copy; the exit code of pytest and its output. One that hangs has failed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(root / "src"), "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--durations=0", *tests]
    with subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            return FAILED, f"{output}\nnot done after {SECONDS} s"
    return process.returncode, output


def plant(mutant: Mutant, root: Path) -> str:
    """Plant one fault in a copy, run its tests, and take it out again: "caught", "slipped", or what is wrong."""
    path = root / mutant.path
    sound = path.read_text(encoding="utf-8")
    path.write_text(sound.replace(mutant.right, mutant.wrong), encoding="utf-8")
    try:
        code, output = run_tests(root, mutant.tests)
    finally:
        path.write_text(sound, encoding="utf-8")
    if code == FAILED:
        failed = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
        return f"caught by {failed.partition(' ')[2].partition(' - ')[0]}" if failed else "caught"
    return "SLIPPED" if code == PASSED else f"INVALID: pytest ended with {code}\n{output[-1500:]}"


def main() -> int:
    """Plant them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, or parts of them, with commas between")
    parser.add_argument("--list", action="store_true", help="only say which texts are still there")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--no-check", action="store_true", help="do not run the tests without a fault first")
    chosen = parser.parse_args()
    parts = [part.strip() for part in chosen.only.split(",")]
    mutants = [mutant for mutant in MUTANTS if any(part in mutant.name or part in mutant.file for part in parts)]
    gone = [mutant for mutant in mutants if not mutant.is_there(ROOT)]
    for mutant in gone:
        print(f"GONE     {mutant.name}: its text is not exactly once in {mutant.path}", flush=True)
    mutants = [mutant for mutant in mutants if mutant not in gone]
    if chosen.list:
        print(f"{len(mutants)} faults can be planted, {len(gone)} cannot")
        return bool(gone)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(chosen.at_once):
            copies.put(copy_repository(Path(folder) / str(number)))
        if not chosen.no_check:
            everything = sorted({test for mutant in mutants for test in mutant.tests})
            code, output = run_tests(Path(folder) / "0", everything)
            if code != PASSED:
                print(f"these tests fail without any fault:\n{output[-4000:]}")
                return 1

        def attempt(mutant: Mutant) -> bool:
            root, began = copies.get(), time.monotonic()
            try:
                said = plant(mutant, root)
            finally:
                copies.put(root)
            print(f"{time.monotonic() - began:5.0f} s  {mutant.name}: {said}", flush=True)
            return said.startswith("caught")

        with ThreadPoolExecutor(chosen.at_once) as pool:
            caught = sum(pool.map(attempt, mutants))
    print(f"{caught} of {len(mutants)} faults were caught" + (f", {len(gone)} are gone" if gone else ""))
    return 0 if not gone and caught >= LEAST_CAUGHT * len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
