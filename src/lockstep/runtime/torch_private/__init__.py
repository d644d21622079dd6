"""All that Lockstep uses of torch's private API, and every patch of torch: nothing else in the package does.

Seen in torch 2.11 and 2.13. `seen.py` lists the names with what they are for, tells which of them are gone or changed
on another torch, and refuses to train where numbers depend on one that is. Private is what begins with an underscore:
modules, functions, attributes of tensors and modules.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch._C import _disabled_torch_function_impl as plain_torch_function
from torch._functorch import apis as functorch_apis
from torch._functorch import utils as functorch_utils
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.distributed import _functional_collectives as functional
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.batchnorm import _NormBase as AnyNorm
from torch.nn.modules.dropout import _DropoutNd as AnyDropout
from torch.nn.modules.instancenorm import _InstanceNorm as AnyInstanceNorm
from torch.nn.utils.stateless import _reparametrize_module as with_tensors
from torch.overrides import _get_current_function_mode as current_function_mode
from torch.overrides import _pop_mode_temporarily as without_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = ["AnyBatchNorm", "AnyDropout", "AnyInstanceNorm", "AnyNorm", "DataDependentOutputException"]
__all__ += ["DisableTorchFunction", "DisableTorchFunctionSubclass", "DynamicOutputShapeException", "FakeTensor"]
__all__ += ["FakeTensorMode", "TorchDispatchMode", "current_function_mode", "functional", "plain_torch_function"]
__all__ += ["run_backward", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "with_tensors"]
__all__ += ["without_function_mode"]

make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
"""Makes a tensor of a class that has a shape and no data."""
foreach_copy, foreach_norm, foreach_multiply = torch._foreach_copy_, torch._foreach_norm, torch._foreach_mul_
"""One kernel for many tensors."""

RECURRENT = (torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu)
"""The functions of recurrent layers, which drop between their layers."""
GAMMA, DIRICHLET = torch._standard_gamma, torch._sample_dirichlet
GAMMA_OPERATION, DIRICHLET_OPERATION = torch.ops.aten._standard_gamma, torch.ops.aten._sample_dirichlet
"""Draws of torch.distributions, and what they come down to."""
CTC_OPERATIONS = (torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor)
GROUPED_MATMUL = torch.ops.aten._grouped_mm.default


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """An attribute of torch's is another one inside; gives what it was."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        setattr(owner, name, before)


# Tensors ----------------------------------------------------------------------------------------------------------


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    return tensor._version


def is_view(tensor: torch.Tensor) -> bool:
    return tensor._is_view()


def storage_key(storage: torch.UntypedStorage) -> int:
    """Tells storages apart; those of fake tensors too, which have no address."""
    return int(storage._cdata)


def checkpoint_offset(storage: torch.UntypedStorage) -> int:
    """Where a tensor stands in its file: set by `torch.load` under a FakeTensorMode."""
    offset: int = cast(Any, storage)._checkpoint_offset
    return offset


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Let `isinstance(tensor, nn.Parameter)` say yes, of a tensor of another class."""
    cast(Any, tensor)._is_param = True


def values_of_sparse(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a coalesced sparse tensor, that share its memory."""
    return tensor._values()


def replace_local_part(tensor: torch.Tensor, part: torch.Tensor) -> None:
    """Give a DTensor another local part: a new DTensor for each of many parameters takes a while."""
    cast(Any, tensor)._local_tensor = part


def gradient_hooks(parameter: torch.Tensor) -> tuple[Any, Any]:
    """The hooks on a parameter's gradient, when it comes and when it has been added: a dict of them, or nothing."""
    return parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)


# Modules ----------------------------------------------------------------------------------------------------------


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """The parameters of a module itself by which everything of torch's reads them: the dict may be changed."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Any]:
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, Any]:
    return module._modules


def replace_own_tensors(module: nn.Module, parameters: dict[str, Any], buffers: dict[str, Any]) -> None:
    """Let a module read its parameters and buffers from other dicts."""
    vars(module).update(_parameters=parameters, _buffers=buffers)


def without_saving(module: nn.Module) -> set[str]:
    """The buffers of a module that no state_dict has."""
    return module._non_persistent_buffers_set


def call_of(module: nn.Module) -> Callable[..., Any]:
    """The call of a module, hooks included, whatever `replace_call` has put in its place."""
    return module._call_impl


def replaced_call(module: nn.Module) -> Any:
    """What stands in the place of a module's call: nothing, what `nn.Module.compile` or `replace_call` put there."""
    return module._compiled_call_impl


