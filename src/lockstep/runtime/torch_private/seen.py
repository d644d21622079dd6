"""The private names of torch that Lockstep uses, what for, and whether the torch that is there still has them.

Seen in torch 2.11 and 2.13. A test goes over this list on the torch it finds and names what is gone or changed. Names
on which numbers depend are looked at in every run that needs them, by `require`: a write that nobody reads any more, or
a question that always gets the same answer, would give other numbers without a word.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.runtime.torch_private import in_backward, saving_hooks

Purpose = Literal["random draws", "sharding", "pipeline", "tensor parallelism", "compile", "statistics", "any"]


@dataclass(frozen=True)
class PrivateName:
    """A private name of torch."""

    where: str
    """A dotted name, of a module or of one of `SAMPLES`."""
    use: str
    purpose: Purpose = "any"
    call: tuple[int, tuple[str, ...]] | None = None
    """How it is called: with so many arguments, and these by name."""
    read_by: str | None = None
    """A function of torch's that reads it: what is written there would have no effect else."""

    @classmethod
    def parse(cls, text: str, use: str, purpose: Purpose) -> PrivateName:
        """From `name`, `name(2)`, `name(2, keyword)` or `name <- reader`."""
        head, _, reader = text.partition(" <- ")
        where, _, call = head.partition("(")
        count, *keywords = call.rstrip(")").split(", ")
        return cls(where, use, purpose, (int(count), tuple(keywords)) if call else None, reader or None)


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@functools.cache
def _applied() -> torch.Tensor:
    """Kept: a node is only valid as long as what it has made."""
    made: torch.Tensor = _Same.apply(torch.zeros(1, requires_grad=True))
    return made


SAMPLES: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.zeros(2),
    "storage": lambda: torch.zeros(2).untyped_storage(),
    "module": lambda: nn.Linear(1, 1),
    "batch_norm": lambda: nn.BatchNorm1d(1),
    "optimizer": lambda: torch.optim.SGD([torch.zeros(1, requires_grad=True)]),
    "scheduler": lambda: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(SAMPLES["optimizer"]())]
    ),
    "node": lambda: _applied().grad_fn,
    "operation": lambda: torch.ops.aten.add_.Tensor,
}
GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
PARAMETER = "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam"
STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"
ELASTIC = "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent"
PG = "torch.distributed.distributed_c10d"
FAKE = "torch._subclasses.fake_tensor"
FUNCTIONAL = "torch.distributed._functional_collectives"

