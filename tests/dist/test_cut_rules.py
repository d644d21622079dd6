"""What torch functions do with tensors that are cut over ranks: the numbers, shapes and gradients of plain ones.

A case is a function of tensors, of which some are cut. Two ranks call it with their parts, and each of them calls it
with the plain tensors as well. Over tp a rank has one piece of a dim, over cp one from each end. The loss is divided by
the number of ranks, and gradients of a whole tensor are added up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lockstep.errors import UserError
from lockstep.parallel.tensor.cut import Along, along_of, gather, mark, take, whole_of
from lockstep.runtime.axis import Axis
from tests.parity.problems import error_of
from tests.ranks import Job, RankPool

RANKS = 2
AXES = ("tp", "cp")
untyped: Any = torch
"""Torch takes `axis` for `dim`, and does not say so in its types."""
TOLERANCE = 1e-5
Place = int | None
"""The dim in which a result is cut; None where every rank has the whole."""


@dataclass(frozen=True)
class Given:
    """A tensor that a function is called with: whole, or cut in a dim that consists of `parts`."""

    shape: tuple[int, ...]
    at: Place = None
    parts: tuple[int, ...] = ()
    kind: str = "normal"

    def drawn(self, draw: torch.Generator) -> torch.Tensor:
        if self.kind.startswith("below "):
            return torch.randint(int(self.kind.removeprefix("below ")), self.shape, generator=draw)
        values = torch.randn(self.shape, generator=draw)
        return {"normal": values, "positive": values.abs() + 0.5, "truth": values > 0}[self.kind]

    def along(self, axis: Axis) -> Along | None:
        return None if self.at is None else Along(axis, self.at, self.parts or (self.shape[self.at],))


def cut(*shape: int, at: int, parts: tuple[int, ...] = (), kind: str = "normal") -> Given:
    return Given(shape, at, parts, kind)


def whole(*shape: int, kind: str = "normal") -> Given:
    return Given(shape, kind=kind)


def numbers(below: int, *shape: int, at: Place = None) -> Given:
    return Given(shape, at, kind=f"below {below}")


@dataclass(frozen=True)
class Case:
    """`at` is where every tensor of the result is cut, after which axis that depends on if it does."""

    function: Callable[..., Any]
    inputs: tuple[Given, ...]
    at: Place | dict[str, Place]
    axes: tuple[str, ...] = AXES

    def place(self, axis: str) -> Place:
        return self.at[axis] if isinstance(self.at, dict) else self.at


def case(
    function: Callable[..., Any],
    *inputs: Given,
    at: Place | dict[str, Place],
    axes: tuple[str, ...] = AXES,
) -> Case:
    return Case(function, inputs, at, axes)


# ---- The cases

X = cut(2, 8, 16, at=2)
"""Features that are cut, as between two matrices."""
S = cut(2, 8, 16, at=1)
"""Tokens that are cut."""
HEADS = cut(2, 4, 8, 6, at=1)
ROWS = cut(2, 4, 8, 6, at=2)
QKV = cut(2, 8, 48, at=2, parts=(16, 16, 16))
UNEVEN_PARTS = cut(2, 8, 32, at=2, parts=(16, 8, 8))
ODD = cut(6, 7, at=1)
POSITIVE = cut(2, 8, 16, at=2, kind="positive")

POINTWISE: dict[str, Case] = {
    "a number": case(lambda x: 2 * x - 1, X, at=2),
    "a number on the left": case(lambda x: 1 / (3 - x.square()) + 2**x, X, at=2),
    "two that are cut alike": case(lambda x, y: x * y, X, X, at=2),
    "a whole one of the same shape": case(lambda x, y: x / y, X, whole(2, 8, 16, kind="positive"), at=2),
    "a whole row": case(lambda x, w: x * w, X, whole(16), at=2),
    "a whole row on the left": case(lambda x, w: w - x, X, whole(16), at=2),
    "a whole column": case(lambda x, w: x + w, X, whole(8, 1), at=2),
    "a whole one of more dims": case(lambda x, w: x + w, X, whole(3, 1, 8, 16), at={"tp": 3, "cp": None}),
    "a whole scalar": case(lambda x, w: x * w, X, whole(), at=2),
    "position numbers of tokens": case(lambda x, w: x + w[: x.shape[1]], S, whole(12, 16), at=1),
    "a part with several pieces": case(lambda x, w: x + w, QKV, whole(48), at=2),
    "unequal pieces": case(lambda x, w: x * w, UNEVEN_PARTS, whole(32), at=2),
    "an odd size": case(lambda x, w: x.exp() + w, ODD, whole(7), at=1, axes=("tp",)),
    "two that are cut in different places": case(lambda x, y: x * y, X, S, at={"tp": None, "cp": 2}),
    "one that is cut and one of size 1": case(lambda x, y: x + y.sum(-1, keepdim=True), S, S, at=1),
    "activations": case(lambda x: F.gelu(x) + F.silu(x) + torch.tanh(x) + F.leaky_relu(x, 0.1), X, at=2),
    "roots and logarithms": case(lambda x: x.sqrt() + x.log() + x.rsqrt() + x.pow(3), POSITIVE, at=2),
    "where": case(lambda m, x, y: torch.where(m, x, y), cut(2, 8, 16, at=2, kind="truth"), X, whole(16), at=2),
    "where with a whole condition": case(lambda x: torch.where(torch.ones(8, 1) > 0, x, 0.0), X, at=2),
    "masked_fill with a whole mask": case(lambda x, m: x.masked_fill(m, -1.0), ROWS, whole(8, 6, kind="truth"), at=2),
    "clamp": case(lambda x: x.clamp(-0.5, 0.5) + x.clamp(min=0.1), X, at=2),
    "comparisons": case(lambda x, y: (x > y) | ~(x <= 0), X, whole(16), at=2),
    "formats": case(lambda x: x.to(torch.float64).type_as(x).float() + x.bool(), X, at=2),
    "lerp and addcmul": case(lambda x, y: torch.lerp(x, y, 0.3) + torch.addcmul(x, x, y, value=2.0), X, X, at=2),
    "in place, numbers": case(lambda x: (x * 1).add_(1).mul_(3).neg_(), X, at=2),
    "in place, a whole operand": case(lambda x, w: (x * 1).mul_(w).sub_(w), X, whole(16), at=2),
    "in place, and seen by who has it": case(lambda x, w: in_place_by_another_name(x, w), X, whole(16), at=2),
    "in place, by a mask": case(lambda x, m: x.clone().masked_fill_(m, 0.0), X, whole(8, 16, kind="truth"), at=2),
    "in place, +=": case(lambda x, w: plus_equals(x, w), X, whole(2, 8, 16), at=2),
    "in place, activations": case(lambda x: F.relu(x * 1, inplace=True) + F.silu(x + 0, inplace=True), X, at=2),
    "copy_": case(lambda x, y: torch.zeros_like(x).copy_(y), X, whole(2, 8, 16), at=2),
    "a sum of squares by hand": case(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), S, at=1),
}

SHAPES: dict[str, Case] = {
    "heads": case(lambda x: x.view(2, 8, 4, 4).transpose(1, 2), X, at=1),
    "heads of unknown width": case(lambda x: x.reshape(2, 8, 4, -1), X, at=2),
    "heads and back": case(lambda x: x.view(2, 8, 4, 4).transpose(1, 2).transpose(1, 2).flatten(2), X, at=2),
    "merge by contiguous and view": case(lambda x: x.transpose(1, 2).contiguous().view(2, 8, 24), HEADS, at=2),
    "samples and tokens as one": case(lambda x: x.view(-1, 16), X, at=1),
    "samples and tokens as one, tokens cut": case(lambda x: x.flatten(0, 1), S, at=0),
    "and taken apart again": case(lambda x: x.flatten(0, 1).view(2, 8, 16), S, at=1),
    "all as one": case(lambda x: x.reshape(-1), X, at=0),
    "unflatten": case(lambda x: x.unflatten(-1, (4, -1)), X, at=2),
    "view_as": case(lambda x, y: x.view_as(y), X, whole(2, 8, 4, 4), at=2),
    "heads that ranks cannot share": case(lambda x: x.view(2, 8, 3, 4), cut(2, 8, 12, at=2), at=None),
    "queries, keys and values by view": case(lambda x: x.view(2, 8, 3, 4, 4).permute(2, 0, 3, 1, 4), QKV, at=2),
    "queries, keys and values by unbind": case(lambda x: x.view(2, 8, 3, 4, 4).unbind(2), QKV, at=2),
    "queries, keys and values one by one": case(lambda x: list(x.view(2, 8, 3, 4, 4).movedim(2, 0)), QKV, at=2),
    "permute": case(lambda x: x.permute(2, 0, 1), X, at=0),
    "transposes": case(lambda x: x.mT + x.transpose(-1, -2) + x.swapaxes(1, 2), X, at=1),
    "T of a matrix": case(lambda x: x.T, cut(8, 16, at=0), at=1),
    "unsqueeze before": case(lambda x: x.unsqueeze(0), X, at=3),
    "unsqueeze behind": case(lambda x: x.unsqueeze(-1)[..., None, 0], X, at=2),
    "squeeze": case(lambda x: x.squeeze(), cut(1, 8, 1, 16, at=3), at=1),
    "squeeze one": case(lambda x: x.squeeze(2).squeeze(1), cut(1, 8, 1, 16, at=3), at=2),
    "expand": case(lambda x: x.unsqueeze(1).expand(2, 3, 8, 16), X, at=3),
    "expand as": case(lambda x, y: x[:1].expand_as(y), X, whole(2, 8, 16), at=2),
    "repeat": case(lambda x: x.repeat(1, 2, 1), X, at=2),
    "repeat along the cut": case(lambda x: x.repeat(1, 1, 2), X, at=None),
    "each head several times": case(lambda x: x.repeat_interleave(2, dim=1), HEADS, at=1),
    "pad": case(lambda x: F.pad(x, (0, 0, 1, 2)), X, at=2),
    "pad along the cut": case(lambda x: F.pad(x, (1, 1)), X, at=None),
    "cat along another dim": case(lambda x, y: torch.cat([x, y], 1), X, whole(2, 3, 16), at=2),
    "cat along the cut": case(lambda x, y: torch.cat([x, y, x], dim=-1), X, whole(2, 8, 8), at=2),
    "cat along the cut with one that cannot be": case(lambda x, y: torch.cat([x, y], -1), X, whole(2, 8, 3), at=None),
    "stack": case(lambda x, y: torch.stack([x, y], dim=1), X, whole(2, 8, 16), at=3),
    "stack behind": case(lambda x, y: torch.stack((x, y), -1).flatten(-2), X, X, at=2),
    "rotated halves": case(lambda x: torch.cat([-x[..., 3:], x[..., :3]], -1), HEADS, at=1),
    "sizes": case(lambda x: [x.size(), x.size(-1), len(x), x.numel(), x.dim(), x.shape[2], x.nelement()], X, at=None),
}  # fmt: skip

PIECES: dict[str, Case] = {
    "split": case(lambda x: x.split(16, dim=2), QKV, at=2),
    "split into unequal ones": case(lambda x: torch.split(x, [16, 8, 8], dim=-1), UNEVEN_PARTS, at=2),
    "split of several parts at once": case(lambda x: x.split([16, 32], -1), QKV, at=2),
    "split within a part": case(lambda x: x.split(8, dim=-1), X, at=None),
    "split along another dim": case(lambda x: x.split([3, 5], 1), X, at=2),
    "chunk": case(lambda x: x.chunk(3, dim=-1), QKV, at=2),
    "chunk within a part": case(lambda x: x.chunk(2, dim=-1), X, at=None),
    "glu": case(lambda x: F.glu(x), cut(2, 8, 16, at=2, parts=(8, 8)), at=2),
    "unbind": case(lambda x: x.unbind(0), X, at=1),
    "unbind along the cut": case(lambda x: x.unbind(2), X, at=None),
    "unpacking": case(lambda x: [*x], X, at=1),
    "slices of whole parts": case(lambda x: [x[..., :16], x[..., 16:32], x[..., 32:]], QKV, at=2),
    "slices within a part": case(lambda x: [x[..., :8], x[..., 1:], x[:, ::2, ::2]], X, at=None),
    "slices of other dims": case(lambda x: [x[:, 1:], x[1, 2:5], x[..., -1, :][:, None].squeeze(1)][1], X, at=1),
    "one of a dim that is cut": case(lambda x: x[:, -1], S, at=None),
    "one of another dim": case(lambda x: x[:, -1], X, at=1),
    "None and ...": case(lambda x: x[:, None, ..., None], X, at=3),
    "select and narrow": case(lambda x: x.select(1, 2) + x.narrow(1, 3, 1).squeeze(1), X, at=1),
    "rows of a table": case(lambda n, w: w[n], numbers(9, 2, 8, at=1), whole(9, 5), at=1),
    "by a list": case(lambda x: x[:, [0, 2, 1]], X, at=None),
    "by truth": case(lambda x: x[x > 0], X, at=None),
    "by whole truth": case(lambda x, m: x[m], X, whole(2, 8, kind="truth"), at=None),
    "by cut truth": case(lambda m, w: w[m], cut(2, 8, at=1, kind="truth"), whole(2, 8, 3), at=None),
    "gather of numbers": case(lambda x, n: x.gather(-1, n), X, numbers(16, 2, 8, 3), at=None),
}

PRODUCTS: dict[str, Case] = {
    "matmul, rows cut": case(lambda x, w: x @ w, S, whole(16, 5), at=1),
    "matmul, columns cut": case(
        lambda x, w: x @ w, whole(2, 8, 16), cut(16, 12, at=1), at={"tp": 2, "cp": None}
    ),
    "matmul, inner cut": case(lambda x, w: x @ w, X, cut(16, 5, at=0), at=None),
    "matmul, inner cut and one whole": case(lambda x, w: torch.matmul(x, w), X, whole(16, 5), at=None),
    "matmul, the whole one first": case(lambda w, x: w @ x, whole(2, 5, 8), S, at=None),
    "matmul, samples cut": case(lambda x, y: x @ y.mT, HEADS, HEADS, at=1),
    "matmul, samples cut and one whole": case(lambda x, y: x @ y, HEADS, whole(4, 6, 5), at=1),
    "matmul, samples cut and one of size 1": case(lambda x, y: x @ y, HEADS, whole(2, 1, 6, 5), at=1),
    "matmul, both cut": case(lambda q, k: q @ k.transpose(-1, -2), ROWS, ROWS, at={"tp": None, "cp": 2}),
    "bmm": case(lambda x, y: torch.bmm(x, y.transpose(1, 2)), S, whole(2, 5, 16), at=1),
    "mm": case(lambda x, y: x.mm(y), cut(8, 16, at=0), whole(16, 3), at=0),
    "a vector": case(lambda x, v: x @ v, X, whole(16), at=None),
    "addmm": case(lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2), whole(5), cut(8, 16, at=0), whole(16, 5),
                  at=0),
    "addmm, inner cut": case(lambda b, x, w: torch.addmm(b, x, w), whole(5), cut(8, 16, at=1), whole(16, 5), at=None),
    "linear, tokens cut": case(lambda x, w, b: F.linear(x, w, b), S, whole(5, 16), whole(5), at=1),
    "linear, features cut": case(lambda x, w, b: F.linear(x, w, b), X, whole(5, 16), whole(5), at=None),
    "linear, weight cut": case(lambda x, w, b: F.linear(x, w, b), whole(8, 16), cut(12, 16, at=0), whole(12), at=1),
    "einsum of scores": case(lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k), HEADS, HEADS, at=1),
    "einsum, queries and keys cut": case(
        lambda q, k: torch.einsum("bhid, bhjd -> bhij", q, k), ROWS, ROWS, at={"tp": None, "cp": 2}
    ),
    "einsum, summed over": case(lambda x, w: torch.einsum("btc,cd->btd", x, w), X, whole(16, 5), at=None),
    "einsum without an arrow": case(lambda x, w: torch.einsum("btc,cd", [x, w]), S, whole(16, 5), at=2),
    "einsum of three": case(
        lambda x, y, w: torch.einsum("bhid,bhjd,hij->bid", x, y, w), HEADS, HEADS, whole(4, 8, 8), at=None
    ),
    "einsum with dots": case(lambda x, w: torch.einsum("...c,cd->...d", x, w), S, whole(16, 5), at=None),
}  # fmt: skip

ALONG_A_DIM: dict[str, Case] = {
    "softmax": case(lambda x: x.softmax(-1), HEADS, at=1),
    "softmax along the cut": case(lambda x: F.softmax(x, dim=-1), X, at=None),
    "log_softmax": case(lambda x: F.log_softmax(x, -1) + torch.log_softmax(x, dim=2), S, at=1),
    "cumsum": case(lambda x: x.cumsum(1), X, at=2),
    "cumsum along the cut": case(lambda x: torch.cumsum(x, dim=1), S, at=None),
    "sort": case(lambda x: x.sort(1), X, at=2),
    "sort along the cut": case(lambda x: torch.sort(x, dim=-1, descending=True), X, at=None),
    "topk": case(lambda x: x.topk(3), S, at=1),
    "topk along the cut": case(lambda x: torch.topk(x, 3, dim=-1), X, at=None),
    "flip and roll": case(lambda x: x.flip(1) + x.roll(2, 1), X, at=2),
    "roll along the cut": case(lambda x: x.roll(1, dims=1), S, at=None),
    "layer_norm": case(lambda x, w, b: F.layer_norm(x, (16,), w, b), S, whole(16), whole(16), at=1),
    "layer_norm over the cut": case(lambda x, w, b: F.layer_norm(x, (16,), w, b), X, whole(16), whole(16), at=None),
    "layer_norm of heads": case(lambda x, w: F.layer_norm(x, (6,), w), HEADS, whole(6), at=1),
    "rms_norm": case(lambda x, w: F.rms_norm(x, (16,), w), S, whole(16), at=1),
    "rms_norm over the cut": case(lambda x, w: F.rms_norm(x, (16,), w), X, whole(16), at=None),
}

REDUCTIONS: dict[str, Case] = {
    "sum": case(lambda x: x.sum(), X, at=None),
    "sum over the cut": case(lambda x: x.sum(-1), X, at=None),
    "sum over the cut, kept": case(lambda x: x.sum(dim=2, keepdim=True), X, at=None),
    "sum over another dim": case(lambda x: x.sum(1), X, at=1),
    "sum over another dim, kept": case(lambda x: torch.sum(x, 1, keepdim=True), X, at=2),
    "sum over several": case(lambda x: x.sum((0, 2)), X, at=None),
    "sum of parts": case(lambda x: x.sum((0, 1)), QKV, at=0),
    "mean": case(lambda x: x.mean(), X, at=None),
    "mean over the cut": case(lambda x: x.mean(1, keepdim=True), S, at=None),
    "mean over another dim": case(lambda x: x.mean(-1), S, at=1),
    "max": case(lambda x: x.max(), X, at=None),
    "max over a dim": case(lambda x: x.max(1), X, at=1),
    "max over the cut": case(lambda x: x.max(dim=-1), X, at=None),
    "max of two": case(lambda x, y: torch.max(x, y), X, whole(16), at=2),
    "amax and amin": case(lambda x: x.amax(-1) - x.amin(-1, keepdim=False), S, at=1),
    "argmax": case(lambda x: x.argmax(-1), S, at=1),
    "argmax over the cut": case(lambda x: x.argmax(-1), X, at=None),
    "any and all": case(lambda x: [(x > 2).any(), (x < 9).all(), (x > 0).any(-1)], X, at=None),
    "logsumexp": case(lambda x: x.logsumexp(1), X, at=1),
    "logsumexp over the cut": case(lambda x: torch.logsumexp(x, -1), X, at=None),
    "var and std over the cut": case(lambda x: x.var(-1) + x.std(-1), X, at=None),
    "var of another dim": case(lambda x: x.var(1), X, at=1),
    "prod": case(lambda x: x.prod(1), cut(2, 3, 16, at=2), at=1),
    "mse_loss": case(lambda x, y: F.mse_loss(x, y), X, whole(2, 8, 16), at=None),
    "losses of pairs": case(
        lambda x, y: [F.l1_loss(x, y, reduction="sum"), F.smooth_l1_loss(x, y), F.huber_loss(x, y, delta=0.5)],
        S, S, at=None,
    ),
    "losses one by one": case(lambda x, y: F.mse_loss(x, y, reduction="none"), X, whole(2, 8, 16), at=2),
    "binary cross entropy": case(
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), S, whole(2, 8, 16), at=None
    ),
}  # fmt: skip

ATTENTION: dict[str, Case] = {
    "heads": case(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), HEADS, HEADS, HEADS, at=1),
    "heads, causal": case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), HEADS, HEADS, HEADS, at=1
    ),
    "heads, a mask": case(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), HEADS, HEADS, HEADS, whole(8, 8), at=1
    ),
    "heads, a mask for each": case(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), HEADS, HEADS, HEADS, whole(1, 4, 8, 8),
        at=1,
    ),
    "heads, keys and values whole": case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), HEADS, whole(2, 4, 8, 6),
        whole(2, 4, 8, 6), at=1,
    ),
    "heads, grouped": case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        cut(2, 8, 8, 6, at=1), HEADS, HEADS, at=1, axes=("tp",),
    ),
    "heads, grouped and keys whole": case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True),
        cut(2, 8, 8, 6, at=1), whole(2, 4, 8, 6), whole(2, 4, 8, 6), at=1, axes=("tp",),
    ),
    "heads, dropout": case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True), HEADS, HEADS, HEADS,
        at=1,
    ),
    "heads, dropout and a mask": case(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, dropout_p=0.3), HEADS, HEADS, HEADS,
        whole(8, 8, kind="truth"), at=1,
    ),
    "tokens": case(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), ROWS, ROWS, ROWS, at=2),
    "tokens, causal": case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), ROWS, ROWS, ROWS, at=2
    ),
    "tokens, a mask": case(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), ROWS, ROWS, ROWS, whole(8, 8), at=2
    ),
    "tokens, causal and grouped": case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        cut(2, 8, 8, 6, at=2), ROWS, ROWS, at=2,
    ),
    "tokens, dropout": case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True), ROWS, ROWS, ROWS,
        at={"tp": None, "cp": 2},
    ),
    "tokens of keys alone": case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v), whole(2, 4, 3, 6), ROWS, ROWS, at=None
    ),
    "tokens, other keys": case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v), ROWS, whole(2, 4, 5, 6), whole(2, 4, 5, 6), at=2
    ),
    "by hand, heads": case(lambda q, k, v: attention_by_hand(q, k, v), HEADS, HEADS, HEADS, at=1),
    "by hand, tokens": case(
        lambda q, k, v: attention_by_hand(q, k, v), ROWS, ROWS, ROWS, at={"tp": None, "cp": 2}
    ),
    "complex rotary": case(lambda x, a: rotated_by_complex(x, a), HEADS, whole(8, 3), at=1),
    "complex rotary, tokens": case(lambda x, a: rotated_by_complex(x, a), ROWS, whole(8, 3), at=2),
}  # fmt: skip

CLASSES = cut(6, 8, at=1)
SAMPLES = cut(8, 7, at=0)
LABELS = numbers(7, 6)

LOSSES: dict[str, Case] = {
    **{
        f"classes, {how}": case(
            lambda x, y, how=how: F.cross_entropy(x, y, reduction=how), CLASSES, LABELS, at=None, axes=("tp",)
        )
        for how in ("mean", "sum", "none")
    },
    **{
        f"odd classes, {how}": case(
            lambda x, y, how=how: F.cross_entropy(x, y, reduction=how), ODD, LABELS, at=None, axes=("tp",)
        )
        for how in ("mean", "sum", "none")
    },
    **{
        f"samples, {how}": case(
            lambda x, y, how=how: F.cross_entropy(x, y, reduction=how), SAMPLES, numbers(7, 8, at=0),
            at=0 if how == "none" else None,
        )
        for how in ("mean", "sum", "none")
    },
    "samples, labels whole": case(lambda x, y: F.cross_entropy(x, y), SAMPLES, numbers(7, 8), at=None),
    "logits whole": case(lambda x, y: F.cross_entropy(x, y), whole(8, 7), numbers(7, 8, at=0), at=None),
    "some do not count": case(
        lambda x, y: F.cross_entropy(x, y, ignore_index=3), SAMPLES, numbers(7, 8, at=0), at=None
    ),
    "some do not count, classes": case(
        lambda x, y: F.cross_entropy(x, y, ignore_index=3), ODD, LABELS, at=None, axes=("tp",)
    ),
    "weights and smoothing": case(
        lambda x, y, w: F.cross_entropy(x, y, w.detach(), label_smoothing=0.1), SAMPLES, numbers(7, 8, at=0),
        whole(7, kind="positive"), at=None,
    ),
    "weights and smoothing, classes": case(
        lambda x, y, w: F.cross_entropy(x, y, w.detach(), label_smoothing=0.1), ODD, LABELS, whole(7, kind="positive"),
        at=None, axes=("tp",),
    ),
    "classes in the middle": case(
        lambda x, y: F.cross_entropy(x.transpose(1, 2), y, reduction="none"), S, numbers(16, 2, 8, at=1), at=1
    ),
    "classes in the middle, cut": case(
        lambda x, y: F.cross_entropy(x.transpose(1, 2), y), X, numbers(16, 2, 8), at=None, axes=("tp",)
    ),
    "probabilities": case(lambda x, y: F.cross_entropy(x, y.softmax(-1)), CLASSES, whole(6, 8), at=None),
    "nll_loss": case(lambda x, y: F.nll_loss(x.log_softmax(-1), y), SAMPLES, numbers(7, 8, at=0), at=None),
    "embedding": case(lambda n, w: F.embedding(n, w), numbers(9, 2, 8, at=1), whole(9, 5), at=1),
    "embedding with padding": case(
        lambda n, w: F.embedding(n, w, padding_idx=2), numbers(4, 2, 8, at=1), whole(9, 5), at=1
    ),
    "one_hot": case(lambda n: F.one_hot(n, 9), numbers(9, 2, 8, at=1), at=1),
}  # fmt: skip

CHANCE: dict[str, Case] = {
    "dropout": case(lambda x: F.dropout(x, 0.4), X, at=2),
    "dropout of tokens": case(lambda x: F.dropout(x, 0.4, training=True), S, at=1),
    "dropout of what is transposed": case(lambda x: F.dropout(x.transpose(1, 2), 0.4), HEADS, at=2),
    "dropout that is off": case(lambda x: F.dropout(x, 0.4, training=False), X, at=2),
    "randn_like": case(lambda x: x + torch.randn_like(x) * torch.rand_like(x), X, at=2),
    "likes of one number": case(lambda x: x * torch.full_like(x, 3.0) + torch.ones_like(x), X, at=2),
    "bernoulli": case(lambda x: torch.bernoulli(x.sigmoid().detach()) * x, X, at=2),
}

WITHOUT_A_RULE: dict[str, Case] = {
    "linalg.norm": case(lambda x: torch.linalg.norm(x, dim=-1), X, at=None),
    "tolist": case(lambda x: x.tolist(), X, at=None),
    "item": case(lambda x: x[0, 0, 5].item(), X, at=None),
    "numpy": case(lambda x: x.detach().numpy().sum().item(), X, at=None),
    "tril": case(lambda x: x.tril(), X, at=None),
    "index_select": case(lambda x: x.index_select(2, torch.tensor([3, 0, 9])), X, at=None),
    "scatter_add": case(
        lambda x, y: y.scatter_add(1, torch.zeros(2, 8, 16, dtype=torch.long), x), X, whole(2, 3, 16), at=None
    ),
    "cdist": case(lambda x, y: torch.cdist(x, y), S, whole(2, 3, 16), at=None),
    "conv1d": case(lambda x, w: F.conv1d(x, w, padding=1), X, whole(5, 8, 3), at=None),
    "allclose": case(lambda x: [torch.equal(x, x), torch.allclose(x, x + 1)], X, at=None),
    "new_zeros": case(lambda x: x.new_zeros(3) + x.new_ones(2, 1), X, at=None),
    "kl_div": case(lambda x, y: F.kl_div(x, y.softmax(-1), reduction="batchmean"), X, whole(2, 8, 16), at=None),
}

UNUSUAL: dict[str, Case] = {
    "flip of several dims": case(lambda x: x.flip(0, 2), X, at=None),
    "sum by axis": case(lambda x: x.sum(axis=1), X, at=1),
    "mean by axis": case(lambda x: untyped.mean(x, axis=-1, keepdims=True), S, at=1),
    "cat by axis": case(lambda x, y: untyped.cat([x, y], axis=1), X, whole(2, 3, 16), at=2),
    "stack by axis": case(lambda x, y: untyped.stack([x, y], axis=1), X, X, at=3),
    "unbind by axis": case(lambda x: untyped.unbind(x, axis=1), X, at=1),
    "unsqueeze by axis": case(lambda x: untyped.unsqueeze(x, axis=1), X, at=3),
    "input by name": case(lambda x: torch.softmax(input=x, dim=-1), S, at=1),
    "gelu by name": case(lambda x: F.gelu(input=x), S, at=1),
    "var as a norm by hand": case(lambda x: x / (x.var(-1, unbiased=False, keepdim=True) + 1).sqrt(), S, at=1),
    "var with its old arguments": case(lambda x: x.var(1, True), X, at=1),
    "norm of a dim": case(lambda x: x.norm(dim=-1, keepdim=True), S, at=1),
    "norm by position": case(lambda x: torch.norm(x, 2, -1), S, at=1),
    "norm of all": case(lambda x: x.norm(), X, at=None),
    "normalize": case(lambda x: F.normalize(x, dim=-1), S, at=1),
    "normalize over the cut": case(lambda x: F.normalize(x, dim=-1), X, at=None),
    "mean of an odd size": case(lambda x: x.mean(-1), ODD, at=None, axes=("tp",)),
    "mean of all of an odd size": case(lambda x: x.mean(), ODD, at=None, axes=("tp",)),
    "where of one argument": case(lambda x: torch.where(x > 0), X, at=None),
    "real and imaginary parts": case(lambda x: torch.view_as_complex(x).real, cut(2, 8, 4, 2, at=2), at=2),
    "mH": case(lambda x: x.mH, X, at=1),
    "narrow from the end": case(lambda x: x.narrow(1, -2, 2), X, at=2),
    "one_hot of unknown size": case(lambda n: F.one_hot(n), numbers(9, 2, 8, at=1), at=None),
    "movedim by name": case(lambda x: torch.movedim(x, source=1, destination=2), X, at=1),
    "expand by name": case(lambda x: x[:1].expand(size=(3, 8, 16)), X, at=2),
    "tokens as classes": case(
        lambda x, y: F.cross_entropy(x, y), cut(6, 8, at=1), numbers(8, 6), at=None, axes=("cp",)
    ),
    "tokens, padding that is cut": case(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, (m | (torch.arange(8) == 0))[:, None, None, :]),
        ROWS, ROWS, ROWS, cut(2, 8, at=1, kind="truth"), at=2, axes=("cp",),
    ),
    "tokens, a mask that is cut": case(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), ROWS, ROWS, ROWS, cut(2, 1, 8, 8, at=2), at=2
    ),
    "tokens, dropout and padding": case(
        lambda q, k, v, m: F.scaled_dot_product_attention(
            q, k, v, (m | (torch.arange(8) == 0))[:, None, None, :], dropout_p=0.2
        ),
        ROWS, ROWS, ROWS, cut(2, 8, at=1, kind="truth"), at=2, axes=("cp",),
    ),
    "+= one that is cut elsewhere, and seen by who has it": case(
        lambda x, y: plus_equals_by_another_name(x, y), X, S, at=2, axes=("cp",)
    ),
    "prelu by channel": case(lambda x, w: F.prelu(x, w), cut(2, 8, 8, at=2), whole(8), at=None),
    "prelu by a channel that is cut": case(lambda x, w: F.prelu(x, w), cut(2, 8, 8, at=1), whole(8), at=None),
    "an odd size in one piece": case(lambda x: x.chunk(1, -1), ODD, at=1, axes=("tp",)),
    "add to out": case(lambda x: added_to_out(x), X, at=None),
    "glu of the last": case(lambda x: F.glu(x, 1), X, at=2),
    "causal with more keys": case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), ROWS, whole(2, 4, 12, 6),
        whole(2, 4, 12, 6), at=2,
    ),
    "causal with fewer keys": case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), ROWS, whole(2, 4, 5, 6),
        whole(2, 4, 5, 6), at=2,
    ),
    "heads, causal of three dims": case(
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), S, at=1
    ),
    "unfold": case(lambda x: x.unfold(1, 2, 2), X, at=None),
    "sort by flag": case(lambda x: x.sort(descending=True), S, at=1),
    "argsort over the cut": case(lambda x: x.argsort(), X, at=None),
    "max by keyword": case(lambda x: torch.max(x, dim=1, keepdim=True), X, at=2),
    "matmul by name": case(lambda x, y: torch.matmul(x, other=y), S, whole(16, 3), at=1),
    "matmul all by name": case(lambda x, y: torch.matmul(input=x, other=y), S, whole(16, 3), at=1),
    "cross entropy of one sample": case(
        lambda x, y: F.cross_entropy(x, y), cut(7, at=0), numbers(7), at=None, axes=("tp",)
    ),
    "iterate in a comprehension": case(lambda x: [row * 2 for row in x.transpose(0, 1)], X, at=1),
    "std of all": case(lambda x: x.std(), X, at=None),
    "count_nonzero": case(lambda x: (x > 0).count_nonzero(), X, at=None),
    "var_mean": case(lambda x: torch.var_mean(x, -1), S, at=None),
    "multiply by a view of itself": case(
        lambda x: x * x.transpose(1, 2), cut(2, 8, 8, at=2), at={"tp": None, "cp": 2}
    ),
    "detach": case(lambda x: x.detach() * x.data, X, at=2),
}  # fmt: skip

GROUPS = {
    "pointwise": POINTWISE,
    "shapes": SHAPES,
    "pieces": PIECES,
    "products": PRODUCTS,
    "along a dim": ALONG_A_DIM,
    "reductions": REDUCTIONS,
    "attention": ATTENTION,
    "losses": LOSSES,
    "chance": CHANCE,
    "without a rule": WITHOUT_A_RULE,
    "unusual": UNUSUAL,
}
CASES = {f"{group}: {name}": one for group, cases in GROUPS.items() for name, one in cases.items()}


def in_place_by_another_name(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    changed = x * 1
    changed.add_(w)
    return changed * 2


def plus_equals(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    total = x * 1
    total += w
    total *= 2
    return total


def plus_equals_by_another_name(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = same = x * 1
    same += y
    return total


def added_to_out(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(2, 8, 16)
    torch.add(x.detach(), 1, out=out)
    return out


def attention_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    hidden = torch.triu(torch.ones(q.size(-2), k.size(-2), dtype=torch.bool), diagonal=1)
    return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v


def rotated_by_complex(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).flatten(3).type_as(x)


# ---- Two ranks try all of them


def axis_of(name: str, rank: int) -> Axis:
    group = dist.group.WORLD
    assert group is not None
    return Axis(name, RANKS, rank, group.group_name, zigzag=name == "cp")


def leaves(tree: Any) -> Iterator[Any]:
    """What a result consists of: tensors, and anything else."""
    if isinstance(tree, tuple | list) and not isinstance(tree, torch.Size):
        for one in tree:
            yield from leaves(one)
    else:
        yield tree


def complaints(one: Case, axis: Axis) -> Iterator[str]:
    """In what the cut tensors of this rank differ from plain ones."""
    draw = torch.Generator().manual_seed(3)
    values = [given.drawn(draw) for given in one.inputs]
    along = [given.along(axis) for given in one.inputs]
    plain = [as_leaf(value) for value in values]
    parts = [as_leaf(value if cut is None else take(value, cut)) for value, cut in zip(values, along, strict=True)]
    called_with = [part if cut is None else mark(part, [cut]) for part, cut in zip(parts, along, strict=True)]
    torch.manual_seed(7)
    expected = list(leaves(one.function(*plain)))
    torch.manual_seed(7)
    found = list(leaves(one.function(*called_with)))
    assert len(found) == len(expected), f"{len(found)} results, not {len(expected)}"
    ours, theirs = torch.zeros(()), torch.zeros(())
    for result, right in zip(found, expected, strict=True):
        if not isinstance(right, torch.Tensor):
            if result != right:
                yield f"{result} is not {right}"
            continue
        assert result.shape == right.shape, f"shape {tuple(result.shape)} is not {tuple(right.shape)}"
        where = {cut.dim for cut in along_of(result)}
        if where != {place for place in [one.place(axis.name)] if place is not None}:
            yield f"it is cut in {where or 'no dim'}"
        yield from differences("the result", gathered(result), right)
        if right.requires_grad:
            weights = torch.randn(right.shape, generator=draw)
            ours = ours + (result * weights).sum() / RANKS
            theirs = theirs + (right * weights).sum()
    if theirs.requires_grad:
        wanted = gradients(theirs, plain)
        for number, (ours_of, theirs_of) in enumerate(zip(gradients(ours, parts), wanted, strict=True)):
            cut = along[number]
            if cut is not None:
                ours_of = gather(ours_of, cut)
            else:
                dist.all_reduce(ours_of)
            yield from differences(f"the gradient of input {number}", ours_of, theirs_of)


def as_leaf(value: torch.Tensor) -> torch.Tensor:
    return value.clone(memory_format=torch.contiguous_format).requires_grad_(value.is_floating_point())


def gradients(loss: torch.Tensor, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """With zeros where an input has no influence, or is no number that could have one."""
    wanted = [value for value in inputs if value.requires_grad]
    found = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
    all_of_them = [next(found) if value.requires_grad else None for value in inputs]
    return [
        torch.zeros(value.shape) if grad is None else grad.clone(memory_format=torch.contiguous_format)
        for grad, value in zip(all_of_them, inputs, strict=True)
    ]


def gathered(result: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return whole_of(result)


def differences(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> Iterator[str]:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        yield f"{what} is {ours.dtype} of shape {tuple(ours.shape)}, not {theirs.dtype} of {tuple(theirs.shape)}"
    elif not torch.allclose(ours.double(), theirs.double(), rtol=TOLERANCE, atol=TOLERANCE):
        yield f"{what} is off by {(ours.double() - theirs.double()).abs().max():.1e}"


Tried = dict[tuple[str, str], list[str]]


def try_out(job: Job, cases: Sequence[tuple[str, str]], timeout: float) -> Tried:
    job.init_process_group(timeout)
    found = {}
    for axis, name in cases:
        try:
            found[axis, name] = list(complaints(CASES[name], axis_of(axis, job.rank)))
        except Exception as error:
            found[axis, name] = [f"{type(error).__name__}: {error}"]
    return found


ALL = [(axis, name) for name, one in CASES.items() for axis in one.axes]


@pytest.fixture(scope="module")
def tried(ranks: RankPool) -> list[Tried]:
    return ranks.run(try_out, RANKS, list(ALL), 10)


@pytest.mark.parametrize(("axis", "name"), [pytest.param(*one, id="-".join(one)) for one in ALL])
def test_a_function_of_cut_tensors_is_that_of_plain_ones(tried: list[Tried], axis: str, name: str) -> None:
    assert [found[axis, name] for found in tried] == [[]] * RANKS


# ---- What is refused


def write_by_index(x: torch.Tensor) -> None:
    x[0] = 1.0


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "setitem": write_by_index,
    "a whole one that is changed by it": lambda x: torch.zeros(2, 8, 16).add_(x),
    "uniform_": lambda x: x.clone().uniform_(),
    "+= one that is cut elsewhere": lambda x: plus_equals_by_another_name(x, x[:, :1].transpose(1, 2) * torch.ones(16)),
}


def try_refused(job: Job) -> dict[str, Exception | None]:
    job.init_process_group()
    along = Along(axis_of("tp", job.rank), 2, (16,))

    def tried(function: Callable[[torch.Tensor], Any]) -> Exception | None:
        return error_of(lambda: function(mark(take(torch.zeros(2, 8, 16), along), [along])))

    return {name: tried(function) for name, function in REFUSED.items()}


def test_what_would_change_a_cut_tensor_in_place_is_refused(ranks: RankPool) -> None:
    for found in ranks.run(try_refused, RANKS):
        for name, error in found.items():
            assert isinstance(error, UserError), name
            assert "in place" in str(error)