def replace_call(module: nn.Module, around: Callable[..., Any]) -> Callable[[], None]:
    """Let `around(module, *args, **kwargs)` answer when a module is called, hooks included; returns how to undo it.

    `call_of(module)` is the call itself. The attribute is where `nn.Module.compile` puts its own.
    """
    before = module._compiled_call_impl
    module._compiled_call_impl = MethodType(around, module)

    def undo() -> None:
        module._compiled_call_impl = before

    return undo


def backward_hooks(module: nn.Module) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """The hooks on a module's backward, after and before it."""
    return module._backward_hooks, module._backward_pre_hooks


def after_state_dict(module: nn.Module, hook: Callable[..., None]) -> None:
    """Call `hook(module, state, ...)` when the module has put its tensors into a state_dict, which it may change."""
    module._register_state_dict_hook(hook)


def hooks_after_loading(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """What is called when a module has loaded a state_dict; `fully_shard` looks at its shards there."""
    return module._load_state_dict_post_hooks


def check_dims(layer: AnyBatchNorm, x: torch.Tensor) -> None:
    """Refuse an input of a BatchNorm that has too few or too many dims."""
    layer._check_input_dim(x)


# Operations -------------------------------------------------------------------------------------------------------


def add_shape_rule(operation: Any, rule: Callable[..., Any]) -> None:
    """Say what a fake tensor's operation returns, where torch has no rule."""
    op_implementations_dict.setdefault(operation, rule)


def schema_of(operation: Any) -> Any:
    """The arguments of an operation of torch.ops, and which of them it writes to."""
    return operation._schema


def name_of(operation: Any) -> str:
    """The name of an operation of torch.ops, without namespace and overload."""
    return str(operation._opname)


def type_of(script_object: Any) -> str:
    """The class of a C++ object that an operation is given, as a group of processes is."""
    return str(script_object._type())


def causal_lower_right_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attention of the last rows of a triangle, by kernels that a mask would keep from being used.

    The public way is a class that is switched off where torch's functions are overridden.
    """
    from torch.nn.attention.bias import CausalBias, causal_lower_right  # imports the compiler

    bias = causal_lower_right(query.shape[-2], key.shape[-2])
    found: torch.Tensor = CausalBias._dispatch(query, key, value, bias, scale=scale)
    return found


def distributions_check() -> bool:
    """Whether torch.distributions check their arguments."""
    return torch.distributions.Distribution._validate_args


def cpu_has_fp16() -> bool:
    """Whether oneDNN computes in fp16 on this CPU; there is no public question."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


# Autograd ---------------------------------------------------------------------------------------------------------


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def saving_hooks() -> Any:
    """What is called with tensors that are saved for the backward, as torch.utils.checkpoint does; None if nothing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def function_of(node: Any) -> Any:
    """The autograd.Function that a node of autograd's graph belongs to, if it does."""
    return getattr(node, "_forward_cls", None)


def gradients_taken(node: Any) -> Any:
    """Shape, number format and device of the gradients that a node takes."""
    return node._input_metadata


def functions_seen(see: Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]) -> AbstractContextManager[Any]:
    """Let `see(function, arguments)` say what an autograd.Function is applied to.

    `apply` itself is no place to look: people keep it (`reverse = Reverse.apply`). It hands its arguments to this
    function of torch's first.
    """
    unwrap = functorch_utils.unwrap_dead_wrappers

    def seen(args: tuple[Any, ...]) -> tuple[Any, ...]:
        function = sys._getframe(1).f_locals.get("cls")
        return unwrap(args if function is None else see(function, args))

    return replaced(functorch_utils, "unwrap_dead_wrappers", seen)


