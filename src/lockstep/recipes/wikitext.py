"""`wikitext2`: a language model of words on plain `nn.TransformerEncoder`. It is written for one device."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config.catalog import Wikitext2Settings
from lockstep.data.corpora import IGNORED, TokenDataset
from lockstep.data.words import Ids, read_words, unigram_loss
from lockstep.recipes.task import Task, data_folder

INITIAL_RANGE = 0.1
LONGEST_WAVE = 10_000.0  # of the positional encoding, in words over 2 pi; the shortest is 1


class WordModel(nn.Module):
    """Words [batch, time] to logits of the next word [batch, time, vocabulary]."""

    positions: Tensor

    def __init__(self, settings: Wikitext2Settings, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, settings.width)
        self.dropout = nn.Dropout(settings.dropout)
        layer = nn.TransformerEncoderLayer(
            settings.width, settings.heads, settings.hidden, settings.dropout, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, settings.layers, enable_nested_tensor=False)
        self.head = nn.Linear(settings.width, vocabulary, bias=False)
        self.register_buffer("positions", positional_encoding(settings.context, settings.width), persistent=False)
        nn.init.uniform_(self.embed.weight, -INITIAL_RANGE, INITIAL_RANGE)
        self.head.weight = self.embed.weight
        for weight in self.encoder.parameters():
            if weight.dim() > 1:
                # TransformerEncoder copies its layer, weights and all: without this they would all start equal.
                nn.init.xavier_uniform_(weight)

    def forward(self, words: Tensor) -> Tensor:
        time = words.shape[1]
        x = self.embed(words) * math.sqrt(self.embed.embedding_dim) + self.positions[:time]
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=words.device)
        logits: Tensor = self.head(self.encoder(self.dropout(x), mask=mask, is_causal=True))
        return logits


def positional_encoding(context: int, width: int) -> Tensor:
    """Sines and cosines of many wavelengths [context, width] (Vaswani et al. 2017)."""
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(LONGEST_WAVE) / width))
    angle = torch.arange(context)[:, None] * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats, summed over the predicted words, and how many they are."""
    logits, targets = model(batch["x"]).flatten(0, 1), batch["y"].flatten()
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum"), (targets != IGNORED).sum()


def task(settings: Wikitext2Settings, data_path: str | None, seed: int) -> Task:  # noqa: ARG001 (recipes share a signature)
    """The next word of WikiText-2, from the cache or from the folder `data_path`."""
    words = read_words(data_folder("wikitext2", data_path))
    vocabulary = len(words.vocabulary)

    def windows(text: Ids) -> TokenDataset:
        return TokenDataset(text, settings.context, pad_last=True)

    return Task(
        build_model=lambda: WordModel(settings, vocabulary),
        loss=loss,
        train=windows(words.train),
        validation=windows(words.validation),
        test=windows(words.test),
        perplexity=True,
        tokens=lambda batch: (batch["x"].numel(), int((batch["y"] == IGNORED).sum())),
        baseline=("unigram", unigram_loss(words.train, words.validation, vocabulary)),
    )
