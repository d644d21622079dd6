"""The public data sets that recipes train on: what they are, where they come from, and the cache they lie in.

`fetch` downloads a set once, on a machine with internet; `find` says where it lies. Every file has a pinned size and
digest. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from lockstep.errors import UserError, reason, unknown

CACHE = "LOCKSTEP_CACHE"
CHUNK = 1 << 18
SECONDS_OF_SILENCE = 30.0


@dataclass(frozen=True)
class DataFile:
    """A file as it has to be. `digest` is "sha256:..." or "git:..." (the id git gives to a file of this content)."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class Download:
    """A file of a server. When it is a tar archive, only its `members` are kept, under the last part of their names."""

    url: str
    file: DataFile
    members: tuple[DataFile, ...] = ()


@dataclass(frozen=True)
class DataSet:
    """A public data set."""

    name: str
    title: str
    licence: str
    downloads: tuple[Download, ...]

    @property
    def files(self) -> tuple[DataFile, ...]:
        """What lies in the cache."""
        kept = [download.members or (download.file,) for download in self.downloads]
        return tuple(replace(file, name=Path(file.name).name) for files in kept for file in files)

    @property
    def size(self) -> int:
        """Bytes in the cache."""
        return sum(file.size for file in self.files)


def _mnist(name: str, size: int, digest: str) -> Download:
    return Download(f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}", DataFile(name, size, f"sha256:{digest}"))


def _cifar(name: str, digest: str) -> DataFile:
    return DataFile(f"cifar-10-batches-bin/{name}", 30_730_000, f"sha256:{digest}")


def _wikitext(name: str, size: int, digest: str) -> Download:
    folder = "pytorch/examples/77f55b912142e11fcfdf5b530231fb9c52f181e8/word_language_model/data/wikitext-2"
    return Download(f"https://raw.githubusercontent.com/{folder}/{name}", DataFile(name, size, f"git:{digest}"))


_WIKITEXT2 = DataSet(
    name="wikitext2",
    title="WikiText-2: 2.1 M words of Wikipedia articles (Merity et al. 2016)",
    licence="CC BY-SA 3.0",
    downloads=(
        _wikitext("train.txt", 10_797_148, "2d84b35af79e411d73ea7cae83c73964c6ac83b4"),
        _wikitext("valid.txt", 1_121_681, "eec944eb2d9e46061cd34a6913528797db6842fc"),
        _wikitext("test.txt", 1_256_449, "6f3fc88e4cd88456ea892971f9f12243e8428624"),
    ),
)

