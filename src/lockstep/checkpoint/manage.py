"""The checkpoints of a run while it trains: where it goes on, what it saves, and what stays on disk."""

from __future__ import annotations

import math
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoint.disk import format as fmt
from lockstep.checkpoint.disk.attempts import begin_attempt, check_still_ours, end_attempt
from lockstep.checkpoint.disk.files import check_dtypes, versions
from lockstep.checkpoint.disk.format import (
    Best,
    DamageError,
    Index,
    OptimizerState,
    Training,
    Whole,
    read_index,
    step_folder,
    steps_on_disk,
    write_index,
)
from lockstep.checkpoint.disk.pick import newest_whole
from lockstep.checkpoint.kept import Kept, kept_parts
from lockstep.checkpoint.resume import find_start, go_on_from, is_of
from lockstep.checkpoint.save import SPARE_DISK, Saved, Writer, room_short_of
from lockstep.checkpoint.state import (
    Restoration,
    merge_optimizers,
    model_parts,
    optimizer_groups,
    optimizer_parts,
    optimizer_state,
    restore_progress,
    set_by_script,
    written_here,
)
from lockstep.config.toml import read_toml
from lockstep.errors import RecoveryError, SaveError, UserError
from lockstep.parallel.train_state import TrainState
from lockstep.record.folder import CONFIG, RunFolder
from lockstep.runtime.comm import Comm
from lockstep.step.optim import states_per_parameter
from lockstep.text.units import bytes_text

SECONDS_TO_COMPLETE = 8.0
"""How long a run that fails waits for a checkpoint that is being written."""

BYTES_PER_SECOND = 100e6
"""How fast a disk is taken to be before the first checkpoint has shown it."""


@dataclass(frozen=True)
class SavedBeside:
    """What a checkpoint holds of a run beside its training: where its loaders are, its code, and its last numbers."""

    loaders: Mapping[str, Any]
    code: dict[str, str]
    loss: float | None
    metrics: Mapping[str, Any]


