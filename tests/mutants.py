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

    def place(self, root: Path) -> Path | None:
        """The file with the right text, exactly once: its own, or else the only one of the package that has it."""
        package = root / "src" / "lockstep"
        own = package / self.file
        for files in ([own] if own.is_file() else [], sorted(package.rglob("*.py"))):
            counts = {path: path.read_text(encoding="utf-8").count(self.right) for path in files}
            if sum(counts.values()) == 1:
                return max(counts, key=lambda path: counts[path])
        return None


MUTANTS = (
    Mutant(
        "layout: the data coordinate counts its axes in the wrong order",
        "layout.py",
        'return at["dp"] * self.fsdp + at["fsdp"]',
        'return at["fsdp"] * self.dp + at["dp"]',
        ("tests/unit/test_layout.py",),
    ),
    Mutant(
        "order: fillers up to the rank with the fewest micro-batches",
        "data/order.py",
        "(-(-count // data_size) - len(mine))",
        "(count // data_size - len(mine))",
        ("tests/unit/test_order.py",),
    ),
    Mutant(
        "loader: reading leaves the training's random streams moved",
        "data/loader.py",
        "    finally:\n        _set_random_state(state)",
        "    finally:\n        pass",
        ("tests/unit/test_loader.py",),
    ),
    Mutant(
        "loader: the last micro-batch of a stream's evaluation has a filler too few",
        "data/loader.py",
        "order.data_rank >= count % order.data_size",
        "order.data_rank > count % order.data_size",
        ("tests/unit/test_loader.py",),
    ),
    Mutant(
        "digest: samples of another shape look alike",
        "data/digest.py",
        'return f"{value.dtype} {tuple(value.shape)} ".encode() + plain',
        'return f"{value.dtype} ".encode() + plain',
        ("tests/unit/test_identity.py",),
    ),
    Mutant(
        "cadence: parts of epochs are counted in whole steps and drift",
        "config/cadence.py",
        "return now > before",
        "return step % max(1, int(self.amount * steps_per_epoch)) == 0",
        ("tests/unit/test_config.py",),
    ),
    Mutant(
        "durations: Slurm's days are hours",
        "config/cadence.py",
        '{"d": 86400, "h": 3600, "m": 60, "s": 1}',
        '{"d": 3600, "h": 3600, "m": 60, "s": 1}',
        ("tests/unit/test_cadence.py",),
    ),
    Mutant(
        "verdict: who lost the others is taken for the cause",
        "record/failure.py",
        "causes = [failure for failure in failures if not failure.is_consequence]",
        "causes = list(failures)",
        ("tests/unit/test_supervise.py",),
    ),
    Mutant(
        "seeds: every step draws the same",
        "runtime/seeds.py",
        'return seed_of(seed, "draw", step, *coordinates)',
        'return seed_of(seed, "draw", *coordinates)',
        ("tests/unit/test_seeds.py",),
    ),
    Mutant(
        "place: the node of a rank is that of the rank before it",
        "runtime/rank_env.py",
        "node_rank, nodes = rank // per_node,",
        "node_rank, nodes = (rank - 1) // per_node,",
        ("tests/unit/test_place.py",),
    ),
    Mutant(
        "comm: a mean over ranks is a sum",
        "runtime/comm.py",
        '        if how == "mean":\n            tensor /= self.world_size\n',
        "",
        ("tests/dist/test_helpers.py::test_reduce_gives_every_rank_the_sum_mean_minimum_and_maximum",),
    ),
    Mutant(
        "trial: lists that a forward made longer stay so",
        "follow/carried.py",
        "                del value[note:]\n",
        "                pass\n",
        ("tests/unit/test_carried.py",),
    ),
    Mutant(
        "clip: short gradients are made longer",
        "step/grads.py",
        "torch.clamp(clip / (norm + 1e-6), max=1.0)",
        "(clip / (norm + 1e-6))",
        (
            "tests/parity/test_layouts.py::test_final_weights_equal_those_of_one_process[dp=2-4-clipped]",
            "tests/unit/test_grads.py",
        ),
    ),
    Mutant(
        "norm: the norms of ranks are added up, not their squares",
        "step/grads.py",
        "return square.sqrt().to(norm.dtype)",
        "return square.to(norm.dtype)",
        ("tests/parity/test_layouts.py::test_final_weights_equal_those_of_one_process[fsdp=2-2-clipped]",),
    ),
    Mutant(
        "rates: a checkpoint forgets the rate that the script set",
        "step/rates.py",
        "RateState([base if base != made else None for base, made in changed], states)",
        "RateState([None for base, made in changed], states)",
        ("tests/unit/test_rates.py",),
    ),
    Mutant(
        "loss scale: an overflow does not begin the count anew",
        "step/precision.py",
        "self._good_steps = 0 if overflow else self._good_steps + 1",
        "self._good_steps += not overflow",
        ("tests/parity/test_precision.py::test_the_loss_scale_doubles_after_its_window_and_halves_on_overflow",),
    ),
    Mutant(
        "statistics: the ranks' updates are applied in the wrong order",
        "parallel/replicate/statistics.py",
        "for theirs in everybody:",
        "for theirs in reversed(everybody):",
        ("tests/dist/test_steps.py::test_batch_norm_has_the_statistics_and_gradients_of_one_process",),
    ),
    Mutant(
        "buckets: the gradients of the step before are still there",
        "parallel/replicate/buckets.py",
        "        self.flat.zero_()\n",
        "",
        ("tests/parity/test_layouts.py::test_final_weights_equal_those_of_one_process[dp=2-4-clipped]",),
    ),
    Mutant(
        "zero1: frozen parameters are not gathered after a restart",
        "parallel/replicate/zero1.py",
        "for bucket in (*self._trained, *self._frozen):",
        "for bucket in self._trained:",
        ("tests/parity/test_sharding.py::test_a_checkpoint_brings_frozen_weights_back_too",),
    ),
    Mutant(
        "zero1: the rest of the rows comes from the wrong rank",
        "parallel/replicate/zero1.py",
        "table[min(full, len(table) - 1), :rest]",
        "table[len(table) - 1, :rest]",
        ("tests/dist/test_uneven_rows.py",),
    ),
    Mutant(
        "recompute: BatchNorm counts a micro-batch twice",
        "parallel/build/recompute.py",
        "counts = bool(batch_norms(block))",
        "counts = False",
        ("tests/dist/test_user_models.py::test_it_trains_as_on_one_process[recomputed batch norm-square-True-dp=2]",),
    ),
    Mutant(
        "ties: the copies of a parameter stay as they were before the step",
        "parallel/pipeline/ties.py",
        "            local_part(copy.data).copy_(local_part(tie.parameter.data))\n",
        "            pass\n",
        (
            "tests/parity/test_pipeline.py::test_final_weights_equal_those_of_one_process[pp=2,fsdp=2-zero3-dualpipev-4]",
        ),
    ),
    Mutant(
        "pipeline: the weights' half of a backward forgets the outputs without a way to the inputs",
        "parallel/pipeline/backward.py",
        "        if below:\n",
        "        if False:\n",
        ("tests/unit/test_backward.py",),
    ),
    Mutant(
        "tensor: a cut inner dim of a product is not added up",
        "parallel/tensor/rules/products.py",
        "            sums.append(axis)\n",
        "",
        ("tests/dist/test_cut_rules.py",),
    ),
    Mutant(
        "context: causal attention of a later chunk sees a key too many",
        "parallel/tensor/rules/products.py",
        ".tril(end - length)",
        ".tril(end - length + 1)",
        (
            "tests/dist/test_cut_rules.py",
            "tests/parity/test_tensor.py::test_every_rank_reports_the_steps_of_one_process[cp=2]",
        ),
    ),
    Mutant(
        "timetable: activations are free before the weights' half of a backward",
        "parallel/pipeline/timetable.py",
        '{"F": 1, "I": 0, "B": -1, "W": -1}',
        '{"F": 1, "I": -1, "B": -1, "W": 0}',
        (
            "tests/unit/test_timetable.py",
            "tests/unit/test_planner_memory.py",
        ),
    ),
    Mutant(
        "engine: the loss scale stays in the gradients",
        "training/do_step.py",
        "factor = derived_of / (weight * loss_scale)",
        "factor = derived_of / weight",
        ("tests/parity/test_precision.py::test_the_loss_scale_is_in_no_gradient_and_no_norm[single]",),
    ),
    Mutant(
        "micro-batch: a rest of the global batch has no rank",
        "trial/micro_batch.py",
        "share = -(-global_batch // layout.data_size)",
        "share = global_batch // layout.data_size",
        ("tests/unit/test_micro_batch.py",),
    ),
    Mutant(
        "boxes: the second part of a fused dim begins a share too early",
        "parallel/boxes.py",
        "        begin += part\n",
        "        begin += end - first\n",
        ("tests/unit/test_checkpoint_boxes.py",),
    ),
    Mutant(
        "load: rows of a chunk are put where they were in the chunk",
        "checkpoint/disk/load.py",
        "at = first - inside[0]",
        "at = first",
        ("tests/unit/test_checkpoint_blocks.py",),
    ),
    Mutant(
        "attempts: the attempt before may still write",
        "checkpoint/disk/attempts.py",
        "if other != own:",
        "if other == own:",
        ("tests/dist/test_save.py::test_an_attempt_that_is_overtaken_between_writing_and_renaming_cannot_rename",),
    ),
    Mutant(
        "requests: a flag stays up after all have acted on it",
        "faults/requests.py",
        "        self._raised -= voted\n",
        "",
        ("tests/unit/test_requests.py",),
    ),
    Mutant(
        "spikes: a run that goes on has forgotten how noisy its losses were",
        "step/spikes.py",
        'self._above = deque(state["above"], maxlen=WINDOW)',
        "self._above = deque(maxlen=WINDOW)",
        ("tests/unit/test_spikes.py",),
    ),
    Mutant(
        "stragglers: a rank with more samples is blamed for them",
        "faults/stragglers.py",
        "max(1.0, samples[rank] / usual)",
        "max(1.0, usual / samples[rank])",
        ("tests/unit/test_stragglers.py",),
    ),
    Mutant(
        "not finite: the loss of one data rank is blamed on nobody",
        "faults/nonfinite.py",
        "len(affected) == 1 and not is_shared",
        "len(affected) == len(reports) and not is_shared",
        ("tests/unit/test_nonfinite.py",),
    ),
    Mutant(
        "intervals: what overlaps is counted twice",
        "observe/intervals.py",
        "max(end, merged[-1][1])",
        "end",
        ("tests/unit/test_profile_digest.py",),
    ),
    Mutant(
        "clock: what the optimizer waits for counts as its work",
        "observe/clock.py",
        "                self._parts[self.working] -= seconds\n",
        "                pass\n",
        ("tests/unit/test_clock.py",),
    ),
    Mutant(
        "supervise: a checkpoint does not give the tries back",
        "launch/supervise.py",
        "self._saved, self._left = saved, self.policy.restarts",
        "self._saved = saved",
        ("tests/unit/test_supervise.py",),
    ),
    Mutant(
        "cost: a ring's all-reduce goes around once",
        "links/collective_cost.py",
        '"ring": 2 * others * link.seconds(part)',
        '"ring": others * link.seconds(part)',
        ("tests/unit/test_comm_model.py",),
    ),
    Mutant(
        "curve: beyond the largest measured size nothing takes longer",
        "links/fit.py",
        "return last[1] * size / last[0]",
        "return last[1]",
        ("tests/unit/test_bench_fit.py",),
    ),
    Mutant(
        "lab: a ring hands on the chunk beside the one it got",
        "lab/algorithms.py",
        "wire.send(wire.chunk(wire.rank - step + 1), to=right)",
        "wire.send(wire.chunk(wire.rank - step), to=right)",
        ("tests/dist/test_lab.py::test_every_algorithm_gives_what_the_collective_is_for_and_what_the_backend_gives",),
    ),
    Mutant(
        "compare: the last step of the warm-up is timed",
        "compare/table.py",
        'if event["step"] > first]',
        'if event["step"] >= first]',
        ("tests/unit/test_compare.py",),
    ),
    Mutant(
        "page: what every rank waits is what the worst one waits",
        "page/advice/step_rules.py",
        "least = min(seconds)",
        "least = max(seconds)",
        ("tests/unit/test_page_advice.py",),
    ),
    Mutant(
        "console: only the last pause is left out of the pace",
        "sinks/console.py",
        "self._pace.pause_seconds += seconds",
        "self._pace.pause_seconds = seconds",
        ("tests/unit/test_console.py",),
    ),
    Mutant(
        "verify: ranks with other gradients for the same samples pass",
        "prove/causes.py",
        'if one["gradient"] > ALIKE:',
        'if one["gradient"] > 1 / ALIKE:',
        ("tests/unit/test_verify.py",),
    ),
    Mutant(
        "lm: the next byte is that of the padding",
        "recipes/lm.py",
        "[0, len(seen) - 1]",
        "[0, -1]",
        ("tests/unit/test_recipes.py",),
    ),
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
        '"note" if len(plan.processes) == 1 else "slow"',
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
        "found += 2 * rank.samples * job.model.blocks.border * job.residual / job.rows",
        "found += rank.samples * job.model.blocks.border * job.residual / job.rows",
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
    path = mutant.place(root)
    assert path is not None
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
    places = {mutant: mutant.place(ROOT) for mutant in mutants}
    gone = [mutant for mutant in mutants if places[mutant] is None]
    for mutant, place in places.items():
        if place is None:
            print(f"GONE     {mutant.name}: its text is not exactly once in {mutant.file}, nor elsewhere", flush=True)
        elif place != ROOT / "src" / "lockstep" / mutant.file:
            print(f"MOVED    {mutant.name}: from {mutant.file} to {place.relative_to(ROOT)}", flush=True)
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
