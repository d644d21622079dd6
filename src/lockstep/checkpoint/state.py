"""What of an engine goes into a checkpoint, by original names and as parts of whole tensors, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.checkpoint.disk.boxes import Piece, Replicas, Segment, narrowed, pieces_of, shares, whole_piece
from lockstep.checkpoint.disk.files import DTYPES, dtype_name
from lockstep.checkpoint.disk.format import Group, Index, OptimizerState, StoredTensor, Whole, shown
from lockstep.checkpoint.disk.load import Target, fill
from lockstep.errors import UserError
from lockstep.runtime.dtensors import like, local_part
from lockstep.step.attention import BACKENDS
from lockstep.step.rates import RateState

if TYPE_CHECKING:
    from lockstep.engine import Engine

COPIES = ("dp", "fsdp", "cp", "tp")
"""The axes along which ranks may hold the same. Stages of a pipeline do not, but for tied weights."""
HOW_NOT_WHAT = ("lr", "fused", "foreach", "capturable", "differentiable")
"""Options of an optimizer that a checkpoint does not change: of lr there is more to say (rates.py), the others say
by which kernels the same numbers are computed, which depends on the layout and the device."""
COUNTS = ("step", "eta", "mu")
"""State of torch's optimizers that is one number for a parameter, and so is not shared out with it."""


@dataclass(frozen=True)
class Holding:
    """What this rank has of one tensor of the whole model or its optimizer."""

    name: str
    part: torch.Tensor
    shape: tuple[int, ...]
    pieces: list[Piece]
    cut: tuple[bool, ...]
    """Whether ranks along each of COPIES hold different parts of it."""
    first_here: bool
    """Whether of the stages that have it this one is the first."""

    @property
    def bytes(self) -> int:
        """The size of the whole."""
        return self.part.element_size() * torch.Size(self.shape).numel()


def model_holdings(engine: Engine) -> list[Holding]:
    """The parameters and buffers that this rank has a part of."""
    engine.rest()
    return [
        *(_of_parameter(engine, name, parameter, f"model/{name}", parameter) for name, parameter in engine.stored),
        *(_of_whole(engine, name, f"model/{name}", buffer) for name, buffer in engine.buffers),
    ]


def optimizer_holdings(engine: Engine) -> list[Holding]:
    """The tensors of the optimizer's state that this rank has a part of."""
    found = []
    for name, parameter in trained(engine):
        for key, value in sorted(engine.optimizer.state.get(parameter, {}).items()):
            if isinstance(value, DTensor):
                found.append(_of_parameter(engine, name, parameter, f"optimizer/{name}/{key}", value))
            elif isinstance(value, torch.Tensor):
                found.append(_of_whole(engine, name, f"optimizer/{name}/{key}", value))
    return found


def written_here(holdings: Sequence[Holding], engine: Engine) -> list[Holding]:
    """Of what several ranks hold, what this one writes: nothing is written twice, and all have about the same to do."""
    layout = engine.layout
    at = layout.coordinate(engine.rank)
    replicas = Replicas([layout.size(axis) for axis in COPIES])
    mine = []
    for holding in sorted(holdings, key=lambda one: (-one.bytes, one.name)):
        if not holding.first_here:
            continue
        writer = replicas.writer(holding.bytes, holding.cut)
        is_here = bool(holding.pieces) or holding.bytes == 0
        if is_here and all(wanted in (-1, at[axis]) for axis, wanted in zip(COPIES, writer, strict=True)):
            mine.append(holding)
    return mine


def optimizer_state(engine: Engine) -> OptimizerState:
    """What the optimizer of this rank has besides tensors."""
    values: dict[str, dict[str, Any]] = {}
    for name, parameter in trained(engine):
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                if not _is_json(value):
                    raise UserError(
                        f"the optimizer {type(engine.optimizer).__name__} keeps {key} of {name} as a "
                        f"{type(value).__name__}, which a checkpoint cannot hold",
                        "use an optimizer whose state is tensors and numbers, such as AdamW",
                    )
                values.setdefault(name, {})[key] = value
    name = type(engine.optimizer).__name__
    return OptimizerState(name=name, groups=optimizer_groups(engine), values=values, **set_by_script(engine))