def vmap_seen(see: Callable[..., None]) -> AbstractContextManager[Any]:
    """Let `see(*args, **kwargs)` look at every call of torch.vmap first."""
    vmap = cast(Any, functorch_apis).vmap_impl

    def seen(*args: Any, **kwargs: Any) -> Any:
        see(*args, **kwargs)
        return vmap(*args, **kwargs)

    return replaced(functorch_apis, "vmap_impl", seen)


# Optimizers -------------------------------------------------------------------------------------------------------


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether functions were registered to be called before or after a step."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def schedulers_inside(scheduler: Any) -> Sequence[Any]:
    """The schedulers that one of several phases is made of."""
    return getattr(scheduler, "_schedulers", ())


# Sharded parameters: the inside of fully_shard --------------------------------------------------------------------


def gathered_parameters(unit: FSDPModule) -> list[torch.Tensor]:
    """The whole parameters of a sharded unit, which are there for a while."""
    group = _parameter_group(unit)
    return [part._unsharded_param for part in group.fsdp_params] if group is not None else []


def prepare_reduce_scatter(unit: FSDPModule, sum_dtype: Callable[[torch.dtype], torch.dtype]) -> None:
    """Let the gradients of a unit travel in `sum_dtype(format)`, after they were accumulated in that format.

    torch's own policy has one format for both, so that micro-batches would add up in half precision. And where it has
    accumulated in another format than it computes in, it cannot take a parameter along that had no gradient before the
    last micro-batch. All of this is settled in the first forward.
    """
    group = _parameter_group(unit)
    if group is not None and group._reduce_dtype is None:  # nothing to train, at least when this was settled
        group._init_mp_dtypes()
    if group is None or group._reduce_dtype is None:
        return
    group._reduce_dtype = sum_dtype(group._reduce_dtype)
    trained = [part for part in group.fsdp_params if part.sharded_param.requires_grad]
    if any(part.unsharded_accumulated_grad is not None for part in trained):
        for part in trained:
            if part.unsharded_accumulated_grad is None:
                whole = part._unsharded_param
                part.unsharded_accumulated_grad = torch.zeros(whole.shape, dtype=part.reduce_dtype, device=whole.device)


def reduce_scatter_now(root: FSDPModule, units: Iterable[FSDPModule]) -> None:
    """Reduce what backward passes have accumulated, after the last one, as torch's own pipeline does it."""
    for unit in units:
        if (group := _parameter_group(unit)) is not None:
            group.post_backward()
    root._get_fsdp_state()._root_post_backward_final_callback()


def _parameter_group(unit: FSDPModule) -> Any:
    return unit._get_fsdp_state()._fsdp_param_group


# Groups of processes ----------------------------------------------------------------------------------------------


def set_timeout(group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
    """Groups of a mesh do not inherit the timeout, and would wait for 30 minutes."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def group_by_name(name: str) -> dist.ProcessGroup:
    """A group by the name by which compiled code knows it."""
    return dist.distributed_c10d._resolve_process_group(cast(Any, name))


def collectives_begun() -> int:
    """How many collectives the default group has begun; 0 where the backend has no numbers."""
    try:
        group: Any = dist.group.WORLD
        return int(group._get_sequence_number_for_group()) if group is not None else 0
    except Exception:  # a statistic: whatever is wrong with it, the heartbeat is there
        return 0


def flight_record() -> bytes | None:
    """The last collectives as JSON, which torch 2.11 (NCCL) and 2.13 (gloo, too) record unasked; None without any."""
    api: Any = getattr(torch._C, "_distributed_c10d", None)
    dump: Any = getattr(api, "_dump_nccl_trace_json", None) or getattr(api, "_dump_fr_trace_json", None)
    return dump() if dump is not None and dist.is_initialized() else None


def fake_store() -> dist.Store:
    """The store of a group without processes; importing it registers the backend "fake"."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


# Compiling --------------------------------------------------------------------------------------------------------


def compiler_config() -> Any:
    """The settings of torch.compile's tracer."""
    import torch._dynamo

    return torch._dynamo.config


def compiler_errors() -> Any:
    """The exceptions of torch.compile's tracer."""
    import torch._dynamo

    return torch._dynamo.exc


def compiler_cache() -> str:
    """The folder that torch keeps compiled code in unless told, which a reboot empties."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes a second to import

    return default_cache_dir()
