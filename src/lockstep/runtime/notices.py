"""Short notes that ranks leave each other in the store of their run.

For threads beside the training: a collective of theirs would have to take its turn among the training's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch.distributed as dist

SHORTEST_WAIT, LONGEST_WAIT = 0.002, 0.05
PATIENCE = 3600.0
"""Seconds after which another rank is taken for dead."""


class Abandoned(Exception):  # noqa: N818 - nothing is wrong
    """Nobody waits for the answer any more."""


class Notices:
    """Notes by key, the same for all ranks. With one process they stay in a dict."""

    def __init__(self, store: dist.Store | None) -> None:
        self._store = store
        self._own: dict[str, str] = {}
        self.abandoned = threading.Event()

    def post(self, key: str, text: str) -> None:
        """Leave a note."""
        if self._store is None:
            self._own[key] = text
        else:
            self._store.set(key, text)

    def has(self, *keys: str) -> bool:
        """Whether there are notes of these keys by now."""
        return all(key in self._own for key in keys) if self._store is None else self._store.check(list(keys))

    def wait(self, keys: Sequence[str]) -> list[str]:
        """The notes of these keys, when all of them are there."""
        if self._store is None:
            return [self._own[key] for key in keys]
        pause, started = SHORTEST_WAIT, time.monotonic()
        while not self._store.check(list(keys)):
            if self.abandoned.is_set():
                raise Abandoned
            if time.monotonic() - started > PATIENCE:
                raise TimeoutError(f"another rank has not answered for {PATIENCE / 60:.0f} minutes")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_WAIT)
        return [self._store.get(key).decode() for key in keys]

    def take_down(self, keys: Sequence[str]) -> None:
        """Remove notes that nobody will read again."""
        for key in keys:
            if self._store is None:
                self._own.pop(key, None)
            else:
                self._store.delete_key(key)
