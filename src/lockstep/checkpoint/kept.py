"""State of a script's own in its run's checkpoints: moving averages, counters, the best score, a replay buffer.

Plain data becomes JSON in the index, and what holds numbers becomes tensors beside the model's. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lockstep.checkpoint.disk.files import check_dtypes, reading
from lockstep.checkpoint.disk.format import DamageError, Whole
from lockstep.checkpoint.disk.load import read_whole
from lockstep.errors import UserError
from lockstep.parallel.held import Held
from lockstep.runtime.comm import Comm
from lockstep.runtime.tensor_digest import digests_of

Tensors = dict[str, torch.Tensor]
PLAIN = (bool, int, str)


class Kept:
    """What a script keeps, by name. All ranks call everything here together."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._states: dict[str, Any] = {}

    def add(self, name: str, state: Any, checkpoint: Whole | None) -> Any:
        """Keep something from now on; what a checkpoint has of it is put into it."""
        if not isinstance(name, str) or not name or "/" in name:
            raise UserError(f"run.keep was given the name {name!r}", "give a short text without a slash")
        if name in self._states:
            raise UserError(f"run.keep({name!r}) was called twice", "give each state a name of its own")
        if not _has_protocol(state) and type(state) not in (dict, OrderedDict, list, deque):
            raise UserError(
                f"run.keep({name!r}) was given a {type(state).__name__}, which could not be put back in place",
                "give a dict or list of numbers, texts and tensors, or an object with state_dict and load_state_dict",
            )
        self._states[name] = state
        self.collect()  # refuses at once what could not be saved
        if checkpoint is not None:
            self._restore(name, checkpoint)
        return state

    def collect(self) -> tuple[dict[str, Any], Tensors, list[int]]:
        """All of it now, as JSON and tensors by their names in a checkpoint, and a digest of each of these.

        Ranks that differ are refused.
        """
        plain: dict[str, Any] = {}
        tensors: Tensors = {}
        if not self._states:
            return plain, tensors, []

        def encode() -> None:
            for name, state in self._states.items():
                of = state.state_dict() if _has_protocol(state) else state
                plain[name] = _encoded(of, f"kept/{name}", tensors)
            check_dtypes((name, tensor.dtype) for name, tensor in tensors.items())

        self._comm.agree(encode)
        rows = {name: hashlib.sha256(json.dumps(value).encode()).hexdigest() for name, value in plain.items()}
        digests = digests_of(tensors.values())
        rows |= {name: str(digest) for name, digest in zip(tensors, digests, strict=True)}
        everybody = self._comm.gather(rows)
        for rank, theirs in enumerate(everybody):
            for name, digest in everybody[0].items():
                if theirs.get(name) != digest:
                    raise UserError(
                        f"rank {rank} keeps another {name.removeprefix('kept/')} than rank 0 (run.keep)",
                        "keep what is the same on every rank: numbers of StepResult, or combined by run.reduce",
                    )
        return plain, tensors, digests

    def restore(self, checkpoint: Whole) -> None:
        """Put what a checkpoint has into everything that is kept."""
        for name in self._states:
            self._restore(name, checkpoint)

    def _restore(self, name: str, checkpoint: Whole) -> None:
        index, state = checkpoint.index, self._states[name]
        stored = (index.training.kept if index.training else {}).get(name)
        if stored is None:
            return

        def decode() -> None:
            try:
                with reading(checkpoint) as reader:
                    found = _decoded(stored, lambda key: read_whole(reader, index.tensors[key]))
            except (DamageError, KeyError) as error:
                raise UserError(
                    f"what {checkpoint.folder} keeps as {name!r} is damaged ({error})", "give another one"
                ) from None
            if _has_protocol(state):
                state.load_state_dict(found)
            elif _put_into(state, found) is not state:
                raise UserError(
                    f"the checkpoint keeps a {type(found).__name__} as {name!r}, and run.keep was given a "
                    f"{type(state).__name__}",
                    "keep the same kind as before, or give it another name",
                )

        self._comm.agree(decode)


