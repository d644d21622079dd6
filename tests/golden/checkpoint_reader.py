"""Read a Lockstep checkpoint with nothing but the standard library and numpy; every digest is checked."""

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

# BF16 and the F8 types have no numpy type: their bits are returned as unsigned integers
FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1", "C64": "<c8"}
SIGNED = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"}
DTYPES = FLOATS | SIGNED | {"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?"}


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the index and all whole tensors by name; ValueError when anything is wrong with the checkpoint."""
    index = read_index(folder / "index.json")
    try:
        for name, entry in index["files"].items():
            check_file(folder, name, entry)
        return index, {name: read_tensor(folder, index, name) for name in index["tensors"]}
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{folder}: the index is not as the format says: {error!r}") from error
    except OSError as error:
        raise ValueError(f"{folder}: cannot be read: {error}") from error


def read_index(path: Path) -> dict[str, Any]:
    """Check the digest of the index and return its inner object."""
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path}: missing, or not a plain file")
    parts = re.fullmatch(rb'\{"sha256":"([0-9a-f]{64})","index":(.*)\}\n', path.read_bytes(), re.DOTALL)
    if parts is None:
        raise ValueError(f"{path}: not the index of a checkpoint")
    check_digest(parts[2], parts[1].decode(), str(path))
    index = json.loads(parts[2])
    if not isinstance(index, dict) or index.get("format") != 2:
        raise ValueError(f"{path}: only format 2 can be read")
    return index


def check_digest(data: bytes, expected: str, what: str) -> None:
    if hashlib.sha256(data).hexdigest() != expected:
        raise ValueError(f"{what}: the digest is wrong")


def check_file(folder: Path, name: str, entry: dict[str, Any]) -> None:
    """Check the name, kind, size and header of a shard."""
    if not re.fullmatch(r"shard-[0-9]{5,}\.safetensors", name):
        raise ValueError(f"{folder}: {name!r} is not the name of a shard")
    path = folder / name
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path}: missing, or not a plain file")
    size, header = path.stat().st_size, entry["header_bytes"]
    if size != entry["bytes"] or not 8 <= header <= size:
        raise ValueError(f"{path}: {size} bytes; the index says {entry['bytes']}, of which {header} are the header")
    with path.open("rb") as file:
        check_digest(file.read(header), entry["header_sha256"], f"{path}: header")


def read_tensor(folder: Path, index: dict[str, Any], name: str) -> Array:
    """Put a tensor together from its chunks, which have to fill it without overlap."""
    dtype, shape, chunks = (index["tensors"][name][key] for key in ("dtype", "shape", "chunks"))
    if sum(math.prod(chunk["shape"]) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"{folder}: the chunks of {name} have not as many items as the tensor")
    whole, filled = np.empty(shape, DTYPES[dtype]), np.zeros(shape, bool)
    for chunk in chunks:
        what = f"{name} at {chunk['start']}"
        box = tuple(slice(start, start + size) for start, size in zip(chunk["start"], chunk["shape"], strict=False))
        at_place = len(chunk["start"]) == len(shape) and min(chunk["start"], default=0) >= 0
        if not at_place or whole[box].shape != tuple(chunk["shape"]):
            raise ValueError(f"{folder}: {what} is not a box inside of the tensor")
        entry = index["files"][chunk["file"]]  # a KeyError for any name that check_file has not seen
        size = math.prod(chunk["shape"]) * whole.itemsize
        if chunk["offset"] < entry["header_bytes"] or chunk["offset"] + size > entry["bytes"]:
            raise ValueError(f"{folder}: {what} is outside of {chunk['file']}")
        with (folder / chunk["file"]).open("rb") as file:
            file.seek(chunk["offset"])
            data = read_blocks(file, size, index["block_bytes"], chunk["sha256"], f"{folder / chunk['file']}: {what}")
        whole[box], filled[box] = np.frombuffer(data, whole.dtype).reshape(chunk["shape"]), True
    if not filled.all():
        raise ValueError(f"{folder}: the chunks of {name} overlap")
    return whole


def read_blocks(file: BinaryIO, size: int, block_bytes: int, digests: list[str], what: str) -> bytearray:
    """Read the bytes of a chunk and check the digest of each block."""
    if len(digests) != -(-size // block_bytes):
        raise ValueError(f"{what}: {len(digests)} digests for {size} bytes")
    data = bytearray()
    for number, expected in enumerate(digests):
        block = file.read(min(block_bytes, size - len(data)))
        check_digest(block, expected, f"{what}, block {number}")
        data += block
    return data
