"""Talking to Slurm: submit a script, and ask what became of a job. Every call has a timeout.

A controller that is down lets squeue wait for the better part of a minute, and sacct knows nothing in the first seconds
after a job has ended: so whoever asks gets None where there is no answer, and asks again.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from lockstep.errors import UserError
from lockstep.record.events import JobTold
from lockstep.record.folder import EVENTS
from lockstep.record.log import read_events

SECONDS = 20.0
"""How long a question may take."""

OVER = {
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
    *("OUT_OF_MEMORY", "REVOKED"),
}
"""States in which a job stays."""


@dataclass(frozen=True)
class JobState:
    """What Slurm says of a job at present."""

    job: str
    state: str
    reason: str = ""
    nodes: str = ""
    restarts: int = 0
    exit_code: str = ""
    partition: str = ""
    account: str = ""

    @property
    def is_over(self) -> bool:
        """Whether it will not run any more."""
        return self.state in OVER

    @property
    def event(self) -> JobTold:
        """The fields of a `job` event."""
        fields = asdict(self)
        return cast(JobTold, {"id": fields.pop("job"), "restart": fields.pop("restarts"), **fields})


def check_accepted(script: Path) -> None:
    """Refuse a script that Slurm would not take, in Slurm's own words."""
    if shutil.which("sbatch") is None:
        fix = "submit from a login node, or see the script with --dry-run"
        raise UserError("there is no sbatch on this machine", fix)
    tried = _ask(["sbatch", "--test-only", str(script)])
    if tried is None:
        raise UserError(f"sbatch gave no answer in {SECONDS:.0f} s", "Slurm's controller may be down: try again later")
    if tried.returncode != 0:
        raise UserError(f"Slurm refuses the job ({_last_line(tried.stderr)})", "correct it; --dry-run shows the script")


def submit(script: Path) -> str:
    """Hand a script to Slurm; returns the job's number."""
    done = _ask(["sbatch", "--parsable", str(script)])
    if done is None or done.returncode != 0:
        said = _last_line(done.stderr) if done else f"no answer in {SECONDS:.0f} s"
        raise UserError(f"sbatch failed ({said})", "see `squeue --me` whether the job is there, then try again")
    return done.stdout.strip().split(";")[0]


def last_job(run_folder: Path) -> str | None:
    """The number of the job that a run was last seen in."""
    path = run_folder / EVENTS
    if not path.exists():
        return None
    return next((str(event["id"]) for event in reversed(list(read_events(path))) if event["kind"] == "job"), None)


def state_of(job: str) -> JobState | None:
    """What Slurm says of a job now: its controller, or, some minutes after the end, its accounting."""
    shown = _ask(["scontrol", "--oneliner", "show", "job", job])
    if shown is not None and shown.returncode == 0 and shown.stdout.strip():
        return parse_job(shown.stdout.strip().splitlines()[0])
    starts = history_of(job)
    return starts[-1] if starts else None


def parse_job(line: str) -> JobState:
    """A line of `scontrol --oneliner show job`."""
    told = dict(re.findall(r"(?:^|\s)([A-Za-z/:]+)=(\S*)", line))
    job = f"{told['ArrayJobId']}_{told['ArrayTaskId']}" if told.get("ArrayTaskId") else told["JobId"]
    reason, nodes, partition, account = (
        _known(told.get(key)) for key in ("Reason", "NodeList", "Partition", "Account")
    )
    restarts, code = int(told.get("Restarts") or 0), told.get("ExitCode", "")
    return JobState(job, told["JobState"], reason, nodes, restarts, code, partition, account)


def history_of(job: str) -> list[JobState]:
    """How each start of a job ended, the first one's first; empty where Slurm keeps no accounts."""
    fields = "JobID,State,Reason,NodeList,ExitCode,Partition,Account"
    options = ["--noheader", "--parsable2", "--allocations", "--duplicates", f"--format={fields}", f"--jobs={job}"]
    shown = _ask(["sacct", *options])
    if shown is None or shown.returncode != 0:
        return []
    rows = [line.split("|") for line in shown.stdout.strip().splitlines()]
    return [
        JobState(number, state.split()[0], _known(reason), _known(nodes), restart, *more)
        for restart, (number, state, reason, nodes, *more) in enumerate(rows)
    ]


def _known(text: str | None) -> str:
    return "" if text in (None, "None", "(null)", "None assigned") else str(text)


def _ask(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip() and not line.startswith("Try ")]
    return re.sub(r"^(sbatch|allocation failure|error): ", "", lines[-1]) if lines else "without a word"
