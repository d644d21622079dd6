"""Rules for operations on the numbers of a tensor: one by one, along a dim, and sums of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from lockstep.parallel.tensor.cut import Along, add_up, along_of, mark, plain, whole_shape, without_cuts
from lockstep.parallel.tensor.rules.operands import arguments, cannot, cut_like, flat_sizes, take_alike
from lockstep.parallel.tensor.rules.shapes import chunk

# fmt: off
IN_PLACE = (
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "add_", "sub_", "mul_", "div_", "masked_fill_", "clamp_",
    "clamp_min_", "clamp_max_", "exp_", "neg_", "sigmoid_", "tanh_", "relu_", "square_", "sqrt_", "rsqrt_", "pow_",
    "zero_", "fill_", "copy_", "addcmul_", "addcdiv_", "lerp_", "silu_", "gelu_",
)
# fmt: on

DEFAULT_DIM = {"topk": -1, "sort": -1, "argsort": -1}


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operands that broadcast: all are cut alike, and of those that are whole each rank takes its part."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    along: list[Along] = []  # dims counted from the last one: -1, -2, ...
    sizes = [math.prod(whole_shape(tensor)) for tensor in tensors]
    for size in sorted(set(sizes), reverse=True):
        for one, tensor in [(one, t) for t, n in zip(tensors, sizes, strict=True) if n == size for one in along_of(t)]:
            mine = one.at(one.dim - tensor.dim())
            same = [other for other in along if other.axis.name == mine.axis.name]
            if not same and (mine.axis.name == "tp" or size == max(sizes)):
                along.append(mine)
            elif not same:
                continue  # a mask of keys, say, that meets scores of whole sequences: it is gathered
            elif (same[0].dim, same[0].parts) != (mine.dim, mine.parts) and mine.axis.name == "tp":
                return cannot([same[0], mine], "it meets a tensor that is cut in another place")
    changes_first = func.__name__ in IN_PLACE
    if changes_first and {one.at(one.dim - args[0].dim()) for one in along_of(args[0])} != set(along):
        return NotImplemented
    along = [_with_origins(one, tensors) for one in along]

    def own(value: Any) -> Any:
        return take_alike(cut_like(value, along), along) if isinstance(value, torch.Tensor) else value

    for one in along:
        for tensor in tensors:
            if tensor.dim() >= -one.dim and whole_shape(tensor)[one.dim] not in (1, one.size):
                return NotImplemented  # it does not broadcast: torch says so, in terms of the whole
    result = func(*[own(value) for value in args], **{key: own(value) for key, value in kwargs.items()})
    if changes_first:
        return args[0]
    return mark(result, [one.at(one.dim + result.dim()) for one in along])


def _with_origins(along: Along, tensors: Sequence[torch.Tensor]) -> Along:
    if along.axis.observer is None:
        return along
    origins = [one.origins for tensor in tensors for one in along_of(tensor) if one.axis.name == along.axis.name]
    return along._replace(origins=frozenset().union(*origins))


def like_first(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operations on one tensor whose result is cut like it."""
    result = func(plain(args[0]), *without_cuts(args[1:], plain), **without_cuts(kwargs, plain))
    return mark(result, along_of(args[0])) if isinstance(result, torch.Tensor) else result


def dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mask of the whole tensor is drawn, and each rank takes its part: the numbers are those of one device."""
    value, p, training = arguments(args, kwargs, ("input", "p", "training"), (None, 0.5, kwargs.get("train", True)))
    if not training or p == 0:
        return value
    return pointwise(torch.mul, (value, F.dropout(_ones_like_whole(value), p)), {})


def _ones_like_whole(value: torch.Tensor) -> torch.Tensor:
    """Ones in the shape of the whole, laid out in memory like the part: random numbers are drawn in that order."""
    shape, order = whole_shape(value), sorted(range(value.dim()), key=value.stride, reverse=True)
    ones = torch.ones([shape[dim] for dim in order], dtype=value.dtype, device=value.device)
    return ones.permute([order.index(dim) for dim in range(value.dim())])


def random_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`randn_like` and friends draw for the whole, too."""
    value = args[0]
    drawn = func(_ones_like_whole(value), *args[1:], **kwargs)
    return mark(take_alike(drawn, [one.at(one.dim - value.dim()) for one in along_of(value)]), along_of(value))


