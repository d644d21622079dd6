"""Plain models that nobody wrote for Lockstep, each with a loss, a dataset and what is known of it beforehand.

They are written in the many ways people write models: tied and split weights, masks and tables as buffers, blocks in
lists, in sequences, as attributes or nowhere, tuples, keywords and objects as inputs and outputs. Every one is small:
a step on two samples takes some milliseconds.
"""

# The models have no annotations, as those of most people.
# mypy: check-untyped-defs=False
# ruff: noqa: C408, N806

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from lockstep.engine import LossFunction

SIZE = 29
VOCABULARY = 61
LENGTH = 12
WIDTH = 32
HEADS = 4
DEPTH = 4
CLASSES = 7
PADDING = 0
IGNORED = -100

Batch = dict[str, torch.Tensor]


# ---- What is said of a model


@dataclass(frozen=True)
class Expectation:
    """What is known of a model before it runs under any layout."""

    random: bool = False
    """The forward in training draws random numbers (dropout, noise): equal numbers need equal random streams."""
    statistics: bool = False
    """The forward in training changes buffers (BatchNorm)."""
    frozen: tuple[str, ...] = ()
    """How the names of parameters begin that are not trained."""
    unused: tuple[str, ...] = ()
    """How the names of parameters begin that never get a gradient."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """A part of the error by layout ("pp=4") or by axis ("pp")."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """What goes wrong, by layout or by axis, where it should train or be refused: not run there."""

    def refusal(self, layout: str) -> str | None:
        """A part of the error that every rank raises under this layout, None where it trains."""
        return next((self.refused[key] for key in keys(layout) if key in self.refused), None)

    def runs(self, layout: str) -> bool:
        """Whether it is worth a try."""
        return not any(key in self.broken for key in keys(layout))


def keys(layout: str) -> list[str]:
    return [layout, *(part.partition("=")[0] for part in layout.split(","))]


@dataclass(frozen=True)
class Entry:
    name: str
    build: Callable[[], nn.Module]
    loss: LossFunction
    dataset: Dataset[Batch]
    expect: Expectation = Expectation()
    needs: str | None = None
    """A package that not everybody has."""
    like: str | None = None
    """An entry with other code, but exactly the same numbers."""


# ---- Data: the same for everybody who asks, drawn once


class Samples(Dataset[Batch]):
    """A sample is one row of every column."""

    def __init__(self, **columns: torch.Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Batch:
        return {name: column[index] for name, column in self.columns.items()}


def dice(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(name.encode()))


def texts() -> Samples:
    """Next-token pairs; every sample has another number of labels that count."""
    draw = dice("texts")
    tokens = torch.randint(VOCABULARY, (SIZE, LENGTH + 1), generator=draw)
    labels = tokens[:, 1:].clone()
    labels[torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (SIZE, 1), generator=draw)] = IGNORED
    return Samples(x=tokens[:, :-1], y=labels)


def padded_texts() -> Samples:
    """What a tokenizer with padding returns: of unequal lengths, the labels not shifted."""
    draw = dice("padded")
    tokens = torch.randint(3, VOCABULARY, (SIZE, LENGTH), generator=draw)
    real = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (SIZE, 1), generator=draw)
    return Samples(
        input_ids=tokens.where(real, PADDING),
        attention_mask=real.long(),
        labels=tokens.where(real, IGNORED),
        label=torch.randint(CLASSES, (SIZE,), generator=draw),
        segments=(torch.arange(LENGTH) > torch.randint(2, LENGTH, (SIZE, 1), generator=draw)).long(),
    )


def translations() -> Samples:
    """Two padded sentences; the second begins with 1 and ends with 2."""
    draw = dice("translations")
    source = torch.randint(3, VOCABULARY, (SIZE, LENGTH), generator=draw)
    target = torch.randint(3, VOCABULARY, (SIZE, LENGTH - 2), generator=draw)
    lengths = torch.randint(3, LENGTH - 2, (SIZE, 1), generator=draw)
    place = torch.arange(LENGTH - 2)
    target = target.where(place < lengths, PADDING).masked_fill(place == lengths, 2)
    return Samples(
        src=source.where(torch.arange(LENGTH) < lengths + 2, PADDING),
        tgt=torch.cat([torch.ones(SIZE, 1, dtype=torch.long), target], 1),
    )


def images(channels: int, side: int) -> Samples:
    draw = dice("images")
    return Samples(
        image=torch.randn(SIZE, channels, side, side, generator=draw) + 0.3,
        label=torch.randint(CLASSES, (SIZE,), generator=draw),
        mask=torch.randint(3, (SIZE, side, side), generator=draw),
    )


def digits() -> Samples:
    draw = dice("digits")
    pixels = torch.rand(SIZE, 1, 28, 28, generator=draw)
    return Samples(image=pixels * (pixels > 0.6), label=torch.randint(10, (SIZE,), generator=draw))


def vectors() -> Samples:
    draw = dice("vectors")
    return Samples(x=torch.randn(SIZE, 10, generator=draw), y=torch.randn(SIZE, 5, generator=draw))


def captions() -> Samples:
    draw = dice("captions")
    tokens = torch.randint(VOCABULARY, (SIZE, LENGTH + 1), generator=draw)
    return Samples(features=torch.randn(SIZE, 5, 20, generator=draw), x=tokens[:, :-1], y=tokens[:, 1:])


def clicks() -> Samples:
    draw = dice("clicks")
    return Samples(
        user=torch.randint(40, (SIZE,), generator=draw),
        item=torch.randint(50, (SIZE,), generator=draw),
        categories=torch.randint(12, (SIZE, 3), generator=draw),
        numbers=torch.rand(SIZE, 6, generator=draw),
        clicked=torch.randint(2, (SIZE,), generator=draw).float(),
    )


def couples() -> Samples:
    draw = dice("couples")
    return Samples(
        left=torch.randn(SIZE, 16, generator=draw),
        right=torch.randn(SIZE, 16, generator=draw),
        same=torch.randint(2, (SIZE,), generator=draw).float(),
    )


# ---- Losses that several models share


def count(labels, ignored=IGNORED):
    return (labels != ignored).sum()


def text_loss(model, batch):
    logits = model(batch["x"])
    total = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), ignore_index=IGNORED, reduction="sum")
    return total, count(batch["y"])


def image_loss(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["label"], reduction="sum"), len(batch["label"])


def vector_loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), batch["y"].numel()


def padded_loss(model, batch):
    """Through the logits, shifted here."""
    out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    logits, labels = out.logits[:, :-1], batch["labels"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, count(labels)


def own_padded_loss(model, batch):
    """The model shifts the labels and returns its mean loss."""
    out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
    weight = count(batch["labels"][:, 1:])
    return out.loss * weight, weight


# ---- GPT in one file, with a ModuleDict, a tied head and its own loss


@dataclass
class GPTConfig:
    block_size: int = LENGTH
    vocab_size: int = VOCABULARY
    n_layer: int = DEPTH
    n_head: int = HEADS
    n_embd: int = WIDTH
    dropout: float = 0.1
    bias: bool = True
    checkpointing: bool = False


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        mask = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("bias", mask.view(1, 1, config.block_size, config.block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class GPTMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class GPTBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = GPTMLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList([GPTBlock(config) for _ in range(config.n_layer)]),
                ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                torch.nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets=None):
        _, t = idx.size()
        assert t <= self.config.block_size, f"a sequence of {t} tokens is too long"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = checkpoint(block, x, use_reentrant=False) if self.config.checkpointing else block(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=IGNORED)
        else:
            logits = self.lm_head(x[:, [-1], :])
            loss = None
        return logits, loss


def gpt(**options):
    return GPT(GPTConfig(**options))


def frozen_gpt():
    """The embeddings, tied to the head, and the first block keep their weights."""
    model = gpt(dropout=0.0)
    model.transformer.wte.requires_grad_(False)
    model.transformer.wpe.requires_grad_(False)
    for p in model.transformer.h[0].parameters():
        p.requires_grad = False
    return model


def only_head_gpt():
    """All but the last block and the norm behind it are frozen: no gradient passes the first blocks."""
    model = gpt(dropout=0.0)
    model.requires_grad_(False)
    model.transformer.h[-1].requires_grad_(True)
    model.transformer.ln_f.requires_grad_(True)
    return model


def gpt_loss(model, batch):
    _, loss = model(batch["x"], batch["y"])
    n = count(batch["y"])
    return loss * n, n


# ---- A GPT whose rotary tables are buffers of the model


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self._norm(x.float()).type_as(x) * self.weight


def apply_rotary_emb(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    cos, sin = cos[None, None], sin[None, None]
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1)


class GroupedQueryAttention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x, cos, sin):
        bsz, seqlen, _ = x.shape
        q = self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim).transpose(1, 2)
        q, k = apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)
        repeats = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(bsz, seqlen, -1))


class GatedFeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class RotaryBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = GroupedQueryAttention(dim, HEADS, HEADS // 2)
        self.ffn_norm = RMSNorm(dim)
        self.feed_forward = GatedFeedForward(dim, 2 * dim)

    def forward(self, x, cos, sin):
        h = x + self.attention(self.attention_norm(x), cos, sin)
        return h + self.feed_forward(self.ffn_norm(h))


class RotaryGPT(nn.Module):
    """The layers are in a ModuleDict under their numbers, the tables are not in its state dict."""

    def __init__(self, dim=WIDTH, n_layers=5, max_seq_len=4 * LENGTH):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleDict({str(i): RotaryBlock(dim) for i in range(n_layers)})
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, VOCABULARY, bias=False)
        head_dim = dim // HEADS
        freqs = 1.0 / 10000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.outer(torch.arange(max_seq_len).float(), freqs)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens):
        _, seqlen = tokens.shape
        h = self.tok_embeddings(tokens)
        cos, sin = self.cos[:seqlen], self.sin[:seqlen]
        for layer in self.layers.values():
            h = layer(h, cos, sin)
        return self.output(self.norm(h)).float()


# ---- A decoder in the manner of a model library: keywords, tuples, a mask made from the padding


class RotaryEmbedding(nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        inv_freq_expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        freqs = (inv_freq_expanded @ position_ids[:, None, :].float()).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(dtype=x.dtype), emb.sin().to(dtype=x.dtype)


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


class DecoderAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, num_key_value_heads):
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.num_key_value_groups = num_heads // num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def forward(self, hidden_states, position_embeddings, attention_mask=None):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        cos, sin = (table.unsqueeze(1) for table in position_embeddings)
        query = query * cos + rotate_half(query) * sin
        key = key * cos + rotate_half(key) * sin
        key = key.repeat_interleave(self.num_key_value_groups, 1)
        value = value.repeat_interleave(self.num_key_value_groups, 1)
        weights = torch.matmul(query, key.transpose(2, 3)) * self.scaling
        if attention_mask is not None:
            weights = weights + attention_mask
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
        out = torch.matmul(weights, value).transpose(1, 2).reshape(*input_shape, -1).contiguous()
        return self.o_proj(out), weights


class DecoderLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, num_key_value_heads):
        super().__init__()
        self.self_attn = DecoderAttention(hidden_size, num_heads, num_key_value_heads)
        self.mlp = GatedFeedForward(hidden_size, 2 * hidden_size)
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=1e-5)

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, output_attentions=False):
        residual = hidden_states
        hidden_states, weights = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
        )
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = residual + self.mlp(self.post_attention_layernorm(hidden_states))
        outputs = (hidden_states,)
        if output_attentions:
            outputs += (weights,)
        return outputs


class DecoderModel(nn.Module):
    def __init__(self, hidden_size, layers):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, hidden_size, padding_idx=PADDING)
        self.layers = nn.ModuleList([DecoderLayer(hidden_size, HEADS, HEADS // 2) for _ in range(layers)])
        self.norm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.rotary_emb = RotaryEmbedding(hidden_size // HEADS)

    def forward(self, input_ids, attention_mask=None, output_attentions=False):
        inputs_embeds = self.embed_tokens(input_ids)
        position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device).unsqueeze(0)
        causal_mask = self._causal_mask(attention_mask, inputs_embeds)
        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        all_attentions = () if output_attentions else None
        for decoder_layer in self.layers:
            layer_outputs = decoder_layer(
                hidden_states,
                attention_mask=causal_mask,
                position_embeddings=position_embeddings,
                output_attentions=output_attentions,
            )
            hidden_states = layer_outputs[0]
            if output_attentions:
                all_attentions += (layer_outputs[1],)
        return self.norm(hidden_states), all_attentions

    def _causal_mask(self, attention_mask, inputs_embeds):
        length, dtype = inputs_embeds.shape[1], inputs_embeds.dtype
        lowest = torch.finfo(dtype).min
        mask = torch.full((length, length), lowest, dtype=dtype, device=inputs_embeds.device).triu(1)
        mask = mask[None, None].expand(inputs_embeds.shape[0], 1, -1, -1).clone()
        if attention_mask is not None:
            hidden = attention_mask[:, None, None, :].eq(0)
            mask = mask.masked_fill(hidden, lowest)
        return mask


@dataclass
class CausalLMOutput:
    logits: Any
    loss: Any = None
    attentions: Any = None


class DecoderForCausalLM(nn.Module):
    def __init__(self, hidden_size=WIDTH, layers=DEPTH, output_attentions=False):
        super().__init__()
        self.model = DecoderModel(hidden_size, layers)
        self.lm_head = nn.Linear(hidden_size, VOCABULARY, bias=False)
        self.output_attentions = output_attentions

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        hidden_states, attentions = self.model(
            input_ids=input_ids, attention_mask=attention_mask, output_attentions=self.output_attentions
        )
        logits = self.lm_head(hidden_states).float()
        loss = None
        if labels is not None:
            shift_logits = logits[..., :-1, :].contiguous()
            shift_labels = labels[..., 1:].contiguous()
            loss = F.cross_entropy(shift_logits.view(-1, VOCABULARY), shift_labels.view(-1), ignore_index=IGNORED)
        return CausalLMOutput(logits, loss, attentions)


def attention_entropy_loss(model, batch):
    """Uses what every layer returned beside its hidden states."""
    out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
    weight = count(batch["labels"][:, 1:])
    entropy = sum(-(weights * (weights + 1e-9).log()).sum(-1).mean() for weights in out.attentions)
    return (out.loss + 0.01 * entropy) * weight, weight


# ---- The embedding goes into every block, or between them


class SpeedAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv_w = nn.Parameter(
            torch.empty(3, dim, dim).uniform_(-(3**0.5) * 0.5 * dim**-0.5, 3**0.5 * 0.5 * dim**-0.5)
        )
        self.c_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        B, T = x.size(0), x.size(1)
        q, k, v = F.linear(x, self.qkv_w.flatten(end_dim=1)).view(B, T, 3 * self.num_heads, -1).chunk(3, dim=-2)
        q, k = F.rms_norm(q, (q.size(-1),)), F.rms_norm(k, (k.size(-1),))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, -1))


class SquaredReLU(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.c_fc = nn.Linear(dim, 4 * dim, bias=False)
        self.c_proj = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


class SkipBlock(nn.Module):
    """Mixes the embedding in by itself."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.attn = SpeedAttention(dim, num_heads)
        self.mlp = SquaredReLU(dim)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.2]))

    def forward(self, x, x0):
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        x = x + self.attn(norm(x))
        return x + self.mlp(norm(x))


