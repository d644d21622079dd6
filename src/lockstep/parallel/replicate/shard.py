"""Sharded data parallelism: torch's `fully_shard` unit by unit, with gradients summed, never averaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from lockstep.config.schema import NumericsConfig, ShardConfig
from lockstep.errors import UserError
from lockstep.parallel.build.formats import dtype_of, sum_dtype
from lockstep.parallel.replicate.buckets import GradientBuckets
from lockstep.parallel.replicate.gradient_sync import GradientSync
from lockstep.parallel.whole.alone import refuse_sparse
from lockstep.runtime.comm import Comm
from lockstep.runtime.process import ignore_warning
from lockstep.runtime.torch_private import (
    is_view,
    prepare_reduce_scatter,
    reduce_scatter_now,
    replaced,
    tree_leaves,
    version_of,
)
from lockstep.runtime.torch_private.seen import require

REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""torch 2.13 can let all ranks reduce the same parameters. Before (2.11) each reduced the gradients it had, and where
those differ it adds the gradient of one parameter to another's."""

READS_ITS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that use the weights of modules inside them without calling those."""

END_OF_FORWARD = "the end of the forward"

CALLED_AS_A_WHOLE = "_lockstep_call"
"""The method of a sharded root by which a function of it is called."""


def shard(
    root: nn.Module,
    units: Sequence[nn.Module],
    comm: Comm,
    config: ShardConfig,
    numerics: NumericsConfig,
    without_data: Collection[nn.Parameter] = (),
) -> ShardedGradients:
    """Shard every unit and the rest of the root over the mesh's fsdp axis, replicated over dp where there is one.

    `without_data` are parameters of other stages of a pipeline, which are left alone.
    """
    require("sharding")
    refuse_unshardable(root.named_parameters())
    refuse_sparse(root, "summed into shards", "shard.level = zero1")
    # What it warns of is an error here, see before_backward.
    ignore_warning("FSDP2-wrapped module .* returned a view tensor")
    mesh = data_mesh(comm)
    # None leaves the decision to torch: all units but the root give their parameters back after the forward.
    reshard = False if config.level == "zero2" else None
    ignored = {*without_data, *(parameter for parameter in root.parameters() if parameter.dim() == 0)}
    for unit in [*units, root]:
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=_policy(unit, numerics),
            ignored_params=ignored or None,
        )
    sharded = [module for module in root.modules() if isinstance(module, FSDPModule)]
    for unit in sharded:
        # Order matters on gloo, which knows no pre-multiplied sum.
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)
        if REDUCES_UNUSED:
            unit.set_reduce_scatter_unused_params(True)
    assert isinstance(root, FSDPModule)
    vars(root)[CALLED_AS_A_WHOLE] = MethodType(_call_with, root)
    register_fsdp_forward_method(root, CALLED_AS_A_WHOLE)
    return ShardedGradients(root, sharded, comm, numerics, keeps_gathered=config.level == "zero2")


def call_gathered(model: nn.Module, call: Callable[[nn.Module], Any]) -> Any:
    """`call(model)`. Of a sharded model, what belongs to its root is gathered around it.

    So the call may do anything: `model(x)`, a method of the model, a module inside.
    """
    gathering = vars(model).get(CALLED_AS_A_WHOLE)
    return call(model) if gathering is None else gathering(call)


def _call_with(root: nn.Module, call: Callable[[nn.Module], Any]) -> Any:
    return call(root)


def data_mesh(comm: Comm) -> DeviceMesh:
    """The part of the mesh that shards and replicates."""
    assert comm.mesh is not None
    axes = tuple(axis for axis in ("dp", "fsdp") if axis in (comm.mesh.mesh_dim_names or ()))
    return comm.mesh[axes]


def sharding_units(model: nn.Module, blocks: Sequence[nn.Module], config: ShardConfig) -> list[nn.Module]:
    """The modules whose parameters are gathered at once, innermost first; the rest of the model is one more."""
    if config.units == "blocks" and not blocks:
        raise UserError(
            "shard.units is blocks, and the model has no repeated blocks",
            'use shard.units = "auto" or "size", or put repeated layers into an nn.ModuleList',
        )
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    owners = _owners(model)

    def is_alone(module: nn.Module) -> bool:
        """Whether nobody outside uses its parameters: two units cannot own one, so a tied one stays further up."""
        inside = _owners(module)
        return all(owners[key] == count * places[id(module)] for key, count in inside.items())

    if blocks and config.units != "size":
        return [block for block in blocks if is_alone(block)]
    units: list[nn.Module] = []
    taken: set[nn.Parameter] = set()

    def visit(module: nn.Module) -> None:
        if not isinstance(module, READS_ITS_CHILDREN):
            for child in module.children():
                visit(child)
        left = set(module.parameters()) - taken
        # A container is never called, so nothing would gather its parameters.
        callable_ = type(module).forward is not nn.Module.forward
        if module is not model and callable_ and sum(p.numel() for p in left) >= config.min_params and is_alone(module):
            units.append(module)
            taken.update(left)

    visit(model)
    return units


def _owners(module: nn.Module) -> Counter[int]:
    """In how many places below a module each parameter stands."""
    below = module.named_modules(remove_duplicate=False)
    return Counter(id(parameter) for _, owner in below for parameter in owner.parameters(recurse=False))


def refuse_unshardable(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters whose rows do not stand one after another."""
    for name, parameter in named:
        if not parameter.is_contiguous():
            raise UserError(
                f"the parameter {name} is not stored row by row and cannot be sharded",
                "leave memory_format and transposed weights out of build_model, or use a dp layout",
            )


