"""Every byte of a checkpoint is in a block with a digest, and whoever reads it finds the byte that has changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lockstep.checkpoint.disk.files import reading, verify_checkpoint
from lockstep.checkpoint.disk.format import BLOCK_BYTES, DamageError, open_checkpoint
from lockstep.checkpoint.disk.load import Target, fill
from lockstep.checkpoint.exchange.foreign import import_weights
from lockstep.parallel.boxes import Box

SIZE = 2 * BLOCK_BYTES + 12
"""Bytes of the large tensor: two whole blocks, and a last one of three numbers."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    weights = {"large": torch.arange(SIZE // 4, dtype=torch.float32), "small": torch.ones(3)}
    save_file(weights, tmp_path / "weights.safetensors")
    folder, _ = import_weights(tmp_path / "weights.safetensors", tmp_path / "run")
    return folder


def shard_of(checkpoint: Path) -> tuple[Path, int]:
    """The file of the large tensor, and where in it that begins."""
    (chunk,) = open_checkpoint(checkpoint).index.tensors["model/large"].chunks
    return checkpoint / chunk.file, chunk.offset


def test_a_whole_checkpoint_is_read_to_its_last_byte(checkpoint: Path) -> None:
    assert verify_checkpoint(checkpoint) == sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("byte", "block"),
    [
        (0, 0),
        (BLOCK_BYTES - 1, 0),
        (BLOCK_BYTES, 1),
        (2 * BLOCK_BYTES - 1, 1),
        (2 * BLOCK_BYTES, 2),
        (SIZE - 1, 2),
    ],
)
def test_one_changed_bit_in_any_block_is_found_and_placed(checkpoint: Path, byte: int, block: int) -> None:
    path, offset = shard_of(checkpoint)
    with path.open("r+b") as file:
        file.seek(offset + byte)
        (value,) = file.read(1)
        file.seek(offset + byte)
        file.write(bytes([value ^ 1]))
    with pytest.raises(DamageError, match=rf"in the block at byte {offset + block * BLOCK_BYTES}\)"):
        verify_checkpoint(checkpoint)
    whole = open_checkpoint(checkpoint)
    with reading(whole) as reader, pytest.raises(DamageError, match="has changed since it was written"):
        reader.read_into(torch.empty(SIZE // 4), whole.index.tensors["model/large"].chunks[0])


@pytest.mark.parametrize(
    ("start", "shape"),
    [
        ((0, 0), (5, 6)),
        ((2, 0), (3, 6)),
        ((0, 4), (5, 2)),
        ((3, 1), (2, 4)),
        ((4, 5), (1, 1)),
    ],
)
def test_any_box_of_a_tensor_is_read_to_its_place_in_a_ranks_part(
    tmp_path: Path, start: tuple[int, int], shape: tuple[int, int]
) -> None:
    whole = torch.arange(30.0).view(5, 6)
    save_file({"w": whole}, tmp_path / "weights.safetensors")
    folder, _ = import_weights(tmp_path / "weights.safetensors", tmp_path / "run")
    part = torch.full((7, 7), -1.0)
    fill(open_checkpoint(folder), [Target("model/w", part, [Box(start, (1, 1), shape)])])
    rows, columns = (slice(at, at + size) for at, size in zip(start, shape, strict=True))
    inside = part[1 : 1 + shape[0], 1 : 1 + shape[1]]
    assert torch.equal(inside, whole[rows, columns])
    assert int((part == -1).sum()) == part.numel() - inside.numel(), "nothing beside it is touched"
