"""What has to be true after every step (replicas are equal ...): checked now and then, and before every save.

Ranks that hold the same piece of a parameter hold the same bits of it, and of its gradient once gradients were
exchanged; and the parameters of the model are those that are trained and stored. A digest of every tensor is computed
where the tensor is, one number a group of equal ranks is exchanged, and names only where those differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.errors import InvariantError
from lockstep.follow.values import is_fake
from lockstep.runtime.comm import Comm
from lockstep.runtime.tensor_digest import PRIME, digests_of

if TYPE_CHECKING:
    from lockstep.engine import Engine

BUILD_IT_WHOLE = "build the whole model in build_model, and change values in place"
LIKELY = {
    "value": "something changed it on that rank alone (code under `if rank == 0`, a hook, its own random numbers, "
    "faulty memory); change weights on all ranks alike, and if nothing in the script does, leave that machine out",
    "gradient": "gradients were not exchanged, or one was changed on that rank afterwards (a hook, a backward of the "
    "script's own); leave them to engine.step",
}


class Invariants:
    """The checks of one engine. All ranks call everything here together."""

    def __init__(self, engine: Engine, comm: Comm, every: int) -> None:
        self._engine = engine
        self._comm = comm
        self._every = every
        self._first = True
        self._parameters = parameters_of(engine)
        self.checked_step = -1
        """The last step whose values were compared."""

    def check_gradients(self) -> None:
        """After gradients were exchanged and before the update: ranks with the same piece have the same gradient."""
        step = self._engine.steps_done + 1
        if self._is_due(step) and self._comm.world_size > 1:
            trained = self._engine.trained
            pieces = [Piece(name, whose_piece(self._engine, name, one), one.grad) for name, one in trained]
            self._compare("gradient", step, pieces)

    def check_values(self) -> None:
        """After a step: ranks with the same piece have the same value, and the model is the one that is trained."""
        if self._is_due(self._engine.steps_done):
            self._first = False
            self._compare_values(with_optimizer=False)

    def check_all(self) -> None:
        """Before a save and at the end: the same of the optimizer's state too, so that no checkpoint mixes ranks."""
        self._compare_values(with_optimizer=True)

    def _compare_values(self, with_optimizer: bool) -> None:
        engine = self._engine
        engine.rest()
        now = parameters_of(engine)
        pieces = []
        if self._comm.world_size > 1:
            # At zero1 the optimizer has rows of what the model computes with, which is the same on all data ranks.
            values = [(name, now.get(name, parameter)) for name, parameter in engine.stored]
            named = [*values, *engine.buffers]
            pieces = [Piece(name, whose_piece(engine, name, tensor), tensor) for name, tensor in named]
            if with_optimizer:
                pieces += _optimizer_pieces(engine)
        self._compare("value", engine.steps_done, pieces, _changed_parameters(self._parameters, now))
        self.checked_step = engine.steps_done

    def _is_due(self, step: int) -> bool:
        return self._every > 0 and (self._first or step % self._every == 0)

    def _compare(
        self, what: Literal["value", "gradient"], step: int, pieces: Sequence[Piece], problem: str | None = None
    ) -> None:
        digests = digests_of(piece.tensor for piece in pieces)
        totals: dict[str, int] = {}
        for piece, digest in zip(pieces, digests, strict=True):
            totals[piece.held_by] = (totals.get(piece.held_by, 0) * PRIME + digest) % (1 << 63)
        everybody = self._comm.gather([problem, totals])
        for rank, (told, _) in enumerate(everybody):
            if told is not None:
                on = f" on rank {rank}" if self._comm.world_size > 1 else ""
                raise InvariantError(f"{told}, as seen after step {step}{on}: {BUILD_IT_WHOLE}")
        if all(len(different) == 1 for different in _by_key(everybody).values()):
            return
        rows = [[piece.name, piece.held_by, digest] for piece, digest in zip(pieces, digests, strict=True)]
        first = _first_difference(self._comm.gather(rows))
        raise InvariantError(f"{first.format(what=what)} after step {step}: {LIKELY[what]}")


class Piece(NamedTuple):
    """What this rank has of a tensor; ranks that have the same of it are `held_by` the same text."""

    name: str
    held_by: str
    tensor: torch.Tensor | None


def _optimizer_pieces(engine: Engine) -> list[Piece]:
    """The tensors of the optimizer's state, held like their parameters where they are cut like them."""
    return [
        Piece(f"the optimizer's {key} of {name}", whose_piece(engine, name, value), value)
        for name, parameter in engine.stored
        for key, value in sorted(engine.optimizer.state.get(parameter, {}).items())
        if isinstance(value, torch.Tensor)
    ]


def _by_key(everybody: Sequence[tuple[Any, dict[str, int]]]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for _, totals in everybody:
        for held_by, total in totals.items():
            found.setdefault(held_by, set()).add(total)
    return found


def _first_difference(rows: Sequence[Sequence[tuple[str, str, int]]]) -> str:
    """Which rank holds something else than the others: of several it is the one that differs from most."""
    found: dict[tuple[str, str], dict[int, int]] = {}
    for rank, pieces in enumerate(rows):
        for name, held_by, digest in pieces:
            found.setdefault((name, held_by), {})[rank] = digest
    for (name, _), digests in found.items():
        usual = Counter(digests.values()).most_common(1)[0][0]  # of equally many, that of the lowest rank
        for rank, digest in digests.items():
            if digest != usual:
                other = next(one for one, same in digests.items() if same == usual)
                return f"rank {rank} holds another {{what}} of {name} than rank {other}"
    return "some ranks hold other parameters than others, in {what},"


def whose_piece(engine: Engine, name: str, tensor: torch.Tensor) -> str:
    """Names the ranks that hold the same piece of a tensor: all that have this text for it."""
    at = engine.layout.coordinate(engine.rank)
    data = tensor.data if isinstance(tensor, nn.Parameter) else tensor
    axes = data.device_mesh.mesh_dim_names or () if isinstance(data, DTensor) else ()
    cut = [axis for axis, is_cut in (("fsdp", "fsdp" in axes), ("tp", name in engine.slices)) if is_cut]
    places = [f"{axis} {at[axis]}" for axis in cut]
    if engine.pipeline is not None:
        places.append(f"pp {sorted(set(engine.places_with(name)))}")
    return ", ".join(places)


def parameters_of(engine: Engine) -> dict[str, nn.Parameter]:
    """Every name in the model and the parameter it stands for; of stages that share one, as the first has it."""
    found: dict[str, nn.Parameter] = {}
    with engine.hidden():
        for model in engine.models:
            for name, parameter in model.named_parameters(remove_duplicate=False):
                if not is_fake(parameter):
                    found.setdefault(name, parameter)
    return found


def _changed_parameters(before: dict[str, nn.Parameter], now: dict[str, nn.Parameter]) -> str | None:
    """What happened to the model's parameters since it was set up, in a sentence; None: nothing."""
    for name, parameter in now.items():
        if name not in before:
            return f"the parameter {name} was added to the model, and is neither trained nor stored"
        if parameter is not before[name]:
            others = [other for other, one in before.items() if one is parameter]
            if others:
                return f"the parameter {name} was tied to {others[0]}, and its own value is trained no more"
            shared = [other for other in before if other != name and before[other] is before[name]]
            what = f"was untied from {shared[0]}" if shared else "was replaced by another one"
            return f"the parameter {name} {what}, which is neither trained nor stored"
    for name in before:
        if name not in now:
            return f"the parameter {name} was taken out of the model"
    return None
