"""Safetensors files, written piece by piece with a digest of every block, and read with the digests checked.

The safetensors library wants all tensors of a file at once and knows no digests; its format is a length, a JSON header
and the bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from lockstep import __version__
from lockstep.checkpoint.disk import format as fmt
from lockstep.checkpoint.disk.format import BLOCK_BYTES, ITEM_BYTES, Chunk, DamageError, StoredFile, size_of
from lockstep.errors import UserError, reason

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "BOOL": torch.bool}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
DTYPES |= {"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_THREADS = 4
PIECE_BYTES = 16 * BLOCK_BYTES
"""How much of a chunk is in memory at once when it does not fit its place as it is."""


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """The name of a number format in safetensors files."""
    if dtype not in NAMES:
        kind = str(dtype).removeprefix("torch.")
        raise UserError(f"{name} is {kind}, which checkpoints cannot hold", "store it in another number format")
    return NAMES[dtype]


def check_dtypes(named: Iterable[tuple[str, torch.dtype]]) -> None:
    """Refuse number formats that checkpoints cannot hold."""
    for name, dtype in named:
        dtype_name(name, dtype)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in the memory of the host; its own memory where it is stored row by row."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def versions() -> dict[str, str]:
    """What an index says of the programs that wrote it."""
    return {"lockstep": __version__, "torch": torch.__version__, "python": platform.python_version()}


class Entry(NamedTuple):
    """What a safetensors header says of one tensor."""

    name: str
    dtype: str
    shape: Sequence[int]

    @property
    def bytes(self) -> int:
        """The size of the tensor."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def header_of(entries: Iterable[Entry], about: dict[str, str] | None = None) -> bytes:
    """The first bytes of a safetensors file; the tensors follow in this order without gaps."""
    header: dict[str, object] = {"__metadata__": about} if about else {}
    at = 0
    for entry in entries:
        end = at + entry.bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def aligned(entries: Iterable[Entry]) -> list[Entry]:
    """In an order in which every tensor begins at a multiple of its item's size."""
    return sorted(entries, key=lambda entry: -ITEM_BYTES[entry.dtype])