def along_dim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operations along one dim, which must not be cut (softmax, cumsum, normalize, flip, topk)."""
    value = args[0]
    dims = kwargs.get("dim", kwargs.get("dims", args[1] if len(args) > 1 else DEFAULT_DIM.get(func.__name__)))
    if func.__name__ == "flip" and len(args) > 1:
        dims = flat_sizes(args[1:])
    elif func.__name__ == "normalize":
        dims = kwargs.get("dim", args[2] if len(args) > 2 else 1)
    elif func.__name__ in ("topk", "roll"):
        dims = kwargs.get("dim", kwargs.get("dims", args[2] if len(args) > 2 else DEFAULT_DIM.get(func.__name__)))
    if dims is None or not isinstance(value, torch.Tensor):
        return NotImplemented
    used = {dim % value.dim() for dim in ([dims] if isinstance(dims, int) else dims)}
    for one in along_of(value):
        if one.dim in used:
            return cannot([one], f"{func.__name__} goes along the dim that is cut")
    result = func(plain(value), *args[1:], **kwargs)
    if isinstance(result, torch.Tensor):
        return mark(result, along_of(value))
    return type(result)([mark(part, along_of(value)) for part in result])


def norm_of_last(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`layer_norm` and `rms_norm`, over the last dims."""
    value, shape = arguments(args, kwargs, ("input", "normalized_shape"), (None, ()))
    for one in along_of(value):
        if one.dim >= value.dim() - len(shape):
            return cannot([one], f"{func.__name__} goes over the dim that is cut")
    return mark(func(plain(value), *args[1:], **{k: v for k, v in kwargs.items() if k != "input"}), along_of(value))


def glu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first half times the sigmoid of the second."""
    value, dim = arguments(args, kwargs, ("input", "dim"), (None, -1))
    halves = chunk(torch.chunk, (value, 2, dim), {})
    if halves is NotImplemented:
        return NotImplemented
    return pointwise(torch.mul, (halves[0], pointwise(torch.sigmoid, (halves[1],), {})), {})


def reduction(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums, means, extremes. A sum or a mean over a dim that is cut is added up over the ranks."""
    value, name = args[0], func.__name__
    at = 2 if name in ("norm", "vector_norm") else 1
    given = kwargs.get("dim", args[at] if len(args) > at else None)
    if isinstance(given, torch.Tensor) or isinstance(kwargs.get("other"), torch.Tensor):
        return pointwise(func, args, kwargs)  # max(x, y)
    if given is None or isinstance(given, bool) or given in ((), []):  # `unbiased` stands there, or nothing
        dims = set(range(value.dim()))
    else:
        dims = {dim % value.dim() for dim in ([given] if isinstance(given, int) else given)}
    over = [one for one in along_of(value) if one.dim in dims]
    if over and name not in ("sum", "mean"):
        return cannot(over, f"{name} goes over the dim that is cut")
    cannot([one for one in over if one.axis.name == "tp"], f"{name} goes over the dim that is cut")
    result = func(plain(value), *args[1:], **kwargs)
    first = result if isinstance(result, torch.Tensor) else result[0]
    keeps = first.dim() == value.dim()
    along = [
        one.at(one.dim - (0 if keeps else sum(dim < one.dim for dim in dims)))
        for one in along_of(value)
        if one.dim not in dims
    ]
    if not isinstance(result, torch.Tensor):
        return type(result)([mark(part, along) for part in result])
    for one in over:
        result = add_up(result * (one.own / one.size) if name == "mean" else result, one.axis)
    return mark(result, along)


def new_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor of another shape, of the same kind: a whole one."""
    return func(plain(args[0]), *args[1:], **kwargs)


def where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of two, by a condition; the places where it holds are another function of the same name."""
    return pointwise(func, args, kwargs) if len(args) + len(kwargs) == 3 else NotImplemented


def prelu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One slope for all; one for each channel stands for dim 1, not the last one."""
    slopes = args[1] if len(args) > 1 else kwargs["weight"]
    return pointwise(func, args, kwargs) if slopes.numel() == 1 or args[0].dim() == 2 else NotImplemented


def one_hot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a number of classes that is given: a rank sees some of them only."""
    classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    return like_first(func, args, kwargs) if classes != -1 else NotImplemented


def elementwise_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`mse_loss` and other losses of pairs of numbers."""
    names = ("input", "target", "size_average", "reduce", "reduction")
    value, target, average, reduce, how = arguments(args, kwargs, names, (None, None, None, None, "mean"))
    extra = {key: kept for key, kept in kwargs.items() if key not in names}
    if average is not None or reduce is not None or len(args) > 2:
        return NotImplemented
    losses = pointwise(func, (value, target), {**extra, "reduction": "none"})
    if losses is NotImplemented or how == "none":
        return losses
    return reduction(torch.sum if how == "sum" else torch.mean, (losses,), {})