_MNIST = DataSet(
    name="mnist",
    title="MNIST: 70,000 handwritten digits of 28 x 28 pixels (LeCun, Cortes, Burges)",
    licence="CC BY-SA 3.0",
    downloads=(
        _mnist(
            "train-images-idx3-ubyte.gz", 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
        ),
        _mnist(
            "train-labels-idx1-ubyte.gz", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
        ),
        _mnist(
            "t10k-images-idx3-ubyte.gz", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
        ),
        _mnist("t10k-labels-idx1-ubyte.gz", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
)

_CIFAR10 = DataSet(
    name="cifar10",
    title="CIFAR-10: 60,000 colour images of 32 x 32 pixels in ten classes (Krizhevsky 2009)",
    licence="none stated; cite the report",
    downloads=(
        Download(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            DataFile(
                "cifar-10-binary.tar.gz",
                170_052_171,
                "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
            members=(
                _cifar("data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
                _cifar("data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
                _cifar("data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
                _cifar("data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
                _cifar("data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
                _cifar("test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
            ),
        ),
    ),
)

SETS: dict[str, DataSet] = {dataset.name: dataset for dataset in (_WIKITEXT2, _MNIST, _CIFAR10)}


def find_set(name: str) -> DataSet:
    """The data set of that name; an unknown name is a UserError that says the nearest one."""
    if name not in SETS:
        raise unknown("data set", name, SETS)
    return SETS[name]


def cache_folder() -> Path:
    """Where downloads are kept: $LOCKSTEP_CACHE, else ~/.cache/lockstep."""
    return Path(os.environ.get(CACHE) or "~/.cache/lockstep").expanduser().absolute()


def folder_of(dataset: DataSet, cache: Path) -> Path:
    """Where a set lies in a cache, whether it is there or not."""
    return cache / "data" / dataset.name


def is_cached(dataset: DataSet, cache: Path) -> bool:
    """Whether all files of a set lie in a cache. They were verified when they came, so only sizes are looked at."""
    folder = folder_of(dataset, cache)
    return all(_has_size(folder / file.name, file.size) for file in dataset.files)


def find(dataset: DataSet, cache: Path) -> Path:
    """The folder of a cached set; one that is not there is a UserError with the command that gets it."""
    if not is_cached(dataset, cache):
        raise UserError(
            f"the data set {dataset.name} is not in the cache folder {cache}",
            f"run `lockstep fetch {dataset.name}` on a machine with internet that shares this folder, such as a login "
            "node, or give a folder of your own with --set data.path=FOLDER",
        )
    return folder_of(dataset, cache)


def own_folder(path: Path) -> Path:
    """A folder of the user's own; one that is not there, or a file, is a UserError."""
    if path.is_file():
        raise UserError(f"{path} is a file", "give the folder it is in")
    if not path.is_dir():
        raise UserError(f"there is no folder {path}", "check data.path")
    return path


def mirrored(dataset: DataSet, base: str) -> DataSet:
    """The same set from another place: a URL, or a folder with files that were downloaded by other means."""
    if "://" not in base:
        folder = Path(base).expanduser()
        if not folder.is_dir():
            raise UserError(
                f"{base} is {'a file' if folder.exists() else 'not there'}",
                "give --from a folder or a URL that holds the files",
            )
        base = folder.absolute().as_uri()
    try:
        parts = urlsplit(base)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https", "file") or (parts.scheme != "file" and not parts.hostname):
        raise UserError(f"--from {base} is no address", "give a folder, or a URL that begins with https://HOST/")
    moved = [replace(download, url=f"{base.rstrip('/')}/{download.file.name}") for download in dataset.downloads]
    return replace(dataset, downloads=tuple(moved))


def fetch(dataset: DataSet, cache: Path, progress: Callable[[int], None] = lambda _: None) -> bool:
    """Download a set into a cache; false when it lay there already, every digest right.

    All of it is downloaded and verified under a temporary name before any of it appears, so a failure leaves nothing
    behind and two fetches at once do not disturb each other. `progress` is told the number of bytes of every piece.
    """
    folder = folder_of(dataset, cache)
    if all(_is(folder / file.name, file) for file in dataset.files):
        return False
    with _staging(folder) as staging:
        for download in dataset.downloads:
            path = staging / download.file.name
            _download(download, path, dataset.name, cache, progress)
            _verify(path, download.file, download.url)
            if download.members:
                _take_members(path, download.members, staging)
                path.unlink()
        with _writing(cache):
            folder.mkdir(parents=True, exist_ok=True)
            for file in dataset.files:
                os.replace(staging / file.name, folder / file.name)
    return True


def digest_of(path: Path, kind: str) -> str:
    """The digest of a file as DataFile writes it, of the kind "sha256" or "git"."""
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(usedforsecurity=False)
    if kind == "git":
        digest.update(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return f"{kind}:{digest.hexdigest()}"


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _is(path: Path, file: DataFile) -> bool:
    return _has_size(path, file.size) and digest_of(path, file.digest.partition(":")[0]) == file.digest


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`. After a failure no folder is left that was not there before."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    done = False
    try:
        with _writing(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            yield staging
            done = True
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    finally:
        if not done:
            for path in made:
                with suppress(OSError):
                    path.rmdir()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to the cache folder {folder} ({reason(error)})",
            f"check its permissions and free space, or set {CACHE} to another folder",
        ) from None


def _download(download: Download, path: Path, name: str, cache: Path, progress: Callable[[int], None]) -> None:
    try:
        answer = urllib.request.urlopen(download.url, timeout=SECONDS_OF_SILENCE)
    except urllib.error.HTTPError as error:
        error.close()
        raise UserError(
            f"{download.url} cannot be had, the server answers {error.code} {error.reason}",
            "try again later, or give another place with --from",
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(download.url, name, cache, error) from None
    received, announced = 0, int(answer.headers.get("Content-Length") or download.file.size)
    with answer, _writing(cache), path.open("wb") as file:
        while received <= download.file.size and (chunk := _read(answer)):
            file.write(chunk)
            received += len(chunk)
            progress(len(chunk))
        file.flush()
        os.fsync(file.fileno())
    if received < min(announced, download.file.size):
        raise UserError(
            f"the connection broke after {received:,} of {announced:,} bytes of {download.url}",
            "run the same command again; nothing was kept",
        )


def _read(answer: IO[bytes]) -> bytes:
    try:
        return answer.read(CHUNK)
    except (OSError, http.client.HTTPException):
        return b""  # the connection broke, which shows in what is missing


def _unreachable(url: str, name: str, cache: Path, error: Exception) -> UserError:
    if urlsplit(url).scheme == "file":
        return UserError(f"there is no {urlsplit(url).path}", "download all files of the set into that folder")
    reason = getattr(error, "reason", error)
    text = (getattr(reason, "strerror", None) or str(reason) or type(reason).__name__).lower()
    return UserError(
        f"this machine has no internet, {urlsplit(url).hostname} cannot be reached ({text})",
        f"run `lockstep fetch {name}` on a login node that shares the cache folder {cache} ({CACHE} names another), "
        "or train on a folder of your own with --set data.path=FOLDER",
    )


def _verify(path: Path, file: DataFile, source: str) -> None:
    found = digest_of(path, file.digest.partition(":")[0])
    if found != file.digest:
        raise UserError(
            f"{file.name} from {source} is not the file it should be, expected {file.digest[:24]}... and got "
            f"{found[:24]}...",
            "get it again, or from another place with --from; nothing was kept",
        )


def _take_members(archive: Path, members: tuple[DataFile, ...], folder: Path) -> None:
    """Copy the wanted members, by their exact names, to plain files: no path of the archive is ever followed."""
    wanted = {member.name: member for member in members}
    try:
        with tarfile.open(archive, "r:gz") as opened:
            for entry in opened:
                content = opened.extractfile(entry) if entry.name in wanted and entry.isfile() else None
                if content is not None:
                    member = wanted.pop(entry.name)
                    path = folder / Path(member.name).name
                    with _writing(folder), path.open("wb") as file:
                        shutil.copyfileobj(content, file)
                    _verify(path, member, archive.name)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise UserError(f"{archive.name} cannot be unpacked ({error})", "try again; nothing was kept") from None
    if wanted:
        raise UserError(f"{archive.name} has no {next(iter(wanted))}", "give another place with --from")