def write_shard(
    path: Path, entries: Sequence[Entry], tensors: Iterable[torch.Tensor]
) -> tuple[StoredFile, list[Chunk]]:
    """Write a file of tensors, given one at a time in the order of its entries; returns what the index says of it.

    The chunks come without the places of their boxes. What is written is on the disk when this returns.
    """
    header = header_of(entries)
    chunks = []
    with path.open("xb", buffering=0) as file, ThreadPoolExecutor(1) as beside:
        write_all(file.fileno(), header)
        at = len(header)
        for entry, tensor in zip(entries, tensors, strict=True):
            content = bytes_of(tensor)
            assert len(content) == entry.bytes
            blocks = [content[begin : begin + BLOCK_BYTES] for begin in range(0, len(content), BLOCK_BYTES)]
            digests = [_digest_beside(beside, block) for block in blocks]
            for block in blocks:
                write_all(file.fileno(), block)
            found = [digest() for digest in digests]
            chunks.append(Chunk(file=path.name, offset=at, start=[], shape=list(entry.shape), sha256=found))
            at += len(content)
        os.fsync(file.fileno())
    digest = hashlib.sha256(header).hexdigest()
    return StoredFile(bytes=at, header_bytes=len(header), header_sha256=digest), chunks


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write all of it."""
    left = memoryview(content)
    while left:  # one call writes 2 GiB at most
        left = left[os.write(descriptor, left) :]


class ShardReader:
    """The files of one checkpoint, opened as they are needed. Whatever is read is checked."""

    def __init__(self, folder: Path, files: dict[str, StoredFile], block_bytes: int = BLOCK_BYTES) -> None:
        self._folder = folder
        self._files = files
        self._block = block_bytes
        self._open: dict[str, int] = {}
        self._beside = ThreadPoolExecutor(min(MOST_THREADS, torch.get_num_threads()))

    def close(self) -> None:
        """Close all files."""
        self._beside.shutdown()
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read_chunk(self, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        """All of a chunk."""
        whole = torch.empty(chunk.shape, dtype=dtype)
        self.read_into(whole, chunk)
        return whole

    def read_into(self, target: torch.Tensor, chunk: Chunk) -> None:
        """All of a chunk, into a tensor of its shape in the memory of the host, which is stored row by row."""
        self._read(chunk, 0, target.view(-1).view(torch.uint8).numpy().data)

    def rows(self, chunk: Chunk, dtype: torch.dtype, first: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Some rows of a chunk, a few at a time, each with the number of its first row."""
        row = prod(chunk.shape[1:]) * dtype.itemsize
        step = max(1, PIECE_BYTES // row)
        for begin in range(first, end, step):
            stop = min(end, begin + step)
            # Digests are of whole blocks: a little more is read on both sides.
            low = begin * row // self._block * self._block
            high = min(-(-stop * row // self._block) * self._block, chunk.shape[0] * row)
            content = torch.empty(high - low, dtype=torch.uint8)
            self._read(chunk, low, content.numpy().data)
            wanted = content[begin * row - low : stop * row - low]
            if wanted.storage_offset() % dtype.itemsize:  # numbers have to begin at a multiple of their size
                wanted = wanted.clone()
            yield begin, wanted.view(dtype).view(stop - begin, *chunk.shape[1:])

    def check(self, chunk: Chunk, size: int) -> None:
        """Read a chunk of so many bytes for its digests alone."""
        buffer = memoryview(bytearray(min(size, self._block)))
        for at in range(0, size, self._block):
            self._read(chunk, at, buffer[: min(self._block, size - at)])

    def check_header(self, name: str) -> None:
        """Check the part of a file that is not in any chunk, and that it has the right size."""
        file = self._files[name]
        if (size := size_of(self._folder / name)) != file.bytes:
            raise DamageError(f"{name} has {size} bytes instead of {file.bytes}")
        header = bytearray(file.header_bytes)
        self._fill(name, 0, memoryview(header))
        if hashlib.sha256(header).hexdigest() != file.header_sha256:
            raise DamageError(f"{name} has changed since it was written (its header)")

    def _read(self, chunk: Chunk, at: int, content: memoryview) -> None:
        """Read from a multiple of the block's size on, and check every block."""
        digests = []
        for begin in range(0, len(content), self._block):  # the next is read while this one is digested
            block = content[begin : begin + self._block]
            self._fill(chunk.file, chunk.offset + at + begin, block)
            digests.append(_digest_beside(self._beside, block))
        for number, digest in enumerate(digests, start=at // self._block):
            if digest() != chunk.sha256[number]:
                place = chunk.offset + number * self._block
                raise DamageError(f"{chunk.file} has changed since it was written (in the block at byte {place})")

    def _fill(self, name: str, at: int, content: memoryview) -> None:
        if name not in self._open:
            size_of(self._folder / name)  # refuses links
            try:
                self._open[name] = os.open(self._folder / name, os.O_RDONLY)
            except OSError as error:
                raise DamageError(f"{name} cannot be read ({reason(error)})") from None
        try:
            while content:
                count = os.preadv(self._open[name], [content], at)
                if count == 0:
                    raise DamageError(f"{name} is cut short")
                at, content = at + count, content[count:]
        except OSError as error:
            raise DamageError(f"{name} cannot be read ({reason(error)})") from None


@contextmanager
def reading(checkpoint: fmt.Whole) -> Iterator[ShardReader]:
    """Read from the files of a checkpoint."""
    reader = ShardReader(checkpoint.folder, checkpoint.index.files, checkpoint.index.block_bytes)
    try:
        yield reader
    finally:
        reader.close()


def verify_checkpoint(folder: Path) -> int:
    """Read every byte of a checkpoint and check it; returns how many they are, damage is raised."""
    checkpoint = fmt.open_checkpoint(folder)
    index = checkpoint.index
    with reading(checkpoint) as reader:
        for name in index.files:
            reader.check_header(name)
        for tensor in index.tensors.values():
            for chunk in tensor.chunks:
                reader.check(chunk, prod(chunk.shape) * ITEM_BYTES[tensor.dtype])
    return index.bytes


def _digest_beside(pool: ThreadPoolExecutor, block: memoryview) -> Callable[[], str]:
    """Begin to digest a block; what comes back waits for the digest."""

    def digest() -> str:
        return hashlib.sha256(block).hexdigest()

    try:
        return pool.submit(digest).result
    except RuntimeError:  # a script has ended while this is written, and Python starts nothing new any more
        return digest
