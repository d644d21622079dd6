"""One forward of a module, in parts at its repeated blocks: matmuls, attention, what is kept, what is moved.

Where blocks hand on [batch, tokens, hidden], tensor parallelism is taken to work as in a transformer: what is as wide
as hidden stays whole, and all else is divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.follow.blocks import find_blocks
from lockstep.planner.model.parts import Attention, Cut, Matmul, Model, Part
from lockstep.runtime.torch_private import TorchDispatchMode, storage_key, tree_leaves

NO_KERNEL = ("_unsafe_view", "empty", "new_empty", "detach", "lift", "_to_copy_view", "alias")
"""Operations that start nothing on a device, besides views."""


@dataclass
class Seen:
    """What one part of the forward did, for the whole batch."""

    name: str
    parameters: int = 0
    cut_parameters: int = 0
    matmuls: list[Matmul] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    kept: float = 0.0
    cut_kept: float = 0.0
    kept_bytes: float = 0.0
    traffic: float = 0.0
    cut_traffic: float = 0.0
    kernels: int = 0
    border: float = 0.0
    has_mixed: bool = False
    """Whether attention came already: what comes after it writes the residual stream."""
    last_cut: Cut = "whole"


class Watch(TorchDispatchMode):
    """Notes every operation under the part that is running."""

    def __init__(self, seen: list[Seen], weights: set[int]) -> None:
        super().__init__()
        self.seen = seen
        self.at = 0
        self.hidden: int | None = None
        """The width of what blocks hand on; None: they are no transformer's."""
        self.weights = weights
        """Storages of parameters that no product has used so far."""
        self.storages: dict[int, Any] = {}
        """Kept alive, so that no other gets the same number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view:
            self._note(func, args, [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)], out)
        return out

    def _note(self, func: Any, args: Sequence[Any], tensors: list[Tensor], out: Any) -> None:
        name = func.overloadpacket.__name__
        if name.startswith(NO_KERNEL):
            return
        part = self.seen[self.at]
        part.kernels += 1
        if product := _product(name, args, out):
            product = replace(product, cut=self._cut(name, product))
            part.matmuls.append(product)
            if product.cut != "whole" and name in ("mm", "addmm"):
                self._count_cut(part, args, product)
            return
        made = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        for one in (*_looked_up(name, tensors), *made):
            if self._is_whole(one):
                part.traffic += one.numel()
            else:
                part.cut_traffic += one.numel()

    def _is_whole(self, tensor: Tensor) -> bool:
        # What has a number a token, such as the means of a norm, belongs to the whole as well.
        return self.hidden is None or tensor.dim() < 2 or tensor.shape[-1] in (self.hidden, 1)

    def _cut(self, name: str, product: Matmul) -> Cut:
        """Columns of what reads the residual stream, the inner dim of what writes it; products of heads by heads."""
        if self.hidden is None:
            return "whole"
        part = self.seen[self.at]
        if name in ("bmm", "baddbmm"):
            part.has_mixed = True
            return "columns"
        reads, writes = product.inner == self.hidden, product.columns == self.hidden
        if reads and writes:  # queries, keys and values; then, in turn, what writes and what reads
            reads = not part.has_mixed or part.last_cut == "inner"
        part.last_cut = "columns" if reads else "inner" if writes else "whole"
        return part.last_cut

    def _count_cut(self, part: Seen, args: Sequence[Any], product: Matmul) -> None:
        weight = storage_key(args[-1].untyped_storage())
        if weight in self.weights:
            self.weights.remove(weight)
            bias = args[0].numel() if len(args) == 3 and product.cut == "columns" else 0
            part.cut_parameters += product.inner * product.columns + bias

    def keep(self, tensor: Tensor) -> Tensor:
        """Count what the backward will need, each storage once."""
        storage = tensor.untyped_storage()
        if storage_key(storage) not in self.storages:
            self.storages[storage_key(storage)] = storage
            part = self.seen[self.at]
            if tensor.is_floating_point():
                elements = storage.nbytes() / tensor.itemsize
                if self._is_whole(tensor):
                    part.kept += elements
                else:
                    part.cut_kept += elements
            else:
                part.kept_bytes += storage.nbytes()
        return tensor


def follow(name: str, model: nn.Module, forward: Callable[[], Any], batch: int, tokens: int) -> Model:
    """The parts of a model from one forward (with its loss) of a batch on tensors without data."""
    blocks = find_blocks(model)
    seen = [Seen("before"), *(Seen(block) for block, _ in blocks), Seen("after")] if blocks else [Seen("model")]
    watch = Watch(seen, {storage_key(parameter.untyped_storage()) for parameter in model.parameters()})
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        watch.storages[storage_key(storage)] = storage
    counted = _count_blocks([block for _, block in blocks], watch.seen)
    handles = [*_follow_blocks([block for _, block in blocks], watch), *_count_others(model, counted, watch)]
    try:
        with _as_on_a_gpu(watch), torch.autograd.graph.saved_tensors_hooks(watch.keep, lambda tensor: tensor), watch:
            forward()
    finally:
        for handle in handles:
            handle.remove()
    watch.seen[0].parameters += sum(
        parameter.numel() for parameter in dict.fromkeys(model.parameters()) if id(parameter) not in counted
    )
    if watch.hidden is not None:
        _cut_table(model, watch)
    return Model(name, _merged([_part(one, batch) for one in watch.seen]), tokens)


def _cut_table(model: nn.Module, watch: Watch) -> None:
    """The largest table of an embedding is divided, and counts so where it is used first."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    if tables:
        largest = max(tables, key=lambda table: table.numel())
        tied = storage_key(largest.untyped_storage()) not in watch.weights
        if tied:
            watch.seen[-1].cut_parameters -= largest.numel()
        watch.seen[0].cut_parameters += largest.numel()


