"""What every rank holds of a tiny model, before, during and after one step of Lockstep's own engine.

The model is two matrices with a ReLU between them, `up` from 4 to 4 values and `down` from 4 to 2, all weights small
whole numbers, so that everything can be checked by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lockstep.errors import UserError
from lockstep.lab.ranks import SECONDS, on_ranks
from lockstep.launch.probe import Seat

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lockstep.engine import Engine

Topic = Literal["ddp", "fsdp", "tp"]
AXIS: dict[Topic, str] = {"ddp": "dp", "fsdp": "fsdp", "tp": "tp"}

EXPLAINED: dict[Topic, str] = {
    "ddp": "Every rank has the whole model and reads other samples, so each finds another gradient. An all-reduce adds "
    "the gradients up, and since all ranks then make the same step with the same sum, their weights stay equal "
    "without ever being sent.",
    "fsdp": "Every rank keeps some rows of each matrix, with the gradients and the optimizer state of those rows only. "
    "Before a matrix is used its rows are gathered from all ranks, and let go again afterwards; in the backward pass a "
    "reduce-scatter adds the gradients up and leaves each rank the rows that it keeps.",
    "tp": "All ranks read the same samples and share each matrix: up by its outputs, down by its inputs (torch stores "
    "a row for every output, so what courses call columns are rows here). What its part of up gives a rank is just "
    "what its part of down takes; only then are the partial sums of all ranks added up, by one all-reduce.",
}

UP = [[1, 0, 2, -1], [0, 1, 1, 1], [2, -1, 0, 1], [-1, 2, 1, 0]]
DOWN = [[1, 2, -1, 0], [0, 1, 1, -2]]
SAMPLES = [
    [1, 0, 2, 1],
    [0, 2, 1, 0],
    [2, 1, 0, 1],
    [1, 1, 1, 0],
    [0, 1, 2, 2],
    [2, 0, 1, 1],
    [1, 2, 0, 1],
    [0, 0, 1, 2],
]
TARGETS = [[1, 0], [2, 1], [0, 1], [3, 0], [1, 1], [0, 2], [2, 0], [1, 2]]
LEARNING_RATE = 0.1
MOMENTUM = 0.5
SAMPLES_AT_ONCE = 2


@dataclass(frozen=True)
class HeldMatrix:
    """A tensor as one rank has it at some moment: `values`, which begin at `at` in the whole of this `shape`."""

    moment: str
    name: str
    values: list[list[float]]
    at: tuple[int, int]
    shape: tuple[int, int]


@dataclass(frozen=True)
class HeldByRanks:
    """What all ranks held; `parts[rank]` in the order of the step."""

    topic: Topic
    ranks: int
    parts: list[list[HeldMatrix]]
    loss: float


def tiny_model() -> nn.Module:
    """The model of the lab, as one device builds it."""
    import torch
    from torch import nn

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4, bias=False)
            self.down = nn.Linear(4, 2, bias=False)
            with torch.no_grad():
                self.up.weight.copy_(torch.tensor(UP))
                self.down.weight.copy_(torch.tensor(DOWN))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.down(self.up(x).relu())
            return result

    return Tiny()


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Half of the squared differences, summed, and how many samples counted."""
    return (model(batch["x"]) - batch["t"]).square().sum() / 2, len(batch["x"])


def samples(ranks: int) -> list[dict[str, torch.Tensor]]:
    """The samples of the step."""
    import torch

    return [
        {"x": torch.tensor(x, dtype=torch.float32), "t": torch.tensor(t, dtype=torch.float32)}
        for x, t in zip(SAMPLES[: SAMPLES_AT_ONCE * ranks], TARGETS, strict=False)
    ]


def hold(topic: Topic, ranks: int) -> HeldByRanks:
    """Do one step on real ranks (gloo, on this machine) and return what each held."""
    possible = (1, 2, 4) if topic == "tp" else (1, 2, 3, 4)
    if ranks not in possible:
        *most, last = map(str, possible)
        why = ", which does not divide a matrix of 4 rows" if topic == "tp" and 0 < ranks < 5 else ""
        raise UserError(f"--ranks {ranks} is not possible here{why}", f"use {', '.join(most)} or {last}")

    # Now, and not once in every rank.

    import torch.distributed.fsdp  # noqa: F401

    import lockstep.init_run  # noqa: F401

    def work(seat: Seat) -> Any:
        return take_part(topic, seat)

    seen = on_ranks(work, ranks)
    return HeldByRanks(topic, ranks, [parts for parts, _ in seen], seen[0][1])


