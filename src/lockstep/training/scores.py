"""Loss and metrics over a dataset, without a gradient: every sample counts once, summed in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from lockstep.data.loader import MicroBatch, in_groups
from lockstep.faults.out_of_memory import memory_explained
from lockstep.parallel.pipeline.runner import MicroBatches
from lockstep.parallel.replicate.shard import call_gathered
from lockstep.parallel.train_state import TrainState
from lockstep.runtime.draws import SCORING
from lockstep.runtime.seeds import seed_everything, seed_of
from lockstep.step.scoring import Metric, MetricFunction, checked_pair
from lockstep.training.engine_parts import EngineParts


@torch.no_grad()
def score_all(
    parts: EngineParts, micro_batches: Iterable[MicroBatch], metrics: Mapping[str, MetricFunction]
) -> dict[str, Metric]:
    """The loss and these metrics over the micro-batches of all ranks."""
    state, forwards, comm, pipeline = parts.state, parts.forwards, parts.comm, parts.state.cut.pipeline
    functions: dict[str, MetricFunction] = {"loss": forwards.summed_loss, **metrics}
    sums = {name: torch.zeros(2, dtype=torch.float64, device=state.device) for name in functions}

    def add(name: str, returned: Any) -> None:
        exact = [
            torch.as_tensor(part, dtype=torch.float64, device=state.device) for part in checked_pair(name, returned)
        ]
        sums[name] += torch.stack([part.reshape(()) for part in exact])

    with scoring(state), state.hidden():
        draws = forwards.draws_by_sample
        for group in in_groups(micro_batches, 1 if pipeline is None else pipeline.at_once):
            comm.beat.at("scoring")
            size = max((len(part.ids) for part in group), default=1)
            with memory_explained(state, forwards.setup.settings.precision, comm.beat, size):
                data = [parts.transfers.send(part.data).take() for part in group]
                forwards.draws.has_drawn = False
                for name, function in functions.items():
                    scored = _score(parts, name, function, group, data, draws)
                    for part, returned in zip(group, scored, strict=False):
                        if not part.filler:
                            add(name, returned)
                draws = draws and forwards.draws.has_drawn  # the first ones tell whether to look on
    state.seed_between_steps()
    flat = comm.sum((torch.cat(list(sums.values())) * parts.speaks).tolist())
    return {name: Metric(*flat[2 * i : 2 * i + 2]) for i, name in enumerate(functions)}


def _score(
    parts: EngineParts,
    name: str,
    function: MetricFunction,
    group: Sequence[MicroBatch],
    data: Sequence[Any],
    draws: bool,
) -> list[Any]:
    """What a metric's function returns for each micro-batch; in a pipeline only its last stage knows."""
    forwards, seed = parts.forwards, parts.forwards.setup.seed

    def start(number: int) -> AbstractContextManager[Any]:
        seed_everything(seed_of(seed, "evaluate"))
        forwards.draws.begin(number, group[number].positions, partial(seed_of, seed, "evaluate"), SCORING)
        return forwards.draws if draws else nullcontext()

    if (pipeline := parts.state.cut.pipeline) is not None:
        return pipeline.score(MicroBatches(name, function, data, start, forwards.computing))
    with start(0), forwards.computing():
        own = forwards.own_tokens(data[0])
        return [call_gathered(parts.state.cut.models[0], lambda model: function(model, own))]


@contextmanager
def scoring(state: TrainState) -> Iterator[None]:
    """In eval mode inside; afterwards every layer is in the mode it was in, and only shards are held."""
    models = state.cut.models
    training = [module for model in models for module in model.modules() if module.training]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
        state.rest()
