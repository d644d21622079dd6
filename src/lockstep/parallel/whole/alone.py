"""What a model does with gradients and rows that is right only where one forward sees the whole batch of a step.

Hooks see the gradient of the mean loss there, as in a plain loop. Elsewhere a gradient is a share that is scaled and
added up later, so they are refused by name; and so are tables that change, or count, the rows of their own forward.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.data.loader import MicroBatch
from lockstep.errors import UserError
from lockstep.follow.forward import following
from lockstep.follow.functions import not_linear
from lockstep.follow.values import is_library, user_line
from lockstep.layout import Layout
from lockstep.runtime.torch_private import backward_hooks, gradient_hooks

REGISTERING: list[tuple[Any, str]] = [
    (torch.Tensor, "register_hook"),
    (torch.Tensor, "register_post_accumulate_grad_hook"),
    (nn.Module, "register_full_backward_hook"),
    (nn.Module, "register_full_backward_pre_hook"),
    (nn.Module, "register_backward_hook"),
]

ONE_PROCESS = "train this model on one process (--layout single), or do that in the loss or the optimizer"


def refuse_hooks(model: nn.Module, layout: Layout) -> None:
    """Refuse hooks on gradients on several ranks: there a gradient is a sum that comes together later."""
    if layout.world_size > 1 and (found := hook_of(model)) is not None:
        raise hook_refused(found)


def refuse_sparse(model: nn.Module, what: str, instead: str) -> None:
    """Refuse tables with sparse gradients, where `what` cannot be done with these."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UserError(
                f"{name} has sparse gradients, which cannot be {what}", f"leave sparse=True out, or use {instead}"
            )


def hook_refused(found: str) -> UserError:
    """A hook on a gradient that no rank has whole."""
    return UserError(f"{found}, and on several ranks a gradient is a sum that comes together later", ONE_PROCESS)


def hook_of(model: nn.Module) -> str | None:
    """A hook of the user's on a gradient, for people; the first one."""
    return _first_hook(model.named_parameters(), model.named_modules())


def _first_hook(parameters: Iterable[tuple[str, nn.Parameter]], modules: Iterable[tuple[str, nn.Module]]) -> str | None:
    for name, parameter in parameters:
        if any(map(_is_users, gradient_hooks(parameter))):
            return f"the parameter {name} has a hook on its gradient"
    for name, module in modules:
        if any(map(_is_users, backward_hooks(module))):
            return f"{name or 'the model'} has a backward hook"
    return None


def _is_users(hooks: Any) -> bool:
    """Whether some hook is neither torch's nor ours."""
    for hook in hooks.values() if hooks else ():
        function = hook.func if isinstance(hook, functools.partial) else hook
        if not getattr(function, "__module__", "").startswith(("torch.", "lockstep.")):
            return True
    return False


def refuse_tables(model: nn.Module, layout: Layout) -> None:
    """Refuse tables of which every rank would change, or count, the rows that it reads itself."""
    if layout.data_size * layout.cp == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _refuse_table(f"{name} has", module.max_norm is not None, module.scale_grad_by_freq)


def _refuse_table(who: str, shortens: bool, counts: bool) -> None:
    if shortens:
        raise UserError(
            f"{who} max_norm, and each rank would shorten only the rows that it reads itself",
            "use a pp or tp layout, or leave max_norm out and shorten the rows after each engine.step",
        )
    if counts:
        raise UserError(
            f"{who} scale_grad_by_freq, and each rank would count only the rows that it reads itself",
            "use a single, tp or pp layout with micro_batch = global_batch, or leave it out",
        )


def counting_table(models: Sequence[nn.Module]) -> str | None:
    """A table whose gradient depends on how often rows are read in one forward, for people."""
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
                return f"{name} has scale_grad_by_freq"
    return None


class WholeSteps:
    """Finds what needs a step to be one forward, and refuses one that is not."""

    def __init__(self, models: Sequence[nn.Module], layout: Layout) -> None:
        # Walking a large model takes milliseconds; Trainable refuses one whose modules or parameters are others now.
        self._parameters = [pair for model in models for pair in model.named_parameters()]
        self._modules = [pair for model in models for pair in model.named_modules()]
        self._layout = layout
        self._counting = counting_table(models)
        self._function: str | None = None
        self._is_new = True
        self.hook: str | None = None
        """A hook on a gradient, for people: it wants the gradient of the mean loss."""

    def begin(self) -> None:
        """Look for hooks that were registered since the last step."""
        found = _first_hook(self._parameters, self._modules)
        if found is not None and self._layout.world_size > 1:
            raise hook_refused(found)
        self.hook = self._function or found

    def try_functions(self, loss: torch.Tensor) -> None:
        """Once, before a backward pass: try out the autograd.Functions of the user's that it comes to."""
        if not self._is_new:
            return
        self._is_new = False
        if (name := not_linear(loss, self._layout.team > 1)) is None:
            return
        self.hook = self._function = f"the backward of {name} is not linear in the gradient"
        if self._layout.world_size > 1:
            raise UserError(
                f"{self.hook}, and a rank gives it a share that is scaled and added up later",
                "train this model on one process (--layout single), or clip gradients by run.setup(clip=...)",
            )

    @property
    def reason(self) -> str | None:
        """Why a step has to be one forward, for people; None: it need not."""
        return self.hook or self._counting

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Refuse a step of several forwards."""
        if len(micro_batches) > 1 and self.reason is not None:
            raise UserError(
                f"{self.reason}, and a step of {len(micro_batches)} micro-batches has no forward that sees all of it",
                f"give run.loader micro_batch={sum(len(part.ids) for part in micro_batches)}",
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the loss function runs: see hooks that it registers."""
        before = [(owner, name, getattr(owner, name)) for owner, name in REGISTERING]
        for owner, name, register in before:
            setattr(owner, name, self._seen(register))
        try:
            yield
        finally:
            for owner, name, register in before:
                setattr(owner, name, register)

    def seeing_tables(self) -> AbstractContextManager[None]:
        """While the loss function is tried out: see tables that no nn.Embedding holds."""
        return following(function=self._see_table)

    def _see_table(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.embedding or func is F.embedding_bag:
            given = inspect.signature(func).bind(*args, **kwargs).arguments
            shortens, counts = given.get("max_norm") is not None, bool(given.get("scale_grad_by_freq"))
            who = f"{user_line()} gives {func.__name__}" if shortens or counts else ""
            if self._layout.data_size * self._layout.cp > 1:
                _refuse_table(who, shortens, counts)
            if counts:
                self._counting = self._counting or f"{who} scale_grad_by_freq"
        return func(*args, **kwargs)

    def _seen(self, register: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(register)  # parts of tensors know it by its name
        def registering(*args: Any, **kwargs: Any) -> Any:
            if not is_library(sys._getframe(1).f_code.co_filename):
                self.hook = f"{user_line()} registers a hook on a gradient"
                if self._layout.world_size > 1:
                    raise hook_refused(self.hook)
            return register(*args, **kwargs)

        return registering
