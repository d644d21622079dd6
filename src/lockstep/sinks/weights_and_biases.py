"""W&B as a service that is told of a run; it reads its own settings (`WANDB_PROJECT`, `WANDB_MODE`, ...)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from lockstep.sinks.tracking import Ending, Sent

SECONDS_TO_CONNECT = 30.0


class WeightsAndBiases:
    """One run of W&B: online, or where that is not possible in files of the run folder, for `wandb sync`."""

    def __init__(self, folder: Path, sent: Sent) -> None:
        import wandb

        sent.run = sent.run or uuid4().hex[:8]
        try:
            self._run = _begin(folder, sent.run, None)
        except wandb.errors.Error as error:
            print(f"W&B is not reached ({error}): its files are in {folder / 'wandb'}, for wandb sync", file=sys.stderr)
            wandb.teardown()  # the try before holds the id
            self._run = _begin(folder, sent.run, "offline")
        self._step = self._run.step

    def describe(self, config: Mapping[str, Any]) -> None:
        """Put the settings of the run beside it."""
        self._run.config.update(dict(config), allow_val_change=True)

    def log(self, numbers: Mapping[str, float], step: int, time: float) -> None:
        """Numbers of a step; W&B takes none for a step before its last."""
        self._step = max(self._step, step)
        self._run.log({**numbers, "_timestamp": time}, step=self._step)

    def flush(self) -> None:
        """W&B sends by itself."""

    def finish(self, how: Ending) -> None:
        """Wait until all is sent, or in the file."""
        self._run.finish(exit_code=0 if how == "finished" else 1)


def _begin(folder: Path, run_id: str, mode: Any) -> Any:
    import wandb

    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", "lockstep"),
        id=run_id,
        name=folder.name,
        dir=folder,
        resume="allow",
        mode=mode,
        # What this process prints and uses is not the training's.
        settings=wandb.Settings(
            console="off", silent=True, x_disable_stats=True, disable_git=True, init_timeout=SECONDS_TO_CONNECT
        ),
    )
