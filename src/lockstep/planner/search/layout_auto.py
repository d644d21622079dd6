"""`--layout auto`: a sensible layout for a model and a machine, and why."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.text.units import how_many

STATE_BYTES = 16
"""Of one parameter: weight, gradient and Adam's two averages, in fp32."""

ROOM = 0.6
"""The share of a rank's memory that these may take; the rest is for activations and what is gathered."""


@dataclass(frozen=True)
class Facts:
    """What a choice is made from. `heads` is what a tp axis has to divide, 0 where nothing can be cut by it."""

    parameters: int
    heads: int
    sequence: int
    """How long sequences are, 0 where there are none to cut."""
    global_batch: int
    memory: int
    """Bytes of a rank."""


def choose_layout(facts: Facts, world_size: int) -> tuple[Layout, str]:
    """The layout for so many processes, and the reason in one sentence.

    Replicas exchange the least, so they come first. What does not fit is sharded. Ranks that would get no sample
    compute the samples of others together with them.
    """
    if world_size == 1:
        return Layout(), "there is one process"
    needed, room = STATE_BYTES * facts.parameters, ROOM * facts.memory
    data = max(size for size in range(1, world_size + 1) if world_size % size == 0 and size <= facts.global_batch)
    team = world_size // data
    tp, cp, why = 1, 1, ""
    if team > 1:
        few = f"a step has {how_many(facts.global_batch, 'sample')} for {world_size} ranks"
        if facts.heads and facts.heads % team == 0:
            tp, why = team, f"{few}, and tp={team} divides its {facts.heads} heads, so that {team} ranks share a sample"
        elif facts.sequence and facts.sequence % (2 * team) == 0:
            cp, why = team, f"{few}, so that {team} ranks share the {facts.sequence} tokens of a sequence"
        else:
            data, why = world_size, f"{few}, and neither its heads nor its sequences can be shared by {team}"
    state = f"weights, gradients and optimizer state take {_size(needed / tp)}"
    if needed / tp <= room:
        layout = Layout(dp=data, cp=cp, tp=tp)
        fits = f"{state}, and a rank has {_size(facts.memory)}"
        return layout, why or f"{fits}, so that every rank can hold all of them, and replicas exchange the least"
    if needed / (tp * data) <= room:
        reason = f"{state}, which is too much for the {_size(facts.memory)} of a rank, and 1/{data} of it is not"
        return Layout(fsdp=data, cp=cp, tp=tp), f"{why}; {reason}" if why else reason
    least = -(-needed // int(room))
    raise UserError(
        f"{state}, and {world_size} ranks of {_size(facts.memory)} cannot hold that beside activations",
        f"use at least {least} ranks like these, or a smaller model",
    )


def _size(count: float) -> str:
    units = ["TB", "GB", "MB", "kB", "B"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        units.pop()
    return f"{count:.3g} {units[-1]}"
