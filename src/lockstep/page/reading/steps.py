"""Every step of a run, in 80 bytes each, so that no number said of them is an estimate."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import numpy as np

from lockstep.page.reading.series import Array

FIELDS = ("time", "step", "loss", "grad_norm", "lr", "weight", "items", "padding", "seconds", "skipped")
ROW = struct.Struct(f"{len(FIELDS)}d")
pack = ROW.pack
values_of = itemgetter(*FIELDS)


@dataclass(frozen=True)
class Columns:
    """The steps of one reading, in order of their lines; all columns are of equal length."""

    time: Array
    step: Array
    loss: Array
    grad_norm: Array
    lr: Array
    weight: Array
    items: Array
    padding: Array
    seconds: Array
    skipped: Array
    attempt: Array

    def where(self, mask: Array | slice) -> Columns:
        """Some of them."""
        return Columns(*(column[mask] for column in vars(self).values()))

    @property
    def kept(self) -> Array:
        """Which lines count: those after which no line goes on from the same step or an earlier one."""
        if not len(self.step):
            return np.zeros(0, bool)
        lowest_after = np.minimum.accumulate(self.step[::-1])[::-1][1:]
        result: Array = np.append(self.step[:-1] < lowest_after, True)
        return result

    def __len__(self) -> int:
        return len(self.step)


class Steps:
    """Takes steps in."""

    def __init__(self) -> None:
        self._rows = bytearray()
        self._attempts: list[tuple[int, int]] = []  # from which row on they are of which attempt

    def add(self, attempt: int, row: bytes) -> None:
        """One step, packed in the order of `FIELDS`."""
        if not self._attempts or self._attempts[-1][1] != attempt:
            self._attempts.append((len(self._rows) // ROW.size, attempt))
        self._rows += row

    def columns(self) -> Columns:
        """All of them."""
        # Copied: Python does not let the bytes grow while an array looks at them.
        table = np.frombuffer(bytes(self._rows)).reshape(-1, len(FIELDS))
        attempts = np.zeros(len(table), np.int64)
        for (begin, attempt), (end, _) in pairwise([*self._attempts, (len(table), 0)]):
            attempts[begin:end] = attempt
        return Columns(*[*table.T, attempts])

    def __len__(self) -> int:
        return len(self._rows) // ROW.size
