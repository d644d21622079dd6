"""The slow link is named, or the rank or node that all slow links have in common; sound ones are left alone."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from lockstep.config.cluster import Cluster, Node
from lockstep.links.expected import ExpectedSpeed, Network, expect, find_disappointments, look_at_network
from lockstep.links.measured import Pair, medians
from lockstep.links.slow_links import find_slow, pair_rounds

FAST, SLOW = 2.0, 0.12


def pairs(ranks: int, slow: set[tuple[int, int]], uneven: float = 0.2) -> list[Pair]:
    """All pairs, each a little different from the next."""
    return [
        Pair(a=a, b=b, gb_s=SLOW if (a, b) in slow else FAST * (1 - uneven * (a + b) / (2 * ranks)), latency=3e-5)
        for a, b in combinations(range(ranks), 2)
    ]


def found(slow: set[tuple[int, int]], nodes: list[int]) -> list[tuple[str, str]]:
    hosts = [f"host{node}" for node in nodes]
    return [(one.check, one.where) for one in find_slow(pairs(len(nodes), slow), nodes, hosts)]


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1], [0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2], list(range(8))])
def test_even_links_are_left_alone(nodes: list[int]) -> None:
    assert found(set(), nodes) == []


def test_one_slow_link_between_nodes_is_named_with_its_ranks_and_hosts() -> None:
    (only,) = find_slow(pairs(4, {(1, 3)}), [0, 1, 2, 3], ["a", "b", "c", "d"])
    assert (only.check, only.level) == ("slow link", "slow")
    assert only.evidence.startswith("the link between rank 1 (b) and rank 3 (d) is slow: 0.12 GB/s, the others 1.")
    assert "cable" in only.fix


def test_a_slow_node_is_named_and_not_its_partners() -> None:
    assert found({(0, 2), (1, 2)}, [0, 1, 2]) == [("slow node", "host2")]
    assert found({(0, 1), (1, 2), (1, 3)}, [0, 1, 2, 3]) == [("slow node", "host1")]
    (only,) = find_slow(pairs(3, {(0, 2), (1, 2)}), [0, 1, 2], ["a", "b", "c"])
    assert only.evidence.startswith("every link of node c is slow: 0.12 GB/s, the others")


def test_a_slow_node_of_several_ranks_is_one_finding() -> None:
    nodes = [0, 0, 1, 1, 2, 2]
    slow = {(a, b) for a, b in combinations(range(6), 2) if nodes[a] != nodes[b] and 1 in (nodes[a], nodes[b])}
    assert found(slow, nodes) == [("slow node", "host1")]


def test_one_rank_of_a_node_that_is_slow_to_all_others_is_named() -> None:
    nodes = [0, 0, 1, 1, 2, 2]
    slow = {(a, b) for a, b in combinations(range(6), 2) if nodes[a] != nodes[b] and 3 in (a, b)}
    assert found(slow, nodes) == [("slow rank", "rank 3 (host1)")]
    assert found({(0, 2), (1, 2), (2, 3)}, [0, 0, 0, 0]) == [("slow rank", "rank 2 (host0)")]


def test_the_ranks_of_two_nodes_with_a_slow_cable_between_are_one_finding() -> None:
    nodes = [0, 0, 1, 1, 2, 2, 3, 3]
    slow = {(a, b) for a in (0, 1) for b in (4, 5)}
    assert found(slow, nodes) == [("slow link", "rank 0 (host0) and rank 4 (host2)")]


def test_links_between_nodes_are_not_slow_because_those_inside_are_fast() -> None:
    nodes, hosts = [0, 0, 1, 1], ["a", "a", "b", "b"]
    uneven = [
        Pair(a=a, b=b, gb_s=200.0 if nodes[a] == nodes[b] else 10.0, latency=1e-5) for a, b in combinations(range(4), 2)
    ]
    assert find_slow(uneven, nodes, hosts) == []
    assert medians(uneven, nodes) == {True: (200.0, 1e-5, 2), False: (10.0, 1e-5, 4)}


def test_nodes_of_one_name_are_told_apart_by_their_number() -> None:
    (only,) = find_slow(pairs(3, {(0, 2), (1, 2)}), [0, 1, 2], ["box", "box", "box"])
    assert only.where == "box, node 2"


@pytest.mark.parametrize("nodes", [[0] * 5, [0, 0, 1, 1], [0] * 12, list(range(13)), [n // 4 for n in range(32)]])
def test_every_pair_that_matters_meets_once_and_nobody_is_in_two_pairs_of_a_round(nodes: list[int]) -> None:
    rounds = pair_rounds(nodes)
    for together in rounds:
        ranks = [rank for pair in together for rank in pair]
        assert len(ranks) == len(set(ranks))
    met = [pair for together in rounds for pair in together]
    assert len(met) == len(set(met))
    inside = {pair for pair in combinations(range(len(nodes)), 2) if nodes[pair[0]] == nodes[pair[1]]}
    assert inside <= set(met)
    between = {frozenset((nodes[a], nodes[b])) for a, b in met if nodes[a] != nodes[b]}
    assert between == {frozenset(two) for two in combinations(set(nodes), 2)}
    if len(nodes) <= 8:
        assert all(len(together) == 1 for together in rounds), "one pair at a time"


# What links should give --------------------------------------------------------------------------------------------


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / "sys/class" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


ETHERNET = {"net/eth0/speed": "10000\n", "net/eth0/operstate": "up\n", "net/eth0/device/vendor": "x"}
INFINIBAND = {
    "infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)\n",
    "infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
}
DOWN = {"infiniband/mlx5_0/ports/1/rate": "10 Gb/sec (4X SDR)\n", "infiniband/mlx5_0/ports/1/state": "1: DOWN\n"}


def test_what_the_kernel_says_of_cards_is_read(tmp_path: Path) -> None:
    root = plant(tmp_path, ETHERNET | INFINIBAND)
    assert look_at_network("a", "eth0", {}, root) == Network("a", "eth0", 1.25, ("mlx5_0",), 25.0, "")


@pytest.mark.parametrize(
    "files",
    [
        {"net/eth0/speed": "10000\n", "net/eth0/operstate": "up\n"},  # veth: no card behind it
        ETHERNET | {"net/eth0/speed": "-1\n"},
        ETHERNET | {"net/eth0/operstate": "down\n"},
        {},
        DOWN,
    ],
)
def test_what_says_nothing_is_not_believed(tmp_path: Path, files: dict[str, str]) -> None:
    assert look_at_network("a", "eth0", {}, plant(tmp_path, files)) == Network("a", "eth0")
    assert expect(None, [look_at_network("a", "eth0", {}, tmp_path)], "gloo") == {}


@pytest.mark.parametrize(
    ("variables", "setting"),
    [({"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE=1"), ({"NCCL_NET": "Socket"}, "NCCL_NET=Socket")],
)
def test_sockets_where_infiniband_was_expected_are_named_with_the_setting(
    tmp_path: Path, variables: dict[str, str], setting: str
) -> None:
    network = look_at_network("node7", "eth0", variables, plant(tmp_path, ETHERNET | INFINIBAND))
    expected = expect(None, [network], "nccl")
    (only,) = find_disappointments({False: 2.1}, expected, [network], "nccl")
    assert only.evidence.startswith("sockets are used where InfiniBand was expected: node7 has mlx5_0 at 25 GB/s")
    assert f"measured 2.1 GB/s, and {setting} is set" in only.evidence
    assert only.fix == f"unset {setting.partition('=')[0]}"


def test_a_bandwidth_far_below_infiniband_is_named_without_a_setting_too(tmp_path: Path) -> None:
    network = look_at_network("node7", "eth0", {}, plant(tmp_path, ETHERNET | INFINIBAND))
    expected = expect(None, [network], "nccl")
    (only,) = find_disappointments({False: 2.1}, expected, [network], "nccl")
    assert "as if sockets were used" in only.evidence
    assert "NCCL_DEBUG=INFO" in only.fix
    assert find_disappointments({False: 22.0}, expected, [network], "nccl") == []


def test_a_socket_is_compared_with_its_interface_and_with_no_more_than_sockets_give(tmp_path: Path) -> None:
    slow = look_at_network("a", "eth0", {}, plant(tmp_path, ETHERNET | {"net/eth0/speed": "1000\n"}))
    assert expect(None, [slow], "gloo")[False] == ExpectedSpeed(0.125, "interface eth0 of a")
    (only,) = find_disappointments({False: 0.03}, expect(None, [slow], "gloo"), [slow], "gloo")
    assert only.evidence.startswith("links between nodes give 24% of what they should: median 0.03 GB/s")
    fast = look_at_network("a", "eth0", {}, plant(tmp_path, ETHERNET | INFINIBAND | {"net/eth0/speed": "100000\n"}))
    assert expect(None, [fast], "gloo")[False].gb_s == 1.0
    assert find_disappointments({False: 0.9}, expect(None, [fast], "gloo"), [fast], "gloo") == []


def test_a_profile_says_what_gpus_and_nodes_give() -> None:
    node = Node(gpus=4, gpu_link="nvlink", gpu_link_gb_s=300, network_gb_s=50)
    expected = expect(Cluster(name="big", node=node), [], "nccl")
    assert expected[True].gb_s == 100, "without a switch a third of the links goes to each of the other three"
    assert expected[False].gb_s == 12.5, "each GPU has its share of the network"
    (only,) = find_disappointments({True: 20.0, False: 11.0}, expected, [], "nccl")
    assert "links inside a node give 20% of what they should" in only.evidence
    assert "big" in only.evidence
    switched = Node(gpus=8, gpu_link="nvswitch", gpu_link_gb_s=450)
    assert expect(Cluster(name="big", node=switched), [], "nccl")[True].gb_s == 450
