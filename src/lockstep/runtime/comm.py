"""The process groups of a run: the default one, the mesh, and a small one on the CPU for decisions."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lockstep.errors import UserError
from lockstep.layout import AXES, Layout
from lockstep.runtime.place import Place

Reduction = Literal["sum", "mean", "min", "max"]

POLL_SECONDS = 0.05


class Comm:
    """How this rank talks to the others. With one process nothing is started and every call returns its argument.

    Gradients travel on the mesh's groups. Weights, losses, stop requests and other small numbers that ranks decide by
    travel as float64 on a CPU group of their own: reading them never waits for a GPU, and they never interleave with
    the gradients.
    """

    def __init__(
        self,
        place: Place,
        layout: Layout,
        device: torch.device,
        backend: str,
        timeout: datetime.timedelta,
        store: dist.Store | None = None,
    ) -> None:
        self.place = place
        self.rank = place.rank
        self.world_size = place.world_size
        self.mesh: DeviceMesh | None = None
        self._timeout = timeout
        self._control: dist.ProcessGroup | None = None
        self._store: dist.Store | None = None
        if place.world_size == 1:
            return
        if dist.is_initialized():
            raise UserError(
                "torch.distributed is already initialised",
                "let lockstep.init() do it, and drop the other call",
            )
        if place.nodes == 1:
            # Host names that resolve to an address nobody listens on are common on laptops; loopback always works.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._store = store if store is not None else _connect(place, timeout)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default", self._store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
        self._control = dist.new_group(backend="gloo", timeout=timeout)
        self.mesh = _build_mesh(layout, device.type, timeout)
        self.barrier()  # a rank that leaves at once would take down those that are still connecting

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one only along `axis`; None when the axis has size 1."""
        if self.mesh is None or axis not in (self.mesh.mesh_dim_names or ()):
            return None
        return self.mesh.get_group(axis)

    def data_group(self) -> dist.ProcessGroup:
        """A new group of all ranks that read different samples, for collectives that must not wait for others.

        Every rank has to ask for it, in the same order.
        """
        # All ranks, as long as the only axes are dp and fsdp.
        group: dist.ProcessGroup = dist.new_group(timeout=self._timeout)
        return group

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
        return [json.loads(bytes(row[: int(size)].tolist())) for row, size in zip(rows, sizes, strict=True)]

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
                text = json.dumps({"result": prepare()})
            except BaseException as error:
                self._store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
                raise
            self._store.set(key, text)
            return json.loads(text)["result"]
        while not self._store.check([key]):
            time.sleep(POLL_SECONDS)
        answer = json.loads(self._store.get(key))
        if "error" in answer:
            raise RuntimeError(f"rank 0 failed in once({name!r}): {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """Leave all groups. Safe to call twice."""
        if self._control is not None and dist.is_initialized():
            dist.destroy_process_group()
        self._control = self.mesh = self._store = None


def _connect(place: Place, timeout: datetime.timedelta) -> dist.Store:
    """The key-value store all ranks meet at: the launcher's when it runs one, else rank 0's own."""
    assert place.head is not None
    host, _, port = place.head.rpartition(":")
    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        host.strip("[]"),
        int(port),
        place.world_size,
        is_master=place.rank == 0 and not agent_has_store,
        timeout=timeout,
        wait_for_workers=False,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"lockstep/{attempt}", store)


def _build_mesh(layout: Layout, device_type: str, timeout: datetime.timedelta) -> DeviceMesh:
    axes = [axis for axis in AXES if layout.size(axis) > 1]
    mesh = init_device_mesh(device_type, tuple(layout.size(axis) for axis in axes), mesh_dim_names=tuple(axes))
    for axis in axes:
        # Groups of a mesh do not inherit the timeout and would wait 30 minutes (private in torch 2.11 and 2.13).
        dist.distributed_c10d._set_pg_timeout(timeout, mesh.get_group(axis))
    return mesh
