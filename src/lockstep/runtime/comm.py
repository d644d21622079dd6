"""The process groups of a run: the default one, the mesh, and a small one on the CPU for decisions."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lockstep.errors import UserError
from lockstep.layout import AXES, Layout
from lockstep.runtime.axis import Axis
from lockstep.runtime.heartbeat import Beat
from lockstep.runtime.host.network import address_towards, interface_of, is_loopback
from lockstep.runtime.notices import Notices
from lockstep.runtime.process import set_default_environment
from lockstep.runtime.rank_env import Place
from lockstep.runtime.torch_private import set_timeout

Reduction = Literal["sum", "mean", "min", "max"]

POLL_SECONDS = 0.05

# Renamed in torch 2.13.
gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_sums_into = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Comm:
    """How this rank talks to the others. With one process nothing is started and every call returns its argument.

    Gradients travel on the mesh's groups. Weights, losses, stop requests and other small numbers that ranks decide by
    travel as float64 on a CPU group of their own: reading them never waits for a GPU, and they never interleave with
    the gradients. `store` is one that the caller has for the ranks to meet at, `met` is where they have met already.
    """

    def __init__(
        self,
        place: Place,
        layout: Layout,
        device: torch.device,
        backend: str,
        timeout: datetime.timedelta,
        store: dist.Store | None = None,
        met: dist.Store | None = None,
    ) -> None:
        self.place = place
        self.beat = Beat()
        self.rank = place.rank
        self.world_size = place.world_size
        self.mesh: DeviceMesh | None = None
        self.tensor_mesh: DeviceMesh | None = None
        """The same ranks with the tp axis before those that shard: the parts of a matrix are sharded."""
        self._timeout = timeout
        self._layout = layout
        self._data_control: dist.ProcessGroup | None = None
        self._control: dist.ProcessGroup | None = None
        self._store: dist.Store | None = None
        self._given_store = store
        if place.world_size == 1:
            return
        self._store = met if met is not None else meet(place, timeout, store)
        if place.nodes == 1:
            # Host names that resolve to an address nobody listens on are common on laptops; loopback always works.
            set_default_environment("GLOO_SOCKET_IFNAME", "lo")
        elif store is None:
            use_interface(_interface_to_peers(place, self._store))
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default", self._store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
        self._control = dist.new_group(backend="gloo", timeout=timeout)
        self.mesh = build_mesh(layout, device.type, timeout)
        if layout.tp > 1:
            self.tensor_mesh = build_mesh(layout, device.type, timeout, ("pp", "cp", "dp", "tp", "fsdp"))
        if layout.data_size < layout.world_size:
            self._data_control = self._new_groups(layout.ranks_along("dp", "fsdp"), "gloo")
        self.barrier()  # a rank that leaves at once would take down those that are still connecting

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one only along `axis`; None when the axis has size 1."""
        if self.mesh is None or axis not in (self.mesh.mesh_dim_names or ()):
            return None
        return self.mesh.get_group(axis)

    def groups(self, *axes: str) -> list[dist.ProcessGroup]:
        """The groups along these axes, of those that are larger than 1."""
        return [group for axis in axes if (group := self.group(axis)) is not None]

    def data_group(self) -> dist.ProcessGroup:
        """A new group of all ranks that read different samples, for collectives that must not wait for others.

        Every rank has to ask for it, in the same order.
        """
        return self.group_over("dp", "fsdp")

    def group_over(self, *axes: str) -> dist.ProcessGroup:
        """A new group of the ranks that differ from this one only along these axes; every rank has to ask."""
        group = self._new_groups(self._layout.ranks_along(*axes), None)
        assert group is not None
        return group

    def cut_axis(self, name: str) -> Axis | None:
        """An axis that tensors are cut over, as this rank sees it; None when it has size 1."""
        if (group := self.group(name)) is None:
            return None
        return Axis(name, group.size(), group.rank(), group.group_name, zigzag=name == "cp")

    def groups_of(self, members: Sequence[int]) -> dist.ProcessGroup | None:
        """A new group of some places of the pipeline, one for each coordinate of the other axes; every rank asks.

        None for a rank that is not in one.
        """
        return self._new_groups([[ranks[at] for at in members] for ranks in self._layout.ranks_along("pp")], None)

    def pipeline_groups(self) -> dict[tuple[int, int], dist.ProcessGroup]:
        """What each pair of places in the pipeline talks through, in each direction; every rank has to ask.

        Over NCCL a group for each direction: what a rank sends and receives would wait for each other in one queue.
        """
        places = range(self._layout.pp)
        if (whole := self.group("pp")) is None or dist.get_backend(whole) != "nccl":
            return {(a, b): whole for a in places for b in places} if whole is not None else {}
        neighbours = sorted({(a, (a + by) % len(places)) for a in places for by in (1, -1)})
        found = {pair: self.groups_of(pair) for pair in neighbours}
        return {pair: group for pair, group in found.items() if group is not None}

    def pipeline_ranks(self) -> list[int]:
        """The global ranks of this rank's pipeline, in the order of its places."""
        return next(ranks for ranks in self._layout.ranks_along("pp") if self.rank in ranks)

    def _new_groups(self, sets: Sequence[Sequence[int]], backend: str | None) -> dist.ProcessGroup | None:
        mine: dist.ProcessGroup | None = None
        for ranks in sets:
            group = dist.new_group(list(ranks), backend=backend, timeout=self._timeout)
            if self.rank in ranks:
                mine = group
        return mine

    @property
    def data_size(self) -> int:
        """How many ranks hold the same part of the model and read different samples."""
        return self._layout.data_size

    def sum_over_data(self, values: list[float]) -> list[float]:
        """Add up small numbers over the ranks that read different samples, in float64."""
        if self._data_control is None:
            return self.sum(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self._data_control)
        numbers: list[float] = tensor.tolist()
        return numbers

    def sum(self, values: list[float]) -> list[float]:
        """Add up small numbers over all ranks, in float64; every rank gets the same result."""
        return self.start_sum(values)()

    def start_sum(self, values: list[float]) -> Callable[[], list[float]]:
        """Begin to add up; the function that comes back waits for the result."""
        if self._control is None:
            return lambda: values
        tensor = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(tensor, group=self._control, async_op=True)
        assert work is not None

        def result() -> list[float]:
            work.wait()
            numbers: list[float] = tensor.tolist()
            return numbers

        return result

    def reduce(self, value: Any, how: Reduction) -> Any:
        """Reduce a number or a tensor over all ranks; what comes back has the kind that went in."""
        operations = {
            "sum": dist.ReduceOp.SUM,
            "mean": dist.ReduceOp.SUM,
            "min": dist.ReduceOp.MIN,
            "max": dist.ReduceOp.MAX,
        }
        if how not in operations:
            raise UserError(f"cannot reduce by {how!r}", f"use one of {', '.join(operations)}")
        if isinstance(value, torch.Tensor):
            tensor = value.detach().to("cpu", copy=True).contiguous()
        else:
            tensor = torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
        if how == "mean":
            tensor = tensor.double()
        if self._control is not None:
            dist.all_reduce(tensor, operations[how], group=self._control)
        if how == "mean":
            tensor /= self.world_size
        if isinstance(value, torch.Tensor):
            return tensor.to(value.device, value.dtype if value.is_floating_point() or how != "mean" else torch.float64)
        return tensor.item()

    def gather(self, value: Any) -> list[Any]:
        """One JSON value of every rank, in rank order, on every rank."""
        if self._control is None:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self.sum([float(len(text)) if rank == self.rank else 0.0 for rank in range(self.world_size)])
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(text)] = text
        rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(rows, padded, group=self._control)
        return [json.loads(row[: int(size)].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def agree(self, work: Callable[[], None]) -> None:
        """Do something that may be refused on some ranks alone: then all ranks refuse it. Not for collectives."""
        refusal: list[str] | None = None
        try:
            work()
        except UserError as error:
            refusal = [error.cause, error.fix]
        for told in self.gather(refusal):
            if told is not None:
                raise UserError(*told)

    def is_same(self, text: str) -> bool:
        """Whether all ranks give the same text."""
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
        least = torch.tensor([digest, -digest])
        if self._control is not None:
            dist.all_reduce(least, dist.ReduceOp.MIN, group=self._control)
        return int(least[0]) == -int(least[1])

    def barrier(self) -> None:
        """Wait for every rank."""
        self.sum([0.0])

    def once(self, name: str, prepare: Callable[[], Any]) -> Any:
        """Let rank 0 do something slow while the others wait without a time limit; all get its JSON result.

        Rank 0 gets it through JSON too, so that a tuple is a list on every rank or on none.
        """
        if self._store is None:
            return json.loads(json.dumps(prepare()))
        turn = self._store.add(f"once/{name}/turns/{self.rank}", 1)  # a name may be used again: one key a turn
        key = f"once/{name}/{turn}"
        if self.rank == 0:
            try:
                with self.beat.busy():
                    text = json.dumps({"result": prepare()})
            except BaseException as error:
                refusal = [error.cause, error.fix] if isinstance(error, UserError) else None
                told = {"error": f"{type(error).__name__}: {error}", "refusal": refusal}
                self._store.set(key, json.dumps(told))
                raise
            self._store.set(key, text)
            return json.loads(text)["result"]
        while not self._store.check([key]):
            time.sleep(POLL_SECONDS)
        self.beat.tick()
        answer = json.loads(self._store.get(key))
        if answer.get("refusal"):
            raise UserError(*answer["refusal"])
        if "error" in answer:
            raise RuntimeError(f"rank 0 failed in once({name!r}): {answer['error']}")
        return answer["result"]

    def notices(self, name: str) -> Notices:
        """Notes between the ranks' threads, under a name of their own."""
        return Notices(None if self._store is None else dist.PrefixStore(name, self._store))

    def own_store(self, patience: datetime.timedelta) -> dist.Store | None:
        """A connection of its own to the store of the run, for a thread that must not wait for others' calls."""
        if self._store is None:
            return None
        if self._given_store is not None:
            return dist.PrefixStore("watchdog", self._given_store)
        return dist.PrefixStore("watchdog", _connect(self.place, patience, hosts=False))

    def close(self) -> None:
        """Leave all groups. Safe to call twice."""
        if self._control is not None and dist.is_initialized():
            dist.destroy_process_group()
        self._control = self._data_control = self.mesh = self.tensor_mesh = self._store = None


def meet(place: Place, timeout: datetime.timedelta, given: dist.Store | None = None) -> dist.Store:
    """The store of a start, with nothing in it yet but what ranks compare before they make groups."""
    if dist.is_initialized():
        raise UserError(
            "torch.distributed is already initialised", "let lockstep.init() do it, and drop the other call"
        )
    return given if given is not None else _connect(place, timeout)


def _connect(place: Place, timeout: datetime.timedelta, hosts: bool = True) -> dist.Store:
    """The key-value store all ranks meet at: the launcher's when it runs one, else rank 0's own."""
    host, port = _head_of(place)
    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if place.nodes > 1:
        address_towards(host, port)  # the store would knock for all of the timeout at a host that nobody knows
    store = dist.TCPStore(
        host,
        port,
        place.world_size,
        is_master=hosts and place.rank == 0 and not agent_has_store,
        timeout=timeout,
        wait_for_workers=False,
    )
    # An agent's store outlives its workers. Elsewhere this would part nodes: each counts its own restarts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if agent_has_store else "0"
    return dist.PrefixStore(f"lockstep/{attempt}", store)


def _head_of(place: Place) -> tuple[str, int]:
    assert place.head is not None
    host, _, port = place.head.rpartition(":")
    return host.strip("[]"), int(port)


def _interface_to_peers(place: Place, store: dist.Store) -> str:
    """The network interface of this node that the other nodes reach."""
    own = address_towards(*_head_of(place))
    if place.node_rank > 0:
        store.set("an address off the head's node", own)
    elif is_loopback(own):
        # The head's own name is often 127.0.1.1 on the head itself: the way to a peer tells.
        own = address_towards(store.get("an address off the head's node").decode(), _head_of(place)[1])
    return interface_of(own)


def sent_from(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """Where what is sent has to lie: gloo adds CUDA tensors up, and cannot send them (torch 2.11, 2.13)."""
    return device if dist.get_backend(group) == "nccl" else torch.device("cpu")


def use_interface(name: str) -> None:
    """Have gloo and NCCL talk through a network interface, unless the user has said which."""
    set_default_environment("GLOO_SOCKET_IFNAME", name)
    set_default_environment("TP_SOCKET_IFNAME", name)
    set_default_environment("NCCL_SOCKET_IFNAME", f"={name}")  # without the = any name that begins like it


def build_mesh(
    layout: Layout, device_type: str, timeout: datetime.timedelta, order: tuple[str, ...] = AXES
) -> DeviceMesh:
    """The mesh of a layout, its axes of size 1 left out; `order` is how the others stand, outermost first."""
    present = [axis for axis in AXES if layout.size(axis) > 1]
    axes = [axis for axis in order if axis in present]
    ranks = torch.arange(layout.world_size).view([layout.size(axis) for axis in present])
    if len(axes) == 1:
        # torch would take the default group, in which a script's own collectives would mix with ours.
        group = dist.new_group(timeout=timeout)
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=tuple(axes))
    mesh = DeviceMesh(device_type, ranks.permute([present.index(axis) for axis in axes]), mesh_dim_names=tuple(axes))
    for axis in axes:
        set_timeout(mesh.get_group(axis), timeout)
    return mesh
