"""What a script gives to Lockstep, checked as the command line checks its options: one sentence, at once."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from lockstep.errors import UserError, nearest

P = ParamSpec("P")
T = TypeVar("T")

ELSEWHERE = {
    "batch_size": ("global_batch", "micro_batch"),
    "gradient_accumulation_steps": ("global_batch", "micro_batch"),
    "max_grad_norm": ("clip",),
    "max_norm": ("clip",),
    "criterion": ("loss",),
    "dtype": ("precision",),
    "strategy": ("layout",),
    "output_dir": ("run_dir",),
}
"""What other libraries call our arguments, where the nearest name would not be it."""


def named(call: str, fix: str = "") -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Answer wrong arguments of a function that people know as `call` with one sentence instead of a TypeError.

    `fix` says how it is called, where the names of its arguments do not.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                if fix:
                    raise UserError(f"{call} was called with wrong arguments ({error})", fix) from None
                raise _wrong_arguments(call, signature, kwargs, str(error)) from None
            return function(*args, **kwargs)

        return wrapper

    return decorate


def _wrong_arguments(call: str, signature: inspect.Signature, given: Iterable[str], said: str) -> UserError:
    known = [name for name in signature.parameters if name != "self"]
    for name in given:
        if name not in known:
            theirs = [one for one in ELSEWHERE.get(name, ()) if one in known]
            close = nearest(name.replace("_", ""), {one.replace("_", ""): one for one in known})
            ours = theirs or [one for one in known if close is not None and one.replace("_", "") == close]
            fix = f"did you mean {' or '.join(ours)}?" if ours else f"it knows {', '.join(known)}"
            return UserError(f"{call} has no argument {name}", fix)
    return UserError(f"{call} was called with wrong arguments", f"{said} (it takes {', '.join(known)})")


# What run.setup is given ----------------------------------------------------------------------------------------------


def check_setup(build_model: Any, loss: Any, optimizer: Any, schedule: Any, clip: Any) -> None:
    """Refuse things where functions are wanted that make them, or the other way round."""
    if isinstance(build_model, nn.Module):
        kind = type(build_model).__name__
        fix = f"give a function that makes it, such as lambda: {kind}(...)"
        raise UserError(f"run.setup was given a model ({kind}), and it has to build that itself on every layout", fix)
    _check_function("build_model", build_model, "that makes the model, such as lambda: Net(...)")
    if isinstance(loss, nn.Module) and type(loss).__module__.startswith("torch.nn"):
        fix = "give a function (model, batch) that calls both and returns (sum of the losses, how many count)"
        raise UserError(f"run.setup was given {type(loss).__name__} as its loss", fix)
    if isinstance(loss, nn.Module) and (name := next((name for name, _ in loss.named_parameters()), None)):
        raise UserError(
            f"the loss has a parameter of its own ({name}), which no optimizer would get and no checkpoint would have",
            "make it a part of the model that build_model returns, and read it there in the loss",
        )
    _check_function("loss", loss, "(model, batch) that returns (sum of the losses, how many count)", 2)
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        fix = f"give a function that makes it: optimizer=lambda params: torch.optim.{kind}(params, lr=...)"
        raise UserError(
            f"run.setup was given an optimizer ({kind}) whose parameters are not those that the run trains", fix
        )
    _check_function("optimizer", optimizer, "such as lambda params: torch.optim.AdamW(params, lr=3e-4)", 1)
    if isinstance(schedule, LRScheduler):
        kind = type(schedule).__name__
        fix = f"make it after run.setup, {kind}(engine.optimizer, ...), and step it; or give a function of the step"
        raise UserError(f"run.setup was given a scheduler ({kind}) of an optimizer that it does not train with", fix)
    if schedule is not None:
        _check_function("schedule", schedule, "of the step that returns the factor on the learning rate", 1)
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0):
        raise UserError(f"clip is {clip!r}", "give the largest global gradient norm, a number above 0, or leave it out")


def _check_function(name: str, given: Any, meant: str, arguments: int = 0) -> None:
    if not callable(given):
        raise UserError(f"run.setup was given a {type(given).__name__} as {name}", f"give a function {meant}")
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):  # some of those written in C do not say
        return
    try:
        signature.bind(*[None] * arguments)
    except TypeError as error:
        fix = f"give a function {meant}"
        raise UserError(f"the {name} of run.setup cannot be called with {arguments} arguments ({error})", fix) from None


def checked_builder(build_model: Callable[[], Any]) -> Callable[[], nn.Module]:
    """The same function, which refuses to return something else than a model."""

    def build() -> nn.Module:
        model = build_model()
        if not isinstance(model, nn.Module):
            kind = "nothing" if model is None else f"a {type(model).__name__}"
            raise UserError(f"build_model returned {kind}", "let it return the model, a torch.nn.Module")
        return model

    return build


def check_made(optimizer: Any, named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse an `optimizer` function that returns something else than an optimizer of what it was given."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = "nothing" if optimizer is None else f"a {type(optimizer).__name__}"
        raise UserError(f"the optimizer function returned {kind}", "let it return a torch.optim.Optimizer")
    known = {id(parameter) for _, parameter in named}
    others = [one for group in optimizer.param_groups for one in group["params"] if id(one) not in known]
    if others:
        raise UserError(
            f"the optimizer was given a parameter of shape {tuple(others[0].shape)} that is not the model's, whose "
            "gradients nobody would add up and no checkpoint would have",
            "make it a parameter of the model that build_model returns, and read it there in the loss",
        )


# What run.loader and run.evaluate are given ---------------------------------------------------------------------------


def check_dataset(call: str, dataset: Any) -> None:
    """Refuse a loader of torch, whose batches would be taken for samples."""
    if isinstance(dataset, DataLoader):
        fix = f"give its dataset: {call}(dataset, ...), which shares samples out, shuffles and collates"
        raise UserError(f"{call} was given a DataLoader", fix)


def check_counts(**counts: Any) -> None:
    """Refuse what is not a whole number from 1, or None."""
    for what, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UserError(f"{what} is {value!r}", "give a whole number from 1")


# What a script will do ------------------------------------------------------------------------------------------------


def check_exports(script: Path) -> None:
    """Refuse before the training what `run.export` would refuse after it, where the script's own text says it."""
    for path in _planned_exports(script):
        if Path(path).exists():
            raise UserError(
                f"{script.name} exports to {path}, which exists already", "give another name there, or remove it first"
            )


def _planned_exports(script: Path) -> list[str]:
    """The files in calls of run.export that are written out, and not under a condition."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    found: list[str] = []

    def look(node: ast.AST) -> None:
        match node:
            case ast.If(ast.Compare(ast.Name("__name__"))):
                pass
            case ast.If() | ast.Try() | ast.IfExp() | ast.While() | ast.Match():
                return
            case ast.Call(ast.Attribute(ast.Name("run"), "export"), [ast.Constant(str(path)), *_]):
                found.append(path)
        for child in ast.iter_child_nodes(node):
            look(child)

    look(tree)
    return found
