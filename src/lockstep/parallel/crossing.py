"""What crosses from one part of a plain model to a later one, found by watching one forward.

A part is a module that is called once in a forward: a block, an embedding, a head. Between the parts runs the model's
own code and the user's loss function. Every value out there that depends on a parameter (or on a random number) gets a
number, in the order in which they are made. That order is the same in every pass over the same code, whether the
parts are computed, skipped, or computed on tensors without data. So a number means the same value on every rank.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import (  # private in torch 2.11 and 2.13
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import (  # the two functions are private in torch 2.11 and 2.13
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode_temporarily,
)

from lockstep.errors import UserError
from lockstep.parallel.forward import replace_call
from lockstep.parallel.trees import map_tensors, tensors_of

RANDOM = frozenset(
    [F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu]
    + [F.gumbel_softmax, torch.dropout, torch.bernoulli, torch.multinomial, torch.normal, torch.poisson]
    + [torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like]
    + [getattr(torch.Tensor, name) for name in ("bernoulli", "bernoulli_", "normal_", "uniform_", "exponential_")]
)
"""Operations that draw random numbers."""

IN_PLACE = frozenset(
    ["__setitem__"]
    + [f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")]
)
"""Operations that change their first argument and do not end in an underscore, as the others do."""


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
    results: list[Any] = field(default_factory=list)
    """What each operation between the parts returned, in the same way; an argument it changed by its place."""
    counts: list[int] = field(default_factory=list)
    """How many values had been made when each part was called."""
    uses: dict[int, set[int]] = field(default_factory=dict)
    """The parts at which each parameter, by its id, is used outside of any part."""
    pieces: list[Piece] = field(default_factory=list)
    random_after: list[tuple[int, str]] = field(default_factory=list)
    """Operations that draw random numbers outside of modules: after which part, and where in the user's code."""
    result: Any = None
    recomputed: bool = False
    """Whether the model's own code lets torch.utils.checkpoint call parts again in the backward pass."""
    _crossing: dict[int, list[int]] = field(default_factory=dict)

    def fresh(self, stored: Any) -> Any:
        """Something a part or an operation returned, to be used again."""
        # Each micro-batch has its own tensors where torch.utils.checkpoint keeps them.
        return map_tensors(torch.Tensor.detach if self.recomputed else _same, stored)

    def crossing(self, cut: int) -> list[int]:
        """The values that are made before a part is called and used at it or later."""
        if cut not in self._crossing:
            found = [number for number, value in enumerate(self.values) if value.made < cut <= value.used]
            self._crossing[cut] = found
        return self._crossing[cut]


