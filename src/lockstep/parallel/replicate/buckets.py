"""Data parallelism by replication (DDP): gradients all-reduced in fixed buckets, as they fill.

torch's DDP averages, wraps the module under another name and rebuilds its buckets after the first backward, which
changes the order of summation and with it the bits of a resumed run. This is the part of it we need, in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from lockstep.config.schema import Format
from lockstep.errors import UserError
from lockstep.parallel.build.formats import sum_dtype
from lockstep.parallel.replicate.gradient_sync import GradientSync
from lockstep.runtime.comm import Comm

FIRST_BUCKET_BYTES = 1 << 20  # small, so that communication starts early in the backward pass
BUCKET_BYTES = 25 << 20


class GradientBuckets(GradientSync):
    """The gradients of a replicated model, kept as views into flat buffers that are summed over `group`."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup,
        comm: Comm,
        reduce_dtype: Format = "fp32",
    ) -> None:
        super().__init__()
        self._group = group
        self._comm = comm
        self._buckets: list[_Bucket] = []
        self._summing = False
        self._next = 0
        self._names = {parameter: name for name, parameter in named if parameter.requires_grad}
        # By number, not as sets of parameters: this runs once for every parameter of every backward pass.
        self._used = bytearray(len(self._names))
        self._arrived_now = bytearray(len(self._names))
        numbers = {parameter: number for number, parameter in enumerate(self._names)}
        self._bucket_of: dict[int, _Bucket] = {}
        # Python's garbage collection does not see through a hook: one that held this would keep it, its parameters and
        # its process group for ever.
        me = weakref.ref(self)
        for members in fill_buckets(list(self._names)):
            bucket = _Bucket(members, sum_dtype(members[0].dtype, reduce_dtype))
            self._buckets.append(bucket)
            for parameter in members:
                self._bucket_of[numbers[parameter]] = bucket
                parameter.register_post_accumulate_grad_hook(partial(_arrived, me, numbers[parameter]))
        # On a GPU reading it would wait for the sums.
        self._counts_unused = all(not parameter.is_cuda for parameter in self._names)

    @property
    def counts_unused(self) -> bool:
        """Whether the number that travels with the last bucket is read."""
        return self._counts_unused

    def begin(self) -> None:
        """Start a step: all gradients zero."""
        self._used = bytearray(len(self._names))
        self._summing = False
        self._next = 0
        for bucket in self._buckets:
            bucket.reset()

    def before_backward(self, last: bool) -> None:
        """In the step's last backward pass here, sum each bucket as soon as it is complete."""
        self._summing = last
        self._arrived_now = bytearray(len(self._names))

    def unused(self) -> int:
        """How many parameters got no gradient on this rank in this step."""
        return self._used.count(0)

    def wait(self) -> bool:
        """Wait until all gradients are sums over the replicas; whether any rank is known to have had unused ones."""
        while self._next < len(self._buckets):
            self._start_sum()
        for bucket in self._buckets:
            bucket.wait()
        self._summing = False  # a backward between steps is nobody else's
        return self._counts_unused and bool(self._buckets) and bool(self._buckets[-1].note)

    def finish(self, somebody_has_unused: bool) -> None:
        """Make the sums this step's gradients."""
        if somebody_has_unused:
            self._drop_unused_gradients()

    def arrived(self, number: int, parameter: nn.Parameter) -> None:
        """Autograd has a gradient of this parameter."""
        self._used[number] = 1
        if not self._summing:
            return
        if self._arrived_now[number]:
            raise UserError(
                f"the gradient of {self._names[parameter]} comes in two parts within one backward pass",
                "use checkpoint(..., use_reentrant=False), or recompute=True, for what recomputes it",
            )
        self._arrived_now[number] = 1
        self._bucket_of[number].missing -= 1
        # Every rank has to start the sums in one order, whatever order its gradients come in.
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._start_sum()

    def _start_sum(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if self._next == len(self._buckets):
            bucket.note.fill_(self.unused())
        bucket.start_sum(self._group)

    def _drop_unused_gradients(self) -> None:
        """A parameter used on no rank has no gradient, as in one process: the optimizer must leave it alone."""
        users = self._comm.sum_over_data([float(used) for used in self._used])
        for parameter, ranks in zip(self._names, users, strict=True):
            if not ranks:
                parameter.grad = None


class _Bucket:
    def __init__(self, members: list[nn.Parameter], summed_in: torch.dtype) -> None:
        self.members = members
        self._summed_in = summed_in
        sizes = [parameter.numel() for parameter in members]
        self.flat = torch.zeros(sum(sizes) + 1, dtype=members[0].dtype, device=members[0].device)
        # One number more travels along: how many parameters a rank did not use.
        *views, self.note = self.flat.split([*sizes, 1])
        # Strides too: an optimizer's kernel takes a gradient that is laid out otherwise for one that is not.
        self.views = [
            view.as_strided(parameter.shape, parameter.stride(), view.storage_offset())
            if is_dense(parameter)
            else view.view_as(parameter)
            for parameter, view in zip(members, views, strict=True)
        ]
        self.missing = len(members)
        self._sent = self.flat
        self._work: dist.Work | None = None

    def start_sum(self, group: dist.ProcessGroup) -> None:
        self._sent = self.flat.to(self._summed_in)
        self._work = dist.all_reduce(self._sent, group=group, async_op=True)

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        if self._sent is not self.flat:
            self.flat.copy_(self._sent)
        self._sent, self._work = self.flat, None

    def reset(self) -> None:
        self.flat.zero_()
        self.missing = len(self.members)
        for parameter, view in zip(self.members, self.views, strict=True):
            parameter.grad = view


def _arrived(buckets: weakref.ref[GradientBuckets], number: int, parameter: nn.Parameter) -> None:
    if (alive := buckets()) is not None:
        alive.arrived(number, parameter)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the numbers of a tensor stand side by side in memory, in whatever order."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def fill_buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters by bucket, in the order their gradients usually come: last layer first."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        limit = FIRST_BUCKET_BYTES if len(buckets) <= 1 else BUCKET_BYTES
        if not buckets or size >= limit or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets
