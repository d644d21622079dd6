"""Settings of the user's process that a run changes, and how they are put back when it ends (docs/process.md).

What a process has once (torch's switches, environment variables, filters of warnings) is changed by `change` alone,
which remembers what it was. `put_back` is the last thing that a run does.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch

from lockstep.runtime.torch_private import compiler_config, distributions_check

T = TypeVar("T")

_before: dict[str, Callable[[], object]] = {}  # how to put back what was changed, in the order of first changes


def change(what: str, read: Callable[[], T], write: Callable[[T], object], value: T) -> None:
    """Change a setting of this process; the first time, what it was is remembered."""
    if what not in _before:
        _before[what] = partial(write, read())
    write(value)


def put_back() -> None:
    """Let every setting that was changed be what it was."""
    while _before:
        _before.popitem()[1]()


def set_environment(name: str, value: str) -> None:
    """Set a variable of the environment, for libraries and for processes that are started from here."""

    def write(text: str | None) -> None:
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text

    wanted: str | None = value
    change(f"the variable {name}", lambda: os.environ.get(name), write, wanted)


def set_default_environment(name: str, value: str) -> None:
    """The same where the user has not said anything."""
    if name not in os.environ:
        set_environment(name, value)


def ignore_warning(message: str) -> None:
    """Show no warning that begins like a pattern."""
    if f"the warning {message}" in _before:
        return
    warnings.filterwarnings("ignore", message=message)
    added = warnings.filters[0]

    def remove() -> None:
        with suppress(ValueError):  # somebody has reset the filters
            warnings.filters.remove(added)  # type: ignore[attr-defined]

    _before[f"the warning {message}"] = remove


def set_threads(count: int) -> None:
    """How many threads torch computes with on the CPU."""
    change("torch's threads", torch.get_num_threads, torch.set_num_threads, count)


def set_tf32(on: bool) -> None:
    """Let matmuls and convolutions in fp32 round to tf32, or not; for convolutions it is torch's default."""
    precision = "high" if on else "highest"
    change("matmul", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, precision)
    _set(torch.backends.cudnn, "allow_tf32", on)


def keep_attention_open() -> None:
    """torch's own transformer layers compute by the modules inside of them.

    Their fast path would hand parts of matrices to a kernel that takes them for whole ones.
    """
    mha = torch.backends.mha
    change("attention's fast path", mha.get_fastpath_enabled, mha.set_fastpath_enabled, False)


def leave_distributions_unchecked() -> None:
    """torch.distributions read values to check their arguments, which a model without data does not have."""
    write = torch.distributions.Distribution.set_default_validate_args
    change("checks of distributions", distributions_check, write, False)


def allow_variants(limit: int) -> None:
    """Let torch.compile make so many variants of a function, and fail where it would go on in eager mode."""
    config = compiler_config()
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        _set(config, name, max(getattr(config, name), limit))
    _set(config, "fail_on_recompile_limit_hit", True)


def tag_compiled_code(tag: str) -> None:
    """Tell graphs in torch.compile's cache apart that were traced for different attention kernels."""
    _set(torch.compiler.config, "cache_key_tag", tag)


def _set(owner: Any, name: str, value: Any) -> None:
    change(f"{owner.__name__}.{name}", partial(getattr, owner, name), partial(setattr, owner, name), value)
