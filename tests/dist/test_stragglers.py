"""Where the time of real steps goes: a rank that is slowed down is named with the reason, its victims are not."""

from __future__ import annotations

import math
import threading
import time
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lockstep.layout import Layout
from lockstep.observe.clock import StepClock
from tests.events import Event, read_events
from tests.marks import others_slow
from tests.parity.problems import Batch, RaggedTexts, Stream, TinyGPT, adamw, join, text_loss
from tests.ranks import Job, RankPool

LATE = 0.2
STEPS = 12


class SlowTexts(RaggedTexts):
    def __init__(self, seconds: float) -> None:
        super().__init__(size=48)  # so that all steps are full
        self.seconds = seconds

    def __getitem__(self, index: int) -> Batch:
        time.sleep(self.seconds / 4)  # a rank of two reads four samples of a step
        return super().__getitem__(index)


class Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class SlowBackward(TinyGPT):
    """A model in whose backward pass one rank takes a nap, before its last gradients are there."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        return Nap.apply(logits, self.seconds)  # type: ignore[no-any-return,no-untyped-call]


def train(job: Job, layout: str, slow: str, **options: Any) -> list[Event]:
    """Some steps in which rank 1 is slow, or nobody; what the run tells of it."""
    late = {"compute": 0.0, "input": 0.0}
    if slow == "nobody":
        late["compute"] = job.patient(LATE) / 2
    elif job.rank == 1:
        late[slow] = job.patient(LATE)
    unpatched = dist.Work.wait
    with join(job, layout, **options) as run:
        engine = run.setup(lambda: SlowBackward(late["compute"]), text_loss, optimizer=adamw)
        texts = SlowTexts(late["input"])
        for batch in run.loader(texts, 4 * job.world_size, micro_batch=4, steps=STEPS, workers=0):
            engine.step(batch)
    assert dist.Work.wait is unpatched
    return list(read_events(run.folder.events))


def of_kind(kind: str, events: list[Event]) -> list[Event]:
    return [event for event in events if event["kind"] == kind]


@pytest.mark.parametrize(
    ("layout", "slow"),
    others_slow(
        [("dp=2", "compute"), ("dp=2", "input"), ("fsdp=2", "compute"), ("fsdp=2", "input"), ("dp=4", "compute")],
        [("dp=2", "input"), ("fsdp=2", "compute")],
    ),
)
def test_a_rank_that_is_slow_is_named_with_the_reason(ranks: RankPool, layout: str, slow: str) -> None:
    events = ranks.run(train, Layout.parse(layout).world_size, layout, slow)[0]
    for event in of_kind("ranks", events):
        assert event[slow][1] >= LATE, "counted where it was spent"
    (straggler,) = of_kind("straggler", events)
    assert (straggler["rank"], straggler["cause"]) == (1, slow)
    (warning,) = [event for event in of_kind("message", events) if event["level"] == "warning"]
    assert warning["text"] == straggler["text"]


def train_without_hurry(job: Job) -> list[Event]:
    with mock.patch("lockstep.observe.clock.SECONDS_BETWEEN_REPORTS", math.inf):
        return train(job, "dp=2", "nobody")


def test_nobody_is_named_when_all_are_alike_and_every_step_but_the_first_is_counted_once(ranks: RankPool) -> None:
    events = ranks.run(train_without_hurry, 2)[0]
    assert of_kind("straggler", events) == []
    told = of_kind("ranks", events)
    assert [event["step"] for event in told] == [7, STEPS], "soon after the start, and at the end"
    assert [event["steps"] for event in told] == [6, STEPS - 7]
    steps = {event["step"]: event["seconds"] for event in of_kind("step", events)}
    for (_, before), (event, after) in pairwise([({}, 1), *((event, event["step"]) for event in told)]):
        assert event["seconds"] == pytest.approx(
            sum(steps[s] for s in range(before + 1, after + 1)) / event["steps"], rel=0.2
        )
        for parts in zip(event["input"], event["compute"], event["wait"], strict=True):
            assert sum(parts) == pytest.approx(event["seconds"], rel=0.2)
        assert min(event["memory"]) > 1 << 20


def read_to_an_end_nobody_knew(job: Job) -> list[Event]:
    with join(job, "single") as run:
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
        for batch in run.loader(Stream(), 8, micro_batch=4):
            engine.step(batch)
            if engine.steps_done == 3:
                run.evaluate(SlowTexts(4 / 48), micro_batch=48, workers=0)
            if engine.steps_done == 4:
                run.save(wait=True)
    return list(read_events(run.folder.events))


def test_validation_and_saving_are_nobodys_time_and_a_stream_tells_at_its_end(ranks: RankPool) -> None:
    """An evaluation sleeps for a second, between two of the steps; events may come a bit late."""
    events = ranks.run(read_to_an_end_nobody_knew, 1)[0]
    (event,) = of_kind("ranks", events)
    assert (event["step"], event["steps"]) == (5, 4)
    times = {step["step"]: step["time"] for step in of_kind("step", events)}
    assert event["steps"] * event["seconds"] < times[5] - times[1] - 0.5


def count_waits(job: Job) -> dict[str, float]:
    """What a clock has counted of a collective that the other rank comes to late, by who waited."""
    job.init_process_group()
    clock = StepClock(torch.device("cpu"))
    clock.listen()

    def meet(_: Any = None) -> None:
        time.sleep(job.patient(LATE) if job.rank == 1 else 0.0)
        dist.all_reduce(torch.ones(1))

    def in_backward() -> None:
        leaf = torch.ones(1, requires_grad=True)
        leaf.register_hook(meet)  # type: ignore[no-untyped-call]
        leaf.sum().backward()  # type: ignore[no-untyped-call]

    def beside() -> None:
        thread = threading.Thread(target=meet)
        thread.start()
        thread.join()

    counted = {}
    for name, call in {"main": meet, "backward": in_backward, "beside": beside}.items():
        dist.barrier()  # nobody is late but by the nap
        clock.start()
        call()
        clock.step_done(samples=4)
        counted[name] = clock.take(last=True).wait
    clock.restore()
    return counted


def test_the_training_and_its_backward_count_and_threads_beside_it_do_not(ranks: RankPool) -> None:
    victim, slow = ranks.run(count_waits, 2)
    for where in ("main", "backward"):
        assert victim[where] > slow[where], "the one that naps has waited less"
        assert victim[where] > 0.5 * LATE
    assert victim["beside"] == slow["beside"] == 0.0
