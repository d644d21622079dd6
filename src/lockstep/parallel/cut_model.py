"""The description of a model that was cut for this rank: all that engine, checkpoints and checks know of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn

from lockstep.layout import Layout
from lockstep.parallel.build.materialise import named_tensors
from lockstep.parallel.build.names import state_dict_names
from lockstep.parallel.held import Held
from lockstep.parallel.pipeline.runner import Pipeline
from lockstep.parallel.replicate.gradient_sync import GradientSync
from lockstep.parallel.replicate.statistics import RunningStatistics


@dataclass(frozen=True)
class CutModel:
    """A model that was cut for this rank of a layout.

    `models` is the model, or one for each stage of a pipeline that this rank has, `seeded` their modules with a random
    stream of their own. `held` says what this rank holds of every parameter and buffer of the whole model. `counted`
    are the parameters that enter the gradient norm here, summed over `norm_groups`: each of the whole model once.
    `together` says why every rank has to do every forward and backward, where they have to. `skeleton` is the whole
    model without data, where no rank has all of it. `notes` are for people.
    """

    layout: Layout
    rank: int
    models: list[nn.Module]
    blocks: list[str]
    seeded: list[list[nn.Module]]
    held: dict[str, Held]
    gradients: GradientSync
    statistics: RunningStatistics
    counted: list[nn.Parameter]
    norm_groups: list[dist.ProcessGroup]
    together: str | None
    pipeline: Pipeline | None = None
    skeleton: nn.Module | None = None
    notes: list[str] = field(default_factory=list)

    @cached_property
    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What this rank stores of parameters: the optimizer works on it, and checkpoints keep it."""
        return [(name, one.stored) for name, one in self.held.items() if isinstance(one.stored, nn.Parameter)]

    @cached_property
    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """The buffers of this rank."""
        here = ((name, one.stored) for name, one in self.held.items())
        return [(name, one) for name, one in here if one is not None and not isinstance(one, nn.Parameter)]

    @cached_property
    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """What the optimizer is given."""
        return [(name, parameter) for name, parameter in self.parameters if parameter.requires_grad]

    @property
    def whole(self) -> nn.Module:
        """The whole model, maybe without data."""
        return self.skeleton or self.models[0]

    @cached_property
    def parameter_count(self) -> int:
        """How many numbers the parameters of the whole model are."""
        return sum(parameter.numel() for parameter in self.whole.parameters())

    @cached_property
    def state_dict_names(self) -> dict[str, str]:
        """The keys of the whole model's state_dict, each with the one name of its tensor."""
        return state_dict_names(self.whole)

    @cached_property
    def tensor_names(self) -> list[str]:
        """Every parameter and buffer of the whole model, in its order."""
        return [name for name, _ in named_tensors(self.whole)]