def _count_blocks(blocks: Sequence[nn.Module], seen: Sequence[Seen]) -> set[int]:
    counted: set[int] = set()
    for block, one in zip(blocks, seen[1:], strict=False):
        for parameter in block.parameters():
            if id(parameter) not in counted:
                counted.add(id(parameter))
                one.parameters += parameter.numel()
    return counted


def _count_others(model: nn.Module, counted: set[int], watch: Watch) -> Iterator[Any]:
    """Parameters outside of blocks belong to the part that uses them first."""

    def use(module: nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in counted:
                counted.add(id(parameter))
                watch.seen[watch.at].parameters += parameter.numel()

    for module in model.modules():
        if module is not model and any(True for _ in module.parameters(recurse=False)):
            yield module.register_forward_pre_hook(use)


def _follow_blocks(blocks: Sequence[nn.Module], watch: Watch) -> Iterator[Any]:
    """What runs between two blocks counts as the first of them, and what runs after the last as the part after it."""

    def enter(number: int, arguments: Any) -> None:
        if number == 1:
            first = next((one for one in tree_leaves(arguments) if isinstance(one, Tensor)), None)
            watch.seen[0].border = _elements(arguments)
            if first is not None and first.dim() == 3 and first.is_floating_point():
                watch.hidden = first.shape[-1]
        watch.at = number

    def leave(number: int, out: Any) -> None:
        watch.seen[number].border = _elements(out)
        watch.at = number + 1 if number == len(blocks) else number

    for number, block in enumerate(blocks, start=1):
        yield block.register_forward_pre_hook(lambda _, given, number=number: enter(number, given))
        yield block.register_forward_hook(lambda _, __, out, number=number: leave(number, out))


def _elements(values: Any) -> float:
    found = [one for one in tree_leaves(values) if isinstance(one, Tensor) and one.is_floating_point()]
    return float(found[0].numel()) if found else 0.0


@contextmanager
def _as_on_a_gpu(watch: Watch) -> Iterator[None]:
    """Attention as one kernel, and dropout with a mask of bytes: a CPU takes both apart."""
    drop = F.dropout

    def attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Tensor:
        causal = bool(named.get("is_causal", rest[2] if len(rest) > 2 else False))
        heads, kv_heads = (math.prod(one.shape[1:-2]) for one in (query, key))
        tokens = round(math.sqrt(query.shape[-2] * key.shape[-2]))
        part = watch.seen[watch.at]
        part.has_mixed = True
        part.attentions.append(Attention(heads, kv_heads, query.shape[-1], tokens, causal))
        part.kernels += 1
        return _Flash.apply(query, key, value)  # type: ignore[no-any-return]

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return drop(input, p, training, inplace)
        part = watch.seen[watch.at]
        part.kernels += 1
        part.traffic += 2.0 * input.numel()
        return _Dropped.apply(input)  # type: ignore[no-any-return]

    with patch.object(F, "scaled_dot_product_attention", attention), patch.object(F, "dropout", dropout):
        yield


class _Flash(torch.autograd.Function):
    """Has the shape of attention, and keeps what a flash kernel keeps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        *outer, tokens, _ = query.shape
        out = query.new_empty(*outer[:-1], tokens, *outer[-1:], value.shape[-1]).transpose(-2, -3)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out


class _Dropped(torch.autograd.Function):
    """Has the shape of dropout, and keeps a byte an element."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(given, dtype=torch.bool))
        return torch.empty_like(given)


def _looked_up(name: str, tensors: list[Tensor]) -> list[Tensor]:
    """What an operation reads: of a table in which rows are looked up, not all of it."""
    return tensors[1:] if name == "embedding" else tensors


def _product(name: str, args: Sequence[Any], out: Any) -> Matmul | None:
    """An operation as a product of matrices, where it is one."""
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        left, right = args[-2:] if name in ("mm", "bmm") else args[1:3]
        return Matmul(left.numel() // left.shape[-1], left.shape[-1], right.shape[-1])
    if name == "linear":
        return Matmul(args[0].numel() // args[0].shape[-1], args[1].shape[1], args[1].shape[0])
    if name in ("convolution", "_convolution"):
        weight = args[1]
        return Matmul(out.numel() // out.shape[1], weight[0].numel(), weight.shape[0])
    return None


def _part(seen: Seen, batch: int) -> Part:
    """The share of one sample."""
    attention = None
    if seen.attentions:
        first = seen.attentions[0]
        attention = replace(
            first,
            heads=sum(one.heads for one in seen.attentions),
            kv_heads=sum(one.kv_heads for one in seen.attentions),
        )
    return Part(
        name=seen.name,
        count=1,
        parameters=seen.parameters,
        cut_parameters=seen.cut_parameters,
        matmuls=tuple(replace(one, rows=max(1, one.rows // batch)) for one in seen.matmuls),
        attention=attention,
        kept=seen.kept / batch,
        cut_kept=seen.cut_kept / batch,
        kept_bytes=seen.kept_bytes / batch,
        traffic=seen.traffic / batch,
        cut_traffic=seen.cut_traffic / batch,
        kernels=seen.kernels,
        border=seen.border / batch,
    )


def _merged(parts: list[Part]) -> tuple[Part, ...]:
    """Neighbours that are alike as one part with a count."""
    found: list[Part] = []
    for part in parts:
        if found and replace(part, name="", count=0) == replace(found[-1], name="", count=0):
            found[-1] = replace(found[-1], count=found[-1].count + 1)
        else:
            found.append(part)
    return tuple(found)
