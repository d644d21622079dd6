"""Writing a checkpoint: a transaction of all ranks, beside the training or while it waits.

    rank 0      makes the folder of the step inside that of this attempt, if there is space
    every rank  writes its shard, with a digest of every block, and a fragment of the index
    rank 0      puts the fragments together and renames the folder to its place: now it is a checkpoint
    every rank  reads its shard back from the disk
    rank 0      deletes older checkpoints

A rank tells the others how far it is by notes in their store, so that none of this takes part in the training's
collectives. Whatever fails, what was there before stays.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

import psutil
import torch

from lockstep.checkpoint.disk import attempts
from lockstep.checkpoint.disk import format as fmt
from lockstep.checkpoint.disk.files import Entry, ShardReader, aligned, dtype_name, write_shard
from lockstep.checkpoint.disk.format import Chunk, DamageError, Index, StoredFile, StoredTensor
from lockstep.errors import SaveError
from lockstep.parallel.boxes import Box
from lockstep.parallel.held import Held
from lockstep.runtime.heartbeat import Beat
from lockstep.runtime.notices import Abandoned, Notices
from lockstep.runtime.torch_private import foreach_copy
from lockstep.text.units import bytes_text

SPARE_MEMORY = 1 << 28
SPARE_DISK = 1 << 26
"""What a save leaves free: for logs and the events, which have to be written even when the disk is full."""


@dataclass
class Saved:
    """A checkpoint on its way to the disk, and what became of it."""

    step: int
    best: bool
    bytes: int
    began: float
    stall: float = 0.0
    """How long the training waited for it."""
    seconds: float = 0.0
    """How long it took until it was complete on disk."""
    problem: str | None = None
    note: str | None = None
    """What people should know of it, though it is there."""
    committed: threading.Event = field(default_factory=threading.Event)
    """Set when it is complete, or will not be."""

    @property
    def is_complete(self) -> bool:
        """Whether it is on disk, all of it. All ranks agree on that."""
        return self.seconds > 0

    def failure(self) -> str:
        """What went wrong, in a sentence."""
        what = "was written, but not so that it can be read back" if self.is_complete else "was not written"
        return f"the checkpoint of step {self.step} {what}: {self.problem}"


class Fragment(fmt.IndexPart):
    """What one rank tells of its shard."""

    file: StoredFile | None
    tensors: dict[str, StoredTensor]


class Writer:
    """Writes one checkpoint at a time, in a thread."""

    def __init__(self, run_folder: Path, attempt: Path, notices: Notices, rank: int, ranks: int, beat: Beat) -> None:
        self._run_folder = run_folder
        self._attempt = attempt
        self._notices = notices
        self._rank = rank
        self._ranks = ranks
        self._beat = beat
        self.staging = Staging()
        self._number = 0
        self._notes_of_last: list[str] = []
        self._thread: threading.Thread | None = None
        self.current: Saved | None = None

    def start(
        self, saved: Saved, parts: Sequence[Held], index: Index, retire: Callable[[], str | None], *, wait: bool
    ) -> None:
        """Begin to write; without `wait` from copies, while the training goes on. The one before has to be finished.

        `index` lacks files and tensors. `retire` is called by rank 0 when the new checkpoint was read back.
        """
        assert self._thread is None
        tensors = {_entry(held, box).name: held.part[box.here] for held in parts for box in held.boxes}
        if not wait:
            tensors = self.staging.copies(tensors)
        self.current = saved
        self._number += 1
        transaction = partial(self._transaction, saved, parts, tensors, index, retire)
        self._thread = threading.Thread(
            target=self._run, args=(saved, transaction), name="lockstep-checkpoint", daemon=True
        )
        self._thread.start()
        if wait:
            saved.committed.wait()
        saved.stall = time.monotonic() - saved.began

    def wait(self) -> bool:
        """Wait until nothing is written any more; false when there was nothing to wait for."""
        if self._thread is None:
            return False
        self._thread.join()
        self._thread = None
        return True

    def abandon(self, seconds: float) -> None:
        """The run is about to fail. A checkpoint that only has to be completed gets some time for it."""
        if self._thread is not None and self.current is not None:
            self.current.committed.wait(seconds)
            self._notices.abandoned.set()
            self._thread.join(seconds)
        self._notices = Notices(None)  # the store, and with it a server, is not kept alive by this

    def _run(self, saved: Saved, transaction: Callable[[], None]) -> None:
        try:
            transaction()
        except Abandoned:
            saved.problem = saved.problem or "the run ended"
        except BaseException as error:  # nobody else would hear of it
            saved.problem = _explain(error, self._attempt)
        finally:
            saved.committed.set()

    def _transaction(
        self,
        saved: Saved,
        parts: Sequence[Held],
        tensors: dict[str, torch.Tensor],
        index: Index,
        retire: Callable[[], str | None],
    ) -> None:
        def key(what: str, rank: int = 0) -> str:
            return f"{self._number}/{what}/{rank}"

        def together(what: str, work: Callable[[], None]) -> None:
            """Every rank does something; rank 0 knows when all have, and who could not."""
            self._notices.post(key(what, self._rank), self._attempted(work))

        def at_rank_0(what: str, work: Callable[[], None], after: str | None = None) -> None:
            """Rank 0 does something, after all ranks did something else; what goes wrong is everybody's problem."""
            if self._rank == 0:
                problems = []
                if after is not None:
                    keys = [key(after, rank) for rank in range(self._ranks)]
                    problems = [told for told in self._notices.wait(keys) if told]
                    self._notices.take_down(keys)
                self._notices.post(key(what), problems[0] if problems else self._attempted(work))
            if problem := self._notices.wait([key(what)])[0]:
                raise SaveError(problem)

        staging = self._attempt / fmt.step_name(saved.step)
        final = fmt.step_folder(self._run_folder, saved.step)
        fragment = Fragment(file=None, tensors={})

        def write() -> None:
            nonlocal fragment
            fragment = _write(staging, self._rank, parts, tensors)

        def commit() -> None:
            _commit(staging, final, index, self._ranks)
            attempts.check_still_ours(self._attempt)

        try:
            at_rank_0("space", lambda: _make_folder(staging, saved.bytes))
            together("written", write)
            tensors.clear()
            at_rank_0("committed", commit, after="written")
        except SaveError:
            if self._rank == 0:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        saved.seconds = time.monotonic() - saved.began
        saved.committed.set()

        def tidy_up() -> None:
            saved.note = retire()

        together("read back", lambda: _read_back(final, self._rank, fragment))
        at_rank_0("retired", tidy_up, after="read back")
        if self._rank == 0:
            # Those of this save are read until the next one, which begins when all ranks are done with them.
            self._notices.take_down(self._notes_of_last)
            self._notes_of_last = [key(what) for what in ("space", "committed", "retired")]

    def _attempted(self, work: Callable[[], None]) -> str:
        """Do something; returns what went wrong, nothing if nothing did."""
        try:
            with self._beat.busy():
                work()
        except BaseException as error:  # the other ranks wait for an answer
            return _explain(error, self._attempt, f"rank {self._rank}: " if self._ranks > 1 else "")
        return ""


