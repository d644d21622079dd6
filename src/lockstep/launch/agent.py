"""torch's elastic agent as Lockstep uses it: starts the workers of this node, watches them, meets other nodes.

What is ours is only when workers are started again: after each failure the `Supervisor` judges it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous

from lockstep.launch.supervise import STOP_CODES, Supervisor
from lockstep.runtime import stop_signals
from lockstep.runtime.nursery import Nursery
from lockstep.runtime.torch_private.elastic import OpenElasticAgent, start_programs_by

if TYPE_CHECKING:
    from lockstep.launch.nodes import Nodes

SECONDS_TO_SAVE = 300
"""How long workers may take to write a checkpoint after a stop was asked for before they are killed."""

SECONDS_TO_END = 12.0
"""How long the other workers may take to end by themselves after one of them failed."""

SECONDS_TO_END_A_HANG = 0.5
"""The same after the verdict on a hang. Who has not ended then is stopped, and will not."""


class Agent(OpenElasticAgent):
    """An elastic agent that asks its supervisor after every failure whether the workers start again."""

    def __init__(self, spec: WorkerSpec, scratch: str, supervisor: Supervisor) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=scratch), exit_barrier_timeout=60)
        self.supervisor = supervisor
        self.stopping = stop_signals.asked()
        """The signal with which somebody asked for the end."""
        self.is_meeting = False
        """Whether it waits for other nodes, and has no workers."""

    def meet(self, worker_group: Any) -> None:
        if not self.supervisor.before_start():
            raise RendezvousClosedError("another node has ended the run")
        if self.stopping is not None:
            raise SignalException("nobody has started yet", self.stopping)
        self.is_meeting = True
        try:
            super().meet(worker_group)
        finally:
            self.is_meeting = False
        if worker_group.group_rank == 0:
            worker_group.store.set("lockstep/round", uuid.uuid4().hex[:12])
        round_ = worker_group.store.get("lockstep/round").decode()
        self.supervisor.meet(worker_group.group_world_size, worker_group.workers[0].world_size, round_)

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started = super().start_workers(worker_group)
        if self.stopping is not None:  # it came between two starts
            self.pass_on(self.stopping)
        return started

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ended = self._ended()
        failed = {code for code in ended.values() if code != 0}
        if failed:
            self.supervisor.saw_first({worker_group.workers[local].global_rank: code for local, code in ended.items()})
            self._let_the_others_end(SECONDS_TO_SAVE if failed & STOP_CODES else SECONDS_TO_END)
        result = super().monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            self.allow_restarts(int(self.supervisor.may_start_again(self.stopping)))
        return result

    def stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 - torch calls it so
        """A node joins, or the workers failed: those that live may write a checkpoint first."""
        if self.processes is not None:
            patience = SECONDS_TO_END if self.supervisor.has_failed else SECONDS_TO_SAVE
            self.processes.close(signal.SIGTERM, int(patience))

    def pass_on(self, number: int) -> None:
        """Hand a signal to all workers that live."""
        ended = self._known_to_have_ended()
        for local_rank, pid in self._pids().items():
            if local_rank not in ended:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    @property
    def has_workers(self) -> bool:
        """Whether one of them lives."""
        return len(self._known_to_have_ended()) < len(self._pids())

    def _pids(self) -> dict[int, int]:
        return self.processes.pids() if self.processes else {}

    def _ended(self) -> dict[int, int]:
        """The exit codes of local ranks that have ended."""
        handlers = self.processes.subprocess_handlers if self.processes is not None else {}
        codes = {rank: one.proc.poll() for rank, one in handlers.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def _known_to_have_ended(self) -> set[int]:
        """The same without asking: in a signal handler, which may have come in the middle of an answer."""
        handlers = self.processes.subprocess_handlers if self.processes is not None else {}
        return {rank for rank, one in handlers.items() if one.proc.returncode is not None}

    def _let_the_others_end(self, patience: float) -> None:
        """Wait for the other workers, and end those that do not: torch gives half a minute, whatever they wait for."""
        began = time.monotonic()
        while len(self._ended()) < len(self._pids()) and time.monotonic() < began + patience:
            if self.supervisor.knows_of_a_hang:
                patience = min(patience, SECONDS_TO_END_A_HANG)
            time.sleep(0.02)
        self.supervisor.saw_end(set(self._ended().values()))
        self.pass_on(signal.SIGKILL)


def run_agent(
    nursery: Nursery, nproc: int, nodes: Nodes, run_id: str, scratch: str, supervisor: Supervisor
) -> RunResult:
    """Start the workers and watch them to the end; a signal to this process goes on to them."""
    start_programs_by(nursery.start)
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # our own lines say it better
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=nodes.head,
        run_id=run_id,
        min_nodes=nodes.least,
        max_nodes=nodes.most,
        local_addr=nodes.address,
        is_host=nodes.is_head,
        join_timeout=nodes.patience,
        last_call_timeout=5 if nodes.most > nodes.least else 1,
        keep_alive_interval=2,
        keep_alive_max_attempt=3,
        read_timeout=20,
    )
    spec = WorkerSpec(
        role="lockstep",
        local_world_size=nproc,
        entrypoint=sys.executable,
        rdzv_handler=rendezvous.get_rendezvous_handler(parameters),
        max_restarts=0,
        monitor_interval=0.1,
        local_addr=nodes.address,
    )
    agent = Agent(spec, scratch, supervisor)
    try:
        with _signals_passed_on(agent):
            result: RunResult = agent.run()
            return result
    finally:
        if not nodes.is_alone and nodes.is_head:
            with suppress(Exception):  # the head may be gone
                spec.rdzv_handler.shutdown()


@contextmanager
def _signals_passed_on(agent: Agent) -> Iterator[None]:
    """While the workers run, a signal to the launcher is one to all of them; they decide what to do with it."""

    interrupted = False

    def handle(number: int, _: Any) -> None:
        nonlocal interrupted
        stop_signals.remember(number)
        is_first, agent.stopping = agent.stopping is None, agent.stopping or signal.Signals(number)
        if agent.is_meeting and is_first:
            raise SignalException("nobody has started yet", agent.stopping)
        if number == signal.SIGINT:
            # Who waits in C code would not hear of a second one, and who still imports has nothing to save.
            if interrupted or not agent.supervisor.has_begun:
                agent.supervisor.was_cut_short |= agent.has_workers
                number = signal.SIGKILL
            interrupted = True
        agent.pass_on(number)

    # Its own handlers, which torch would put in the place of these, end the launcher before its workers.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    before = stop_signals.listen(handle)
    try:
        yield
    finally:
        stop_signals.give_back(before)