def _policy(unit: nn.Module, numerics: NumericsConfig) -> MixedPrecisionPolicy:
    left = {p.dtype: name for name, p in unit.named_parameters() if not isinstance(p, DTensor) and p.dim() > 0}
    for dtype, name in left.items():
        if dtype.is_complex:
            raise UserError(
                f"the parameter {name} is complex, which cannot be sharded",
                "keep real and imaginary part as real parameters (torch.view_as_real), or use a dp layout",
            )
    if len(left) > 1:
        kinds = " and ".join(f"{name} as {str(dtype).removeprefix('torch.')}" for dtype, name in left.items())
        raise UserError(f"the model stores {kinds}, which cannot be sharded together", "build it in one number format")
    stored = next(iter(left), torch.float32)
    return MixedPrecisionPolicy(
        param_dtype=dtype_of(numerics.param_dtype),
        # Said in any case: gradients of rounded weights would be summed in their format else.
        reduce_dtype=sum_dtype(stored, "fp32"),
        cast_forward_inputs=False,
    )


def read_elsewhere() -> UserError:
    """What is said of a shard that was taken for the whole weight."""
    return UserError(
        "a sharded weight is used without calling the module that holds it, as in F.linear(x, embedding.weight) or a "
        "penalty on model.parameters()",
        "use shard.level = zero1, which keeps weights whole, or call the module",
    )


@contextmanager
def weights_read_by_their_modules() -> Iterator[None]:
    """Say in one sentence what torch says of a weight whose module was not called: only a shard of it is there.

    Nor is it there any more when a gradient inside of the loss is derived once more.
    """

    def refuse(*_: Any, **__: Any) -> Any:
        raise UserError(
            "the loss computes a gradient itself (torch.autograd.grad), through weights that are given back in between",
            "use shard.level = zero1, which keeps them whole, or a dp layout",
        )

    try:
        with replaced(torch.autograd, "grad", refuse):
            yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise read_elsewhere() from error


class ShardedGradients(GradientSync):
    """When the sharded model's gradients are reduced, in the last backward of a step only, and that it was right."""

    counts_unused = False

    def __init__(
        self, model: FSDPModule, units: Sequence[FSDPModule], comm: Comm, numerics: NumericsConfig, keeps_gathered: bool
    ) -> None:
        super().__init__()
        self._model = model
        self._units = units
        self._comm = comm
        self._numerics = numerics
        self._keeps_gathered = keeps_gathered
        assert isinstance(model, nn.Module)
        self._trained = {
            name for name, one in model.named_parameters() if one.requires_grad and isinstance(one, DTensor)
        }
        self._watched: dict[str, nn.Parameter] = {}
        self._used: set[str] = set()
        self._views: list[tuple[torch.Tensor, int]] = []
        self._path = 0
        names = {id(module): name for name, module in model.named_modules()}
        for number, unit in enumerate(units):
            assert isinstance(unit, nn.Module)
            unit.register_forward_pre_hook(partial(self._remember_call, number, names[id(unit)] or "the model"))
            unit.register_forward_hook(self._remember_views)

    @property
    def path(self) -> int:
        """The order in which the units of this rank were gathered in this step."""
        return self._path

    def with_whole(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Parameters that are a single number are not sharded: every rank has them, and gradients are summed."""
        single = [(name, parameter) for name, parameter in named if parameter.dim() == 0]
        if any(parameter.requires_grad for _, parameter in single):
            group, dtype = self._comm.data_group(), self._numerics.reduce_dtype
            self.inner = [GradientBuckets(single, group, self._comm, dtype)]

    def rest(self) -> None:
        """Between steps: only shards. A forward without a backward leaves the root's parameters gathered."""
        self._views.clear()
        for unit in self._units:
            unit.reshard()

    def begin(self) -> None:
        """Start a step: no gradients, no reduction until the last backward."""
        self.rest()
        if not self._watched:
            self._watch()
        self._used.clear()
        self._path = 0
        self._comm.beat.gathered.clear()
        assert isinstance(self._model, nn.Module)
        self._model.zero_grad(set_to_none=True)
        self._model.set_requires_gradient_sync(False)
        super().begin()

    def before_backward(self, last: bool) -> None:
        """The step's last backward pass reduces what has accumulated.

        torch hangs its hook on a unit's output. When that is a view, changing it in place loses the hook, and the
        backward pass would skip the unit without a word.
        """
        self._comm.beat.gathered.append(END_OF_FORWARD)
        changed = any(version_of(tensor) != version for tensor, version in self._views)
        self._views.clear()
        if changed:
            raise UserError(
                "the output of the model or of a sharded part of it is changed in place, which breaks sharding",
                "write x = x / 2 rather than x /= 2",
            )
        super().before_backward(last)
        if self._keeps_gathered:
            self._model.set_reshard_after_backward(last)
        if last:
            self._model.set_requires_gradient_sync(True)
            for unit in self._units:
                prepare_reduce_scatter(unit, lambda stored: sum_dtype(stored, self._numerics.reduce_dtype))

    def reduce(self) -> None:
        """Reduce what has accumulated now, after the backward passes of a pipeline: none is everybody's last."""
        self.before_backward(True)
        reduce_scatter_now(self._model, self._units)

    def unused(self) -> int:
        """How many parameters got no gradient on this rank in this step."""
        return len(self._watched) - len(self._used) + super().unused()

    def finish(self, somebody_has_unused: bool) -> None:
        """The reduction is over. A parameter used on no rank has no gradient, as in one process."""
        super().finish(somebody_has_unused)
        if not somebody_has_unused:
            return
        users = self._comm.sum_over_data([float(name in self._used) for name in self._watched])
        for (name, parameter), ranks in zip(self._watched.items(), users, strict=True):
            if ranks == 0:
                parameter.grad = None
            elif ranks < self._comm.data_size and not REDUCES_UNUSED:
                raise UserError(
                    f"the parameter {name} is used on {ranks:.0f} of {self._comm.data_size} data ranks in one step",
                    "use a dp layout or a newer torch, or let every forward use it (add its output times 0)",
                )

    def _remember_call(self, number: int, name: str, *_: Any) -> None:
        self._path = (self._path * 31 + number + 1) % 1_000_003
        self._comm.beat.gathered.append(name)

    def _remember_views(self, _: nn.Module, __: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and is_view(tensor):
                self._views.append((tensor, version_of(tensor)))

    def _watch(self) -> None:
        """Note which gathered parameters autograd reaches; they exist from the first gathering on."""
        assert isinstance(self._model, nn.Module)
        self._watched = {name: one for name, one in self._model.named_parameters() if name in self._trained}
        frozen = [parameter for parameter in self._watched.values() if not parameter.requires_grad]
        for parameter in frozen:  # by the script, for a while
            parameter.requires_grad_(True)
        unseen, used = set(self._watched), self._used  # a hook that held `self` would keep its group for ever
        for unit in self._units:
            unit.unshard()
            for name, parameter in self._model.named_parameters():
                if name in unseen and not isinstance(parameter, DTensor):
                    unseen.remove(name)
                    parameter.register_post_accumulate_grad_hook(lambda _, name=name: used.add(name))
            unit.reshard()
        for parameter in frozen:
            parameter.requires_grad_(False)
