"""A checkpoint on disk: a folder per step with safetensors shards and one JSON index, no pickle anywhere.

    checkpoints/step-00000120/  index.json                what is where, with a digest of everything
                                shard-00000.safetensors   what rank 0 wrote, and so on

A folder of this name is always complete: it is written elsewhere and renamed at the end. docs/checkpoints.md
describes every field, well enough to read a checkpoint without this code.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lockstep.errors import UserError, reason

FORMAT = 2
INDEX = "index.json"
BLOCK_BYTES = 1 << 22
"""So many bytes of a chunk have a digest of their own: a slice can be checked without reading the rest."""

MOST_DIMS = 64
MOST_CELLS = 1 << 24
SHARD_NAME = re.compile(r"shard-[0-9]{5,}\.safetensors")
ITEM_BYTES = dict.fromkeys(("F64", "I64", "U64", "C64"), 8)
ITEM_BYTES |= dict.fromkeys(("F32", "I32", "U32"), 4)
ITEM_BYTES |= dict.fromkeys(("F16", "BF16", "I16", "U16"), 2)
ITEM_BYTES |= dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1)
"""The number formats, by the names that safetensors has for them."""

_OPENING = b'{"sha256":"'
_BETWEEN = b'","index":'
_CLOSING = b"}\n"
_BODY = len(_OPENING) + 64 + len(_BETWEEN)

Size = Annotated[int, Field(ge=0, lt=1 << 60)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class DamageError(Exception):
    """A checkpoint is not what was written. The text names the file and says what is wrong with it."""


class IndexPart(BaseModel):
    """A part of an index: what it says is checked, and nothing else may stand in it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Chunk(IndexPart):
    """A box of a tensor: where it begins in the whole, its shape, and which bytes of which file it is."""

    file: str
    offset: Size
    start: list[Size]
    shape: list[Size]
    sha256: list[Digest]
    """Of every BLOCK_BYTES bytes, the last block may be shorter."""


class StoredTensor(IndexPart):
    """One tensor of the whole model or its optimizer, and the chunks it is in."""

    dtype: str
    shape: list[Size]
    chunks: list[Chunk]

    @property
    def bytes(self) -> int:
        """The size of the whole tensor."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class StoredFile(IndexPart):
    """A shard: its size, and the digest of its safetensors header, which is not part of any chunk."""

    bytes: Size
    header_bytes: Size
    header_sha256: Digest


class Group(IndexPart):
    """One parameter group of the optimizer: the original names of its parameters, and its options."""

    parameters: list[str]
    options: dict[str, Any]


class OptimizerState(IndexPart):
    """What an optimizer has besides tensors."""

    name: str
    groups: list[Group]
    values: dict[str, dict[str, Any]]
    """By parameter and key: state that is not a tensor."""
    rates: list[float | None] = []
    """By group: the learning rate that the script set, null where it is the one the optimizer was made with."""
    schedulers: dict[str, Any] = {}
    """By class: the state of torch's schedulers that the script made (rates.py)."""
    frozen: list[str] = []
    """The parameters that the script froze after the model was cut, though they have state here."""


class LoaderState(IndexPart):
    """Where a loader stands, and what it reads."""

    position: Annotated[list[Size], Field(min_length=2, max_length=2)]
    """Epochs and samples of this epoch that were consumed."""
    steps_done: Size
    micro_batch: Annotated[int, Field(gt=0)]
    micro_batch_given: bool = True
    samples: Size | None
    global_batch: Annotated[int, Field(gt=0)]
    shuffle: bool


class Best(IndexPart):
    """The checkpoint with the lowest validation loss so far."""

    step: Size
    loss: float


class PipelineState(IndexPart):
    """How a pipeline was cut, so that the same one is cut the same way again."""

    schedule: str
    cuts: list[str]
    stages: list[list[Size]]


