"""A rank of a launch: `python -m lockstep.launch.worker DESCRIPTOR train RUN_DIR | script PATH ARGS...`.

`time RUN_DIR` only does the steps of a training.

The launcher starts it once, and every rank of this node is a fork of it, see nursery.py.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import random
import runpy
import sys
from pathlib import Path

from lockstep.runtime import stop_signals
from lockstep.runtime.nursery import be_born
from lockstep.runtime.rank_env import LAUNCH


def main() -> None:
    """Once this is a rank, send the output to its log, then train or run the user's script."""
    descriptor, what, target, *args = sys.argv[1:]
    be_born(int(descriptor), what, target)
    stop_signals.listen()
    stop_signals.release()
    from lockstep.observe.output import redirect_to
    from lockstep.record.failure import END_OF_OUTPUT, START_OF_OUTPUT, of_exception, record
    from lockstep.record.folder import CONFIG, RunFolder

    atexit.register(gc.freeze)  # else Python looks through all objects once more at its end, for a second or two
    launch = json.loads(os.environ[LAUNCH])
    folder = Path(os.environ["LOCKSTEP_RUN_DIR"])
    rank = int(os.environ["RANK"])
    redirect_to(RunFolder(folder, 1).log_here(rank))
    faulthandler.enable()  # a segmentation fault leaves the line it came from in the log
    print(START_OF_OUTPUT, flush=True)

    _seed_script(launch.get("options", {}).get("seed", 0))

    def train() -> None:
        from lockstep.config.layers import from_toml
        from lockstep.init_run import init
        from lockstep.trainer import Trainer

        with init() as run:
            Trainer(from_toml(folder / CONFIG), run).fit()

    def time() -> None:
        from lockstep.config.layers import from_toml
        from lockstep.init_run import init
        from lockstep.trainer import Trainer

        with init() as run:
            trainer = Trainer(from_toml(folder / CONFIG), run)
            for out in trainer:
                if out.step == trainer.loader.total_steps:
                    break  # before the last scores and the checkpoint

    def script() -> None:
        sys.argv = [target, *args]
        sys.path[0] = str(Path(target).resolve().parent)
        runpy.run_path(os.path.abspath(target), run_name="__main__")  # as plain python has it in __file__

    try:
        {"train": train, "time": time, "script": script}[what]()
    except stop_signals.StopError as stop:
        raise SystemExit(stop.code) from None
    except SystemExit as error:
        if error.code not in (None, 0, 75, 130):
            record(folder, of_exception(error, rank), launch["round"])
        raise
    except BaseException as error:
        print(END_OF_OUTPUT, flush=True)
        record(folder, of_exception(error, rank), launch["round"])
        raise
    finally:
        stop_signals.ignore()


def _seed_script(seed: int) -> None:
    """What a script draws before it joins the others, to shuffle a list of files say, is the same on every rank."""
    if "torch" in sys.modules:
        from lockstep.runtime.seeds import seed_host, seed_of

        seed_host(seed_of(seed, "script"))
    else:  # imported later, by a script that sets variables first, torch begins with one seed everywhere
        import numpy as np

        random.seed(seed)
        np.random.seed(seed % 2**32)


if __name__ == "__main__":
    main()
