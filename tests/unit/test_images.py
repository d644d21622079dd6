"""Image sets in their official formats: read whole, or refused by the file's name."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.data.images import ImageDataset, Images, crop_and_flip, read_cifar10, read_mnist
from lockstep.errors import UserError
from tests.sets import cifar_records, digit_images, idx, write_cifar10, write_mnist


def npz(folder: Path, **changes: np.ndarray) -> Path:
    (x_train, y_train), (x_test, y_test) = digit_images(60, 0), digit_images(13, 1)
    arrays = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "mnist.npz", **arrays)  # type: ignore[arg-type]
    return folder / "mnist.npz"


@pytest.mark.parametrize(
    "source",
    [
        lambda folder: write_mnist(folder),
        lambda folder: write_mnist(folder, compressed=True),
        lambda folder: npz(folder),
        lambda folder: npz(folder).parent,
    ],
    ids=["idx", "idx.gz", "npz", "folder with npz"],
)
def test_every_form_of_mnist_gives_the_same_images(tmp_path: Path, source: Callable[[Path], Path]):
    splits = read_mnist(source(tmp_path / "mnist"))
    pixels, labels = digit_images(60, 0)
    assert [len(part.labels) for part in (splits.train, splits.validation, splits.test)] == [54, 6, 13]
    together = torch.cat([splits.train.pixels, splits.validation.pixels])
    assert together.equal(torch.from_numpy(pixels)[:, None]), "the last tenth is held out, nothing is lost"
    assert torch.cat([splits.train.labels, splits.validation.labels]).tolist() == labels.tolist()
    assert splits.test.pixels.equal(torch.from_numpy(digit_images(13, 1)[0])[:, None])


def test_cifar10_is_read_record_by_record_over_the_batches_there_are(tmp_path: Path):
    splits = read_cifar10(write_cifar10(tmp_path / "cifar", batches=(24, 16)))
    assert [len(part.labels) for part in (splits.train, splits.validation, splits.test)] == [36, 4, 11]
    record = np.frombuffer(cifar_records(16, 2), np.uint8).reshape(16, 3073)[-1]
    assert splits.validation.labels[-1] == record[0]
    assert splits.validation.pixels[-1].flatten().tolist() == record[1:].tolist(), "red, green, blue, row by row"


MNIST_DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda path: path.unlink(), r"train-images-idx3-ubyte\.gz is missing: give a folder with all"),
    "empty": (lambda path: path.write_bytes(b""), "is no idx file"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"should hold 60 x 28 x 28 bytes and holds 47039"),
    "of another kind": (lambda path: path.write_bytes(b"GIF89a" * 100), "is no idx file of 3-dimensional bytes"),
    "of other images": (
        lambda path: path.write_bytes(idx(np.zeros((60, 8, 8), np.uint8))),
        "has images of 8 x 8 pixels",
    ),
    "one image short": (lambda path: path.write_bytes(idx(digit_images(59, 0)[0])), "has 59 images and 60 labels"),
}


@pytest.mark.parametrize("damage", MNIST_DAMAGE)
def test_a_damaged_idx_file_is_refused(tmp_path: Path, damage: str):
    folder = write_mnist(tmp_path / "mnist")
    act, sentence = MNIST_DAMAGE[damage]
    act(folder / "train-images-idx3-ubyte")
    with pytest.raises(UserError, match=sentence):
        read_mnist(folder)


@pytest.mark.parametrize(
    "content", [b"", b"no gzip", gzip.compress(bytes(1000))[:-12]], ids=["empty", "no gzip", "cut short"]
)
def test_a_damaged_gzip_file_is_refused_by_its_name(tmp_path: Path, content: bytes):
    folder = write_mnist(tmp_path / "mnist", compressed=True)
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte\.gz"):
        read_mnist(folder)


def test_a_label_that_is_no_digit_is_refused(tmp_path: Path):
    folder = write_mnist(tmp_path / "mnist")
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(np.full(13, 10, np.uint8)))
    with pytest.raises(UserError, match="has the label 10"):
        read_mnist(folder)


def test_an_npz_with_objects_in_it_is_refused_unread(tmp_path: Path):
    path = npz(tmp_path, y_test=np.array([object()] * 13))
    with pytest.raises(UserError, match=r"mnist\.npz is no sound \.npz file"):
        read_mnist(path)


def test_an_npz_without_an_array_or_of_another_type_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"x_train of .* is float64"):
        read_mnist(npz(tmp_path, x_train=np.zeros((60, 28, 28))))
    content = io.BytesIO()
    np.savez(content, x_train=digit_images(60, 0)[0])
    (tmp_path / "mnist.npz").write_bytes(content.getvalue())
    with pytest.raises(UserError, match="holds no array y_train"):
        read_mnist(tmp_path / "mnist.npz")
    (tmp_path / "mnist.npz").write_bytes(content.getvalue()[:100])
    with pytest.raises(UserError, match=r"no sound \.npz"):
        read_mnist(tmp_path / "mnist.npz")


CIFAR_DAMAGE = {
    "data_batch_2.bin": (b"x" * 3074, "has 3074 bytes, which is no whole number of records"),
    "data_batch_1.bin": (b"", "has 0 bytes"),
    "test_batch.bin": (bytes([77]) + bytes(3072), "has the label 77"),
}


@pytest.mark.parametrize("name", CIFAR_DAMAGE)
def test_a_damaged_batch_is_refused_by_its_name(tmp_path: Path, name: str):
    folder = write_cifar10(tmp_path / "cifar")
    content, sentence = CIFAR_DAMAGE[name]
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} {sentence}"):
        read_cifar10(folder)


def test_a_missing_batch_is_refused_by_its_name(tmp_path: Path):
    folder = write_cifar10(tmp_path / "cifar")
    (folder / "test_batch.bin").unlink()
    with pytest.raises(UserError, match=r"test_batch\.bin is missing"):
        read_cifar10(folder)
    with pytest.raises(UserError, match=r"has no data_batch_\*\.bin"):
        read_cifar10(tmp_path)


@pytest.mark.parametrize("read", [read_mnist, read_cifar10])
def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, read: Callable[[Path], object]):
    with pytest.raises(UserError, match="there is no folder"):
        read(tmp_path / "nowhere")


def test_too_few_images_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="9 training images and 13 test images are too few"):
        read_mnist(write_mnist(tmp_path, train=9))


def test_samples_are_normalised_by_channel():
    images = Images(torch.randint(0, 256, (50, 3, 32, 32), dtype=torch.uint8), torch.zeros(50, dtype=torch.int64))
    scaled = images.pixels / 255
    mean, std = scaled.mean(dim=(0, 2, 3)), scaled.std(dim=(0, 2, 3))
    dataset = ImageDataset(images, mean.tolist(), std.tolist())
    seen = torch.stack([dataset[index]["x"] for index in range(50)])
    torch.testing.assert_close(seen.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(seen.std(dim=(0, 2, 3)), torch.ones(3), atol=1e-5, rtol=0)


def test_augmentation_shifts_by_up_to_four_pixels_over_black_and_mirrors_half_of_the_time():
    pixels = torch.arange(1, 1 + 32 * 32, dtype=torch.int32).reshape(1, 32, 32)
    seen: dict[tuple[int, int], list[bool]] = {}
    for seed in range(800):
        torch.manual_seed(seed)
        cut = crop_and_flip(pixels)
        assert cut.shape == pixels.shape
        mirrored = bool((cut[0].diff(dim=1) < 0).sum() > 16 * 16)
        straight = cut.flip(-1) if mirrored else cut
        row, column = divmod(int(straight[0, 16, 16]) - 1, 32)
        seen.setdefault((row - 16, column - 16), []).append(mirrored)
        expected = torch.zeros(40, 40, dtype=torch.int32)
        expected[4:36, 4:36] = pixels[0]
        top, left = row - 16 + 4, column - 16 + 4
        assert straight[0].equal(expected[top : top + 32, left : left + 32])
    assert set(seen) == {(down, right) for down in range(-4, 5) for right in range(-4, 5)}
    assert 0.45 < sum(sum(flips) for flips in seen.values()) / 800 < 0.55
    torch.manual_seed(7)
    first = crop_and_flip(pixels)
    torch.manual_seed(7)
    assert crop_and_flip(pixels).equal(first), "it follows torch's global stream alone"
