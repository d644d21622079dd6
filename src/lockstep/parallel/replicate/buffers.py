"""Buffers that the user's forward changes: kept in place, and changed once a step if samples do not matter.

A power iteration (spectral_norm) or a counter comes to the same for every forward of a step. A plain loop does it once
a step, so every micro-batch begins with what the buffer was before the step, and what the last one made of it stays.

A buffer that is assigned anew (`self.mean = 0.9 * self.mean + ...`) is another tensor from then on, and checkpoints
know the first. That one gets the value after the last backward: autograd may need what the forward has used of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import UserError
from lockstep.parallel.whole.shown import Shown
from lockstep.runtime.comm import Comm
from lockstep.runtime.torch_private import foreach_copy, own_buffers, version_of


class ForwardBuffers:
    """The buffers of this rank's models, around each forward."""

    def __init__(self, models: Sequence[nn.Module], named: Sequence[tuple[str, torch.Tensor]], comm: Comm) -> None:
        names = {id(buffer): name for name, buffer in named}
        self._homes = [
            (names[id(buffer)], module, leaf, buffer)
            for model in models
            for module in model.modules()
            for leaf, buffer in own_buffers(module).items()
            if buffer is not None and id(buffer) in names
        ]
        self._named = dict(named)
        self._comm = comm
        self._group: dist.ProcessGroup | None = None
        self._once: list[str] = []
        self._before: dict[str, torch.Tensor] = {}
        self._made: dict[str, torch.Tensor] = {}
        self._untouched: dict[str, int] = {}
        self._versions: dict[str, int] = {}

    def change_once(self, names: Collection[str]) -> None:
        """These, of all ranks, come to the same in every forward of a step: one counts."""
        if names and self._comm.data_size > 1 and self._group is None:
            self._group = self._comm.data_group()
        self._once = [name for name in self._named if name in names or name in self._once]

    @torch.no_grad()
    def begin(self) -> None:
        """Before a step, or a trial of one."""
        self.take_in()
        self._made = {}
        self._before = {name: self._named[name].clone() for name in self._once}
        self._versions = {name: version_of(self._named[name]) for name in self._once}
        self._untouched = dict(self._versions)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Enter it around a forward."""
        self._check()
        with torch.no_grad():
            for name, before in self._before.items():
                if version_of(self._named[name]) != self._untouched[name]:
                    self._named[name].copy_(before)
                    self._untouched[name] = version_of(self._named[name])
        try:
            yield
        except BaseException:
            self._put_first_back()
            raise
        assigned = {}
        for name, module, leaf, first, now in self._assigned():
            if name in self._before:
                assigned[name] = now
                own_buffers(module)[leaf] = first
            else:
                own_buffers(module)[leaf] = now.detach()  # the next forward goes on with the value
        for name in self._before:
            self._versions[name] = version_of(self._named[name])
            if name in assigned or self._versions[name] != self._untouched[name] or name not in self._made:
                self._made[name] = assigned.get(name, self._named[name]).detach().clone()

    def _assigned(self) -> Iterator[tuple[str, nn.Module, str, torch.Tensor, torch.Tensor]]:
        """Where another tensor stands than at first: name, module, its name there, the first and the other tensor."""
        for name, module, leaf, first in self._homes:
            now = dict.get(own_buffers(module), leaf)  # as it is stored, also where the model shows something else
            if now is not first and now is not None and now.shape == first.shape and now.dtype == first.dtype:
                yield name, module, leaf, first, now

    @torch.no_grad()
    def take_in(self) -> None:
        """Give the first tensors the values of those that were assigned; no backward may follow that needs the old."""
        # What is shown was written when it was changed. Copies, because buffers may have changed places.
        new = [(first, now.clone()) for *_, first, now in self._assigned() if not isinstance(now, Shown)]
        for first, value in new:
            first.copy_(value)
        self._put_first_back()

    def _put_first_back(self) -> None:
        for _, module, leaf, first, _ in self._assigned():
            own_buffers(module)[leaf] = first

    def _check(self) -> None:
        """Nobody but a forward has changed what changes once a step."""
        again = {name for name, *_ in self._assigned()} if self._versions else set()
        for name, version in self._versions.items():
            if name in again or version_of(self._named[name]) != version:
                raise UserError(
                    f"the buffer {name} changes once more when a forward is computed again in the backward pass",
                    "do without recompute (gradient checkpointing) around what changes it",
                )

    @torch.no_grad()
    def finish(self) -> None:
        """After the last backward of a step: what one forward made stays, on ranks that had none too."""
        self._check()
        self.take_in()
        if not self._before:
            return
        made = [
            (self._made[name] if name in self._made else torch.full_like(before, -torch.inf, dtype=torch.float64))
            for name, before in self._before.items()
        ]
        flat = torch.cat([one.double().reshape(-1) for one in made])
        if self._group is not None:
            dist.all_reduce(flat, dist.ReduceOp.MAX, group=self._group)
        sizes = [before.numel() for before in self._before.values()]
        for name, values in zip(self._before, flat.split(sizes), strict=True):
            self._named[name].copy_(values.view_as(self._named[name]))
        self.forget()

    def forget(self) -> None:
        """No step is under way, and what was assigned in one that does not count is left."""
        self._put_first_back()
        self._before, self._versions, self._made = {}, {}, {}


class BufferCopies:
    """The buffers of a model as they were before a step, to be put back when the step does not count."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = list(buffers)
        self._copies: list[torch.Tensor] = []
        self._versions: list[int] = []

    @torch.no_grad()
    def take(self) -> None:
        """Before a step: copy what may have changed since the last one."""
        if not self._copies:
            self._copies = [buffer.clone() for buffer in self._buffers]
        else:
            pairs = list(zip(self._copies, self._buffers, self._versions, strict=True))
            # BatchNorm changes its statistics without a word; of masks and counters it is known.
            _copy_all((copy, buffer) for copy, buffer, _ in pairs if buffer.is_floating_point())
            _copy_all(
                (copy, buffer)
                for copy, buffer, version in pairs
                if not buffer.is_floating_point() and version_of(buffer) != version
            )
        self._versions = [version_of(buffer) for buffer in self._buffers]

    @property
    def values(self) -> Sequence[torch.Tensor]:
        """As they were before the step."""
        return self._copies

    def changed(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The buffers that are no longer as they were, by number, with what they are now."""
        for number, (buffer, copy) in enumerate(zip(self._buffers, self._copies, strict=True)):
            if not _is_same(buffer, copy):
                yield number, buffer.clone()

    @torch.no_grad()
    def put_back(self) -> None:
        """The step does not count."""
        _copy_all(zip(self._buffers, self._copies, strict=False))


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the values are the same; NaN is what it was where it still is NaN."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair into the first, by as few kernels as there can be."""
    listed = list(pairs)
    if listed:
        foreach_copy([into for into, _ in listed], [source for _, source in listed])
