"""What one `engine.step` touches: the files a reader follows, the lines of the functions that run, and who calls whom.

Two CPU ranks over gloo for each layout train a small GPT. The third step is traced with `sys.setprofile` on every rank;
what is shown is of the rank that touches most. Lines are those of the functions that run, each counted once; a call
back is one from `parallel/` into `engine.py` or `run.py`, whatever of torch or of the script lies between.

    .venv/bin/python benchmarks/step_walk.py               # dp=2, tp=2, pp=2
    .venv/bin/python benchmarks/step_walk.py --layouts fsdp=2 --files --edges
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from gpt2 import GPT2, Shape, Tokens
from measuring import FOLDER, past_the_console, start_ranks
from torch import nn

import lockstep

PACKAGE = Path(lockstep.__path__[0])
RANKS = 2
TRACED_STEP = 3
SHAPE = Shape(layers=4, width=32, heads=2, context=16, vocabulary=64)
MOST = {"dp=2": (15, 3000), "tp=2": (25, 5000), "pp=2": (25, 5000)}
"""What a reader should be able to follow: files, and lines of functions."""


AROUND = ("observe/", "record/", "runtime/", "text/", "run.py")
"""Files around a step: what watches and times it, and small things of the process. They count as files, too."""


class Walk:
    """The functions of the package that run while it is entered, and the calls between its files."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.calls: Counter[tuple[str, str]] = Counter()
        self._files: dict[str, str | None] = {}

    def __enter__(self) -> Walk:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (file := self._file(frame.f_code)) is None:
            return
        self.codes.add(frame.f_code)
        caller = frame.f_back
        while caller is not None and (source := self._file(caller.f_code)) is None:
            caller = caller.f_back
        if caller is not None and source != file:
            self.calls[str(source), file] += 1

    def _file(self, code: CodeType) -> str | None:
        if code.co_filename not in self._files:
            path = Path(code.co_filename)
            inside = path.is_relative_to(PACKAGE)
            self._files[code.co_filename] = str(path.relative_to(PACKAGE)) if inside else None
        return self._files[code.co_filename]

    def found(self) -> dict[str, Any]:
        """Files with the lines of their functions that ran, and the calls between files."""
        lines: dict[str, set[int]] = {}
        for code in self.codes:
            ends = [line for _, _, line in code.co_lines() if line is not None]
            lines.setdefault(str(self._file(code)), set()).update(range(code.co_firstlineno, max(ends) + 1))
        return {
            "files": {file: len(numbers) for file, numbers in sorted(lines.items())},
            "calls": [[*edge, count] for edge, count in sorted(self.calls.items())],
        }


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """As a script for one device has it."""
    count = batch["y"].numel()
    mean: torch.Tensor = model(batch["x"], batch["y"])
    return mean * count, count


def trace_on_this_rank(layout: str, results: Path) -> None:
    """Train, and write down what the traced step touched."""
    past_the_console(Path(os.environ[FOLDER]) / f"console-{os.environ['RANK']}.log")
    with lockstep.init(layout, run_dir=Path(os.environ[FOLDER]) / layout, device="cpu", seed=0) as run:
        engine = run.setup(
            lambda: GPT2(SHAPE), loss, optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3), clip=1.0
        )
        loader = run.loader(Tokens(SHAPE, 4 * TRACED_STEP * 4, 0), global_batch=4, micro_batch=1)
        for number, batch in enumerate(loader, 1):
            if number == TRACED_STEP:
                with Walk() as walk:
                    engine.step(batch)
                (results / f"{layout}.{run.rank}.json").write_text(json.dumps(walk.found()))
                break
            engine.step(batch)
    with suppress(OSError):
        sys.stdout.flush()


def show(layout: str, found: dict[str, Any], options: argparse.Namespace) -> tuple[str, bool]:
    """Print what was asked for; a row of the table, and whether it is within what a reader can follow."""
    files, calls = found["files"], found["calls"]
    whole = {file: len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in files}
    back = [call for call in calls if call[0].startswith("parallel/") and call[1] in ("engine.py", "run.py")]
    if options.files:
        print(f"\n{layout}: lines of functions that run, of the file")
        for file, lines in files.items():
            print(f"  {lines:5d} {whole[file]:5d}  {file}")
    if options.edges:
        print(f"\n{layout}: calls from file to file")
        for source, target, count in calls:
            print(f"  {count:5d}  {source} -> {target}")
    for source, target, count in back:
        print(f"  {layout}: {source} calls {target}, {count} times")
    most_files, most_lines = MOST.get(layout, (25, 5000))
    lines, times = sum(files.values()), sum(call[2] for call in back)
    around = sum(file.startswith(AROUND) for file in files)
    row = f"{layout:>8} {len(files):>6} {around:>7} {lines:>7} {sum(whole.values()):>14} {len(calls):>6} {times:>11}"
    return f"{row}   at most {most_files} and {most_lines}", len(
        files
    ) <= most_files and lines <= most_lines and not back


def main() -> None:
    """Trace a step of each layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="dp=2,tp=2,pp=2", help="layouts of two ranks (default dp=2,tp=2,pp=2)")
    parser.add_argument("--files", action="store_true", help="list the files")
    parser.add_argument("--edges", action="store_true", help="list who calls whom")
    parser.add_argument("--rank-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        trace_on_this_rank(options.rank_of[0], Path(options.rank_of[1]))
        return
    rows, is_fine = [], True
    with tempfile.TemporaryDirectory() as folder:
        for layout in options.layouts.split(","):
            sys.argv = [__file__, "--rank-of", layout, folder]
            if code := start_ranks(RANKS):
                raise SystemExit(code)
            ranks = [json.loads((Path(folder) / f"{layout}.{rank}.json").read_text()) for rank in range(RANKS)]
            row, fits = show(layout, max(ranks, key=lambda found: sum(found["files"].values())), options)
            rows.append(row)
            is_fine = is_fine and fits
    titles = (
        f"{'layout':>8} {'files':>6} {'around':>7} {'lines':>7} {'of these files':>14} {'edges':>6} {'calls back':>11}"
    )
    print(f"\n{titles}")
    print("\n".join(rows))
    raise SystemExit(0 if is_fine else 1)


if __name__ == "__main__":
    main()
