"""MLflow as a service that is told of a run: at `MLFLOW_TRACKING_URI`, else in a database in the run folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.sinks.tracking import Ending, Sent

if TYPE_CHECKING:
    from mlflow.entities import Metric

METRICS_AT_ONCE = 1000
PARAMS_AT_ONCE = 100
LONGEST_VALUE = 6000
"""What MLflow takes."""

STATUS: Mapping[Ending, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MlflowStore:
    """One run of MLflow, in the experiment `MLFLOW_EXPERIMENT_NAME`, else `lockstep`."""

    def __init__(self, folder: Path, sent: Sent) -> None:
        from mlflow import MlflowClient

        local = folder.absolute() / "mlflow"
        given = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=given or f"sqlite:///{local / 'mlflow.db'}")
        self._metrics: list[Metric] = []
        if not self._goes_on(sent.run):
            sent.run = self._create(folder, None if given else local)
            sent.offset, sent.step, sent.told, sent.before = 0, 0, {}, {}
        self._id = sent.run

    def describe(self, config: Mapping[str, Any]) -> None:
        """Settings as parameters of the run. MLflow lets none change: those of the first start stay."""
        from mlflow.entities import Param

        known = self._client.get_run(self._id).data.params
        named = [(_name(key), str(value)[:LONGEST_VALUE]) for key, value in config.items()]
        params = [Param(key, value) for key, value in named if key not in known]
        for first in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=params[first : first + PARAMS_AT_ONCE])

    def log(self, numbers: Mapping[str, float], step: int, time: float) -> None:
        """Numbers of a step; they are sent with the next flush."""
        from mlflow.entities import Metric

        self._metrics += [Metric(_name(name), float(value), int(1000 * time), step) for name, value in numbers.items()]

    def flush(self) -> None:
        """Send what was logged."""
        metrics, self._metrics = self._metrics, []
        for first in range(0, len(metrics), METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=metrics[first : first + METRICS_AT_ONCE])

    def finish(self, how: Ending) -> None:
        """Say how it ended."""
        self._client.set_terminated(self._id, STATUS[how])

    def _goes_on(self, run: str) -> bool:
        """Whether the run is there already, in this store; it is then said to run again."""
        from mlflow.exceptions import MlflowException

        if not run:
            return False
        try:
            self._client.update_run(run, "RUNNING")
        except MlflowException:
            return False
        return True

    def _create(self, folder: Path, local: Path | None) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "lockstep")
        experiment = self._client.get_experiment_by_name(name)
        where = (local / "artifacts").as_uri() if local else None
        number = experiment.experiment_id if experiment else self._client.create_experiment(name, where)
        return str(self._client.create_run(number, run_name=folder.name).info.run_id)


def _name(name: str) -> str:
    """A name of which MLflow has nothing to say: letters, digits and a few signs."""
    return re.sub(r"[^\w\-./ :]", "_", name, flags=re.ASCII)