def take_part(topic: Topic, seat: Seat) -> tuple[list[HeldMatrix], float]:
    """On one rank: train for a step, and write down what is held."""
    from torch.optim import SGD

    import lockstep

    rank, ranks = seat.place.rank, seat.place.world_size
    data = samples(1 if topic == "tp" else ranks)
    with lockstep.init(
        f"{AXIS[topic]}={ranks}",
        rank=rank,
        world_size=ranks,
        store=seat.open_store(SECONDS) if ranks > 1 else None,
        run_dir=seat.scratch / "run",
        device="cpu",
    ) as run:
        engine = run.setup(
            tiny_model, loss_of, optimizer=lambda parameters: SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)
        )
        loader = run.loader(data, len(data), micro_batch=SAMPLES_AT_ONCE, steps=1, shuffle=False, workers=0)  # type: ignore[arg-type]
        notes = Notes(topic, engine, rank, ranks)
        for batch in loader:
            (own,) = batch.micro_batches
            notes.write("samples of the rank", "x", own.data["x"])
            notes.write_stored(
                "weights before" if topic == "ddp" else "kept of the weights", lambda parameter: parameter
            )
            notes.listen()
            out = engine.step(batch)
            notes.write_gradients()
            notes.write_stored("weights after", lambda parameter: parameter)
        return notes.parts, out.loss


class Notes:
    """What one rank writes down of its step."""

    def __init__(self, topic: Topic, engine: Engine, rank: int, ranks: int) -> None:
        self.parts: list[HeldMatrix] = []
        self._topic = topic
        self._engine = engine
        self._rank = rank
        self._ranks = ranks

    def write(
        self,
        moment: str,
        name: str,
        tensor: torch.Tensor,
        at: tuple[int, int] = (0, 0),
        shape: tuple[int, int] | None = None,
    ) -> None:
        """A tensor as this rank has it now."""
        values = tensor.detach()
        self.parts.append(HeldMatrix(moment, name, values.tolist(), at, shape or (values.shape[0], values.shape[1])))

    def write_stored(self, moment: str, of: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """What this rank stores of every parameter, or something that belongs to it."""
        from torch.distributed.tensor import DTensor

        for name, parameter in self._engine.stored:
            tensor = of(parameter)
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            name = name.removesuffix(".weight")
            whole = (len(UP), len(UP[0])) if name == "up" else (len(DOWN), len(DOWN[0]))
            self.write(moment, name, local, self._place(name, whole), whole)

    def listen(self) -> None:
        """Be called in the forward and backward pass that comes."""
        from lockstep.parallel.tensor.cut import plain

        model: Any = self._engine.model
        if self._topic == "ddp":
            for name in ("down", "up"):
                weight = getattr(model, name).weight
                weight.register_hook(lambda gradient, name=name: self.write("own gradient", name, gradient))
        elif self._topic == "fsdp":
            for name in ("up", "down"):
                getattr(model, name).register_forward_pre_hook(
                    lambda module, _, name=name: self.write("gathered for the forward pass", name, module.weight)
                )
        else:
            width = len(DOWN[0])
            own = width // self._ranks * self._rank

            def takes(module: Any, inputs: tuple[torch.Tensor]) -> None:
                part = plain(inputs[0])
                self.write("its activations", "relu(up x)", part, (0, own), (len(part), width))
                # What the matrix gives before the ranks add up their results.
                partial = part.detach() @ module.weight.detach().t()
                self.write("its partial sums", "y", partial)

            model.down.register_forward_pre_hook(takes)
            model.down.register_forward_hook(
                lambda _, __, result: self.write("after the all-reduce", "y", plain(result))
            )

    def write_gradients(self) -> None:
        """What the optimizer was given, and what it keeps."""

        def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
            assert parameter.grad is not None
            return parameter.grad

        def state_of(parameter: nn.Parameter) -> torch.Tensor:
            state: torch.Tensor = self._engine.optimizer.state[parameter]["momentum_buffer"]
            return state

        names = {
            "ddp": "gradient after the all-reduce",
            "fsdp": "its gradient after reduce-scatter",
            "tp": "its gradient",
        }
        self.write_stored(names[self._topic], gradient_of)
        if self._topic == "fsdp":
            self.write_stored("its optimizer state", state_of)

    def _place(self, name: str, whole: tuple[int, int]) -> tuple[int, int]:
        """Where in the whole this rank's part begins."""
        if self._topic == "ddp" or self._ranks == 1:
            return (0, 0)
        if self._topic == "fsdp":
            each = -(-whole[0] // self._ranks)
            return (min(each * self._rank, whole[0]), 0)
        dim = self._engine.cut.held[f"{name}.weight"].cuts[0].dim
        first = whole[dim] // self._ranks * self._rank
        return (first, 0) if dim == 0 else (0, first)