def set_by_script(engine: Engine) -> dict[str, Any]:
    """What a script may change of the optimizer between steps, besides the options of its groups."""
    return {**asdict(engine.rates.state()), "frozen": engine.trainable.frozen}


def optimizer_groups(engine: Engine) -> list[Group]:
    """The parameter groups of this rank's optimizer: names and options."""
    names = {id(parameter): name for name, parameter in trained(engine)}
    return [
        Group(
            parameters=[names[id(parameter)] for parameter in group["params"] if id(parameter) in names],
            options={key: value for key, value in _options(group).items() if _is_json(value)},
        )
        for group in engine.optimizer.param_groups
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
    """A checkpoint that is to be put into an engine. Making it refuses a checkpoint of something else."""

    def __init__(self, engine: Engine, checkpoint: Whole, with_optimizer: bool = True) -> None:
        self._engine = engine
        self._checkpoint = checkpoint
        index = checkpoint.index
        sources = sources_in(index, engine.state_dict_names, engine.tensor_names)
        holdings = [holding for holding in model_holdings(engine) if holding.name in sources]
        _check_kinds(holdings, sources, index)
        self._model = [Target(sources[one.name], one.part, one.pieces) for one in holdings]
        self._with_optimizer = with_optimizer and index.optimizer is not None
        self._states: dict[nn.Parameter, dict[str, Any]] = {}
        if self._with_optimizer:
            _check_optimizer(engine, index)

    @torch.no_grad()
    def read(self) -> None:
        """Read everything into the engine, checked.

        When it raises, the engine has a bit of both and has to be restored from another checkpoint.
        """
        targets = list(self._model)
        if self._with_optimizer:
            self._states = self._optimizer(targets)
        fill(self._checkpoint, targets)

    def finish(self) -> None:
        """What is left to do when every rank has read its part."""
        engine, optimizer = self._engine, self._checkpoint.index.optimizer
        engine.restored()
        if self._with_optimizer:
            assert optimizer is not None
            _restore_groups(engine, optimizer)
            engine.optimizer.state.clear()
            for parameter, state in self._states.items():
                engine.optimizer.state[parameter].update(state)

    def _optimizer(self, targets: list[Target]) -> dict[nn.Parameter, dict[str, Any]]:
        """The optimizer's state by parameter, its tensors still to be filled as `targets`."""
        engine, index = self._engine, self._checkpoint.index
        assert index.optimizer is not None
        parameters = dict(trained(engine))
        on_device = {
            id(parameter)
            for group in engine.optimizer.param_groups
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
                holding = _of_parameter(engine, name, parameter, key, parameter)
                part = torch.empty_like(holding.part, dtype=dtype)
                value: torch.Tensor = like(parameter, part) if isinstance(parameter, DTensor) else part
                targets.append(Target(key, part, holding.pieces))
            else:
                # A count is a number on the CPU, except where the optimizer reads it on the device.
                device = parameter.device if stored.shape or id(parameter) in on_device else torch.device("cpu")
                value = torch.empty(stored.shape, dtype=dtype, device=device)
                targets.append(Target(key, value, whole_piece(stored.shape)))
            states.setdefault(parameter, {})[slot] = value
        for name, values in index.optimizer.values.items():
            if name in parameters:  # the others are those of other ranks of a pipeline
                states.setdefault(parameters[name], {}).update(values)
        return states


def restore_progress(engine: Engine, index: Index) -> None:
    """Let an engine go on at the step of a checkpoint; imported weights begin at 0."""
    engine.steps_done = index.step
    training = index.training
    if training is None:
        return
    if engine.measures_attention and training.attention:  # measured once, when the run began
        engine.use_attention(training.attention if training.attention in BACKENDS else None)
    if engine.loss_scale and training.loss_scale:
        engine.loss_scale.restore(training.loss_scale)
    if training.recent_losses is not None:
        engine.recovery.spikes.restore(training.recent_losses)
    engine.steps_skipped = training.skipped
    engine.seed_between_steps()


def trained(engine: Engine) -> list[tuple[str, nn.Parameter]]:
    """The parameters of this rank that the optimizer was given."""
    return engine.trained


def _of_parameter(engine: Engine, name: str, parameter: torch.Tensor, stored_as: str, value: torch.Tensor) -> Holding:
    """A parameter, or something that is cut like one: over tp, and what is left of it by rows over fsdp."""
    at, layout = engine.layout.coordinate(engine.rank), engine.layout
    shape = tuple(parameter.shape)
    dims = [[Segment(0, 0, length)] for length in shape]
    how = engine.slices.get(name)
    if how is not None:
        dims[how.dim] = shares(how.parts, at["tp"], layout.tp)
    tensor = parameter.data if isinstance(parameter, nn.Parameter) else parameter
    axes = tensor.device_mesh.mesh_dim_names or () if isinstance(tensor, DTensor) else ()
    is_sharded = "fsdp" in axes
    if is_sharded:
        rows = sum(segment.length for segment in dims[0])
        own = shares((rows,), at["fsdp"], layout.fsdp)
        dims[0] = [segment for one in own for segment in narrowed(dims[0], one.start, one.start + one.length)]
    cut = (False, is_sharded, False, how is not None)
    return Holding(stored_as, local_part(value.detach()), shape, pieces_of(dims), cut, engine.is_first_with(name))


def _of_whole(engine: Engine, name: str, stored_as: str, value: torch.Tensor) -> Holding:
    shape = tuple(value.shape)
    nowhere = (False,) * len(COPIES)
    return Holding(stored_as, value.detach(), shape, whole_piece(shape), nowhere, engine.is_first_with(name))


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


def _check_kinds(holdings: Iterable[Holding], sources: Mapping[str, str], index: Index) -> None:
    differing = []
    for holding in holdings:
        stored, dtype = index.tensors[sources[holding.name]], dtype_name(holding.name, holding.part.dtype)
        if (stored.dtype, tuple(stored.shape)) != (dtype, holding.shape):
            there, here = _kind(stored.dtype, stored.shape), _kind(dtype, holding.shape)
            name = shown(holding.name.removeprefix("model/"))
            differing.append(f"{name} is {there} in the checkpoint and {here} in the model")
    if differing:
        fix = "build the model the checkpoint was written with"
        if index.training is None:
            fix += ", or import the weights in its number format (lockstep ckpt import --dtype fp32)"
        raise UserError(_listed(differing, 4), fix)


def _kind(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype} {list(shape)}"


def _check_optimizer(engine: Engine, index: Index) -> None:
    assert index.optimizer is not None
    if index.optimizer.name != type(engine.optimizer).__name__:
        raise UserError(
            f"the checkpoint has the state of {shown(index.optimizer.name)}, and the optimizer now is "
            f"{type(engine.optimizer).__name__}",
            "build the optimizer as before, or start anew with --resume never",
        )
    own = dict(trained(engine))
    here = {name for name, _ in engine.stored}
    saved = [set(group.parameters) for group in index.optimizer.groups]
    current = [set(group.parameters) for group in optimizer_groups(engine)]
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


def _restore_groups(engine: Engine, optimizer: OptimizerState) -> None:
    for group, saved in zip(engine.optimizer.param_groups, optimizer.groups, strict=True):
        for key, value in saved.options.items():
            if key in HOW_NOT_WHAT:
                continue
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    rates = optimizer.rates or [None] * len(optimizer.groups)  # none are in older files
    engine.rates.restore(RateState(rates, optimizer.schedulers))
    engine.trainable.restore(optimizer.frozen)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
