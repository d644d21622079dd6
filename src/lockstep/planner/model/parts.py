"""A model as the planner sees it: parts in the order of the forward, with parameters, matmuls and activations.

Numbers are those of ONE sample (of `Model.sequence` tokens, for a model of text) and of one forward. What tensor
parallelism divides is counted apart from what it leaves whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

MatmulCut = Literal["columns", "inner", "whole"]
"""What tensor parallelism does to a product: cut its columns, its inner dim (and sum up), or nothing."""


@dataclass(frozen=True)
class Matmul:
    """[rows, inner] x [inner, columns]; a convolution counts as the product that it is."""

    rows: int
    inner: int
    columns: int
    cut: MatmulCut = "whole"

    @property
    def flops(self) -> float:
        """Of the forward, before any cut."""
        return 2.0 * self.rows * self.inner * self.columns


@dataclass(frozen=True)
class AttentionSize:
    """Scores of every token with the tokens before it (`causal`), or with all."""

    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    causal: bool = True

    @property
    def flops(self) -> float:
        """Of both products over the whole square; a causal kernel needs half of it."""
        return 4.0 * self.heads * self.head_dim * self.tokens**2

    @property
    def scores(self) -> int:
        """Elements of the square that a kernel without flash writes down."""
        return self.heads * self.tokens**2


@dataclass(frozen=True)
class ModelPart:
    """An embedding, one of the repeated blocks, or the head."""

    name: str
    count: int
    """How many there are of it, one after the other."""
    parameters: int
    """Of one."""
    cut_parameters: int
    """Of these, how many tensor parallelism divides."""
    matmuls: tuple[Matmul, ...] = ()
    attention: AttentionSize | None = None
    kept: float = 0.0
    """Elements kept for the backward that tensor parallelism alone leaves whole; by sequence they are divided too."""
    cut_kept: float = 0.0
    """Elements kept for the backward that tensor parallelism divides. Scores of attention without flash not counted."""
    kept_residual: float = 0.0
    """Of `kept`, what norms read: software that computes in 16 bits may leave it in 32."""
    kept_bytes: float = 0.0
    """Bytes kept that do not depend on the number format: masks, indices, statistics, values that are always fp32."""
    readers: int = 2
    """Products that read what the two norms wrote."""
    traffic: float = 0.0
    """Elements that all but products and attention reads and writes, where tensor parallelism leaves them whole."""
    cut_traffic: float = 0.0
    """The same where tensor parallelism divides it."""
    kernels: int = 0
    """Kernels that a forward starts, when nothing is compiled."""
    border: float = 0.0
    """Elements that it hands on: what recompute keeps, and what crosses between pipeline stages."""

    @cached_property
    def widest(self) -> float:
        """Elements of its largest value that tensor parallelism divides: that of the MLP, for a block."""
        return max((matmul.rows * matmul.columns for matmul in self.matmuls if matmul.cut == "columns"), default=0)

    def alternate_products(self, tp: int, rows: int) -> float:
        """Elements that attention and every other product write, of which torchtitan's selective recompute is made."""
        if self.attention is None or not self.matmuls:
            return self.kept / rows + self.cut_kept / tp
        tokens, size = self.attention.tokens, self.attention.head_dim
        cut = tokens * size * (self.attention.heads + self.attention.kv_heads) + self.widest / 2
        return cut / tp + self.border / rows


ADDED_UP = (
    *("parameters", "cut_parameters", "kept", "cut_kept", "kept_residual", "kept_bytes", "traffic", "cut_traffic"),
    "kernels",
)
"""Numbers of parts that are one after the other."""


@dataclass(frozen=True)
class Shape:
    """The numbers of a transformer, as a Hugging Face config has them."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    kv_heads: int = 0
    """0: as many as heads."""
    head_dim: int = 0
    """0: hidden / heads."""
    gated: bool = False
    """Three matrices in the MLP (SwiGLU) instead of two."""
    tied: bool = True
    """The head shares the weights of the embedding."""
    positions: int = 0
    """Learned positions; 0: rotary or none."""
    biases: bool = True
    causal: bool = True
    norm: Literal["layer", "rms"] = "layer"
    dropout: bool = False

    @property
    def fused(self) -> bool:
        """Queries, keys and values are one product, as in GPT-2; in LLaMA and BERT they are three."""
        return self.causal and not self.gated and self.kv_heads in (0, self.heads)


@dataclass(frozen=True)
class Model:
    """What is trained, for samples of one size."""

    name: str
    parts: tuple[ModelPart, ...]
    sequence: int
    """Tokens of a sample; 1 for a model whose samples are not sequences."""
    shape: Shape | None = None
    """None: found by tracing a module, which is not known to be a transformer."""
    notes: tuple[str, ...] = ()
    """What was guessed about it, for people."""

    @property
    def blocks(self) -> ModelPart:
        """The repeated part."""
        return max(self.parts, key=lambda part: part.count)

    @cached_property
    def parameters(self) -> int:
        """Each counted once."""
        return sum(part.count * part.parameters for part in self.parts)

    @cached_property
    def matmul_flops(self) -> float:
        """Of the forward of one sample."""
        return sum(part.count * matmul.flops for part in self.parts for matmul in part.matmuls)

    @cached_property
    def attention_flops(self) -> float:
        """Of the forward of one sample, half the square where it is causal."""
        found = ((part.count, part.attention) for part in self.parts if part.attention)
        return sum(count * attention.flops * (0.5 if attention.causal else 1.0) for count, attention in found)

    @cached_property
    def first(self) -> ModelPart | None:
        """All that comes before the blocks, as one part."""
        return _together(self.parts[: self.parts.index(self.blocks)])

    @cached_property
    def last(self) -> ModelPart | None:
        """All that comes after them."""
        return _together(self.parts[self.parts.index(self.blocks) + 1 :])

    @cached_property
    def logits(self) -> float:
        """Elements that the head makes of one sample."""
        return float(self.parts[-1].widest) if self.last else 0.0

    @cached_property
    def head_work(self) -> float:
        """The products of the head, in blocks."""
        block = sum(matmul.flops for matmul in self.blocks.matmuls)
        return sum(matmul.flops for matmul in self.last.matmuls) / block if self.last and block else 0.0

    def end_parameters(self, has_first: bool, has_last: bool, tp: int) -> tuple[float, float]:
        """Parameters outside the blocks of a rank with these ends, after tp; and those of them the head multiplies by.

        A tied head away from the embedding has its own copy of the weights.
        """
        total = 0.0
        for part, here in ((self.first, has_first), (self.last, has_last)):
            if part and here:
                total += part.parameters - part.cut_parameters * (1 - 1 / tp)
        head = sum(matmul.inner * matmul.columns for matmul in self.last.matmuls) / tp if self.last else 0.0
        tied = self.shape is not None and self.shape.tied
        if tied and has_last and not has_first:
            total += head
        return total, head

    def __iter__(self) -> Iterator[ModelPart]:
        return iter(self.parts)


def _together(parts: tuple[ModelPart, ...]) -> ModelPart | None:
    """Parts one after the other, taken for one."""
    if not parts:
        return None

    def total(name: str) -> Any:
        return sum(part.count * getattr(part, name) for part in parts)

    return ModelPart(
        name=", ".join(part.name for part in parts),
        count=1,
        matmuls=tuple(matmul for part in parts for _ in range(part.count) for matmul in part.matmuls),
        **{name: total(name) for name in ADDED_UP},
        border=parts[-1].border,
    )