TABLE: dict[Purpose, dict[str, tuple[str, ...]]] = {
    "random draws": {
        "whether a forward is recomputed": (
            "torch._C._current_graph_task_id",
            "torch._C._autograd._top_saved_tensors_default_hooks",
        )
    },
    "sharding": {
        "reducing after a pipeline's schedule": (
            *(f"{GROUP}.post_backward(1)", f"{STATE}._root_post_backward_final_callback(1)"),
        ),
        "the format gradients are summed in": (f"{GROUP}._init_mp_dtypes(1)",),
        "whether a unit's output is a view": ("tensor._is_view(0)",),
    },
    "pipeline": {
        "another answer to a module's call": (
            "module._call_impl <- torch.nn.Module.__call__",
            "module._compiled_call_impl <- torch.nn.Module.__call__",
        )
    },
    "tensor parallelism": {
        "a cut tensor as what it holds": ("torch._C.DisableTorchFunction", "torch._C.DisableTorchFunctionSubclass"),
        "seeing autograd.Functions and torch.vmap": (
            "torch._functorch.utils.unwrap_dead_wrappers(1) <- torch.autograd.Function.apply",
            "torch._functorch.apis.vmap_impl <- torch.vmap",
        ),
    },
    "compile": {
        "collectives in compiled code": (
            *(f"{FUNCTIONAL}.wait_tensor(1)", f"{FUNCTIONAL}.all_reduce(3)", f"{FUNCTIONAL}.all_gather_tensor(3)"),
            f"{FUNCTIONAL}.reduce_scatter_tensor(4)",
        ),
        "no silent return to eager mode": (
            *("torch._dynamo.config.recompile_limit", "torch._dynamo.config.accumulated_recompile_limit"),
            *("torch._dynamo.config.fail_on_recompile_limit_hit", "torch._dynamo.exc.FailOnRecompileLimitHit"),
        ),
        "what cannot be compiled": ("torch._dynamo.exc.Unsupported",),
        "where compiled code is kept": ("torch._inductor.runtime.cache_dir_utils.default_cache_dir(0)",),
    },
    "statistics": {
        "how long ranks wait for each other": (
            *("torch.distributed.Work.wait", "torch.cuda.Stream.wait_event", f"{PG}.ProcessGroup.allreduce"),
        ),
        "whether a rank gets on": (f"{PG}.ProcessGroup._get_sequence_number_for_group",),
    },
    "any": {
        "trees of tensors: batches, arguments": (
            *("torch.utils._pytree.tree_map(2)", "torch.utils._pytree.tree_leaves(1)"),
            *("torch.utils._pytree.tree_flatten(1)", "torch.utils._pytree.tree_map_only(3)"),
        ),
        "seeing operations below autograd": ("torch.utils._python_dispatch.TorchDispatchMode",),
        "leaving our own mode inside of blocks": (
            *("torch.overrides._get_current_function_mode(0)", "torch.overrides._pop_mode_temporarily(0)"),
        ),
        "models without data": (
            *(f"{FAKE}.FakeTensor", f"{FAKE}.FakeTensorMode(0, allow_non_fake_inputs)"),
            *(f"{FAKE}.DataDependentOutputException", f"{FAKE}.DynamicOutputShapeException"),
            "torch._subclasses.fake_impls.op_implementations_dict.setdefault",
        ),
        "tensors that are shown whole between steps": (
            *("torch._C._disabled_torch_function_impl", "torch.Tensor._make_wrapper_subclass"),
            *("module._register_state_dict_hook(1)", "module._load_state_dict_post_hooks", "operation._schema"),
        ),
        "many tensors at once": ("torch._foreach_copy_", "torch._foreach_norm", "torch._foreach_mul_"),
        "draws of recurrent layers and torch.distributions": (
            *("torch._VF.lstm", "torch._VF.gru", "torch._VF.rnn_tanh", "torch._VF.rnn_relu"),
            *("torch._standard_gamma", "torch._sample_dirichlet"),
            *("torch.ops.aten._standard_gamma", "torch.ops.aten._sample_dirichlet"),
        ),
        "distributions that read no values": ("torch.distributions.Distribution._validate_args",),
        "shapes of the CTC loss and of products by groups (experts)": (
            *("torch.ops.aten._ctc_loss.default", "torch.ops.aten._ctc_loss.Tensor"),
            "torch.ops.aten._grouped_mm.default",
        ),
        "whether a CPU computes in fp16": ("torch.ops.mkldnn._is_mkldnn_fp16_supported(0)",),
        "causal kernels under cp": ("torch.nn.attention.bias.CausalBias._dispatch(4, scale)",),
        "whether a tensor was changed in place": ("tensor._version",),
        "gradients of sparse tables": ("tensor._values(0)",),
        "hooks of the user's on gradients": ("tensor._backward_hooks", "tensor._post_accumulate_grad_hooks"),
        "hooks of the user's on a backward": ("module._backward_hooks", "module._backward_pre_hooks"),
        "hooks of the user's on a step": (
            *("optimizer._optimizer_step_pre_hooks", "optimizer._optimizer_step_post_hooks"),
        ),
        "schedulers inside of others": ("scheduler._schedulers",),
        "telling storages apart": ("storage._cdata",),
        "tensors and modules by which a module reads them": (
            *("module._parameters", "module._buffers", "module._modules", "module._non_persistent_buffers_set"),
        ),
        "every kind of BatchNorm, InstanceNorm and dropout": (
            *("torch.nn.modules.batchnorm._BatchNorm", "torch.nn.modules.batchnorm._NormBase"),
            *("torch.nn.modules.instancenorm._InstanceNorm", "torch.nn.modules.dropout._DropoutNd"),
            "batch_norm._check_input_dim(1)",
        ),
        "a forward with rounded weights": ("torch.nn.utils.stateless._reparametrize_module(2)",),
        "a step without data, for the planner": (
            "torch.autograd.graph._engine_run_backward(5, allow_unreachable, accumulate_grad)",
            *("torch.testing._internal.distributed.fake_pg.FakeStore(0)", "operation._opname"),
        ),
        "autograd.Functions of the user's": ("node._forward_cls", "node._input_metadata"),
        "groups of processes": (f"{PG}._set_pg_timeout(2)", f"{PG}._resolve_process_group(1)"),
        "the launcher": (
            *(f"{ELASTIC}._rendezvous(2)", f"{ELASTIC}._start_workers(2)"),
            *(f"{ELASTIC}._stop_workers(2)", f"{ELASTIC}._monitor_workers(2)"),
            "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler._popen(3)",
            "torch.distributed.elastic.multiprocessing.api.get_subprocess_handler",
        ),
    },
}
NAMES = tuple(
    PrivateName.parse(text, use, purpose)
    for purpose, uses in TABLE.items()
    for use, texts in uses.items()
    for text in texts
)
"""Set on objects and looked at where they are made: `_checkpoint_offset` of a storage that torch.load reads under a
FakeTensorMode, `_local_tensor` of a DTensor, `_is_param` by which a Parameter is known, `_pcontext` and
`_remaining_restarts` of the elastic agent."""

