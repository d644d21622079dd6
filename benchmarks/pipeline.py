"""What a pipeline step costs with Lockstep, next to a `torch.distributed.pipelining` script written by hand.

Two CPU ranks over gloo, fp32, one stage each. Both contenders live in the same two processes and take turns of a few
steps in rotating order, so that whatever else the machine does hits both. They train one GPT-2 with tied embeddings
from the same weights on the same micro-batches with the same fused AdamW, without clipping. First their loss curves are
compared; a difference fails the benchmark. What counts is the ratio to torch within a round. A time is that of the
slower rank.

The bubble is the share of the ranks' time that is not spent inside forward and backward passes of their stages, but on
waiting, sending, reading samples, the optimizer. Idle is the share in which the computing thread of a rank did not run
at all. The least bubble is what the schedule leaves with stages of equal cost and all else free.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt2 import GPT2, Shape, Size, Tokens
from measuring import (
    FOLDER,
    OwnGarbageSetting,
    Say,
    in_turn,
    largest_difference,
    machine_text,
    options_of,
    past_the_console,
    ratio_cells,
    start_ranks,
    summary,
    take_another_model,
)
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.data import DataLoader

from lockstep.init_run import init
from lockstep.run import Run

RANKS = 2
SEED = 0
LEARNING_RATE = 3e-4
LARGEST_DIFFERENCE = 1e-5
COMPARED_STEPS = 6

SIZES = {
    "small": Size(Shape(layers=4, width=128, heads=4, context=128, vocabulary=256), batch=2, block=5),
    "large": Size(Shape(layers=4, width=256, heads=4, context=256, vocabulary=256), batch=2, block=2),
}
"""The batch is one micro-batch."""

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}

Batch = dict[str, Tensor]
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """What is trained, and how it is cut."""

    weights: GPT2
    size: Size
    micro_batches: int
    schedule: str
    steps: int

    @property
    def global_batch(self) -> int:
        return self.size.batch * self.micro_batches

    def dataset(self) -> Tokens:
        return Tokens(self.size.shape, self.steps * self.global_batch, SEED)

    def build_model(self) -> GPT2:
        return copy.deepcopy(self.weights)

    def optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


class Step(NamedTuple):
    loss: float
    """Of the whole batch, as the last rank knows it."""
    busy: float | None
    """Seconds inside the forward and backward passes of this rank's stages, where the contender tells them."""


Steps = Generator[Step]
Contender = Callable[[Problem, Run | None], Steps]


