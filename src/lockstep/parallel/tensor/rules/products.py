"""Rules for products of tensors (matmul, linear, einsum), and for attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from lockstep.parallel.tensor.cut import (
    Along,
    add_up,
    along_axis,
    along_of,
    mark,
    plain,
    take,
    whole_along,
    whole_shape,
)
from lockstep.parallel.tensor.rules.numbers import along_dim, dropout, pointwise
from lockstep.parallel.tensor.rules.operands import apply_rule, arguments, cannot, cut_like, take_alike
from lockstep.parallel.tensor.rules.shapes import repeat_interleave, swap_dims
from lockstep.runtime.torch_private import causal_lower_right_attention


def contract(
    call: Callable[..., torch.Tensor],
    operands: Sequence[torch.Tensor],
    letters: Sequence[Sequence[Hashable]],
    out: Sequence[Hashable],
) -> Any:
    """A product of tensors whose dims have letters: a letter that the result lacks is summed over.

    Over each axis one letter is cut, that of the first operand that is. The others are cut alike: taken, or gathered
    where they are cut in another letter, as the keys of a sequence that is cut are for its queries.
    """
    values, along, sums = list(operands), [], []
    axes = {one.axis.name: one.axis for value in operands for one in along_of(value)}
    for name, axis in axes.items():
        first = next(
            (named[one.dim], one)
            for value, named in zip(values, letters, strict=True)
            for one in along_of(value)
            if one.axis.name == name
        )
        letter, cut = first
        if name != "tp" and not along_of(values[0]) and letter not in letters[0] and values[0].dim() > 2:
            # Queries of another sequence: they need all keys.
            values = [whole_along(value, name) for value in values]
            continue
        for number, (value, named) in enumerate(zip(values, letters, strict=True)):
            mine = along_axis(value, name)
            if mine is not None and (named[mine.dim], mine.parts) == (letter, cut.parts):
                cut = cut._replace(origins=cut.origins | mine.origins)
                continue
            if mine is not None and name == "tp":
                return cannot([cut, mine], "it is multiplied by a tensor that is cut in another place")
            value = whole_along(value, name)
            if letter in named and value.shape[at := list(named).index(letter)] != 1:
                value = mark(take(plain(value), cut.at(at)), along_of(value))
            values[number] = value
        if letter in out:
            along.append(cut.at(list(out).index(letter)))
        else:
            if name == "tp":
                cannot([cut], "it is summed over in a product")
            sums.append(axis)
    result = call(*map(plain, values))
    for axis in sums:
        result = add_up(result, axis)
    return mark(result, along)


def matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`@`, `matmul`, `bmm`, `mm`."""
    one, other = args if len(args) == 2 else (args[0], next(iter(kwargs.values())))
    if func.__name__ == "__rmatmul__":
        one, other = other, one
    if one.dim() < 2 or other.dim() < 2:
        return NotImplemented
    batch = max(one.dim(), other.dim()) - 2
    left = [*range(batch - one.dim() + 2, batch), "m", "k"]
    right = [*range(batch - other.dim() + 2, batch), "k", "n"]
    return contract(torch.matmul, (one, other), (left, right), [*range(batch), "m", "n"])


def linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x @ weight.T + bias`."""
    value, weight, bias = arguments(args, kwargs, ("input", "weight", "bias"), (None, None, None))
    batch = range(value.dim() - 1)
    result = contract(F.linear, (value, weight), ([*batch, "k"], ["n", "k"]), [*batch, "n"])
    if result is NotImplemented or bias is None:
        return result
    return pointwise(torch.add, (result, bias), {})


def add_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`addmm` and `baddbmm`."""
    value, one, other = args[:3]
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    result = apply_rule(pointwise, torch.mul, matmul(torch.matmul, (one, other), {}), alpha)
    if beta == 0:  # whatever is in there
        return result
    return apply_rule(pointwise, torch.add, apply_rule(pointwise, torch.mul, value, beta), result)


def einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product by its letters."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    if not isinstance(equation, str) or "." in equation:
        return NotImplemented
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    if not arrow:
        joined = "".join(letters)
        out = "".join(sorted(letter for letter in set(joined) if joined.count(letter) == 1))
    if any(len(set(named)) != len(named) for named in letters):
        return NotImplemented
    return contract(lambda *own: torch.einsum(equation, *own), operands, letters, out)


def attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`scaled_dot_product_attention` on this rank's heads, or of this rank's queries with all keys and values."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    query, key, value, bias, p, causal, scale, grouped = arguments(
        args, kwargs, names, (None, None, None, None, 0.0, False, None, False)
    )
    if p > 0:
        return _attention_with_dropout(query, key, value, bias, p, causal, scale, grouped)
    rows = query.dim() - 2
    by_head = [one for one in along_of(query) if one.dim < rows]
    by_row = [one for one in along_of(query) if one.dim == rows]
    if any(one.dim > rows for one in along_of(query)):
        return NotImplemented
    keys = []
    for operand in (key, value):
        for one in along_of(operand):
            if one.dim == operand.dim() - 2:
                operand = whole_along(operand, one.axis.name)
        for one in by_head:
            mine = along_axis(operand, one.axis.name)
            if mine is None:
                size = operand.shape[one.dim]
                if size == 1:  # one key for all heads
                    continue
                if size % one.axis.chunks and one.axis.size > 1:
                    return cannot([one], "its keys and values are not cut by head")
                operand = mark(take(plain(operand), one.at(one.dim, (size,))), along_of(operand))
            elif mine.dim != one.dim:
                return cannot([one, mine], "queries and keys are cut in different places")
        if {one.axis.name for one in along_of(operand)} - {one.axis.name for one in by_head}:
            return cannot(along_of(operand), "its queries are whole")
        keys.append(plain(operand))
    if bias is not None:
        by_query = [one.at(one.dim - query.dim()) for one in (*by_head, *by_row)]
        bias = take_alike(cut_like(bias, by_query), by_query)
    part, options = plain(query), {"scale": scale, "enable_gqa": grouped}
    if causal and by_row:
        result = _causal_rows(func, part, keys[0], keys[1], by_row[0], options)
    else:
        result = func(part, *keys, attn_mask=bias, is_causal=causal, **options)
    origins = frozenset().union(*(one.origins for operand in (query, key, value) for one in along_of(operand)))
    return mark(result, [one._replace(origins=one.origins and origins) for one in along_of(query)])


def _causal_rows(
    func: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, along: Along, options: dict[str, Any]
) -> torch.Tensor:
    """Causal attention of some rows of the whole: each chunk of them with the keys up to its end, and no others."""
    axis = along.axis
    if len(along.parts) != 1 or axis.size == 1 or key.shape[-2] != along.size:
        at = take(torch.arange(along.size, device=query.device), along.at(0))
        seen = at[:, None] >= torch.arange(key.shape[-2], device=query.device)
        return func(query, key, value, attn_mask=seen, **options)  # type: ignore[no-any-return]
    length = along.size // axis.chunks
    found = []
    for chunk_number, rows in zip(axis.chunks_of(axis.rank), query.split(length, -2), strict=True):
        end = (chunk_number + 1) * length
        keys, values = key[..., :end, :], value[..., :end, :]
        if end == length:
            found.append(func(rows, keys, values, is_causal=True, **options))
        elif query.is_cuda and not options["enable_gqa"]:
            found.append(causal_lower_right_attention(rows, keys, values, options["scale"]))
        else:
            mask = torch.ones(length, end, dtype=torch.bool, device=query.device).tril(end - length)
            found.append(func(rows, keys, values, attn_mask=mask, **options))
    return torch.cat(found, -2)


def _attention_with_dropout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Any:
    """Step by step, as torch computes it on a CPU, so that the mask is that of one device."""

    if grouped:
        times = whole_shape(query)[-3] // whole_shape(key)[-3]
        key, value = (apply_rule(repeat_interleave, torch.repeat_interleave, one, times, -3) for one in (key, value))
    factor = 1 / math.sqrt(whole_shape(query)[-1]) if scale is None else scale
    scores = apply_rule(matmul, torch.matmul, query, apply_rule(swap_dims, torch.transpose, key, -2, -1))
    if scores is NotImplemented:
        return NotImplemented
    scores = apply_rule(pointwise, torch.mul, scores, factor)
    if causal:
        rows, columns = whole_shape(scores)[-2:]
        seen = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
        scores = apply_rule(pointwise, torch.Tensor.masked_fill, scores, ~seen, -math.inf)
    elif bias is not None and bias.dtype == torch.bool:
        hidden = apply_rule(pointwise, torch.logical_not, bias)
        scores = apply_rule(pointwise, torch.Tensor.masked_fill, scores, hidden, -math.inf)
    elif bias is not None:
        scores = apply_rule(pointwise, torch.add, scores, bias)
    weights = apply_rule(dropout, F.dropout, apply_rule(along_dim, torch.softmax, scores, -1), p)
    return apply_rule(matmul, torch.matmul, weights, value)
