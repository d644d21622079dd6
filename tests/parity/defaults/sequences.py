"""Texts and other sequences: recurrent nets, GPTs, encoders and decoders, models of Hugging Face, padding, CTC."""

# The models and losses have no annotations, as those of most people.
# mypy: check-untyped-defs=False

from __future__ import annotations

import importlib
import importlib.util
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import Dataset

from tests.parity.defaults.basics import CLASSES, picture_classes, pictures
from tests.parity.defaults.case import COUPLED, LAYOUTS, READS, SIZE, Case, Columns, adamw, dice, with_rate

VOCABULARY, LENGTH, WIDTH, HEADS = 23, 8, 16, 2
PADDING, IGNORED, MASKED = 0, -100, 1


def texts() -> Columns:
    """Next-token pairs; every sample has another number of labels that count, and some have none."""
    draw = dice("texts")
    tokens = torch.randint(2, VOCABULARY, (SIZE, LENGTH + 1), generator=draw)
    labels = tokens[:, 1:].clone()
    labels[torch.arange(LENGTH) >= torch.randint(0, LENGTH + 1, (SIZE, 1), generator=draw)] = IGNORED
    return Columns(x=tokens[:, :-1], y=labels, label=torch.randint(CLASSES, (SIZE,), generator=draw))


def padded() -> Columns:
    """What a tokenizer returns."""
    draw = dice("padded")
    tokens = torch.randint(2, VOCABULARY, (SIZE, LENGTH), generator=draw)
    real = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (SIZE, 1), generator=draw)
    return Columns(
        input_ids=tokens.where(real, PADDING),
        attention_mask=real.long(),
        labels=tokens.where(real, IGNORED),
        label=torch.randint(CLASSES, (SIZE,), generator=draw),
    )


class Unpadded(Dataset[Any]):
    """Texts of unequal lengths, which a collate function pads."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        draw = torch.Generator().manual_seed(index)
        return torch.randint(2, VOCABULARY, (3 + index % 6,), generator=draw), index % CLASSES


def pad(samples):
    texts, labels = zip(*samples, strict=True)
    return {
        "tokens": pad_sequence(texts, batch_first=True),
        "lengths": torch.tensor([len(one) for one in texts]),
        "label": torch.tensor(labels),
    }


class OneLonger(Unpadded):
    """Texts of one length, but for one that does not come soon."""

    def __getitem__(self, index: int) -> Any:
        text, label = super().__getitem__(3)[0], index % CLASSES
        text = (text + index) % VOCABULARY
        return (torch.cat([text, text]) if index == 5 else text), label


class LastOutput(nn.Module):
    """Takes what a recurrent layer gives at the end, which is that of the padding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0][:, -1])


def last_output(model, batch):
    return F.cross_entropy(model(batch["tokens"]), batch["label"], reduction="sum"), len(batch["label"])


class NormalisedPadding(nn.Module):
    """Leaves the padding out, but for the statistics of its BatchNorm."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens, lengths):
        hidden = self.norm(self.embedding(tokens).transpose(1, 2)).relu().transpose(1, 2)
        is_real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        return self.head((hidden * is_real[..., None]).sum(1) / lengths[:, None])


def of_the_real(model, batch):
    logits = model(batch["tokens"], batch["lengths"])
    return F.cross_entropy(logits, batch["label"], reduction="sum"), len(logits)


def next_tokens(model, batch):
    logits = model(batch["x"])
    total = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (batch["y"] != IGNORED).sum()


# ---- Recurrent


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = kind(WIDTH, WIDTH, batch_first=True, **options)
        self.head = nn.Linear(WIDTH * (2 if options.get("bidirectional") else 1), VOCABULARY)

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0])


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PADDING)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][-1])


def packed_classes(model, batch):
    logits = model(batch["tokens"], batch["lengths"])
    return F.cross_entropy(logits, batch["label"], reduction="sum"), len(logits)


class Cells(nn.Module):
    """A loop over time in Python."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        state, out = x.new_zeros(len(x), WIDTH), []
        for time in range(x.shape[1]):
            state = self.cell(x[:, time], state)
            out.append(self.head(state))
        return torch.stack(out, 1)


# ---- Transformers


class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self, attention_dropout, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(attention_dropout)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, tied=True, attention_dropout=0.0, dropout=0.0, depth=2):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(attention_dropout, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.places(place))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TorchEncoder(nn.Module):
    """nn.TransformerEncoder as it comes, with its dropout of 0.1."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens, mask):
        x = self.encoder(self.embedding(tokens) * math.sqrt(WIDTH), src_key_padding_mask=mask)
        real = (~mask)[..., None]
        return self.head((x * real).sum(1) / real.sum(1))


def encoder_classes(model, batch):
    logits = model(batch["input_ids"], batch["attention_mask"] == 0)
    return F.cross_entropy(logits, batch["label"], reduction="sum"), len(logits)


class Translator(nn.Module):
    """nn.Transformer, encoder and decoder."""

    def __init__(self, dropout):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 1, 1, 2 * WIDTH, dropout, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.transformer(self.source(source), self.target(target), tgt_mask=mask))


def translation(model, batch):
    logits = model(batch["x"].flip(1), batch["x"])
    total = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (batch["y"] != IGNORED).sum()


class ViT(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 5, WIDTH) / 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


class MaskedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, padding):
        return self.head(self.layer(self.embedding(tokens), src_key_padding_mask=padding))


def masked_lm(model, batch):
    """The loss draws which tokens are masked."""
    tokens, padding = batch["input_ids"], batch["attention_mask"] == 0
    hidden = (torch.rand(tokens.shape) < 0.4) & ~padding
    logits = model(tokens.masked_fill(hidden, MASKED), padding)
    labels = tokens.where(hidden, IGNORED)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, hidden.sum()


def ctc(model, batch):
    logits = model(batch["tokens"]).log_softmax(-1).transpose(0, 1)
    wanted = batch["label"][:, None] + torch.tensor([2, 3])
    lengths = torch.full((len(wanted),), 2)
    return F.ctc_loss(logits, wanted, batch["lengths"], lengths, reduction="sum"), len(wanted)


def preferences(model, batch):
    """DPO's loss without a reference: two texts a sample."""

    def score(tokens):
        logged = model(tokens).log_softmax(-1)[:, :-1]
        return logged.gather(-1, tokens[:, 1:, None]).sum((1, 2))

    chosen, rejected = score(torch.cat([batch["x"], batch["x"].flip(1)])).chunk(2)
    return -F.logsigmoid(0.3 * (chosen - rejected)).sum(), len(chosen)