class FirstHalf(nn.Module):
    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.tokens, self.positions = model.tokens, model.positions
        self.blocks = model.blocks[: len(model.blocks) // 2]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class SecondHalf(nn.Module):
    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.blocks = model.blocks[len(model.blocks) // 2 :]
        self.norm, self.head = model.norm, model.head

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Stopwatch:
    """Adds up the time spent inside some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[P, T]) -> Callable[P, T]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return timed

    def read(self) -> float:
        """The seconds since the last reading."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def by_hand(problem: Problem, _: Run | None) -> Steps:
    """torch.distributed.pipelining: the model cut by hand, the tied weight's two gradients added up by hand."""
    rank = dist.get_rank()
    model = problem.build_model()
    half = FirstHalf(model) if rank == 0 else SecondHalf(model)
    tied = model.tokens.weight
    optimizer = problem.optimizer(half.parameters())
    tokens = problem.global_batch * problem.size.shape.context
    watch = Stopwatch()

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / tokens

    stage = PipelineStage(half, rank, RANKS, torch.device("cpu"))
    stage.forward_one_chunk = watch.around(stage.forward_one_chunk)  # type: ignore[method-assign]
    stage.backward_one_chunk = watch.around(stage.backward_one_chunk)  # type: ignore[method-assign]
    # Shares of the mean over the whole batch, so that no gradient has to be divided afterwards.
    schedule = SCHEDULES[problem.schedule](stage, problem.micro_batches, watch.around(loss), scale_grads=False)
    for batch in DataLoader(problem.dataset(), batch_size=problem.global_batch):
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch["x"], return_outputs=False)
        else:
            schedule.step(target=batch["y"], losses=losses, return_outputs=False)
        dist.all_reduce(tied.grad)
        optimizer.step()
        yield Step(sum(loss.item() for loss in losses), watch.read())


def lockstep(problem: Problem, run: Run | None) -> Steps:
    """Lockstep at engine level; its event log and TensorBoard file are on, as by default."""
    assert run is not None

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return model(batch["x"], batch["y"], reduction="sum"), batch["y"].numel()

    name = take_another_model(run)
    engine = run.setup(problem.build_model, loss, optimizer=problem.optimizer, pipeline={"schedule": problem.schedule})
    loader = run.loader(
        problem.dataset(),
        problem.global_batch,
        micro_batch=problem.size.batch,
        steps=problem.steps,
        shuffle=False,
        workers=0,
        name=name,
    )
    for batch in loader:
        loss_now = engine.step(batch).loss
        assert engine.pipeline is not None
        yield Step(loss_now, sum(end - began for *_, began, end in engine.pipeline.last_step()))


CONTENDERS: dict[str, Contender] = {"torch": by_hand, "lockstep": lockstep}


def main() -> None:
    options = arguments()
    if "RANK" in os.environ:
        measure_on_this_rank(options)
    else:
        raise SystemExit(start_ranks(RANKS))


def arguments() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--micro-batches", type=int, default=8, help="of one step (default 8)")
    parser.add_argument("--torch-only", action="store_true", help="without Lockstep")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 2
    return options


def measure_on_this_rank(options: argparse.Namespace) -> None:
    say = past_the_console(Path(os.environ[FOLDER]) / "console.log") if os.environ["RANK"] == "0" else lambda _: None
    say(f"{machine_text()}; torch {torch.__version__}")
    results: dict[str, Any] = {"machine": machine_text(), "ranks": RANKS, "torch": torch.__version__}
    run = None
    if options.torch_only:
        dist.init_process_group("gloo")
    else:
        run = init(f"pp={RANKS}", run_dir=Path(os.environ[FOLDER]) / "run", device="cpu", seed=SEED)
    results |= measure(options, run, say)
    if options.json and dist.get_rank() == 0:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if run:
        run.close()
    else:
        dist.destroy_process_group()
    wrong = [name for name, far in results["largest_difference"].items() if not far < LARGEST_DIFFERENCE]
    for name in wrong:
        say(f"the loss curve of {name} differs by {results['largest_difference'][name]:.1e}")
    raise SystemExit(bool(wrong))


def measure(options: argparse.Namespace, run: Run | None, say: Say) -> dict[str, Any]:
    """Compare the loss curves, then time the contenders in turns."""
    size = SIZES[options.size]
    block = 1 if options.quick else size.block
    torch.manual_seed(SEED)
    problem = Problem(
        weights=GPT2(size.shape),
        size=size,
        micro_batches=options.micro_batches,
        schedule=options.schedule,
        steps=COMPARED_STEPS + block * options.rounds,
    )
    parameters = sum(parameter.numel() for parameter in problem.weights.parameters())
    least = (RANKS - 1) / (options.micro_batches + RANKS - 1)
    say(
        f"\n{options.size}: {parameters:,} parameters, {options.schedule}, "
        f"{options.micro_batches} micro-batches of {size.batch} x {size.shape.context} tokens"
    )
    names = [name for name in CONTENDERS if run or name == "torch"]
    garbage = OwnGarbageSetting()
    loops = {name: CONTENDERS[name](problem, run) for name in names}
    curves = {}
    for name in names:
        with garbage.of(name):
            curves[name] = turn(loops[name], COMPARED_STEPS).losses
        difference = largest_difference(curves[name], curves["torch"])
        say(f"  {name}: loss {curves[name][0]:.6f} to {curves[name][-1]:.6f}, at most {difference:.1e} away from torch")

    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in in_turn(names, number):
            with garbage.of(name):
                turns[name].append(turn(loops[name], block))
        say(f"  round {number + 1}: " + ", ".join(f"{name} {turns[name][-1].ms:.1f}" for name in names) + " ms")
    for loop in loops.values():
        loop.close()

    times = {name: [one.ms for one in done] for name, done in turns.items()}
    summaries = {
        name: summary(times[name], times["torch"])
        | {"bubble": middle(one.bubble for one in done), "idle": middle(one.idle for one in done)}
        for name, done in turns.items()
    }
    say("| contender | ms/step | ratio to torch | middle half | all rounds | bubble | idle | least bubble |")
    say("|---|---|---|---|---|---|---|---|")
    for name, one in summaries.items():
        shares = " | ".join("-" if share is None else f"{share:.1%}" for share in (one["bubble"], one["idle"], least))
        say(f"| {name} | {one['median_ms']:.1f} | {ratio_cells(one)} | {shares} |")
    return {
        **asdict(size),
        "size": options.size,
        "schedule": options.schedule,
        "micro_batches": options.micro_batches,
        "parameters": parameters,
        "block": block,
        "losses": curves,
        "largest_difference": {name: largest_difference(curves[name], curves["torch"]) for name in names},
        "least_bubble": least,
        "contenders": summaries,
    }


@dataclass(frozen=True)
class Turn:
    ms: float
    """A step of the slower rank."""
    bubble: float | None
    idle: float
    losses: list[float]


def turn(loop: Steps, number: int) -> Turn:
    """Let one contender do so many steps, once all ranks have come here; the same answer on every rank."""
    dist.barrier()
    began, running = time.perf_counter(), time.thread_time()
    steps = [next(loop) for _ in range(number)]
    seconds, running = time.perf_counter() - began, time.thread_time() - running
    busy = [step.busy for step in steps if step.busy is not None]
    losses = torch.tensor([step.loss for step in steps], dtype=torch.float64)
    dist.broadcast(losses, src=RANKS - 1)
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    used = torch.tensor([sum(busy), running], dtype=torch.float64)
    dist.all_reduce(used)
    bubble, idle = (1 - used / (RANKS * slowest)).tolist()
    return Turn(slowest.item() / number * 1e3, bubble if busy else None, idle, losses.tolist())


def middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


if __name__ == "__main__":
    main()
