"""What a rank of `lockstep bench` measures, as nccl-tests does it.

A point is one collective over one axis with buffers of one size. After calls that are not counted, batches of calls are
timed, one call right after the other without a barrier between; a batch took as long as it took the slowest rank.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.layout import AXES, Layout
from lockstep.links.collective_cost import Collective
from lockstep.links.expected import look_at_network
from lockstep.links.measured import WORLD, Pair, Row, Speed, timed_row
from lockstep.links.slow_links import pair_rounds
from lockstep.runtime.comm import gather_into, scatter_sums_into, sent_from
from lockstep.runtime.device import backend_for, choose_device

if TYPE_CHECKING:
    from lockstep.launch.probe import Seat
    from lockstep.runtime.comm import Comm

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
SECONDS_TO_WARM_UP = 1.0
SECONDS_A_POINT = 0.2
"""Calls are repeated for about so long."""
MOST_BATCHES, LEAST_BATCHES = 5, 3
MOST_CALLS = 2000
"""In a batch, however short they are."""
LONGEST_CALL = 2.0
"""Seconds that one call may be expected to take; larger sizes are left out."""
BUFFERS, ROOM = 2, 0.5
"""How many buffers of its size a call takes at most, and which share of the free memory they may take."""
PATIENCE = 120.0

SHORT, FIRST = 8, 64_000
"""Bytes of a message that shows the latency of a pair, and of the one that tells how long the next may be."""
LONGEST_MESSAGE = {"cpu": 4_000_000, "cuda": 64_000_000}
SECONDS_A_MESSAGE = 0.1
LEAST_REPEATS, MOST_REPEATS, SECONDS_A_PAIR = 3, 20, 0.05

NOT_SUPPORTED = re.compile(r"not (currently )?support|unsupported|not implemented|no backend type", re.I)


@dataclass(frozen=True)
class BenchWork:
    """What is to be measured, the same on every rank."""

    layout: Layout
    sizes: tuple[int, ...]
    collectives: tuple[Collective, ...]
    device: str
    share_gpu: bool

    @property
    def backend(self) -> Literal["gloo", "nccl"]:
        """What its ranks talk over."""
        return backend_for(self.device, self.share_gpu)

    @property
    def axes(self) -> list[str]:
        """What collectives go over: every axis that is larger than 1, and all ranks where there are several."""
        present = [axis for axis in AXES if self.layout.size(axis) > 1]
        return present + ([WORLD] if len(present) > 1 else [])


def measure(work: BenchWork, seat: Seat) -> None:
    """All of it, on one rank. Rank 0 tells its command every result as soon as it is there: a `told` tuple."""
    device = choose_device(seat.place, "cuda" if work.device == "cuda" else "cpu", work.share_gpu)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    comm = seat.join(work.layout, device, work.backend, PATIENCE)
    tell = seat.tell if seat.place.rank == 0 else lambda _: None
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo") if seat.place.nodes > 1 else "lo"
    own = {
        "host": socket.gethostname(),
        "node": seat.place.node_rank,
        "network": look_at_network(socket.gethostname(), interface).as_json(),
    }
    tell(("ranks", comm.gather(own)))
    tell(("speeds", [Speed(**told) for told in comm.gather(device_speed(comm, device))]))
    for axis in work.axes:
        group = dist.group.WORLD if axis == WORLD else comm.group(axis)
        assert group is not None
        for collective in work.collectives:
            for row in sweep(comm, axis, group, collective, work.sizes, device):
                tell(("row", row))
    if comm.world_size > 1:
        for pair in measure_pairs(comm, seat.place.node_rank, sent_from(device, dist.group.WORLD)):
            tell(("pair", pair))
    comm.barrier()  # whoever leaves first would take the others' connections along
    comm.close()


def sweep(
    comm: Comm,
    axis: str,
    group: dist.ProcessGroup,
    collective: Collective,
    sizes: Sequence[int],
    device: torch.device,
    seconds: float = SECONDS_A_POINT,
) -> Iterator[Row]:
    """The rows of a collective, size after size; every rank has to ask, and gets the same ones."""
    last: Row | None = None
    for wanted in sizes:
        size = whole_bytes(wanted, group.size())
        expected = last.seconds * size / last.bytes if last and last.seconds else 0.0
        call, note = None, ""
        if expected > LONGEST_CALL:
            note = f"left out: a call would take about {expected:.0f} s"
        elif BUFFERS * size > ROOM * _free_memory(comm, device):
            note = "left out: there is not enough memory for its buffers"
        else:
            call = operation(collective, group, size, device)
            note = _refusal(comm, call) if last is None else ""
        if call is None or note:
            yield Row(axis=axis, ranks=group.size(), collective=collective, bytes=size, note=note)
            return
        batches, iterations = time_calls(comm, call, device, seconds)
        last = timed_row(axis, group.size(), collective, size, _longest(comm, batches), iterations)
        yield last


def time_calls(comm: Comm, call: Callable[[], object], device: torch.device, seconds: float) -> tuple[list[float], int]:
    """Seconds of a call on this rank, in each of a few batches, and how many calls were timed; alike on all ranks."""
    pilot = _longest(comm, [_batch(comm, call, device, calls) for calls in (1, 2)])[1]
    count = LEAST_BATCHES if pilot * MOST_BATCHES > seconds else MOST_BATCHES
    calls = max(1, min(MOST_CALLS, int(seconds / count / pilot)))
    return [_batch(comm, call, device, calls) for _ in range(count)], count * calls


def whole_bytes(wanted: int, ranks: int) -> int:
    """At most so many bytes, but in fp32 numbers of which every rank has the same part."""
    return 4 * ranks * max(1, wanted // (4 * ranks))


def operation(
    collective: Collective, group: dist.ProcessGroup, size: int, device: torch.device
) -> Callable[[], object]:
    """A call of a collective that nccl-tests would say has this size: the whole buffer of a rank, of `whole_bytes`."""
    ranks = dist.get_process_group_ranks(group)
    count = size // (4 * len(ranks))
    place, root = group.rank(), ranks[0]

    def buffer(numbers: int) -> Tensor:
        return torch.empty(numbers, device=device).fill_(0)  # zeros() has no memory of its own before it is written

    whole = buffer(count * len(ranks))
    call: Callable[[], object]
    if collective == "all-reduce":
        call = partial(dist.all_reduce, whole, group=group)
    elif collective == "broadcast":
        call = partial(dist.broadcast, whole, root, group=group)
    elif collective == "reduce":
        call = partial(dist.reduce, whole, root, group=group)
    elif collective == "all-gather":
        call = partial(gather_into, whole, buffer(count), group=group)
    elif collective == "reduce-scatter":
        call = partial(scatter_sums_into, buffer(count), whole, group=group)
    elif collective == "all-to-all":
        call = partial(dist.all_to_all_single, torch.empty_like(whole), whole, group=group)
    elif collective == "gather":
        parts = list(whole.chunk(len(ranks))) if place == 0 else None
        call = partial(dist.gather, buffer(count), parts, root, group=group)
    elif collective == "scatter":
        parts = list(whole.chunk(len(ranks))) if place == 0 else None
        call = partial(dist.scatter, buffer(count), parts, root, group=group)
    else:
        follower, leader = ranks[(place + 1) % len(ranks)], ranks[place - 1]
        whole = whole.to(sent_from(device, group))
        call = partial(_send_around, whole, torch.empty_like(whole), follower, leader, group)
    return call


def measure_pairs(comm: Comm, node: int, device: torch.device) -> Iterator[Pair]:
    """How pairs of ranks send to each other; every rank has to ask, and gets all of them."""
    for together in pair_rounds(comm.gather(node)):
        comm.barrier()
        mine = next((pair for pair in together if comm.rank in pair), None)
        found = _ping_pong(*mine, comm.rank, device) if mine else None
        told = comm.gather(found if mine and comm.rank == mine[0] else None)
        yield from (Pair(**found) for found in told if found is not None)


def device_speed(comm: Comm, device: torch.device) -> dict[str, Any]:
    """Matrix products and copies on the device of this rank, while the others do the same on theirs."""
    on_gpu = device.type == "cuda"
    width, megabytes = (8192, 1024) if on_gpu else (768, 32)
    # Not bf16 on CPUs: some virtual machines announce instructions for it that they do not have, and the rank dies.
    kinds = {"bf16": torch.bfloat16, "tf32": torch.float32} if on_gpu else {}
    kinds["fp32"] = torch.float32
    tflops = {}
    for kind, dtype in kinds.items():
        a, b = (torch.randn(width, width, dtype=dtype, device=device) for _ in range(2))
        torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
        product = partial(torch.mm, a, b.t(), out=torch.empty_like(a))  # as nn.Linear has it
        if on_gpu:  # one that has rested begins with slow clocks
            time_calls(comm, product, device, SECONDS_TO_WARM_UP)
        batches, _ = time_calls(comm, product, device, SECONDS_A_POINT)
        tflops[kind] = 2 * width**3 / median(batches) / 1e12
    torch.set_float32_matmul_precision("highest")
    source = torch.empty(megabytes * 1_000_000, dtype=torch.uint8, device=device).fill_(1)
    batches, _ = time_calls(comm, partial(torch.empty_like(source).copy_, source), device, SECONDS_A_POINT)
    name = (
        torch.cuda.get_device_name(device)
        if on_gpu
        else f"CPU, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    )
    copied = 2 * source.nbytes / median(batches) / 1e9
    return {"rank": comm.rank, "device": name, "matmul_tflops": tflops, "copy_gb_s": copied}


def _batch(comm: Comm, call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds of a call, over some of them."""
    _synchronise(device)
    comm.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    _synchronise(device)
    return (time.perf_counter() - began) / calls