class SkipGPT(nn.Module):
    def __init__(self, model_dim=WIDTH, num_layers=DEPTH):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, model_dim)
        self.blocks = nn.ModuleList([SkipBlock(model_dim, HEADS) for _ in range(num_layers)])
        self.lm_head = nn.Linear(model_dim, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = x0 = norm(self.embed(tokens))
        for block in self.blocks:
            x = block(x, x0)
        logits = self.lm_head(norm(x)).float()
        return 15 * torch.tanh(logits / 15)


class SpeedBlock(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.attn = SpeedAttention(dim, num_heads)
        self.mlp = SquaredReLU(dim)

    def forward(self, x):
        x = x + self.attn(norm(x))
        return x + self.mlp(norm(x))


class LambdaGPT(nn.Module):
    """One parameter of the model holds the scalars of all layers, and is used between the blocks."""

    def __init__(self, model_dim=WIDTH, num_layers=DEPTH):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, model_dim)
        self.blocks = nn.ModuleList([SpeedBlock(model_dim, HEADS) for _ in range(num_layers)])
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.2]).repeat(num_layers, 1))
        self.lm_head = nn.Linear(model_dim, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = x0 = norm(self.embed(tokens))
        for i in range(len(self.blocks)):
            x = self.lambdas[i, 0] * x + self.lambdas[i, 1] * x0
            x = self.blocks[i](x)
        logits = self.lm_head(norm(x)).float()
        return 15 * torch.tanh(logits / 15)


class UNetGPT(nn.Module):
    """Outputs of the first half are added, weighted, before the blocks of the second; value embeddings besides."""

    def __init__(self, model_dim=WIDTH, num_layers=6):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, model_dim)
        self.value_embeds = nn.ModuleList([nn.Embedding(VOCABULARY, model_dim) for _ in range(2)])
        self.blocks = nn.ModuleList([SkipBlock(model_dim, HEADS) for _ in range(num_layers)])
        self.skip_weights = nn.Parameter(torch.ones(num_layers // 2))
        self.lm_head = nn.Linear(model_dim, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = x0 = norm(self.embed(tokens))
        ve = [value_embed(tokens) for value_embed in self.value_embeds]
        ve = [ve[0], ve[1]] + [None] * (len(self.blocks) - 4) + [ve[0], ve[1]]
        skip_connections = []
        half = len(self.blocks) // 2
        for i, block in enumerate(self.blocks):
            if i >= half:
                x = x + self.skip_weights[i - half] * skip_connections.pop()
            x = block(x, x0 if ve[i] is None else x0 + ve[i])
            if i < half:
                skip_connections.append(x)
        return self.lm_head(norm(x))


# ---- U-Nets


class ResidualMLP(nn.Module):
    def __init__(self, dim_in, dim_out):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim_in, dim_out), nn.SiLU(), nn.Linear(dim_out, dim_out))
        self.shortcut = nn.Linear(dim_in, dim_out) if dim_in != dim_out else nn.Identity()

    def forward(self, x, t):
        return self.net(x + t[..., : x.shape[-1]] if x.shape[-1] <= t.shape[-1] else x) + self.shortcut(x)


class UNetMLP(nn.Module):
    """The first half puts its outputs on a stack, the second takes them and concatenates."""

    def __init__(self, dim=24, depth=3):
        super().__init__()
        self.time_mlp = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.proj_in = nn.Linear(10, dim)
        self.downs = nn.ModuleList([ResidualMLP(dim, dim) for _ in range(depth)])
        self.mid = ResidualMLP(dim, dim)
        self.ups = nn.ModuleList([ResidualMLP(2 * dim, dim) for _ in range(depth)])
        self.proj_out = nn.Linear(dim, 10)

    def forward(self, x, time):
        t = self.time_mlp(time[:, None])
        x = self.proj_in(x)
        h = []
        for down in self.downs:
            x = down(x, t)
            h.append(x)
        x = self.mid(x, t)
        for up in self.ups:
            x = torch.cat((x, h.pop()), dim=-1)
            x = up(x, t)
        return self.proj_out(x)


def denoising_loss(model, batch):
    """The noise and its level are drawn by the loss function."""
    x = batch["x"]
    t = torch.rand(len(x), device=x.device)
    noise = torch.randn_like(x)
    noisy = (1 - t)[:, None] * x + t[:, None] * noise
    return F.mse_loss(model(noisy, t), noise - x, reduction="sum"), x.numel()


class DoubleConv(nn.Module):
    def __init__(self, in_ch, out_ch):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_ch, out_ch, 3, padding=1, bias=False),
            nn.GroupNorm(2, out_ch),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_ch, out_ch, 3, padding=1, bias=False),
            nn.GroupNorm(2, out_ch),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class UNet(nn.Module):
    def __init__(self, in_channels=3, out_channels=3, features=(4, 8, 16)):
        super().__init__()
        self.downs = nn.ModuleList()
        self.ups = nn.ModuleList()
        self.pool = nn.MaxPool2d(kernel_size=2, stride=2)
        for feature in features:
            self.downs.append(DoubleConv(in_channels, feature))
            in_channels = feature
        for feature in reversed(features):
            self.ups.append(nn.ConvTranspose2d(feature * 2, feature, kernel_size=2, stride=2))
            self.ups.append(DoubleConv(feature * 2, feature))
        self.bottleneck = DoubleConv(features[-1], features[-1] * 2)
        self.final_conv = nn.Conv2d(features[0], out_channels, kernel_size=1)

    def forward(self, x):
        skip_connections = []
        for down in self.downs:
            x = down(x)
            skip_connections.append(x)
            x = self.pool(x)
        x = self.bottleneck(x)
        skip_connections = skip_connections[::-1]
        for idx in range(0, len(self.ups), 2):
            x = self.ups[idx](x)
            skip_connection = skip_connections[idx // 2]
            if x.shape != skip_connection.shape:
                x = F.interpolate(x, size=skip_connection.shape[2:])
            x = self.ups[idx + 1](torch.cat((skip_connection, x), dim=1))
        return self.final_conv(x)


def segmentation_loss(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["mask"], reduction="sum"), batch["mask"].numel()


# ---- torch's own Transformer layers


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout=0.1, max_len=64):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(1, max_len, d_model)
        pe[0, :, 0::2] = torch.sin(position * div_term)
        pe[0, :, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return self.dropout(x + self.pe[:, : x.size(1)])


class EncoderClassifier(nn.Module):
    def __init__(self, d_model=WIDTH, nhead=HEADS, num_layers=DEPTH):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, d_model, padding_idx=PADDING)
        self.pos_encoder = PositionalEncoding(d_model)
        layer = nn.TransformerEncoderLayer(d_model, nhead, dim_feedforward=64, batch_first=True)
        self.transformer_encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.classifier = nn.Linear(d_model, CLASSES)
        self.d_model = d_model

    def forward(self, src, src_key_padding_mask=None):
        src = self.pos_encoder(self.embedding(src) * math.sqrt(self.d_model))
        out = self.transformer_encoder(src, src_key_padding_mask=src_key_padding_mask)
        kept = (~src_key_padding_mask).unsqueeze(-1)
        return self.classifier((out * kept).sum(1) / kept.sum(1))


