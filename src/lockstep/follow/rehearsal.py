"""One forward without data, followed: boundary activations from part to part, and what no pipeline can do."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.follow.forward import Functions, following
from lockstep.follow.functions import nodes_of, own_functions_seen
from lockstep.follow.trees import map_tensors, tensors_of
from lockstep.follow.unread import (
    DatalessForward,
    ValueReadError,
    make_unread,
    read,
    reads_nothing,
    refuse_unread,
    unknown,
)
from lockstep.follow.values import (
    Piece,
    Rehearsal,
    Value,
    Watch,
    another_path,
    constant_of,
    is_fake,
    line_of,
    tensors_in,
    user_line,
    without_graph,
)
from lockstep.runtime.draws import RANDOM
from lockstep.runtime.torch_private import (
    CTC_OPERATIONS,
    GROUPED_MATMUL,
    DataDependentOutputException,
    DynamicOutputShapeException,
    add_shape_rule,
    call_of,
    replace_call,
    replaced,
    saving_hooks,
    storage_key,
    version_of,
)

IN_PLACE = frozenset(
    ["__setitem__"]
    + [f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")]
)
"""Operations that change their first argument and do not end in an underscore, as the others do."""

ONE_STAGE = "which only one stage of a pipeline has"

AT_THE_END = -2
"""Behind the last part, where only the last stage comes, with real values."""


def rehearse(
    model: nn.Module,
    parts: Sequence[nn.Module],
    seeded: Sequence[nn.Module],
    call: Callable[[nn.Module], Any],
    may_read_at_end: bool = False,
) -> Rehearsal:
    """Run `call(model)` on a model whose parameters have no data and see what crosses from part to part.

    The parts have to be called in the order in which they are given. `seeded` are the modules that have a random stream
    of their own. With `may_read_at_end` the call may read values behind the last part: only the last stage does.
    """
    rehearsal = Rehearsal()
    watch = RehearsalWatch(rehearsal, len(parts) - 1)
    buffers = {name: (id(buffer), version_of(buffer)) for name, buffer in model.named_buffers()}
    undo = [replace_call(part, _part_call(number, watch)) for number, part in enumerate(parts)]
    try:
        with (
            without_data() as watch.look,
            own_functions_seen(partial(_refuse_outside, watch)),
            following(seeded, enters=watch.enter_seeded, leaves=watch.leave_seeded),
            watch,
        ):
            try:
                rehearsal.result = call(model)
                refuse_unread(rehearsal.result, AT_THE_END)
            except (DataDependentOutputException, DynamicOutputShapeException, ValueReadError):
                if not may_read_at_end or watch.at < len(parts) - 1:
                    raise
    finally:
        for back in undo:
            back()
    if len(rehearsal.outputs) != len(parts) and not (may_read_at_end and not rehearsal.outputs):
        raise another_path("left out parts of the model")
    watch.used(rehearsal.result)
    now = {name: (id(buffer), version_of(buffer)) for name, buffer in model.named_buffers()}
    rehearsal.changed_buffers = {name for name, state in now.items() if buffers.get(name) != state}
    _find_gradients(rehearsal, watch.numbered)
    return rehearsal


class RehearsalWatch(Watch):
    """Notes what happens between the parts, and refuses what the stages of a pipeline could not do."""

    def __init__(self, rehearsal: Rehearsal, last: int) -> None:
        super().__init__()
        self.rehearsal = rehearsal
        self.look = DatalessForward(ONE_STAGE)
        self._unknown = DatalessForward(ONE_STAGE)  # of a later stage, for ever
        self._last = last
        self.inside_seeded = 0
        self.seeded_at = -1
        self.numbered: list[torch.Tensor] = []
        self.in_part = False

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do an operation that gets no number which only one stage knows."""
        refuse_unread((args, kwargs), AT_THE_END)
        return super().answer(func, args, kwargs)

    def enter_seeded(self, *_: Any) -> None:
        """A module that has a random stream of its own is called."""
        self.inside_seeded += 1
        self.seeded_at = self.at

    def leave_seeded(self, *_: Any) -> None:
        """It has returned."""
        self.inside_seeded -= 1

    def see(self, tensors: list[torch.Tensor]) -> None:
        """Every value has to come from a part's return, or from an operation that was seen."""
        for tensor in tensors:
            if is_fake(tensor) and not self.follows(tensor):
                raise leaked(user_line())

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        """Do an operation, and note it."""
        name = getattr(func, "__name__", "")
        for tensor in tensors:
            self._used(tensor)
        if reads_nothing(name, args):
            return self._read(name)
        if func in RANDOM and not self.inside_seeded:
            self.rehearsal.random_after.append((self.at, self.seeded_at, user_line()))
        if name in IN_PLACE or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs:
            target = kwargs["out"] if "out" in kwargs else next(iter(args), None)
            if isinstance(target, torch.Tensor) and not self.follows(target) and func not in RANDOM:
                raise UserError(
                    f"{user_line()} writes a value of the model into a tensor that was made before it, and the stages "
                    "of a pipeline do not see each other's tensors",
                    "build it from its parts with torch.stack or torch.cat, or use a dp or fsdp layout",
                )
        if _checkpoint_region() is not None or name == "register_hook":
            numbers = [self.number_of(tensor) for tensor in tensors]
            self.rehearsal.kept_outside += [(self.at, number) for number in numbers if number is not None]
        if func is torch.autograd.grad:
            raise UserError(
                f"{user_line()} has a gradient inside the loss (torch.autograd.grad), and a stage of a pipeline has "
                "only a part of it",
                "use a dp layout, or fsdp with shard.level = zero1",
            )
        if name == "__getitem__":
            args = (args[0], _without_masks(args[1]))
        versions = [version_of(tensor) for tensor in tensors]
        result = func(*args, **kwargs)
        self.note_changes(tensors, versions)
        if name != "__get__":
            self.rehearsal.pieces.append(Piece(self.at, func, args, kwargs))
        self.rehearsal.results.append((name, _as_replayed(result, tensors)))
        return result

    def _read(self, name: str) -> Any:
        """A number that stages have no more who begin behind it."""
        is_end = self.at == self._last
        found = read(name, self.look, AT_THE_END if is_end else None, converts=is_end)
        self.rehearsal.results.append((name, make_unread(self._unknown) if name == "item" else found))
        return found

    def number(self, tensor: torch.Tensor) -> None:
        """Give a value its number, and note what it looks like."""
        super().number(tensor)
        self.numbered.append(tensor)
        storage = storage_key(tensor.untyped_storage()) if not tensor.is_sparse else 0
        self.rehearsal.values.append(
            Value(self.at, self.at, tensor.shape, tensor.dtype, tensor.requires_grad, tensor.stride(), storage=storage)
        )

    def used(self, tree: Any) -> None:
        """Values are given to a part, or returned at the end."""
        for tensor in tensors_of(tree):
            self.see([tensor])
            self._used(tensor)

    def note_changes(self, tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
        """Values were changed in place, where their version is another one now."""
        for tensor, version in zip(tensors, versions, strict=True):
            if version_of(tensor) == version:
                continue
            if (number := self.number_of(tensor)) is not None:
                self.rehearsal.values[number].changed = self.at
            elif isinstance(tensor, nn.Parameter):
                raise UserError(
                    f"{user_line()} changes a parameter in place while the model computes, and only some stages of a "
                    "pipeline would",
                    "change it between steps, in the code after engine.step, or use a dp or fsdp layout",
                )

    def _used(self, tensor: torch.Tensor) -> None:
        if (number := self.number_of(tensor)) is not None:
            self.rehearsal.values[number].used = self.at
        elif isinstance(tensor, nn.Parameter):
            self.rehearsal.uses.setdefault(id(tensor), set()).add(max(self.at, 0))


class PartWatch(Functions):
    """Sees the operations inside a part: they may use what was given to it and what they made themselves."""

    def __init__(
        self,
        watch: RehearsalWatch | None,
        part: int,
        given: Sequence[torch.Tensor] = (),
        look: DatalessForward | None = None,
    ) -> None:
        super().__init__()
        self._watch = watch
        self._part = part
        self._look = look if look is not None else watch.look if watch is not None else DatalessForward(ONE_STAGE)
        self._mark = (watch.serial if watch else -1, part)
        self._given = {watch.number_of(tensor) for tensor in given} if watch else set()

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do an operation, unless it uses a value that nobody gave to the part."""
        if (constant := constant_of(func, args, kwargs, is_fake)) is not None:
            return constant
        name = getattr(func, "__name__", "")
        if reads_nothing(name, args):
            return read(name, self._look, self._part, converts=self._watch is None)
        refuse_unread((args, kwargs), self._part)
        if func is torch.Tensor.__getitem__:
            args = (args[0], _without_masks(args[1]))
        for tensor in tensors_in(args, kwargs):
            if self._watch and is_fake(tensor) and not isinstance(tensor, nn.Parameter):
                number, mark = self._watch.number_of(tensor), getattr(tensor, "_lockstep_mark", self._mark)
                if number not in self._given if number is not None else mark != self._mark:
                    raise leaked(user_line())
        result = func(*args, **kwargs)
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.Parameter):
                tensor._lockstep_mark = self._mark  # type: ignore[attr-defined]
        return result


def _part_call(number: int, watch: RehearsalWatch) -> Callable[..., Any]:
    rehearsal = watch.rehearsal

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with watch.paused():
            if watch.at != number - 1:
                raise another_path("called the parts of the model in another order")
            watch.at = number
            rehearsal.counts.append(watch.count)
            watch.used((args, kwargs))
            refuse_unread((args, kwargs))
            given = [tensor for tensor in tensors_of((args, kwargs)) if watch.number_of(tensor) is not None]
            own = list(module.parameters())
            versions = [version_of(tensor) for tensor in (*given, *own)]
            rehearsal.regions.append(_checkpoint_region())
            _refuse_reentrant_checkpoint()
            before = [id(tensor) for tensor in tensors_of((args, kwargs))]
            watch.in_part = True
            with _no_other_randomness(module), PartWatch(watch, number, given):
                output = call_of(module)(*args, **kwargs)
            watch.in_part = False
            refuse_unread(output)
            if [id(tensor) for tensor in tensors_of((args, kwargs))] != before:
                raise UserError(
                    f"{type(module).__name__} changes a list, dict or object that it is given, and only one stage of a "
                    "pipeline calls it",
                    "return the new one from the module's forward, or use a dp or fsdp layout",
                )
            watch.note_changes(given, versions[: len(given)])
            changed = zip(own, versions[len(given) :], strict=True)
            rehearsal.changed_parameters |= {id(tensor) for tensor, version in changed if version_of(tensor) != version}
            rehearsal.pieces.append(Piece(number, module, args, kwargs))
            output = apart_from(output, given)
            rehearsal.outputs.append(map_tensors(without_graph, output))
            for tensor in tensors_of(output):
                watch.number(tensor)
            return output

    return called


def apart_from(output: Any, given: Sequence[torch.Tensor]) -> Any:
    """What a part returned, with tensors of its own: one that it only passes on has a number already."""
    same = {id(tensor) for tensor in given}
    if not any(id(tensor) in same for tensor in tensors_of(output)):
        return output
    return map_tensors(lambda tensor: tensor.view_as(tensor) if id(tensor) in same else tensor, output)


def leaked(line: str) -> UserError:
    """A value that a module has not returned is used outside of it."""
    return UserError(
        f"{line} uses a value that a module of another stage made and did not return (an attribute, a list, a hook), "
        "or that it was not given in its call",
        "return it from the module's forward and pass it on as an argument, or use a dp or fsdp layout",
    )


def _shapes_of_ctc(_: Any, __: Any, log_probs: torch.Tensor, targets: torch.Tensor, *___: Any, **____: Any) -> Any:
    """The losses of CTC, and what its backward keeps, which is at most as long as the longest target."""
    length, samples = log_probs.shape[:2]
    return log_probs.new_empty(samples), log_probs.new_empty(samples, length, 2 * targets.shape[-1] + 1)


def _shapes_of_grouped_mm(
    _: Any, __: Any, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *___: Any, **____: Any
) -> Any:
    """A product for each group of rows (experts), of which torch's own rule takes only the formats that GPUs have."""
    groups = [] if a.dim() != b.dim() else [len(a) if a.dim() == 3 or offs is None else len(offs)]
    return a.new_empty(*groups, a.shape[-2], b.shape[-1])


for _operation in CTC_OPERATIONS:
    add_shape_rule(_operation, _shapes_of_ctc)
add_shape_rule(GROUPED_MATMUL, _shapes_of_grouped_mm)


@contextmanager
def without_data(who: str = ONE_STAGE) -> Iterator[DatalessForward]:
    """Refuse, with the user's own line, what only a value can decide; `who` says who could not know it."""
    look = DatalessForward(who)
    try:
        # For recurrent layers on GPUs cuDNN wants weights that lie together in memory.
        with replaced(torch.backends.cudnn, "enabled", False):
            yield look
    except (DataDependentOutputException, DynamicOutputShapeException, ValueReadError) as error:
        raise unknown(line_of(error), who) from error
    finally:
        look.over = True


def _refuse_outside(watch: RehearsalWatch, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Refuse an autograd.Function that is applied outside of any part: what it is given and returns is not seen."""
    if not watch.in_part:
        raise UserError(
            f"{function.__name__} is an autograd.Function that is applied outside of any module, where a pipeline "
            "cannot follow its gradient",
            "apply it inside a module that the model calls once, or use a dp or fsdp layout",
        )
    return args


@contextmanager
def _no_other_randomness(module: nn.Module) -> Iterator[None]:
    """Refuse draws from Python's or numpy's stream: a stage that skips the module would not draw."""
    before = random.getstate(), str(np.random.get_state())
    yield
    if (random.getstate(), str(np.random.get_state())) != before:
        raise UserError(
            f"{type(module).__name__} draws from Python's or numpy's random numbers, which the stages of a pipeline "
            "would draw in another order",
            "draw from torch's (torch.rand), or use a dp or fsdp layout",
        )


def _checkpoint_region() -> Any:
    """What torch.utils.checkpoint has hung into autograd."""
    hooks = saving_hooks()
    return hooks[0] if hooks else None


def _refuse_reentrant_checkpoint() -> None:
    if torch.is_grad_enabled():
        return
    frames = traceback.extract_stack()
    if any(frame.filename.endswith("torch/utils/checkpoint.py") and frame.name == "forward" for frame in frames):
        raise UserError(
            "the model calls torch.utils.checkpoint with use_reentrant=True, which loses what crosses between the "
            "stages of a pipeline",
            "use use_reentrant=False there, or leave it out and give run.setup recompute=True",
        )


def _find_gradients(rehearsal: Rehearsal, numbered: Sequence[torch.Tensor]) -> None:
    """Which values get a gradient: those that what the call returned leads back to."""
    reached = set(nodes_of(list(tensors_of(rehearsal.result))))
    for value, tensor in zip(rehearsal.values, numbered, strict=True):
        value.requires_grad = tensor.grad_fn in reached
    rehearsal.result = map_tensors(torch.Tensor.detach, rehearsal.result)


def _without_masks(index: Any) -> Any:
    """An index by a mask from the batch as one by numbers: how many there are is known."""
    entries = index if isinstance(index, tuple) else (index,)
    are_masks = [
        isinstance(entry, torch.Tensor) and entry.dtype == torch.bool and not is_fake(entry) for entry in entries
    ]
    if not any(are_masks):
        return index
    numbers: list[Any] = []
    for entry, is_mask in zip(entries, are_masks, strict=True):
        numbers += entry.nonzero(as_tuple=True) if is_mask else [entry]
    return tuple(numbers)


def _as_replayed(result: Any, given: Sequence[torch.Tensor]) -> Any:
    for place, tensor in enumerate(given):
        if result is tensor:
            return place
    is_list = isinstance(result, list | tuple) and any(isinstance(item, torch.Tensor) for item in result)
    return map_tensors(without_graph, result) if is_list or isinstance(result, torch.Tensor) else None
