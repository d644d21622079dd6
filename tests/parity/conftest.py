"""Parity in bf16 must not depend on which matrix unit a CPU has, or only says it has."""

from __future__ import annotations

import os

import pytest

# Some virtual machines name AMX among the CPU's features and kill the process that uses it. Ranks inherit this.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

pytest.register_assert_rewrite("tests.parity.records")
