"""After a failure: who was to blame, what people are told, and whether the run starts again.

Every node's launcher judges by the same files in the run folder, so that all of them decide alike.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.checkpoint.disk.format import steps_on_disk
from lockstep.faults.hangs import RankReport, mismatched, ranks
from lockstep.launch.nodes import Nodes
from lockstep.record.failure import Failure, failed_folder, forget, of_exit, record, recorded, root_cause, short_host
from lockstep.record.folder import RunFolder, look_back
from lockstep.record.log import EventLog
from lockstep.runtime import stop_signals
from lockstep.runtime.heartbeat import beat_file
from lockstep.runtime.rank_env import AGREED, LAUNCH

STOP_CODES = set(stop_signals.CODES.values())
"""What ranks end with that were asked to stop, and have saved."""

DECISION = "decision"
HEARD = "heard."
"""What a node's note begins with that it has read the decision."""

SECONDS_FOR_NEWS = 3.0
"""How long a node whose ranks only lost another one waits to read what that one died of."""

SECONDS_TO_HEAR = 60.0
"""How long the head keeps what a refused run has left for nodes that have not read the decision."""


@dataclass(frozen=True)
class Outcome:
    """How a launch ended: the exit code, and when it is not 0 what to say, its log, and `more` about the run."""

    code: int
    text: str = ""
    log: Path | None = None
    more: str = ""


@dataclass(frozen=True)
class Policy:
    """What becomes of a run whose ranks fail."""

    restarts: int = 0
    """How many failures may come without a checkpoint in between."""
    on_oom: str = "stop"
    is_ours: Callable[[], bool] = lambda: True
    """Whether a later start of the same job has not taken the run over."""


