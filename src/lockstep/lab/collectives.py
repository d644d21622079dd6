"""A collective on real ranks, small enough to look at: what every rank held after every round, who sent what.

Rank r begins with the numbers 10 r + 1, 10 r + 2, ... (or 100 r + 1, where there are more than nine): they tell whose
they were. A second run of the same algorithm, in which every number of rank r is 2 to the power r, tells which ranks
have gone into each sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.errors import UserError
from lockstep.lab.ranks import SECONDS, on_ranks
from lockstep.lab.wire import Transfer, Wire
from lockstep.launch.probe import Seat
from lockstep.layout import Layout
from lockstep.links.collective_cost import Algorithm, Collective, check_algorithm

if TYPE_CHECKING:
    import torch

MOST_RANKS = 16

GOALS: dict[Collective, str] = {
    "broadcast": "Every rank gets what rank 0 has",
    "reduce": "Rank 0 gets the sum of what all ranks have",
    "all-reduce": "Every rank gets the sum of what all ranks have",
    "all-gather": "Every rank has one chunk, and gets those of all",
    "reduce-scatter": "Every rank gets one chunk of the sum of what all ranks have",
    "all-to-all": "Every rank has a chunk for each rank, and gets the ones that are for it",
}


Chunks = list[list[float]]
"""The numbers of each chunk of a buffer."""
Sources = list[frozenset[int]]
"""For each chunk, the ranks whose numbers are in it; none where nothing was ever put."""


@dataclass(frozen=True)
class ShownCollective:
    """One algorithm as the ranks ran it: `before[rank]` a round, and `after[round][rank]`."""

    collective: Collective
    algorithm: Algorithm
    ranks: int
    elements: int
    before: list[Chunks]
    after: list[list[Chunks]]
    sources_before: list[Sources]
    sources: list[list[Sources]]
    transfers: list[Transfer]
    agrees: bool
    """Whether the result is, to the bit, that of the backend's own collective."""

    @property
    def is_result(self) -> list[list[bool]]:
        """Which chunks of which ranks belong to the result; what else is in a buffer is left over."""
        everywhere = self.collective not in ("reduce", "reduce-scatter")
        return [
            [everywhere or (rank == 0 if self.collective == "reduce" else rank == chunk) for chunk in range(self.ranks)]
            for rank in range(self.ranks)
        ]


@dataclass(frozen=True)
class Cost:
    """What an algorithm sends, counted from the messages that were really sent."""

    rounds: int
    messages: int
    busiest: int
    """Elements that the rank with the most has sent."""


def cost_of(shown: ShownCollective) -> Cost:
    """Count the messages of an algorithm."""
    sent = [0] * shown.ranks
    for transfer in shown.transfers:
        sent[transfer.sender] += transfer.elements
    return Cost(len(shown.after), len(shown.transfers), max(sent))


def check_ranks(ranks: int) -> None:
    """Refuse more ranks than can be looked at."""
    if not 1 <= ranks <= MOST_RANKS:
        raise UserError(f"--ranks {ranks} is not possible here", f"use 1 to {MOST_RANKS}")


def show(collective: Collective, algorithms: list[Algorithm], ranks: int, elements: int) -> list[ShownCollective]:
    """Run algorithms on real ranks (gloo, on this machine) and return what happened."""
    check_ranks(ranks)
    for algorithm in algorithms:
        check_algorithm(collective, algorithm, ranks)

    def work(seat: Seat) -> Any:
        import torch

        seat.join(Layout(dp=ranks), torch.device("cpu"), "gloo", SECONDS)
        return [run_once(collective, algorithm, seat.place.rank, ranks, elements) for algorithm in algorithms]

    seen = on_ranks(work, ranks)
    return [
        put_together(collective, algorithm, elements, [rank_saw[number] for rank_saw in seen])
        for number, algorithm in enumerate(algorithms)
    ]


@dataclass(frozen=True)
class RankSaw:
    """What one rank saw, of its numbers and of the marks."""

    before: Chunks
    after: list[Chunks]
    marks_before: Chunks
    marks: list[Chunks]
    transfers: list[Transfer]
    agrees: bool


