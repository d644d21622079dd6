"""What it costs to save and to load a training: Lockstep next to torch.save, torch's DCP and Lightning's Fabric.

    python benchmarks/checkpoint.py                                   # about 1 GB: the weights and AdamW's state
    python benchmarks/checkpoint.py --megabytes 50 --rounds 1         # a smoke test
    python benchmarks/checkpoint.py --folder /some/disk               # on the disk that is to be measured

Two settings. "one process" saves and loads a model that is not cut. "4 ranks" saves one that is sharded over four
(fsdp=4, gloo) and loads it sharded over two. The contenders take turns in rotating order, and every turn has processes
of its own: none finds the memory, the threads or the garbage of another. All of them save the same model, sharded
alike, with an optimizer whose state is full. What is loaded is compared with what was saved; a difference fails the
benchmark. A time is that of the slowest rank.

    save      until the checkpoint is on the disk, fsync included. The second of two saves, as the third would be.
    stall     until the call returns: what the training waits for, of the second save and of the first.
    load      into a model that exists, from files that are not in memory; for DCP with its get_state_dict and
              set_state_dict. "read" is the reading call alone, "again" is a second load, out of the page cache.
    cpu       the processor time of saving and loading, of the busiest rank. It hardly depends on what else the machine
              does, so on a busy one it is the figure to look at; waiting for the disk is not in it.
    memory    how far a process grew while it saved, both times, in sizes of what it has of model and optimizer.

"torch.save, own part" has a file for each rank: the least that torch.save can take, but nothing else can load it.
Lockstep reads a checkpoint back from the disk after it is complete; that is told apart, nobody else does it.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import math
import multiprocessing
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt2 import GPT2, Shape
from measuring import in_turn, machine_text, options_of, versions
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lockstep
from lockstep.checkpoint.disk.format import read_index, step_folder
from lockstep.checkpoint.manage import Checkpoints
from lockstep.engine import Engine
from lockstep.run import Run

SEED = 0
LAYERS, HEADS, WORDS_PER_WIDTH = 8, 8, 20
BYTES_PER_PARAMETER = 12
"""fp32 weights and the two moments of AdamW."""
MOST_SECONDS = 300
PRELOADED = ["torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "lightning.fabric"]
PRELOADED += ["lightning.fabric.strategies.model_parallel", "lockstep"]

STALL, SLOWER, MEMORY = 0.10, 1.0, 1.2
"""The targets: a background save's stall as a part of torch.save's time, the times of DCP, and the memory."""


@dataclass(frozen=True)
class Place:
    """One process of a turn."""

    rank: int
    ranks: int
    shape: Shape
    folder: Path
    """Where all processes of a turn write, checkpoints and what they measured."""
    port: int


class Saving(Protocol):
    """A training that can be saved."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def save(self, number: int) -> None:
        """What the training waits for."""

    def wait_until_on_disk(self) -> None: ...

    def wait_until_done(self) -> None:
        """Until nothing happens in the background any more."""

    def checkpoint(self, number: int) -> Path: ...


# The training ---------------------------------------------------------------------------------------------------------


def shape_of(megabytes: float) -> Shape:
    """A GPT-2 whose weights and AdamW state have this size together."""
    parameters_of_width_1 = 12 * LAYERS + 2 * WORDS_PER_WIDTH
    width = math.sqrt(megabytes * 1e6 / BYTES_PER_PARAMETER / parameters_of_width_1)
    width = max(16, 16 * round(width / 16))
    return Shape(LAYERS, width, HEADS, context=64, vocabulary=WORDS_PER_WIDTH * width)


def build(shape: Shape, filled: bool) -> GPT2:
    """The model, with an untied head: DCP would write a tied one twice. Zeros where it is about to be loaded."""
    with torch.device("meta"):  # initial values take longer than a save, and do not matter here
        model = GPT2(shape)
        model.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1, generator=generator) if filled else parameter.zero_()
    return model


