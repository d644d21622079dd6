"""Whether an optimizer may work on shards: only where it does to a part what it does to the whole parameter.

A stock optimizer is known. Any other is made again by the user's own function, for a few small parameters of the same
names, and tried out whole and in the parts that ranks would have.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.runtime.torch_private import has_step_hooks
from lockstep.step.optim import OptimizerFactory

Tensors = dict[str, torch.Tensor]

ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
)
"""Stock optimizers that update every number of a parameter by that number's own gradients."""
STEPS = 40
"""Of a trial: some optimizers (Shampoo) begin to look at whole matrices only after a while."""
LARGEST = 256
"""Of what is tried out, along each dim: some (Adafactor) leave small matrices alone."""
LEAST_RATE = 0.01
"""So that the learning rate of a warm-up does not hide a difference."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""How far parts may be off, beside the largest update so far."""


def refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that computes the loss itself, several times in a step (LBFGS)."""
    parameters = inspect.signature(optimizer.step).parameters.values()
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    for wanted in parameters:
        if wanted.default is wanted.empty and wanted.kind in named:
            raise UserError(
                f"the optimizer {type(optimizer).__name__} wants a {wanted.name}, by which it computes the loss "
                "several times in a step",
                "use an optimizer whose step() takes no argument, such as AdamW",
            )


def refuse_coupled(
    optimizer: torch.optim.Optimizer, make: OptimizerFactory, named: Sequence[tuple[str, nn.Parameter]], layout: Layout
) -> None:
    """Refuse an optimizer that needs whole parameters (LAMB, Muon, Adafactor), or all, where ranks have parts."""
    if isinstance(optimizer, torch.optim.SparseAdam) and layout.world_size > 1:
        raise UserError(
            "the optimizer SparseAdam wants sparse gradients, and over several ranks they are summed as dense ones",
            "use sparse=False with AdamW, or train this model on one process (--layout single)",
        )
    holds_parts = layout.fsdp > 1 or layout.tp > 1
    if is_elementwise(optimizer):
        _refuse_unshardable(optimizer, layout)
    if is_elementwise(optimizer) or not (holds_parts or layout.pp > 1):
        return
    name = type(optimizer).__name__
    shapes = _small_shapes(optimizer, named)
    dims = range(max(map(len, shapes.values()), default=0)) if holds_parts else ()
    try:
        differs = partial(_differs, make, shapes, named[0][1].device)
        parts_differ = any(differs(partial(_halves, dim)) for dim in dims)
        stages_differ = layout.pp > 1 and not parts_differ and differs(_first_and_last)
    except Exception as error:  # whatever an unknown optimizer, or the function that makes it, raises
        text = " ".join(str(error).split())[:200]
        raise UserError(
            f"layout {layout} needs an optimizer that updates every number by itself, and it could not be tried out "
            f"whether {name} does ({type(error).__name__}: {text})",
            "use a stock one such as AdamW, or let optimizer= make it for any of the parameters, or use a dp layout",
        ) from error
    if parts_differ:
        raise UserError(
            f"the optimizer {name} updates a part of a parameter in another way than the whole, and under "
            f"layout {layout} ranks hold parts",
            "use an elementwise optimizer such as AdamW, or a layout of dp and pp alone",
        )
    if stages_differ:
        raise UserError(
            f"the optimizer {name} updates a parameter in another way where it has not all the others, and under "
            f"layout {layout} a rank has those of its stages",
            "use an optimizer that looks at each parameter alone, such as AdamW, or a dp layout",
        )


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is known to update every number by its own gradients: a stock optimizer with nothing added to it."""
    return type(optimizer) in ELEMENTWISE and not has_step_hooks(optimizer) and "step" not in vars(optimizer)


def _refuse_unshardable(optimizer: torch.optim.Optimizer, layout: Layout) -> None:
    """Refuse a stock optimizer that computes with something DTensor cannot do: Rprop, or the fused kernels of some."""
    for group in optimizer.param_groups:
        parts = [parameter.data for parameter in group["params"] if isinstance(parameter.data, DTensor)]
        if not parts:
            continue
        kinds = {(part.dim(), part.dtype, part.placements): part for part in parts}
        twin = copy.copy(optimizer)
        twin.state = defaultdict(dict)
        twin.param_groups = [{**group, "params": [nn.Parameter(_small_part(part)) for part in kinds.values()]}]
        for parameter in twin.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        try:
            twin.step()
        except Exception as error:  # whatever torch raises there
            fused = bool(group.get("fused"))
            raise UserError(
                f"torch's {type(optimizer).__name__}{' with fused=True' if fused else ''} cannot update parts of "
                f"parameters, which ranks hold under layout {layout}",
                "leave fused=True out"
                if fused
                else "use another elementwise optimizer such as AdamW, or a layout of dp and pp alone",
            ) from error


