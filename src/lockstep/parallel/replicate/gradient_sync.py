"""How the gradients of one step come together: what every way of doing it answers to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.runtime.torch_private import foreach_copy


class GradientSync:
    """How the gradients of one step come together (all-reduce, reduce-scatter), and what follows from it.

    What a class has nothing to do for is done by the `inner` ones it is made of, or by nobody.
    """

    def __init__(self, inner: Sequence[GradientSync] = ()) -> None:
        self.inner = list(inner)

    @property
    def counts_unused(self) -> bool:
        """Whether `wait` finds out by itself whether any rank has parameters without a gradient.

        Else the ranks have to tell each other what `unused` says.
        """
        return all(one.counts_unused for one in self.inner)

    @property
    def path(self) -> int:
        """Tells apart steps in which a rank gathered its parameters in another order; 0 where nothing is gathered."""
        return sum(one.path for one in self.inner)

    def rest(self) -> None:
        """Between steps: give back what was gathered."""
        for one in self.inner:
            one.rest()

    def begin(self) -> None:
        """Start a step: no gradients."""
        for one in self.inner:
            one.begin()

    def before_backward(self, last: bool) -> None:
        """Before each backward pass; sums may begin in the step's last one on this rank."""
        for one in self.inner:
            one.before_backward(last)

    def reduce(self) -> None:
        """Begin the sums now, where no backward pass was said to be the last."""
        for one in self.inner:
            one.reduce()

    def unused(self) -> int:
        """How many parameters got no gradient on this rank in this step."""
        return sum(one.unused() for one in self.inner)

    def wait(self) -> bool:
        """Wait until all gradients are sums; whether any rank is known to have had unused parameters."""
        found = [one.wait() for one in self.inner]
        return any(found)

    def finish(self, somebody_has_unused: bool) -> None:
        """Make the sums this step's gradients, and hand them to the optimizer."""
        for one in self.inner:
            one.finish(somebody_has_unused)

    def updated(self) -> None:
        """The optimizer has changed what this rank stores of the parameters."""
        for one in self.inner:
            one.updated()

    def restored(self) -> None:
        """A checkpoint, or a script between steps, has."""
        for one in self.inner:
            one.restored()


def sum_together(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over a group in place, all of one format by one all-reduce."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.all_reduce(flat, group=group)
        sums = flat.split([tensor.numel() for tensor in alike])
        foreach_copy(alike, [total.view_as(tensor) for total, tensor in zip(sums, alike, strict=True)])
