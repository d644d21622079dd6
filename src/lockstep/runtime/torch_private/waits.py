"""Where a rank waits for others: patches of torch's waits and collectives, for a statistic (2.11 and 2.13)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist

from lockstep.runtime.torch_private import replaced

SYNCHRONOUS = (
    *("allreduce", "broadcast", "_allgather_base", "all_gather_single", "_reduce_scatter_base"),
    *("reduce_scatter_single", "alltoall_base", "all_to_all_single"),
)
"""Collectives of a group that NCCL puts on the stream that computes, where nobody asked for them to be asynchronous:
then there is no wait to be seen (some of the names are of torch 2.11, some of 2.13)."""


class WaitsSeen:
    """While it is there, `stalled()` is entered around whatever makes a training thread wait for other ranks.

    `stalled` gives None in threads that do not train. What compiled code waits for inside of its graphs is not seen.
    Only a statistic: where torch has no such method any more, or measuring fails, the run goes on without, and one line
    says so.
    """

    def __init__(
        self, stalled: Callable[[], AbstractContextManager[None] | None], stream: torch.cuda.Stream | None
    ) -> None:
        self._stalled = stalled
        self._undo = ExitStack()
        try:
            self._see(dist.Work, "wait", lambda *_: True)
            if stream is None:
                return
            # How `fully_shard` waits over NCCL. Other streams may wait without holding the one that computes up.
            self._see(torch.cuda.Stream, "wait_event", lambda waiting, *_: waiting == stream)
            for name in SYNCHRONOUS:
                if hasattr(dist.ProcessGroup, name):
                    self._see(dist.ProcessGroup, name, lambda *args: not getattr(args[-1], "asyncOp", True))
        except (AttributeError, TypeError) as error:
            self._give_up(error)

    def close(self) -> None:
        """Leave torch as it was."""
        self._undo.close()

    def _see(self, kind: Any, name: str, counts: Callable[..., bool]) -> None:
        original = getattr(kind, name)

        def wait(*args: Any, **options: Any) -> Any:
            stall = self._begin(counts, args)
            try:
                result = original(*args, **options)
            except BaseException as error:
                self._end(stall, error)
                raise
            self._end(stall, None)
            return result

        self._undo.enter_context(replaced(kind, name, wait))

    def _begin(self, counts: Callable[..., bool], args: Any) -> AbstractContextManager[None] | None:
        try:
            stall = self._stalled() if counts(*args) else None
            if stall is not None:
                stall.__enter__()
            return stall
        except Exception as error:
            self._give_up(error)
            return None

    def _end(self, stall: AbstractContextManager[None] | None, error: BaseException | None) -> None:
        if stall is not None:
            try:
                stall.__exit__(type(error) if error is not None else None, error, None)
            except Exception as failure:
                self._give_up(failure)

    def _give_up(self, error: Exception) -> None:
        self.close()
        print(
            f"lockstep: how long ranks wait for each other is not measured with torch {torch.__version__} ({error!r})",
            file=sys.stderr,
            flush=True,
        )
