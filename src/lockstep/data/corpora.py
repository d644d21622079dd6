"""What the recipes train on: embedded corpora that need no download, and token files of any size.

Every data set here is map-style, and a sample is a dictionary of tensors `{"x": input, "y": target}`.
"""

from __future__ import annotations

import gzip
import io
import lzma
import os
import re
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.errors import UserError

Tokens = npt.NDArray[np.integer[Any]]
Bytes = npt.NDArray[np.uint8]

IGNORED = -100
"""The target that counts for nothing: what torch's cross-entropy passes over."""

_SPEECH_HEADING = re.compile(rb"^= (\d{4}) .* =$", re.MULTILINE)
_NPY_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True)
class TextSplits:
    """A text as bytes, in three parts that share nothing."""

    train: Bytes
    validation: Bytes
    test: Bytes


def state_of_the_union() -> TextSplits:
    """The State of the Union addresses, 1790 to 2021 (10.8 MB), split by the year of the speech."""
    text = lzma.decompress(_embedded("sotu.txt.xz"))
    headings = list(_SPEECH_HEADING.finditer(text))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    parts: dict[str, list[bytes]] = {"train": [], "validation": [], "test": []}
    for heading, end in zip(headings, ends, strict=True):
        # Whole speeches of three and thirteen years into every score: both held-out parts span all the eras.
        part = {3: "validation", 13: "test"}.get(int(heading[1]) % 20, "train")
        parts[part].append(text[heading.start() : end])
    return TextSplits(**{name: np.frombuffer(b"".join(speeches), np.uint8) for name, speeches in parts.items()})