class Watch(TorchFunctionMode):
    """Sees every operation outside the parts and numbers the values that depend on parameters or random numbers.

    `at` is the part that was called last, -1 before the first. As long as there is something `replayed`, operations
    return what they returned then. `filled` are values that were received: whoever uses one of them is given the
    received tensor. `keep` are numbers of values to hold on to.
    """

    def __init__(
        self, rehearsal: Rehearsal | None = None, keep: Sequence[int] = (), replayed: Rehearsal | None = None
    ) -> None:
        super().__init__()
        self.at = -1
        self.count = 0
        self.serial = next(_passes)
        self.filled: dict[int, torch.Tensor] = {}
        self.kept: dict[int, torch.Tensor] = {}
        self.inside_seeded = 0
        self.numbered: list[torch.Tensor] = []
        self.replayed = replayed
        self._operations = 0
        self._keep = frozenset(keep)
        self._rehearsal = rehearsal
        self._paused = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        tensors = list(_tensors(args, kwargs))
        random = func in RANDOM
        if not random and not any(map(self.follows, tensors)):
            return func(*args, **kwargs)
        operation = self._operations
        self._operations += 1
        if self.replayed is not None:
            return self._replay(operation, func, args, kwargs, tensors)
        if self._rehearsal is not None:
            self._note(func, args, kwargs, tensors, random)
            versions = [tensor._version for tensor in tensors]
        elif self.filled:
            args, kwargs = self.fill((args, kwargs))
        result = func(*args, **kwargs)
        if self._rehearsal is not None:
            self.note_changes(tensors, versions)
            self._rehearsal.results.append(_as_replayed(result, tensors))
        self._number_all(result)
        return result

    def _replay(self, operation: int, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """What an operation before this rank's stage returned when it was rehearsed: nobody computes it here."""
        assert self.replayed is not None
        if operation >= len(self.replayed.results):
            raise another_path(f"did something else at {user_line()}")
        stored = self.replayed.results[operation]
        if stored is None:  # a shape, a number format
            return func(*args, **kwargs)
        result = tensors[stored] if isinstance(stored, int) else self.replayed.fresh(stored)
        self._number_all(result)
        return result

    def _number_all(self, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self.number(result)
        elif isinstance(result, list | tuple):
            for one in result:
                if isinstance(one, torch.Tensor):
                    self.number(one)

    def number(self, tensor: torch.Tensor) -> None:
        """Give a value its number."""
        number = self.count
        self.count = number + 1
        if not isinstance(tensor, nn.Parameter):  # used wherever it is, and never received
            tensor._lockstep_number = (self.serial, number)  # type: ignore[attr-defined]
        if number in self._keep:
            self.kept[number] = tensor
        if self._rehearsal is not None:
            storage = tensor.untyped_storage()._cdata if not tensor.is_sparse else 0
            self.numbered.append(tensor)
            self._rehearsal.values.append(
                Value(self.at, self.at, tensor.shape, tensor.dtype, tensor.requires_grad, storage=storage)
            )

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

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Not watched inside: a part computes at full speed."""
        if _get_current_function_mode() is self:
            with _pop_mode_temporarily():
                yield
        else:  # somebody's `with torch.device(...)` is around the part
            self._paused = True
            try:
                yield
            finally:
                self._paused = False

    def used(self, tree: Any) -> None:
        """Values are given to a part."""
        assert self._rehearsal is not None
        for tensor in tensors_of(tree):
            self._used(tensor)

    def _used(self, tensor: torch.Tensor) -> None:
        assert self._rehearsal is not None
        if (number := self.number_of(tensor)) is not None:
            self._rehearsal.values[number].used = self.at
        elif isinstance(tensor, nn.Parameter):
            self._rehearsal.uses.setdefault(id(tensor), set()).add(max(self.at, 0))

    def _note(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], random: bool) -> None:
        rehearsal = self._rehearsal
        assert rehearsal is not None
        for tensor in tensors:
            self._used(tensor)
        if random and not self.inside_seeded:
            rehearsal.random_after.append((self.at, user_line()))
        name = getattr(func, "__name__", "")
        if name in IN_PLACE or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs:
            target = kwargs.get("out", args[0])
            if isinstance(target, torch.Tensor) and not self.follows(target) and not random:
                raise UserError(
                    f"{user_line()} writes a value of the model into a tensor that was made before it, and the stages "
                    "of a pipeline do not see each other's tensors",
                    "build it from its parts with torch.stack or torch.cat, or use a dp or fsdp layout",
                )
        if name != "__get__":
            rehearsal.pieces.append(Piece(self.at, func, args, kwargs))

    def note_changes(self, tensors: list[torch.Tensor], versions: list[int]) -> None:
        """Values were changed in place, where their version is another one now."""
        assert self._rehearsal is not None
        for tensor, version in zip(tensors, versions, strict=True):
            number = self.number_of(tensor)
            if number is not None and tensor._version != version:
                self._rehearsal.values[number].changed = self.at


def rehearse(
    model: nn.Module, parts: Sequence[nn.Module], seeded: Sequence[nn.Module], call: Callable[[nn.Module], Any]
) -> Rehearsal:
    """Run `call(model)` on a model whose parameters have no data and see what crosses from part to part.

    The parts have to be called in the order in which they are given. `seeded` are the modules that have a random stream
    of their own.
    """
    rehearsal = Rehearsal()
    watch = Watch(rehearsal)

    def part_call(number: int) -> Callable[..., Any]:
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with watch.paused():
                if watch.at != number - 1:
                    raise another_path("called the parts of the model in another order")
                watch.at = number
                rehearsal.counts.append(watch.count)
                watch.used((args, kwargs))
                given = [tensor for tensor in tensors_of((args, kwargs)) if watch.number_of(tensor) is not None]
                versions = [tensor._version for tensor in given]
                _note_checkpoint(rehearsal)
                output = module._call_impl(*args, **kwargs)
                watch.note_changes(given, versions)
                rehearsal.pieces.append(Piece(number, module, args, kwargs))
                rehearsal.outputs.append(map_tensors(torch.Tensor.detach, output))
                for tensor in tensors_of(output):
                    watch.number(tensor)
                return output

        return called

    undo = [replace_call(part, part_call(number)) for number, part in enumerate(parts)]
    handles = [hook for module in seeded for hook in _count_inside(module, watch)]
    try:
        with without_data(), watch:
            rehearsal.result = call(model)
    finally:
        for back in undo:
            back()
        for handle in handles:
            handle.remove()
    _find_gradients(rehearsal, watch.numbered)
    if len(rehearsal.outputs) != len(parts):
        raise another_path("left out parts of the model")
    return rehearsal


def another_path(what: str) -> UserError:
    """The forward is not the one the cuts were made for."""
    return UserError(
        f"the forward took another path than when the model was cut: it {what}",
        "let every forward call the same modules in the same order, or use a dp or fsdp layout",
    )


def _note_checkpoint(rehearsal: Rehearsal) -> None:
    """A part is called: by torch.utils.checkpoint? (Private in torch 2.11 and 2.13: what it hangs into autograd.)"""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        rehearsal.recomputed = True
    if not torch.is_grad_enabled():
        frames = traceback.extract_stack()
        if any(f.filename.endswith("torch/utils/checkpoint.py") and f.name == "forward" for f in frames):
            raise UserError(
                "the model calls torch.utils.checkpoint with use_reentrant=True, which loses what crosses between the "
                "stages of a pipeline",
                "use use_reentrant=False there, or leave it out and give run.setup recompute=True",
            )


def _find_gradients(rehearsal: Rehearsal, numbered: Sequence[torch.Tensor]) -> None:
    """Which values get a gradient: those that what the call returned leads back to."""
    stack = [tensor.grad_fn for tensor in tensors_of(rehearsal.result)]
    reached: set[Any] = set()
    while stack:
        node = stack.pop()
        if node is not None and node not in reached:
            reached.add(node)
            stack.extend(following for following, _ in node.next_functions)
    for value, tensor in zip(rehearsal.values, numbered, strict=True):
        value.requires_grad = tensor.grad_fn in reached
    rehearsal.result = map_tensors(torch.Tensor.detach, rehearsal.result)


def _count_inside(module: nn.Module, watch: Watch) -> list[Any]:
    def enter(*_: Any) -> None:
        watch.inside_seeded += 1

    def leave(*_: Any) -> None:
        watch.inside_seeded -= 1

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]


@contextmanager
def without_data() -> Iterator[None]:
    """Refuse, with the user's own line, what only a value can decide."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the model"
        raise UserError(
            f"{where} reads a value of the model while it computes (.item(), if, or a shape that follows from it), "
            "which only one stage of a pipeline has",
            "compute with tensors there (torch.where), or use a dp or fsdp layout",
        ) from error


def user_line() -> str:
    """The line of the user's code that runs now."""
    frames = [frame for frame in traceback.extract_stack() if not is_library(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the model"


def is_library(path: str) -> bool:
    """Whether a file is torch's or ours, and not the user's."""
    return "/torch/" in path or "/lockstep/" in path.replace("\\", "/") or path.startswith("<")


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    """A tensor of the same shape and format without data."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data."""
    return isinstance(tensor, FakeTensor)


def _as_replayed(result: Any, given: Sequence[torch.Tensor]) -> Any:
    for place, tensor in enumerate(given):
        if result is tensor:
            return place
    is_list = isinstance(result, list | tuple) and any(isinstance(one, torch.Tensor) for one in result)
    return map_tensors(torch.Tensor.detach, result) if is_list or isinstance(result, torch.Tensor) else None


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors an operation is given: they stand in its arguments or one list deep in them."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            for one in value:
                if isinstance(one, torch.Tensor):
                    yield one
