"""The collectives as the courses draw them, on nothing but messages from one rank to another (wire.py).

Every rank runs the same function. Ranks count around: left of rank 0 is the last one. Afterwards, in `wire.held`:
a broadcast has rank 0's buffer everywhere; a reduce has the sum of all buffers on rank 0, an all-reduce everywhere;
an all-gather has every rank's own chunk (chunk r is rank r's) everywhere; a reduce-scatter has the sum of chunk r on
rank r; an all-to-all has in chunk r what rank r gave this one.
"""

from __future__ import annotations

from collections.abc import Callable

from lockstep.lab.wire import Wire
from lockstep.links.collective_cost import Algorithm, Collective, check_algorithm


def tree_broadcast(wire: Wire) -> None:
    """Whoever has it passes it on, so that twice as many have it after every round."""
    everything = wire.chunks(0, wire.ranks)
    for have in _powers_of_two(wire.ranks):
        if wire.rank < have and wire.rank + have < wire.ranks:
            wire.send(everything, to=wire.rank + have)
        elif have <= wire.rank < 2 * have:
            wire.receive(everything, of=wire.rank - have)
        wire.next_round()


def naive_broadcast(wire: Wire) -> None:
    """Rank 0 sends it to one after the other, and all who have it already look on."""
    everything = wire.chunks(0, wire.ranks)
    for other in range(1, wire.ranks):
        if wire.rank == 0:
            wire.send(everything, to=other)
        elif wire.rank == other:
            wire.receive(everything, of=0)
        wire.next_round()


def tree_reduce(wire: Wire) -> None:
    """The broadcast, backwards: half of those who are left hand their sums to the other half."""
    everything = wire.chunks(0, wire.ranks)
    for half in reversed(_powers_of_two(wire.ranks)):
        if half <= wire.rank < 2 * half:
            wire.send(everything, to=wire.rank - half)
        elif wire.rank < half and wire.rank + half < wire.ranks:
            wire.receive(everything, of=wire.rank + half, add=True)
        wire.next_round()


def naive_reduce(wire: Wire) -> None:
    """Rank 0 takes the buffer of one after the other, and adds it."""
    everything = wire.chunks(0, wire.ranks)
    for other in range(1, wire.ranks):
        if wire.rank == other:
            wire.send(everything, to=0)
        elif wire.rank == 0:
            wire.receive(everything, of=other, add=True)
        wire.next_round()


def ring_reduce_scatter(wire: Wire) -> None:
    """Each sum travels once around the ring and grows on its way; it ends where it belongs."""
    left, right = (wire.rank - 1) % wire.ranks, (wire.rank + 1) % wire.ranks
    for step in range(1, wire.ranks):
        wire.send(wire.chunk(wire.rank - step), to=right)
        wire.receive(wire.chunk(wire.rank - step - 1), of=left, add=True)
        wire.next_round()


def ring_all_gather(wire: Wire) -> None:
    """Each rank hands on what it got last; after a whole turn everybody has seen everything."""
    left, right = (wire.rank - 1) % wire.ranks, (wire.rank + 1) % wire.ranks
    for step in range(1, wire.ranks):
        wire.send(wire.chunk(wire.rank - step + 1), to=right)
        wire.receive(wire.chunk(wire.rank - step), of=left)
        wire.next_round()


def ring_all_reduce(wire: Wire) -> None:
    """Twice around the ring: add up, then hand on."""
    ring_reduce_scatter(wire)
    ring_all_gather(wire)


def tree_all_reduce(wire: Wire) -> None:
    """Up the tree and down again."""
    tree_reduce(wire)
    tree_broadcast(wire)


def naive_all_reduce(wire: Wire) -> None:
    """All to rank 0, and from rank 0 to all."""
    naive_reduce(wire)
    naive_broadcast(wire)


def halving_reduce_scatter(wire: Wire) -> None:
    """Two halves of the ranks exchange half of the buffer each; then each half does the same within itself."""
    first, count = 0, wire.ranks  # the chunks that this rank still has to do with
    while count > 1:
        count //= 2
        is_low = wire.rank < first + count
        partner = wire.rank + count if is_low else wire.rank - count
        low, high = wire.chunks(first, count), wire.chunks(first + count, count)
        wire.exchange(partner, give=high if is_low else low, take=low if is_low else high, add=True)
        first = first if is_low else first + count
        wire.next_round()


