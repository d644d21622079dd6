"""What a forward carries from one call to the next beside parameters and buffers: numbers, tensors, generators.

They stand in attributes of modules and of the loss, and in variables that the loss function reads from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

MOST_ITEMS = 64
"""Lists and dicts with more are data, and not looked through."""


class CarriedPlace(NamedTuple):
    """Where something stands that a forward may change, in words, and how to read and to set it."""

    words: str
    get: Callable[[], Any]
    set: Callable[[Any], None]


def places_of(models: Sequence[nn.Module], loss: Any) -> list[CarriedPlace]:
    """All of them."""
    found: list[CarriedPlace] = []
    for model in models:
        for name, module in model.named_modules():
            found += _in_dict(vars(module), list(vars(module)), f"of {name or 'the model'}")
    loss = getattr(loss, "func", loss)  # of a partial
    owner = getattr(loss, "__self__", loss)
    if not isinstance(owner, nn.Module) and not hasattr(owner, "__code__"):
        found += _in_dict(getattr(owner, "__dict__", {}), list(getattr(owner, "__dict__", {})), "of the loss")
        for kind in type(owner).__mro__:  # whose lists and dicts all of its kind share
            found += _in_dict(dict(vars(kind)), list(vars(kind)), "of the loss")
    function = getattr(loss, "__func__", loss)
    if (code := getattr(function, "__code__", None)) is not None:
        found += _in_dict(function.__globals__, [name for name in code.co_names if name in function.__globals__], "")
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            read, fill = partial(getattr, cell, "cell_contents", None), partial(setattr, cell, "cell_contents")
            found += _with_items(CarriedPlace(f"the variable {name}", read, fill))
    return found


def holds_objects(function: Any) -> bool:
    """Whether a function reads an object from outside that may carry something where nobody looks for it."""
    function = getattr(function, "func", function)  # of a partial
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    outside = [function.__globals__.get(name) for name in code.co_names]
    outside += [getattr(cell, "cell_contents", None) for cell in function.__closure__ or ()]
    plain = type | ModuleType | FunctionType | BuiltinFunctionType | torch.Tensor
    return any(hasattr(value, "__dict__") and not isinstance(value, plain) for value in outside)


def _in_dict(namespace: dict[str, Any], names: Sequence[str], of: str) -> Iterator[CarriedPlace]:
    for name in names:
        words = f"the attribute {name} {of}" if of else f"the variable {name}"
        yield from _with_items(CarriedPlace(words, partial(namespace.get, name), partial(namespace.__setitem__, name)))


def _with_items(place: CarriedPlace) -> Iterator[CarriedPlace]:
    """A place, where it holds something of the kind, and the numbers in a list or dict that it holds."""
    value = place.get()
    if value is None or isinstance(value, torch.Tensor | torch.Generator | list | dict) or type(value) in (int, float):
        yield place
    if isinstance(value, dict) and len(value) <= MOST_ITEMS:
        keys = [key for key, item in value.items() if type(item) in (int, float)]
        yield from (CarriedPlace(place.words, partial(value.get, key), partial(value.__setitem__, key)) for key in keys)
    if isinstance(value, list) and len(value) <= MOST_ITEMS:
        numbers = [index for index, item in enumerate(value) if type(item) in (int, float)]
        yield from (CarriedPlace(place.words, partial(_item, value, i), partial(value.__setitem__, i)) for i in numbers)


def _item(items: list[Any], index: int) -> Any:
    return items[index] if index < len(items) else None


def note_values(places: Sequence[CarriedPlace]) -> list[Any]:
    """What stands in each now, to be compared by `differs`."""
    return [_note(place.get()) for place in places]


def _note(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    return len(value) if isinstance(value, list | dict) else value


def differs(before: Any, now: Any) -> bool:
    """Whether two notes of one place are not the same; a tensor is another one as soon as it is another object."""
    if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor) and before.dtype == torch.uint8:
        return not torch.equal(before, now)  # the state of a generator
    if isinstance(before, torch.Tensor) or isinstance(now, torch.Tensor):
        return before is not now
    return type(before) is not type(now) or bool(before != now)


@contextmanager
def put_back(places: Sequence[CarriedPlace]) -> Iterator[None]:
    """Afterwards everything stands where it stood, and lists have not grown."""
    before = [(place, place.get(), _note(place.get())) for place in places]
    try:
        yield
    finally:
        for place, value, note in before:
            if isinstance(value, torch.Generator):
                value.set_state(note)
            elif isinstance(value, list):
                del value[note:]
            if place.get() is not value:
                place.set(value)


@contextmanager
def watch_numbers(counters: Sequence[CarriedPlace]) -> Iterator[list[str]]:
    """Inside, see which of these numbers a forward decides by; afterwards they are plain again."""
    decides: list[str] = []
    for place in counters:
        place.set(make_watched(place.get(), partial(decides.append, place.words)))
    try:
        yield decides
    finally:
        for place in counters:
            if isinstance(value := place.get(), int | float):
                place.set(int.__add__(value, 0) if isinstance(value, int) else float.__add__(value, 0.0))


def make_watched(value: float, note: Callable[[], None]) -> Any:
    """A number, and what is computed of it, that tells whether anything is decided by it: compared, or made another."""
    kind: type = type(value)

    class WatchedNumber(kind):  # type: ignore[misc]
        pass

    def computes(name: str) -> Any:
        def compute(*args: Any) -> Any:
            found = getattr(kind, name)(*args)
            return WatchedNumber(found) if type(found) is kind else found

        return compute

    def decides(name: str) -> Any:
        def decide(*args: Any) -> Any:
            note()
            return getattr(kind, name)(*args)

        return decide

    for name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__neg__"):
        setattr(WatchedNumber, name, computes(name))
    for name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__hash__", "__bool__", "__mod__"):
        setattr(WatchedNumber, name, decides(name))
    for name in ("__floordiv__", "__truediv__", "__rtruediv__", "__pow__", "__rpow__", "__float__", "__int__"):
        setattr(WatchedNumber, name, decides(name))
    return WatchedNumber(value)
