"""What of an engine goes into a checkpoint, by original parameter names, and back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from lockstep.attention import BACKENDS
from lockstep.errors import UserError
from lockstep.parallel.dtensors import like, local_part

if TYPE_CHECKING:
    from lockstep.engine import Engine


def engine_state(engine: Engine) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """This rank's tensors (its shards, where the model is sharded) and the JSON part."""
    engine.rest()
    tensors = {f"model/{name}": local_part(tensor) for name, tensor in engine.stored}
    tensors |= {f"buffer/{name}": tensor for name, tensor in engine.buffers}
    values: dict[str, Any] = {}
    for name, parameter in _trained(engine):
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                kind = "optimizer-shard" if isinstance(value, DTensor) else "optimizer"
                tensors[f"{kind}/{name}/{key}"] = local_part(value)
            else:
                values.setdefault(name, {})[key] = value
    return tensors, {
        "step": engine.steps_done,
        "skipped": engine.steps_skipped,
        "layout": str(engine.layout),
        "pipeline": engine.pipeline.state() if engine.pipeline else None,
        "optimizer": {"values": values, "groups": optimizer_groups(engine)},
        "attention": None if engine.measures_attention else engine.attention or "as torch chooses",
        "loss_scale": engine.loss_scale.state() if engine.loss_scale else None,
    }


def optimizer_groups(engine: Engine) -> list[dict[str, Any]]:
    """The parameter groups of this rank's optimizer: names and options."""
    names = {id(parameter): name for name, parameter in _trained(engine)}
    return [
        {
            "parameters": [names[id(parameter)] for parameter in group["params"] if id(parameter) in names],
            "options": {key: value for key, value in group.items() if _is_option(key, value)},
        }
        for group in engine.optimizer.param_groups
    ]


def check_groups(by_rank: list[list[dict[str, Any]]]) -> None:
    """Refuse an optimizer that has other parameter groups on some ranks of a pipeline: they are saved as one."""
    options = [[group["options"] for group in groups] for groups in by_rank]
    if any(one != options[0] for one in options):
        raise UserError(
            "the optimizer has other parameter groups on some ranks of the pipeline than on others",
            "make the same groups on every rank, in one order; a group may be empty",
        )


def merge_optimizers(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON part of one optimizer, from those of all ranks of a pipeline: each knows its own parameters."""
    values = {name: state for part in parts for name, state in part["values"].items()}
    groups = []
    for alike in zip(*(part["groups"] for part in parts), strict=True):
        names = dict.fromkeys(name for group in alike for name in group["parameters"])
        groups.append({"parameters": list(names), "options": alike[0]["options"]})
    return {"values": values, "groups": groups}


@torch.no_grad()
def restore_engine(engine: Engine, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
    """Put a checkpoint's state into an engine of the same model, optimizer and sharding."""
    restore_model(engine, tensors)
    parameters = dict(_trained(engine))
    _restore_groups(engine, meta["optimizer"]["groups"], parameters)
    on_device = {
        id(parameter)
        for group in engine.optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
    }
    for key, tensor in tensors.items():
        kind, _, rest = key.partition("/")
        if kind.startswith("optimizer"):
            name, _, slot = rest.rpartition("/")
            parameter = parameters[name]
            # The step count is a scalar on the CPU, except where the optimizer reads it on the device.
            value = tensor.to(parameter.device) if tensor.dim() or id(parameter) in on_device else tensor
            if kind == "optimizer-shard":
                value = like(parameter, value)
            engine.optimizer.state[parameter][slot] = value
    for name, values in meta["optimizer"]["values"].items():
        if name in parameters:  # the others are those of other ranks of a pipeline
            engine.optimizer.state[parameters[name]].update(values)
    if engine.measures_attention and meta.get("attention"):  # measured once, when the run began
        engine.use_attention(meta["attention"] if meta["attention"] in BACKENDS else None)
    if engine.loss_scale and meta.get("loss_scale"):
        engine.loss_scale.restore(meta["loss_scale"])
    engine.steps_done = meta["step"]
    engine.steps_skipped = meta["skipped"]
    engine.seed_between_steps()


@torch.no_grad()
def restore_model(engine: Engine, tensors: dict[str, torch.Tensor]) -> None:
    """Put a checkpoint's weights and buffers into an engine of the same model and sharding, and nothing else."""
    targets = {f"model/{name}": local_part(tensor) for name, tensor in engine.stored}
    targets |= {f"buffer/{name}": tensor for name, tensor in engine.buffers}
    _refuse_other_names(set(targets), {name for name in tensors if not name.startswith("optimizer")})
    for name, target in targets.items():
        if target.shape != tensors[name].shape or target.dtype != tensors[name].dtype:
            raise UserError(
                f"{name} is {_kind(tensors[name])} in the checkpoint and {_kind(target)} in the model",
                "build the model the checkpoint was written with",
            )
        target.copy_(tensors[name])
    engine.restored()


def _trained(engine: Engine) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in engine.stored if parameter.requires_grad]


def _restore_groups(engine: Engine, groups: list[dict[str, Any]], parameters: dict[str, torch.nn.Parameter]) -> None:
    current = [set(group["parameters"]) for group in optimizer_groups(engine)]
    if current != [parameters.keys() & group["parameters"] for group in groups]:
        raise UserError(
            "the optimizer's parameter groups are not those of the checkpoint",
            "build the optimizer as before, or start anew with --resume never",
        )
    for group, saved in zip(engine.optimizer.param_groups, groups, strict=True):
        for key, value in saved["options"].items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _is_option(key: str, value: Any) -> bool:
    if key in ("params", "param_names", "lr"):  # lr follows from the schedule and the step
        return False
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def _refuse_other_names(model: set[str], checkpoint: set[str]) -> None:
    if missing := sorted(model - checkpoint):
        raise UserError(f"the checkpoint has no {missing[0]}", "build the model the checkpoint was written with")
    if extra := sorted(checkpoint - model):
        raise UserError(f"the model has no {extra[0]}", "build the model the checkpoint was written with")


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
