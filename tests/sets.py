"""Tiny data sets in the official formats, and a server on this machine to fetch them from."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.data.sets import DataFile, DataSet, Download

WORDS = ["the", "of", "cat", "dog", "sat", "mat", "on", "<unk>", ",", "."]


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


# Files of a set


def idx(array: npt.NDArray[np.uint8]) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def digit_images(count: int, seed: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Images whose label shows: a bright row at twice its number, under noise."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 10, count).astype(np.uint8)
    pixels = draw.integers(0, 60, (count, 28, 28)).astype(np.uint8)
    pixels[np.arange(count), labels * 2 + 3] = 220
    return pixels, labels


def mnist_files(train: int = 60, test: int = 13) -> dict[str, bytes]:
    files = {}
    for part, count, seed in (("train", train, 0), ("t10k", test, 1)):
        pixels, labels = digit_images(count, seed)
        files[f"{part}-images-idx3-ubyte"] = idx(pixels)
        files[f"{part}-labels-idx1-ubyte"] = idx(labels)
    return files


def write_mnist(folder: Path, train: int = 60, test: int = 13, compressed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in mnist_files(train, test).items():
        (folder / (name + ".gz" * compressed)).write_bytes(gzip.compress(content) if compressed else content)
    return folder


def cifar_records(count: int, seed: int) -> bytes:
    draw = np.random.default_rng(seed)
    records = draw.integers(0, 256, (count, 3073)).astype(np.uint8)
    records[:, 0] %= 10
    return records.tobytes()


def write_cifar10(folder: Path, batches: tuple[int, ...] = (24, 16), test: int = 11) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, count in enumerate(batches, start=1):
        (folder / f"data_batch_{number}.bin").write_bytes(cifar_records(count, number))
    (folder / "test_batch.bin").write_bytes(cifar_records(test, 0))
    return folder


def text(words: int, seed: int) -> str:
    draw = np.random.default_rng(seed)
    chosen = [WORDS[number] for number in draw.integers(0, len(WORDS), words)]
    return "".join(f" {' '.join(chosen[start : start + 12])} \n" for start in range(0, words, 12))


def write_wikitext2(folder: Path, train: int = 600, valid: int = 100, test: int = 120) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, words, seed in (("train", train, 0), ("valid", valid, 1), ("test", test, 2)):
        (folder / f"{name}.txt").write_text(text(words, seed), encoding="utf-8")
    return folder


# A server


@dataclass
class Server:
    """Serves `files` by their names on this machine; `dies_after` so many bytes of each where that is given."""

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    dies_after: int | None = None
    requests: list[str] = field(default_factory=list)


@contextmanager
def serve() -> Iterator[Server]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.lstrip("/")
            served.requests.append(name)
            if name not in served.files:
                self.send_error(404)
                return
            content = served.files[name]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: served.dies_after])

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served = Server(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()


def plain_set(server: Server, name: str = "letters") -> DataSet:
    """A set of two files that the server has."""
    contents = {"a.txt": b"alpha" * 1000, "b.txt": b"beta" * 1000}
    server.files |= contents
    downloads = [
        Download(f"{server.url}/{file}", DataFile(file, len(content), sha256(content)))
        for file, content in contents.items()
    ]
    return DataSet(name, "two small files", "CC0", tuple(downloads))


def archive_set(server: Server, extra: dict[str, bytes] | None = None) -> DataSet:
    """A set that comes as a tar archive with two wanted members and others."""
    wanted = {"inner/one.bin": b"1" * 5000, "inner/two.bin": b"2" * 5000}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in {**wanted, "inner/readme.html": b"hello", **(extra or {})}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    content = packed.getvalue()
    server.files["packed.tar.gz"] = content
    members = tuple(DataFile(name, len(inside), sha256(inside)) for name, inside in wanted.items())
    file = DataFile("packed.tar.gz", len(content), sha256(content))
    return DataSet("packed", "an archive", "CC0", (Download(f"{server.url}/packed.tar.gz", file, members),))


WRITE: dict[str, Callable[[Path], Path]] = {
    "wikitext2": lambda folder: write_wikitext2(folder),
    "mnist": lambda folder: write_mnist(folder),
    "cifar10": lambda folder: write_cifar10(folder),
}
"""For each set, what writes a tiny one into a folder."""
