"""The values that cross from one part of a plain model to a later one (boundary activations), numbered.

A part is a module that is called once in a forward: a block, an embedding, a head. Between the parts runs the model's
own code and the user's loss function. Every value out there that depends on a parameter (or on a random number) gets a
number, in the order in which they are made. That order is the same in every pass over the same code, whether the
parts are computed, skipped, or computed on tensors without data. So a number means the same value on every rank.
"""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.follow.forward import Functions
from lockstep.follow.trees import map_tensors
from lockstep.record.failure import shown_file
from lockstep.runtime.draws import RANDOM
from lockstep.runtime.torch_private import FakeTensor, FakeTensorMode

FILLED = {
    torch.ones_like: torch.ones,
    torch.zeros_like: torch.zeros,
    torch.full_like: torch.full,
    torch.Tensor.new_ones: torch.ones,
    torch.Tensor.new_zeros: torch.zeros,
    torch.Tensor.new_full: torch.full,
}
"""Operations that take a shape, a number format and a device from a value, and nothing else."""

LIBRARIES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), "<")
"""How the paths of our own and of torch's code begin."""

_passes = itertools.count()


@dataclass
class Value:
    """A numbered value: at which part it was made, at which it was used last, and what a tensor for it looks like.

    One that requires a gradient gets one, too.
    """

    made: int
    used: int
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    stride: tuple[int, ...]
    changed: int = -1
    """The last part at or after which it was changed in place."""
    storage: int = 0


@dataclass(frozen=True)
class Piece:
    """Something a forward does at a part: the part itself or one operation after it. To measure the work."""

    at: int
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Rehearsal:
    """A whole forward, seen once on tensors without data; everything in it is about one shape of a micro-batch."""

    values: list[Value] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    """What each part returned: tensors without data in whatever holds them."""
    results: list[tuple[str, Any]] = field(default_factory=list)
    """The name of each operation between the parts and what it returned; an argument it changed by its place."""
    counts: list[int] = field(default_factory=list)
    """How many values had been made when each part was called."""
    uses: dict[int, set[int]] = field(default_factory=dict)
    """The parts at which each parameter, by its id, is used outside of any part."""
    pieces: list[Piece] = field(default_factory=list)
    random_after: list[tuple[int, int, str]] = field(default_factory=list)
    """Operations that draw random numbers outside of modules: after which part, at which one a module with a random
    stream of its own was called last, and where in the user's code."""
    regions: list[Any] = field(default_factory=list)
    """For each part what torch.utils.checkpoint hung into autograd around its call, if it did."""
    kept_outside: list[tuple[int, int]] = field(default_factory=list)
    """Values that torch.utils.checkpoint keeps for operations outside of parts, and values that get a hook: after
    which part, and their number."""
    changed_parameters: set[int] = field(default_factory=set)
    """Parameters, by their ids, that a part changes."""
    changed_buffers: set[str] = field(default_factory=set)
    result: Any = None
    _crossing: dict[int, list[int]] = field(default_factory=dict)

    @property
    def recomputed(self) -> bool:
        """Whether the model's own code lets torch.utils.checkpoint call parts again in the backward pass."""
        return any(region is not None for region in self.regions)

    def fresh(self, stored: Any) -> Any:
        """Something a part or an operation returned, to be used again."""
        # Each micro-batch has its own tensors where torch.utils.checkpoint keeps them.
        return map_tensors(without_graph if self.recomputed else _same, stored)

    def crossing(self, cut: int) -> list[int]:
        """The values that are made before a part is called and used at it or later."""
        if cut not in self._crossing:
            found = [number for number, value in enumerate(self.values) if value.made < cut <= value.used]
            self._crossing[cut] = found
        return self._crossing[cut]