def doubling_all_gather(wire: Wire) -> None:
    """The halving, backwards: neighbours exchange what they have, then pairs of neighbours, then fours."""
    for count in _powers_of_two(wire.ranks):
        own = wire.rank // count * count  # the first of the chunks that this rank has by now
        partner = wire.rank ^ count
        theirs = partner // count * count
        wire.exchange(partner, give=wire.chunks(own, count), take=wire.chunks(theirs, count))
        wire.next_round()


def halving_doubling_all_reduce(wire: Wire) -> None:
    """As many rounds as the tree, and as few bytes as the ring."""
    halving_reduce_scatter(wire)
    doubling_all_gather(wire)


def naive_all_gather(wire: Wire) -> None:
    """Rank 0 collects the chunks, and sends all of them to one after the other."""
    for other in range(1, wire.ranks):
        if wire.rank == other:
            wire.send(wire.chunk(other), to=0)
        elif wire.rank == 0:
            wire.receive(wire.chunk(other), of=other)
        wire.next_round()
    naive_broadcast(wire)


def naive_reduce_scatter(wire: Wire) -> None:
    """Rank 0 adds up everything, and sends each rank its chunk."""
    naive_reduce(wire)
    for other in range(1, wire.ranks):
        if wire.rank == 0:
            wire.send(wire.chunk(other), to=other)
        elif wire.rank == other:
            wire.receive(wire.chunk(other), of=0)
        wire.next_round()


def ring_all_to_all(wire: Wire) -> None:
    """In round k everybody sends to the rank k places to the right: nobody ever gets two messages at once."""
    for step in range(1, wire.ranks):
        to, of = (wire.rank + step) % wire.ranks, (wire.rank - step) % wire.ranks
        wire.give(wire.chunk(to), to=to)
        wire.receive(wire.slot(of), of=of)
        wire.next_round()


def naive_all_to_all(wire: Wire) -> None:
    """One rank at a time speaks, to one after the other; whose turn is next hears its message last."""
    for turn in range(wire.ranks if wire.ranks > 1 else 0):
        if wire.rank == turn:
            for step in reversed(range(1, wire.ranks)):
                to = (turn + step) % wire.ranks
                wire.give(wire.chunk(to), to=to)
        else:
            wire.receive(wire.slot(turn), of=turn)
        wire.next_round()


FUNCTIONS: dict[tuple[Collective, Algorithm], Callable[[Wire], None]] = {
    ("broadcast", "tree"): tree_broadcast,
    ("broadcast", "naive"): naive_broadcast,
    ("reduce", "tree"): tree_reduce,
    ("reduce", "naive"): naive_reduce,
    ("all-reduce", "ring"): ring_all_reduce,
    ("all-reduce", "tree"): tree_all_reduce,
    ("all-reduce", "naive"): naive_all_reduce,
    ("all-reduce", "halving-doubling"): halving_doubling_all_reduce,
    ("all-gather", "ring"): ring_all_gather,
    ("all-gather", "naive"): naive_all_gather,
    ("all-gather", "halving-doubling"): doubling_all_gather,
    ("reduce-scatter", "ring"): ring_reduce_scatter,
    ("reduce-scatter", "naive"): naive_reduce_scatter,
    ("reduce-scatter", "halving-doubling"): halving_reduce_scatter,
    ("all-to-all", "ring"): ring_all_to_all,
    ("all-to-all", "naive"): naive_all_to_all,
}


def run_algorithm(collective: Collective, algorithm: Algorithm, wire: Wire) -> None:
    """Do it; every rank has to call this."""
    check_algorithm(collective, algorithm, wire.ranks)
    FUNCTIONS[collective, algorithm](wire)


def describe(collective: Collective, algorithm: Algorithm) -> str:
    """What an algorithm does, in a sentence."""
    return FUNCTIONS[collective, algorithm].__doc__ or ""


def _powers_of_two(below: int) -> list[int]:
    return [1 << power for power in range((below - 1).bit_length())]