def encoder_loss(model, batch):
    padding = batch["input_ids"] == PADDING
    logits = model(batch["input_ids"], src_key_padding_mask=padding)
    return F.cross_entropy(logits, batch["label"], reduction="sum"), len(logits)


class CaptionDecoder(nn.Module):
    """nn.TransformerDecoder over the features of a picture."""

    def __init__(self, d_model=WIDTH, nhead=HEADS, num_layers=DEPTH):
        super().__init__()
        self.feature_proj = nn.Linear(20, d_model)
        self.embed = nn.Embedding(VOCABULARY, d_model)
        self.pos = nn.Parameter(torch.randn(1, LENGTH, d_model) * 0.02)
        layer = nn.TransformerDecoderLayer(
            d_model, nhead, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.decoder = nn.TransformerDecoder(layer, num_layers, norm=nn.LayerNorm(d_model))
        self.fc_out = nn.Linear(d_model, VOCABULARY)

    def forward(self, features, captions):
        memory = self.feature_proj(features)
        tgt = self.embed(captions) + self.pos[:, : captions.size(1)]
        tgt_mask = nn.Transformer.generate_square_subsequent_mask(captions.size(1), device=captions.device)
        out = self.decoder(tgt, memory, tgt_mask=tgt_mask, tgt_is_causal=True)
        return self.fc_out(out)


def caption_loss(model, batch):
    logits = model(batch["features"], batch["x"])
    return F.cross_entropy(logits.transpose(1, 2), batch["y"], reduction="sum"), batch["y"].numel()


class TorchSeq2Seq(nn.Module):
    """nn.Transformer; source, target and generator have one table of tokens."""

    def __init__(self, d_model=WIDTH, nhead=HEADS, layers=2):
        super().__init__()
        self.tok_emb = nn.Embedding(VOCABULARY, d_model)
        self.positional_encoding = PositionalEncoding(d_model)
        self.transformer = nn.Transformer(d_model, nhead, layers, layers, 64, dropout=0.1, batch_first=True)
        self.generator = nn.Linear(d_model, VOCABULARY)
        self.generator.weight = self.tok_emb.weight
        # The layers' own way to look for a nested tensor is only for eval mode, and warns.
        self.transformer.encoder.enable_nested_tensor = False

    def forward(self, src, trg):
        tgt_mask = nn.Transformer.generate_square_subsequent_mask(trg.shape[1], device=trg.device, dtype=torch.bool)
        src_padding_mask, tgt_padding_mask = src == PADDING, trg == PADDING
        outs = self.transformer(
            self.positional_encoding(self.tok_emb(src)),
            self.positional_encoding(self.tok_emb(trg)),
            tgt_mask=tgt_mask,
            src_key_padding_mask=src_padding_mask,
            tgt_key_padding_mask=tgt_padding_mask,
            memory_key_padding_mask=src_padding_mask,
        )
        return self.generator(outs)


def seq2seq_loss(model, batch):
    tgt_input, tgt_out = batch["tgt"][:, :-1], batch["tgt"][:, 1:]
    logits = model(batch["src"], tgt_input)
    loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), tgt_out.reshape(-1), ignore_index=PADDING, reduction="sum")
    return loss, count(tgt_out, PADDING)


