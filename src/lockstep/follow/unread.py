"""Numbers that code reads of a tensor without data (`.item()`): for a log they need not be known."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.errors import UserError
from lockstep.follow.values import is_fake, user_line
from lockstep.runtime.torch_private import tree_leaves

READING = frozenset(["item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__"])
"""Operations that turn a tensor into a number."""

FOR_A_LOG = frozenset(["item", "__format__"])
"""Those of them that people use to note a number: what they return can be told from a number that is known."""

CONVERTING = {"__float__": 0.0, "__int__": 0}
"""Those whose result Python turns into a plain number, with what they return where it cannot do harm."""


class ValueReadError(Exception):
    """Code of the user's wants to know a number that is not there."""


class DatalessForward:
    """A forward without data. Once it is `over`, the numbers that were read in it are plain zeros."""

    def __init__(self, who: str) -> None:
        self.who = who
        self.over = False


class Unread(float):
    """A number that is not known: it can be kept, printed and computed with, and decides nothing.

    After the look it was read in, it is what it is as a float: a sum that was begun in it has not changed.
    """

    look: DatalessForward
    place: int | None
    """Where in a pipeline's forward it was read, None where its uses cannot be followed."""

    def _refuse(self) -> None:
        if not self.look.over:
            raise unknown(user_line(), self.look.who)

    def __repr__(self) -> str:
        return float.__repr__(self) if self.look.over else "?"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return float.__format__(self, spec) if self.look.over else "?"

    __hash__ = float.__hash__

    def __reduce__(self) -> Any:
        return float, (float.__float__(self),)


def _computing(name: str) -> Any:
    compute = getattr(float, name)

    def computed(self: Unread, *args: Any) -> Any:
        try:
            result = compute(self, *args)
        except ArithmeticError:
            if self.look.over:
                raise
            result = 0.0
        if self.look.over or result is NotImplemented:
            return result
        places = {self.place, *(other.place for other in args if isinstance(other, Unread))}
        return make_unread(
            self.look, places.pop() if len(places) == 1 else None, 0.0 if isinstance(result, complex) else result
        )

    return computed


def _deciding(name: str) -> Any:
    decide = getattr(float, name)

    def decided(self: Unread, *args: Any) -> Any:
        self._refuse()
        return decide(self, *args)

    return decided


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _name in [*_OPERATORS, *(f"r{operator}" for operator in _OPERATORS), "neg", "pos", "abs", "round"]:
    setattr(Unread, f"__{_name}__", _computing(f"__{_name}__"))
for _name in ["bool", "int", "float", "trunc", "floor", "ceil", "eq", "ne", "lt", "le", "gt", "ge", "divmod"]:
    setattr(Unread, f"__{_name}__", _deciding(f"__{_name}__"))


def make_unread(look: DatalessForward, place: int | None = None, value: float = 0.0) -> Unread:
    """A number that is not known in a look."""
    number = Unread(value)
    number.look, number.place = look, place
    return number


def read(name: str, look: DatalessForward, place: int | None = None, converts: bool = False) -> Any:
    """What an operation that reads a value returns where nobody knows it.

    With `converts`, code may also turn it into a plain number: whoever comes to this line at work has the real one.
    """
    if name == "item":
        return make_unread(look, place)
    if name == "__format__":
        return "?"
    if converts and name in CONVERTING:
        return CONVERTING[name]
    raise ValueReadError


def reads_nothing(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an operation reads a tensor that has no data."""
    reads = name in READING or name in FOR_A_LOG
    return reads and bool(args) and isinstance(args[0], torch.Tensor) and is_fake(args[0])


def refuse_unread(tree: Any, place: int | None = None) -> None:
    """Refuse values with a number among them that is not known and was read in another place."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Unread) and not leaf.look.over and (leaf.place is None or leaf.place != place):
            raise ValueReadError


def unknown(line: str, who: str) -> UserError:
    """A value decides what a forward does, and not everybody has it."""
    return UserError(
        f"{line} reads a value of the model while it computes (.item(), if, or a shape that follows from it), {who}",
        "compute with tensors there (torch.where), or use a dp or fsdp layout; to keep or print .item() is fine",
    )
