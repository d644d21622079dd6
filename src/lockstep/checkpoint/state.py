"""What of a training goes into a checkpoint, by original names and as parts of whole tensors, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.checkpoint.disk.files import DTYPES, dtype_name
from lockstep.checkpoint.disk.format import Group, Index, OptimizerState, StoredTensor, Whole, shown
from lockstep.checkpoint.disk.load import Target, fill
from lockstep.errors import UserError
from lockstep.parallel.boxes import Replicas, whole_box
from lockstep.parallel.cut_model import CutModel
from lockstep.parallel.held import Held, hold_value
from lockstep.parallel.train_state import TrainState
from lockstep.runtime.dtensors import dtensor_like
from lockstep.step.attention import BACKENDS
from lockstep.step.rates import RateState

COPIES = ("dp", "fsdp", "cp", "tp")
"""The axes along which ranks may hold the same. Stages of a pipeline do not, but for tied weights."""
HOW_NOT_WHAT = ("lr", "fused", "foreach", "capturable", "differentiable")
"""Options of an optimizer that a checkpoint does not change: of lr there is more to say (rates.py), the others say
by which kernels the same numbers are computed, which depends on the layout and the device."""
COUNTS = ("step", "eta", "mu")
"""State of torch's optimizers that is one number for a parameter, and so is not shared out with it."""


def model_parts(state: TrainState) -> list[Held]:
    """What this rank holds of parameters and buffers, under their names in a checkpoint."""
    state.rest()
    return [replace(held, name=f"model/{held.name}") for held in state.cut.held.values() if held.stored is not None]


def optimizer_parts(state: TrainState) -> list[Held]:
    """What this rank holds of the tensors of the optimizer's state."""
    return [
        hold_value(state.cut.held[name], value, f"optimizer/{name}/{key}")
        for name, parameter in state.cut.trained
        for key, value in sorted(state.optimizer.state.get(parameter, {}).items())
        if isinstance(value, torch.Tensor)
    ]


def written_here(parts: Sequence[Held], cut: CutModel) -> list[Held]:
    """Of what several ranks hold, what this one writes: nothing is written twice, and all have about the same to do."""
    layout = cut.layout
    at = layout.coordinate(cut.rank)
    replicas = Replicas([layout.size(axis) for axis in COPIES])
    mine = []
    for held in sorted(parts, key=lambda held: (-held.bytes, held.name)):
        if not held.is_first:
            continue
        writer = replicas.writer(held.bytes, [held.is_cut_over(axis) for axis in COPIES])
        is_here = bool(held.boxes) or held.bytes == 0
        if is_here and all(wanted in (-1, at[axis]) for axis, wanted in zip(COPIES, writer, strict=True)):
            mine.append(held)
    return mine


def optimizer_state(state: TrainState) -> OptimizerState:
    """What the optimizer of this rank has besides tensors."""
    values: dict[str, dict[str, Any]] = {}
    for name, parameter in state.cut.trained:
        for key, value in state.optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                if not _is_json(value):
                    raise UserError(
                        f"the optimizer {type(state.optimizer).__name__} keeps {key} of {name} as a "
                        f"{type(value).__name__}, which a checkpoint cannot hold",
                        "use an optimizer whose state is tensors and numbers, such as AdamW",
                    )
                values.setdefault(name, {})[key] = value
    name = type(state.optimizer).__name__
    return OptimizerState(name=name, groups=optimizer_groups(state), values=values, **set_by_script(state))


def set_by_script(state: TrainState) -> dict[str, Any]:
    """What a script may change of the optimizer between steps, besides the options of its groups."""
    return {**asdict(state.rates.state()), "frozen": state.trainable.frozen}


def optimizer_groups(state: TrainState) -> list[Group]:
    """The parameter groups of this rank's optimizer: names and options."""
    names = {id(parameter): name for name, parameter in state.cut.trained}
    return [
        Group(
            parameters=[names[id(parameter)] for parameter in group["params"] if id(parameter) in names],
            options={key: value for key, value in _options(group).items() if _is_json(value)},
        )
        for group in state.optimizer.param_groups
    ]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {**{key: group[key] for key in group if key not in ("params", "param_names")}, "lr": float(group["lr"])}


def check_groups(by_rank: Sequence[Sequence[Group]]) -> None:
    """Refuse an optimizer that has other parameter groups on some ranks of a pipeline: they are saved as one."""

    def what(group: Group) -> dict[str, Any]:
        # A group that is empty on a rank, or has complex numbers there, is not updated by the same kernels.
        return {key: value for key, value in group.options.items() if key not in ("fused", "foreach")}

    options = [[what(group) for group in groups] for groups in by_rank]
    if any(one != options[0] for one in options):
        raise UserError(
            "the optimizer has other parameter groups on some ranks of the pipeline than on others",
            "make the same groups on every rank, in one order; a group may be empty",
        )


