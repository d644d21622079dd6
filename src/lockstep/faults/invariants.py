"""What has to be true after every step (replicas are equal ...): checked now and then, and before every save.

Ranks that hold the same part of a parameter hold the same bits of it, and of its gradient once gradients were
exchanged; and the parameters of the model are those that are trained and stored. A digest of every tensor is computed
where the tensor is, one number a group of equal ranks is exchanged, and names only where those differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from lockstep.errors import InvariantError
from lockstep.follow.values import is_fake
from lockstep.parallel.cut_model import CutModel
from lockstep.parallel.held import Held, hold_value
from lockstep.parallel.train_state import TrainState
from lockstep.runtime.comm import Comm
from lockstep.runtime.tensor_digest import PRIME, digests_of

BUILD_IT_WHOLE = "build the whole model in build_model, and change values in place"
LIKELY = {
    "value": "something changed it on that rank alone (code under `if rank == 0`, a hook, its own random numbers, "
    "faulty memory); change weights on all ranks alike, and if nothing in the script does, leave that machine out",
    "gradient": "gradients were not exchanged, or one was changed on that rank afterwards (a hook, a backward of the "
    "script's own); leave them to engine.step",
}


class Invariants:
    """The checks of one training. All ranks call everything here together."""

    def __init__(self, state: TrainState, comm: Comm, every: int) -> None:
        self._state = state
        self._comm = comm
        self._every = every
        self._first = True
        with state.hidden():
            self._parameters = parameters_of(state.cut)
        self.checked_step = -1
        """The last step whose values were compared."""

    def check_gradients(self, step: int) -> None:
        """After gradients were exchanged and before the update: ranks with the same part have the same gradient."""
        if self._is_due(step) and self._comm.world_size > 1:
            cut = self._state.cut
            replicas = [cut.held[name].replicas for name, _ in cut.trained]
            gradients = [parameter.grad for _, parameter in cut.trained]
            self._compare("gradient", step, [name for name, _ in cut.trained], replicas, gradients)

    def check_values(self, step: int) -> None:
        """After a step: ranks with the same part have the same value, and the model is the one that is trained."""
        if self._is_due(step):
            self._first = False
            self._compare_values(step, with_optimizer=False)

    def check_all(self, step: int) -> None:
        """Before a save and at the end: the same of the optimizer's state too, so that no checkpoint mixes ranks."""
        self._compare_values(step, with_optimizer=True)

    def _compare_values(self, step: int, with_optimizer: bool) -> None:
        cut = self._state.cut
        self._state.rest()
        with self._state.hidden():
            now = parameters_of(cut)
        parts: list[Held] = []
        if self._comm.world_size > 1:
            # At zero1 the optimizer has rows of what the model computes with, which is the same on all data ranks.
            values = [(name, now.get(name, parameter)) for name, parameter in cut.parameters]
            parts = [hold_value(cut.held[name], tensor) for name, tensor in [*values, *cut.buffers]]
            if with_optimizer:
                parts += _optimizer_parts(self._state)
        facts = [held.name for held in parts], [held.replicas for held in parts], [held.stored for held in parts]
        self._compare("value", step, *facts, _changed_parameters(self._parameters, now))
        self.checked_step = step

    def _is_due(self, step: int) -> bool:
        return self._every > 0 and (self._first or step % self._every == 0)

    def _compare(
        self,
        what: Literal["value", "gradient"],
        step: int,
        names: Sequence[str],
        replicas: Sequence[str],
        tensors: Sequence[torch.Tensor | None],
        problem: str | None = None,
    ) -> None:
        """Compare tensors between the ranks that have the same text in `replicas` for them."""
        digests = digests_of(tensors)
        totals: dict[str, int] = {}
        for held_by, digest in zip(replicas, digests, strict=True):
            totals[held_by] = (totals.get(held_by, 0) * PRIME + digest) % (1 << 63)
        everybody = self._comm.gather([problem, totals])
        for rank, (told, _) in enumerate(everybody):
            if told is not None:
                on = f" on rank {rank}" if self._comm.world_size > 1 else ""
                raise InvariantError(f"{told}, as seen after step {step}{on}: {BUILD_IT_WHOLE}")
        if all(len(different) == 1 for different in _by_key(everybody).values()):
            return
        rows = zip(names, replicas, digests, strict=True)
        first = _first_difference(self._comm.gather([list(row) for row in rows]))
        raise InvariantError(f"{first.format(what=what)} after step {step}: {LIKELY[what]}")


def _optimizer_parts(state: TrainState) -> list[Held]:
    """The tensors of the optimizer's state, held like their parameters where they are cut like them."""
    return [
        hold_value(state.cut.held[name], value, f"the optimizer's {key} of {name}")
        for name, parameter in state.cut.parameters
        for key, value in sorted(state.optimizer.state.get(parameter, {}).items())
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
    for rank, told in enumerate(rows):
        for name, held_by, digest in told:
            found.setdefault((name, held_by), {})[rank] = digest
    for (name, _), digests in found.items():
        usual = Counter(digests.values()).most_common(1)[0][0]  # of equally many, that of the lowest rank
        for rank, digest in digests.items():
            if digest != usual:
                other = next(one for one, same in digests.items() if same == usual)
                return f"rank {rank} holds another {{what}} of {name} than rank {other}"
    return "some ranks hold other parameters than others, in {what},"


def parameters_of(cut: CutModel) -> dict[str, nn.Parameter]:
    """Every name in the model and the parameter it stands for; of stages that share one, as the first has it."""
    found: dict[str, nn.Parameter] = {}
    for model in cut.models:
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
