"""What a sample costs: the FLOPs of a model's forward and backward, counted by following it once.

A copy of the model without data is made where it is built, before any layout cuts it. On that copy the loss function
runs once, forward and backward, with a first micro-batch: nothing is computed, nothing is allocated and
nobody is asked anything. It does so in a child process, because a loss function may do more than compute: change its
batch, count its calls, draw random numbers. The run itself is as if nobody had traced. Counted are products of
matrices, attention and convolutions, a multiplication with its addition as two. What is computed a second time to save
memory counts once, and attention counts whole, also where a mask hides half of it.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import flop_counter

from lockstep.config.schema import Format
from lockstep.data.loader import MicroBatch, kept_random_state
from lockstep.errors import UserError
from lockstep.follow.forward import Operations, following
from lockstep.follow.rehearsal import without_data
from lockstep.follow.values import fake_like
from lockstep.observe.device_peak import Peak
from lockstep.parallel.pipeline.stage import copy_of
from lockstep.runtime.torch_private import FakeTensorMode
from lockstep.step.precision import compute_in

Loss = Callable[[nn.Module, Any], Any]
Formula = Callable[..., int]

LONGEST_SECONDS = 20.0
"""A run does not wait longer than this to know what its samples cost."""
MOST_COPIED_BYTES = 1 << 20
"""Of a tensor that is neither parameter nor buffer: larger ones have no data in the copy either."""
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of operations in which ranks wait for each other."""

CPU = torch.device("cpu")
"""Where the copy seems to be, whatever the run computes on: no GPU is touched, and one number holds for all devices."""

aten = torch.ops.aten