class Checkpoints:
    """What a run comes back from. All ranks call everything here together."""

    def __init__(self, folder: RunFolder, resume: str, seed: int, comm: Comm, warn: Callable[[str], None]) -> None:
        self._folder = folder.path
        self._comm = comm
        self._warn = warn
        self.kept = Kept(comm)
        self._saved_kept: tuple[dict[str, Any], list[int]] = {}, []
        self.keep = 2
        self.keep_every: int | None = None

        def begin() -> tuple[str, str | None]:
            attempt = begin_attempt(folder.path, folder.attempt)
            try:
                found = find_start(folder.path, resume, self._warn_of)
            except BaseException:
                end_attempt(attempt)
                raise
            return str(attempt), str(found.folder) if found else None

        attempt, found = comm.once("find the checkpoint", begin)
        self._attempt = Path(attempt)
        comm.agree(self._check_shared)
        # The checkpoint that a user named, or one of another run, is the one to load, and no other.
        self._named = found is not None and (Path(found) == Path(resume) or not is_of(folder.path, Path(found)))
        self.start = self._open(Path(found)) if found else None
        self.best: tuple[int, float] | None = None
        self.saved_step = -1
        self._saved_settings: dict[str, Any] | None = None  # of the checkpoint that was written last
        self._seed = seed
        self._settle()
        notices = comm.notices(f"checkpoint/{self._attempt.name}")
        self._writer = Writer(folder.path, self._attempt, notices, comm.rank, comm.world_size, comm.beat)
        self._reported = True
        self.save_seconds = 0.0
        """How long the last save took, or about how long one will take."""

    @property
    def _attempt_id(self) -> str:
        return self._attempt.name.removeprefix(".attempt-")

    def is_overtaken(self) -> bool:
        """Whether another attempt of this run has begun."""
        return not self._attempt.is_dir()

    @property
    def training(self) -> Training | None:
        """Where the training stood in the checkpoint it goes on from; None where it begins."""
        return self.start.index.training if self.start else None

    @property
    def code(self) -> dict[str, str]:
        """The digests of the code that wrote the run's own checkpoint which it goes on from."""
        is_own = self.start is not None and is_of(self._folder, self.start.folder)
        return self.training.code if is_own and self.training else {}

    @property
    def step(self) -> int:
        """The step that the run goes on from, 0 where it begins."""
        return self.start.index.step if self.start else 0

    def restore(self, state: TrainState) -> None:
        """Put the checkpoint that the run goes on from into its engine; a damaged one gives way to the one before."""
        while self.start is not None:
            problem = self._read(state, self.start, with_optimizer=True)
            if problem is None:
                restore_progress(state, self.start.index)
                self.kept.restore(self.start)
                go_on = partial(go_on_from, self._folder, self.start, self._attempt_id, self._named)
                self._comm.once("go on from the checkpoint", go_on)
                return
            step = self.start.index.step
            if self._named:
                raise UserError(f"the checkpoint {self.start.folder} is damaged", f"{problem}; give another one")

            def go_back(step: int = step, problem: str = problem) -> str:
                self._warn_of(step, problem)
                return str(newest_whole(self._folder, self._warn_of, before=step, problem=problem).folder)

            self.start = self._open(Path(self._comm.once("go back to an older checkpoint", go_back)))
            self._settle()

    @property
    def last_step(self) -> int | None:
        """The step of the newest checkpoint that `roll_back` can go to, None where there is none."""
        if self.saved_step >= 0:
            return self.saved_step
        return self.start.index.step if self.start else None

    def roll_back(self, state: TrainState) -> int:
        """Put the last checkpoint into the engine, whose step and data position go on; returns that checkpoint's step.

        Nothing is being written while this is called.
        """
        state.is_sound = False
        own = step_folder(self._folder, self.saved_step)
        checkpoint = self.start if self.saved_step < 0 else self._open(own)
        assert checkpoint is not None
        problem = self._read(state, checkpoint, with_optimizer=True)
        if problem is not None:
            raise RecoveryError(f"the run cannot go back to {checkpoint.folder}, which is damaged: {problem}")
        self.kept.restore(checkpoint)
        index = checkpoint.index
        if index.optimizer is None:  # imported weights
            state.optimizer.state.clear()
        if state.loss_scale and index.training and index.training.loss_scale:
            state.loss_scale.restore(index.training.loss_scale)
        state.is_sound = True
        return index.step

    def load_best(self, state: TrainState) -> int:
        """Put the weights of the best checkpoint into the model; returns its step."""
        assert self.best is not None
        folder = step_folder(self._folder, self.best[0])
        problem = self._read(state, self._open(folder), with_optimizer=False)
        if problem is not None:
            raise UserError(f"the checkpoint {folder} is damaged", f"{problem}; train on, or restore it from a backup")
        return self.best[0]

    def save(
        self,
        state: TrainState,
        of_run: SavedBeside,
        *,
        best_loss: float | None,
        emergency: str | None = None,
        wait: bool,
        began: float,
    ) -> None:
        """Write a checkpoint, while the training goes on unless it is to `wait`; nothing where this step is on disk.

        `began` is when the training began to wait for it.
        """
        if best_loss is not None and not math.isfinite(best_loss):
            raise UserError(f"best_loss is {best_loss}", "leave it out for a checkpoint that is not the best")
        step = state.steps_done
        if best_loss is not None:
            self.best = (step, best_loss)
        best = Best(step=self.best[0], loss=self.best[1]) if self.best else None
        if self.saved_step == step:
            if best_loss is not None:
                changes = {"best": best, "metrics": dict(of_run.metrics)}
                self._comm.once("mark the best checkpoint", lambda: self._mark(step, changes))
            return
        kept, tensors, digests = self.kept.collect()
        self._saved_kept = kept, digests
        of_script = kept_parts(tensors, state.cut.layout.coordinate(state.cut.rank)["pp"])
        parts = written_here([*model_parts(state), *optimizer_parts(state), *of_script], state.cut)
        own = sum(box.size * held.part.element_size() for held in parts for box in held.boxes)
        optimizer = self._whole_optimizer(state)
        training = Training(
            seed=self._seed,
            skipped=state.steps_skipped,
            loaders={name: fmt.LoaderState(**state) for name, state in of_run.loaders.items()},
            loss=of_run.loss,
            metrics=dict(of_run.metrics),
            best=best,
            loss_scale=state.loss_scale.state() if state.loss_scale else None,
            attention=None if state.measures_attention else state.attention or "as torch chooses",
            pipeline=fmt.PipelineState(**state.cut.pipeline.state()) if state.cut.pipeline else None,
            emergency=emergency,
            recent_losses=state.spikes.state(),
            kept=kept,
            code=of_run.code,
        )
        index = Index(
            format=fmt.FORMAT,
            step=step,
            attempt=self._attempt_id,
            time=time.time(),
            versions=versions(),
            layout=str(state.cut.layout),
            config=self._config(),
            block_bytes=fmt.BLOCK_BYTES,
            files={},
            tensors={},
            state_dict=state.cut.state_dict_names,
            optimizer=optimizer,
            training=training,
        )
        cramped = not self._writer.staging.has_room_for(own, self._comm.place.local_world_size)
        total, waiting = self._comm.sum([float(own), float(wait or cramped)])
        saved = Saved(step, best_loss is not None, int(total), began)
        keep = (self.keep, self.keep_every, self.best[0] if self.best else None)
        self._writer.start(saved, parts, index, lambda: self._retire(step, *keep), wait=waiting > 0)
        if waiting and not saved.is_complete:
            raise SaveError(saved.failure())
        self.saved_step = step
        self._saved_settings = set_by_script(state)
        self._reported = False

    def catch_up(self, state: TrainState) -> None:
        """Between steps: put into the checkpoint of this step what the script has set since, a learning rate say."""
        if self._saved_settings is None or self.saved_step != state.steps_done:
            return
        self._catch_up_kept()
        now = set_by_script(state)
        # On one rank alone it is a mistake, of which the step will tell.
        if any(self._comm.gather(now != self._saved_settings)):
            self.wait()
            options = [group.options for group in optimizer_groups(state)]
            self._comm.once("bring the checkpoint up to date", lambda: self._mark_settings(now, options))
        self._saved_settings = now

    def _catch_up_kept(self) -> None:
        plain, _, digests = self.kept.collect()
        if digests != self._saved_kept[1]:
            self._warn(
                f"tensors of run.keep have changed since the checkpoint of step {self.saved_step} was written, which "
                "has what they were: change them before run.save, run.validate or the end of the step"
            )
        elif plain != self._saved_kept[0]:
            self.wait()
            self._comm.once("bring what is kept up to date", lambda: self._mark(self.saved_step, {"kept": plain}))
        self._saved_kept = plain, digests

    def completed(self) -> Saved | None:
        """A checkpoint that is complete on disk since this was asked last."""
        current = self._writer.current
        if self._reported or current is None or not current.is_complete:
            return None
        self._reported = True
        self.save_seconds = current.seconds
        return current

    @property
    def has_failed(self) -> bool:
        """Whether a checkpoint could not be written. Ranks learn of it at different times."""
        current = self._writer.current
        return current is not None and current.problem is not None

    def wait(self) -> None:
        """Wait until nothing is written any more. When that went wrong, all ranks raise."""
        if self._writer.wait():
            self._comm.barrier()  # nobody takes the store away while another one still reads the last note
        current = self._writer.current
        if current is not None and current.note is not None:
            self._warn(current.note)
            current.note = None
        if current is not None and current.problem is not None:
            raise SaveError(current.failure())

    def leave(self) -> None:
        """The run ends or fails; nothing is raised."""
        self._writer.abandon(SECONDS_TO_COMPLETE)
        if self._comm.rank == 0:
            end_attempt(self._attempt)

    def check_room(self, state: TrainState) -> None:
        """Refuse a run that the disk has no room to save, before it begins."""
        parts = model_parts(state)
        self._comm.agree(lambda: check_dtypes((held.name, held.part.dtype) for held in parts))
        if self.start is not None and self.start.index.training is not None:
            size = self.start.index.bytes
        else:
            trained = sum(held.bytes for held in parts if held.is_first)
            stages = state.cut.layout.world_size // state.cut.layout.pp
            size = int(self._comm.sum([trained / stages])[0]) * (1 + states_per_parameter(state.optimizer))

        self.save_seconds = size / BYTES_PER_SECOND

        def check() -> None:
            if short := room_short_of(self._folder, size):
                raise UserError(
                    f"the disk of {self._folder} has no room for a checkpoint ({short})",
                    "free some space, or use --run-dir on another disk",
                )
            free = shutil.disk_usage(self._folder).free
            most = self.keep + 2 - len(steps_on_disk(self._folder))
            if free < most * size + SPARE_DISK:
                self._warn(
                    f"the disk has room for {int((free - SPARE_DISK) // size)} checkpoints of about {bytes_text(size)} "
                    f"beside {bytes_text(SPARE_DISK)} for logs, and this run will hold up to {most} more "
                    "(keep, the best, and one being written): free some"
                )

        self._comm.once("check the space on disk", check)

    def _check_shared(self) -> None:
        if not self._attempt.is_dir():
            raise UserError(
                f"rank {self._comm.rank} on {socket.gethostname()} does not see the folder {self._attempt.parent}",
                "use --run-dir on a disk that all nodes share",
            )

    def _open(self, folder: Path) -> Whole:
        """A checkpoint that all ranks see; where one does not, all refuse it."""
        opened: list[Whole] = []
        self._comm.agree(lambda: opened.append(fmt.open_or_refuse(folder)))
        return opened[0]

    def _warn_of(self, step: int, problem: str) -> None:
        """Tell people of a checkpoint that is passed over."""
        text = f"the checkpoint of step {step} is damaged ({problem}): it is set aside, and the one before it is tried"
        self._warn(text)

    def _settle(self) -> None:
        """Take over what the checkpoint that was found says of the run."""
        self.best, self.saved_step = None, -1
        training = self.training
        if self.start is None or training is None:
            return
        if training.seed != self._seed:
            raise UserError(
                f"the checkpoint {self.start.folder.name} was written with seed {training.seed} and this run has seed "
                f"{self._seed}",
                "use the old seed, or start anew with --resume never",
            )
        if is_of(self._folder, self.start.folder):
            # A best one that gave way to a better one, which was damaged since, is not there any more.
            if training.best is not None and training.best.step in steps_on_disk(self._folder):
                self.best = (training.best.step, training.best.loss)
            self.saved_step = self.start.index.step

    def _config(self) -> dict[str, Any]:
        """The resolved config of the run, for the index, which rank 0 writes."""
        path = self._folder / CONFIG
        return read_toml(path) if self._comm.rank == 0 and path.is_file() else {}

    def _read(self, state: TrainState, checkpoint: Whole, with_optimizer: bool) -> str | None:
        """Put a checkpoint into the engine, or say what is damaged on any rank: then the engine is not usable yet."""
        restorations: list[Restoration] = []
        self._comm.agree(lambda: restorations.append(Restoration(state, checkpoint, with_optimizer)))
        problem = None
        try:
            with self._comm.beat.busy():
                restorations[0].read()
        except DamageError as error:
            problem = str(error)
        for told in self._comm.gather(problem):
            if told is not None:
                text: str = told
                return text
        restorations[0].finish()
        return None

    def _whole_optimizer(self, state: TrainState) -> OptimizerState:
        states: list[OptimizerState] = []
        self._comm.agree(lambda: states.append(optimizer_state(state)))
        if state.cut.layout.pp == 1:
            return states[0]
        everybody = self._comm.gather(states[0].model_dump(mode="json"))
        return merge_optimizers([OptimizerState.model_validate(one) for one in everybody], state.cut.tensor_names)

    def _mark(self, step: int, changes: dict[str, Any]) -> None:
        folder = step_folder(self._folder, step)
        check_still_ours(self._attempt)
        index = read_index(folder)
        assert index.training is not None
        write_index(folder, index.model_copy(update={"training": index.training.model_copy(update=changes)}))

    def _mark_settings(self, settings: dict[str, Any], options: list[dict[str, Any]]) -> None:
        folder = step_folder(self._folder, self.saved_step)
        check_still_ours(self._attempt)
        index = read_index(folder)
        assert index.optimizer is not None
        pairs = zip(index.optimizer.groups, options, strict=True)
        groups = [group.model_copy(update={"options": new}) for group, new in pairs]
        optimizer = index.optimizer.model_copy(update={**settings, "groups": groups})
        write_index(folder, index.model_copy(update={"optimizer": optimizer}))

    def _retire(self, newest_step: int, keep: int, every: int | None, best: int | None) -> str | None:
        """Delete checkpoints that need not stay, now that a newer one was read back; returns what went wrong."""
        check_still_ours(self._attempt)
        for step in kept_no_longer(steps_on_disk(self._folder), newest_step, keep, every, best):
            doomed = step_folder(self._folder, step)
            # Renamed first: half a folder must never look like a checkpoint.
            hidden = doomed.with_name(f".{doomed.name}.deleting")
            try:
                remove(hidden)
                doomed.rename(hidden)
                remove(hidden)
            except OSError as error:
                return f"the checkpoint of step {step} cannot be deleted ({error.strerror}), though it need not stay"
        return None


def kept_no_longer(steps: list[int], newest_step: int, keep: int, every: int | None, best: int | None) -> list[int]:
    """Of the checkpoints on disk, those that may go: neither among the last, nor the best, nor every so many steps."""
    older = [step for step in steps if step <= newest_step]
    return [step for step in older[:-keep] if step != best and not (every and step % every == 0)]


def remove(path: Path) -> None:
    """Delete a folder and all in it, or whatever else stands in its place."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
