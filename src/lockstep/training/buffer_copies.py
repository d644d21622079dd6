"""The buffers of a model as they were before a step, to be put back when the step does not count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from lockstep.runtime.torch_private import foreach_copy, version_of


class BufferCopies:
    """Copies of buffers, each taken again where it may have changed."""

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