class Staging:
    """Memory of the host that tensors are copied to before they are written, kept from one save to the next."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copies(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of tensors, complete when this returns."""
        for name in self._buffers.keys() - tensors.keys():
            del self._buffers[name]
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if tensors:
            foreach_copy([self._buffers[name] for name in tensors], list(tensors.values()), non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()
        return dict(self._buffers)

    def has_room_for(self, size: int, ranks: int) -> bool:
        """Whether the host, on which so many ranks do the same, has the memory for copies of so many bytes."""
        held = sum(buffer.nbytes for buffer in self._buffers.values())
        return bool(psutil.virtual_memory().available / ranks + held > size + SPARE_MEMORY)


def check_space(folder: Path, size: int) -> None:
    """Refuse to begin to write more than the disk can hold."""
    if short := room_short_of(folder, size):
        raise OSError(errno.ENOSPC, short, str(folder))


def room_short_of(folder: Path, size: int) -> str:
    """What a disk lacks to write so many bytes and to keep some for logs, in words; empty where it lacks nothing."""
    free = shutil.disk_usage(folder).free
    if free >= size + SPARE_DISK:
        return ""
    missing = bytes_text(size + SPARE_DISK - free)
    needs = f"it needs {bytes_text(size)} and leaves {bytes_text(SPARE_DISK)} for logs"
    return f"{needs}, and {bytes_text(free)} are free: {missing} too little"


def _make_folder(staging: Path, size: int) -> None:
    check_space(staging.parent, size)
    shutil.rmtree(staging, ignore_errors=True)  # of a save that failed
    staging.mkdir()


def _entry(held: Held, box: Box) -> Entry:
    whole = box.shape == held.shape
    name = held.name if whole else f"{held.name}@{','.join(map(str, box.start))}"
    return Entry(name, dtype_name(held.name, held.part.dtype), box.shape)


def _write(staging: Path, rank: int, parts: Sequence[Held], tensors: dict[str, torch.Tensor]) -> Fragment:
    """Write the shard of this rank and what the index has to say of it."""
    boxes = {_entry(held, box): (held.name, box) for held in parts for box in held.boxes}
    file, found = None, {held.name: list[Chunk]() for held in parts}
    if boxes:
        entries = aligned(boxes)
        path = staging / fmt.shard_name(rank)
        file, chunks = write_shard(path, entries, (tensors[entry.name].cpu() for entry in entries))
        for entry, chunk in zip(entries, chunks, strict=True):
            name, box = boxes[entry]
            found[name].append(chunk.model_copy(update={"start": list(box.start)}))
    stored = {
        held.name: StoredTensor(
            dtype=dtype_name(held.name, held.part.dtype), shape=list(held.shape), chunks=found[held.name]
        )
        for held in parts
    }
    fragment = Fragment(file=file, tensors=stored)
    _fragment_path(staging, rank).write_text(fragment.model_dump_json(), encoding="utf-8")
    return fragment


def _fragment_path(staging: Path, rank: int) -> Path:
    return staging / f".fragment-{rank:05d}.json"


def _commit(staging: Path, final: Path, index: Index, ranks: int) -> None:
    """Put the index together and rename the folder to its place."""
    files: dict[str, StoredFile] = {}
    tensors: dict[str, StoredTensor] = {}
    for rank in range(ranks):
        path = _fragment_path(staging, rank)
        fragment = Fragment.model_validate_json(path.read_bytes())
        path.unlink()
        if fragment.file is not None:
            files[fmt.shard_name(rank)] = fragment.file
        for name, part in fragment.tensors.items():
            before = tensors.get(name)
            chunks = [*(before.chunks if before else []), *part.chunks]
            tensors[name] = part.model_copy(update={"chunks": chunks})
    for name, tensor in tensors.items():
        written, whole = sum(prod(chunk.shape) for chunk in tensor.chunks), prod(tensor.shape)
        if written != whole:
            raise SaveError(f"of {name} {written} of {whole} numbers were written")
    index = index.model_copy(update={"files": files, "tensors": dict(sorted(tensors.items()))})
    fmt.write_index(staging, index)
    if final.exists():  # imported weights, of which step 0 is now that of a training
        final.rename(final.with_name(f".{final.name}.set-aside-{index.attempt}"))
    staging.rename(final)
    fmt.sync_folder(final.parent)


def _read_back(folder: Path, rank: int, fragment: Fragment) -> None:
    """Check what the disk has of this rank's shard, not what the system still has in memory of it."""
    if fragment.file is None:
        return
    name = fmt.shard_name(rank)
    with (folder / name).open("rb") as file, suppress(OSError, AttributeError):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    reader = ShardReader(folder, {name: fragment.file})
    try:
        reader.check_header(name)
        for tensor in fragment.tensors.values():
            for chunk in tensor.chunks:
                reader.check(chunk, prod(chunk.shape) * fmt.ITEM_BYTES[tensor.dtype])
    finally:
        reader.close()


def _explain(error: BaseException, attempt: Path, who: str = "") -> str:
    if isinstance(error, OSError) and not attempt.exists():
        return attempts.TAKEN_OVER
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{who}the disk is full ({error.strerror}): free some space and start the same command again"
    if isinstance(error, OSError):
        name = f" ({Path(str(error.filename)).name})" if error.filename else ""
        return f"{who}{error.strerror or error}{name}"
    if isinstance(error, SaveError | DamageError):
        return str(error)
    return f"{who}{type(error).__name__}: {error}"
