"""Tensors that are cut over ranks: each rank computes with its shard, and code that uses them sees the whole.

A `Cut` has the shape of the whole tensor and the data of this rank's part. The user's own `.view(b, t, heads, d)`
means what it says, and attention runs on this rank's heads. The matrices of a tensor-parallel block make such
tensors (axis tp), and so does a batch whose sequences are cut (axis cp). What an operation does with them is one rule
a torch function, in `rules/`; one without a rule gets the whole tensor, gathered.

Gradients follow one convention: the loss is divided by the number of ranks that compute it together, and the gradient
of anything is the SUM of what those ranks have of it. So the derivative of every collective is its transpose, a value
that is not cut needs no care at all, and what ranks hold of one parameter is added up once, after the last backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from lockstep.follow.forward import Functions
from lockstep.follow.values import is_fake
from lockstep.runtime.axis import Axis
from lockstep.runtime.comm import gather_into, scatter_sums_into
from lockstep.runtime.torch_private import DisableTorchFunction, DisableTorchFunctionSubclass, functional, group_by_name

Parts = tuple[int, ...]


class CannotCutError(Exception):
    """A trial has come to an operation that needs the whole of what some modules returned."""

    def __init__(
        self, origins: list[frozenset[str]], reason: str, parts: Parts | None = None, stated: bool = False
    ) -> None:
        super().__init__(reason)
        self.stated = stated  # by the user, of one module
        self.origins = origins
        self.reason = reason
        self.parts = parts


class Observer(Protocol):
    """Who looks on when a forward is tried out: it learns what cannot be cut, and what a cut has to divide."""

    def cannot(self, along: list[Along], reason: str, parts: Parts | None) -> None:
        """An operation would need whole tensors. Raises, or returns where they may be gathered."""

    def divides(self, along: Along, size: int, what: str) -> None:
        """The number of ranks has to divide this size."""


class Along(NamedTuple):
    """Where a tensor is cut: a dim that consists of `parts`, each shared out evenly over the ranks of the axis.

    One part is the usual case. Queries, keys and values in one matrix are three; so are the sequences of three samples
    in one row of tokens.
    """

    axis: Axis
    dim: int
    parts: Parts
    origins: frozenset[str] = frozenset()
    """The modules that cut it, where a forward is tried out."""

    @property
    def size(self) -> int:
        """The size of the whole dim."""
        return sum(self.parts)

    @property
    def is_even(self) -> bool:
        """Whether every part can be shared out evenly. Only a vocabulary may be uneven: the last ranks have less."""
        return all(part % self.axis.chunks == 0 for part in self.parts)

    @property
    def own(self) -> int:
        """How long the dim of this rank's part is."""
        return self.size // self.axis.size if self.is_even else len(self.rows_of(self.axis.rank))

    def rows_of(self, rank: int) -> range:
        """Where an uneven share begins and ends."""
        most = -(-self.size // self.axis.size)
        return range(min(rank * most, self.size), min((rank + 1) * most, self.size))

    def at(self, dim: int, parts: Parts | None = None) -> Along:
        """The same cut in another place."""
        return Along(self.axis, dim, self.parts if parts is None else parts, self.origins)


class Cut(torch.Tensor):
    """This rank's part of a tensor that shows the shape of the whole. `along` says where it is cut."""

    along: tuple[Along, ...] = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from lockstep.parallel.tensor.rules import answer  # which makes tensors of this class

        with DisableTorchFunctionSubclass():  # inside, a Cut is its own part
            return answer(func, args, kwargs or {})

    # These are Python functions of torch's class, which torch.compile cannot hand over to the one above.

    def split(self, split_size: Any, dim: int = 0) -> Any:
        """Into pieces."""
        return self._answer(torch.Tensor.split, split_size, dim)

    def unflatten(self, dim: Any, sizes: Any) -> Any:
        """One dim into several."""
        return self._answer(torch.Tensor.unflatten, dim, sizes)

    def _answer(self, func: Any, *args: Any) -> Any:
        return type(self).__torch_function__(func, (type(self),), (self, *args))

    def __deepcopy__(self, memo: Any) -> Any:
        with DisableTorchFunctionSubclass():
            return mark(self.detach().clone(), self.along)


class Following(Functions):
    """Lets cuts be tried out on tensors without data, which cannot be of another class: they have an attribute."""

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """By the rule of a torch function that is given a cut tensor."""
        from lockstep.parallel.tensor.rules import answer

        return answer(func, args, kwargs) if cuts_in((args, kwargs)) else func(*args, **kwargs)


def along_of(value: Any) -> tuple[Along, ...]:
    """Where a value is cut; nowhere if it is plain."""
    found: tuple[Along, ...] = getattr(value, "along", ())
    return found


def along_axis(value: Any, axis: str) -> Along | None:
    """Where a value is cut over one axis."""
    return next((one for one in along_of(value) if one.axis.name == axis), None)


def along_others(value: Any, axis: str) -> tuple[Along, ...]:
    """Where a value is cut over other axes."""
    return tuple([one for one in along_of(value) if one.axis.name != axis])


def mark(part: torch.Tensor, along: Sequence[Along]) -> torch.Tensor:
    """This rank's part as a tensor of the whole shape; a plain tensor if it is not cut."""
    if not along:
        return plain(part)
    with DisableTorchFunction():
        cut: Any = part.view_as(part) if is_fake(part) else part.as_subclass(Cut)
    cut.along = tuple(along)
    return cut  # type: ignore[no-any-return]


def plain(value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, as a plain one."""
    if not along_of(value):
        return value
    with DisableTorchFunction():
        return (
            value.view_as(value) if torch.compiler.is_compiling() or is_fake(value) else value.as_subclass(torch.Tensor)
        )


def whole_shape(value: torch.Tensor) -> list[int]:
    """The shape of the whole; called where a Cut is its own part."""
    shape = list(value.shape)
    for along in along_of(value):
        shape[along.dim] = along.size
    return shape


def take(whole: torch.Tensor, along: Along, rank: int | None = None) -> torch.Tensor:
    """A rank's part of a plain tensor along one dim."""
    axis = along.axis
    if axis.size == 1:
        return whole
    if not along.is_even:
        rows = along.rows_of(axis.rank if rank is None else rank)
        return whole.narrow(along.dim, rows.start, len(rows))
    mine = axis.chunks_of(axis.rank if rank is None else rank)
    if len(set(along.parts)) == 1:
        table = whole.unflatten(along.dim, (len(along.parts), axis.chunks, -1))
        pieces = [table.narrow(along.dim + 1, chunk, 1) for chunk in mine]
        return _joined(pieces, along.dim + 1).flatten(along.dim, along.dim + 2)
    pieces = []
    for start, size in zip(itertools.accumulate((0, *along.parts)), along.parts, strict=False):
        length = size // axis.chunks
        pieces += [whole.narrow(along.dim, start + chunk * length, length) for chunk in mine]
    return _joined(pieces, along.dim)


def put_together(stacked: torch.Tensor, along: Along) -> torch.Tensor:
    """The whole along one dim, from the parts of all ranks; those are stacked along dim 0."""
    axis, dim = along.axis, along.dim + 1
    if not along.is_even:
        pieces = [piece.narrow(along.dim, 0, len(along.rows_of(rank))) for rank, piece in enumerate(stacked)]
        return _joined(pieces, along.dim)
    found = []
    equal = len(set(along.parts)) == 1
    groups = [along.parts] if equal else [(part,) for part in along.parts]
    lengths = [sum(group) // axis.size for group in groups]
    for piece, group in zip(stacked.split(lengths, dim), groups, strict=True):
        table = piece.unflatten(dim, (len(group), len(axis.chunks_of(0)), -1))
        columns = [column.movedim(0, dim) for column in table.unbind(dim + 1)]  # by rank behind by part
        if axis.zigzag:
            columns[1] = columns[1].flip(dim)
        found.append(_joined(columns, dim).flatten(dim - 1, dim + 1))
    return _joined(found, along.dim)


def gather(part: torch.Tensor, along: Along) -> torch.Tensor:
    """The whole of a plain part along one dim."""
    if along.axis.size == 1:
        return part
    whole: torch.Tensor = _Gather.apply(part, along)
    return whole


def add_up(part: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of what the ranks of an axis have, on each of them."""
    if axis.size == 1:
        return part
    total: torch.Tensor = _Sum.apply(part, axis)
    return total


def add_up_apart(part: torch.Tensor, along: Along) -> torch.Tensor:
    """The sum of what the ranks have, of which each keeps its part along a dim."""
    if along.axis.size == 1:
        return part
    mine: torch.Tensor = _SumApart.apply(part, along)
    return mine


def whole_along(value: torch.Tensor, axis: str) -> torch.Tensor:
    """A tensor, gathered where it is cut over one axis."""
    cut = along_axis(value, axis)
    return value if cut is None else mark(gather(plain(value), cut), along_others(value, axis))


def whole_of(value: torch.Tensor) -> torch.Tensor:
    """A tensor, gathered along every dim it is cut in; called where a Cut is its own part."""
    part = plain(value)
    for along in along_of(value):
        part = gather(part, along)
    return part


def cuts_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in the arguments of a call that are cut."""
    if along_of(tree):
        return [tree]
    if isinstance(tree, tuple | list):
        return [cut for one in tree for cut in cuts_in(one)]
    if isinstance(tree, dict):
        return [cut for one in tree.values() for cut in cuts_in(one)]
    return []


def without_cuts(tree: Any, change: Callable[[torch.Tensor], torch.Tensor] = whole_of) -> Any:
    """Arguments of a call with every Cut replaced, in tuples, lists and dicts."""
    if along_of(tree):
        return change(tree)
    if type(tree) in (tuple, list):
        return type(tree)([without_cuts(one, change) for one in tree])
    if type(tree) is dict:
        return {key: without_cuts(one, change) for key, one in tree.items()}
    return tree


def take_apart(tree: Any) -> tuple[Any, tuple[Any, ...]]:
    """A value with its tensors plain, and where each of them is cut, in order; in tuples, lists and dicts."""
    if isinstance(tree, torch.Tensor):
        return plain(tree), (along_of(tree),)
    if type(tree) in (tuple, list):
        pairs = [take_apart(one) for one in tree]
        return type(tree)([part for part, _ in pairs]), tuple([along for _, along in pairs])
    if type(tree) is dict:
        found = {key: take_apart(one) for key, one in tree.items()}
        return {key: pair[0] for key, pair in found.items()}, tuple([pair[1] for pair in found.values()])
    return tree, ()


def put_cuts_back(tree: Any, along: tuple[Any, ...]) -> Any:
    """The value that was taken apart."""
    if isinstance(tree, torch.Tensor):
        return mark(tree, along[0]) if along[0] else tree
    if type(tree) in (tuple, list):
        return type(tree)([put_cuts_back(one, own) for one, own in zip(tree, along, strict=True)])
    if type(tree) is dict:
        return {key: put_cuts_back(one, own) for (key, one), own in zip(tree.items(), along, strict=True)}
    return tree


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return all_reduce(part, "sum", axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(gradient, "sum", ctx.axis), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, along: Along) -> torch.Tensor:
        ctx.along = along
        return put_together(all_gather(_padded(part, along), along.axis), along)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_scatter(gradient, ctx.along), None


class _SumApart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, along: Along) -> torch.Tensor:
        ctx.along = along
        return reduce_scatter(part, along)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return put_together(all_gather(_padded(gradient, ctx.along), ctx.along.axis), ctx.along), None


def _padded(part: torch.Tensor, along: Along) -> torch.Tensor:
    """A part as long as that of the first rank."""
    missing = len(along.rows_of(0)) - part.shape[along.dim]
    if along.is_even or not missing:
        return part
    return torch.cat(
        [part, part.new_zeros([missing if dim == along.dim else n for dim, n in enumerate(part.shape)])], along.dim
    )


def all_reduce(part: torch.Tensor, how: str, axis: Axis) -> torch.Tensor:
    """A reduction over the ranks of an axis, without a derivative."""
    # Contiguous: gloo touches the wrong elements of any other tensor.
    if torch.compiler.is_compiling():
        total: torch.Tensor = functional.wait_tensor(functional.all_reduce(part.contiguous(), how, axis.group))
        return total
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM, group=_group(axis))
    return total


def reduce_scatter(part: torch.Tensor, along: Along) -> torch.Tensor:
    """This rank's part, along a dim, of the sum of what all ranks have; without a derivative."""
    axis = along.axis
    parts = torch.stack([_padded(take(part, along, rank), along) for rank in range(axis.size)])
    if torch.compiler.is_compiling():
        mine = functional.wait_tensor(functional.reduce_scatter_tensor(parts, "sum", 0, axis.group)).squeeze(0)
    else:
        mine = torch.empty_like(parts[0])
        scatter_sums_into(mine.view(-1), parts.view(-1), group=_group(axis))
    own: torch.Tensor = mine.narrow(along.dim, 0, along.own)
    return own


def all_gather(part: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The parts of all ranks of an axis, stacked along a new first dim; without a derivative."""
    sent = part.contiguous()
    if part.dtype == torch.bool:  # which gloo does not know
        return all_gather(sent.view(torch.uint8), axis).view(torch.bool)
    if torch.compiler.is_compiling():
        stacked: torch.Tensor = functional.wait_tensor(functional.all_gather_tensor(sent.flatten(), 0, axis.group))
    else:
        stacked = sent.new_empty(axis.size * sent.numel())
        gather_into(stacked, sent.view(-1), group=_group(axis))
    return stacked.view(axis.size, *part.shape)


def _group(axis: Axis) -> dist.ProcessGroup:
    return group_by_name(axis.group)


def _joined(pieces: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim)
