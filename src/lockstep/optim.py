"""Optimizers and learning-rate schedules by the names a config uses."""

from __future__ import annotations

import importlib
import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from lockstep.config import OptimizerConfig, ScheduleConfig
from lockstep.errors import UserError, unknown
from lockstep.layout import Layout

if TYPE_CHECKING:
    from lockstep.engine import OptimizerFactory, Schedule

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
        sharded = any(isinstance(parameter, DTensor) for parameter in group["params"])
        possible = type(optimizer) in FUSED_ON_SHARDS or not sharded
        if undecided and possible and not special and all(p.is_floating_point() for p in group["params"]):
            group["fused"] = True


ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
)
"""Stock optimizers that update every number of a parameter by that number's own gradients."""


def refuse_not_elementwise(optimizer: torch.optim.Optimizer, layout: Layout) -> None:
    """Refuse an optimizer that does something else with a part of a parameter than with the whole (LAMB, Adafactor).

    One that is not known is tried out on a small parameter, whole and in halves.
    """
    if type(optimizer) in ELEMENTWISE or is_elementwise(optimizer):
        return
    raise UserError(
        f"the optimizer {type(optimizer).__name__} updates a part of a parameter in another way than the whole, and "
        f"under layout {layout} ranks hold parts",
        "use an elementwise optimizer such as AdamW, or a layout of dp and pp alone",
    )


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether two steps on a small parameter and on its halves come to the same; so if it cannot be tried out."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(4, 6, generator=draw)
    gradients = [torch.randn(4, 6, generator=draw) for _ in range(2)]

    def trained(slices: list[slice]) -> torch.Tensor:
        parts = [torch.nn.Parameter(start[rows].clone()) for rows in slices]
        twin = _twin(optimizer, parts)
        for gradient in gradients:
            for part, rows in zip(parts, slices, strict=True):
                part.grad = gradient[rows].clone()
            twin.step()
        return torch.cat([part.detach() for part in parts])

    try:
        return torch.allclose(trained([slice(0, 4)]), trained([slice(0, 2), slice(2, 4)]), rtol=1e-5, atol=1e-7)
    except Exception:  # whatever an unknown optimizer raises when it is made from its own defaults
        return type(optimizer).__module__.partition(".")[0] != "torch"


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
    sharded nor float64 parameters go with.
    """
    if type(optimizer) not in FUSED or not all(group["fused"] for group in optimizer.param_groups):
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
