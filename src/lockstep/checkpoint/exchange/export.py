"""Checkpoints as files that other programs read: one tensor in memory at a time, without GPUs or process groups."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.serialization import skip_data

from lockstep.checkpoint.disk.files import DTYPES, Entry, ShardReader, aligned, bytes_of, header_of, reading, write_all
from lockstep.checkpoint.disk.format import StoredTensor, Whole
from lockstep.checkpoint.disk.load import read_whole
from lockstep.checkpoint.state import slot_of
from lockstep.errors import UserError
from lockstep.runtime.torch_private import FakeTensorMode, checkpoint_offset
from lockstep.text.units import bytes_text

TORCH_FILES = (".pt", ".pth", ".bin")
SAFETENSORS = ".safetensors"
HF_INDEX = "model.safetensors.index.json"


def export(checkpoint: Whole, target: Path, *, optimizer: bool = False, shard_bytes: int = 5_000_000_000) -> list[Path]:
    """Write a checkpoint's model to `target`, which says by its name as what; returns the files.

    NAME.safetensors and NAME.pt are one file with the keys of the model's state_dict; a folder gets shards of at most
    `shard_bytes` and an index, as Hugging Face's library has them. With `optimizer` a .pt has both, as
    {"model": ..., "optimizer": ...}, and both load on one device with load_state_dict. Nothing is there before it is
    complete.
    """
    check_target(target, optimizer)
    if optimizer and checkpoint.index.optimizer is None:
        raise UserError(f"{checkpoint.folder} has no optimizer", "leave --optimizer out")
    tensors = checkpoint.index.tensors.items()
    size = sum(tensor.bytes for name, tensor in tensors if optimizer or name.startswith("model/"))
    free = shutil.disk_usage(target.parent).free
    if free < size:
        short = f"{bytes_text(size)} and {bytes_text(free)} are free, {bytes_text(size - free)} too little"
        raise UserError(f"the export has {short}", "free some space")
    with reading(checkpoint) as reader, _complete(target) as staged:
        if target.suffix in TORCH_FILES:
            _write_torch(checkpoint, reader, staged, optimizer)
        elif target.suffix == SAFETENSORS:
            _write_safetensors(checkpoint, reader, staged, list(checkpoint.index.state_dict))
        else:
            staged.mkdir()
            _write_shards(checkpoint, reader, staged, shard_bytes)
    return sorted(target.iterdir()) if target.is_dir() else [target]


def check_target(target: Path, optimizer: bool) -> None:
    """Refuse a target that cannot be written, or not as what its name says."""
    if target.exists():
        raise UserError(f"{target} exists already", "give another name, or remove it first")
    if not target.parent.is_dir():
        raise UserError(f"the folder {target.parent} does not exist", "create it, or give another place")
    if optimizer and target.suffix not in TORCH_FILES:
        raise UserError("an optimizer's state can only be exported to a .pt file", f"use {target.stem}.pt")
    known = target.suffix in (*TORCH_FILES, SAFETENSORS)
    if not known and re.fullmatch(r"\.[a-z][a-z0-9]*", target.suffix):  # any other suffix is part of a folder's name
        raise UserError(f"cannot export to {target.name}", "use NAME.safetensors, NAME.pt, or a folder")


@contextmanager
def _complete(target: Path) -> Iterator[Path]:
    """A place beside the target to write to; renamed to it when all went well, else removed."""
    staged = target.with_name(f".{target.name}.{os.getpid()}.writing")
    try:
        yield staged
        staged.rename(target)
    finally:
        if staged.is_dir():
            shutil.rmtree(staged, ignore_errors=True)
        else:
            staged.unlink(missing_ok=True)


def _stored(checkpoint: Whole, key: str) -> StoredTensor:
    return checkpoint.index.tensors[f"model/{checkpoint.index.state_dict[key]}"]


def _write_safetensors(checkpoint: Whole, reader: ShardReader, path: Path, keys: list[str]) -> None:
    tensors = {key: _stored(checkpoint, key) for key in keys}
    entries = aligned(Entry(key, stored.dtype, tuple(stored.shape)) for key, stored in tensors.items())
    with path.open("xb", buffering=0) as file:
        write_all(file.fileno(), header_of(entries, {"format": "pt"}))
        for entry in entries:
            write_all(file.fileno(), bytes_of(read_whole(reader, tensors[entry.name])))
        os.fsync(file.fileno())


def _write_shards(checkpoint: Whole, reader: ShardReader, folder: Path, shard_bytes: int) -> None:
    shards: list[list[str]] = [[]]
    filled = total = 0
    for key in checkpoint.index.state_dict:
        size = _stored(checkpoint, key).bytes
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += size
        total += size
    names: dict[str, str] = {}
    for number, keys in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_safetensors(checkpoint, reader, folder / name, keys)
        names |= dict.fromkeys(keys, name)
    about = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / HF_INDEX).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _write_torch(checkpoint: Whole, reader: ShardReader, path: Path, optimizer: bool) -> None:
    """A file for torch.load: first without the tensors' bytes, which torch leaves room for, then these one by one."""
    index = checkpoint.index

    def without_data(name: str) -> torch.Tensor:
        stored = index.tensors[name]
        return torch.empty(stored.shape, dtype=DTYPES[stored.dtype])

    with FakeTensorMode():
        by_name = {name: without_data(f"model/{name}") for name in dict.fromkeys(index.state_dict.values())}
        content: dict[str, Any] = {key: by_name[name] for key, name in index.state_dict.items()}
        if optimizer:
            content = {"model": content, "optimizer": _optimizer_state_dict(checkpoint, without_data)}
    with skip_data(materialize_fake_tensors=True):
        torch.save(content, path)
    with FakeTensorMode():
        places = torch.load(path, weights_only=True)
    offsets: dict[str, int] = {}
    for name, tensor in _named(places, checkpoint, optimizer):
        offsets[name] = checkpoint_offset(tensor.untyped_storage())
    sums = {}
    with path.open("r+b", buffering=0) as file:
        for name, offset in offsets.items():
            content_bytes = bytes_of(read_whole(reader, index.tensors[name]))
            file.seek(offset)
            write_all(file.fileno(), content_bytes)
            sums[offset] = zlib.crc32(content_bytes)
        os.fsync(file.fileno())
    _set_checksums(path, sums)