def _longest(comm: Comm, seconds: list[float]) -> list[float]:
    longest: list[float] = comm.reduce(torch.tensor(seconds, dtype=torch.float64), "max").tolist()
    return longest


def _free_memory(comm: Comm, device: torch.device) -> float:
    """Bytes for each rank where there are fewest."""
    import psutil

    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    least: float = comm.reduce(float(free) / comm.place.local_world_size, "min")
    return least


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _refusal(comm: Comm, call: Callable[[], object]) -> str:
    """Why the backend does not have this collective; nothing where it has it. The first call connects, too."""
    refusal = ""
    try:
        call()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if not NOT_SUPPORTED.search(str(error)):
            raise
        refusal = f"not on this backend: {str(error).splitlines()[0][:100]}"
    return next((told for told in comm.gather(refusal) if told), "")


def _send_around(mine: Tensor, theirs: Tensor, follower: int, leader: int, group: dist.ProcessGroup) -> None:
    """Every rank sends to the next one and receives from the one before."""
    both = [dist.P2POp(dist.isend, mine, follower, group), dist.P2POp(dist.irecv, theirs, leader, group)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def _ping_pong(a: int, b: int, rank: int, device: torch.device) -> dict[str, Any]:
    """Messages between two ranks, to and fro; `a` decides how long they are. The fastest counts: it is the link's."""
    other, begins = (b, True) if rank == a else (a, False)

    def fastest(size: int, repeats: int) -> float:
        """Seconds of a message, one way."""
        message = torch.empty(size, dtype=torch.uint8, device=device).fill_(0)
        found = []
        for _ in range(repeats + 1):  # the first one connects
            began = time.perf_counter()
            for sends in (begins, not begins):
                (dist.send if sends else dist.recv)(message, other)
            _synchronise(device)
            found.append((time.perf_counter() - began) / 2)
        return min(found[1:])

    latency = fastest(SHORT, MOST_REPEATS)
    first = fastest(FIRST, LEAST_REPEATS)
    size = max(FIRST, min(LONGEST_MESSAGE[device.type], int(FIRST * SECONDS_A_MESSAGE / first)))
    repeats = max(LEAST_REPEATS, min(MOST_REPEATS, int(SECONDS_A_PAIR / (first * size / FIRST))))
    decided = torch.tensor([size, repeats], device=device)
    (dist.send if begins else dist.recv)(decided, other)
    size, repeats = decided.tolist()
    return {"a": a, "b": b, "gb_s": size / fastest(size, repeats) / 1e9, "latency": latency}