class Training(IndexPart):
    """Where a training stands besides its tensors. Random streams follow from the seed and the step."""

    seed: Annotated[int, Field(gt=-(1 << 64), lt=1 << 64)]
    skipped: Size
    loaders: dict[str, LoaderState]
    loss: float | None
    metrics: dict[str, dict[str, float | None]]
    best: Best | None
    loss_scale: dict[str, float] | None
    attention: str | None
    pipeline: PipelineState | None
    emergency: str | None = None
    """Why it was saved before a failure; None for all others."""
    recent_losses: dict[str, list[float]] | None = None
    """Logarithms of the last losses, by which spikes are found (step/spikes.py)."""
    kept: dict[str, Any] = {}
    """State of the script's own (checkpoint/kept.py)."""
    code: dict[str, str] = {}
    """Digests of the script and of what it imports that is no library, by file (record/identity.py)."""


class Index(IndexPart):
    """Everything of a checkpoint that is not a tensor, and where the tensors are."""

    format: int
    step: Size
    attempt: str
    time: Annotated[float, Field(ge=0, lt=1e11)]
    versions: dict[str, str]
    layout: str
    config: dict[str, Any]
    block_bytes: Annotated[int, Field(gt=0)]
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]
    state_dict: dict[str, str]
    """The keys of the model's state_dict, in its order, each with the name of the tensor it is (tied ones share it)."""
    optimizer: OptimizerState | None
    training: Training | None

    @property
    def bytes(self) -> int:
        """The size of all shards."""
        return sum(file.bytes for file in self.files.values())