class UncutModel:
    """The model as `build_model` made it, without its data, until it was counted with a micro-batch.

    That is as soon as both are there: a process that has computed gradients on a GPU cannot fork one that does.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._count: Callable[[nn.Module], dict[str, int]] | None = None
        self._is_built = self._is_shown = False
        self._samples = 0
        self.per_sample: dict[str, float] = {}
        """FLOPs by kind, where there is no `reason` why they are not known."""
        self.reason = "the model was not built"

    def watching(self, build_model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """The same function, which leaves a copy here of what it returns first."""

        def build() -> nn.Module:
            model = build_model()
            if not self._is_built:
                self._is_built = True
                self._copy(model)
                self._trace()
            return model

        return build

    def _copy(self, model: nn.Module) -> None:
        self.reason = "there are no samples to trace the model with"
        try:
            self._model = model_without_data(model)
        except Exception as error:  # whatever is in the user's model: the run does not depend on this
            self.reason = f"the model cannot be copied without its data ({type(error).__name__}: {error})"

    def show(self, loss: Loss, first: MicroBatch, precision: Format = "fp32") -> None:
        """The first micro-batch is known; a later one is not looked at."""
        if not self._is_shown:
            self._is_shown, self._samples = True, len(first.ids)
            self._count = lambda model: count_flops(model, loss, first.data, precision)
            self._trace()

    def _trace(self) -> None:
        """Count once, where both are there; neither is kept."""
        if self._model is not None and self._count is not None:
            (model, self._model), (count, self._count) = (self._model, None), (self._count, None)
            counted, self.reason = in_a_child(lambda: _counted_or_why(model, count), LONGEST_SECONDS)
            self.per_sample = {kind: _plain(flops / self._samples) for kind, flops in counted.items() if flops}


def _counted_or_why(model: nn.Module, count: Callable[[nn.Module], dict[str, int]]) -> tuple[dict[str, int], str]:
    try:
        return count(model), ""
    except UserError as error:
        why = error.cause
    except Exception as error:  # of the user's code on tensors without data, or of an operation that needs some
        why = f"{type(error).__name__}: {error}"
        if "Autograd-and-Fork" in why:  # as torch 2.11 and 2.13 say it
            why = "this process has computed gradients on a GPU before, after which a fork of it cannot"
    return {}, f"the model cannot be traced: {why}"[:500]


def flops_event(uncut: UncutModel, peak: Peak) -> dict[str, Any]:
    """The fields of the event `flops`."""
    by, reason = uncut.per_sample, uncut.reason
    return {
        "per_sample": None if reason else sum(by.values()),
        "by": by,
        "peak": peak.flops,
        "source": peak.source,
        "reason": "; ".join(filter(None, (reason, peak.reason))),
    }


def in_a_child(count: Callable[[], tuple[dict[str, int], str]], seconds: float) -> tuple[dict[str, int], str]:
    """What a function returns, found out by a fork of this process, which ends after so many seconds."""
    try:
        answer = _answer_of_a_child(count, seconds)
    except OSError as error:  # there is no memory for another process, or no more files: the run can do without
        return {}, f"the model cannot be traced: {error}"
    if answer is None:
        return {}, f"the model cannot be traced: that takes longer than {seconds:g} s"
    if not answer:
        return {}, "the model cannot be traced: the process that did it has died"
    counted, reason = json.loads(answer)
    return counted, reason


def _answer_of_a_child(count: Callable[[], tuple[dict[str, int], str]], seconds: float) -> bytes | None:
    """What the child has written: nothing where it died, None where it takes too long."""
    with ExitStack() as everything:
        reader, writer = os.pipe()
        everything.callback(os.close, reader)
        with os.fdopen(writer, "wb"):
            child = os.fork()
            if child == 0:
                try:
                    # What the script prints in there, it prints again in the first step.
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                    os.dup2(1, 2)
                    torch.set_num_threads(1)  # the threads of the parent are not here
                    os.write(writer, json.dumps(count()).encode())
                finally:
                    os._exit(0)
        everything.callback(os.waitpid, child, 0)
        everything.callback(os.kill, child, signal.SIGKILL)
        waiting = select.poll()  # unlike select(), whatever the number of the file
        waiting.register(reader, select.POLLIN)
        return os.read(reader, 1 << 16) if waiting.poll(1000 * seconds) else None


def model_without_data(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers have a shape alone, and all else that is large too."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(fake_like(parameter, mode, CPU), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = fake_like(buffer, mode, CPU)
    for hidden in _tensors_of(model, set()):
        if id(hidden) not in memo and hidden.nbytes > MOST_COPIED_BYTES:
            shape = fake_like(hidden, mode, CPU)
            is_parameter = isinstance(hidden, nn.Parameter)
            memo[id(hidden)] = nn.Parameter(shape, requires_grad=hidden.requires_grad) if is_parameter else shape
    return copy_of(model, memo)


def _tensors_of(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Those that a model holds in whatever way: a teacher in a list, a table that is no buffer."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from _tensors_of(vars(value), seen)
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_of(part, seen)


def count_flops(model: nn.Module, loss: Loss, data: Any, precision: Format = "fp32") -> dict[str, int]:
    """What `loss(model, data)` and its backward cost, by kind of operation; `model` has no data."""
    if not model.training:
        model.train()
    counting = _Counting()
    attention = {"scaled_dot_product_attention": _attention(counting)}
    with _untouched(), following(operation=counting.count, instead=attention):
        with compute_in(precision, CPU):
            value = loss(model, data)[0]
        if value.requires_grad:
            counting.is_backward = True
            value.sum().backward()
    return dict(counting.flops)


class _Counting:
    """Adds up the FLOPs of a forward and, once it `is_backward`, of its backward."""

    def __init__(self) -> None:
        self.flops: Counter[str] = Counter()
        self.is_backward = False
        self._formulas = _formulas()

    def add(self, kind: str, flops: int) -> None:
        # A backward records no gradients: what does is the forward of torch.utils.checkpoint, for the second time.
        if not (self.is_backward and torch.is_grad_enabled()):
            self.flops[kind] += flops

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Count an operation; refuse one that would wait for other ranks, which do not trace.

        torch's own FlopCounterMode also follows modules, and is slower for it.
        """
        if func is torch.ops.prim.device.default:  # most of all
            return func(*args, **kwargs)
        if func.namespace in COLLECTIVES:
            raise UserError("it talks to other ranks", "leave that to the layout")
        formula = self._formulas.get(func.overloadpacket)
        if formula is None:
            with Operations(self.count):  # one that is made of others, which count
                parts = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if parts is NotImplemented else parts
        result = func(*args, **kwargs)
        self.add(_kind(str(func)), formula(*args, **kwargs, out_val=result))
        return result


