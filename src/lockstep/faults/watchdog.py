"""Ranks that wait for each other in vain are found, and one sentence says who waits in what and who is missing.

A thread of every rank looks at its own main thread: in which call of the user's code it is, whether that call waits for
other ranks, and for how long without progress. A second thread talks to the other ranks' watchdogs through the store of
the run, not through a collective. When one rank has waited too long, all are asked what they do; from their answers, or
from who does not answer, follows the cause (faults/hangs.py). Then everything is written into the run folder and the
group ends.
"""

from __future__ import annotations

import datetime
import faulthandler
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.data.workers import Workers
from lockstep.faults.hangs import RankReport, Verdict, explain, no_samples, parted_ways
from lockstep.record.failure import (
    END_OF_OUTPUT,
    OWN_CODE,
    Failure,
    Line,
    frames_of,
    is_users,
    lines_of,
    record,
    shapes_given,
    short_host,
    user_call,
    user_line,
)
from lockstep.runtime import stop_signals
from lockstep.runtime.comm import Comm
from lockstep.runtime.heartbeat import beat_file
from lockstep.runtime.torch_private import collectives_begun, flight_record

TORCH = str(Path(torch.__file__).parent)
AUTOGRAD = f"{TORCH}/autograd/graph.py"
WAITS = (
    f"{TORCH}/distributed/",
    AUTOGRAD,
    f"{OWN_CODE}/data/transfer.py",
    f"{OWN_CODE}/runtime/comm.py",
    f"{OWN_CODE}/runtime/notices.py",
    f"{OWN_CODE}/observe/clock.py",
    f"{OWN_CODE}/runtime/torch_private/waits.py",
    f"{OWN_CODE}/parallel/",
    f"{OWN_CODE}/checkpoint/",
)
"""Code in which a rank may be waiting for others."""
SOON = 5.0
"""Seconds after which ranks that stand still compare the sharded blocks they have called."""
COMPILES = (f"{TORCH}/_dynamo/", f"{TORCH}/_inductor/", f"{TORCH}/_functorch/", f"{TORCH}/fx/")


