"""How the gradients of a step are summed (all-reduce): in one process, over replicas, shards and stages."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from lockstep.config.schema import NumericsConfig
from lockstep.layout import Layout
from lockstep.parallel.pipeline.ties import Tie, add_up, copy_to_all
from lockstep.parallel.replicate.buckets import GradientBuckets
from lockstep.parallel.replicate.shard import ShardedGradients
from lockstep.parallel.replicate.zero1 import ShardedOptimizer
from lockstep.runtime.comm import Comm


class GradientSync(Protocol):
    """How the gradients of one step come together.

    One that `counts_unused` finds out by itself, in `wait`, whether any rank has parameters without a gradient; else
    the ranks have to tell each other what `unused` says.
    """

    @property
    def counts_unused(self) -> bool: ...
    @property
    def path(self) -> int:
        """Tells apart steps in which a rank gathered its parameters in another order; 0 where nothing is gathered."""

    def rest(self) -> None: ...
    def begin(self) -> None: ...
    def before_backward(self, last: bool) -> None: ...
    def unused(self) -> int: ...
    def wait(self) -> bool: ...
    def finish(self, somebody_has_unused: bool) -> None: ...
    def updated(self) -> None: ...
    def restored(self) -> None: ...


def whole_gradients(
    parameters: list[tuple[str, nn.Parameter]], layout: Layout, comm: Comm, numerics: NumericsConfig
) -> tuple[GradientSync, list[tuple[str, nn.Parameter]]]:
    """How gradients of parameters that every data rank holds whole come together, and what the optimizer works on."""
    if layout.fsdp > 1:
        optimizer = ShardedOptimizer(parameters, comm, numerics.reduce_dtype)
        return optimizer, list(optimizer.rows.items())
    if (replicas := comm.group("dp") if layout.cp == 1 else comm.group_over("dp", "cp")) is not None:
        return GradientBuckets(parameters, replicas, comm, numerics.reduce_dtype), parameters
    return LocalGradients([parameter for _, parameter in parameters]), parameters


class PipelineGradients:
    """The gradients of the stages of one rank: reduced after the last of their backward passes, and ties added up."""

    counts_unused = False
    path = 0  # the parts of a stage are called in one order, or the forward is refused

    def __init__(self, stages: list[GradientSync], ties: list[Tie]) -> None:
        self._stages = stages
        self._ties = ties

    def rest(self) -> None:
        """Every stage as it is between steps."""
        for stage in self._stages:
            stage.rest()

    def begin(self) -> None:
        """Start a step."""
        for stage in self._stages:
            stage.begin()

    def before_backward(self, last: bool) -> None:  # noqa: ARG002 - of one stage it may be
        """Nothing is summed before all of them are done: the stages of a pipeline end at different times."""
        for stage in self._stages:
            stage.before_backward(False)

    def unused(self) -> int:
        """How many parameters got no gradient on this rank in this step."""
        return sum(stage.unused() for stage in self._stages)

    def wait(self) -> bool:
        """Sum over the data ranks, now."""
        for stage in self._stages:
            if isinstance(stage, ShardedGradients):
                stage.reduce()
        found = [stage.wait() for stage in self._stages]
        return any(found)

    def finish(self, somebody_has_unused: bool) -> None:
        """Make the sums this step's gradients, those of tied parameters over their stages too."""
        for stage in self._stages:
            stage.finish(somebody_has_unused)
        add_up(self._ties)

    def updated(self) -> None:
        """The optimizer has changed what this rank has of the parameters."""
        for stage in self._stages:
            stage.updated()
        copy_to_all(self._ties)

    def restored(self) -> None:
        """A checkpoint has."""
        for stage in self._stages:
            stage.restored()
        copy_to_all(self._ties)


class LocalGradients:
    """One process: gradients need no synchronisation."""

    counts_unused = True
    path = 0

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters

    def rest(self) -> None:
        """Nothing to give back."""

    def begin(self) -> None:
        """Start a step: no gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def before_backward(self, last: bool) -> None:
        """Nothing to prepare."""

    def unused(self) -> int:
        """Nothing to agree on."""
        return 0

    def wait(self) -> bool:
        """Nothing to wait for."""
        return False

    def finish(self, somebody_has_unused: bool) -> None:
        """They are this step's gradients already."""

    def updated(self) -> None:
        """Nothing to gather."""

    def restored(self) -> None:
        """Nothing to gather."""
