"""The same training with five tools, each as its own users write it.

A contender is a generator that yields after every optimizer step, so that a benchmark can let them take turns within
one process. The Run is made before all of them because Lockstep insists on starting the process group; the others find
it and use it. Lockstep itself comes last, so that no other compiles under the settings it makes for its own compiler.

What they share: the model and its initial weights, the samples of each global batch, AdamW, clipping at 1.0, the
DataLoader's settings. What differs: Lockstep writes its event log and TensorBoard file and adds up the loss over the
ranks in every step, because that is what it does by default. The others run without loggers, progress bars and
checkpoints, and their losses stay where they are until the clock has stopped.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import lightning
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from lightning.fabric import Fabric
from measuring import take_another_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lockstep.run import Run

CLIP = 1.0
LEARNING_RATE = 3e-4

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Problem:
    """What is trained, and on what."""

    build_model: Callable[[], nn.Module]
    """A model on the CPU, with the same weights every time."""
    dataset: Dataset[Batch]
    batch: int
    """Samples of one rank in one step."""
    steps: int
    """No contender is asked for more; the dataset has enough samples for them, so that no epoch ends."""
    block: int
    """How many steps one contender does before the next one's turn."""
    device: torch.device
    precision: Literal["fp32", "bf16"] = "fp32"
    compiled: bool = False
    fused: bool | None = None
    """Whether AdamW is told to be fused. None: as most people write it, and every tool does what it does by default."""
    shuffle: bool = True
    workers: int = 0

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=self.fused)

    def sampler(self) -> DistributedSampler[Batch]:
        return DistributedSampler(self.dataset, self.world_size, self.rank, shuffle=self.shuffle)

    def loader(self, **options: Any) -> DataLoader[Batch]:
        return DataLoader(
            self.dataset,
            batch_size=self.batch,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            **options,
        )


Losses = Generator[float | Tensor]
Contender = Callable[[Problem, Run], Losses]


def raw(problem: Problem, _: Run) -> Losses:
    """torch by hand: DistributedDataParallel, DistributedSampler, autocast, clip_grad_norm_."""
    device = problem.device
    model: Callable[..., Tensor] = problem.build_model().to(device)
    optimizer = problem.optimizer(model.parameters())
    if problem.world_size > 1:
        model = DistributedDataParallel(model)
    if problem.compiled:
        model = torch.compile(model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    bf16 = problem.precision == "bf16"
    for batch in problem.loader(sampler=problem.sampler()):
        x, y = batch["x"].to(device, non_blocking=True), batch["y"].to(device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
            loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        yield loss.detach()


def lockstep(problem: Problem, run: Run) -> Losses:
    """Lockstep at engine level; the layout is the run's."""

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return model(batch["x"], batch["y"], reduction="sum"), batch["y"].numel()

    compiling: dict[str, Any] = {"compile": "model"} if problem.compiled else {}
    name = take_another_model(run)
    engine = run.setup(
        problem.build_model,
        loss,
        optimizer=problem.optimizer,
        clip=CLIP,
        precision=problem.precision,
        **compiling,
    )
    loader = run.loader(
        problem.dataset,
        global_batch=problem.batch * problem.world_size,
        micro_batch=problem.batch,
        steps=problem.steps,
        shuffle=problem.shuffle,
        workers=problem.workers,
        name=name,
    )
    for batch in loader:
        yield engine.step(batch).loss


def fabric(problem: Problem, _: Run) -> Losses:
    """Lightning Fabric: the user's loop, with the tool's model, optimizer and loader."""
    tool = Fabric(**lightning_options(problem))
    tool.launch()
    model = problem.build_model()
    optimizer = problem.optimizer(model.parameters())
    model, optimizer = tool.setup(torch.compile(model) if problem.compiled else model, optimizer)
    for batch in tool.setup_dataloaders(problem.loader(shuffle=problem.shuffle)):
        optimizer.zero_grad()
        loss = model(batch["x"], batch["y"])
        tool.backward(loss)
        tool.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        yield loss.detach()


def accelerate(problem: Problem, _: Run) -> Losses:
    """Accelerate: the user's loop, with everything through `prepare`."""
    tool = Accelerator(
        cpu=problem.device.type == "cpu",
        mixed_precision="bf16" if problem.precision == "bf16" else "no",
        dynamo_backend="inductor" if problem.compiled else "no",
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
    )
    model = problem.build_model()
    optimizer = problem.optimizer(model.parameters())
    model, optimizer, loader = tool.prepare(model, optimizer, problem.loader(shuffle=problem.shuffle))
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch["x"], batch["y"])
        tool.backward(loss)
        tool.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        yield loss.detach()


def trainer(problem: Problem, _: Run) -> Losses:
    """Lightning Trainer, which owns its loop.

    It runs in a thread of its own that a callback holds after every `problem.block` steps, so that it takes its turn
    like the others. Its start falls into its first turn, which is warm-up; a turn costs it two thread switches. It is
    given a sampler because it would shuffle the samples of a training even where the loader says not to.
    """
    asked, answered = threading.Semaphore(0), threading.Semaphore(0)
    losses: list[Tensor] = []
    failures: list[BaseException] = []
    ending = threading.Event()

    class TakeTurns(lightning.Callback):
        def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
            if len(losses) == problem.block:
                answered.release()
                asked.acquire()
                trainer.should_stop = ending.is_set()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = problem.build_model()
            self.trained = torch.compile(self.model) if problem.compiled else self.model

        def training_step(self, batch: Batch) -> Tensor:
            loss = self.trained(batch["x"], batch["y"])
            losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return problem.optimizer(self.model.parameters())

        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            # Not `gradient_clip_val`: with mixed precision the Trainer refuses it for any fused optimizer.
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)

    def fit() -> None:
        try:
            lightning.Trainer(
                **lightning_options(problem),
                max_steps=problem.steps,
                max_epochs=-1,
                callbacks=[TakeTurns()],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            ).fit(Module(), problem.loader(sampler=problem.sampler()))
        except BaseException as error:
            failures.append(error)
        finally:
            answered.release()

    thread = threading.Thread(target=fit, name="lightning-trainer", daemon=True)
    thread.start()
    try:
        while True:
            answered.acquire()
            if failures:
                raise failures[0]
            if not losses:
                return
            turn, losses[:] = losses[:], []
            yield from turn
            asked.release()
    finally:
        ending.set()
        asked.release()
        thread.join()


def lightning_options(problem: Problem) -> dict[str, Any]:
    return {
        "accelerator": problem.device.type,
        "devices": problem.world_size,
        "strategy": "ddp" if problem.world_size > 1 else "auto",
        "precision": "bf16-mixed" if problem.precision == "bf16" else "32-true",
    }


CONTENDERS: dict[str, Contender] = {
    "raw": raw,
    "fabric": fabric,
    "trainer": trainer,
    "accelerate": accelerate,
    "lockstep": lockstep,
}


def choose(text: str) -> list[str]:
    """The contenders of `--contenders a,b`; raw is always one, as the measure of the others."""
    names = ["raw", *text.split(",")]
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise SystemExit(f"no contender {unknown[0]!r}: choose from {', '.join(CONTENDERS)}")
    return [name for name in CONTENDERS if name in names]


def quiet_peers() -> None:
    """Their hints on workers, loggers and tensor cores are for users; here they would hide the table."""
    warnings.filterwarnings("ignore", module=r"(lightning|accelerate|torch)\.")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
