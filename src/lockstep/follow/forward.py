"""One machine for all who follow a forward: calls of modules, torch functions, operations, what autograd keeps.

Whoever wants to know something gives it plain functions to be told by. The tensors may have data or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lockstep.runtime.torch_private import TorchDispatchMode, current_function_mode, replaced, without_function_mode

Answer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""What a function or an operation returns, from itself, its arguments and its keywords."""


class Functions(TorchFunctionMode):
    """Inside, `answer` says what torch's functions return, as the user's code calls them (`__torch_function__`)."""

    _paused = False

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What this call returns."""
        return func(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) if self._paused else self.answer(func, args, kwargs or {})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Not followed inside: code runs at full speed."""
        if current_function_mode() is self:
            with without_function_mode():
                yield
        else:  # somebody's `with torch.device(...)` is around
            self._paused = True
            try:
                yield
            finally:
                self._paused = False


class _Answered(Functions):
    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._answer(func, args, kwargs)


class Operations(TorchDispatchMode):
    """Inside, `answer` says what operations return, as kernels compute them; a backward is made of them, too."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # which comes back with the parts
        return self._answer(func, args, kwargs or {})


@contextmanager
def following(
    modules: Iterable[nn.Module] = (),
    enters: Callable[[nn.Module, Any], None] | None = None,
    leaves: Callable[[nn.Module, Any], None] | None = None,
    function: Answer | None = None,
    operation: Answer | None = None,
    keeps: Callable[[torch.Tensor], None] | None = None,
    resizes: Callable[[torch.UntypedStorage], None] | None = None,
    instead: Mapping[str, Callable[..., torch.Tensor]] | None = None,
) -> Iterator[None]:
    """Follow a forward that runs inside.

    `enters(module, arguments)` and `leaves(module, output)` are told of calls of `modules`. `function` answers torch's
    functions and `operation` what they come down to. `keeps` is told which tensors autograd saves for the backward,
    `resizes` which storages grow or are given up while tensors still use them, as `fully_shard` does it. `instead` are
    functions of torch.nn.functional by name, which torch's own modules call by that name too.
    """
    with ExitStack() as everything:
        for module in modules:
            if enters is not None:
                everything.callback(module.register_forward_pre_hook(enters).remove)
            if leaves is not None:
                told = _told(leaves)
                everything.callback(module.register_forward_hook(told, always_call=True).remove)
        for name, answer in (instead or {}).items():
            everything.enter_context(replaced(F, name, answer))
        if resizes is not None:
            everything.enter_context(replaced(torch.UntypedStorage, "resize_", _resizing(resizes)))
        if keeps is not None:
            everything.enter_context(torch.autograd.graph.saved_tensors_hooks(_keeping(keeps), lambda tensor: tensor))
        if function is not None:
            everything.enter_context(_Answered(function))
        if operation is not None:
            everything.enter_context(Operations(operation))
        yield


def _told(leaves: Callable[[nn.Module, Any], None]) -> Callable[[nn.Module, Any, Any], None]:
    return lambda module, _, output: leaves(module, output)


def _keeping(keeps: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], torch.Tensor]:
    def keep(tensor: torch.Tensor) -> torch.Tensor:
        keeps(tensor)
        return tensor

    return keep


def _resizing(resizes: Callable[[torch.UntypedStorage], None]) -> Callable[..., Any]:
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        resizes(storage)
        return result

    return resized