# ---- Vision transformers


class DropPath(nn.Module):
    """Drops whole samples of a residual branch."""

    def __init__(self, drop_prob=0.0):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        return x * x.new_empty(shape).bernoulli_(keep_prob).div_(keep_prob)


class LayerScale(nn.Module):
    def __init__(self, dim, init_values=0.1):
        super().__init__()
        self.gamma = nn.Parameter(init_values * torch.ones(dim))

    def forward(self, x):
        return x * self.gamma


class PatchEmbed(nn.Module):
    def __init__(self, img_size, patch_size, in_chans, embed_dim):
        super().__init__()
        self.num_patches = (img_size // patch_size) ** 2
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class VisionAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        x = (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class VisionBlock(nn.Module):
    def __init__(self, dim, num_heads, drop_path=0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = VisionAttention(dim, num_heads)
        self.ls1 = LayerScale(dim)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.ls2 = LayerScale(dim)

    def forward(self, x):
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))


class VisionTransformer(nn.Module):
    def __init__(self, img_size=16, patch_size=4, embed_dim=WIDTH, depth=DEPTH, drop_path_rate=0.0):
        super().__init__()
        self.patch_embed = PatchEmbed(img_size, patch_size, 3, embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, self.patch_embed.num_patches + 1, embed_dim))
        dpr = [x.item() for x in torch.linspace(0, drop_path_rate, depth)]
        self.blocks = nn.Sequential(*[VisionBlock(embed_dim, HEADS, dpr[i]) for i in range(depth)])
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, CLASSES)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.trunc_normal_(self.cls_token, std=0.02)

    def forward_features(self, x):
        x = self.patch_embed(x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        return self.norm(self.blocks(x + self.pos_embed))

    def forward_head(self, x):
        return self.head(x[:, 0])

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


def pair(t):
    return t if isinstance(t, tuple) else (t, t)


class PreNormAttention(nn.Module):
    def __init__(self, dim, heads, dim_head, dropout):
        super().__init__()
        inner_dim = dim_head * heads
        self.heads = heads
        self.scale = dim_head**-0.5
        self.norm = nn.LayerNorm(dim)
        self.attend = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(dropout)
        self.to_qkv = nn.Linear(dim, inner_dim * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, dim), nn.Dropout(dropout))

    def forward(self, x):
        x = self.norm(x)
        qkv = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv)
        dots = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        out = torch.matmul(self.dropout(self.attend(dots)), v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class PreNormFeedForward(nn.Module):
    def __init__(self, dim, hidden_dim, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, hidden_dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        return self.net(x)


class PairedLayers(nn.Module):
    """A layer is a list of two modules: nothing that could be called stands for it."""

    def __init__(self, dim, depth, heads, dim_head, mlp_dim, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(
                nn.ModuleList(
                    [PreNormAttention(dim, heads, dim_head, dropout), PreNormFeedForward(dim, mlp_dim, dropout)]
                )
            )

    def forward(self, x):
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.norm(x)


class PairedViT(nn.Module):
    def __init__(self, image_size=16, patch_size=4, dim=WIDTH, depth=DEPTH, dropout=0.1):
        super().__init__()
        self.patch_height, self.patch_width = pair(patch_size)
        num_patches = (image_size // self.patch_height) * (image_size // self.patch_width)
        patch_dim = 3 * self.patch_height * self.patch_width
        self.to_patch_embedding = nn.Sequential(nn.LayerNorm(patch_dim), nn.Linear(patch_dim, dim), nn.LayerNorm(dim))
        self.pos_embedding = nn.Parameter(torch.randn(1, num_patches + 1, dim))
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.dropout = nn.Dropout(dropout)
        self.transformer = PairedLayers(dim, depth, HEADS, 8, 2 * dim, dropout)
        self.mlp_head = nn.Linear(dim, CLASSES)

    def forward(self, img):
        patches = F.unfold(img, (self.patch_height, self.patch_width), stride=(self.patch_height, self.patch_width))
        x = self.to_patch_embedding(patches.transpose(1, 2))
        b, n, _ = x.shape
        x = torch.cat((self.cls_token.repeat(b, 1, 1), x), dim=1)
        x += self.pos_embedding[:, : (n + 1)]
        x = self.transformer(self.dropout(x))
        return self.mlp_head(x[:, 0])


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token_mixing = nn.Sequential(nn.Linear(tokens, tokens), nn.GELU(), nn.Linear(tokens, tokens))
        self.channel_mixing = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, x):
        x = x + self.token_mixing(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mixing(self.norm2(x))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(dim=1)


def mixer():
    """No class at all: the whole model is one nn.Sequential with a sequence of blocks inside."""
    return nn.Sequential(
        PatchEmbed(16, 4, 3, WIDTH),
        nn.Sequential(*[MixerBlock(16, WIDTH) for _ in range(DEPTH)]),
        nn.LayerNorm(WIDTH),
        Mean(),
        nn.Linear(WIDTH, CLASSES),
    )


# ---- Convolutions


def conv3x3(in_planes, out_planes, stride=1):
    return nn.Conv2d(in_planes, out_planes, kernel_size=3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inplanes, planes, stride=1, downsample=None):
        super().__init__()
        self.conv1 = conv3x3(inplanes, planes, stride)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(planes, planes)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, layers=(2, 2, 2, 2), planes=(6, 8, 12, 16)):
        super().__init__()
        self.inplanes = planes[0]
        self.conv1 = nn.Conv2d(3, self.inplanes, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(self.inplanes)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=1, padding=1)
        self.layer1 = self._make_layer(planes[0], layers[0])
        self.layer2 = self._make_layer(planes[1], layers[1], stride=2)
        self.layer3 = self._make_layer(planes[2], layers[2], stride=2)
        self.layer4 = self._make_layer(planes[3], layers[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(planes[3] * BasicBlock.expansion, CLASSES)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def _make_layer(self, planes, blocks, stride=1):
        downsample = None
        if stride != 1 or self.inplanes != planes * BasicBlock.expansion:
            downsample = nn.Sequential(
                nn.Conv2d(self.inplanes, planes, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(planes)
            )
        layers = [BasicBlock(self.inplanes, planes, stride, downsample)]
        self.inplanes = planes * BasicBlock.expansion
        layers += [BasicBlock(self.inplanes, planes) for _ in range(1, blocks)]
        return nn.Sequential(*layers)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x)


def convnet():
    """A flat nn.Sequential in which nothing repeats."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.1),
        nn.Conv2d(12, 16, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, CLASSES),
    )


class DenseLayer(nn.Module):
    def __init__(self, num_input_features, growth_rate):
        super().__init__()
        self.norm = nn.GroupNorm(1, num_input_features)
        self.conv = nn.Conv2d(num_input_features, growth_rate, 3, padding=1, bias=False)

    def forward(self, features):
        return self.conv(F.relu(self.norm(torch.cat(features, 1))))


class DenseNet(nn.Module):
    """Every layer is given a list with the outputs of all layers before it."""

    def __init__(self, growth_rate=6, layers=4):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.layers = nn.ModuleDict()
        for i in range(layers):
            self.layers[f"denselayer{i + 1}"] = DenseLayer(8 + i * growth_rate, growth_rate)
        self.classifier = nn.Linear(8 + layers * growth_rate, CLASSES)

    def forward(self, x):
        features = [self.stem(x)]
        for layer in self.layers.values():
            features.append(layer(features))
        return self.classifier(F.adaptive_avg_pool2d(torch.cat(features, 1), 1).flatten(1))


class Chomp1d(nn.Module):
    def __init__(self, chomp_size):
        super().__init__()
        self.chomp_size = chomp_size

    def forward(self, x):
        return x[:, :, : -self.chomp_size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, n_inputs, n_outputs, kernel_size, dilation):
        super().__init__()
        padding = (kernel_size - 1) * dilation
        self.conv = weight_norm(nn.Conv1d(n_inputs, n_outputs, kernel_size, padding=padding, dilation=dilation))
        self.net = nn.Sequential(self.conv, Chomp1d(padding), nn.ReLU(), nn.Dropout(0.1))
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.net(x) + x)


class TCN(nn.Module):
    """Causal convolutions whose weights are computed from two parameters each; a module under two names."""

    def __init__(self, channels=WIDTH, levels=3):
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, channels)
        self.network = nn.Sequential(*[TemporalBlock(channels, channels, 2, 2**i) for i in range(levels)])
        self.linear = nn.Linear(channels, VOCABULARY)

    def forward(self, x):
        return self.linear(self.network(self.emb(x).transpose(1, 2)).transpose(1, 2))


class TextCNN(nn.Module):
    """Convolutions side by side on one input, in a list, though they are no layers one after another."""

    def __init__(self, embed_dim=WIDTH, num_filters=8, kernel_sizes=(2, 3, 4)):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, embed_dim, padding_idx=PADDING)
        self.convs = nn.ModuleList([nn.Conv2d(1, num_filters, (k, embed_dim)) for k in kernel_sizes])
        self.dropout = nn.Dropout(0.1)
        self.fc = nn.Linear(num_filters * len(kernel_sizes), CLASSES)

    def forward(self, x):
        x = self.embedding(x).unsqueeze(1)
        x = [F.relu(conv(x)).squeeze(3) for conv in self.convs]
        x = torch.cat([F.max_pool1d(i, i.size(2)).squeeze(2) for i in x], 1)
        return self.fc(self.dropout(x))


def text_class_loss(model, batch):
    return F.cross_entropy(model(batch["input_ids"]), batch["label"], reduction="sum"), len(batch["label"])


# ---- Perceptrons


def course_mlp():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 512),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(128, 10),
    )


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc3 = nn.Linear(64, 32)
        self.fc4 = nn.Linear(32, 10)

    def forward(self, x):
        x = x.view(-1, 784)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        x = F.relu(self.fc3(x))
        return F.log_softmax(self.fc4(x), dim=1)


def nll_loss(model, batch):
    return F.nll_loss(model(batch["image"]), batch["label"], reduction="sum"), len(batch["label"])


class MLP(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(sizes[i], sizes[i + 1]) for i in range(len(sizes) - 1))

    def forward(self, x):
        for i, linear in enumerate(self.linears):
            x = linear(x)
            if i < len(self.linears) - 1:
                x = torch.relu(x)
        return x


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = MLP([784, 48, 24, 8])
        self.decoder = MLP([8, 24, 48, 784])

    def forward(self, x):
        z = self.encoder(x.flatten(1))
        return torch.sigmoid(self.decoder(z)).view_as(x), z


def reconstruction_loss(model, batch):
    recon, z = model(batch["image"])
    return F.binary_cross_entropy(recon, batch["image"], reduction="sum") + 1e-3 * z.abs().sum(), recon.numel()


class VAE(nn.Module):
    """Draws random numbers between its parts, outside of any module."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU())
        self.fc_mu, self.fc_logvar = nn.Linear(24, 4), nn.Linear(24, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 784))

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x):
        h = self.encoder(x.view(-1, 784))
        mu, logvar = self.fc_mu(h), self.fc_logvar(h)
        z = self.reparameterize(mu, logvar)
        return {"recon": torch.sigmoid(self.decoder(z)), "mu": mu, "logvar": logvar}


def vae_loss(model, batch):
    out = model(batch["image"])
    bce = F.binary_cross_entropy(out["recon"], batch["image"].view(-1, 784), reduction="sum")
    kld = -0.5 * torch.sum(1 + out["logvar"] - out["mu"].pow(2) - out["logvar"].exp())
    return bce + kld, len(batch["image"])


# ---- Several inputs, an object as output, an auxiliary loss from every block


@dataclass
class MoEOutput:
    logits: torch.Tensor
    aux_loss: torch.Tensor
    router_probs: tuple[torch.Tensor, ...]


class MoELayer(nn.Module):
    """Every token visits every expert, weighted by the router."""

    def __init__(self, dim, num_experts):
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim)) for _ in range(num_experts)
        )

    def forward(self, x):
        probs = self.gate(x).softmax(-1)
        out = torch.stack([expert(x) for expert in self.experts], dim=-1)
        usage = probs.mean(dim=(0, 1))
        return (out * probs.unsqueeze(-2)).sum(-1), len(self.experts) * usage.square().sum(), probs


class MoEBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, HEADS, dropout=0.1, batch_first=True)
        self.moe = MoELayer(dim, 3)

    def forward(self, x, padding_mask):
        h = self.ln1(x)
        x = x + self.attn(h, h, h, key_padding_mask=padding_mask, need_weights=False)[0]
        y, aux, probs = self.moe(self.ln2(x))
        return x + y, aux, probs


class MoETransformer(nn.Module):
    def __init__(self, dim=24, depth=DEPTH):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.segments = nn.Embedding(2, dim)
        self.blocks = nn.ModuleList([MoEBlock(dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, input_ids, segments, *, padding_mask=None):
        x = self.tokens(input_ids) + self.segments(segments)
        total_aux, router_probs = 0.0, []
        for block in self.blocks:
            x, aux, probs = block(x, padding_mask)
            total_aux = total_aux + aux
            router_probs.append(probs)
        return MoEOutput(self.head(self.norm(x).mean(1)), total_aux / len(self.blocks), tuple(router_probs))


def moe_loss(model, batch):
    out = model(batch["input_ids"], batch["segments"], padding_mask=batch["attention_mask"] == 0)
    n = len(batch["label"])
    return F.cross_entropy(out.logits, batch["label"], reduction="sum") + 0.01 * out.aux_loss * n, n


# ---- An encoder and a decoder by hand, as in a well-known annotation of the paper


def clones(module, n):
    return nn.ModuleList([copy.deepcopy(module) for _ in range(n)])


def subsequent_mask(size, device):
    return torch.triu(torch.ones(1, size, size, device=device), diagonal=1).type(torch.uint8) == 0


def attention(query, key, value, mask=None, dropout=None):
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model, dropout=0.1):
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.linears = clones(nn.Linear(d_model, d_model), 4)
        self.attn = None
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        nbatches = query.size(0)
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        ]
        x, self.attn = attention(query, key, value, mask=mask, dropout=self.dropout)
        return self.linears[-1](x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k))


class SublayerConnection(nn.Module):
    def __init__(self, size, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, sublayer):
        return x + self.dropout(sublayer(self.norm(x)))


class EncoderLayer(nn.Module):
    def __init__(self, size, self_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn, self.feed_forward = self_attn, feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout), 2)
        self.size = size

    def forward(self, x, mask):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        return self.sublayer[1](x, self.feed_forward)


class CrossDecoderLayer(nn.Module):
    def __init__(self, size, self_attn, src_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn, self.src_attn, self.feed_forward = self_attn, src_attn, feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout), 3)
        self.size = size

    def forward(self, x, memory, src_mask, tgt_mask):
        m = memory
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, m, m, src_mask))
        return self.sublayer[2](x, self.feed_forward)