def _small_part(given: DTensor) -> DTensor:
    part = torch.ones([2] * given.dim(), dtype=given.dtype, device=given.device)
    return DTensor.from_local(part, given.device_mesh, given.placements, run_check=False)


def _small_shapes(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]]
) -> dict[str, tuple[int, ...]]:
    """The two largest parameters of each group and number of dims, shrunk, in the model's order."""
    groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    found: Counter[tuple[int | None, int]] = Counter()
    shapes = {}
    for name, parameter in sorted(named, key=lambda item: -item[1].numel()):
        kind = groups.get(id(parameter)), parameter.dim()
        found[kind] += 1
        if found[kind] <= 2:
            shape = [min(size, LARGEST) for size in parameter.shape]
            while math.prod(shape) > LARGEST**2:
                shape[shape.index(max(shape))] //= 2
            shapes[name] = tuple(shape)
    return {name: shapes[name] for name, _ in named if name in shapes}


def _differs(
    make: OptimizerFactory,
    shapes: Mapping[str, Sequence[int]],
    device: torch.device,
    cut: Callable[[Tensors], list[Tensors]],
) -> bool:
    """Whether steps on what `cut` makes of some parameters come to something else than on the whole of them."""
    try:
        return _differs_in(torch.float64, make, shapes, device, cut)
    except Exception:  # one that keeps its state in another format may not go with float64
        return _differs_in(torch.float32, make, shapes, device, cut)


def _differs_in(
    dtype: torch.dtype,
    make: OptimizerFactory,
    shapes: Mapping[str, Sequence[int]],
    device: torch.device,
    cut: Callable[[Tensors], list[Tensors]],
) -> bool:
    draw = torch.Generator().manual_seed(0)

    def drawn() -> Tensors:
        tensors = {name: torch.randn(tuple(shape), generator=draw, dtype=dtype) for name, shape in shapes.items()}
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    start = drawn()
    whole, parts = _Trial(make, start), [_Trial(make, part) for part in cut(start)]
    for _ in range(STEPS):
        gradients = drawn()
        whole.step(gradients)
        for trial, part in zip(parts, cut(gradients), strict=True):
            trial.step(part)
        for trial, part, first in zip(parts, cut(whole.values()), cut(start), strict=True):
            for name, value in trial.values().items():
                update = (part[name] - first[name]).abs().max()
                if (value - part[name]).abs().max() > TOLERANCE[dtype] * update + 1e-14:
                    return True
    return False


class _Trial:
    """An optimizer of the user's making for some small parameters."""

    def __init__(self, make: OptimizerFactory, start: Tensors) -> None:
        self._parameters = {name: nn.Parameter(value.clone()) for name, value in start.items()}
        self._optimizer = make(list(self._parameters.items()))
        own = {id(parameter) for parameter in self._parameters.values()}
        for group in self._optimizer.param_groups:
            if any(id(parameter) not in own for parameter in group["params"]):
                raise ValueError("optimizer= makes it for other parameters than it is given")
            if isinstance(rate := group.get("lr"), float | int):
                group["lr"] = max(rate, LEAST_RATE)

    def step(self, gradients: Tensors) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name].clone()
        self._optimizer.step()

    def values(self) -> Tensors:
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}


def _halves(dim: int, whole: Tensors) -> list[Tensors]:
    """Each tensor cut in two along a dim; one that is too small for that is in both parts."""
    halves = {
        name: tensor.chunk(2, dim) if tensor.dim() > dim and tensor.shape[dim] > 1 else (tensor, tensor)
        for name, tensor in whole.items()
    }
    return [{name: pair[number] for name, pair in halves.items()} for number in range(2)]


def _first_and_last(whole: Tensors) -> list[Tensors]:
    """The first of the tensors, and the others."""
    names = list(whole)
    middle = (len(names) + 1) // 2
    return [{name: whole[name] for name in some} for some in (names[:middle], names[middle:]) if some]
