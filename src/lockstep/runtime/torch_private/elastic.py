"""torch's elastic agent with its private methods under public names, to be overridden (2.11 and 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler


class OpenElasticAgent(LocalElasticAgent):
    """Each method does what torch's own does; torch calls them."""

    def meet(self, worker_group: Any) -> None:
        """Wait for the other nodes."""
        super()._rendezvous(worker_group)

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers of this node; by local rank."""
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def stop_workers(self, worker_group: WorkerGroup) -> None:
        """End the workers of this node."""
        super()._stop_workers(worker_group)

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """How the workers of this node are; called again and again."""
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def allow_restarts(self, count: int) -> None:
        """How often workers that have failed may start again from now on."""
        self._remaining_restarts = count

    @property
    def processes(self) -> Any:
        """The workers' processes, once they are started."""
        return self._pcontext

    def _rendezvous(self, worker_group: Any) -> None:
        self.meet(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self.start_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.stop_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.monitor_workers(worker_group)


def start_programs_by(start: Callable[[dict[str, str]], Any]) -> None:
    """Where torch's agent starts a program, `start(environment)` gives it a process. Only for a launcher's process."""

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:  # noqa: ARG002 - torch calls it so
            return start(env)

    multiprocessing.get_subprocess_handler = Handler  # type: ignore[assignment]
