"""What links should give: by the profile of the cluster, else by what the node itself says of its network cards."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.config.cluster import Cluster
from lockstep.links.findings import Finding
from lockstep.links.slow_links import SLOW
from lockstep.runtime.host.node_facts import network_ports

SOCKET_GB_S = 1.0
"""One stream over a socket keeps one core busy with copying: more than this is not expected of it on any network."""

INSIDE_FIX = "see that the GPUs reach each other directly: nvidia-smi topo -m, NCCL_P2P_DISABLE unset"
BETWEEN_FIX = (
    "see which interface is used and whether it is the fast one (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), "
    "and what else is on the network"
)
INFINIBAND_FIX = (
    "start with NCCL_DEBUG=INFO and look for NET/IB or NET/Socket; a container needs /dev/infiniband and libibverbs"
)


@dataclass(frozen=True)
class Network:
    """What one node says of the way to the others."""

    host: str
    interface: str
    interface_gb_s: float | None = None
    """Of the interface that reaches the others; None where it does not say, as most virtual ones."""
    infiniband: tuple[str, ...] = ()
    """Its devices with a port that is up, as in mlx5_0."""
    infiniband_gb_s: float | None = None
    """Of the fastest of them."""
    switched_off: str = ""
    """The setting that keeps NCCL from InfiniBand."""

    def as_json(self) -> dict[str, Any]:
        """For the other ranks."""
        return asdict(self)

    @staticmethod
    def from_json(told: dict[str, Any]) -> Network:
        """What another rank sent."""
        return Network(**{**told, "infiniband": tuple(told["infiniband"])})


def look_at_network(
    host: str, interface: str, environment: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> Network:
    """Read what the kernel knows, below `root`, of an interface and of InfiniBand."""
    ports = [port for port in network_ports(root) if port.gbit and port.is_up]
    card = root / "sys/class/net" / interface
    # An interface without a card behind it, such as veth, has a speed too, and it means nothing.
    is_real = (card / "device").exists() or (card / "bonding").exists()
    speeds = [port.gbit / 8 for port in ports if is_real and port.name == interface and port.gbit]
    infiniband = {port.name: port.gbit / 8 for port in ports if port.is_infiniband and port.gbit}
    off = ""
    if environment.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        off = f"NCCL_IB_DISABLE={environment['NCCL_IB_DISABLE']}"
    elif environment.get("NCCL_NET", "").lower() == "socket":
        off = f"NCCL_NET={environment['NCCL_NET']}"
    fastest = max(infiniband.values(), default=None)
    return Network(host, interface, speeds[0] if speeds else None, tuple(infiniband), fastest, off)


@dataclass(frozen=True)
class ExpectedSpeed:
    """GB/s that a pair of ranks should give, and who says so."""

    gb_s: float
    source: str


def expect(cluster: Cluster | None, networks: Sequence[Network], backend: str) -> dict[bool, ExpectedSpeed]:
    """Of pairs inside a node (True) and between nodes (False), as far as anything is known."""
    found: dict[bool, ExpectedSpeed] = {}
    node = cluster.node if cluster else None
    if node and cluster and node.gpu_link_gb_s and backend == "nccl":
        # Without a switch the links of a GPU go to the others in equal parts.
        ways = max(1, node.gpus - 1) if node.gpu_link == "nvlink" else 1
        found[True] = ExpectedSpeed(
            node.gpu_link_gb_s / ways, f"cluster {cluster.name}, {node.gpu_link or 'gpu_link_gb_s'}"
        )
    if node and cluster and node.network_gb_s:
        share = f" for {node.gpus} GPUs" if node.gpus > 1 else ""
        found[False] = ExpectedSpeed(
            node.network_gb_s / max(1, node.gpus), f"cluster {cluster.name}, {node.network_gb_s:g} GB/s a node{share}"
        )
    elif backend == "nccl" and networks and all(network.infiniband_gb_s for network in networks):
        slowest = min(networks, key=lambda network: network.infiniband_gb_s or 0.0)
        found[False] = ExpectedSpeed(
            slowest.infiniband_gb_s or 0.0, f"InfiniBand {slowest.infiniband[0]} of {slowest.host}"
        )
    elif networks and all(network.interface_gb_s for network in networks):
        slowest = min(networks, key=lambda network: network.interface_gb_s or 0.0)
        found[False] = ExpectedSpeed(slowest.interface_gb_s or 0.0, f"interface {slowest.interface} of {slowest.host}")
    if backend == "gloo" and False in found and found[False].gb_s > SOCKET_GB_S:
        found[False] = ExpectedSpeed(
            SOCKET_GB_S, f"sockets; the network itself: {found[False].gb_s:g} GB/s by {found[False].source}"
        )
    return found


def find_disappointments(
    measured: Mapping[bool, float], expected: Mapping[bool, ExpectedSpeed], networks: Sequence[Network], backend: str
) -> list[Finding]:
    """Compare the median pair inside a node (True) and between nodes (False) with what it should give."""
    findings = []
    # One that is told not to use it is the best example.
    with_infiniband = sorted((n for n in networks if n.infiniband), key=lambda network: not network.switched_off)
    for inside, gb_s in measured.items():
        wanted = expected.get(inside)
        far_below = wanted is not None and gb_s < SLOW * wanted.gb_s
        if not inside and backend == "nccl" and with_infiniband and (far_below or with_infiniband[0].switched_off):
            findings.append(_without_infiniband(with_infiniband[0], gb_s))
        elif far_below and wanted is not None:
            where = "inside a node" if inside else "between nodes"
            share = f"links {where} give {gb_s / wanted.gb_s:.0%} of what they should"
            evidence = f"{share}: median {gb_s:.3g} GB/s, expected {wanted.gb_s:.3g} GB/s ({wanted.source})"
            findings.append(Finding("bandwidth", "slow", where, evidence, INSIDE_FIX if inside else BETWEEN_FIX))
    return findings


def _without_infiniband(node: Network, gb_s: float) -> Finding:
    seen = f"{node.host} has {', '.join(node.infiniband)} at {node.infiniband_gb_s:.3g} GB/s, measured {gb_s:.3g} GB/s"
    if node.switched_off:
        evidence = f"sockets are used where InfiniBand was expected: {seen}, and {node.switched_off} is set"
        return Finding("InfiniBand", "slow", node.host, evidence, f"unset {node.switched_off.partition('=')[0]}")
    evidence = f"nodes talk as if sockets were used where InfiniBand was expected: {seen}"
    return Finding("InfiniBand", "slow", node.host, evidence, INFINIBAND_FIX)
