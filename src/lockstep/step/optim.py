"""Optimizers and learning-rate schedules by the names a config uses."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lockstep.config.schema import OptimizerConfig, ScheduleConfig
from lockstep.errors import UserError, unknown
from lockstep.runtime.torch_private import has_step_hooks, replaced

OptimizerFactory = Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]
Schedule = Callable[[int], float]

OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
FUSED_ON_SHARDS = (torch.optim.Adam, torch.optim.AdamW)
"""DTensor knows the fused kernels of these only (torch 2.11 and 2.13)."""


def optimizer_factory(config: OptimizerConfig) -> OptimizerFactory:
    """A function from named parameters to the optimizer; wrong names and arguments are refused at once."""
    optimizer = _find(config.name)
    # TOML knows lists only, and some optimizers insist on tuples.
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in config.args.items()}
    parameters = list(inspect.signature(optimizer).parameters.values())[1:]
    known = [parameter.name for parameter in parameters]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    for name in arguments:
        if name not in known and not takes_any:
            raise unknown(f"argument of optimizer {config.name}:", name, known)
    try:
        optimizer([torch.nn.Parameter(torch.zeros(1))], lr=config.lr, **arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer {config.name} refuses its arguments {config.args}", str(error)) from None
    return lambda parameters: optimizer(parameters, lr=config.lr, **arguments)


def with_empty_groups(make: OptimizerFactory) -> OptimizerFactory:
    """Let groups of named parameters be empty, as they are where a stage of a pipeline has none of them.

    torch (2.11 and 2.13) takes an empty group for one without names, and refuses it beside one with names.
    """
    add = torch.optim.Optimizer.add_param_group

    def name_nothing(self: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        if isinstance(group["params"], Iterator):
            group["params"] = list(group["params"])
        groups = [*self.param_groups, group]
        if any("param_names" in each or is_named(each["params"]) for each in groups):
            for each in groups:
                if not len(each["params"]):
                    each["param_names"] = []
        add(self, group)

    def is_named(params: Any) -> bool:
        return isinstance(params, list) and len(params) > 0 and isinstance(params[0], tuple)

    def make_with_them(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        with replaced(torch.optim.Optimizer, "add_param_group", name_nothing):
            return make(named)

    return make_with_them


def use_fused_kernels(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Let a stock optimizer update all parameters in one kernel, where the user did not choose an implementation.

    torch's own default is a loop over the parameters on the CPU and several kernels for each operation on a GPU.
    """
    has_sparse_gradients = any(getattr(module, "sparse", False) for module in model.modules())
    if type(optimizer) not in FUSED or has_sparse_gradients:
        return
    for group in optimizer.param_groups:
        undecided = group.get("foreach") is None and group.get("fused") is None
        # Fused momentum fails where a parameter gets its first gradient later than others (torch 2.11 and 2.13).
        special = group.get("capturable") or group.get("differentiable") or group.get("momentum")
        sharded = {isinstance(parameter, DTensor) for parameter in group["params"]}
        # One kernel takes no list of both: a single number stays whole beside shards.
        possible = sharded == {False} or (sharded == {True} and type(optimizer) in FUSED_ON_SHARDS)
        if undecided and possible and not special and all(p.is_floating_point() for p in group["params"]):
            group["fused"] = True


def states_per_parameter(optimizer: torch.optim.Optimizer) -> int:
    """How many numbers an optimizer keeps for each one it trains, found out on a small parameter."""
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    parameter.grad = torch.ones(2, 3)
    try:
        twin = _twin(optimizer, [parameter])
        twin.step()
    except Exception:  # whatever an unknown optimizer raises when it is made from its own defaults
        return 2
    return sum(isinstance(value, torch.Tensor) and value.dim() > 0 for value in twin.state[parameter].values())


def _twin(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """A new optimizer of the same kind for other parameters."""
    known = inspect.signature(type(optimizer)).parameters
    make: Any = type(optimizer)
    return make(parameters, **{name: value for name, value in optimizer.defaults.items() if name in known})  # type: ignore[no-any-return]


def multiplies_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer divides the gradients by its attribute `grad_scale`, as torch's fused kernels do.

    The attribute is what torch.amp's GradScaler sets (torch 2.11 and 2.13): a plain tensor of fp32, which neither
    sharded nor float64 parameters go with. Hooks before a step are to see gradients that were multiplied before.
    """
    is_fused = type(optimizer) in FUSED and all(group["fused"] for group in optimizer.param_groups)
    if not is_fused or has_step_hooks(optimizer):
        return False
    parameter = next((parameter for group in optimizer.param_groups for parameter in group["params"]), None)
    return parameter is not None and not isinstance(parameter, DTensor) and parameter.dtype != torch.float64


def schedule_function(config: ScheduleConfig, total_steps: int | None) -> Schedule:
    """The factor on the learning rate as a function of the steps done: nothing to save, nothing to restore."""
    if config.name != "constant" and total_steps is None:
        raise UserError(
            f"schedule {config.name} needs to know the number of steps, and a stream has no length",
            "give steps, or use the constant schedule",
        )

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        if config.name == "constant":
            return 1.0
        assert total_steps is not None
        done = min(1.0, (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps))
        shape = 1.0 - done if config.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return config.final + (1.0 - config.final) * shape

    return factor


def _find(name: str) -> Any:
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if ":" not in name and "." not in name:
        raise unknown("optimizer", name, [*OPTIMIZERS, "package.module:Class"])
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UserError(f"cannot import the optimizer {name}", f"write package.module:Class ({error})") from None
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UserError(f"{name} is not an optimizer", "name a class that derives from torch.optim.Optimizer")
    return found
