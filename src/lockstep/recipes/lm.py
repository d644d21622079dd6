"""`lm`: a small GPT that predicts the next byte of a text. It is written for one device, as any model is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset

from lockstep.config.catalog import LmSettings
from lockstep.data.corpora import TokenDataset, bigram_loss, state_of_the_union
from lockstep.errors import UserError
from lockstep.recipes.task import Task

VOCABULARY = 256
EMBEDDING_SCALE = 0.1
LOWEST_FREQUENCY = 0.01  # of the first positions, in radians per byte; the highest is 1
BASELINE_BYTES = 1 << 26  # more text would hardly change the pair counts, and start-up would wait for it


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        query, key, value = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, residual_scale: float) -> None:
        super().__init__()
        self.residual_scale = residual_scale
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.init_weights()

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.reset_parameters()
        with torch.no_grad():
            self.attention.out.weight.mul_(self.residual_scale)
            self.down.weight.mul_(self.residual_scale)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        change: Tensor = self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))
        return x + change


class TokenEmbedding(nn.Embedding):
    def reset_parameters(self) -> None:
        # The head shares these weights: at torch's scale of 1 its first guesses would be sure of themselves.
        nn.init.normal_(self.weight, std=EMBEDDING_SCALE)


class PositionEmbedding(nn.Embedding):
    def reset_parameters(self) -> None:
        # Waves instead of noise: attention to the byte before, which all else builds on, is found much sooner.
        position, column = torch.arange(self.num_embeddings), torch.arange(self.embedding_dim)
        frequency = LOWEST_FREQUENCY ** (column // 2 * 2 / self.embedding_dim)
        wave = torch.sin(position[:, None] * frequency + column % 2 * (torch.pi / 2))
        with torch.no_grad():
            self.weight.copy_(wave * EMBEDDING_SCALE * 2**0.5)


class GPT(nn.Module):
    """Bytes [batch, time] to logits of the next byte [batch, time, 256]."""

    def __init__(self, settings: LmSettings) -> None:
        super().__init__()
        self.tokens = TokenEmbedding(VOCABULARY, settings.width)
        self.positions = PositionEmbedding(settings.context, settings.width)
        self.dropout = nn.Dropout(settings.dropout)
        self.blocks = nn.ModuleList(
            Block(settings.width, settings.heads, settings.dropout, residual_scale=(2 * settings.layers) ** -0.5)
            for _ in range(settings.layers)
        )
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Cross-entropy in nats, summed over the predicted bytes, and how many they are."""
    logits = model(batch["x"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["y"].flatten(), reduction="sum"), batch["y"].numel()


@torch.no_grad()
def generate(model: nn.Module, context: int, prompt: bytes, length: int, temperature: float, seed: int) -> bytes:
    """`length` bytes that go on from `prompt`, drawn from the model's probabilities."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = bytearray(prompt)
    for _ in range(length):
        seen = text[-context:]
        # Padded, so that all forwards have one shape; what stands after `seen` cannot change its logits.
        tokens = torch.tensor([*seen.ljust(context, b" ")], device=device)
        logits = model(tokens.unsqueeze(0))[0, len(seen) - 1].float().cpu()
        text.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
    model.train(was_training)
    return bytes(text[len(prompt) :])


def task(settings: LmSettings, data_path: str | None, seed: int) -> Task:  # noqa: ARG001 (recipes share a signature)
    """The next byte of the State of the Union addresses, or of the text file `data_path`."""
    if data_path is None:
        corpus = state_of_the_union()
        train, validation = (TokenDataset(text, settings.context) for text in (corpus.train, corpus.validation))
    else:
        train, validation = _split_file(data_path, settings.context)

    def go_on(model: nn.Module, prompt: str, length: int, temperature: float, seed: int) -> str:
        return generate(model, settings.context, prompt.encode(), length, temperature, seed).decode(errors="replace")

    return Task(
        build_model=lambda: GPT(settings),
        loss=loss,
        train=train,
        validation=_evenly_spaced(validation, settings.validation_samples),
        tokens=lambda batch: batch["x"].numel(),
        baseline=("bigram", bigram_loss(train.tokens[:BASELINE_BYTES], validation.tokens[:BASELINE_BYTES])),
        prompt=settings.prompt,
        generate=go_on,
    )


def _split_file(path: str, context: int) -> tuple[TokenDataset, TokenDataset]:
    """The first 95 % of a file to train on, the rest to validate with."""
    size = len(TokenDataset.from_file(path, context, "uint8").tokens)
    cut = size * 95 // 100
    if size - cut <= context:
        raise UserError(
            f"{path} has {size} bytes, and its last 5 % are too few for one sample of context {context}",
            f"name a file of at least {20 * (context + 1)} bytes, or choose a smaller model.context",
        )
    return (
        TokenDataset.from_file(path, context, "uint8", stop=cut),
        TokenDataset.from_file(path, context, "uint8", start=cut),
    )


def _evenly_spaced(dataset: TokenDataset, samples: int) -> Subset[dict[str, Tensor]]:
    samples = min(samples, len(dataset))
    return Subset(dataset, [index * len(dataset) // samples for index in range(samples)])