def shard(model: nn.Module, mesh: Any = None) -> nn.Module:
    """As Lockstep shards it: every block, and what is left."""
    assert isinstance(model, GPT2)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def fill_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """As after a step, but without the time of one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()


def parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """What this rank has of the weights and of AdamW's moments."""
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]):
            yield tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sums(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """A number for every tensor, which for those of all ranks together is that of the whole."""
    return [float(part.double().sum()) for part in parts(model, optimizer)]


# The contenders -------------------------------------------------------------------------------------------------------


class Lockstep:
    """`run.save()`, with `wait` or without."""

    def __init__(self, place: Place, *, wait: bool) -> None:
        self._wait = wait
        self._run = lockstep_run(place, place.folder / "run")
        self._engine = set_up(self._run, lambda: build(place.shape, filled=True))
        self.model, self.optimizer = self._engine.model, self._engine.optimizer

    def save(self, number: int) -> None:
        self._engine.steps_done = number
        self._run.save(wait=self._wait)

    def wait_until_on_disk(self) -> None:
        current = self._run._checkpoints._writer.current
        assert current is not None
        current.committed.wait()

    def wait_until_done(self) -> None:
        self._run._checkpoints.wait()

    def checkpoint(self, number: int) -> Path:
        return step_folder(self._run.folder.path, number)


def lockstep_run(place: Place, run_dir: Path, resume: str = "auto") -> Run:
    alone = place.ranks == 1
    return lockstep.init(
        "single" if alone else f"fsdp={place.ranks}",
        rank=place.rank,
        world_size=place.ranks,
        store=None if alone else dist.FileStore(str(run_dir.with_suffix(".store")), place.ranks),
        run_dir=run_dir,
        resume=resume,
        seed=SEED,
        device="cpu",
    )


def set_up(run: Run, build_model: Callable[[], nn.Module]) -> Engine:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return model(batch["x"], batch["y"], reduction="sum"), batch["y"].numel()

    return run.setup(build_model, loss, optimizer=adamw)


def load_lockstep(place: Place, checkpoint: Path) -> dict[str, Any]:
    run = lockstep_run(place, place.folder / "loaded", resume=str(checkpoint))
    restore = Checkpoints.restore
    result: dict[str, Any] = {}

    def timed_restore(checkpoints: Checkpoints, engine: Engine) -> None:
        def work() -> None:
            read_index(checkpoint)  # the run has read it already, which is a part of loading
            restore(checkpoints, engine)

        result.update(timed_load(place, checkpoint, work))

    with mock.patch.object(Checkpoints, "restore", timed_restore):
        engine = set_up(run, lambda: build(place.shape, filled=False))
    return {**result, "sums": sums(engine.model, engine.optimizer)}


class Peer:
    """A plain model and its optimizer, and the files it writes."""

    def __init__(self, place: Place, *, filled: bool = True) -> None:
        self.place = place
        store = dist.FileStore(str(place.folder / f"peer-{filled}.store"), place.ranks)
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.ranks)
        self.model: nn.Module = build(place.shape, filled)
        if place.ranks > 1:
            shard(self.model)
        self.optimizer = adamw(self.model.parameters())

    def checkpoint(self, number: int) -> Path:
        return self.place.folder / f"saved-{number}"

    def save(self, number: int) -> None:
        raise NotImplementedError

    def wait_until_on_disk(self) -> None:
        pass

    def wait_until_done(self) -> None:
        pass


class TorchSave(Peer):
    """One file of whole tensors, or one for every rank with its own parts."""

    def __init__(self, place: Place, *, own_part: bool = False) -> None:
        super().__init__(place)
        self._own_part = own_part

    def save(self, number: int) -> None:
        path = self.checkpoint(number)
        path.mkdir(exist_ok=True)
        if self._own_part:
            torch.save([*parts(self.model, self.optimizer)], path / f"{self.place.rank}.pt")
        elif self.place.ranks == 1:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, path / "whole.pt")
        else:
            model, optimizer = get_state_dict(self.model, self.optimizer, options=WHOLE)
            if self.place.rank == 0:
                torch.save({"model": model, "optimizer": optimizer}, path / "whole.pt")
        put_on_disk(path)
        dist.barrier()


WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def load_torch(place: Place, checkpoint: Path) -> dict[str, Any]:
    peer = Peer(place, filled=False)
    reading: list[float] = []

    def work() -> None:
        began = time.perf_counter()
        # Mapped where each rank wants a part only: nobody reads what another one has.
        state = torch.load(checkpoint / "whole.pt", weights_only=True, mmap=place.ranks > 1)
        reading.append(time.perf_counter() - began)
        if place.ranks == 1:
            peer.model.load_state_dict(state["model"])
            peer.optimizer.load_state_dict(state["optimizer"])
        else:
            set_state_dict(
                peer.model,
                peer.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=WHOLE,
            )

    return loaded(peer, checkpoint, work, reading)


