"""Rules for embeddings and for the cross entropy, also of logits whose classes are cut."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lockstep.parallel.tensor.cut import Along, add_up, all_reduce, along_of, mark, plain
from lockstep.parallel.tensor.rules.operands import arguments, cannot, merge_cuts, take_alike


def embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of a whole table by numbers that are cut."""
    numbers, weight = args[:2]
    if along_of(weight):
        return NotImplemented
    return mark(func(plain(numbers), weight, *args[2:], **kwargs), along_of(numbers))


def cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Also of logits whose classes are cut: then no rank ever has all of them."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    defaults = (None, None, None, None, -100, None, "mean", 0.0)
    logits, target, weight, average, ignored, reduce, how, smoothing = arguments(args, kwargs, names, defaults)
    numbers = target.dim() == logits.dim() - 1
    classes = 1 if logits.dim() > 1 else 0
    if average is not None or reduce is not None or not numbers:
        return NotImplemented
    by_class = [one for one in along_of(logits) if one.dim == classes]
    special = weight is not None or smoothing
    if by_class and (by_class[0].axis.zigzag or len(by_class[0].parts) > 1):
        return cannot(by_class, "cross_entropy has tokens for classes, or classes in several parts")
    if by_class and special:
        return cannot(by_class, "cross_entropy has class weights or label smoothing")
    by_sample = [one for one in along_of(logits) if one.dim != classes]
    shifted = [one.at(one.dim - (one.dim > classes)) for one in by_sample]
    along = merge_cuts([*shifted, *along_of(target)], -1)
    if along is NotImplemented:
        return NotImplemented
    counted = take_alike(target, [one.at(one.dim - target.dim()) for one in along])
    rows = [one.at((one.dim + (one.dim >= classes and logits.dim() > 1)) - logits.dim()) for one in along]
    part = take_alike(mark(plain(logits), by_sample), rows)
    if by_class:
        losses = _ClassLoss.apply(part, counted, by_class[0], classes, ignored)
    else:
        losses = F.cross_entropy(part, counted, weight, None, ignored, None, "none", smoothing)
    if how == "none":
        return mark(losses, along)
    total = losses.sum()
    for one in along:
        total = add_up(total, one.axis)
    if how == "sum":
        return total
    kept = counted != ignored
    count = kept.sum() if weight is None else (weight[counted.masked_fill(~kept, 0)] * kept).sum()
    for one in along:
        count = all_reduce(count, "sum", one.axis) if one.axis.size > 1 else count
    return total / count


class _ClassLoss(torch.autograd.Function):
    """Cross entropy of logits whose classes are cut over ranks, sample by sample."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, along: Along, classes: int, ignored: int
    ) -> torch.Tensor:
        axis = along.axis
        scores = logits.movedim(classes, -1).float()
        most = scores.amax(-1)
        if axis.size > 1:
            most = all_reduce(most, "max", axis)
        scores = scores - most[..., None]
        first = along.rows_of(axis.rank).start
        here = (target >= first) & (target < first + scores.shape[-1])
        own = (target - first).masked_fill(~here, 0)
        picked = scores.gather(-1, own[..., None]).squeeze(-1).masked_fill(~here, 0.0)
        exp = scores.exp()
        both = torch.stack([exp.sum(-1), picked])
        if axis.size > 1:
            both = all_reduce(both, "sum", axis)
        counts = target != ignored
        ctx.save_for_backward(exp / both[0][..., None], own, here & counts, counts)
        ctx.axis, ctx.classes, ctx.dtype = axis, classes, logits.dtype
        return (both[0].log() - both[1]).masked_fill(~counts, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        shares, own, here, counts = ctx.saved_tensors
        if ctx.axis.size > 1:
            gradient = all_reduce(gradient, "sum", ctx.axis)
        wanted = here[..., None].to(shares.dtype)
        result = shares.scatter_add(-1, own[..., None], -wanted).mul_((gradient * counts)[..., None])
        return result.movedim(-1, ctx.classes).to(ctx.dtype), None, None, None, None