def _kind(operation: str) -> str:
    return "attention" if "attention" in operation else "convolutions" if "conv" in operation else "products"


def _formulas() -> dict[Any, Formula]:
    """FLOPs of every operation that is counted, from its arguments and result.

    torch's own (`flop_registry` is not documented in 2.11 and 2.13), but for three: its backward of attention includes
    the scores a second time, one of five equal products; its backward of a convolution forgets the groups; and it knows
    neither the attention of CPUs nor products with a vector.
    """
    known: dict[Any, Formula] = dict(flop_counter.flop_registry)
    for forward in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"):
        of_cpu = forward.replace("flash_attention", "flash_attention_for_cpu")
        known[getattr(aten, of_cpu)] = known[getattr(aten, forward)]
    for operation, formula in list(known.items()):
        if "attention" in str(operation) and "backward" in str(operation):
            known[operation] = _without_scores(formula)
    return known | {
        aten.convolution_backward: _convolution_backward,
        aten.mv: lambda *args, **_: 2 * args[0].numel(),
        aten.addmv: lambda *args, **_: 2 * args[1].numel(),
        aten.dot: lambda *args, **_: 2 * args[0].numel(),
    }


def _without_scores(formula: Formula) -> Formula:
    return lambda *args, **kwargs: formula(*args, **kwargs) * 4 // 5


def _convolution_backward(gradient: Tensor, given: Tensor, weight: Tensor, *rest: Any, **_: Any) -> int:
    """As much as the forward for the gradient of the input, and as much again for that of the weights."""
    is_transposed, is_needed = rest[4], rest[7]
    positions = given if is_transposed else gradient
    forward = 2 * positions.numel() * math.prod(weight.shape[1:])
    return forward * sum(is_needed[:2])  # type: ignore[no-any-return]


def _attention(counting: _Counting) -> Callable[..., Tensor]:
    """Attention as two products forward and four backward, whichever kernel would compute it here."""
    attend = F.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **named: Any
    ) -> Tensor:
        if attn_mask is not None and attn_mask.requires_grad:  # its gradient is known to torch alone
            return attend(query, key, value, attn_mask, *rest, **named)
        scores, mixed = (
            2 * math.prod(query.shape[:-1]) * key.shape[-2] * tensor.shape[-1] for tensor in (query, value)
        )
        counting.add("attention", scores + mixed)
        kind = query.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
        attended: Tensor = _Attended.apply(query, key, value, dtype, counting, scores, mixed)
        return attended

    return attention


class _Attended(torch.autograd.Function):
    """Has the shape of attention and of its gradients, and counts what these cost."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype, counting: _Counting, *costs: int
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.counting, ctx.costs = counting, costs
        return query.new_empty(*query.shape[:-1], value.shape[-1], dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        scores, mixed = ctx.costs
        of_query, of_key, of_value = ctx.needs_input_grad[:3]
        through_scores = mixed if of_query or of_key else 0
        ctx.counting.add("attention", mixed * of_value + through_scores + scores * (of_query + of_key))
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[:3], strict=True)
        return *(torch.empty_like(tensor) if wanted else None for tensor, wanted in needed), None, None, None, None


@contextmanager
def _untouched() -> Iterator[None]:
    """Leave the random streams and the settings of the process as they were."""
    with ExitStack() as everything:
        everything.enter_context(kept_random_state())
        everything.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # A recurrent layer is one kernel of this library, and products of matrices without it.
        everything.enter_context(torch.backends.mkldnn.flags(enabled=False))
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and to import it takes a second
            everything.enter_context(torch.compiler.set_stance("force_eager"))
        everything.enter_context(torch.enable_grad())
        everything.enter_context(without_data("which tracing does not know"))
        yield


def _plain(number: float) -> float:
    """Whole numbers as such: they are exact."""
    return int(number) if number.is_integer() else number
