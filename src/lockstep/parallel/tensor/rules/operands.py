"""What rules share: arguments by name, operands cut alike, and saying that an operation needs the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.parallel.tensor.cut import (
    Along,
    Parts,
    along_axis,
    along_of,
    cuts_in,
    gather,
    mark,
    plain,
    take,
    whole_shape,
)
from lockstep.runtime.axis import Axis

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""What a torch function does: called with it and its arguments, where a Cut is its own part."""


def cannot(along: Sequence[Along], reason: str, parts: Parts | None = None) -> Any:
    """Say, while a forward is tried out, that an operation needs the whole; at work it will be gathered."""
    for observer in {one.axis.observer for one in along if one.axis.observer is not None}:
        observer.cannot([one for one in along if one.axis.observer is observer], reason, parts)
    return NotImplemented


def cut_like(value: torch.Tensor, along: Sequence[Along]) -> torch.Tensor:
    """A tensor whole where it is not cut like `along` (dims from the last one): a mask of keys, say."""
    rest = []
    part = plain(value)
    for one in along_of(value):
        same = [other for other in along if other.axis.name == one.axis.name]
        if not same or (same[0].dim, same[0].parts) != (one.dim - value.dim(), one.parts):
            part = gather(part, one)
        else:
            rest.append(one)
    return mark(part, rest)


def take_alike(value: torch.Tensor, along: Sequence[Along]) -> torch.Tensor:
    """This rank's plain part of an operand that is cut like `along` (dims from the last one), or not cut there yet."""
    part = plain(value)
    done = {one.axis.name for one in along_of(value)}
    for one in along:
        if one.axis.name not in done and part.dim() >= -one.dim and part.shape[one.dim] != 1:
            part = take(part, one.at(one.dim + part.dim()))
    return part


def merge_cuts(all_along: Sequence[Along], free: int) -> Any:
    """The cuts of several tensors that have to be alike, but for the parts of one dim."""
    found: list[Along] = []
    for one in all_along:
        same = [other for other in found if other.axis.name == one.axis.name]
        if not same:
            found.append(one)
        elif same[0].dim != one.dim or (one.dim != free and same[0].parts != one.parts):
            return cannot([same[0], one], "it meets a tensor that is cut in another place")
        else:
            found[found.index(same[0])] = same[0]._replace(origins=same[0].origins | one.origins)
    return found


def parts_at(value: torch.Tensor, axis: Axis, dim: int) -> Parts:
    """The parts of a dim, whether it is cut or still whole."""
    cut = along_axis(value, axis.name)
    return (whole_shape(value)[dim],) if cut is None else cut.parts


def apply_rule(rule: Rule, func: Any, *args: Any) -> Any:
    """A function by its rule, or as it is where nothing is cut; NotImplemented of something that already is."""
    if any(value is NotImplemented for value in args):
        return NotImplemented
    return rule(func, args, {}) if cuts_in(args) else func(*args)


def arguments(args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str], defaults: Sequence[Any]) -> list[Any]:
    """The arguments of a call by name, whichever way they were given. Methods call the first one `self`."""
    given = list(args)
    return [
        given[number] if number < len(given) else kwargs.get(name, default)
        for number, (name, default) in enumerate(zip(names, defaults, strict=True))
    ]


def flat_sizes(sizes: Sequence[Any]) -> list[int]:
    """Sizes that were given as a tuple, or one by one."""
    return list(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else list(sizes)
