"""How contenders take turns, and how their times are put into one table."""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from lockstep.run import Run

Say = Callable[[str], None]


FOLDER = "LOCKSTEP_BENCHMARK_FOLDER"
"""Where ranks under torchrun find a folder of their own, which is gone afterwards."""


def start_ranks(count: int) -> int:
    """This same script under torchrun, which every contender knows; returns its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}"]
        launch += ["--master-addr=127.0.0.1", f"--master-port={port}", *sys.argv]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", FOLDER: folder}
        code = subprocess.run(launch, env=environment, check=False).returncode
        if code:
            for log in sorted(Path(folder).rglob("*.log")):
                print(f"---- {log.name}\n{log.read_text()[-4000:]}", file=sys.stderr)
        return code


def options_of(description: str | None) -> argparse.ArgumentParser:
    """The options that every comparison on CPU ranks has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test: few steps, times without meaning")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each contender (default 20)")
    return parser


def past_the_console(log: Path) -> Say:
    """A print function that stays on the terminal while all else, Lockstep's step lines above all, goes to a file.

    So they cost what they cost in a job without a terminal.
    """
    terminal = os.fdopen(os.dup(1), "w")
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.close(descriptor)
    return lambda text: print(text, file=terminal, flush=True)


class OwnGarbageSetting:
    """Python's garbage collector as each contender left it.

    Lockstep switches it off and collects between steps. That holds for the whole process: the others would have the
    gain without the collections.
    """

    def __init__(self) -> None:
        self._enabled: dict[str, bool] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """The setting of one contender, for its turn."""
        if not self._enabled.get(name, True):
            gc.disable()
        try:
            yield
        finally:
            self._enabled[name] = gc.isenabled()
            gc.enable()


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """The order of one round: each begins with another contender, so that none always has the warm caches."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


@dataclass(frozen=True)
class Turn:
    """What one rank measured while one contender had its turn."""

    seconds: float
    processor_seconds: float
    losses: list[float]


def turn(loop: Iterator[float | Tensor], steps: int) -> Turn:
    """Let one contender do so many steps, once all ranks have come here."""
    dist.barrier()
    began, processor_began = time.perf_counter(), time.process_time()
    losses = [next(loop) for _ in range(steps)]
    seconds, processor_seconds = time.perf_counter() - began, time.process_time() - processor_began
    return Turn(seconds, processor_seconds, [float(loss) for loss in losses])


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference between two loss curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def summary(times: Sequence[float], reference: Sequence[float]) -> dict[str, Any]:
    """Milliseconds a step, and the ratio to the raw loop of the same round."""
    pairs = list(zip(times, reference, strict=True))
    ratios = [mine / raw for mine, raw in pairs]
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "ms": list(times),
        "median_ms": statistics.median(times),
        "extra_us": statistics.median((mine - raw) * 1e3 for mine, raw in pairs),
        "ratio": statistics.median(ratios),
        "ratio_middle_half": [quartiles[0], quartiles[2]],
        "ratio_range": [min(ratios), max(ratios)],
    }


def ratio_cells(one: Mapping[str, Any]) -> str:
    """The ratio with its spread, as cells of a table."""
    half, whole = (f"{low:.3f} to {high:.3f}" for low, high in (one["ratio_middle_half"], one["ratio_range"]))
    return f"{one['ratio']:.3f} | {half} | {whole}"


def machine_text() -> str:
    """Cores, and the load before the measurement: it should be near zero."""
    return f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} at the start"


def versions() -> dict[str, str]:
    """What was compared."""
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "lightning", "accelerate")},
    }


LOADERS = itertools.count(1)


def take_another_model(run: Run) -> str:
    """Forget the model of a run, which a benchmark saves nowhere; returns a name for the loader of the next one."""
    run.engine = None
    return f"loader {next(LOADERS)}"