class Dcp(Peer):
    """DCP as its tutorial has it; in the background with a process group of its own."""

    def __init__(self, place: Place, *, background: bool = False, keep_buffers: bool = False) -> None:
        super().__init__(place)
        self._background = background
        self._group = dist.new_group(backend="gloo")
        self._stager = DefaultStager(StagingOptions(False, False, False, False)) if keep_buffers else None
        self._future: Future[Any] | None = None

    def save(self, number: int) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        path = self.checkpoint(number)
        if self._background:
            future = dcp.async_save(state, checkpoint_id=path, process_group=self._group, async_stager=self._stager)
            assert isinstance(future, Future)
            self._future = future
        else:
            dcp.save(state, checkpoint_id=path)

    def wait_until_on_disk(self) -> None:
        if self._future is not None:
            self._future.result()


def load_dcp(place: Place, checkpoint: Path) -> dict[str, Any]:
    peer = Peer(place, filled=False)
    reading: list[float] = []

    def work() -> None:
        model, optimizer = get_state_dict(peer.model, peer.optimizer)
        state = {"model": model, "optimizer": optimizer}
        began = time.perf_counter()
        dcp.load(state, checkpoint_id=checkpoint)
        reading.append(time.perf_counter() - began)
        set_state_dict(peer.model, peer.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    return loaded(peer, checkpoint, work, reading)


class Fabric(Peer):
    """Fabric on one process, or with its ModelParallelStrategy, which writes by DCP."""

    def __init__(self, place: Place, *, filled: bool = True) -> None:
        from lightning.fabric import Fabric as LightningFabric
        from lightning.fabric.strategies.model_parallel import ModelParallelStrategy

        self.place = place
        strategy: Any = "auto"
        if place.ranks > 1:
            as_under_torchrun(place, place.port + (not filled))
            strategy = ModelParallelStrategy(
                lambda model, mesh: shard(model, mesh["data_parallel"]),
                data_parallel_size=place.ranks,
                tensor_parallel_size=1,
            )
        self.fabric = LightningFabric(accelerator="cpu", devices=place.ranks, strategy=strategy)
        self.fabric.launch()
        wrapped: Any = self.fabric.setup_module(build(place.shape, filled))
        optimizer: Any = self.fabric.setup_optimizers(adamw(wrapped.parameters()))
        self._state: dict[str, Any] = {"model": wrapped, "optimizer": optimizer}
        self.model, self.optimizer = wrapped.module, optimizer.optimizer

    def save(self, number: int) -> None:
        self.fabric.save(self.checkpoint(number), self._state)
        put_on_disk(self.checkpoint(number))

    def load(self, checkpoint: Path) -> None:
        self.fabric.load(checkpoint, self._state, weights_only=True)


def load_fabric(place: Place, checkpoint: Path) -> dict[str, Any]:
    peer = Fabric(place, filled=False)
    return loaded(peer, checkpoint, lambda: peer.load(checkpoint), [])


def as_under_torchrun(place: Place, port: int) -> None:
    rank, ranks = str(place.rank), str(place.ranks)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "benchmark"}


Saver = Callable[[Place], Saving]
Loader = Callable[[Place, Path], dict[str, Any]]

TORCH, OWN_PART = "torch.save", "torch.save, own part"
CONTENDERS: dict[str, tuple[Saver, Loader | None]] = {
    "lockstep": (partial(Lockstep, wait=True), load_lockstep),
    "lockstep, background": (partial(Lockstep, wait=False), None),
    TORCH: (TorchSave, load_torch),
    OWN_PART: (partial(TorchSave, own_part=True), None),
    "dcp": (Dcp, load_dcp),
    "dcp, async": (partial(Dcp, background=True), None),
    "dcp, async, buffers kept": (partial(Dcp, background=True, keep_buffers=True), None),
    "lightning": (Fabric, load_fabric),
}


# One turn -------------------------------------------------------------------------------------------------------------


def save_twice(place: Place, saver: Saver) -> dict[str, Any]:
    saving = saver(place)
    fill_optimizer(saving.optimizer)
    size = sum(part.nbytes for part in parts(saving.model, saving.optimizer))
    give_back_free_memory()
    before = forget_largest_memory()
    saves = []
    for number in (1, 2):
        os.sync()  # what others have written is not to be paid for here
        meet()
        began, processor_began = time.perf_counter(), time.process_time()
        saving.save(number)
        stall = time.perf_counter() - began
        saving.wait_until_on_disk()
        on_disk, processor = time.perf_counter() - began, time.process_time() - processor_began
        saving.wait_until_done()
        done = time.perf_counter() - began
        saves.append({"stall": stall, "save": on_disk, "save cpu": processor, "done": done})
        meet()
    first, second = saves
    return {
        **second,
        "first stall": first["stall"],
        "first save": first["save"],
        "memory": (memory("VmHWM") - before) / size,
        "checkpoint": str(saving.checkpoint(2)),
        "sums": sums(saving.model, saving.optimizer),
    }