@dataclass
class Supervisor:
    """Judges the failures of one launch."""

    folder: RunFolder
    nodes: Nodes
    told: dict[str, Any]
    say: Callable[[str, str], None]
    policy: Policy
    outcome: Outcome | None = None
    was_cut_short: bool = False
    """Whether somebody pressed Ctrl-C twice."""
    _left: int = field(init=False)
    _saved: int = field(init=False)
    _first: dict[int, int] = field(default_factory=dict)
    _codes: set[int] = field(default_factory=set)
    _last: tuple[str, int, str, int | None] | None = None
    _round: str = ""
    _has_judged: bool = True
    _failed_at: float | None = None
    _oom_kills: int = 0
    _world: int = 0
    _met: int = 1
    """How many nodes this start has."""

    def __post_init__(self) -> None:
        self._left = self.policy.restarts
        self._saved = self._newest_step()

    # What the agent calls -----------------------------------------------------------------------------------------

    def before_start(self) -> bool:
        """The workers are about to start; False where the run is over.

        Other nodes that have seen a failure may be back before the ranks of this one have heard of it.
        """
        if not self._has_judged and self._recorded() and not self.may_start_again():
            return False
        self._first, self._codes = {}, set()
        Path(self.told["scratch"], AGREED).unlink(missing_ok=True)
        self._oom_kills = oom_kills()
        self.told.pop("restart", None)
        if self._failed_at is not None:
            self.told["restart"] = {"failed": self._failed_at, "stopped": time.time()}
        return True

    def meet(self, nodes: int, world_size: int, round_: str = "") -> None:
        """The nodes of this start have met, and call it by one name: what ranks left before does not count."""
        self._round, self._has_judged = round_, False
        if self.nodes.is_head:
            forget(self.folder.path, round_)
        os.environ[LAUNCH] = json.dumps(self.told | {"round": round_})
        self._failed_at = None
        if not self.nodes.is_alone:
            changed = f", {self._world} before" if self._world not in (0, world_size) else ""
            self.say(f"{nodes} nodes with {world_size} processes{changed}", "info")
        self._world, self._met = world_size, nodes

    def saw_first(self, codes: dict[int, int]) -> None:
        """Some ranks of this node have ended, and were not told to: their exit codes."""
        if self._first:
            return
        self._first = codes
        self._failed_at = time.time()
        known = {failure.rank for failure in self._recorded()}
        for rank, code in codes.items():
            if code < 0 and rank not in known:
                record(self.folder.path, self._died(rank, code), self._round)

    def saw_end(self, codes: set[int]) -> None:
        """These have all ended by themselves since."""
        self._codes = codes

    @property
    def has_begun(self) -> bool:
        """Whether a rank of this node has joined its run: before that there is nothing to save."""
        return any(Path(self.told["scratch"]).glob("beat.*.json"))

    @property
    def knows_of_a_hang(self) -> bool:
        """Whether a watchdog has found out why the ranks hang: they end by themselves, but for those that cannot."""
        return any(failure.kind == "hang" for failure in self._recorded())

    @property
    def has_failed(self) -> bool:
        """Whether a rank of this start has failed, on any node."""
        return bool(self._first or self._recorded())

    def may_start_again(self, stopping: int | None = None) -> bool:
        """The workers of this node have ended: find out why, tell people, and say whether to start again.

        `stopping` is the signal with which somebody asked for the end.
        """
        self._has_judged = True
        self._failed_at = self._failed_at or time.time()
        if not self.policy.is_ours():
            text = f"a later start of this job has taken {self.folder.path} over, this one has ended"
            self.outcome = Outcome(1, text)
            return False
        saved = self._newest_step()
        if self.was_cut_short:
            self.outcome = Outcome(130, f"stopped at once; {_goes_on(saved)}")
            return False
        stops = {stop for code in (*self._first.values(), *self._codes) if (stop := _stop_code(code))}
        if stops:  # on purpose, and the console has shown it; who lost the others meanwhile changes nothing
            self.outcome = Outcome(max(stops))
            return False
        if saved > self._saved:
            self._saved, self._left = saved, self.policy.restarts
        failure, why = self._decide(stopping)
        self._tell(failure, why)
        if why is None:
            return False
        self._last = _signature(failure)
        return True

    # Inside -------------------------------------------------------------------------------------------------------

    def _recorded(self) -> list[Failure]:
        return recorded(self.folder.path, self._round)

    def _decide(self, stopping: int | None) -> tuple[Failure, str | None]:
        """The cause, and why to start again. Of several nodes the first to know decides for all of them."""
        path = failed_folder(self.folder.path, self._round) / DECISION
        if not path.exists():
            failure = self._find_cause()
            has_agreed = Path(self.told["scratch"], AGREED).exists()
            why = None if stopping or has_agreed else self._why_again(failure)
            left = self._left - (why is not None and failure.kind != "memory")
            decision = json.dumps({"failure": asdict(failure), "why": why, "left": left})
            if self.nodes.is_alone:
                self._left = left
                return failure, why
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = path.with_name(f".{short_host()}.{os.getpid()}")
            whole.write_text(decision, encoding="utf-8")
            with suppress(FileExistsError):
                os.link(whole, path)  # all of it, and once
        told = json.loads(path.read_text(encoding="utf-8"))
        path.with_name(f"{HEARD}{short_host()}.{self.nodes.rank}").touch()
        self._left = told["left"]
        return Failure(**told["failure"]), told["why"]

    def _died(self, rank: int, code: int) -> Failure:
        failure = of_exit(rank, code, self.folder.log_here(rank), self._last_seen(rank))
        if code == -9 and oom_kills() > self._oom_kills:
            text = "was killed by the kernel (SIGKILL) because the node ran out of memory"
            return replace(failure, kind="memory", text=text, micro_batch=look_back(self.folder.path).micro_batch)
        return failure

    def _last_seen(self, rank: int) -> str:
        """Where a rank was when its heartbeat was written last."""
        try:
            beat = json.loads(beat_file(Path(self.told["scratch"]), rank).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return ""
        return f"{beat['where']}, {beat['phase']}" if beat["where"] else str(beat["phase"])

    def _find_cause(self) -> Failure:
        end = time.monotonic() + (0.0 if self.nodes.is_alone else SECONDS_FOR_NEWS)
        while True:
            failures = self._recorded()
            cause = root_cause(failures, short_host())
            if cause is not None or time.monotonic() > end:
                break
            time.sleep(0.1)
        if cause is None:
            return self._without_word(failures)
        if cause.kind == "signal" and cause.is_mismatch:
            cause = _in_terms_of_calls(cause, failures)
        return replace(cause, step=self._last_step())

    def _without_word(self, failures: list[Failure]) -> Failure:
        """Nobody left more than that another one is gone: who was it?"""
        step, host, now = self._last_step(), short_host(), time.time()
        left = [rank for rank, code in self._first.items() if code == 0]
        if left:
            text = "ended with exit code 0 while the others were still training: the ranks have different data; let "
            text += "every rank do the same number of steps (run.loader does)"
            return Failure(left[0], host, "left", text, step=step, time=now)
        codes = {rank: code for rank, code in self._first.items() if code > 0}
        told = {failure.rank for failure in failures}
        for rank, code in codes.items():
            if rank not in told:
                return Failure(rank, host, "exit", f"exited with code {code}", step=step, time=now)
        if not self.nodes.is_alone:
            text = "lost the connection to another node: it is down, cut off, or its launcher was ended"
            return Failure(min(self._first, default=-1), host, "signal", text, step=step, time=now)
        first = failures[0] if failures else Failure(-1, host, "exit", "ended without a word", time=now)
        return replace(first, step=step)

    def _why_again(self, failure: Failure) -> str | None:
        """Why another try is worth it; None where it is not."""
        if failure.kind == "memory":
            if self.policy.on_oom == "shrink" and failure.micro_batch is not None and failure.micro_batch > 1:
                return f"with micro_batch = {failure.micro_batch // 2}, the global batch stays"
            return None
        if failure.final or self._left <= 0:
            return None
        if self._last == _signature(failure) and failure.kind in ("exception", "exit", "hang"):
            return None
        if failure.kind in ("exception", "exit") and not failure.is_consequence and self._saved < 0:
            return None
        more = f"{self._left - 1} more such failure{'s' * (self._left != 2)} before a checkpoint would end the run"
        return f"{more}, the same one at once" if failure.kind in ("exception", "exit", "hang") else more

    def _tell(self, failure: Failure, why_again: str | None) -> None:
        """Write it down, and say it: on the way to another try in one line, at the end in full."""
        who = f"rank {failure.rank} on {failure.host}" if failure.rank >= 0 else f"a rank on {failure.host}"
        together = failure.together and self._world > 1
        if together:
            who = f"all {self._world} ranks"
        tells_of_itself = failure.kind == "exception" or (failure.kind == "memory" and failure.text[:4] != "was ")
        verb = "stopped: " if failure.together else "failed: " if tells_of_itself else ""
        sentence = failure.text if failure.kind in ("refused", "hang") else f"{who} {verb}{failure.text}"
        if self.nodes.is_head:
            self._write_down(failure, sentence, why_again)
        if why_again is not None:
            where = f" at {failure.where}" if failure.where else ""
            again = f"starting again {_where_from(self._saved)}; {why_again}"
            self.say(f"{sentence.splitlines()[0]}{where}: {again}", "warning")
            return
        if failure.kind == "refused":
            self._wait_for_all_to_hear()
            self.outcome = Outcome(2, failure.text)
            return
        text = f"{sentence}\n  at {failure.where}" if failure.where else sentence
        lines = []
        same = (failure.kind, failure.text)
        others_recorded = [other for other in self._recorded() if other.rank != failure.rank]
        alike = [other.rank for other in others_recorded if (other.kind, other.text) == same]
        if alike and not together:
            lines.append(f"  {ranks(alike)} failed alike")
        others = max(self._world, len(self._first)) - 1 - len(alike)
        if others > 0 and failure.kind != "hang" and not together:
            lines.append(f"  the other {f'{others} ranks' if others > 1 else 'rank'} ended because of it")
        if self._last == _signature(failure) and failure.kind in ("exception", "exit", "hang"):
            again = "with the same samples" if failure.samples else "at the same step"
            lines.append(f"  it failed the same way {again} before, so it was not started again")
        if not failure.step and failure.kind in ("exception", "exit") and not failure.is_consequence:
            lines.append(f"  no step was done: mend that, then start it again: {typed_command()}")
        else:
            steps = "no step was done" if not failure.step else f"it had done step {failure.step}"
            lines.append(f"  {steps}; {_goes_on(self._saved)}")
        more = "".join(f"\n{line}" for line in lines)
        log = self.folder.log(failure.host, failure.rank) if failure.rank >= 0 else None
        self.outcome = Outcome(1, text, log, more)

    def _wait_for_all_to_hear(self) -> None:
        """The head takes a refused run back, and with it the decision that other nodes may still have to read."""
        if self.nodes.is_alone or not self.nodes.is_head:
            return
        folder, end = failed_folder(self.folder.path, self._round), time.monotonic() + SECONDS_TO_HEAR
        while len(list(folder.glob(f"{HEARD}*"))) < self._met and time.monotonic() < end:
            time.sleep(0.02)

    def _write_down(self, failure: Failure, text: str, why_again: str | None) -> None:
        attempt = max(1, look_back(self.folder.path).attempt)
        shrink = failure.micro_batch // 2 if failure.kind == "memory" and why_again and failure.micro_batch else None
        log = EventLog(self.folder.events, attempt)
        said: dict[str, Any] = {"rank": failure.rank, "host": failure.host, "cause": failure.kind, "text": text}
        said |= {
            "where": failure.where,
            "step": failure.step,
            "restarted": why_again is not None,
            "micro_batch": shrink,
        }
        log.emit("failure", **said)
        log.close()

    def _newest_step(self) -> int:
        return max(steps_on_disk(self.folder.path), default=-1)

    def _last_step(self) -> int | None:
        return max(look_back(self.folder.path).step, self._newest_step()) or None


def _stop_code(code: int) -> int | None:
    """130 or 75 where a process has ended on purpose, or by the signal itself, which it could not act on."""
    if code in STOP_CODES:
        return code
    return stop_signals.CODES[stop_signals.STOPS[signal.Signals(-code)]] if -code in stop_signals.STOPS else None


def _in_terms_of_calls(cause: Failure, failures: list[Failure]) -> Failure:
    """A collective got tensors that do not go together: who gave what, or who was in which call."""
    known = [one for one in failures if one.where and (one.is_consequence or one.is_mismatch)]
    reports = {
        one.rank: RankReport(one.rank, one.host, 0, "", 0, True, False, one.call, where=one.where, shapes=one.shapes)
        for one in known
    }
    found = [reports.pop(one.rank) for one in known if one.is_mismatch]
    if not found or not reports:
        return cause
    verdict = mismatched(found, list(reports.values()))
    return replace(cause, kind="hang", text=verdict.sentence, where=verdict.where)


def _signature(failure: Failure) -> tuple[str, int, str, int | None]:
    """What two failures have in common that have one cause; texts may hold numbers that differ."""
    if failure.samples:  # which are read ahead of the step that they are for
        return failure.kind, failure.rank, failure.samples, None
    return failure.kind, failure.rank, failure.where or failure.text, failure.step


def _where_from(saved: int) -> str:
    return "from the beginning" if saved < 0 else f"from step {saved}"


def _goes_on(saved: int) -> str:
    return f"the same command goes on {_where_from(saved)}: {typed_command()}"


def oom_kills() -> int:
    """How many processes this node's kernel has killed for want of memory."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def typed_command() -> str:
    """The command as the user typed it."""
    return shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "lockstep"), *sys.argv[1:]])