def merge_optimizers(parts: Sequence[OptimizerState], order: Sequence[str]) -> OptimizerState:
    """One optimizer's state, from those of all ranks of a pipeline: each knows its own parameters.

    They stand in the `order` of the whole model, as one device would have them.
    """
    place = {name: number for number, name in enumerate(order)}
    values = {name: state for part in parts for name, state in part.values.items()}
    groups = []
    for alike in zip(*(part.groups for part in parts), strict=True):
        names = {name for group in alike for name in group.parameters}
        groups.append(Group(parameters=sorted(names, key=place.__getitem__), options=alike[0].options))
    return parts[0].model_copy(update={"groups": groups, "values": values})


# Back -----------------------------------------------------------------------------------------------------------------


class Restoration:
    """A checkpoint that is to be put into a training. Making it refuses a checkpoint of something else."""

    def __init__(self, state: TrainState, checkpoint: Whole, with_optimizer: bool = True) -> None:
        self._state = state
        self._checkpoint = checkpoint
        index = checkpoint.index
        sources = sources_in(index, state.cut.state_dict_names, state.cut.tensor_names)
        parts = [held for held in model_parts(state) if held.name in sources]
        _check_kinds(parts, sources, index)
        self._model = [Target(sources[held.name], held.part, held.boxes) for held in parts]
        self._with_optimizer = with_optimizer and index.optimizer is not None
        self._states: dict[nn.Parameter, dict[str, Any]] = {}
        if self._with_optimizer:
            _check_optimizer(state, index)

    @torch.no_grad()
    def read(self) -> None:
        """Read everything into the training, checked.

        When it raises, the training has a bit of both and has to be restored from another checkpoint.
        """
        targets = list(self._model)
        if self._with_optimizer:
            self._states = self._optimizer(targets)
        fill(self._checkpoint, targets)

    def finish(self) -> None:
        """What is left to do when every rank has read its part."""
        state, optimizer = self._state, self._checkpoint.index.optimizer
        state.cut.gradients.restored()
        if self._with_optimizer:
            assert optimizer is not None
            _restore_groups(state, optimizer)
            state.optimizer.state.clear()
            for parameter, kept in self._states.items():
                state.optimizer.state[parameter].update(kept)

    def _optimizer(self, targets: list[Target]) -> dict[nn.Parameter, dict[str, Any]]:
        """The optimizer's state by parameter, its tensors still to be filled as `targets`."""
        state, index = self._state, self._checkpoint.index
        assert index.optimizer is not None
        parameters = dict(state.cut.trained)
        on_device = {
            id(parameter)
            for group in state.optimizer.param_groups
            if group.get("fused") or group.get("capturable")
            for parameter in group["params"]
        }
        states: dict[nn.Parameter, dict[str, Any]] = {}
        for key, stored in index.tensors.items():
            name, slot = slot_of(key)
            if name not in parameters:
                continue
            parameter, dtype = parameters[name], DTYPES[stored.dtype]
            if _is_like(parameter, slot, stored):
                held = state.cut.held[name]
                part = torch.empty_like(held.part, dtype=dtype)
                value: torch.Tensor = dtensor_like(parameter, part) if isinstance(parameter, DTensor) else part
                targets.append(Target(key, part, held.boxes))
            else:
                # A count is a number on the CPU, except where the optimizer reads it on the device.
                device = parameter.device if stored.shape or id(parameter) in on_device else torch.device("cpu")
                value = torch.empty(stored.shape, dtype=dtype, device=device)
                targets.append(Target(key, value, whole_box(stored.shape)))
            states.setdefault(parameter, {})[slot] = value
        for name, values in index.optimizer.values.items():
            if name in parameters:  # the others are those of other ranks of a pipeline
                states.setdefault(parameters[name], {}).update(values)
        return states


def slot_of(key: str) -> tuple[str, str]:
    """Parameter and key of a stored tensor of an optimizer's state; no parameter has the name of another tensor."""
    kind, _, rest = key.partition("/")
    name, _, slot = rest.rpartition("/")
    return (name, slot) if kind == "optimizer" else ("", "")


def _is_like(parameter: torch.Tensor, slot: str, stored: StoredTensor) -> bool:
    return tuple(stored.shape) == tuple(parameter.shape) and (parameter.dim() > 0 or slot not in COUNTS)


