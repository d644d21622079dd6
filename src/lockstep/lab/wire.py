"""What the algorithms of the lab talk through: messages between ranks, in rounds, every one of them recorded.

wire.send(part, to=1)              part is a range of elements of `wire.held`
wire.receive(part, of=3)           what comes replaces those elements
wire.receive(part, of=3, add=True) or is added to them
wire.next_round()                  wait for what this rank has sent; another round begins
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist


class Transfer(NamedTuple):
    """One message: so many elements, which replaced these chunks of the receiver's buffer or were added to them."""

    round: int
    sender: int
    receiver: int
    chunks: tuple[int, ...]
    elements: int
    added: bool


class Wire:
    """One rank's end: `given` is what it begins with, and `held` what it has by now; each is cut into a chunk a rank.

    They are one buffer, and so the work is done in place; `apart`, `held` has a chunk from each rank, all as long as
    this rank's own.
    """

    def __init__(
        self, rank: int, ranks: int, given: torch.Tensor, *, apart: bool = False, remember: bool = False
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.given = given
        self.held = given
        self._slots = [self.chunk(number) for number in range(ranks)]
        if apart:
            own = given[self.chunk(rank)]
            self.held = given.new_zeros(ranks * len(own))
            self._slots = [slice(number * len(own), (number + 1) * len(own)) for number in range(ranks)]
            self.held[self._slots[rank]] = own
        self.transfers: list[Transfer] = []
        """What this rank has received."""
        self.after: list[list[list[float]]] = []
        """What it held after each round, chunk by chunk, if it is to remember that."""
        self.rounds = 0
        self._remembers = remember
        self._to_send: list[tuple[torch.Tensor, int]] = []
        self._sent: list[dist.Work] = []

    def chunk(self, number: int) -> slice:
        """The elements of one chunk, counted around: -1 is the last. The first ones are longer if they have to be."""
        return self.chunks(number % self.ranks, 1)

    def chunks(self, number: int, count: int) -> slice:
        """The elements of some chunks that lie side by side."""
        return slice(bound(number, self.ranks, len(self.given)), bound(number + count, self.ranks, len(self.given)))

    def slot(self, number: int) -> slice:
        """Where in `held` belongs what comes from a rank, if that is apart."""
        return self._slots[number]

    def send(self, part: slice, to: int) -> None:
        """Send elements of what this rank holds."""
        self._send(self.held[part], to)

    def give(self, part: slice, to: int) -> None:
        """Send elements of what this rank began with."""
        self._send(self.given[part], to)

    def receive(self, part: slice, of: int, *, add: bool = False) -> None:
        """Wait for elements of another rank, and put them into what this rank holds, or add them to it."""
        if part.start == part.stop:
            return
        came = torch.empty_like(self.held[part]) if add else self.held[part]
        coming = dist.irecv(came, of)
        self._start_sending()
        assert coming is not None
        coming.wait()
        if add:
            self.held[part] += came
        filled = [slot for slot in self._slots if part.start <= slot.start < min(slot.stop, part.stop)]
        chunks = tuple(self._slots.index(slot) for slot in filled)
        self.transfers.append(Transfer(self.rounds, of, self.rank, chunks, len(came), add))

    def exchange(self, partner: int, give: slice, take: slice, *, add: bool = False) -> None:
        """Send elements and receive others, both at once."""
        self.send(give, partner)
        self.receive(take, partner, add=add)

    def next_round(self) -> None:
        """The round is over for this rank when all that it sent is on its way."""
        self._start_sending()
        for work in self._sent:
            work.wait()
        self._sent.clear()
        self.rounds += 1
        if self._remembers:
            self.after.append([self.held[slot].tolist() for slot in self._slots])

    def _send(self, elements: torch.Tensor, to: int) -> None:
        if len(elements):
            self._to_send.append((elements, to))

    def _start_sending(self) -> None:
        """Not before this rank listens: gloo tells so on the connection it sends by, and would tell it afterwards."""
        for elements, to in self._to_send:
            work = dist.isend(elements, to)
            assert work is not None
            self._sent.append(work)
        self._to_send.clear()


def bound(number: int, ranks: int, elements: int) -> int:
    """Where chunk `number` begins; the first chunks take what does not share out evenly."""
    each, more = divmod(elements, ranks)
    return number * each + min(number, more)
