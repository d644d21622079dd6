"""One forward of a module, in parts at its repeated blocks: matmuls, attention, what is kept, what is moved.

Where blocks hand on [batch, tokens, hidden], tensor parallelism is taken to work as in a transformer: what is as wide
as hidden stays whole, and all else is divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.follow.blocks import find_blocks
from lockstep.follow.forward import following
from lockstep.planner.model.parts import AttentionSize, Matmul, MatmulCut, Model, ModelPart
from lockstep.runtime.torch_private import storage_key, tree_leaves

NO_KERNEL = ("_unsafe_view", "empty", "new_empty", "detach", "lift", "_to_copy_view", "alias")
"""Operations that start nothing on a device, besides views."""

DROPOUT = F.dropout


@dataclass
class Seen:
    """What one part of the forward did, for the whole batch."""

    name: str
    parameters: int = 0
    cut_parameters: int = 0
    matmuls: list[Matmul] = field(default_factory=list)
    attentions: list[AttentionSize] = field(default_factory=list)
    kept: float = 0.0
    cut_kept: float = 0.0
    kept_bytes: float = 0.0
    traffic: float = 0.0
    cut_traffic: float = 0.0
    kernels: int = 0
    border: float = 0.0
    has_mixed: bool = False
    """Whether attention came already: what comes after it writes the residual stream."""
    last_cut: MatmulCut = "whole"


class ForwardNotes:
    """Notes what a forward does under the part that is running.

    What runs between two blocks counts as the first of them, and what runs after the last as the part after it.
    """

    def __init__(self, model: nn.Module) -> None:
        blocks = find_blocks(model)
        self.seen = [Seen("before"), *(Seen(name) for name, _ in blocks), Seen("after")] if blocks else [Seen("model")]
        self.at = 0
        self.hidden: int | None = None
        """The width of what blocks hand on; None: they are no transformer's."""
        self.weights = {storage_key(parameter.untyped_storage()) for parameter in model.parameters()}
        """Storages of parameters that no matmul has used so far."""
        storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        self._storages = {storage_key(storage): storage for storage in storages}
        """Kept alive, so that no other gets the same number."""
        self._model = model
        self._numbers = {id(block): number for number, (_, block) in enumerate(blocks, start=1)}
        self._counted: set[int] = set()
        for seen, (_, block) in zip(self.seen[1:], blocks, strict=False):
            self._count(seen, block.parameters())

    def finish(self) -> None:
        """Parameters that no module has used, and the table of an embedding."""
        self._count(self.seen[0], self._model.parameters())
        if self.hidden is not None:
            self._cut_table()

    def _count(self, seen: Seen, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if id(parameter) not in self._counted:
                self._counted.add(id(parameter))
                seen.parameters += parameter.numel()

    def _cut_table(self) -> None:
        """The largest table of an embedding is divided, and counts so where it is used first."""
        tables = [module.weight for module in self._model.modules() if isinstance(module, nn.Embedding)]
        if tables:
            largest = max(tables, key=lambda table: table.numel())
            if storage_key(largest.untyped_storage()) not in self.weights:  # a head has used it, which is tied to it
                self.seen[-1].cut_parameters -= largest.numel()
            self.seen[0].cut_parameters += largest.numel()

    def enter(self, module: nn.Module, arguments: Any) -> None:
        """A module is called: parameters outside of blocks belong to the part that uses them first."""
        if (number := self._numbers.get(id(module))) is not None:
            if number == 1:
                first = next((leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)), None)
                self.seen[0].border = _elements(arguments)
                if first is not None and first.dim() == 3 and first.is_floating_point():
                    self.hidden = first.shape[-1]
            self.at = number
        if module is not self._model:
            self._count(self.seen[self.at], module.parameters(recurse=False))

    def leave(self, module: nn.Module, output: Any) -> None:
        """A module has returned."""
        if (number := self._numbers.get(id(module))) is not None:
            self.seen[number].border = _elements(output)
            self.at = number + 1 if number == len(self._numbers) else number

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do an operation, and note it as a matmul or by what it reads and writes."""
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.namespace != "aten" or func.is_view or name.startswith(NO_KERNEL):
            return out
        part = self.seen[self.at]
        part.kernels += 1
        if product := _product(name, args, out):
            product = replace(product, cut=self._cut(name, product))
            part.matmuls.append(product)
            if product.cut != "whole" and name in ("mm", "addmm"):
                self._count_cut(part, args, product)
            return out
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        # Of a table in which rows are looked up, not all is read.
        for tensor in (*(read[1:] if name == "embedding" else read), *made):
            if self._is_whole(tensor):
                part.traffic += tensor.numel()
            else:
                part.cut_traffic += tensor.numel()
        return out

    def _is_whole(self, tensor: Tensor) -> bool:
        # What has a number a token, such as the means of a norm, belongs to the whole as well.
        return self.hidden is None or tensor.dim() < 2 or tensor.shape[-1] in (self.hidden, 1)

    def _cut(self, name: str, product: Matmul) -> MatmulCut:
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

    def _count_cut(self, part: Seen, args: tuple[Any, ...], product: Matmul) -> None:
        weight = storage_key(args[-1].untyped_storage())
        if weight in self.weights:
            self.weights.remove(weight)
            bias = args[0].numel() if len(args) == 3 and product.cut == "columns" else 0
            part.cut_parameters += product.inner * product.columns + bias

    def keep(self, tensor: Tensor) -> None:
        """Count what the backward will need, each storage once."""
        storage = tensor.untyped_storage()
        if storage_key(storage) in self._storages:
            return
        self._storages[storage_key(storage)] = storage
        part = self.seen[self.at]
        if not tensor.is_floating_point():
            part.kept_bytes += storage.nbytes()
        elif self._is_whole(tensor):
            part.kept += storage.nbytes() / tensor.itemsize
        else:
            part.cut_kept += storage.nbytes() / tensor.itemsize

    def attention(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Tensor:
        """As one kernel, like on a GPU: a CPU takes it apart."""
        causal = bool(named.get("is_causal", rest[2] if len(rest) > 2 else False))
        heads, kv_heads = (math.prod(tensor.shape[1:-2]) for tensor in (query, key))
        tokens = round(math.sqrt(query.shape[-2] * key.shape[-2]))
        part = self.seen[self.at]
        part.has_mixed = True
        part.attentions.append(AttentionSize(heads, kv_heads, query.shape[-1], tokens, causal))
        part.kernels += 1
        return _Flash.apply(query, key, value)  # type: ignore[no-any-return]

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """With a mask of bytes, like on a GPU."""
        if not training or p == 0:
            return DROPOUT(input, p, training, inplace)
        part = self.seen[self.at]
        part.kernels += 1
        part.traffic += 2.0 * input.numel()
        return _Dropped.apply(input)  # type: ignore[no-any-return]


def model_from_forward(name: str, model: nn.Module, forward: Callable[[], Any], batch: int, tokens: int) -> Model:
    """The parts of a model from one forward (with its loss) of a batch on tensors without data."""
    notes = ForwardNotes(model)
    kernels: dict[str, Callable[..., Tensor]] = {
        "scaled_dot_product_attention": notes.attention,
        "dropout": notes.dropout,
    }
    with following(model.modules(), notes.enter, notes.leave, operation=notes.note, keeps=notes.keep, instead=kernels):
        forward()
    notes.finish()
    return Model(name, _merged([_part(seen, batch) for seen in notes.seen]), tokens)


def _elements(values: Any) -> float:
    found = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return float(found[0].numel()) if found else 0.0


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


def _part(seen: Seen, batch: int) -> ModelPart:
    """The share of one sample."""
    attention = None
    if seen.attentions:
        heads, kv_heads = (
            sum(getattr(attention, name) for attention in seen.attentions) for name in ("heads", "kv_heads")
        )
        attention = replace(seen.attentions[0], heads=heads, kv_heads=kv_heads)
    per_sample = ("kept", "cut_kept", "kept_bytes", "traffic", "cut_traffic", "border")
    return ModelPart(
        name=seen.name,
        count=1,
        parameters=seen.parameters,
        cut_parameters=seen.cut_parameters,
        matmuls=tuple(replace(matmul, rows=max(1, matmul.rows // batch)) for matmul in seen.matmuls),
        attention=attention,
        kernels=seen.kernels,
        **{name: getattr(seen, name) / batch for name in per_sample},
    )


def _merged(parts: list[ModelPart]) -> tuple[ModelPart, ...]:
    """Neighbours that are alike as one part with a count."""
    found: list[ModelPart] = []
    for part in parts:
        if found and replace(part, name="", count=0) == replace(found[-1], name="", count=0):
            found[-1] = replace(found[-1], count=found[-1].count + 1)
        else:
            found.append(part)
    return tuple(found)
