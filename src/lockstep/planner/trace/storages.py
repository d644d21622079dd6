"""A count of every storage that is alive, under the headings of a trace, and of what is sent."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lockstep.runtime.torch_private import name_of, tree_leaves, type_of


class Storages:
    """Sees every storage come and go, each under a heading, and remembers the fullest moment."""

    def __init__(self, axes: dict[str, str]) -> None:
        self.heading = self.moment = "forward"
        self.now: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self.peak_moment = ""
        self.collectives: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        self._most = self._total = 0
        self._axes = axes
        self._alive: dict[int, tuple[weakref.ref[Any], str, int]] = {}

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do an operation, and count what it made and sent."""
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        if func.namespace in ("c10d", "fsdp"):
            self._see_communication(func, args, kwargs)
        return result

    def see(self, tensor: torch.Tensor, heading: str | None = None) -> None:
        """A tensor is there; with a heading it belongs under that from now on."""
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._alive.get(key)
        if known is None:
            size, under = storage.nbytes(), heading or self.heading
            gone = weakref.ref(storage, partial(self._forget, key))
            self._alive[key] = (gone, under, size)
            self._add(under, size)
        elif heading is not None and known[1] != heading:
            reference, before, size = known
            self._alive[key] = (reference, heading, size)
            self.now[before] -= size
            self.now[heading] += size

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has grown or was given up while tensors still use it, as `fully_shard` does it."""
        known = self._alive.get(id(storage))
        if known is not None:
            reference, under, before = known
            self._alive[id(storage)] = (reference, under, storage.nbytes())
            self._add(under, storage.nbytes() - before)

    def forget_peak(self) -> None:
        """What was before does not count; collectives neither."""
        self._most, self.peak, self.peak_moment = 0, {}, ""
        self.collectives.clear()

    def _forget(self, key: int, _: Any) -> None:
        _, under, size = self._alive.pop(key)
        self._add(under, -size)

    def _add(self, under: str, size: int) -> None:
        self.now[under] += size
        self._total += size
        if self._total > self._most:
            self._most, self.peak, self.peak_moment = self._total, dict(self.now), self.moment

    def _see_communication(self, func: Any, args: Any, kwargs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        axis = "fsdp"
        if func.namespace == "c10d":
            kind = name_of(func).strip("_").removesuffix("_")
            axis = self._axis_of(args)
            largest = max((tensor.untyped_storage().nbytes() for tensor in tensors), default=0)
            noted = self.collectives[kind, axis]
            noted[0] += 1
            noted[1] += largest
        if axis in ("tp", "cp"):
            return  # these are activations
        for number, tensor in enumerate(tensors):
            known = self._alive.get(id(tensor.untyped_storage()))
            if known is not None and known[1] == "activations":
                scattered = func.namespace == "c10d" and "reduce_scatter" in name_of(func) and number == 0
                self.see(tensor, "gradients" if scattered else "communication")

    def _axis_of(self, args: Any) -> str:
        for value in args:
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in type_of(value):
                return self._axes.get(dist.ProcessGroup.unbox(value).group_name, "data")
        return "data"
