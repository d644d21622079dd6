"""A checkpoint on disk: a folder per step with safetensors shards and one JSON index, no pickle anywhere.

    checkpoints/step-00000120/  index.json            what is where, with size and digest of every shard
                                shard-00000.safetensors ...
    checkpoints/best.json       the step with the best validation loss

A folder of this name is always complete: it is written under another name and renamed at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from lockstep.errors import UserError

FORMAT = 1
INDEX = "index.json"
BEST = "best.json"
CHUNK = 1 << 22


def checkpoints_folder(run_folder: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_folder / "checkpoints"


def step_folder(run_folder: Path, step: int) -> Path:
    """The folder of one step."""
    return checkpoints_folder(run_folder) / f"step-{step:08d}"


def shard_name(shard: int) -> str:
    """The file of one shard; its number is that of the part of the model it holds: stages, and shards of each."""
    return f"shard-{shard:05d}.safetensors"


def steps_on_disk(run_folder: Path) -> list[int]:
    """The steps that have a folder, oldest first."""
    names = [path.name for path in checkpoints_folder(run_folder).glob("step-*") if path.is_dir()]
    return sorted(int(name.removeprefix("step-")) for name in names if name.removeprefix("step-").isdigit())


def digest_of(path: Path) -> str:
    """The BLAKE2b digest of a file."""
    digest = hashlib.blake2b(digest_size=20)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a checkpoint; one that cannot be read is a UserError."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(
            f"{folder} is not a checkpoint",
            f"it has no readable {INDEX}; give a folder such as RUN/checkpoints/step-00000100",
        ) from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise UserError(f"{folder} is a checkpoint of another format", f"this version reads format {FORMAT}")
    return index


def damage(folder: Path, index: dict[str, Any]) -> str | None:
    """What is wrong with the files of a checkpoint, by digest; None when all of it is there."""
    for name, entry in index["shards"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            return f"{name} is missing or cut short"
        if digest_of(path) != entry["digest"]:
            return f"{name} has changed since it was written"
    return None


def write_json(path: Path, value: Any) -> None:
    """Write a small file so that a crash leaves the old one or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
