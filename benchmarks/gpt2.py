"""GPT-2, plainly written: the one model that every contender of a benchmark trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

INITIAL_STD = 0.02


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT-2."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int


@dataclass(frozen=True)
class Size:
    """A model, its batch on one rank, and how many steps a turn has."""

    shape: Shape
    batch: int
    block: int


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        query, key, value = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Tokens and targets [batch, time] to the cross-entropy, whose mean or sum it returns.

    The loss is computed inside, so that compiling the model compiles the loss with it, for everybody.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("attention.out.weight", "down.weight"))
                std = INITIAL_STD * (2 * shape.layers) ** -0.5 if into_residual else INITIAL_STD
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction=reduction)


def counted_parameters(model: GPT2) -> int:
    """Parameters that take part in matrix products: all but the position table. The tied head counts once."""
    return sum(parameter.numel() for parameter in model.parameters()) - model.positions.weight.numel()


def flops_per_token(model: GPT2, shape: Shape) -> int:
    """Forward and backward: 6 a parameter, and 12 x layers x width x context for attention."""
    return 6 * counted_parameters(model) + 12 * shape.layers * shape.width * shape.context


class Tokens(Dataset[dict[str, Tensor]]):
    """Random tokens in memory, `samples` windows of them; what is learnt from them does not matter here."""

    def __init__(self, shape: Shape, samples: int, seed: int) -> None:
        self.samples = samples
        self.context = shape.context
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(shape.vocabulary, (1 << 20,), generator=generator)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self.context % (len(self.tokens) - self.context)
        window = self.tokens[start : start + self.context + 1]
        return {"x": window[:-1], "y": window[1:]}