def sources_in(index: Index, state_dict_names: Mapping[str, str], tensor_names: Iterable[str]) -> dict[str, str]:
    """Under which name a checkpoint has each tensor of a whole model; a checkpoint of another model is refused.

    A file that was imported may have a tied tensor under another of its names, or under several, and none of the
    buffers that a state_dict leaves out.
    """
    stored = {key.removeprefix("model/"): one for key, one in index.tensors.items() if key.startswith("model/")}
    keys: dict[str, list[str]] = {}
    for key, name in state_dict_names.items():
        keys.setdefault(name, []).append(key)
    sources, missing, used = {}, [], set()
    for name in tensor_names:
        tied = keys.get(name, [])
        found = [key for key in dict.fromkeys([name, *tied]) if key in stored]
        used.update(found)
        if found:
            sources[f"model/{name}"] = f"model/{found[0]}"
            for other in found[1:]:
                if [c.sha256 for c in stored[other].chunks] != [c.sha256 for c in stored[found[0]].chunks]:
                    raise UserError(
                        f"{found[0]} and {other} are one parameter in the model and two in the checkpoint",
                        "build the model the checkpoint was written with",
                    )
        elif tied or index.training is not None:
            missing.append(name)
    refuse_differences("the model", missing, sorted(stored.keys() - used))
    return sources


def refuse_differences(what: str, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Refuse a checkpoint of something else, and list what differs."""
    if not missing and not unexpected:
        return
    texts = []
    if missing:
        texts.append(f"has no {_listed(missing)}")
    if unexpected:
        texts.append(f"has {_listed(unexpected)}, which {what} does not have")
    raise UserError(f"the checkpoint {', and '.join(texts)}", "build the model the checkpoint was written with")


def _listed(names: Sequence[str], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(shown(name, 300) for name in names[:most]) + more


def _check_kinds(parts: Iterable[Held], sources: Mapping[str, str], index: Index) -> None:
    differing = []
    for held in parts:
        stored, dtype = index.tensors[sources[held.name]], dtype_name(held.name, held.part.dtype)
        if (stored.dtype, tuple(stored.shape)) != (dtype, held.shape):
            there, here = _kind(stored.dtype, stored.shape), _kind(dtype, held.shape)
            name = shown(held.name.removeprefix("model/"))
            differing.append(f"{name} is {there} in the checkpoint and {here} in the model")
    if differing:
        fix = "build the model the checkpoint was written with"
        if index.training is None:
            fix += ", or import the weights in its number format (lockstep ckpt import --dtype fp32)"
        raise UserError(_listed(differing, 4), fix)


def _kind(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype} {list(shape)}"


def _check_optimizer(state: TrainState, index: Index) -> None:
    assert index.optimizer is not None
    if index.optimizer.name != type(state.optimizer).__name__:
        raise UserError(
            f"the checkpoint has the state of {shown(index.optimizer.name)}, and the optimizer now is "
            f"{type(state.optimizer).__name__}",
            "build the optimizer as before, or start anew with --resume never",
        )
    own = dict(state.cut.trained)
    here = {name for name, _ in state.cut.parameters}
    saved = [set(group.parameters) for group in index.optimizer.groups]
    current = [set(group.parameters) for group in optimizer_groups(state)]
    if len(current) != len(saved) or any(one & here != now for one, now in zip(saved, current, strict=True)):
        before, now = set().union(*saved) & here, own.keys()
        texts = [f"{name} was not trained and is now" for name in sorted(now - before)]
        texts += [f"{name} was trained and is not now" for name in sorted(before - now)]
        cause = "the optimizer's parameter groups are not those of the checkpoint"
        raise UserError(
            f"{cause} ({_listed(texts, 4)})" if texts else cause,
            "build the optimizer as before, or start anew with --resume never",
        )
    strange = sorted({name for key in index.tensors if (name := slot_of(key)[0])} - set().union(*saved))
    refuse_differences("the optimizer", [], strange)


def _restore_groups(state: TrainState, optimizer: OptimizerState) -> None:
    for group, saved in zip(state.optimizer.param_groups, optimizer.groups, strict=True):
        for key, value in saved.options.items():
            if key in HOW_NOT_WHAT:
                continue
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    rates = optimizer.rates or [None] * len(optimizer.groups)  # none are in older files
    state.rates.restore(RateState(rates, optimizer.schedulers))
    state.trainable.restore(optimizer.frozen)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def restore_progress(state: TrainState, index: Index) -> None:
    """Let a training go on at the step of a checkpoint; imported weights begin at 0."""
    state.steps_done = index.step
    training = index.training
    if training is None:
        return
    if state.measures_attention and training.attention:  # measured once, when the run began
        state.use_attention(training.attention if training.attention in BACKENDS else None)
    if state.loss_scale and training.loss_scale:
        state.loss_scale.restore(training.loss_scale)
    if training.recent_losses is not None:
        state.spikes.restore(training.recent_losses)
    state.steps_skipped = training.skipped
    state.seed_between_steps()
