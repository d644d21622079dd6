"""torch.compile, block by block or of the whole, with its results kept on disk."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.config.schema import Compile, NumericsConfig, ShardConfig
from lockstep.errors import UserError
from lockstep.follow.around import replace_forward
from lockstep.follow.blocks import find_blocks
from lockstep.layout import Layout
from lockstep.parallel.replicate.statistics import batch_norms
from lockstep.parallel.tensor.cut import put_cuts_back, take_apart
from lockstep.runtime import process
from lockstep.runtime.torch_private import compiler_cache, compiler_config, compiler_errors
from lockstep.runtime.torch_private.seen import require

VARIANTS = 16
"""Of one function: training and scoring, whole and ragged batches, with and without running statistics."""


def check_compile(
    compile_: Compile, layout: Layout, shard: ShardConfig, numerics: NumericsConfig, batch_norm: str
) -> None:
    """Refuse what torch cannot compile, or would compile into something else."""
    if compile_ == "off":
        return
    if compile_ == "model" and layout.fsdp > 1 and shard.level != "zero1":
        raise UserError(
            f"compile = model does not go with the sharded weights of layout {layout}",
            "use compile = blocks, or shard.level = zero1",
        )
    if compile_ == "model" and numerics.param_dtype not in (None, "fp32"):
        raise UserError("compile = model does not go with numerics.param_dtype", "use compile = blocks")
    if batch_norm == "sync":
        raise UserError(
            f"compile = {compile_} does not go with batch_norm = sync", "use compile = off, or batch_norm = micro-batch"
        )
    _need_compiler()


def check_compilable(compile_: Compile, model: nn.Module, recompute: bool) -> None:
    """Refuse a model that cannot be compiled the way that was asked for."""
    if compile_ == "blocks" and not find_blocks(model):
        raise UserError("compile = blocks, and the model has no repeated blocks", "use compile = model")
    if compile_ == "model" and recompute and batch_norms(model):
        raise UserError("compile = model does not go with recompute of a model with BatchNorm", "use compile = blocks")


def compile_blocks(blocks: Sequence[nn.Module], cut: bool) -> None:
    """Compile the forward of every block, once for all of them where they are alike.

    Only `forward` is compiled: hooks of a block (its random stream, its unsharding) stay outside the graph. `cut` says
    that tensors inside may be cut over ranks.
    """
    allow_variants(len(blocks))
    for block in blocks:
        replace_forward(block, _compile_cut if cut else torch.compile)


def compile_whole(loss: Callable[..., Any], cut: bool) -> Callable[..., Any]:
    """Compile the loss function and with it the model it calls."""
    allow_variants(1)
    compiled: Callable[..., Any] = _compile_cut(loss) if cut else torch.compile(loss)
    return compiled


def _compile_cut(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function in which tensors are cut over ranks.

    In one graph: a cut tensor that lives on where a graph ends, torch would take for a whole one. So those that go in
    and come out do so as plain ones, beside where they are cut.
    """

    @torch.compile(fullgraph=True)
    def traced(along: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        args, kwargs = put_cuts_back((args, kwargs), along)
        return take_apart(function(*args, **kwargs))

    def called(*args: Any, **kwargs: Any) -> Any:
        parts, along = take_apart((args, kwargs))
        return put_cuts_back(*traced(along, *parts))

    return called


def allow_variants(functions: int) -> None:
    """Let torch compile a variant for every function and kind of call, and fail where it would give up.

    Left alone it goes on in eager mode after eight, and with that with other dropout masks; a restarted run, which
    comes to that point later, would then give other numbers.
    """
    require("compile")
    process.allow_variants(VARIANTS * functions)


@contextmanager
def compiled_calls() -> Iterator[None]:
    """Say in one sentence that torch would have to compile without end."""
    try:
        yield
    except compiler_errors().Unsupported as error:
        raise UserError(
            f"a block whose tensors are cut over ranks has to be compiled in one graph, and torch cannot: "
            f"{str(error).splitlines()[0]}",
            "use compile = off, or a layout without tp and cp",
        ) from error
    except compiler_errors().FailOnRecompileLimitHit as error:
        raise UserError(
            f"the model would have to be compiled more than {compiler_config().recompile_limit} times, because its "
            "shapes or values keep changing",
            "give every micro-batch the same shape, or use compile = off",
        ) from error


def keep_on_disk(folder: Path) -> None:
    """Let later processes find what this one compiles; a folder the user chose stays."""
    # torch fills the variable in by itself.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, compiler_cache()):
        process.set_environment("TORCHINDUCTOR_CACHE_DIR", str(folder))


def _need_compiler() -> None:
    wanted = shlex.split(os.environ.get("CXX", ""))[:1]
    if not any(shutil.which(name) for name in (wanted or ["g++", "clang++", "c++"])):
        raise UserError(
            "torch.compile needs a C++ compiler, and there is none",
            "install g++ (or load its module), or compile = off",
        )