class LayerStack(nn.Module):
    def __init__(self, layer, n):
        super().__init__()
        self.layers = clones(layer, n)
        self.norm = nn.LayerNorm(layer.size)

    def forward(self, x, *context):
        for layer in self.layers:
            x = layer(x, *context)
        return self.norm(x)


class EncoderDecoder(nn.Module):
    def __init__(self, encoder, decoder, src_embed, tgt_embed, generator):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.src_embed, self.tgt_embed = src_embed, tgt_embed
        self.generator = generator

    def forward(self, src, tgt, src_mask, tgt_mask):
        return self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)

    def encode(self, src, src_mask):
        return self.encoder(self.src_embed(src), src_mask)

    def decode(self, memory, src_mask, tgt, tgt_mask):
        out = self.decoder(self.tgt_embed(tgt), memory, src_mask, tgt_mask)
        return F.log_softmax(self.generator(out), dim=-1)


def annotated_transformer(n=3, d_model=WIDTH, d_ff=48, h=HEADS, dropout=0.1):
    c = copy.deepcopy
    attn = MultiHeadedAttention(h, d_model)
    ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Dropout(dropout), nn.Linear(d_ff, d_model))
    position = PositionalEncoding(d_model, dropout)
    model = EncoderDecoder(
        LayerStack(EncoderLayer(d_model, c(attn), c(ff), dropout), n),
        LayerStack(CrossDecoderLayer(d_model, c(attn), c(attn), c(ff), dropout), n),
        nn.Sequential(nn.Embedding(VOCABULARY, d_model), c(position)),
        nn.Sequential(nn.Embedding(VOCABULARY, d_model), c(position)),
        nn.Linear(d_model, VOCABULARY),
    )
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    return model


def smoothed_loss(model, batch, smoothing=0.1):
    src, tgt, tgt_y = batch["src"], batch["tgt"][:, :-1], batch["tgt"][:, 1:]
    tgt_mask = (tgt != PADDING).unsqueeze(-2) & subsequent_mask(tgt.size(-1), tgt.device)
    logp = model(src, tgt, (src != PADDING).unsqueeze(-2), tgt_mask).reshape(-1, VOCABULARY)
    true_dist = torch.full_like(logp, smoothing / (VOCABULARY - 2))
    true_dist.scatter_(1, tgt_y.reshape(-1, 1), 1.0 - smoothing)
    true_dist[:, PADDING] = 0
    true_dist[tgt_y.reshape(-1) == PADDING] = 0.0
    return F.kl_div(logp, true_dist, reduction="sum"), count(tgt_y, PADDING)


# ---- Recurrent


class RNNModel(nn.Module):
    def __init__(self, ninp=WIDTH, nhid=WIDTH, nlayers=2, dropout=0.1):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(VOCABULARY, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(nhid, VOCABULARY)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, input):
        emb = self.drop(self.encoder(input))
        output, _ = self.rnn(emb)
        return self.decoder(self.drop(output))


class StackedLSTM(nn.Module):
    def __init__(self, hidden=WIDTH):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.lstm1 = nn.LSTM(hidden, hidden, batch_first=True)
        self.lstm2 = nn.LSTM(hidden, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, VOCABULARY)

    def forward(self, x):
        h0 = torch.zeros(1, x.size(0), self.lstm1.hidden_size, device=x.device)
        out, (h, c) = self.lstm1(self.embedding(x), (h0, torch.zeros_like(h0)))
        out, _ = self.lstm2(out, (h, c))
        return self.fc(out)


class CellRNN(nn.Module):
    """Cells in a list, each called once for every token."""

    def __init__(self, hidden=24, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.cells = nn.ModuleList([nn.GRUCell(hidden, hidden) for _ in range(layers)])
        self.fc = nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        state = [torch.zeros(x.size(0), x.size(2), device=x.device) for _ in self.cells]
        outputs = []
        for t in range(x.size(1)):
            inp = x[:, t]
            for i, cell in enumerate(self.cells):
                state[i] = cell(inp, state[i])
                inp = state[i]
            outputs.append(inp)
        return self.fc(torch.stack(outputs, dim=1))


# ---- Towers


class Tower(nn.Module):
    def __init__(self, num_embeddings, dim):
        super().__init__()
        self.embedding = nn.Embedding(num_embeddings, dim)
        self.layers = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, ids):
        return F.normalize(self.layers(self.embedding(ids)), dim=-1)


class TwoTower(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.user_tower = Tower(40, dim)
        self.item_tower = Tower(50, dim)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, user, item):
        return (self.user_tower(user) * self.item_tower(item)).sum(-1) * self.temperature.exp()


def tower_loss(model, batch):
    logits = model(batch["user"], batch["item"])
    return F.binary_cross_entropy_with_logits(logits, batch["clicked"], reduction="sum"), len(logits)


class DLRM(nn.Module):
    """Tables of features in a list, dense features through a perceptron, all pairs of dot products, a perceptron."""

    def __init__(self, dim=8):
        super().__init__()
        self.emb_l = nn.ModuleList([nn.EmbeddingBag(12, dim, mode="sum") for _ in range(3)])
        self.bot_l = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, dim), nn.ReLU())
        self.top_l = nn.Sequential(nn.Linear(dim + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense_x, categories):
        x = self.bot_l(dense_x)
        ly = [emb(categories[:, i : i + 1]) for i, emb in enumerate(self.emb_l)]
        T = torch.stack([x, *ly], dim=1)
        Z = torch.bmm(T, T.transpose(1, 2))
        li, lj = torch.tril_indices(T.size(1), T.size(1), offset=-1)
        return self.top_l(torch.cat([x, Z[:, li, lj]], dim=1)).squeeze(1)


def dlrm_loss(model, batch):
    logits = model(batch["numbers"], batch["categories"])
    return F.binary_cross_entropy_with_logits(logits, batch["clicked"], reduction="sum"), len(logits)


class ResidualLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Siamese(nn.Module):
    """One encoder for both inputs."""

    def __init__(self, dim=16, depth=DEPTH):
        super().__init__()
        self.encoder = nn.Sequential(*[ResidualLayer(dim) for _ in range(depth)])
        self.out = nn.Linear(dim, 8)

    def forward(self, left, right):
        a, b = self.out(self.encoder(left)), self.out(self.encoder(right))
        return F.pairwise_distance(a, b)


def contrastive_loss(model, batch, margin=2.0):
    distance, same = model(batch["left"], batch["right"]), batch["same"]
    loss = same * distance.pow(2) + (1 - same) * F.relu(margin - distance).pow(2)
    return loss.sum(), len(same)


# ---- Residual stacks that do something unusual between their blocks


class Stack(nn.Module):
    """Ten numbers in, five out; what happens between the blocks is up to the subclass."""

    def __init__(self, dim=16, depth=DEPTH):
        super().__init__()
        self.proj = nn.Linear(10, dim)
        self.layers = nn.ModuleList([ResidualLayer(dim) for _ in range(depth)])
        self.out = nn.Linear(dim, 5)

    def forward(self, x):
        x = self.proj(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class UniversalStack(Stack):
    """Weights shared across depth: every block is called three times."""

    def forward(self, x):
        x = self.proj(x)
        for _ in range(3):
            for layer in self.layers:
                x = layer(x)
        return self.out(x)


class ItemStack(Stack):
    """Reads a number out of an activation."""

    def forward(self, x):
        x = self.proj(x)
        for layer in self.layers:
            x = layer(x)
            largest = x.detach().abs().max().item()
            if largest > 100:
                raise ValueError(f"activations explode: {largest}")
            x = x / max(1.0, largest)
        return self.out(x)


class BranchStack(Stack):
    """Which way it goes depends on an activation."""

    def forward(self, x):
        x = self.proj(x)
        for layer in self.layers:
            x = layer(x)
            x = torch.tanh(x) if x.mean() > 0 else F.softsign(x)
        return self.out(x)


class EarlyExitStack(Stack):
    """Leaves when a layer changes little, as models do that save time on easy inputs."""

    def forward(self, x):
        x = self.proj(x)
        for i, layer in enumerate(self.layers):
            before = x
            x = layer(x)
            if i > 0 and (x - before).norm() < 0.3 * x.norm():
                break
        return self.out(x)


class BufferStack(Stack):
    """Writes the output of every block into a tensor that was there before, and mixes them."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.zeros(len(self.layers)))

    def forward(self, x):
        x = self.proj(x)
        buf = torch.zeros(x.size(0), len(self.layers), x.size(1), device=x.device)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            buf[:, i] = x
        return self.out((buf * self.mix.softmax(0)[:, None]).sum(1))


class LayerDropStack(Stack):
    """Leaves out layers at random in training."""

    def forward(self, x):
        x = self.proj(x)
        for layer in self.layers:
            if self.training and torch.rand(()) < 0.3:
                continue
            x = layer(x)
        return self.out(x)


class DeepSupervision(Stack):
    """A head for every block; the loss looks at all of them."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(16, 5) for _ in self.layers])

    def forward(self, x):
        x = self.proj(x)
        outs = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x)
            outs.append(head(x))
        return [*outs, self.out(x)]


def deep_loss(model, batch):
    outs = model(batch["x"])
    total = sum(F.mse_loss(out, batch["y"], reduction="sum") * 0.5 ** (len(outs) - i) for i, out in enumerate(outs))
    return total, batch["y"].numel()


class TopDownStack(Stack):
    """Calls its blocks from the last to the first."""

    def forward(self, x):
        x = self.proj(x)
        for layer in reversed(self.layers):
            x = layer(x)
        return self.out(x)


class InPlaceStack(Stack):
    """Changes activations in place between blocks."""

    def forward(self, x):
        x = self.proj(x)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            x *= 1.0 - 0.1 * i
            x[:, 0].add_(0.1)
        return self.out(x)


class DetachedStack(Stack):
    """Half way up it goes on from a copy that lets no gradient through."""

    def forward(self, x):
        x = self.proj(x)
        for i, layer in enumerate(self.layers):
            x = layer(x.detach() if i == 2 else x)
        return self.out(x)


class UnusedStack(Stack):
    """Has a mask token and a head from its pretraining that no loss uses."""

    def __init__(self):
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(16))
        self.old_head = nn.Linear(16, 3)


