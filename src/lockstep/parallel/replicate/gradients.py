"""How the gradients of a step are summed (all-reduce): in one process, over replicas, shards and stages."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lockstep.config.schema import NumericsConfig
from lockstep.parallel.held import Held
from lockstep.parallel.pipeline.ties import Tie, add_up, copy_to_all
from lockstep.parallel.replicate.buckets import GradientBuckets
from lockstep.parallel.replicate.gradient_sync import GradientSync
from lockstep.parallel.replicate.zero1 import ShardedOptimizer
from lockstep.runtime.comm import Comm

Named = list[tuple[str, nn.Parameter]]


def whole_gradients(
    parameters: Named, held: Mapping[str, Held], comm: Comm, numerics: NumericsConfig
) -> tuple[GradientSync, Named]:
    """How gradients of parameters that every data rank holds whole come together, and what the optimizer works on."""
    if comm.group("fsdp") is not None:
        optimizer = ShardedOptimizer(parameters, held, comm, numerics.reduce_dtype)
        return optimizer, list(optimizer.rows.items())
    replicas = comm.group("dp") if comm.group("cp") is None else comm.group_over("dp", "cp")
    if replicas is not None:
        return GradientBuckets(parameters, replicas, comm, numerics.reduce_dtype), parameters
    return LocalGradients([parameter for _, parameter in parameters]), parameters


class PipelineGradients(GradientSync):
    """The gradients of the stages of one rank: reduced after the last of their backward passes, and ties added up."""

    counts_unused = False
    path = 0  # the parts of a stage are called in one order, or the forward is refused

    def __init__(self, stages: list[GradientSync], ties: list[Tie]) -> None:
        super().__init__(stages)
        self._ties = ties

    def before_backward(self, last: bool) -> None:  # noqa: ARG002 - of one stage it may be
        """Nothing is summed before all of them are done: the stages of a pipeline end at different times."""
        super().before_backward(False)

    def wait(self) -> bool:
        """Sum over the data ranks, now."""
        self.reduce()
        return super().wait()

    def finish(self, somebody_has_unused: bool) -> None:
        """Make the sums this step's gradients, those of tied parameters over their stages too."""
        super().finish(somebody_has_unused)
        add_up(self._ties)

    def updated(self) -> None:
        """Give the other stages of this rank what the optimizer made of tied parameters."""
        super().updated()
        copy_to_all(self._ties)

    def restored(self) -> None:
        """The same after a checkpoint."""
        super().restored()
        copy_to_all(self._ties)


class LocalGradients(GradientSync):
    """One process: gradients need no synchronisation."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._parameters = parameters

    def begin(self) -> None:
        """Start a step: no gradients."""
        for parameter in self._parameters:
            parameter.grad = None