WRITTEN_ON_SHARDS = {
    GROUP: ("_reduce_dtype", "fsdp_params", "unsharded_accumulated_grad"),
    STATE: ("_fsdp_param_group",),
    PARAMETER: ("unsharded_accumulated_grad", "reduce_dtype", "sharded_param", "_unsharded_param"),
}
"""Attributes that `prepare_reduce_scatter` reads and writes, which the class has or its own methods use."""


def what_is_wrong(name: PrivateName) -> str | None:
    """Why a name cannot be used as Lockstep does; None if it can."""
    try:
        found = _resolve(name.where)
    except (AttributeError, ImportError, RuntimeError) as error:
        return f"is gone ({error})"
    if name.call is not None and (signature := _signature(found)) is not None:
        count, keywords = name.call
        try:
            signature.bind(*range(count), **dict.fromkeys(keywords))
        except TypeError as error:
            return f"is called otherwise: {signature} ({error})"
    if name.read_by is not None and not _reads(_resolve(name.read_by), name.where.rpartition(".")[2]):
        return f"is no longer read by {name.read_by}"
    return None


@functools.cache
def require(purpose: Purpose) -> None:
    """Refuse to train on a torch where the private names for a purpose are not as they were."""
    wrong = [f"{name.where} {why}" for name in NAMES if name.purpose == purpose and (why := what_is_wrong(name))]
    if purpose == "random draws" and not wrong:
        wrong += _wrong_about_backward()
    if purpose == "sharding" and not wrong:
        wrong += _wrong_about_shards()
    if wrong:
        raise UserError(
            f"torch {torch.__version__} is not as Lockstep knows it, and {purpose} would go wrong: {'; '.join(wrong)}",
            "use a torch between 2.11 and 2.13, or a newer Lockstep",
        )


def _wrong_about_backward() -> Iterable[str]:
    """Try out what tells a forward that is recomputed: without it, dropout would draw another mask."""
    seen: list[bool] = []
    leaf = torch.zeros(1, requires_grad=True)
    leaf.register_hook(lambda _: seen.append(in_backward()))
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        is_saving = saving_hooks() is not None
        (leaf * leaf).sum().backward()
    if seen != [True] or in_backward():
        yield "torch._C._current_graph_task_id does not tell a backward pass"
    if not is_saving or saving_hooks() is not None:
        yield "torch._C._autograd._top_saved_tensors_default_hooks does not tell who saves tensors"


def _wrong_about_shards() -> Iterable[str]:
    for where, attributes in WRITTEN_ON_SHARDS.items():
        kind = _resolve(where)
        for attribute in attributes:
            if not hasattr(kind, attribute) and not any(_reads(method, attribute) for method in vars(kind).values()):
                yield f"{where} has no {attribute}"
    if not _reads(_resolve(f"{GROUP}.post_backward"), "_reduce_dtype"):
        yield f"{GROUP}.post_backward does not sum in _reduce_dtype"


def _resolve(where: str) -> Any:
    first, *rest = where.split(".")
    found = SAMPLES[first]() if first in SAMPLES else importlib.import_module(first)
    path = first
    for part in rest:
        path += f".{part}"
        if not hasattr(found, part) and inspect.ismodule(found):
            importlib.import_module(path)
        found = getattr(found, part)
    return found


def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return None


def _reads(function: Any, name: str) -> bool:
    """Whether a function's code speaks of a name."""
    if isinstance(function, property):
        function = function.fget
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    waiting = [code] if code is not None else []
    while waiting:
        code = waiting.pop()
        if name in code.co_names:
            return True
        waiting += [inner for inner in code.co_consts if inspect.iscode(inner)]
    return False
