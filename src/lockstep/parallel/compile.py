"""torch.compile, block by block or of the whole, with its results kept on disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from lockstep.config import Compile, NumericsConfig, ShardConfig
from lockstep.errors import UserError
from lockstep.layout import Layout


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


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile the forward of every block, once for all of them where they are alike.

    Only `forward` is compiled: hooks of a block (its random stream, its unsharding) stay outside the graph.
    """
    if not blocks:
        raise UserError("compile = blocks, and the model has no repeated blocks", "use compile = model")
    for block in blocks:
        block.forward = torch.compile(block.forward)


def keep_on_disk(folder: Path) -> None:
    """Let later processes find what this one compiles; a folder the user chose stays."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes a second to import

    # torch fills the variable in by itself, with a folder that a reboot empties (private in torch 2.11 and 2.13).
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def tag_compiled_code(tag: str) -> None:
    """Tell apart what the source of a graph does not show.

    Attention kernels are chosen while tracing: without a tag, a graph traced for other kernels is taken from the cache.
    """
    torch.compiler.config.cache_key_tag = tag


def _need_compiler() -> None:
    wanted = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ([wanted] if wanted else ["g++", "clang++", "c++"])):
        raise UserError(
            "torch.compile needs a C++ compiler, and there is none",
            "install g++ (or load its module), or compile = off",
        )
