"""How long the algorithms take: as the alpha-beta model says, and over cables that are as slow as they are told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from lockstep.lab.cables import NotHereError, run_on_own_network
from lockstep.launch.probe import Seat, first_trouble
from lockstep.layout import Layout
from lockstep.links.collective_cost import Algorithm, Collective, Link, predict

PINGS = 50
SECONDS_TO_SPARE = 60.0


@dataclass(frozen=True)
class MeasuredTimes:
    """What the cables gave: the cost of a message, and the seconds of every algorithm until its last rank was done."""

    link: Link
    seconds: dict[Algorithm, float]


def measure(
    collective: Collective,
    algorithms: Sequence[Algorithm],
    ranks: int,
    size: int,
    bytes_per_second: float,
    hear: Callable[[Algorithm, float, float], None],
) -> MeasuredTimes:
    """Run the algorithms over a shaped network of the lab's own.

    `hear` gets the name of the one that runs, several times a second: its seconds so far, and those to expect.

    Raises NotHereError where there can be no such network, or it does not work.
    """
    ideal = Link(0.0, 1 / bytes_per_second)
    expected = {algorithm: predict(collective, algorithm, ranks, size, ideal) for algorithm in algorithms}

    def work(seat: Seat) -> Any:
        return _measure(seat, collective, algorithms, size)

    answers = run_on_own_network(
        work,
        ranks,
        bytes_per_second,
        lambda now: hear(now[0], now[1], expected[now[0]]),
        2 * sum(expected.values()) + SECONDS_TO_SPARE,
    )
    if trouble := first_trouble(answers):
        raise NotHereError(f"rank {trouble.rank} {trouble.trouble}")
    alpha = answers[0].value[0]
    times = [answer.value[1] for answer in answers]
    seconds = {
        algorithm: max(of_rank[algorithm][1] for of_rank in times) - min(of_rank[algorithm][0] for of_rank in times)
        for algorithm in algorithms
    }
    return MeasuredTimes(Link(alpha, 1 / bytes_per_second), seconds)


def _measure(
    seat: Seat, collective: Collective, algorithms: Sequence[Algorithm], size: int
) -> tuple[float, dict[Algorithm, tuple[float, float]]]:
    """On one rank: alpha, and when each algorithm began and ended here."""
    import torch

    from lockstep.lab.algorithms import run_algorithm
    from lockstep.lab.wire import Wire

    rank, ranks = seat.place.rank, seat.place.world_size
    comm = seat.join(Layout(dp=ranks), torch.device("cpu"), "gloo", 600.0)
    alpha = _ping_pong(rank, ranks)
    times: dict[Algorithm, tuple[float, float]] = {}
    for algorithm in algorithms:
        given = torch.ones(max(1, size // 4))
        wire = Wire(rank, ranks, given, apart=collective == "all-to-all")
        comm.barrier()
        with _telling_the_time(seat, algorithm) if rank == 0 else nullcontext():
            began = time.monotonic()  # one clock for all processes of a machine
            run_algorithm(collective, algorithm, wire)
            times[algorithm] = (began, time.monotonic())
            comm.barrier()
    return alpha, times


@contextmanager
def _telling_the_time(seat: Seat, algorithm: Algorithm) -> Iterator[None]:
    """Tell the command again and again how long this has taken; the command itself, which forks, has no threads."""
    done, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while True:
            seat.tell((algorithm, time.monotonic() - began))
            if done.wait(0.25):
                return

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _ping_pong(rank: int, ranks: int) -> float:
    """Half of the time that a message of one number takes to rank 1 and back; the median of many."""
    import torch
    import torch.distributed as dist

    ball = torch.zeros(1)
    laps = []
    for _ in range(PINGS if rank < 2 and ranks > 1 else 0):
        began = time.perf_counter()
        if rank == 0:
            dist.send(ball, 1)
            dist.recv(ball, 1)
        else:
            dist.recv(ball, 0)
            dist.send(ball, 0)
        laps.append((time.perf_counter() - began) / 2)
    return sorted(laps)[len(laps) // 2] if laps else 0.0