# ---- Hugging Face


def hugging_face(kind, config, **options):
    transformers = importlib.import_module("transformers")
    return getattr(transformers, kind)(getattr(transformers, config)(vocab_size=VOCABULARY, **options))


SMALL = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS}
gpt2 = partial(hugging_face, "GPT2LMHeadModel", "GPT2Config", n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=LENGTH)
llama = partial(hugging_face, "LlamaForCausalLM", "LlamaConfig", num_key_value_heads=1, **SMALL)
bert = partial(
    hugging_face, "BertForSequenceClassification", "BertConfig", num_labels=CLASSES, max_position_embeddings=16, **SMALL
)


def causal(model, batch):
    out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    logits, labels = out.logits[:, :-1], batch["labels"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


masked_bert = partial(
    hugging_face,
    "BertForMaskedLM",
    "BertConfig",
    max_position_embeddings=LENGTH,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    **SMALL,
)
mixtral = partial(
    hugging_face, "MixtralForCausalLM", "MixtralConfig", num_key_value_heads=1, num_local_experts=4, **SMALL
)


def bert_tokens(model, batch):
    out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    total = F.cross_entropy(out.logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (batch["labels"] != IGNORED).sum()


def bert_classes(model, batch):
    out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return F.cross_entropy(out.logits, batch["label"], reduction="sum"), len(batch["label"])


TEXTS: dict[str, Any] = {"layouts": LAYOUTS}

CASES: tuple[Case, ...] = (
    Case("lstm", partial(Recurrent, nn.LSTM), next_tokens, texts(), with_rate(1.0)),
    Case(
        "lstm-dropout",
        partial(Recurrent, nn.LSTM, num_layers=2, dropout=0.3),
        next_tokens,
        texts(),
        adamw,
        draws="sample",
    ),
    Case("bidirectional", partial(Recurrent, nn.GRU, bidirectional=True), next_tokens, texts(), adamw),
    Case("gru-packed", Packed, packed_classes, Unpadded(), adamw, collate=pad, refused=READS),
    Case("gru-cells", Cells, next_tokens, texts(), with_rate(1.0), refused={"pp=2": "at most 1"}),
    Case("last-output", LastOutput, last_output, Unpadded(), adamw, collate=pad, refused=COUPLED),
    Case("last-output-rarely", LastOutput, last_output, OneLonger(), adamw, collate=pad, refused=COUPLED),
    Case("normalised-padding", NormalisedPadding, of_the_real, Unpadded(), adamw, collate=pad, refused=COUPLED),
    Case("ctc", partial(Recurrent, nn.LSTM), ctc, Unpadded(), adamw, collate=pad),
    Case("gpt-tied", GPT, next_tokens, texts(), adamw, **TEXTS),
    Case("gpt-untied-clip", partial(GPT, tied=False), next_tokens, texts(), adamw, clip=0.5, **TEXTS),
    Case("gpt-dropout", partial(GPT, dropout=0.1), next_tokens, texts(), adamw, draws="sample", **TEXTS),
    Case(
        "attention-dropout", partial(GPT, attention_dropout=0.2), next_tokens, texts(), adamw, draws="sample", **TEXTS
    ),
    Case("torch-encoder", TorchEncoder, encoder_classes, padded(), adamw, draws="sample"),
    Case("encoder-decoder", partial(Translator, 0.0), translation, texts(), adamw),
    Case("encoder-decoder-dropout", partial(Translator, 0.1), translation, texts(), adamw, draws="sample"),
    Case("vit", ViT, picture_classes, pictures(), adamw),
    Case("vit-dropout", partial(ViT, 0.1), picture_classes, pictures(), adamw, draws="sample"),
    Case("masked-lm", MaskedLM, masked_lm, padded(), adamw, draws="sample"),
    Case("preferences", GPT, preferences, texts(), with_rate(0.05)),
)
if importlib.util.find_spec("transformers"):
    CASES += (
        Case("hf-gpt2", gpt2, causal, padded(), adamw, draws="sample", **TEXTS),
        Case("hf-llama", llama, causal, padded(), adamw, **TEXTS),
        Case("hf-bert-masked-lm", masked_bert, bert_tokens, padded(), adamw),
        Case("hf-mixtral", mixtral, causal, padded(), adamw),
        Case("hf-bert", bert, bert_classes, padded(), adamw, draws="sample"),
    )