def _optimizer_state_dict(checkpoint: Whole, tensor_of: Callable[[str], Any]) -> dict[str, Any]:
    """The optimizer as its own state_dict() would be on one device: parameters by their number."""
    optimizer = checkpoint.index.optimizer
    assert optimizer is not None
    numbers = {name: number for number, name in enumerate(name for g in optimizer.groups for name in g.parameters)}
    state: dict[int, dict[str, Any]] = {}
    for key in checkpoint.index.tensors:
        name, slot = slot_of(key)
        if name:
            state.setdefault(numbers[name], {})[slot] = tensor_of(key)
    for name, values in optimizer.values.items():
        state.setdefault(numbers[name], {}).update(values)
    groups = [{**group.options, "params": [numbers[name] for name in group.parameters]} for group in optimizer.groups]
    for group in groups:
        if "betas" in group:
            group["betas"] = tuple(group["betas"])
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _named(places: dict[str, Any], checkpoint: Whole, optimizer: bool) -> Iterator[tuple[str, torch.Tensor]]:
    model = places["model"] if optimizer else places
    for key, name in checkpoint.index.state_dict.items():
        if checkpoint.index.tensors[f"model/{name}"].bytes:
            yield f"model/{name}", model[key]
    if optimizer:
        state = places["optimizer"]["state"]
        expected = _optimizer_state_dict(checkpoint, lambda key: key)["state"]
        for number, slots in expected.items():
            for slot, key in slots.items():
                if isinstance(key, str) and key in checkpoint.index.tensors:
                    yield key, state[number][slot]


def _set_checksums(path: Path, sums: dict[int, int]) -> None:
    """Give the records of a zip file the checksums of what was written into them later, so that any unzip takes it."""
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        directory = archive.start_dir
    with path.open("r+b") as file:
        file.seek(directory)
        at = directory
        for record in records:
            file.seek(record.header_offset)
            local = file.read(30)
            name_length, extra_length = struct.unpack("<HH", local[26:30])
            data = record.header_offset + 30 + name_length + extra_length
            file.seek(at)
            central = file.read(46)
            lengths = struct.unpack("<HHH", central[28:34])
            if data in sums:
                checksum = struct.pack("<I", sums[data])
                file.seek(at + 16)
                file.write(checksum)
                file.seek(record.header_offset + 14)
                file.write(checksum)
                if record.flag_bits & 8:  # they stand behind the data too
                    file.seek(data + record.file_size)
                    signature = file.read(4)
                    file.seek(data + record.file_size + 4 * (signature == b"PK\x07\x08"))
                    file.write(checksum)
            at += 46 + sum(lengths)
