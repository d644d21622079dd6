"""Weights that other programs wrote, as the start of a run; nothing that their files contain is executed."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lockstep.checkpoint.disk import format as fmt
from lockstep.checkpoint.disk.files import DTYPES, NAMES, Entry, aligned, dtype_name, versions, write_shard
from lockstep.checkpoint.disk.format import MOST_DIMS, Index, StoredTensor, is_filled, shown, step_folder
from lockstep.checkpoint.exchange.export import HF_INDEX
from lockstep.errors import UserError, reason

NESTED = ("MODEL_STATE", "model_state_dict", "model_state", "state_dict", "model", "module", "app.model")
"""Under which keys courses and libraries keep a model's state_dict beside other things."""
WRAPPERS = ("module.", "_orig_mod.")
"""What DDP and torch.compile put before every name."""


@dataclass(frozen=True)
class Foreign:
    """Tensors of a foreign file, by the model's own names: what they are, and how to read one."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    read: Callable[[str], torch.Tensor]
    left_out: list[str]
    """What else the file has, and a model does not need."""

    def renamed(self, names: Mapping[str, str]) -> Foreign:
        """Some of the tensors under names of ours, each with that of the file."""
        shapes = {our: self.shapes[their] for our, their in names.items()}
        dtypes = {our: self.dtypes[their] for our, their in names.items()}
        return Foreign(shapes, dtypes, lambda name: self.read(names[name]), self.left_out)


def import_weights(source: Path, run_folder: Path, dtype: torch.dtype | None = None) -> tuple[Path, Foreign]:
    """Make the weights of a foreign file the start of a run: a checkpoint of step 0 without optimizer.

    Floating-point weights are stored as `dtype`, as they are if it is None.
    """
    if fmt.steps_on_disk(run_folder) or (run_folder / "config.toml").exists():
        raise UserError(f"{run_folder} is a run already", "give a new folder, the run begins there")
    foreign = open_foreign(source)
    kinds = {
        name: dtype if dtype is not None and kind.is_floating_point else kind for name, kind in foreign.dtypes.items()
    }
    entries = aligned(
        Entry(f"model/{name}", dtype_name(name, kinds[name]), shape) for name, shape in foreign.shapes.items()
    )
    final = step_folder(run_folder, 0)
    staging = final.with_name(f".importing-{os.getpid()}")
    made = [path for path in (final.parent, run_folder, *run_folder.parents) if not path.exists()]
    try:
        staging.mkdir(parents=True)
        names = [entry.name.removeprefix("model/") for entry in entries]
        file, chunks = write_shard(
            staging / fmt.shard_name(0), entries, (foreign.read(name).to(kinds[name]) for name in names)
        )
        tensors = {
            entry.name: StoredTensor(
                dtype=entry.dtype,
                shape=list(entry.shape),
                chunks=[chunk.model_copy(update={"start": [0] * len(entry.shape)})] if entry.bytes else [],
            )
            for entry, chunk in zip(entries, chunks, strict=True)
        }
        index = Index(
            format=fmt.FORMAT,
            step=0,
            attempt="import",
            time=time.time(),
            versions=versions(),
            layout="single",
            config={},
            block_bytes=fmt.BLOCK_BYTES,
            files={fmt.shard_name(0): file},
            tensors=tensors,
            state_dict={name: name for name in foreign.shapes},
            optimizer=None,
            training=None,
        )
        fmt.write_index(staging, index)
        staging.rename(final)
        fmt.sync_folder(final.parent)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        for path in made:
            with suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError):
            raise UserError(f"cannot write to {run_folder}", f"{reason(error)}; give another folder") from None
        raise
    return final, foreign


def open_foreign(source: Path) -> Foreign:
    """Look into a safetensors file, a folder of them, a torch file, or a folder of torch's distributed checkpoints."""
    try:
        return _open(source)
    except RecursionError:
        raise UserError(f"{source} contains itself", "give a file of plain tensors") from None


def _open(source: Path) -> Foreign:
    if source.is_dir():
        if (source / HF_INDEX).is_file():
            return _open_shards(source)
        if (source / ".metadata").is_file():
            return _open_distributed(source)
        files = sorted(source.glob("*.safetensors"))
        if len(files) == 1:
            return _open_safetensors(dict.fromkeys(_names_in(files[0]), files[0]))
        raise UserError(
            f"{source} is not a folder of weights", f"it has neither {HF_INDEX}, nor .metadata, nor one .safetensors"
        )
    if not source.is_file():
        raise UserError(f"{source} does not exist", "give a .safetensors or .pt file, or a folder of weights")
    if source.suffix == ".safetensors":
        return _open_safetensors(dict.fromkeys(_names_in(source), source))
    return _open_torch(source)


# Safetensors ----------------------------------------------------------------------------------------------------------


