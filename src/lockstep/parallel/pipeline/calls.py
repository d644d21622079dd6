"""A model that is cut into the stages of a pipeline, called between steps: all stages compute it together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import UserError
from lockstep.follow.trees import PLAIN, map_tensors, tensors_of
from lockstep.parallel.pipeline.runner import MicroBatches, Pipeline
from lockstep.parallel.tensor.cut import whole_of
from lockstep.runtime.comm import Comm
from lockstep.runtime.torch_private import call_of, replace_call, tree_leaves, tree_map
from lockstep.runtime.torch_private.seen import require


def answer_calls(pipeline: Pipeline, comm: Comm, device: torch.device) -> None:
    """From now on `model(...)` is a stage's matter in its forward; between steps every rank gets the whole result."""

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(stage.running for stage in pipeline.stages):
            return call_of(module)(*args, **kwargs)
        if opaque := [leaf for leaf in tree_leaves((args, kwargs)) if not _is_plain(leaf)]:
            raise UserError(
                f"the model of a pipeline was given a {type(opaque[0]).__name__}, which every stage would change alone",
                "call it with tensors and plain values (and without a cache: use_cache=False)",
            )
        return _call_whole(pipeline, (args, kwargs), comm, device)

    require("pipeline")
    for stage in pipeline.stages:
        replace_call(stage.model, called)


@torch.no_grad()
def _call_whole(pipeline: Pipeline, given: tuple[Any, Any], comm: Comm, device: torch.device) -> Any:
    """What the whole model returns, on every rank of the pipeline."""

    def call(model: nn.Module, given: tuple[Any, Any]) -> Any:
        return model(*given[0], **given[1])

    (rehearsal,) = pipeline.rehearsals.look(pipeline.stages, "call", call, [given])
    results = pipeline.score(MicroBatches("call", call, [given]))
    last = comm.pipeline_ranks()[pipeline.rank_of[-1]]
    result = results[0] if results else rehearsal.result

    def everywhere(tensor: torch.Tensor) -> torch.Tensor:
        if results:
            whole = whole_of(tensor).contiguous()
        else:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        dist.broadcast(whole, last, group=comm.group("pp"))
        return whole

    return _without_objects(map_tensors(everywhere, result))


def _without_objects(result: Any) -> Any:
    """The result without what only one stage could have made whole, such as a cache."""

    def keep(leaf: Any) -> Any:
        return leaf if _is_plain(leaf) or any(True for _ in tensors_of(leaf)) else None

    return tree_map(keep, result)


def _is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (torch.Tensor, *PLAIN))