def loaded(peer: Peer, checkpoint: Path, work: Callable[[], None], reading: Sequence[float]) -> dict[str, Any]:
    figures = timed_load(peer.place, checkpoint, work)
    if reading:
        figures["read"] = reading[0]
    return {**figures, "sums": sums(peer.model, peer.optimizer)}


def timed_load(place: Place, checkpoint: Path, work: Callable[[], None]) -> dict[str, Any]:
    forget_cached(place, checkpoint)
    processor_began = time.process_time()
    cold = seconds_of(work)
    processor = time.process_time() - processor_began
    return {"load": cold, "load cpu": processor, "read": cold, "again": seconds_of(work)}


def seconds_of(work: Callable[[], None]) -> float:
    meet()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def put_on_disk(path: Path) -> None:
    """What torch.save and Lightning leave to the system. DCP and Lockstep do it themselves."""
    for file in [path] if path.is_file() else path.rglob("*"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def forget_cached(place: Place, checkpoint: Path) -> None:
    """Let the next load read from the disk."""
    if place.rank == 0:
        put_on_disk(checkpoint)
        for file in [checkpoint] if checkpoint.is_file() else checkpoint.rglob("*"):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    meet()


def give_back_free_memory() -> None:
    """Memory that was freed may still be counted, and then what grows into it is not."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def forget_largest_memory() -> int:
    """Measure the largest size of this process anew; returns the size it has."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{which}:"))


