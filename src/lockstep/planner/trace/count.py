"""Memory counted, not estimated: the real model is cut by the library's own functions and steps without data.

The world is as large as the job's and not there: a process group that answers at once (torch's `fake`), and tensors
that have a shape and no storage (`FakeTensorMode`). What autograd keeps, what `fully_shard` gathers and what the
optimizer holds are therefore exactly those of Lockstep; the kernels are those of a CPU (norms and attention apart), and
neither the allocator of a GPU nor the workspaces of its libraries are there. It runs in a process of its own, as the
group and the mode would change all that comes after.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from lockstep.config.schema import NumericsConfig
from lockstep.errors import UserError
from lockstep.planner.cost.estimate import Memory
from lockstep.planner.cost.job import Job
from lockstep.planner.cost.stack import LOCKSTEP

if TYPE_CHECKING:
    from lockstep.planner.trace.dry_run import TracedTraining


@dataclass(frozen=True)
class Collectives:
    """What one rank sends of a kind over an axis, in one step."""

    kind: str
    axis: str
    count: int
    bytes: int
    """Of the whole tensors: what an all-gather has in the end, and what a reduce-scatter begins with."""


@dataclass(frozen=True)
class Traced:
    """The fullest moment of a step on one rank, in bytes, and how it was found."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """All that the forward and backward make and that is none of the others: logits, and gradients of activations."""
    communication: int
    """Gathered weights, and what is sent and received."""
    buffers: int
    moment: str
    """When it was: forward, backward or optimizer."""
    rank: int
    stage: int
    collectives: tuple[Collectives, ...]
    micro_batches: int
    """How many of the step were run: memory is the same from the second on."""
    seconds: float
    process_bytes: int
    """What the process that found out needed itself."""

    @property
    def total(self) -> int:
        """All of it."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.communication + self.buffers


@dataclass(frozen=True)
class Difference:
    """One term by the formulas and by the trace."""

    term: str
    formula: float
    traced: float

    @property
    def share(self) -> float | None:
        """How far the formula is off; None where nothing was traced."""
        return self.formula / self.traced - 1 if self.traced else None


def trace_memory(
    job: Job, build: Callable[[], TracedTraining] | None = None, numerics: NumericsConfig | None = None
) -> Traced:
    """Cut the real model for this job and run one step of it without data; seconds, whatever the size.

    `build` makes the model, its loss and its samples, in the process that traces; without it the model is a transformer
    of the job's own numbers. `numerics` are the config's, as a run would have them.
    """
    refuse_untraceable(job, build is not None)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(there, job, build, numerics or NumericsConfig()))
    child.start()
    there.close()
    try:
        answer = json.loads(here.recv())
    except EOFError:
        child.join()
        raise RuntimeError(f"the process that traces has ended with {child.exitcode}") from None
    finally:
        here.close()
        if child.is_alive():
            child.join()
    if "refused" in answer:
        raise UserError(*answer["refused"])
    if "failed" in answer:
        raise RuntimeError(answer["failed"])
    answer["collectives"] = tuple(Collectives(**fields) for fields in answer["collectives"])
    return Traced(**answer)


def refuse_untraceable(job: Job, has_module: bool) -> None:
    """Say by name what cannot be traced."""
    can = "what can be traced is dp, fsdp and tp in any combination, in fp32, bf16 or fp16, with or without recompute"
    for is_asked, what in (
        (job.layout.pp > 1, f"pp={job.layout.pp}: a pipeline waits for what other ranks send, and there are none"),
        (job.layout.cp > 1, f"cp={job.layout.cp}: its attention is one of Lockstep's own kernels"),
        (job.recompute == "selective", "recompute = selective, which Lockstep does not have"),
        (job.precision in ("fp8", "fp4"), f"precision = {job.precision}, which Lockstep does not have"),
        (job.compiled, "compiled blocks, whose memory only the compiler knows"),
        (job.stack is not LOCKSTEP, f"the stack {job.stack.name}, whose wrapping is not here"),
        (job.layout.fsdp > 1 and job.zero == 0, "zero = 0 with an fsdp axis, which shards at least the optimizer"),
    ):
        if is_asked:
            raise UserError(f"the trace cannot do {what}", f"leave --trace out for the formulas alone; {can}")
    if job.model.shape is None and not has_module:
        raise UserError(f"{job.model.name} is known by its parts alone", "name a recipe or module:function to trace it")


def cross_check(traced: Traced, memories: Sequence[Memory]) -> list[Difference]:
    """The formulas beside the trace, term by term, for the stage that was traced.

    Slack is left out: a trace has no allocator. Logits stand with the activations and buffers with the parameters.
    Terms of a formula may come to more than its total: gradients come as activations go.
    """
    memory = next(memory for memory in memories if memory.stage == traced.stage)
    terms = [
        Difference("parameters", memory.parameters, traced.parameters + traced.buffers),
        Difference("gradients", memory.gradients, traced.gradients),
        Difference("optimizer", memory.optimizer, traced.optimizer),
        Difference("activations", memory.activations + memory.logits, traced.activations),
        Difference("communication", memory.communication, traced.communication),
    ]
    return [*terms, Difference("total", memory.total - memory.slack, traced.total)]


def cross_check_text(differences: Sequence[Difference]) -> str:
    """A table for people."""
    lines = [f"{'':14}{'formula':>12}{'traced':>12}{'off by':>9}"]
    for difference in differences:
        share = "" if difference.share is None else f"{100 * difference.share:+.1f} %"
        lines.append(
            f"{difference.term:14}{difference.formula / 1e9:9.3f} GB{difference.traced / 1e9:9.3f} GB{share:>9}"
        )
    return "\n".join(lines)


def _answer(pipe: Connection, job: Job, build: Callable[[], TracedTraining] | None, numerics: NumericsConfig) -> None:
    """In a process of its own: trace, and say what came of it."""
    began = time.monotonic()
    try:
        from lockstep.planner.trace.dry_run import dry_run, training_of_shape

        if build is None:
            assert job.model.shape is not None
            training = training_of_shape(job.model.shape, job.model.sequence)
        else:
            training = build()
        found = dry_run(job, training, numerics)
        answer: dict[str, Any] = {**found, "seconds": time.monotonic() - began}
    except UserError as error:
        answer = {"refused": [error.cause, error.fix]}
    except Exception as error:
        import traceback

        answer = {"failed": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
    pipe.send(json.dumps(answer))
    pipe.close()