class ConstantStack(Stack):
    """Normalises with constants, which are buffers, saved and not saved, of the model and of a block."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.linspace(-0.2, 0.2, 10))
        self.register_buffer("std", torch.linspace(0.5, 1.5, 10))
        self.register_buffer("steps", torch.arange(5), persistent=False)
        self.layers[1].register_buffer("unused", torch.ones(3))

    def forward(self, x):
        return super().forward((x - self.mean) / self.std) * (1 + 0.1 * self.steps)


def two_calls_loss(model, batch):
    """The loss calls the model twice, and wants both results close together."""
    first, second = model(batch["x"]), model(batch["x"] + 0.1)
    total = F.mse_loss(first, batch["y"], reduction="sum") + F.mse_loss(first, second, reduction="sum")
    return total, batch["y"].numel()


class FunctionalHeadGPT(nn.Module):
    """The embedding's weight is the head, read without calling the module that owns it."""

    def __init__(self, dim=WIDTH, depth=DEPTH):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, dim)
        self.wpe = nn.Parameter(0.02 * torch.randn(LENGTH, dim))
        layer = partial(nn.TransformerEncoderLayer, dim, HEADS, 2 * dim, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList([layer() for _ in range(depth)])
        self.ln = nn.LayerNorm(dim)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe[: idx.shape[1]]
        mask = torch.full((idx.shape[1], idx.shape[1]), float("-inf"), device=idx.device).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.ln(x) @ self.wte.weight.T


# ---- Models of Hugging Face's transformers, small and with random weights


def hugging_face() -> Any:
    # Not an import statement: its annotations take mypy minutes, and not everybody has it.
    return importlib.import_module("transformers")


def hf_gpt2():
    hf = hugging_face()
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=WIDTH, n_layer=DEPTH, n_head=HEADS, bos_token_id=1, eos_token_id=2
    )
    return hf.GPT2LMHeadModel(config)


def decoder_options():
    return dict(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=64,
        pad_token_id=PADDING,
        bos_token_id=1,
        eos_token_id=2,
    )


def hf_llama():
    hf = hugging_face()
    return hf.LlamaForCausalLM(hf.LlamaConfig(**decoder_options(), use_cache=False))


def hf_qwen2():
    hf = hugging_face()
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**decoder_options(), use_cache=False, tie_word_embeddings=True))


def hf_qwen3():
    """As it comes: attention by plain matrix products, and the layers are given a cache that training never reads."""
    hf = hugging_face()
    config = hf.Qwen3Config(**decoder_options(), head_dim=8, attn_implementation="eager", use_cache=True)
    return hf.Qwen3ForCausalLM(config)


def hf_bert():
    hf = hugging_face()
    config = hf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=32,
        num_labels=CLASSES,
    )
    return hf.BertForSequenceClassification(config)


def bert_loss(model, batch):
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    out = model(**inputs, token_type_ids=batch["segments"], labels=batch["label"])
    return out["loss"] * len(batch["label"]), len(batch["label"])


def hf_vit():
    hf = hugging_face()
    config = hf.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        image_size=16,
        patch_size=4,
        num_labels=CLASSES,
    )
    return hf.ViTForImageClassification(config)


def vit_loss(model, batch):
    logits = model(pixel_values=batch["image"]).logits
    return F.cross_entropy(logits, batch["label"], reduction="sum"), len(batch["label"])


def hf_t5():
    """Its first layers compute a bias of positions that all others are given."""
    hf = hugging_face()
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=2 * WIDTH,
        num_layers=3,
        num_heads=HEADS,
        decoder_start_token_id=PADDING,
        use_cache=False,
    )
    return hf.T5ForConditionalGeneration(config)


def t5_loss(model, batch):
    labels = batch["tgt"].masked_fill(batch["tgt"] == PADDING, IGNORED)
    out = model(input_ids=batch["src"], attention_mask=(batch["src"] != PADDING).long(), labels=labels)
    return out.loss * count(labels), count(labels)


# ---- The zoo

# What `pp` says of the models that it cannot cut.
CALLED_TWICE = "is called"
MODEL_CALLED_TWICE = "calls the model"
READS_A_VALUE = "reads a value"
ANOTHER_PATH = "took another path"
WRITES_A_VALUE = "writes a value of the model"
DRAWS_ALONE = "draws random numbers"
TOO_SMALL = "at most"

DROPOUT = Expectation(random=True)
PIXELS = images(3, 16)
TEXTS, PADDED, TRANSLATIONS, DIGITS, VECTORS = texts(), padded_texts(), translations(), digits(), vectors()


def refused_by_pipelines(fragment: str, **known: Any) -> Expectation:
    return Expectation(refused={"pp": fragment}, **known)


# Ranks that skip different blocks by their data end in a refusal or a verdict on a hang: tests of faults have those.
APART = {"fsdp": "ranks call different blocks"}