def kept_parts(tensors: Tensors, place: int) -> list[Held]:
    """What is kept, as whole tensors that every rank has; `place` is this rank's in the pipeline."""
    return [Held(name, tensor, tuple(tensor.shape), place=place) for name, tensor in tensors.items()]


def _has_protocol(state: Any) -> bool:
    return hasattr(state, "state_dict") and hasattr(state, "load_state_dict")


def _encoded(value: Any, path: str, tensors: Tensors) -> Any:
    """JSON for a value; tensors stand beside it, by the path that leads to them. Other kinds begin with a tilde."""

    def inner(one: Any, key: Any) -> Any:
        return _encoded(one, f"{path}/{key}", tensors)

    if value is None or type(value) in PLAIN:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"~float": repr(value)}
    if isinstance(value, torch.Tensor):
        tensors[path] = _whole(value)
        return {"~tensor": path}
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise UserError(f"run.keep was given an array of {array.dtype} ({path})", "keep arrays of numbers")
        tensors[path] = torch.from_numpy(np.array(array))
        return {"~array": path, "number": isinstance(value, np.generic)}
    if type(value) in (dict, OrderedDict):
        if all(type(key) is str and not key.startswith("~") and "/" not in key for key in value):
            return {key: inner(one, key) for key, one in value.items()}
        pairs = [[inner(key, f"{at}k"), inner(one, at)] for at, (key, one) in enumerate(value.items())]
        return {"~items": pairs}
    if type(value) is list:
        return [inner(one, at) for at, one in enumerate(value)]
    if type(value) in (tuple, deque):
        kind, most = type(value).__name__, getattr(value, "maxlen", None)
        return {f"~{kind}": [inner(one, at) for at, one in enumerate(value)], "maxlen": most}
    raise UserError(
        f"run.keep was given a {type(value).__name__} ({path.removeprefix('kept/')}), which a checkpoint cannot hold",
        "keep numbers, texts, tensors and arrays, in dicts, lists, tuples and deques",
    )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    full = getattr(tensor, "full_tensor", None)
    plain = tensor.detach() if full is None else full().detach()
    return plain.clone(memory_format=torch.contiguous_format)


def _decoded(stored: Any, read: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(stored, list):
        return [_decoded(one, read) for one in stored]
    if not isinstance(stored, dict):
        return stored
    if "~float" in stored:
        return float(stored["~float"])
    if "~tensor" in stored:
        return read(stored["~tensor"])
    if "~array" in stored:
        array = read(stored["~array"]).numpy()
        return array[()] if stored["number"] else array
    if "~items" in stored:
        return {_decoded(key, read): _decoded(one, read) for key, one in stored["~items"]}
    if "~tuple" in stored:
        return tuple(_decoded(one, read) for one in stored["~tuple"])
    if "~deque" in stored:
        return deque((_decoded(one, read) for one in stored["~deque"]), stored["maxlen"])
    return {key: _decoded(one, read) for key, one in stored.items()}


@torch.no_grad()
def _put_into(now: Any, found: Any) -> Any:
    """The value that was found, in the containers and tensors that are there, since the script may hold those."""
    if isinstance(now, torch.Tensor) and isinstance(found, torch.Tensor):
        if (now.shape, now.dtype) == (found.shape, found.dtype):
            return now.copy_(found)
        return found.to(now.device)
    if isinstance(now, dict) and isinstance(found, dict):
        values = {key: _put_into(now.get(key), one) for key, one in found.items()}
        now.clear()
        now.update(values)
        return now
    if type(now) is type(found) and isinstance(now, list | deque):
        values_in_order = [_put_into(now[at] if at < len(now) else None, one) for at, one in enumerate(found)]
        now.clear()
        now.extend(values_in_order)
        return now
    return found