def checkpoints_folder(run_folder: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_folder / "checkpoints"


def step_folder(run_folder: Path, step: int) -> Path:
    """The folder of one step."""
    return checkpoints_folder(run_folder) / step_name(step)


def step_name(step: int) -> str:
    """The name of the folder of one step."""
    return f"step-{step:08d}"


def shard_name(rank: int) -> str:
    """The file of the rank that wrote it."""
    return f"shard-{rank:05d}.safetensors"


def steps_on_disk(run_folder: Path) -> list[int]:
    """The steps that have a folder, or what should be one, oldest first."""
    names = [path.name for path in checkpoints_folder(run_folder).glob("step-*")]
    steps = {name: int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-[0-9]{8,12}", name)}
    return sorted(step for name, step in steps.items() if step_name(step) == name)


def is_checkpoint(path: Path) -> bool:
    """Whether a path is meant to be a checkpoint, and not a run."""
    return (path / INDEX).exists() or re.fullmatch(r"step-[0-9]+", path.name) is not None


def write_index(folder: Path, index: Index) -> None:
    """Write an index, all of it or nothing."""
    body = index.model_dump_json().encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    temporary = folder / f".{INDEX}.{os.getpid()}"
    with temporary.open("wb") as file:
        file.write(_OPENING + digest + _BETWEEN + body + _CLOSING)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / INDEX)
    sync_folder(folder)


def read_index(folder: Path) -> Index:
    """The index of a checkpoint, checked: what it says fits together, and no path in it leaves the folder."""
    size_of(folder / INDEX)  # refuses what is not a plain file
    try:
        content = (folder / INDEX).read_bytes()
    except OSError as error:
        raise DamageError(f"{INDEX} cannot be read ({reason(error)})") from None
    body = content[_BODY : -len(_CLOSING)]
    digest = hashlib.sha256(body).hexdigest().encode()
    if content != _OPENING + digest + _BETWEEN + body + _CLOSING:
        if b'"format": 1' in content[:40]:
            raise DamageError(f"{INDEX} is of format 1, which this version does not read any more")
        raise DamageError(f"{INDEX} has changed since it was written")
    try:
        index = Index.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = shown(".".join(map(str, first["loc"])))
        raise DamageError(f"{INDEX} is not one that Lockstep wrote ({where}: {shown(first['msg'])})") from None
    _check(index, folder.name)
    return index


def _check(index: Index, folder: str) -> None:
    """Refuse an index that contradicts itself, or leads out of its folder: somebody made it by hand."""
    if index.format != FORMAT:
        raise DamageError(f"{INDEX}: format {index.format} is not known, this version reads format {FORMAT}")
    if re.fullmatch(r"step-\d+", folder) and step_name(index.step) != folder:
        raise DamageError(f"{INDEX}: it is that of step {index.step}, the folder was renamed")
    for name, file in index.files.items():
        if SHARD_NAME.fullmatch(name) is None:
            raise DamageError(f"{INDEX}: {shown(name)} is not the name of a shard")
        if file.header_bytes > file.bytes:
            raise DamageError(f"{INDEX}: the header of {name} is longer than the file")
    for name, tensor in index.tensors.items():
        problem = _problem_of(tensor, index)
        if problem is not None:
            raise DamageError(f"{INDEX}: {shown(name)} {problem}")
    for key, name in index.state_dict.items():
        if f"model/{name}" not in index.tensors:
            raise DamageError(f"{INDEX}: {shown(key)} is the tensor {shown(name)}, which is not there")


def _problem_of(tensor: StoredTensor, index: Index) -> str | None:
    """What is wrong with the entry of a tensor."""
    if tensor.dtype not in ITEM_BYTES:
        return f"has the unknown format {shown(tensor.dtype)}"
    if len(tensor.shape) > MOST_DIMS or prod(max(1, length) for length in tensor.shape) >= 1 << 60:
        return "is too large"
    for chunk in tensor.chunks:
        size = prod(chunk.shape) * ITEM_BYTES[tensor.dtype]
        file = index.files.get(chunk.file)
        if file is None:
            return f"is in {shown(chunk.file)}, which is not among the files"
        if chunk.offset < file.header_bytes or chunk.offset + size > file.bytes:
            return f"reaches beyond {chunk.file}"
        if len(chunk.sha256) != -(-size // index.block_bytes):
            return "has not as many digests as blocks"
    boxes = [(chunk.start, chunk.shape) for chunk in tensor.chunks]
    return None if is_filled(tensor.shape, boxes) else "is not filled by its chunks, each number once"


def is_filled(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes (start, shape) fill a tensor without overlap: on the grid of their edges every cell is in one."""
    if any(len(start) != len(shape) or len(box) != len(shape) for start, box in boxes):
        return False
    if sum(prod(box) for _, box in boxes) != prod(shape):
        return False
    if not boxes:
        return True
    ranges = [[(a, a + n) for a, n in zip(start, box, strict=True)] for start, box in boxes]
    edges = [sorted({edge for one in ranges for edge in one[dim]}) for dim in range(len(shape))]
    if any(edge[0] < 0 or edge[-1] > length for edge, length in zip(edges, shape, strict=True)):
        return False
    cells = [len(edge) - 1 for edge in edges]
    if prod(cells) > MOST_CELLS:
        return False
    places = [{edge: number for number, edge in enumerate(one)} for one in edges]
    times = np.zeros(cells, dtype=np.int32)
    for one in ranges:
        times[tuple(slice(places[dim][a], places[dim][b]) for dim, (a, b) in enumerate(one))] += 1
    return bool((times <= 1).all())


def shown(name: str, most: int = 100) -> str:
    """A name of a file's for people: short, and without anything that a terminal would obey."""
    printable = name if name.isprintable() else repr(name)[1:-1]
    return printable if len(printable) <= most else f"{printable[: most - 3]}..."


def size_of(path: Path) -> int:
    """The size of a plain file. A link would lead out of the folder."""
    try:
        status = path.lstat()
    except OSError as error:
        raise DamageError(f"{path.name} cannot be read ({reason(error)})") from None
    if not stat.S_ISREG(status.st_mode):
        raise DamageError(f"{path.name} is not a plain file")
    return status.st_size


@dataclass(frozen=True)
class Whole:
    """A checkpoint whose index is sound and whose files have the right sizes."""

    folder: Path
    index: Index


def open_checkpoint(folder: Path) -> Whole:
    """Look at a checkpoint without reading its tensors: all files are there, of the right size, and plain ones."""
    index = read_index(folder)
    for name, file in index.files.items():
        if (size := size_of(folder / name)) != file.bytes:
            raise DamageError(f"{name} has {size} bytes instead of {file.bytes}")
    return Whole(folder, index)


def open_or_refuse(folder: Path) -> Whole:
    """The same for a folder that a user named."""
    if not folder.is_dir() or not is_checkpoint(folder):
        raise UserError(f"{folder} is not a checkpoint", "give a folder such as RUN/checkpoints/step-00000100")
    try:
        return open_checkpoint(folder)
    except DamageError as error:
        raise UserError(f"the checkpoint {folder} is damaged", f"{error}; give another one") from None


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