ENTRIES = [
    # Language models
    Entry("nanogpt", gpt, gpt_loss, TEXTS, DROPOUT),
    Entry("nanogpt-checkpointing", partial(gpt, checkpointing=True), gpt_loss, TEXTS, DROPOUT, like="nanogpt"),
    Entry("nanogpt-no-bias", partial(gpt, bias=False, dropout=0.0), gpt_loss, TEXTS),
    Entry(
        "nanogpt-checkpointing-no-bias",
        partial(gpt, bias=False, dropout=0.0, checkpointing=True),
        gpt_loss,
        TEXTS,
        like="nanogpt-no-bias",
    ),
    Entry("rotary-gpt", RotaryGPT, text_loss, TEXTS),
    Entry("decoder-logits", DecoderForCausalLM, padded_loss, PADDED),
    Entry("decoder-own-loss", DecoderForCausalLM, own_padded_loss, PADDED, like="decoder-logits"),
    Entry("decoder-attentions", partial(DecoderForCausalLM, output_attentions=True), attention_entropy_loss, PADDED),
    Entry("skip-gpt", SkipGPT, text_loss, TEXTS),
    Entry("lambda-gpt", LambdaGPT, text_loss, TEXTS),
    Entry("unet-gpt", UNetGPT, text_loss, TEXTS),
    Entry("functional-head-gpt", FunctionalHeadGPT, text_loss, TEXTS),
    Entry("tcn", TCN, text_loss, TEXTS, DROPOUT),
    Entry("lstm", RNNModel, text_loss, TEXTS, Expectation(random=True, refused={"pp=4": TOO_SMALL})),
    Entry("stacked-lstm", StackedLSTM, text_loss, TEXTS),
    Entry("moe", MoETransformer, moe_loss, PADDED, DROPOUT),
    Entry("textcnn", TextCNN, text_class_loss, PADDED, DROPOUT),
    # Encoders and decoders
    Entry("torch-encoder", EncoderClassifier, encoder_loss, PADDED, DROPOUT),
    Entry("torch-decoder", CaptionDecoder, caption_loss, captions()),
    Entry("torch-seq2seq", TorchSeq2Seq, seq2seq_loss, TRANSLATIONS, DROPOUT),
    Entry("annotated-transformer", annotated_transformer, smoothed_loss, TRANSLATIONS, DROPOUT),
    # Pictures
    Entry("vit", VisionTransformer, image_loss, PIXELS),
    Entry("vit-drop-path", partial(VisionTransformer, drop_path_rate=0.3), image_loss, PIXELS, DROPOUT),
    Entry(
        "paired-vit",
        PairedViT,
        image_loss,
        PIXELS,
        Expectation(random=True),
    ),
    Entry("mixer", mixer, image_loss, PIXELS),
    Entry("resnet", ResNet, image_loss, PIXELS, Expectation(statistics=True)),
    Entry("convnet", convnet, image_loss, PIXELS, Expectation(random=True, statistics=True)),
    Entry("densenet", DenseNet, image_loss, PIXELS),
    Entry("unet", UNet, segmentation_loss, PIXELS),
    # Perceptrons and towers
    Entry("course-mlp", course_mlp, image_loss, DIGITS, DROPOUT),
    Entry("toy", ToyModel, vector_loss, VECTORS, Expectation(refused={"pp=4": TOO_SMALL})),
    Entry("net", Net, nll_loss, DIGITS),
    Entry("autoencoder", AutoEncoder, reconstruction_loss, DIGITS),
    Entry("vae", VAE, vae_loss, DIGITS, Expectation(random=True, refused={"pp=4": DRAWS_ALONE})),
    Entry("unet-mlp", UNetMLP, denoising_loss, VECTORS, DROPOUT),
    Entry("two-tower", TwoTower, tower_loss, clicks(), Expectation()),
    Entry("dlrm", DLRM, dlrm_loss, clicks()),
    # Between the blocks
    Entry("stack", Stack, vector_loss, VECTORS),
    Entry("top-down", TopDownStack, vector_loss, VECTORS),
    Entry("in-place", InPlaceStack, vector_loss, VECTORS),
    Entry("deep-supervision", DeepSupervision, deep_loss, VECTORS),
    Entry("buffer", BufferStack, vector_loss, VECTORS, refused_by_pipelines(WRITES_A_VALUE)),
    Entry("detached", DetachedStack, vector_loss, VECTORS, Expectation(unused=("proj.", "layers.0.", "layers.1."))),
    # Parameters that are not trained
    Entry(
        "frozen-gpt",
        frozen_gpt,
        gpt_loss,
        TEXTS,
        Expectation(frozen=("transformer.wte", "transformer.wpe", "transformer.h.0.", "lm_head")),
    ),
    Entry(
        "only-head-gpt",
        only_head_gpt,
        gpt_loss,
        TEXTS,
        Expectation(frozen=("transformer.w", "transformer.h.0.", "transformer.h.1.", "transformer.h.2.", "lm_head")),
    ),
    Entry("unused", UnusedStack, vector_loss, VECTORS, Expectation(unused=("mask_token", "old_head"))),
    Entry("constants", ConstantStack, vector_loss, VECTORS),
    # What a pipeline cannot do
    Entry("siamese", Siamese, contrastive_loss, couples(), refused_by_pipelines(CALLED_TWICE)),
    Entry("universal", UniversalStack, vector_loss, VECTORS, refused_by_pipelines(CALLED_TWICE)),
    Entry("cells", CellRNN, text_loss, TEXTS, refused_by_pipelines(CALLED_TWICE)),
    Entry("two-calls", Stack, two_calls_loss, VECTORS, refused_by_pipelines(MODEL_CALLED_TWICE)),
    Entry("item", ItemStack, vector_loss, VECTORS, refused_by_pipelines(READS_A_VALUE)),
    Entry("branch", BranchStack, vector_loss, VECTORS, refused_by_pipelines(READS_A_VALUE)),
    Entry("early-exit", EarlyExitStack, vector_loss, VECTORS, refused_by_pipelines(READS_A_VALUE, broken=APART)),
    Entry("layer-drop", LayerDropStack, vector_loss, VECTORS, refused_by_pipelines(ANOTHER_PATH, random=True)),
    # Hugging Face
    Entry("hf-gpt2", hf_gpt2, own_padded_loss, PADDED, DROPOUT, needs="transformers"),
    Entry("hf-llama", hf_llama, padded_loss, PADDED, needs="transformers"),
    Entry("hf-llama-own-loss", hf_llama, own_padded_loss, PADDED, needs="transformers", like="hf-llama"),
    Entry("hf-qwen2", hf_qwen2, own_padded_loss, PADDED, needs="transformers"),
    Entry("hf-qwen3", hf_qwen3, padded_loss, PADDED, needs="transformers"),
    Entry("hf-bert", hf_bert, bert_loss, PADDED, DROPOUT, needs="transformers"),
    Entry("hf-vit", hf_vit, vit_loss, PIXELS, needs="transformers"),
    Entry("hf-t5", hf_t5, t5_loss, TRANSLATIONS, DROPOUT, needs="transformers"),
]

# What `tp` and `cp` say of the models that they cannot cut.
NOTHING_TO_CUT = "would cut nothing"
NO_SEQUENCES = "the cp axis cuts sequences"
WHOLE_SEQUENCES = "needs whole sequences inside a block"

# fmt: off
REFUSED = {
    "tp": {
        **dict.fromkeys(["tcn", "textcnn", "resnet", "densenet", "unet", "dlrm", "cells"], NOTHING_TO_CUT),
        **dict.fromkeys(["item", "branch", "early-exit"], READS_A_VALUE),
    },
    "tp=2,pp=2": {
        # The matrix that takes in what another one returns is another part of the pipeline.
        **dict.fromkeys(["toy", "net", "autoencoder", "vae"], NOTHING_TO_CUT),
        "cells": CALLED_TWICE,
    },
    "cp": {
        **dict.fromkeys(["tcn", "lstm", "stacked-lstm", "textcnn"], WHOLE_SEQUENCES),
        **dict.fromkeys(
            ["vit", "vit-drop-path", "paired-vit", "mixer", "resnet", "convnet", "densenet", "unet", "hf-vit", "cells"],
            NOTHING_TO_CUT,
        ),
        **dict.fromkeys(["two-tower", "dlrm"], "a sequence of 3 tokens cannot be shared out over cp=2"),
        **dict.fromkeys(
            [
                "course-mlp", "toy", "net", "autoencoder", "vae", "unet-mlp", "stack", "top-down", "in-place",
                "deep-supervision", "buffer", "detached", "unused", "constants", "siamese", "universal", "two-calls",
                "item", "branch", "early-exit", "layer-drop",
            ],
            NO_SEQUENCES,
        ),
    },
}
# fmt: on


def expected(entry: Entry) -> Entry:
    more = {layout: by_name[entry.name] for layout, by_name in REFUSED.items() if entry.name in by_name}
    return replace(entry, expect=replace(entry.expect, refused={**entry.expect.refused, **more}))


ENTRIES = [expected(entry) for entry in ENTRIES]
ZOO = {entry.name: entry for entry in ENTRIES}
