"""How far the loaders of a run have come: what a checkpoint keeps of them, and how a run goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.data.loader import Loader, StepBatch
from lockstep.data.order import Position
from lockstep.errors import UserError


class Progress:
    """The loaders of a run by name, and the position of each. `saved` is what the checkpoint has of them."""

    def __init__(self, saved: Mapping[str, dict[str, Any]]) -> None:
        self.loaders: dict[str, Loader] = {}
        self.positions: dict[str, dict[str, Any]] = {}
        self._saved = saved

    def go_on_from(self, saved: Mapping[str, dict[str, Any]]) -> None:
        """Another checkpoint is the one that the run goes on from."""
        self._saved = saved

    @property
    def first(self) -> Loader | None:
        """The loader that was made first: the training's."""
        return next(iter(self.loaders.values()), None)

    @property
    def is_read(self) -> bool:
        """Whether all loaders were read to their end."""
        return all(loader.is_read for loader in self.loaders.values())

    @property
    def workers(self) -> int:
        """How many processes read ahead for all loaders."""
        return sum(loader.workers for loader in self.loaders.values())

    def add(self, loader: Loader) -> None:
        """A loader was made."""
        self.loaders[loader.name] = loader
        self._record(loader, loader.position, loader.steps_done)

    def step_done(self, batch: StepBatch) -> None:
        """A step was done with a batch. Not when the loader hands it out: a save before its step must not count it."""
        self._record(self.loaders[batch.loader], batch.after, self.positions[batch.loader]["steps_done"] + 1)

    def epoch(self, batch: StepBatch | None = None) -> float:
        """How many epochs of the training are done, after a batch or now."""
        loader = self.loaders.get("train")
        if loader is None:
            return 0.0
        position = batch.after if batch else loader.position
        return position.epoch + (position.consumed / loader.order.size if loader.order.size else 0.0)

    def saved(self, name: str, **now: Any) -> dict[str, Any]:
        """Where the checkpoint left a loader; one that would give other samples is refused."""
        saved = self._saved.get(name, {})
        for key, value in now.items():
            if saved and saved[key] != value:
                raise UserError(
                    f"the checkpoint was written with {key} = {saved[key]} and the loader {name!r} now has {value}",
                    "use the data and the batch as before, or start anew with --resume never",
                )
        return saved

    def _record(self, loader: Loader, position: Position, steps_done: int) -> None:
        self.positions[loader.name] = {
            "position": [position.epoch, position.consumed],
            "steps_done": steps_done,
            "micro_batch": loader.order.micro_batch,
            "micro_batch_given": loader.micro_batch_given,
            "samples": loader.order.size,
            "global_batch": loader.order.global_batch,
            "shuffle": loader.order.shuffle,
        }
