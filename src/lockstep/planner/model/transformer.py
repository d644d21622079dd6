"""The parts of a transformer from its numbers."""

from __future__ import annotations

from lockstep.planner.model.parts import AttentionSize, Matmul, Model, ModelPart, Shape


def transformer(name: str, shape: Shape, sequence: int) -> Model:
    """A decoder (or, without `causal`, an encoder) with a head over the vocabulary."""
    return Model(name, (_embedding(shape, sequence), _block(shape, sequence), _head(shape, sequence)), sequence, shape)


def _embedding(shape: Shape, tokens: int) -> ModelPart:
    wide = tokens * shape.hidden
    return ModelPart(
        name="embedding",
        count=1,
        parameters=(shape.vocab + shape.positions) * shape.hidden,
        cut_parameters=shape.vocab * shape.hidden,
        kept_bytes=8.0 * tokens + (wide if shape.dropout else 0),
        traffic=(5.0 if shape.positions else 2.0) * wide,
        kernels=3 if shape.positions else 1,
        border=wide,
    )


def _block(shape: Shape, tokens: int) -> ModelPart:
    head_dim = shape.head_dim or shape.hidden // shape.heads
    kv_heads = shape.kv_heads or shape.heads
    query, both = shape.heads * head_dim, 2 * kv_heads * head_dim
    up = (2 if shape.gated else 1) * shape.ffn
    matmuls = (
        Matmul(tokens, shape.hidden, query + both, "columns"),
        Matmul(tokens, query, shape.hidden, "inner"),
        Matmul(tokens, shape.hidden, up, "columns"),
        Matmul(tokens, shape.ffn, shape.hidden, "inner"),
    )
    matrices = sum(matmul.inner * matmul.columns for matmul in matmuls)
    cut_biases = query + both + up if shape.biases else 0
    whole = 2 * shape.hidden * (2 if shape.norm == "layer" else 1) + (2 * shape.hidden if shape.biases else 0)
    wide = tokens * shape.hidden
    rotary = 0 if shape.positions else query + both / 2
    return ModelPart(
        name="block",
        count=shape.layers,
        parameters=matrices + cut_biases + whole,
        cut_parameters=matrices + cut_biases,
        matmuls=matmuls,
        attention=AttentionSize(shape.heads, kv_heads, head_dim, tokens, shape.causal),
        # Both norms keep what they read, and the products what the norms wrote.
        kept=4.0 * wide,
        kept_residual=2.0 * wide,
        # Queries, keys, values and what attention made of them; the MLP before and after its non-linearity.
        cut_kept=float(tokens * (2 * query + both + (4 if shape.gated else 2) * shape.ffn)),
        kept_bytes=tokens * (4.0 * shape.heads + 16.0) + (2.0 * wide if shape.dropout else 0),
        readers=(1 if shape.fused else 3) + (2 if shape.gated else 1),
        # Norms read and write, sums with the residual read twice and write; dropout reads and writes.
        traffic=(14.0 if shape.dropout else 10.0) * wide,
        cut_traffic=tokens * ((3.0 if shape.gated else 2.0) * shape.ffn + 2.0 * rotary),
        kernels=14 + (8 if not shape.positions else 0) + (2 if shape.gated else 0) + (2 if shape.dropout else 0),
        border=wide,
    )


def _head(shape: Shape, tokens: int) -> ModelPart:
    norm = shape.hidden * (2 if shape.norm == "layer" else 1)
    return ModelPart(
        name="head",
        count=1,
        parameters=norm + (0 if shape.tied else shape.vocab * shape.hidden),
        cut_parameters=0 if shape.tied else shape.vocab * shape.hidden,
        matmuls=(Matmul(tokens, shape.hidden, shape.vocab, "columns"),),
        kept=2.0 * tokens * shape.hidden,
        kept_residual=1.0 * tokens * shape.hidden,
        kept_bytes=16.0 * tokens,
        traffic=2.0 * tokens * shape.hidden,
        # Logits to fp32, their largest, their exponents and their sum; the gradient likewise.
        cut_traffic=4.0 * tokens * shape.vocab,
        kernels=8,
    )
