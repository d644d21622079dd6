"""What the launcher starts once per rank: `python -m lockstep.launch.worker train RUN_DIR | script PATH ARGS...`."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

from lockstep.folder import CONFIG, RunFolder
from lockstep.runtime.output import redirect_to

PR_SET_PDEATHSIG = 1

END_OF_OUTPUT = "---- the script ended with an exception ----"
"""What follows in a log is a traceback: it stays there, and the console gets the launcher's verdict instead."""


def main() -> None:
    """Send the output to the rank's log, then train or run the user's script."""
    what, target, *args = sys.argv[1:]
    folder = Path(os.environ["LOCKSTEP_RUN_DIR"])
    rank = int(os.environ["RANK"])
    redirect_to(RunFolder(folder, 1).log_here(rank))
    _die_with_the_launcher()

    from torch.distributed.elastic.multiprocessing.errors import record

    def train() -> None:
        from lockstep.config import from_toml
        from lockstep.join import init
        from lockstep.trainer import Trainer

        with init() as run:
            Trainer(from_toml(folder / CONFIG), run).fit()

    def script() -> None:
        sys.argv = [target, *args]
        sys.path[0] = str(Path(target).resolve().parent)
        runpy.run_path(target, run_name="__main__")

    try:
        record(train if what == "train" else script)()
    except Exception:
        print(END_OF_OUTPUT, flush=True)
        raise


def _die_with_the_launcher() -> None:
    """A launcher that is killed must not leave ranks training on (Linux only; elsewhere this does nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
