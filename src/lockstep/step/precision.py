"""Number formats of a run: what is stored, computed and summed in what, and the loss scale that fp16 needs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lockstep.config.schema import Format, NumericsConfig
from lockstep.errors import UserError
from lockstep.runtime.process import set_tf32
from lockstep.runtime.torch_private import cpu_has_fp16

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_in(precision: Format, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass.

    bf16 and fp16 are autocast in every layout, sharded ones too: casting the shards instead would round norms and
    embeddings as well, and the same script would give other numbers than on one device. Its weight cache is off
    because it would keep a half-precision copy of every gathered shard alive.
    """
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision], cache_enabled=False)


class LossScale:
    """What fp16 multiplies the loss by, so that small gradients do not vanish: doubled after `window` steps without
    overflow, halved on one. It is equal on every rank, because all judge by the one global gradient norm.
    """

    def __init__(self, scale: float, window: int) -> None:
        self.scale = scale
        self._window = window
        self._good_steps = 0

    def update(self, overflow: bool) -> None:
        """Learn from a step."""
        self._good_steps = 0 if overflow else self._good_steps + 1
        if overflow:
            self.scale /= 2
        elif self._good_steps == self._window:
            self.scale *= 2
            self._good_steps = 0

    def state(self) -> dict[str, float]:
        """What a checkpoint holds."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])


def number_formats(precision: Format, numerics: NumericsConfig, device_type: str) -> dict[str, str]:
    """The precision table of a run: what each kind of number is held in."""
    # On a CPU autocast leaves them in the format their input has.
    norms = "fp32" if device_type == "cuda" or precision == "fp32" else f"{precision} or fp32, as they come"
    products = "tf32" if precision == "fp32" and numerics.tf32 else precision
    stored = numerics.storage_dtype
    return {
        "weights": stored,
        "weights in a forward": numerics.param_dtype or stored,
        "matrix products": products,
        "norms, softmax": norms,
        "loss and its sums": "fp32, then float64",
        "buffers": numerics.buffer_dtype or "as built",
        "gradients": stored,
        "gradient sums over ranks": numerics.reduce_dtype,
        "optimizer state": stored,
        "loss scale": f"{numerics.loss_scale:g}, doubled every {numerics.loss_scale_window} steps without overflow"
        if precision == "fp16"
        else "none",
    }


def apply_tf32(numerics: NumericsConfig, device: torch.device) -> None:
    """Switch tf32 on or off, for convolutions too, where torch has it on by default."""
    if device.type == "cuda":
        set_tf32(numerics.tf32)


def check_can_compute(precision: Format, numerics: NumericsConfig, device_type: str) -> None:
    """Refuse a number format this machine cannot compute in, or only by emulation."""
    if numerics.tf32 and device_type == "cpu":
        raise UserError("numerics.tf32 is on, and a CPU has no tf32", "leave it out, or use --device cuda")
    if precision == "fp32":
        return
    if device_type == "cuda":
        if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            name = torch.cuda.get_device_name()
            raise UserError(f"precision bf16 needs an Ampere GPU or newer, and this is a {name}", "use precision fp16")
        return
    if precision == "fp16" and "slow-fp16" not in numerics.accept and not cpu_has_fp16():
        raise UserError(
            "precision fp16 on this CPU is emulated, about a hundred times slower than fp32",
            "use bf16 or fp32 here, or accept it by name: --set 'numerics.accept=[\"slow-fp16\"]'",
        )
    if killer := _half_precision_kills(precision):
        raise UserError(
            f"this CPU says it has matrix units for {precision}, and a process that uses them is killed ({killer})",
            "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment, or use precision fp32",
        )


def refuse_untrainable(
    named: list[tuple[str, torch.nn.Parameter]], optimizer: torch.optim.Optimizer, numerics: NumericsConfig
) -> None:
    """Refuse weights in half precision that a stock optimizer would fail to move."""
    for name, parameter in named:
        stored = str(parameter.dtype).removeprefix("torch.")
        if parameter.dtype == torch.float16:
            raise UserError(
                f"the parameter {name} is stored as {stored}",
                'build the model in float32 and give precision="fp16": gradients of fp16 weights cannot be unscaled',
            )
        is_stock = type(optimizer).__module__.startswith("torch.optim")
        if parameter.dtype == torch.bfloat16 and is_stock and "bf16-weights" not in numerics.accept:
            raise UserError(
                f"the parameter {name} is stored as {stored}, and {type(optimizer).__name__} loses updates smaller "
                "than 1/256 of a weight",
                'keep weights in float32 with precision="bf16", use an optimizer made for it, or accept it by name: '
                'numerics.accept = ["bf16-weights"]',
            )


PROBE = """
import torch
layer, images = torch.nn.Linear(256, 256), torch.nn.Conv2d(3, 8, 3)
with torch.autocast("cpu", dtype=torch.{dtype}):
    loss = layer(torch.randn(64, 256)).float().sum() + images(torch.randn(2, 3, 16, 16)).float().sum()
loss.backward()
"""


@cache
def _half_precision_kills(precision: Format) -> str | None:
    """The signal that ends a process using this CPU's matrix units, as on virtual machines that hide them."""
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not _claims_amx():
        return None
    command = [sys.executable, "-c", PROBE.format(dtype=str(DTYPES[precision]).removeprefix("torch."))]
    code = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode
    return signal.Signals(-code).name if code < 0 else None


def _claims_amx() -> bool:
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