def _names_in(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a safetensors file", f"{error}; give another one") from None


def _open_shards(folder: Path) -> Foreign:
    try:
        places = json.loads((folder / HF_INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): folder / str(file) for name, file in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder / HF_INDEX} cannot be read", "it needs a weight_map") from None
    for name, path in files.items():
        if path.parent != folder or path.is_symlink():
            raise UserError(f"{folder / HF_INDEX} puts {shown(name)} outside of the folder", "use a folder you trust")
        if not path.is_file():
            raise UserError(f"{path} is missing", "download all files of the model")
    return _open_safetensors(files)


def _open_safetensors(files: Mapping[str, Path]) -> Foreign:
    shapes, dtypes = {}, {}
    for path in dict.fromkeys(files.values()):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if files.get(name) == path:
                        empty = file.get_slice(name)
                        shapes[name] = tuple(empty.get_shape())
                        dtypes[name] = DTYPES[empty.get_dtype()]
        except (SafetensorError, OSError, KeyError) as error:
            raise UserError(f"{path} is not a safetensors file", f"{error}; give another one") from None
    if missing := sorted(files.keys() - shapes.keys()):
        raise UserError(f"{files[missing[0]]} has no {missing[0]}", "download the model again")

    def read(name: str) -> torch.Tensor:
        with safe_open(files[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    return _unwrapped(Foreign(shapes, dtypes, read, []))


# torch.save -----------------------------------------------------------------------------------------------------------


def _open_torch(path: Path) -> Foreign:
    content = _load_weights_only(path)
    found, left_out = _find_state_dict(path, content)
    for name, tensor in found.items():
        if tensor.layout != torch.strided or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise UserError(f"{shown(name)} in {path} is not a plain tensor", "save it dense and contiguous")
    return _unwrapped(
        Foreign(
            {name: tuple(tensor.shape) for name, tensor in found.items()},
            {name: tensor.dtype for name, tensor in found.items()},
            lambda name: found[name].detach().contiguous(),
            left_out,
        )
    )


def _load_weights_only(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:
        pass  # a file of torch before 1.6, which cannot be mapped
    except (pickle.UnpicklingError, EOFError, OSError, ValueError) as error:
        raise _refused(path, error) from None
    try:
        with warnings.catch_warnings(action="ignore"):  # of what the next line refuses
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch makes of it, it is not a file of weights
        raise _refused(path, error) from None


def _refused(path: Path, error: Exception) -> UserError:
    """Only the facts of what torch says: its advice is to switch the safety off."""
    text = str(error).strip()
    if wanted := re.search(r"GLOBAL ([\w.]+)", text):
        said = f"it wants {wanted[1]}"
    elif "weights_only" in text:
        said = "it has more in it than tensors"
    else:
        said = type(error).__name__ if isinstance(error, KeyError) or not text else text.splitlines()[0]
    return UserError(
        f"{path} is not a file of plain tensors, and nothing of it was executed ({shown(said)})",
        "save model.state_dict() alone with torch.save, or as safetensors",
    )


def _find_state_dict(path: Path, content: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The dict of tensors in a file, plain or under a key beside others, and the other keys."""
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds a {type(content).__name__}", "save model.state_dict() with torch.save")
    if content and all(isinstance(value, torch.Tensor) for value in content.values()):
        return {str(name): value for name, value in content.items()}, []
    for key in NESTED:
        inside = content.get(key)
        if isinstance(inside, Mapping) and inside:
            found, left_out = _find_state_dict(path, inside)
            return found, [*(str(other) for other in content if other != key), *left_out]
    named = ", ".join(shown(str(key)) for key in list(content)[:8])
    raise UserError(
        f"{path} has no model in it that Lockstep can find (it has {named or 'nothing'})",
        f"keep the state_dict under one of {', '.join(NESTED[:4])}, or save it alone",
    )


# torch.distributed.checkpoint -----------------------------------------------------------------------------------------


class _Record:
    """Stands in for torch's own classes when their pickle is read: it keeps fields and can do nothing."""

    fields: Mapping[str, Any] = MappingProxyType({})

    def __setstate__(self, state: Any) -> None:
        self.fields = dict(state) if isinstance(state, dict) else {"state": state}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(name) from None


class _Kind(_Record):
    """The same for an enumeration, or for something made by a call, of which nobody asks what it is."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


_CLASSES: dict[tuple[str, str], Any] = {
    **{
        ("torch.distributed.checkpoint.metadata", name): _Record
        for name in (
            *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
            *("BytesStorageMetadata", "MetadataIndex", "StorageMeta"),
        )
    },
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _Kind,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch.serialization", "_get_layout"): _Kind,
    ("torch", "Size"): tuple,
    ("pathlib", "PosixPath"): _Kind,
    ("pathlib", "WindowsPath"): _Kind,
    ("pathlib._local", "PosixPath"): _Kind,
    ("collections", "OrderedDict"): dict,
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in NAMES},
}


class _Restricted(pickle.Unpickler):
    """Reads the pickle of a distributed checkpoint's metadata; any other name in it than a few classes is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it wants {module}.{name}")
        return _CLASSES[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"it wants {pid!r}")


def _open_distributed(folder: Path) -> Foreign:
    try:
        with (folder / ".metadata").open("rb") as file:
            metadata = _Restricted(file).load()
        described = {str(name): one for name, one in metadata.state_dict_metadata.items()}
        paths = {str(name): tuple(map(str, path)) for name, path in (metadata.planner_data or {}).items()}
        places: dict[str, list[tuple[tuple[int, ...], str, int, int]]] = {}
        for at, info in metadata.storage_data.items():
            if info.fields.get("transform_descriptors"):
                raise pickle.UnpicklingError("it is compressed")
            offset = tuple(map(int, at.fields.get("offset") or ()))
            places.setdefault(str(at.fqn), []).append(
                (offset, str(info.relative_path), int(info.offset), int(info.length))
            )
        tensors = {name: one for name, one in described.items() if "size" in one.fields and name in places}
        shapes = {name: tuple(map(int, one.size)) for name, one in tensors.items()}
        # Its properties are pickled as a tuple (torch 2.11 and 2.13).
        dtypes = {name: one.properties.state[0] for name, one in tensors.items()}
        if not all(isinstance(dtype, torch.dtype) for dtype in dtypes.values()):
            raise pickle.UnpicklingError("a number format is not one")
        _check_sizes(folder, shapes, places)
        json.dumps([list(shapes), list(paths.values())], ensure_ascii=False).encode()  # names have to be texts
    except Exception as error:  # a pickle may make anything of itself
        said = shown(str(error))
        raise UserError(
            f"{folder / '.metadata'} is not that of a checkpoint of torch, and nothing of it was executed ({said})",
            "give a folder that torch.distributed.checkpoint.save wrote",
        ) from None
    for name, parts in places.items():
        for _, file_name, _, _ in parts:
            path = folder / file_name
            if path.parent != folder or path.is_symlink() or not path.is_file():
                where = f"{shown(name)} into {shown(file_name)}"
                raise UserError(f"{folder / '.metadata'} puts {where}", "use a folder you trust")

    def read(name: str) -> torch.Tensor:
        parts = [(offset, _read_part(folder / file, begin, length)) for offset, file, begin, length in places[name]]
        boxes = [(offset, part.shape) for offset, part in parts]
        if any(part.dtype != dtypes[name] for _, part in parts) or not is_filled(shapes[name], boxes):
            raise UserError(f"{folder} has other parts of {shown(name)} than .metadata says", "save it again")
        whole = torch.empty(shapes[name], dtype=dtypes[name])
        for offset, part in parts:
            whole[tuple(slice(at, at + count) for at, count in zip(offset, part.shape, strict=True))] = part
        return whole

    keys = {name: paths.get(name, (name,)) for name in shapes}
    top = {path[0] for path in keys.values() if len(path) > 1}
    chosen = next((name for name in NESTED if name in top), None)
    if chosen is None:
        names = {name: name for name in shapes}
    else:
        inside = {name: ".".join(path[1:]) for name, path in keys.items() if path[0] == chosen and len(path) > 1}
        names = {ours: theirs for theirs, ours in inside.items()}
        if len(names) < len(inside):
            raise UserError(f"{folder / '.metadata'} has two tensors of one name", "save it again")
    left_out = [name for name in described if name not in names.values()]
    return _unwrapped(Foreign(shapes, dtypes, read, left_out).renamed(names))


def _check_sizes(
    folder: Path, shapes: Mapping[str, Sequence[int]], places: Mapping[str, Sequence[tuple[Any, str, int, int]]]
) -> None:
    """Refuse tensors that no machine could hold, and parts outside of their files, before either is asked for."""
    for name, shape in shapes.items():
        if min(shape, default=0) < 0 or prod(max(1, length) for length in shape) >= 1 << 60:
            raise pickle.UnpicklingError(f"{shown(name)} would have the shape {shown(str(list(shape)))}")
    for name, parts in places.items():
        for _, file, begin, length in parts:
            path = folder / file
            size = path.stat().st_size if path.parent == folder and path.is_file() else None
            if size is not None and not (begin >= 0 and 0 <= length <= size - begin):
                raise pickle.UnpicklingError(f"{shown(name)} is not inside of {shown(file)}")


def _read_part(path: Path, begin: int, length: int) -> torch.Tensor:
    with path.open("rb") as file:
        file.seek(begin)
        content = file.read(length)
    try:
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"it holds a {type(tensor).__name__}")
    except Exception as error:  # whatever torch makes of it
        raise _refused(path, error) from None
    return tensor


# Names ----------------------------------------------------------------------------------------------------------------


def _unwrapped(foreign: Foreign) -> Foreign:
    """Without the prefix that a wrapper gave all names."""
    names = {name: name for name in foreign.shapes}
    while prefix := next((text for text in WRAPPERS if names and all(name.startswith(text) for name in names)), ""):
        names = {name.removeprefix(prefix): theirs for name, theirs in names.items()}
    if not names:
        raise UserError("the file has no tensors", "give one with a model's state_dict")
    for name, theirs in names.items():
        if len(foreign.shapes[theirs]) > MOST_DIMS:
            raise UserError(f"{name} has {len(foreign.shapes[theirs])} dims", "give a file of weights")
    return foreign.renamed(names)