class Watchdog:
    """Watches one rank, and with the others of its run finds out who holds all of them up."""

    def __init__(self, comm: Comm, timeout: float, folder: Path, launch: Mapping[str, Any]) -> None:
        self._rank, self._world_size = comm.rank, comm.world_size
        self._beat = comm.beat
        self._connect = comm.own_store
        self._timeout = timeout
        self._folder = folder
        self._scratch = Path(launch["scratch"]) if "scratch" in launch else None
        self._round: str = launch.get("round", "")
        self._main = threading.get_ident()
        self._interval = min(1.0, timeout / 10)
        self._patience = min(30.0, max(2.0, timeout / 20))
        """How long the others may take to answer: code that holds Python's lock keeps their threads from it."""
        self._moved = self._heard = time.monotonic()
        self._seen = self._progress()
        self._waited = 0.0
        self._asked_at = (0, 0)
        self._keeper: dict[int, list[object]] = {}
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._watch, name="lockstep-watchdog", daemon=True)]
        if self._world_size > 1:
            self._threads.append(threading.Thread(target=self._talk, name="lockstep-watchdog-talks", daemon=True))

    def start(self) -> None:
        """Begin to watch."""
        if self._scratch is not None:
            self._write_beat([])  # now: before that a launcher takes the run for one with nothing to save
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Watch no longer."""
        self._closing.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=2 * self._interval)

    # What this rank does ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        waits_since = time.monotonic()
        while not self._closing.wait(self._interval):
            stack, now = self._stack(), time.monotonic()
            if self._scratch is not None:
                self._write_beat(stack)
            self._look_for_progress()
            if Workers.awaited is None and not self._waits(stack):
                waits_since = now
            self._waited = now - max(waits_since, self._moved)
            deaf = now - self._heard
            if self._world_size > 1 and self._waited > self._timeout and deaf > self._patience + 2 * self._interval:
                # Whoever keeps the store is rank 0, or on its node.
                self._end(explain([self._report()], self._lead, [0], self._keeper))
            elif self._world_size == 1 and self._waited > self._timeout and Workers.awaited is not None:
                self._end(no_samples(self._report(), self._lead))

    def _stack(self) -> list[Line]:
        """What the training's thread does. No frame is kept: it would keep the tensors of its function alive."""
        return lines_of(sys._current_frames().get(self._main))

    def _waits(self, stack: list[Line]) -> bool:
        """Whether a thread waits for other ranks; while it compiles, or runs the script's code, it does not."""
        waits = _place(stack) == "waits"
        if waits and stack[0][0] == AUTOGRAD:  # on a GPU the backward runs, and is compiled, in another thread
            others = (lines_of(frame) for thread, frame in sys._current_frames().items() if thread != self._main)
            return not any(_place(other) == "compiles" for other in others)
        return waits

    def _progress(self) -> tuple[int, int, int]:
        """What changes while a rank gets on: heartbeat, number of collectives of the default group, samples read."""
        reading = Workers.awaited
        return self._beat.ticks, collectives_begun(), reading.progress if reading is not None else 0

    def _look_for_progress(self) -> None:
        if (latest := self._progress()) != self._seen:
            self._seen, self._moved = latest, time.monotonic()

    def _report(self) -> RankReport:
        stack = self._stack()
        self._look_for_progress()  # now: what was long has perhaps just ended
        phase = self._beat.phase if (reading := Workers.awaited) is None else _awaits(reading)
        return RankReport(
            rank=self._rank,
            host=short_host(),
            pid=os.getpid(),
            phase=phase,
            step=self._beat.step,
            waits=self._waits(stack),
            moving=self._beat.is_busy or time.monotonic() - self._moved < self._timeout / 2,
            call=user_call(stack),
            where=user_line(stack),
            shapes=shapes_given(frames_of(sys._current_frames().get(self._main))),
            stack=[f"{file}:{line} in {name}" for file, line, name in stack],
            gathered=list(self._beat.gathered),
        )

    def _write_beat(self, stack: list[Line]) -> None:
        assert self._scratch is not None
        beat = {"phase": self._beat.phase, "step": self._beat.step, "where": user_line(stack)}
        path = beat_file(self._scratch, self._rank)
        with suppress(OSError):
            temporary = path.with_suffix(".new")
            temporary.write_text(json.dumps(beat), encoding="utf-8")
            temporary.replace(path)

    # What the ranks tell each other -------------------------------------------------------------------------------

    def _talk(self) -> None:
        """A false alarm ends a round. An alarm that is not answered for does not."""
        with suppress(RuntimeError, OSError):  # a store that is gone: _watch sees that nothing is heard any more
            store = self._connect(datetime.timedelta(seconds=30))
            assert store is not None
            store.set(f"who/{self._rank}", json.dumps([short_host(), os.getpid()]))
            self._keeper = {0: json.loads(store.get("who/0"))}
            for number in itertools.count():
                if not self._one_round(dist.PrefixStore(str(number), store), store):
                    return

    def _one_round(self, notes: dist.Store, store: dist.Store) -> bool:
        """Wait for an alarm, or raise one, and see what comes of it; False when the watchdog is closed."""
        has_answered = False
        while not self._closing.wait(self._interval):
            if notes.check(["alarm"]):
                if not has_answered:
                    has_answered = True
                    notes.set(f"report/{self._rank}", json.dumps(asdict(self._report())))
                if notes.check(["verdict"]):
                    told = json.loads(notes.get("verdict"))
                    if told is not None:
                        notes.set(f"told/{self._rank}", "")
                        self._end(Verdict(**told), is_first=False)
                    # Whoever asked has read it. A run of weeks has many rounds, and the store forgets nothing.
                    notes.delete_key(f"report/{self._rank}")
                    break
            elif self._waited > self._timeout and notes.add("alarm", 1) == 1:
                self._ask_everybody(notes, store)
                break
            elif self._is_time_to_ask() and notes.add("alarm", 1) == 1:
                self._ask_everybody(notes, store, only_paths=True)
                break
            self._heard = time.monotonic()
        if not notes.check(["only paths"]):  # else nobody has said that ranks get on
            self._moved = time.monotonic()
        return not self._closing.is_set()

    def _is_time_to_ask(self) -> bool:
        """Whether a sharded model stands still for some seconds: once, ask whether the ranks called the same blocks."""
        place = self._beat.step, len(self._beat.gathered)
        if not self._beat.gathered or self._waited < min(SOON, self._timeout / 2) or place == self._asked_at:
            return False
        self._asked_at = place
        return True

    def _ask_everybody(self, notes: dist.Store, store: dist.Store, only_paths: bool = False) -> None:
        """Collect the reports. It may turn out that somebody only takes long over something.

        With `only_paths`, it is only asked whether ranks of a sharded model have called different blocks.
        """
        reports = {self._rank: self._report()}
        end = time.monotonic() + self._patience
        while len(reports) < self._world_size and time.monotonic() < end:
            self._heard = time.monotonic()
            for rank in range(self._world_size):
                if rank not in reports and notes.check([f"report/{rank}"]):
                    reports[rank] = RankReport(**json.loads(notes.get(f"report/{rank}")))
            time.sleep(0.05)
        parted = parted_ways(list(reports.values()))
        now = self._report()  # what this rank waited for may have come meanwhile
        gets_on = any(report.moving for report in (*reports.values(), now)) or not (now.waits or Workers.awaited)
        if parted is None and (only_paths or gets_on):
            if only_paths:
                notes.set("only paths", "")
            notes.set("verdict", "null")
            return
        silent = [rank for rank in range(self._world_size) if rank not in reports]
        hosts = {rank: json.loads(store.get(f"who/{rank}")) for rank in silent if store.check([f"who/{rank}"])}
        verdict = parted or explain(list(reports.values()), self._lead, silent, hosts)
        details = {"verdict": asdict(verdict), "reports": {rank: asdict(one) for rank, one in sorted(reports.items())}}
        with suppress(OSError):
            (self._folder / "logs" / "hang.json").write_text(json.dumps(details, indent=1), encoding="utf-8")
        notes.set("verdict", json.dumps(asdict(verdict)))

        def everybody_knows() -> bool:
            return all(notes.check([f"told/{rank}"]) for rank in reports if rank != self._rank)

        self._end(verdict, everybody_knows)

    @property
    def _lead(self) -> str:
        return f"no progress for {self._timeout:g} s: "

    def _end(
        self, verdict: Verdict, everybody_knows: Callable[[], bool] = lambda: True, *, is_first: bool = True
    ) -> None:
        """Tell people, leave the stacks in the log, and end this process: its main thread will not."""
        if is_first:
            text, at = verdict.sentence, verdict.where
            failure = Failure(verdict.rank, verdict.host, "hang", text, at, time=time.time())
            record(self._folder, failure, self._round)
        if self._scratch is not None:
            print(END_OF_OUTPUT, file=sys.stderr, flush=True)  # what follows is for the log
        if is_first or self._rank == 0:
            print(f"lockstep: {verdict.sentence}", file=sys.stderr, flush=True)
        if self._world_size > 1 or self._scratch is not None:
            faulthandler.dump_traceback(file=sys.__stderr__ or 2)
        # It may wait for the device, and for ever.
        path = self._folder / "logs" / f"collectives.{self._rank}.json"
        dump = threading.Thread(target=dump_flights, args=(path,), daemon=True)
        dump.start()
        dump.join(2.0)
        if self._rank == 0 and not is_first:
            time.sleep(2 * self._interval)  # it keeps the store, from which others still read
        end = time.monotonic() + 2 * self._interval
        with suppress(RuntimeError, OSError):  # the others read the verdict before the store may go
            while not everybody_knows() and time.monotonic() < end:
                time.sleep(0.05)
        stop_signals.end_at_once(1)


def _awaits(workers: Workers) -> str:
    samples = workers.samples
    at = f"is at sample {samples[0]}" if len(samples) == 1 else f"are at samples {', '.join(map(str, samples))}"
    where = f"its loader's processes {at}" if len(samples) != 1 else f"its loader's process {at}"
    return f"waiting for samples ({where})" if samples else "waiting for samples (its loader's processes read none)"


def dump_flights(path: Path) -> None:
    """Write the last collectives, where torch has recorded them."""
    if (flights := flight_record()) is not None:
        path.write_bytes(flights)


def _place(stack: list[Line]) -> str:
    """Whether a thread waits, compiles, or runs the script's code, by the innermost code that tells."""
    for file, _, _ in stack:
        if file.startswith(COMPILES):
            return "compiles"
        if file.startswith(WAITS):
            return "waits"
        if is_users(file):
            break
    return "runs"
