"""Whether all ranks read the same data: lengths, a few samples, and how the loader was asked for.

A dataset that is shorter on one node (a folder half copied), or that a script has cut by rank itself, would train to
the end with some samples twice and others never.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from lockstep.data.digest import digest_of_value
from lockstep.data.loader import Reading, read_steps
from lockstep.data.order import MicroBatchPlan, Order, Position, StepPlan
from lockstep.errors import UserError
from lockstep.record.identity import Told, refuse_difference, tell
from lockstep.runtime.comm import Comm

EVALUATION = "an evaluation"
"""Where a dataset is only scored."""
UNSTEADY = "another one whenever it is read"


class DataCheck:
    """Compares the ranks' data where they are first used. All ranks call everything here together."""

    def __init__(self, comm: Comm, seed: int, warn: Callable[[str], None]) -> None:
        self._comm = comm
        self._seed = seed
        self._warn = warn
        self._known: dict[int, tuple[weakref.ref[Any], dict[str, str]]] = {}

    def check(
        self, where: str, dataset: Any, call: Mapping[str, Any], code: Mapping[str, str], reading: Reading
    ) -> None:
        """Refuse a dataset, or a `call` that reads it, that is not the same on all ranks; `code` that is not, too."""
        is_stream = isinstance(dataset, IterableDataset)
        size = len(dataset) if hasattr(dataset, "__len__") and not is_stream else None
        facts = {
            "code": dict(code),
            "call": {"call": where} | {key: _shown(value) for key, value in call.items()},
            "data": {"type(dataset)": type(dataset).__qualname__, "len(dataset)": str(size)},
            "samples": self._samples(dataset, size, reading) if size else {},
        }
        unsteady = next((name for name, digest in facts["samples"].items() if digest == UNSTEADY), None)
        if unsteady := next((name for name in self._comm.gather(unsteady) if name is not None), None):
            refusal = UserError(
                f"in {where} {unsteady} is another one whenever it is read, so that ranks, loader processes and "
                "restarts have each its own",
                "draw from torch's, numpy's or Python's own generator, which are seeded for each sample, or seed a "
                "generator of your own with torch.randint in __getitem__",
            )
            if where != EVALUATION:
                raise refusal
            self._warn(str(refusal))  # much may have been trained by now
        if not self._is_same(facts):
            refuse_difference(self._gather(facts), f"in {where} ")

    def check_first(self, where: str, digest: str) -> None:
        """Refuse a stream whose first samples are not the same on all ranks."""
        facts = {"samples": {"first samples": digest}}
        if not self._is_same(facts):
            refuse_difference(self._gather(facts), f"in {where} ")

    def _is_same(self, facts: dict[str, dict[str, str]]) -> bool:
        return self._comm.is_same(json.dumps(facts, sort_keys=True))

    def _gather(self, facts: dict[str, dict[str, str]]) -> list[Told]:
        """What all ranks say, what most of them say first."""
        told = [Told(**answer) for answer in self._comm.gather(asdict(tell(self._comm.rank, facts)))]
        counts = Counter(json.dumps(answer.facts, sort_keys=True) for answer in told)
        return sorted(told, key=lambda answer: (-counts[json.dumps(answer.facts, sort_keys=True)], answer.rank))

    def _samples(self, dataset: Any, size: int, reading: Reading) -> dict[str, str]:
        """The digests of a dataset, which is read only once."""
        known = self._known.get(id(dataset))
        if known is not None and known[0]() is dataset:
            return known[1]
        found = sample_digests(dataset, size, self._seed, reading)
        with suppress(TypeError):  # a list, say, that cannot be recognised
            self._known[id(dataset)] = weakref.ref(dataset), found
        return found


def sample_digests(dataset: Any, size: int, seed: int, reading: Reading) -> dict[str, str]:
    """A digest of the first, the middle and the last sample, as the loader reads them, up to one that is unreadable.

    Each is read twice: where it is another one then, from a generator of its own say, that stands there instead.

    In a process of its own where the loader has any: a file that a dataset opens when it is first read must not be
    shared by the loader's processes.
    """
    numbers = 2 * sorted({0, size // 2, size - 1})
    plans = [StepPlan(0, 1, [MicroBatchPlan(0, np.array([number]))], Position()) for number in numbers]
    order = Order(size, 1, 1, seed, data_rank=0, data_size=1, equal_counts=False)
    digesting = Reading(min(1, reading.workers), len(plans), collate=digest_of_value)
    found: dict[str, str] = {}
    with suppress(Exception):  # whoever trains on it will hear of that
        for number, batch in zip(numbers, read_steps(dataset, plans, order, digesting), strict=True):
            name, digest = f"sample {number}", batch.micro_batches[0].data
            found[name] = digest if found.get(name, digest) == digest else UNSTEADY
    return found


def _shown(value: Any) -> str:
    """An argument as a person would write it; a function by its name."""
    if not callable(value):
        return repr(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
