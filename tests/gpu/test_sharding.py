"""Levels of sharding and synchronised BatchNorm where ranks share a GPU over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_cuda import train
from tests.parity import test_batch_norm as batch_norm
from tests.ranks import RankPool

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(tmp_path_factory.mktemp("one"), "--nproc", "1")


@pytest.mark.parametrize(("layout", "nproc"), [("fsdp=2", "2"), ("dp=2,fsdp=2", "4")])
@pytest.mark.parametrize("level", ["zero1", "zero2"])
def test_every_level_gives_the_numbers_of_one_gpu(
    one_gpu: list[float], tmp_path: Path, layout: str, nproc: str, level: str
) -> None:
    shared = train(tmp_path, "--nproc", nproc, "--layout", layout, "--share-gpu", "--set", f"shard.level={level}")
    assert shared[:5] == pytest.approx(one_gpu[:5], rel=1e-5)
    assert shared == pytest.approx(one_gpu, rel=1e-2)


def test_levels_agree_with_rounded_weights(tmp_path: Path) -> None:
    rounded = ("--set", "precision=bf16", "--set", "numerics.param_dtype=bf16", "--set", "numerics.reduce_dtype=bf16")
    runs = []
    for name, options in {
        "one": ("--nproc", "1"),
        "zero1": ("--nproc", "2", "--layout", "fsdp=2", "--share-gpu", "--set", "shard.level=zero1"),
        "zero3": ("--nproc", "2", "--layout", "fsdp=2", "--share-gpu"),
    }.items():
        (tmp_path / name).mkdir()
        runs.append(train(tmp_path / name, *options, *rounded))
    one, *others = runs
    for other in others:
        assert other == pytest.approx(one, rel=2e-2)


@pytest.mark.parametrize(("layout", "options"), [("dp=2", {}), ("fsdp=2", {"recompute": True})], ids=str)
def test_batch_norm_is_synchronised(ranks: RankPool, layout: str, options: dict[str, Any]) -> None:
    where = {"device": "cuda", "share_gpu": True, "timeout_minutes": 1.5}
    found = ranks.run(batch_norm.train, 2, layout, 2, options, timeout=110, **where)
    (expected,) = ranks.run(batch_norm.plain, 1, batch_norm.steps_of(found), 2, 2)
    for losses, _, state, _ in found:
        assert losses == pytest.approx(expected[0], rel=1e-3)
        for name in ("first.running_var", "blocks.0.norm.running_mean"):
            torch.testing.assert_close(state[name], expected[2][name], rtol=1e-3, atol=1e-4)