class Watch(Functions):
    """Sees every operation outside the parts and numbers the values that depend on parameters or random numbers.

    `at` is the part that was called last, -1 before the first. As long as there is something `replayed`, operations
    return what they returned then. `filled` are values that were received: whoever uses one of them is given the
    received tensor. `keep` are numbers of values to hold on to.
    """

    def __init__(self, keep: Sequence[int] = (), replayed: Rehearsal | None = None) -> None:
        super().__init__()
        self.at = -1
        self.count = 0
        self.serial = next(_passes)
        self.filled: dict[int, torch.Tensor] = {}
        self.kept: dict[int, torch.Tensor] = {}
        self.replayed = replayed
        self._operations = 0
        self._keep = frozenset(keep)

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do an operation, or what a rehearsal has of it, and number what it makes."""
        tensors = list(tensors_in(args, kwargs))
        self.see(tensors)
        if func not in RANDOM:
            if not any(map(self.follows, tensors)):
                return func(*args, **kwargs)
            if (constant := constant_of(func, args, kwargs, self.follows)) is not None:
                return constant
        operation = self._operations
        self._operations += 1
        if self.replayed is not None:
            return self._replay(operation, func, args, kwargs, tensors)
        return self._numbered(self.compute(func, args, kwargs, tensors))

    def see(self, tensors: list[torch.Tensor]) -> None:
        """An operation is given these."""

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:  # noqa: ARG002
        """Do an operation on values."""
        if self.filled:
            args, kwargs = self.fill((args, kwargs))
        return func(*args, **kwargs)

    def number(self, tensor: torch.Tensor) -> None:
        """Give a value its number."""
        number = self.count
        self.count = number + 1
        if not isinstance(tensor, nn.Parameter):  # used wherever it is, and never received
            tensor._lockstep_number = (self.serial, number)  # type: ignore[attr-defined]
        if number in self._keep:
            self.kept[number] = tensor

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number a value has in this pass, if it has one."""
        mark = getattr(tensor, "_lockstep_number", None)
        return mark[1] if mark is not None and mark[0] == self.serial else None

    def follows(self, tensor: torch.Tensor) -> bool:
        """Whether a value depends on a parameter or a random number."""
        return isinstance(tensor, nn.Parameter) or self.number_of(tensor) is not None

    def fill(self, tree: Any) -> Any:
        """Put received tensors in the place of the values they are."""

        def received(tensor: torch.Tensor) -> torch.Tensor:
            number = self.number_of(tensor)
            return tensor if number is None else self.filled.get(number, tensor)

        return map_tensors(received, tree)

    def _replay(
        self, operation: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        """What an operation before this rank's stage returned when it was rehearsed: nobody computes it here."""
        assert self.replayed is not None
        name, stored = self.replayed.results[operation] if operation < len(self.replayed.results) else ("", None)
        if name != _name(func):
            raise another_path(f"did something else at {user_line()}")
        if stored is None:  # a shape, a number format
            return func(*args, **kwargs)
        result = tensors[stored] if isinstance(stored, int) else self.replayed.fresh(stored)
        return self._numbered(result)

    def _numbered(self, result: Any) -> Any:
        for value in result if isinstance(result, list | tuple) else [result]:
            if isinstance(value, torch.Tensor):
                self.number(value)
        return result


def constant_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], follows: Callable[[torch.Tensor], bool]
) -> torch.Tensor | None:
    """A tensor that takes only its kind from a value of the model, and so is no such value itself; else None."""
    kind = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if func in FILLED and kind is not None and not kwargs.keys() - {"dtype", "device"}:
        like = {"dtype": kind.dtype, "device": kind.device} | kwargs
        shape = [] if _name(func).startswith("new_") else [kind.shape]
        made: torch.Tensor = FILLED[func](*shape, *args[1:], **like)  # type: ignore[operator]
        return made
    if len(args) != 2 or kwargs or kind is None or follows(kind) or not isinstance(args[1], torch.Tensor):
        return None
    if func in (torch.Tensor.to, torch.Tensor.type_as):
        return kind.to(args[1].device, args[1].dtype)
    return kind.expand(args[1].shape) if func is torch.Tensor.expand_as else None


def another_path(what: str) -> UserError:
    """The forward is not the one the cuts were made for."""
    return UserError(
        f"the forward took another path than when the model was cut: it {what}",
        "let every forward call the same modules in the same order, or use a dp or fsdp layout",
    )


def user_line() -> str:
    """The line of the user's code that runs now."""
    frame: Any = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{shown_file(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else "the model"


def line_of(error: BaseException) -> str:
    """The line of the user's code that an error came from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
    return f"{shown_file(frames[-1].filename)}:{frames[-1].lineno}" if frames else "the model"


def is_library(path: str) -> bool:
    """Whether a file is torch's or ours, and not the user's."""
    return path.startswith(LIBRARIES)


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    """A tensor of the same shape and format without data."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data."""
    return isinstance(tensor, FakeTensor)


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor for autograd to begin with; whether it requires a gradient stays."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors an operation is given: they stand in its arguments or one list deep in them."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            for inner in value:
                if isinstance(inner, torch.Tensor):
                    yield inner


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