class TokenDataset(Dataset[dict[str, Tensor]]):
    """Token ids cut into samples of `context` tokens, each token but the first predicted exactly once.

    Sample i is `{"x": int64[context], "y": int64[context]}`, where `y` is `x` one token later. The last
    tokens, which do not fill a sample, are left out, or with `pad_last` make one that is filled up with targets of
    -100 (IGNORED): then every token counts, however long the context.
    """

    def __init__(self, tokens: Tokens, context: int, pad_last: bool = False) -> None:
        _check_tokens(tokens, context, "the token array", least=2 if pad_last else context + 1)
        self.tokens = tokens
        self.context = context
        self.pad_last = pad_last
        self._file: tuple[str, np.dtype[Any] | None, int, int | None] | None = None

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        context: int,
        dtype: npt.DTypeLike | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> TokenDataset:
        """Tokens `start` to `stop` of a file, mapped into memory: a file larger than the memory is fine.

        The file is what `write_tokens` wrote (.npy), or raw ids of type `dtype` one after another.
        """
        file = (os.path.abspath(path), None if dtype is None else np.dtype(dtype), start, stop)
        tokens = _map_tokens(*file)
        _check_tokens(tokens, context, os.fspath(path), least=context + 1)
        dataset = cls(tokens, context)
        dataset._file = file
        return dataset

    def __len__(self) -> int:
        targets = len(self.tokens) - 1
        return -(-targets // self.context) if self.pad_last else targets // self.context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = range(len(self))[index] * self.context
        window = torch.from_numpy(self.tokens[start : start + self.context + 1].astype(np.int64))
        missing = self.context + 1 - len(window)
        return {"x": F.pad(window[:-1], (0, missing)), "y": F.pad(window[1:], (0, missing), value=IGNORED)}

    def __getstate__(self) -> dict[str, Any]:
        # numpy pickles a memory map as a copy of all it maps; a loader's worker maps the file anew.
        return self.__dict__ if self._file is None else self.__dict__ | {"tokens": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._file is not None:
            self.tokens = _map_tokens(*self._file)


def write_tokens(path: str | os.PathLike[str], tokens: npt.ArrayLike) -> None:
    """Write token ids as an .npy file for `TokenDataset.from_file`, in the smallest type that holds them.

    The file appears whole or not at all; one that was there before is replaced.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0:
        raise UserError(
            f"token ids of type {ids.dtype} and shape {ids.shape} cannot be written to {os.fspath(path)}",
            "pass one flat, non-empty sequence of integers, none below zero",
        )
    target = Path(path)
    with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=f".{target.name}.") as staging:
        staged = Path(staging) / "tokens.npy"
        smallest = np.min_scalar_type(ids.max())
        mapped = np.lib.format.open_memmap(staged, mode="w+", dtype=smallest, shape=ids.shape)
        mapped[:] = ids
        mapped.flush()
        os.replace(staged, target)


class PairDataset(Dataset[dict[str, Tensor]]):
    """Samples held in memory: sample i is `{"x": x[i], "y": y[i]}`."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        if len(x) != len(y):
            raise UserError(f"{len(x)} inputs and {len(y)} targets do not pair up", "pass one target for each input")
        self.x = x
        self.y = y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


@dataclass(frozen=True)
class DigitSplits:
    """Handwritten digits: `x` is float32[64] from 0 to 1, `y` the digit."""

    train: PairDataset
    validation: PairDataset


def digits() -> DigitSplits:
    """1,797 handwritten digits of 8 x 8 pixels; every fifth one is held out for validation."""
    table = np.loadtxt(io.BytesIO(gzip.decompress(_embedded("digits.csv.gz"))), delimiter=",", dtype=np.int64)
    images = torch.from_numpy(table[:, :64]).float() / 16
    labels = torch.from_numpy(table[:, 64])
    held_out = torch.arange(len(labels)) % 5 == 4
    return DigitSplits(
        train=PairDataset(images[~held_out], labels[~held_out]),
        validation=PairDataset(images[held_out], labels[held_out]),
    )


def bigram_loss(train: Tokens, validation: Tokens, vocabulary: int = 256) -> float:
    """Nats per token of `validation`, guessed from the one before it by pair counts of `train`, plus one."""
    counts = _pair_counts(train, vocabulary) + 1.0
    log_probabilities = np.log(counts / counts.sum(axis=1, keepdims=True))
    seen = _pair_counts(validation, vocabulary)
    return float(-(seen * log_probabilities).sum() / seen.sum())


def _pair_counts(tokens: Tokens, vocabulary: int) -> npt.NDArray[np.float64]:
    counts = np.zeros(vocabulary * vocabulary, np.int64)
    piece = 1 << 22  # a mapped file is never widened to int64 as a whole
    for start in range(0, len(tokens) - 1, piece):
        window = tokens[start : start + piece + 1].astype(np.int64)
        counts += np.bincount(window[:-1] * vocabulary + window[1:], minlength=len(counts))
    return counts.reshape(vocabulary, vocabulary).astype(np.float64)


def _embedded(name: str) -> bytes:
    return resources.files("lockstep.data").joinpath("embedded", name).read_bytes()


def _map_tokens(path: str, dtype: np.dtype[Any] | None, start: int, stop: int | None) -> Tokens:
    try:
        with open(path, "rb") as file:
            is_npy = file.read(len(_NPY_MAGIC)) == _NPY_MAGIC
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(
            f"the file {path} cannot be read ({error.strerror})", "check the path and its permissions"
        ) from error
    if size == 0:
        raise UserError(f"the file {path} is empty", "name one that holds a text or tokens")
    if is_npy:
        return _map_npy(path, dtype)[start:stop]
    if dtype is None:
        raise UserError(
            f"{path} is no .npy file, so it does not say what its tokens are",
            "pass dtype, such as 'uint16', or write the file with lockstep's write_tokens",
        )
    if size % dtype.itemsize:
        raise UserError(
            f"{path} has {size} bytes, which is no whole number of {dtype} tokens", "pass the dtype it was written with"
        )
    return np.memmap(path, dtype, mode="r")[start:stop]


def _map_npy(path: str, dtype: np.dtype[Any] | None) -> Tokens:
    try:
        tokens: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"{path} is no sound .npy file ({error})", "write it again") from error
    if dtype not in (None, tokens.dtype):
        raise UserError(f"{path} holds {tokens.dtype} tokens, not {dtype}", "pass the dtype it holds, or none")
    return tokens


def _check_tokens(tokens: Tokens, context: int, name: str, least: int) -> None:
    if context < 1:
        raise UserError(f"a context of {context} tokens holds nothing", "choose a context of at least 1")
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(
            f"{name} holds {tokens.dtype} values of shape {tokens.shape}, not token ids",
            "pass one flat sequence of integers",
        )
    if len(tokens) < least:
        raise UserError(
            f"{name} holds {len(tokens)} tokens, too few for one sample of context {context}",
            f"name a longer text of at least {least} tokens, or choose a smaller context",
        )
