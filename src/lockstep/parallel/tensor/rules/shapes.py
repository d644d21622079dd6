"""Rules for operations on the shape of a tensor. Sizes and dims are those of the whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.parallel.tensor.cut import Along, Parts, along_of, mark, plain, whole_shape
from lockstep.parallel.tensor.rules.operands import arguments, cannot, flat_sizes, merge_cuts, parts_at, take_alike


def reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`view` and `reshape`, to sizes of the whole."""
    value, *sizes = args
    if kwargs or (sizes and isinstance(sizes[0], torch.dtype)):
        return NotImplemented
    return reshape_whole(value, flat_sizes(sizes))


def reshape_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`view_as` and `reshape_as`."""
    return reshape_whole(args[0], whole_shape(args[1]))


def flatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`flatten` of some dims."""
    value, start, end = arguments(args, kwargs, ("input", "start_dim", "end_dim"), (None, 0, -1))
    shape = whole_shape(value)
    start, end = start % len(shape), end % len(shape)
    return reshape_whole(value, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


def unflatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One dim into several."""
    value, dim, sizes = arguments(args, kwargs, ("input", "dim", "sizes"), (None, 0, ()))
    shape = whole_shape(value)
    dim %= len(shape)
    sizes = list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // -math.prod(sizes)
    return reshape_whole(value, [*shape[:dim], *sizes, *shape[dim + 1 :]])


def reshape_whole(value: torch.Tensor, target: Sequence[int]) -> Any:
    """A tensor in another shape. Which of the new dims are cut follows from the order of the numbers."""
    shape, sizes = whole_shape(value), list(target)
    if -1 in sizes:
        sizes[sizes.index(-1)] = math.prod(shape) // -math.prod(sizes)
    if math.prod(shape) != math.prod(sizes):
        return NotImplemented
    own, along = list(sizes), []
    for one in along_of(value):
        place = follow(shape, sizes, one)
        if place is None:
            return cannot([one], f"its {one.size} values cannot be divided in the shape {tuple(sizes)}")
        dim, parts = place
        if parts != one.parts and not one.at(dim, parts).is_even:
            return NotImplemented
        if one.axis.observer is not None and parts != one.parts:
            for part in set(parts):
                one.axis.observer.divides(one, part, "heads" if len(sizes) > len(shape) else "features")
        own[dim] = one.at(dim, parts).own
        along.append(one.at(dim, parts))
    return mark(plain(value).reshape(own), along)


def follow(shape: Sequence[int], target: Sequence[int], along: Along) -> tuple[int, Parts] | None:
    """Which dim of the shape `target` is cut, and its parts, when a dim of `shape` was."""
    old = [dim for dim, length in enumerate(shape) if length != 1]
    new = [dim for dim, length in enumerate(target) if length != 1]
    while old:
        olds, news = [old.pop(0)], [new.pop(0)]
        while (here := math.prod([shape[d] for d in olds])) != (there := math.prod([target[d] for d in news])):
            if here < there:
                olds.append(old.pop(0))
            else:
                news.append(new.pop(0))
        if along.dim not in olds:
            continue
        at = olds.index(along.dim)
        behind = math.prod([shape[d] for d in olds[at + 1 :]])
        parts = tuple(part * behind for part in along.parts) * math.prod([shape[d] for d in olds[:at]])
        for at, dim in enumerate(news):
            times = math.prod([target[d] for d in news[:at]])
            behind = math.prod([target[d] for d in news[at + 1 :]])
            here_parts = parts[: len(parts) // times]
            if len(parts) % times or here_parts * times != parts or any(part % behind for part in here_parts):
                continue
            found = tuple(part // behind for part in here_parts)
            if sum(found) == target[dim] and min(found) > 1:
                return dim, found
        return None
    return None


def swap_dims(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`transpose` and its other names."""
    value, one, other = arguments(args, kwargs, ("input", "dim0", "dim1"), (None, 0, 1))
    order = list(range(value.dim()))
    order[one], order[other] = order[other], order[one]
    return permute_whole(value, order)


def permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`permute`, to an order of all dims."""
    if kwargs:
        return NotImplemented
    return permute_whole(args[0], [dim % args[0].dim() for dim in flat_sizes(args[1:])])


def movedim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`movedim` of one dim or several."""
    value, source, target = arguments(args, kwargs, ("input", "source", "destination"), (None, 0, 0))
    sources, targets = ([x] if isinstance(x, int) else list(x) for x in (source, target))
    places = {to % value.dim(): dim % value.dim() for dim, to in zip(sources, targets, strict=True)}
    rest = iter([dim for dim in range(value.dim()) if dim not in places.values()])
    return permute_whole(value, [places[dim] if dim in places else next(rest) for dim in range(value.dim())])


def permute_whole(value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """A tensor with its dims in another order."""
    return mark(plain(value).permute(*order), [one.at(list(order).index(one.dim)) for one in along_of(value)])


def unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One more dim."""
    value, dim = arguments(args, kwargs, ("input", "dim"), (None, 0))
    dim %= value.dim() + 1
    return mark(plain(value).unsqueeze(dim), [one.at(one.dim + (dim <= one.dim)) for one in along_of(value)])


def squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Without the dims of size 1, all or some."""
    value, dims = arguments(args, kwargs, ("input", "dim"), (None, None))
    shape = whole_shape(value)
    dims = range(len(shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = [dim % len(shape) for dim in dims if shape[dim] == 1]
    if lost := [one for one in along_of(value) if one.dim in gone]:
        return cannot(lost, "the dim that is cut is taken away")
    kept = [length for dim, length in enumerate(value.shape) if dim not in gone]
    along = [one.at(one.dim - sum(dim < one.dim for dim in gone)) for one in along_of(value)]
    return mark(plain(value).reshape(kept), along)


def expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """To larger sizes of dims that have size 1."""
    value, *sizes = *args, *kwargs.values()
    own = list(whole_shape(sizes[0]) if isinstance(sizes[0], torch.Tensor) else flat_sizes(sizes))
    more = len(own) - value.dim()
    along = [one.at(one.dim + more) for one in along_of(value)]
    for one in along:
        own[one.dim] = -1
    return mark(plain(value).expand(own), along)


def repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies behind each other, not along a dim that is cut."""
    value, times = args[0], list(flat_sizes(args[1:]))
    more = len(times) - value.dim()
    along = [one.at(one.dim + more) for one in along_of(value)]
    if any(times[one.dim] != 1 for one in along):
        return NotImplemented
    return mark(plain(value).repeat(times), along)


def repeat_interleave(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each several times: of heads that are cut, each rank repeats its own."""
    value, times, dim = arguments(args, kwargs, ("input", "repeats", "dim"), (None, 1, None))
    if not isinstance(times, int) or dim is None:
        return NotImplemented
    dim %= value.dim()
    along = [
        one.at(one.dim, tuple(part * times for part in one.parts) if one.dim == dim else None)
        for one in along_of(value)
    ]
    return mark(plain(value).repeat_interleave(times, dim=dim), along)


def split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Into pieces of given sizes."""
    value, sizes, dim = arguments(args, kwargs, ("tensor", "split_size_or_sections", "dim"), (None, 1, 0))
    whole = whole_shape(value)[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)]
    return _pieces(value, list(sizes), dim % value.dim())


def chunk(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Into a number of pieces."""
    value, count, dim = arguments(args, kwargs, ("input", "chunks", "dim"), (None, 1, 0))
    whole = whole_shape(value)[dim]
    each = -(-whole // count)
    return _pieces(value, [min(each, whole - start) for start in range(0, whole, each)], dim % value.dim())


def _pieces(value: torch.Tensor, sizes: list[int], dim: int) -> Any:
    if len(sizes) == 1:
        return (value,)
    own, along_by_piece = list(sizes), [list(along_of(value)) for _ in sizes]
    for number, one in enumerate(along_of(value)):
        if one.dim != dim:
            continue
        parts = divided(one.parts, sizes)
        if parts is None:
            return cannot([one], f"it is taken apart into {len(sizes)} pieces", tuple(sizes))
        own = [length // one.axis.size for length in sizes]
        for along, mine in zip(along_by_piece, parts, strict=True):
            along[number] = one.at(dim, mine)
    pieces = plain(value).split(own, dim)
    return tuple(mark(piece, along) for piece, along in zip(pieces, along_by_piece, strict=True))


def divided(parts: Parts, sizes: Sequence[int]) -> list[Parts] | None:
    """The parts of each piece, where pieces of these sizes end where parts do."""
    rest, found = list(parts), []
    for length in sizes:
        mine: list[int] = []
        while rest and sum(mine) < length:
            mine.append(rest.pop(0))
        if sum(mine) != length:
            return None
        found.append(tuple(mine))
    return found


def unbind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Into the slices along one dim."""
    value, dim = arguments(args, kwargs, ("input", "dim"), (None, 0))
    dim %= value.dim()
    for one in along_of(value):
        if one.dim == dim:
            return cannot([one], f"it is taken apart into {one.size} pieces", (1,) * one.size)
    along = [one.at(one.dim - (dim < one.dim)) for one in along_of(value)]
    return tuple(mark(piece, along) for piece in plain(value).unbind(dim))


def getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x[...]` with whole numbers, slices, None and one `...`; and rows of a whole table by numbers that are cut."""
    value, index = args
    if not along_of(value):
        if along_of(index) and index.dtype not in (torch.bool, torch.uint8):
            return mark(value[plain(index)], along_of(index))
        return NotImplemented
    index = list(index) if isinstance(index, tuple) else [index]
    if not all(one is None or one is Ellipsis or type(one) in (int, slice) for one in index):
        return NotImplemented
    named = sum(1 for one in index if one is not None and one is not Ellipsis)
    rest = [slice(None)] * (value.dim() - named)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index[at : at + 1] = rest
    else:
        index += rest
    own: list[Any] = []
    along: list[Along] = []
    dim = place = 0
    for one in index:
        if one is None:
            own.append(one)
            place += 1
            continue
        here = [cut for cut in along_of(value) if cut.dim == dim]
        kept = _slice_of(one, here[0]) if here else (one, ())
        if kept is None:
            return _cannot_slice(one, here[0])
        own.append(kept[0])
        along += [cut.at(place, kept[1]) for cut in here]
        dim += 1
        place += not isinstance(one, int)
    return mark(plain(value)[tuple(own)], along)


def _slice_of(index: Any, along: Along) -> tuple[Any, Parts] | None:
    """A slice of a dim that is cut, in terms of this rank's part; None where it is no sum of parts."""
    if isinstance(index, int) or index.step not in (None, 1):
        return None
    start, end, _ = index.indices(along.size)
    if (start, end) == (0, along.size):
        return slice(None), along.parts
    if not along.is_even:
        return None
    cuts = [size for size in (start, end - start, along.size - end) if size > 0]
    pieces = divided(along.parts, cuts) if end > start else None
    if pieces is None:
        return None
    mine = pieces[0 if start == 0 else 1]
    size = along.axis.size
    return slice(start // size, end // size), mine


def _cannot_slice(index: Any, along: Along) -> Any:
    if isinstance(index, int):
        return cannot([along], "one of its values is taken out", (1,) * along.size)
    start, end, _ = index.indices(along.size)
    ends = sorted({0, start, end, along.size} | set(itertools.accumulate(along.parts)))
    parts = tuple(b - a for a, b in itertools.pairwise(ends))
    return cannot([along], f"its values from {start} to {end} are taken out", parts)


def select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.select(dim, index)`."""
    value, dim, index = arguments(args, kwargs, ("input", "dim", "index"), (None, 0, 0))
    return getitem(func, (value, (*[slice(None)] * (dim % value.dim()), index)), {})


def narrow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.narrow(dim, start, length)`."""
    value, dim, start, count = arguments(args, kwargs, ("input", "dim", "start", "length"), (None, 0, 0, 0))
    start = start + whole_shape(value)[dim] if start < 0 else start
    return getitem(func, (value, (*[slice(None)] * (dim % value.dim()), slice(start, start + count))), {})


def cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Behind each other. Along the dim that is cut, the result has the parts of all."""
    values, dim = arguments(args, kwargs, ("tensors", "dim"), (None, 0))
    values = [value for value in values if value.dim() > 1 or value.numel()]  # torch takes empty ones of any shape
    dim %= values[0].dim()
    along = merge_cuts([one for value in values for one in along_of(value)], dim)
    if along is NotImplemented:
        return NotImplemented
    parts = []
    for value in values:
        here = [one.at(one.dim, (whole_shape(value)[dim],)) if one.dim == dim else one for one in along]
        if any(length % one.axis.chunks for one in here if one.dim == dim for length in one.parts):
            return NotImplemented
        parts.append(take_alike(value, [one.at(one.dim - value.dim()) for one in here]))
    joined = [
        one.at(dim, tuple(p for value in values for p in parts_at(value, one.axis, dim))) if one.dim == dim else one
        for one in along
    ]
    return mark(torch.cat(parts, dim), joined)


def stack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Beside each other, along a new dim."""
    values, dim = arguments(args, kwargs, ("tensors", "dim"), (None, 0))
    along = merge_cuts([one for value in values for one in along_of(value)], -1)
    if along is NotImplemented:
        return NotImplemented
    dim %= values[0].dim() + 1
    parts = [take_alike(value, [one.at(one.dim - value.dim()) for one in along]) for value in values]
    return mark(torch.stack(parts, dim), [one.at(one.dim + (dim <= one.dim)) for one in along])


def pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """More values at the ends of dims that are not cut."""
    value, widths = args[0], args[1] if len(args) > 1 else kwargs["pad"]
    padded = [value.dim() - 1 - number // 2 for number, width in enumerate(widths) if width]
    if any(one.dim in padded for one in along_of(value)):
        return NotImplemented
    return mark(func(plain(value), *args[1:], **kwargs), along_of(value))


def complex_pairs(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`view_as_complex` and `view_as_real`: the last dim of two becomes one number, or comes back."""
    value = args[0]
    if any(one.dim == value.dim() - 1 for one in along_of(value)) and func.__name__ == "view_as_complex":
        return NotImplemented
    return mark(func(plain(value)), along_of(value))
