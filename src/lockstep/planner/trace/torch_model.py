"""A plain transformer from the numbers of a `Shape`, written for one device as a user would, to be traced."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.planner.model.parts import Shape

DROPPED = 0.1
LOWEST_FREQUENCY = 1e-4  # of a rotation, in radians a token; the highest is 1


class PlainAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads or shape.heads
        self.head_dim = shape.head_dim or shape.hidden // shape.heads
        self.causal, self.dropout = shape.causal, DROPPED if shape.dropout else 0.0
        query, other = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if shape.fused:
            self.qkv = nn.Linear(shape.hidden, query + 2 * other, shape.biases)
        else:
            self.query = nn.Linear(shape.hidden, query, shape.biases)
            self.key, self.value = (nn.Linear(shape.hidden, other, shape.biases) for _ in range(2))
        self.fused = shape.fused
        self.out = nn.Linear(self.heads * self.head_dim, shape.hidden, shape.biases)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        batch, time, _ = x.shape
        parts = self.qkv(x).chunk(3, dim=-1) if self.fused else (self.query(x), self.key(x), self.value(x))
        query, key, value = (
            part.view(batch, time, heads, self.head_dim).transpose(1, 2)
            for part, heads in zip(parts, (self.heads, self.kv_heads, self.kv_heads), strict=True)
        )
        if rotation is not None:
            query, key = rotated(query, rotation), rotated(key, rotation)
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout, is_causal=self.causal, enable_gqa=self.kv_heads != self.heads
        )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, self.heads * self.head_dim))
        return out


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.ffn, shape.biases)
        self.gate = nn.Linear(shape.hidden, shape.ffn, shape.biases) if shape.gated else None
        self.down = nn.Linear(shape.ffn, shape.hidden, shape.biases)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        out: Tensor = self.down(wide)
        return out


class PlainBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norm_of(shape), norm_of(shape)
        self.attention, self.mlp = PlainAttention(shape), Mlp(shape)
        self.dropout = nn.Dropout(DROPPED if shape.dropout else 0.0)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation))
        change: Tensor = self.dropout(self.mlp(self.mlp_norm(x)))
        return x + change


class Transformer(nn.Module):
    """Tokens [batch, time] to logits [batch, time, vocabulary]."""

    rotation: Tensor | None

    def __init__(self, shape: Shape, sequence: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.positions, shape.hidden) if shape.positions else None
        head_dim = shape.head_dim or shape.hidden // shape.heads
        table = None if shape.positions else rotation_table(sequence, head_dim)
        self.register_buffer("rotation", table, persistent=False)
        self.dropout = nn.Dropout(DROPPED if shape.dropout else 0.0)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.norm = norm_of(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, self.rotation)
        logits: Tensor = self.head(self.norm(x))
        return logits


def norm_of(shape: Shape) -> nn.Module:
    """A norm of the kind that the model has."""
    return nn.LayerNorm(shape.hidden) if shape.norm == "layer" else nn.RMSNorm(shape.hidden)


def rotation_table(tokens: int, head_dim: int) -> Tensor:
    """Cosine and sine of the angle by which each token turns each dim: [2, tokens, head_dim]."""
    frequency = LOWEST_FREQUENCY ** (torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.arange(tokens)[:, None] * frequency.repeat(2)
    return torch.stack([angle.cos(), angle.sin()])


def rotated(heads: Tensor, table: Tensor) -> Tensor:
    """Queries or keys [batch, heads, time, head_dim], turned by their positions (rotary embedding)."""
    cosine, sine = table.to(heads.dtype).unbind(0)
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Cross-entropy, summed over the predicted tokens, and how many they are."""
    tokens, targets = batch
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"), targets.numel()
