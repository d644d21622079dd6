"""Which link, rank or node is slow: found in the bandwidths of all pairs, without knowing what they should be."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from statistics import median

from lockstep.links.findings import Finding
from lockstep.links.measured import Pair

SLOW = 0.5
"""A link that gives less than this share of what others of its kind give, or of what it should give, is slow."""
FEW_RANKS = 8
"""Up to so many ranks every pair has the machine for itself; with more, pairs that share no rank go together."""

NODE_FIX = "look at its cable, its network card (ethtool, ibstat) and what else runs there, or leave the node out"
RANK_FIX = "see what else runs on its device and cores, and how it is connected (nvidia-smi topo -m)"
LINK_FIX = "look at the cable and the switch ports between the two, or place neighbours of the layout elsewhere"

Ranks = tuple[int, int]


def pair_rounds(nodes: Sequence[int]) -> list[list[Ranks]]:
    """Which pairs of ranks measure together, round after round, given the node of every rank.

    With many ranks on several nodes the pairs inside the nodes come first, one in each node at a time, and then one
    rank stands for its node.
    """
    ranks = range(len(nodes))
    if len(ranks) <= FEW_RANKS:
        return [[pair] for pair in combinations(ranks, 2)]
    members = [[rank for rank in ranks if nodes[rank] == node] for node in sorted(set(nodes))]
    if len(members) == 1:
        return _tournament(members[0])
    inside = [list(combinations(ranks_of_node, 2)) for ranks_of_node in members]
    rounds = [[pairs[n] for pairs in inside if n < len(pairs)] for n in range(max(map(len, inside)))]
    return rounds + _tournament([ranks_of_node[0] for ranks_of_node in members])


def find_slow(pairs: Sequence[Pair], nodes: Sequence[int], hosts: Sequence[str]) -> list[Finding]:
    """Name what is slow among its like: whole nodes first, then ranks, then single links."""
    findings = []
    for inside in (False, True):
        speeds = {(pair.a, pair.b): pair.gb_s for pair in pairs if (nodes[pair.a] == nodes[pair.b]) is inside}
        if len(speeds) < 2:
            continue
        good = good_speed(list(speeds.values()))
        slow = {pair for pair, speed in speeds.items() if speed < SLOW * good}
        others = median(speed for pair, speed in speeds.items() if pair not in slow)
        for kind, where, what, its, fix in _culprits(set(speeds), slow, nodes, node_names(nodes, hosts), inside):
            mine = sorted(speeds[pair] for pair in its)
            ends = dict.fromkeys(f"{speed:.3g}" for speed in (mine[0], mine[-1]))
            gives = f"{' to '.join(ends)} GB/s"
            evidence = f"{what}: {gives}, the others {others:.3g} GB/s (median)"
            findings.append(Finding(f"slow {kind}", "slow", where, evidence, fix))
    return findings


def _culprits(
    links: set[Ranks], slow: set[Ranks], nodes: Sequence[int], names: Mapping[int, str], inside: bool
) -> Iterator[tuple[str, str, str, set[Ranks], str]]:
    """What explains the slow links, each of them once: its kind and name, a sentence, its links, and what to do."""
    left = set(links)
    if not inside:
        for node, its in _slow_throughout(left, slow, lambda rank: nodes[rank]):
            left -= its
            yield "node", names[node], f"every link of node {names[node]} is slow", its, NODE_FIX
    for rank, its in _slow_throughout(left, slow, lambda rank: rank):
        left -= its
        name = f"rank {rank} ({names[nodes[rank]]})"
        yield "rank", name, f"every link of {name}{' inside its node' if inside else ''} is slow", its, RANK_FIX
    between: dict[Ranks, set[Ranks]] = defaultdict(set)
    for pair in left & slow:
        between[pair if inside else (nodes[pair[0]], nodes[pair[1]])].add(pair)
    for _, its in sorted(between.items()):
        a, b = min(its)
        ends = f"rank {a} ({names[nodes[a]]}) and rank {b} ({names[nodes[b]]})"
        yield "link", ends, f"the link between {ends} is slow", its, RANK_FIX if inside else LINK_FIX


def _slow_throughout(links: set[Ranks], slow: set[Ranks], of: Callable[[int], int]) -> list[tuple[int, set[Ranks]]]:
    """The nodes or ranks that have links to at least two others, and only slow ones."""
    found = []
    for who in sorted({of(rank) for pair in links for rank in pair}):
        its = {pair for pair in links if who in (of(pair[0]), of(pair[1]))}
        partners = {of(rank) for pair in its for rank in pair} - {who}
        if len(partners) > 1 and its <= slow:
            found.append((who, its))
    return found


def node_names(nodes: Sequence[int], hosts: Sequence[str]) -> dict[int, str]:
    """What nodes are called: by their host, with a number where two have the same."""
    by_node = dict(zip(nodes, hosts, strict=True))
    several = len(set(by_node.values())) < len(by_node)
    return {node: f"{host}, node {node}" if several else host for node, host in by_node.items()}


def good_speed(values: list[float]) -> float:
    """What sound links give: the upper quartile. With one slow node of three even the median link is slow."""
    return sorted(values)[math.ceil(0.75 * len(values)) - 1]


def _tournament(players: Sequence[int]) -> list[list[Ranks]]:
    """Everybody meets everybody, in as few rounds as there can be, and nobody is in two pairs of a round."""
    circle: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds
