"""Public image sets in their official formats, as tensors of pixels; no pickle is ever read."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.data.sets import own_folder
from lockstep.errors import UserError

CLASSES = 10
IDX_BYTES = 0x08  # the type code of unsigned bytes
MNIST_SIDE = 28
CIFAR_SIDE = 32
CIFAR_RECORD = 1 + 3 * CIFAR_SIDE * CIFAR_SIDE
CROP_PADDING = 4

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Images:
    """Pixels uint8[n, channels, height, width] and labels int64[n] from 0 to 9."""

    pixels: Tensor
    labels: Tensor

    def __getitem__(self, part: slice) -> Images:
        return Images(self.pixels[part], self.labels[part])


@dataclass(frozen=True)
class ImageSplits:
    """The three parts of an image set. The validation part is the last tenth of the official training part."""

    train: Images
    validation: Images
    test: Images


class ImageDataset(Dataset[dict[str, Tensor]]):
    """Sample i is `{"x": float32[channels, height, width], "y": label}`, every channel normalised.

    With `augment` the image is shifted by up to four pixels and mirrored half of the time, drawn from torch's global
    stream, which the loader seeds by (seed, epoch, sample).
    """

    def __init__(self, images: Images, mean: list[float], std: list[float], augment: bool = False) -> None:
        self.images = images
        self.augment = augment
        self._mean = torch.tensor(mean)[:, None, None]
        self._std = torch.tensor(std)[:, None, None]

    def __len__(self) -> int:
        return len(self.images.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        pixels = self.images.pixels[index]
        if self.augment:
            pixels = crop_and_flip(pixels)
        return {"x": (pixels.float() / 255 - self._mean) / self._std, "y": self.images.labels[index]}


def crop_and_flip(pixels: Tensor) -> Tensor:
    """The image cut at random out of itself with a black margin, and mirrored left to right half of the time."""
    height, width = pixels.shape[-2:]
    padded = F.pad(pixels, [CROP_PADDING] * 4)
    top, left = torch.randint(0, 2 * CROP_PADDING + 1, (2,)).tolist()
    cut = padded[..., top : top + height, left : left + width]
    return cut.flip(-1) if torch.rand(()) < 0.5 else cut


def read_mnist(path: Path) -> ImageSplits:
    """MNIST from a folder with its four idx files, compressed or not, or from an .npz file (or a folder with one)."""
    archives = [path] if path.suffix == ".npz" else sorted(own_folder(path).glob("*.npz"))
    if len(archives) == 1 and not list(path.glob("*-ubyte*")):
        return _split(*_read_npz(archives[0]))
    return _split(_read_idx_pair(path, "train"), _read_idx_pair(path, "t10k"))


def read_cifar10(path: Path) -> ImageSplits:
    """CIFAR-10 from a folder in the official binary format: test_batch.bin and any number of data_batch_*.bin."""
    batches = sorted(own_folder(path).glob("data_batch_*.bin"))
    if not batches:
        raise UserError(f"{path} has no data_batch_*.bin", "give the folder of CIFAR-10's binary version")
    train = [_read_cifar_batch(batch) for batch in batches]
    whole = Images(torch.cat([part.pixels for part in train]), torch.cat([part.labels for part in train]))
    return _split(whole, _read_cifar_batch(path / "test_batch.bin"))


def _split(official_train: Images, test: Images) -> ImageSplits:
    held_out = len(official_train.labels) // 10
    if held_out == 0 or len(test.labels) == 0:
        raise UserError(
            f"{len(official_train.labels)} training images and {len(test.labels)} test images are too few",
            "give at least ten of the one and one of the other",
        )
    return ImageSplits(official_train[:-held_out], official_train[-held_out:], test)


def _images(pixels: Bytes, labels: Bytes, path: Path) -> Images:
    if len(pixels) != len(labels):
        raise UserError(f"{path} has {len(pixels)} images and {len(labels)} labels", "give files that belong together")
    if len(labels) and labels.max() >= CLASSES:
        raise UserError(
            f"{path} has the label {labels.max()}", f"labels go from 0 to {CLASSES - 1}, so restore the file"
        )
    return Images(torch.from_numpy(pixels.copy()), torch.from_numpy(labels.astype(np.int64)))


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing", "give a folder with all files of the set, or for mnist an .npz (docs/data.md)"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error})", "restore the file, or fetch the set again") from None


def _idx_file(folder: Path, name: str) -> Path:
    plain = folder / name
    return plain if plain.exists() else folder / f"{name}.gz"


def _read_idx_pair(folder: Path, part: str) -> Images:
    pixels = _read_idx(_idx_file(folder, f"{part}-images-idx3-ubyte"), dimensions=3)
    return _mnist_images(pixels, _read_idx(_idx_file(folder, f"{part}-labels-idx1-ubyte"), dimensions=1), folder)


def _mnist_images(pixels: Bytes, labels: Bytes, path: Path) -> Images:
    if pixels.shape[1:] != (MNIST_SIDE, MNIST_SIDE):
        size = " x ".join(map(str, pixels.shape[1:]))
        raise UserError(f"{path} has images of {size} pixels", f"give images of {MNIST_SIDE} x {MNIST_SIDE}")
    return _images(pixels[:, None], labels, path)


def _read_idx(path: Path, dimensions: int) -> Bytes:
    data = _read(path)
    head = 4 + 4 * dimensions
    shape = tuple(int(size) for size in np.frombuffer(data[4:head].ljust(head - 4, b"\0"), ">u4"))
    if data[:4] != bytes([0, 0, IDX_BYTES, dimensions]):
        raise UserError(f"{path} is no idx file of {dimensions}-dimensional bytes", "restore the file")
    if len(data) - head != np.prod(shape, dtype=np.int64):
        raise UserError(
            f"{path} should hold {' x '.join(map(str, shape))} bytes and holds {max(0, len(data) - head)}",
            "it was cut short or damaged, so restore the file",
        )
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)


def _read_npz(path: Path) -> tuple[Images, Images]:
    names = ("x_train", "y_train", "x_test", "y_test")
    try:
        with np.load(path, allow_pickle=False) as opened:
            arrays = {name: opened[name] for name in names}
    except FileNotFoundError:
        raise UserError(f"{path} is missing", "check data.path") from None
    except KeyError as error:
        missing = next(name for name in names if name in str(error))
        raise UserError(f"{path} holds no array {missing}", f"it needs {', '.join(names)}") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        raise UserError(f"{path} is no sound .npz file", "restore the file") from None
    for name, array in arrays.items():
        if array.dtype != np.uint8 or array.ndim != (3 if name.startswith("x") else 1):
            raise UserError(
                f"{name} of {path} is {array.dtype} of shape {array.shape}",
                "make images uint8[n, height, width] and labels uint8[n]",
            )
    return (
        _mnist_images(arrays["x_train"], arrays["y_train"], path),
        _mnist_images(arrays["x_test"], arrays["y_test"], path),
    )


def _read_cifar_batch(path: Path) -> Images:
    data = np.frombuffer(_read(path), np.uint8)
    if len(data) == 0 or len(data) % CIFAR_RECORD:
        raise UserError(
            f"{path} has {len(data)} bytes, which is no whole number of records of {CIFAR_RECORD}",
            "it was cut short or damaged, so restore the file",
        )
    records = data.reshape(-1, CIFAR_RECORD)
    return _images(records[:, 1:].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE), records[:, 0], path)