def run_once(collective: Collective, algorithm: Algorithm, rank: int, ranks: int, elements: int) -> RankSaw:
    """On one rank: run an algorithm on numbers, then on marks, and compare with what the backend does."""
    import torch

    from lockstep.lab.algorithms import run_algorithm

    def run(numbers: torch.Tensor) -> tuple[Chunks, Wire]:
        given = first_held(collective, rank, ranks, numbers)
        wire = Wire(rank, ranks, given, apart=collective == "all-to-all", remember=True)
        before = [given[wire.chunk(number)].tolist() for number in range(ranks)]
        run_algorithm(collective, algorithm, wire)
        return before, wire

    numbers = first_numbers(rank, elements)
    before, wire = run(numbers)
    marks_before, marked = run(torch.full((elements,), float(2**rank)))
    agrees = _as_the_backend(collective, rank, ranks, numbers, wire)
    return RankSaw(before, wire.after, marks_before, marked.after, wire.transfers, agrees)


def first_numbers(rank: int, elements: int) -> torch.Tensor:
    """The numbers that a rank begins with."""
    import torch

    return torch.arange(1.0, elements + 1) + float(rank * 10 ** len(str(elements)))


def first_held(collective: Collective, rank: int, ranks: int, numbers: torch.Tensor) -> torch.Tensor:
    """What of them it holds before the first round: of a broadcast only rank 0 has anything, of a gather its chunk."""
    import torch

    if collective == "broadcast" and rank > 0:
        return torch.zeros_like(numbers)
    if collective == "all-gather":
        own = Wire(rank, ranks, numbers).chunk(rank)
        held = torch.zeros_like(numbers)
        held[own] = numbers[own]
        return held
    return numbers.clone()


def put_together(collective: Collective, algorithm: Algorithm, elements: int, seen: list[RankSaw]) -> ShownCollective:
    """One picture of what the ranks have seen."""

    def ranks_in(chunks: Chunks) -> Sources:
        marks = [int(chunk[0]) if chunk else 0 for chunk in chunks]
        return [frozenset(rank for rank in range(len(seen)) if mark >> rank & 1) for mark in marks]

    rounds = range(len(seen[0].after))
    return ShownCollective(
        collective,
        algorithm,
        len(seen),
        elements,
        [rank_saw.before for rank_saw in seen],
        [[rank_saw.after[number] for rank_saw in seen] for number in rounds],
        [ranks_in(rank_saw.marks_before) for rank_saw in seen],
        [[ranks_in(rank_saw.marks[number]) for rank_saw in seen] for number in rounds],
        sorted(transfer for rank_saw in seen for transfer in rank_saw.transfers),
        all(rank_saw.agrees for rank_saw in seen),
    )


def _as_the_backend(collective: Collective, rank: int, ranks: int, numbers: torch.Tensor, wire: Wire) -> bool:
    """Whether this rank has what gloo's own collective gives it."""
    import torch
    import torch.distributed as dist

    if ranks == 1:
        return torch.equal(wire.held, numbers)
    whole = numbers.clone()
    pieces = [numbers[wire.chunk(number)] for number in range(ranks)]
    own = wire.chunk(rank)
    if collective == "broadcast":
        dist.broadcast(whole, 0)
    elif collective == "reduce":
        dist.reduce(whole, 0)
        return rank > 0 or torch.equal(wire.held, whole)
    elif collective == "all-reduce":
        dist.all_reduce(whole)
    elif collective == "reduce-scatter":
        result = torch.empty_like(pieces[rank])
        dist.reduce_scatter(result, [piece.clone() for piece in pieces])
        return torch.equal(wire.held[own], result)
    elif collective == "all-gather":  # of chunks of one size: gloo takes no others
        longest = len(pieces[0])
        padded = torch.zeros(longest)
        padded[: len(pieces[rank])] = pieces[rank]
        found = [torch.empty(longest) for _ in range(ranks)]
        dist.all_gather(found, padded)
        whole = torch.cat([one[: len(piece)] for one, piece in zip(found, pieces, strict=True)])
    else:
        whole = torch.empty_like(wire.held)
        dist.all_to_all_single(whole, numbers.clone(), [len(pieces[rank])] * ranks, [len(piece) for piece in pieces])
    return torch.equal(wire.held, whole)
