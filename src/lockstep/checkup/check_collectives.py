"""Every collective checked for the right values: on mesh axes and pairs of axes, in several formats and sizes.

Each value is a small whole number that every format holds exactly, so that a right answer is right to the bit; only
means may be rounded.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lockstep.layout import AXES, Layout
from lockstep.runtime.comm import Comm, gather_into, scatter_sums_into, sent_from

FORMATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)
SIZES = (1, 7, 1023, 65_537)
"""None of them is a power of two: what is left over at the end of a block is where mistakes hide."""
MOST_ELEMENTS = 8_000_000
"""What all ranks of a group put in together, at most; every rank works it out."""
MOST_PAIRS = 66
"""Of ranks that are tried one by one; of more than twelve ranks only some pairs."""


@dataclass(frozen=True)
class Wrong:
    """A collective that did not do what it should."""

    what: str
    evidence: str


@dataclass(frozen=True)
class TalkingRanks:
    """Ranks that talk: by which axes, and which of them this one is."""

    name: str
    group: dist.ProcessGroup
    ranks: list[int]
    me: int

    @property
    def size(self) -> int:
        return len(self.ranks)


def check_all(comm: Comm, layout: Layout, device: torch.device, at: Callable[[str], None]) -> tuple[int, list[Wrong]]:
    """Try everything; how many calls were checked on this rank, and what was wrong. `at` hears what comes next."""
    checked, wrong = 0, []
    for group in groups_of(comm, layout):
        at(f"collectives over {group.name}")
        for what, tried in _collectives(group, device, at):
            checked += 1
            if (evidence := tried()) is not None:
                wrong.append(Wrong(f"{what} over {group.name}", evidence))
    at("send and receive between all pairs")
    for pair in _pairs(comm.world_size):
        if comm.rank in pair:
            checked += 1
            if (evidence := _send_and_receive(pair, comm.rank, sent_from(device))) is not None:
                wrong.append(Wrong("send and receive", evidence))
    at("the barrier")
    checked += 1
    if (evidence := _barrier(comm)) is not None:
        wrong.append(Wrong("barrier", evidence))
    return checked, wrong


def groups_of(comm: Comm, layout: Layout) -> list[TalkingRanks]:
    """The group of every axis and of every pair of axes that this rank is in, and that of all ranks."""
    axes = [axis for axis in AXES if layout.size(axis) > 1]
    found = [(axis, comm.group(axis), layout.ranks_along(axis)) for axis in axes]
    if len(axes) > 2:  # of two axes the pair is everybody
        pairs = itertools.combinations(axes, 2)
        found += [(" x ".join(pair), comm.group_over(*pair), layout.ranks_along(*pair)) for pair in pairs]
    if len(axes) > 1:
        everybody = list(range(comm.world_size))
        found.append(("all ranks", dist.group.WORLD, [everybody]))
    groups = []
    for name, group, sets in found:
        assert group is not None
        ranks = next(ranks for ranks in sets if comm.rank in ranks)
        groups.append(TalkingRanks(name, group, list(ranks), ranks.index(comm.rank)))
    return groups


def _collectives(
    group: TalkingRanks, device: torch.device, at: Callable[[str], None]
) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """All calls to try. Every rank of the group makes the same ones in the same order."""
    sizes = [size for size in SIZES if size * group.size <= MOST_ELEMENTS]
    shapes = [(form, 1023) for form in FORMATS] + [(torch.float32, size) for size in sizes if size != 1023]
    for form, size in shapes:
        values = Values(group, device, form, size)
        kind = f"{str(form).removeprefix('torch.')} of {size} elements"
        for name, run in values.tries():
            at(f"{name} over {group.name}")
            yield f"{name}, {kind}", run


class Values:
    """What each rank of a group puts into a collective, and what has to come out."""

    def __init__(self, group: TalkingRanks, device: torch.device, form: torch.dtype, size: int) -> None:
        self.group, self.device, self.form, self.size = group, device, form, size
        self.all = [self._of(rank) for rank in range(group.size)]

    def _of(self, rank: int, shift: int = 0) -> torch.Tensor:
        return ((torch.arange(self.size) * 3 + rank * 7 + shift) % 5 + 1).to(self.form)

    def _summand(self, rank: int, shift: int = 0) -> torch.Tensor:
        """What is added up. Sums stay below 256, which even bfloat16 and bytes hold: of many ranks few give a one."""
        if self.group.size <= 40:
            return self._of(rank, shift)
        every = -(-self.group.size // 40)
        return ((torch.arange(self.size) + rank + shift) % every == 0).to(self.form)

    def tries(self) -> Iterator[tuple[str, Callable[[], str | None]]]:
        ops = [("sum", dist.ReduceOp.SUM), ("min", dist.ReduceOp.MIN), ("max", dist.ReduceOp.MAX)]
        if self.form.is_floating_point:
            ops.append(("avg", dist.ReduceOp.AVG))
        for name, op in ops:
            yield f"all-reduce ({name})", partial(self._all_reduce, name, op)
        for root in sorted({0, self.group.size - 1}):
            yield f"broadcast from {root}", partial(self._broadcast, root)
            yield f"reduce to {root}", partial(self._reduce, root)
        yield "gather", self._gather
        yield "scatter", self._scatter
        yield "all-gather", self._all_gather
        yield "reduce-scatter", self._reduce_scatter
        yield "all-to-all", self._all_to_all

    @property
    def mine(self) -> torch.Tensor:
        return self.all[self.group.me].to(self.device, copy=True)

    def _empty(self, times: int = 1) -> torch.Tensor:
        return torch.full((times * self.size,), 99, dtype=self.form, device=self.device)

    def _expected(self, name: str) -> torch.Tensor:
        if name in ("min", "max"):
            stacked = torch.stack(self.all).double()
            return (stacked.amin(0) if name == "min" else stacked.amax(0)).to(self.form)
        total = self._total()
        return (total / self.group.size if name == "avg" else total).to(self.form)

    def _total(self, shift: int = 0) -> torch.Tensor:
        total = torch.zeros(self.size, dtype=torch.float64)
        for rank in range(self.group.size):
            total += self._summand(rank, shift)
        return total

    def _given(self, name: str) -> torch.Tensor:
        return self.mine if name in ("min", "max") else self._summand(self.group.me).to(self.device)

    def _root(self, number: int) -> int:
        return self.group.ranks[number]

    def _all_reduce(self, name: str, op: Any) -> str | None:
        got = self._given(name)
        dist.all_reduce(got, op, group=self.group.group)
        return differs(got, self._expected(name), roundings=self.group.size if name == "avg" else 0)

    def _broadcast(self, root: int) -> str | None:
        got = self.mine if self.group.me == root else self._empty()
        dist.broadcast(got, self._root(root), group=self.group.group)
        return differs(got, self.all[root])

    def _reduce(self, root: int) -> str | None:
        got = self._given("sum")
        dist.reduce(got, self._root(root), group=self.group.group)
        return differs(got, self._expected("sum")) if self.group.me == root else None

    def _gather(self) -> str | None:
        parts = [self._empty() for _ in self.all] if self.group.me == 0 else None
        dist.gather(self.mine, parts, self._root(0), group=self.group.group)
        return None if parts is None else differs(torch.cat(parts), torch.cat(self.all))

    def _scatter(self) -> str | None:
        parts = [part.to(self.device) for part in self.all] if self.group.me == 0 else None
        got = self._empty()
        dist.scatter(got, parts, self._root(0), group=self.group.group)
        return differs(got, self.all[self.group.me])

    def _all_gather(self) -> str | None:
        got = self._empty(self.group.size)
        gather_into(got, self.mine, group=self.group.group)
        return differs(got, torch.cat(self.all))

    def _reduce_scatter(self) -> str | None:
        n = self.group.size
        given = torch.cat([self._summand(self.group.me, shift) for shift in range(n)]).to(self.device)
        got = self._empty()
        scatter_sums_into(got, given, group=self.group.group)
        return differs(got, self._total(self.group.me).to(self.form))

    def _all_to_all(self) -> str | None:
        n = self.group.size
        given = torch.cat([self._of(self.group.me, shift) for shift in range(n)]).to(self.device)
        got = self._empty(n)
        dist.all_to_all_single(got, given, group=self.group.group)
        return differs(got, torch.cat([self._of(rank, self.group.me) for rank in range(n)]))


def differs(got: torch.Tensor, expected: torch.Tensor, roundings: int = 0) -> str | None:
    """The first element that is wrong, in words; None where all are right, but for so many roundings."""
    got = got.cpu()
    room = roundings * torch.finfo(got.dtype).eps * expected.double().abs() if roundings else torch.zeros(1).double()
    wrong = ((got.double() - expected.double()).abs() > room) | got.double().isnan()
    if not bool(wrong.any()):
        return None
    first = int(wrong.nonzero()[0])
    share = f"{int(wrong.sum())} of {wrong.numel()} values are wrong"
    return f"{share}: element {first} is {got[first].item():g} and should be {expected[first].item():g}"


def _pairs(world_size: int) -> list[tuple[int, int]]:
    pairs = list(itertools.combinations(range(world_size), 2))
    if len(pairs) <= MOST_PAIRS:
        return pairs
    steps = [1 << power for power in range(world_size.bit_length()) if 1 << power < world_size]
    return sorted({(rank, rank + step) for step in steps for rank in range(0, world_size - step, 2 * step)})


def _send_and_receive(pair: tuple[int, int], me: int, device: torch.device) -> str | None:
    """There and back, of an odd number of elements."""
    low, high = pair
    sent = {rank: (torch.arange(4099) * 3 + rank * 7) % 251 for rank in pair}
    got = torch.full((4099,), 99, dtype=torch.int64, device=device)
    mine = sent[me].to(device)
    if me == low:
        dist.send(mine, high)
        dist.recv(got, high)
    else:
        dist.recv(got, low)
        dist.send(mine, low)
    return differs(got, sent[high if me == low else low])


def _barrier(comm: Comm) -> str | None:
    """Nobody is through before the last has come: that one comes late, and leaves a note first."""
    last, notices = comm.world_size - 1, comm.notices("barrier")
    if comm.rank == last:
        time.sleep(0.2)
        notices.post("came", "yes")
    dist.barrier()
    return None if notices.has("came") else f"rank {comm.rank} was through before rank {last} had come"


def computes(device: torch.device) -> str | None:
    """Whether the device multiplies matrices of whole numbers without a mistake."""
    torch.manual_seed(0)
    a, b = (torch.randint(-4, 5, (257, 257)).float() for _ in range(2))
    return differs((a.to(device) @ b.to(device)).flatten(), (a.double() @ b.double()).float().flatten())