def process_of_turn(place: Place, name: str, checkpoint: Path | None) -> None:
    """Save, or load the checkpoint that is given; writes what was measured to a file."""
    with (place.folder / f"{place.rank}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.dump_traceback_later(0.9 * MOST_SECONDS)
    # The same for everybody; Lockstep would do it by itself.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.ranks))
    saver, loader = CONTENDERS[name]
    if checkpoint is None:
        result = save_twice(place, saver)
    else:
        assert loader is not None
        result = loader(place, checkpoint)
    result_file(place.folder, place.rank).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # what is left in the background, of whomever, has nothing to add


def result_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


def together(
    name: str, ranks: int, shape: Shape, folder: Path, checkpoint: Path | None = None
) -> tuple[dict[str, Any], list[float]]:
    """Let processes of their own save or load; returns the largest of their figures, and the sums of all."""
    context = multiprocessing.get_context("forkserver")
    port = free_port()
    places = [Place(rank, ranks, shape, folder, port) for rank in range(ranks)]
    processes = [context.Process(target=process_of_turn, args=(place, name, checkpoint)) for place in places]
    with ended_at_last(processes):
        until = time.monotonic() + MOST_SECONDS
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        if any(process.exitcode != 0 for process in processes):
            logs = "\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("*.log")))
            raise SystemExit(f"{name} failed:\n{logs}")
    results = [json.loads(result_file(folder, rank).read_text()) for rank in range(ranks)]
    figures = {key: max(one[key] for one in results) for key in results[0] if key != "sums"}
    return figures, [sum(values) for values in zip(*(one["sums"] for one in results), strict=True)]


@contextmanager
def ended_at_last(processes: Sequence[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def turn(name: str, setting: Setting, shape: Shape, folder: Path) -> dict[str, Any]:
    """One contender saves twice and loads what it saved last."""
    folder.mkdir()
    figures, saved = together(name, setting.saving_ranks, shape, folder)
    if CONTENDERS[name][1] is not None:
        loaded_figures, back = together(name, setting.loading_ranks, shape, folder, Path(figures["checkpoint"]))
        figures |= loaded_figures
        if any(not math.isclose(one, two, rel_tol=1e-6, abs_tol=1e-3) for one, two in zip(saved, back, strict=True)):
            raise SystemExit(f"{name} has loaded something else than it had saved")
    shutil.rmtree(folder)
    del figures["checkpoint"]
    return figures


# All of it ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Who saves, and who loads."""

    title: str
    saving_ranks: int
    loading_ranks: int
    contenders: tuple[str, ...]


SETTINGS = {
    "one": Setting("one process", 1, 1, tuple(name for name in CONTENDERS if name != OWN_PART)),
    "sharded": Setting("4 ranks, fsdp=4, loaded by 2", 4, 2, tuple(CONTENDERS)),
}
COLUMNS = ("save", "save cpu", "stall", "first stall", "load", "load cpu", "read", "again", "memory")


def main() -> None:
    options = arguments()
    shape = shape_of(options.megabytes)
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    print(f"{machine_text()}; {', '.join(f'{name} {number}' for name, number in versions().items())}")
    results: dict[str, Any] = {"machine": machine_text(), "versions": versions()}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for key in options.settings.split(","):
            results[key] = measure(SETTINGS[key], shape, options, Path(folder))
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.set_defaults(rounds=5)
    parser.add_argument("--megabytes", type=float, default=1000, help="of weights and optimizer state (default 1000)")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: that of temporary files)")
    parser.add_argument("--settings", default=",".join(SETTINGS), help=f"of {', '.join(SETTINGS)} (default all)")
    parser.add_argument("--contenders", default="", help="parts of their names; lockstep always (default all)")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.megabytes = 1, 20
    return options


def measure(setting: Setting, shape: Shape, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Let the contenders take turns, and print what they took."""
    wanted = ["lockstep", *filter(None, options.contenders.split(","))] if options.contenders else [""]
    names = [name for name in setting.contenders if any(part in name for part in wanted)]
    parameters = sum(parameter.numel() for parameter in build_on_meta(shape).parameters())
    print(f"\n{setting.title}: {parameters:,} parameters, {parameters * BYTES_PER_PARAMETER / 1e9:.2f} GB", flush=True)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in in_turn(names, number):
            figures = turn(name, setting, shape, folder / "turn")
            rounds[name].append(figures)
            shown = ", ".join(f"{column} {figures[column]:.2f}" for column in COLUMNS if column in figures)
            print(f"  round {number + 1}, {name}: {shown}", flush=True)
    show_table(rounds)
    show_ratios(rounds)
    if not options.quick:
        show_targets(rounds)
    return {"parameters": parameters, "rounds": rounds}


def build_on_meta(shape: Shape) -> nn.Module:
    with torch.device("meta"):
        model = GPT2(shape)
        model.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
    return model


Rounds = dict[str, list[dict[str, Any]]]


def show_table(rounds: Rounds) -> None:
    print(
        "| median | "
        + " | ".join(f"{column}, x" if column == "memory" else f"{column}, s" for column in COLUMNS)
        + " |"
    )
    print("|---|" + "---|" * len(COLUMNS))
    for name, turns in rounds.items():
        cells = [
            f"{statistics.median(one[column] for one in turns):.2f}" if column in turns[0] else "" for column in COLUMNS
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")
    for name in ("lockstep", "lockstep, background"):
        after = statistics.median(one["done"] - one["save"] for one in rounds[name])
        print(f"{name}: reads back for {after:.2f} s once it is on the disk")


def show_ratios(rounds: Rounds) -> None:
    print("| Lockstep's, as a multiple of | save | load | background: until on disk | background: stall |")
    print("|---|---|---|---|---|")
    for name in rounds:
        if not name.startswith("lockstep"):
            in_background = "async" in name
            cells = [
                "" if in_background else f"{ratio(rounds, 'lockstep', 'save', name, 'save'):.2f}",
                f"{ratio(rounds, 'lockstep', 'load', name, 'load'):.2f}" if "load" in rounds[name][0] else "",
                f"{ratio(rounds, 'lockstep, background', 'save', name, 'save'):.2f}" if in_background else "",
                f"{ratio(rounds, 'lockstep, background', 'stall', name, 'stall'):.2f}",
            ]
            print(f"| {name} | " + " | ".join(cells) + " |")


def ratio(rounds: Rounds, mine: str, column: str, other: str, its_column: str) -> float:
    """The median of the ratios within a round."""
    pairs = zip(rounds[mine], rounds[other], strict=True)
    return float(statistics.median(one[column] / two[its_column] for one, two in pairs))


def show_targets(rounds: Rounds) -> None:
    reached: list[tuple[str, float, float]] = []
    for name in (TORCH, OWN_PART):
        if name in rounds:
            stall = ratio(rounds, "lockstep, background", "stall", name, "save")
            reached.append((f"background stall, of the time of {name}", stall, STALL))
    if "dcp" in rounds:
        reached.append(("save, of DCP's", ratio(rounds, "lockstep", "save", "dcp", "save"), SLOWER))
        reached.append(("load, of DCP's", ratio(rounds, "lockstep", "load", "dcp", "load"), SLOWER))
        reached.append(("load, of dcp.load alone", ratio(rounds, "lockstep", "load", "dcp", "read"), SLOWER))
    for name in ("lockstep", "lockstep, background"):
        grown = statistics.median(one["memory"] for one in rounds[name])
        reached.append((f"memory of {name}, of what a rank has", grown, MEMORY))
    for what, value, target in reached:
        print(f"{what}: {value:.3f}, at most {target}: {'met' if value <= target else 'missed'}")


if __name__ == "__main__":
    main()
