"""Fetching a data set: whole and verified, or not there at all."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.data import sets
from lockstep.errors import UserError
from tests.sets import Server, archive_set, plain_set, serve


@pytest.fixture
def server() -> Iterator[Server]:
    with serve() as running:
        yield running


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "home" / "cache"


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_fetched_set_lies_in_the_cache_under_its_name(server: Server, cache: Path):
    dataset = plain_set(server)
    assert not sets.is_cached(dataset, cache)
    told: list[int] = []
    assert sets.fetch(dataset, cache, told.append)
    assert everything(cache) == ["data", "data/letters", "data/letters/a.txt", "data/letters/b.txt"]
    assert (cache / "data" / "letters" / "a.txt").read_bytes() == b"alpha" * 1000
    assert sum(told) == dataset.size == 9000
    assert sets.is_cached(dataset, cache)
    assert sets.find(dataset, cache) == cache / "data" / "letters"


def test_a_second_fetch_asks_nobody(server: Server, cache: Path):
    dataset = plain_set(server)
    sets.fetch(dataset, cache)
    asked = len(server.requests)
    assert not sets.fetch(dataset, cache)
    assert len(server.requests) == asked


@pytest.mark.parametrize("damage", [b"", b"alpha" * 500, b"alphb" * 1000])
def test_a_damaged_file_of_the_cache_is_fetched_again(server: Server, cache: Path, damage: bytes):
    dataset = plain_set(server)
    sets.fetch(dataset, cache)
    (cache / "data" / "letters" / "a.txt").write_bytes(damage)
    assert sets.fetch(dataset, cache)
    assert (cache / "data" / "letters" / "a.txt").read_bytes() == b"alpha" * 1000


def test_an_archive_leaves_its_wanted_files_and_nothing_else(server: Server, cache: Path):
    dataset = archive_set(server, {"../../escaped.txt": b"x", "/tmp/absolute.txt": b"x", "inner/../one.bin": b"x"})
    assert sets.fetch(dataset, cache)
    assert everything(cache) == ["data", "data/packed", "data/packed/one.bin", "data/packed/two.bin"]
    assert everything(cache.parent)[0] == "cache", "nothing beside it"
    assert not sets.fetch(dataset, cache)


def refused(dataset: sets.DataSet, cache: Path) -> str:
    """The sentence of a fetch that fails and leaves nothing on the disk."""
    before = everything(cache.parent.parent)
    with pytest.raises(UserError) as refusal:
        sets.fetch(dataset, cache)
    assert everything(cache.parent.parent) == before
    return str(refusal.value)


def test_a_wrong_digest_names_the_file_what_was_expected_and_what_came(server: Server, cache: Path):
    dataset = plain_set(server)
    server.files["b.txt"] = b"BETA" * 1000
    sentence = refused(dataset, cache)
    assert "b.txt from http://127.0.0.1" in sentence
    assert f"expected {dataset.files[1].digest[:24]}... and got sha256:" in sentence
    assert "nothing was kept" in sentence


@pytest.mark.parametrize("content", [b"<html>please log in</html>", b"beta" * 100_000])
def test_a_page_that_is_not_the_file_is_a_wrong_digest_too(server: Server, cache: Path, content: bytes):
    dataset = plain_set(server)
    server.files["b.txt"] = content
    assert "b.txt" in (sentence := refused(dataset, cache))
    assert "is not the file it should be" in sentence


def test_a_member_of_an_archive_with_a_wrong_digest_is_refused(server: Server, cache: Path):
    dataset = archive_set(server)
    [download] = dataset.downloads
    members = (download.members[0], replace(download.members[1], digest="sha256:" + "0" * 64))
    sentence = refused(replace(dataset, downloads=(replace(download, members=members),)), cache)
    assert "inner/two.bin from packed.tar.gz is not the file it should be" in sentence


def test_an_archive_without_a_wanted_file_is_refused(server: Server, cache: Path):
    dataset = archive_set(server)
    [download] = dataset.downloads
    members = (*download.members, replace(download.members[0], name="inner/three.bin"))
    sentence = refused(replace(dataset, downloads=(replace(download, members=members),)), cache)
    assert "packed.tar.gz has no inner/three.bin" in sentence


def test_a_server_that_dies_half_way_leaves_nothing_and_the_next_fetch_works(server: Server, cache: Path):
    dataset = plain_set(server)
    server.dies_after = 1234
    sentence = refused(dataset, cache)
    assert f"the connection broke after 1,234 of 5,000 bytes of {server.url}/a.txt" in sentence
    assert "run the same command again" in sentence
    server.dies_after = None
    assert sets.fetch(dataset, cache)


def test_without_internet_it_says_so_and_what_to_run_where(server: Server, cache: Path):
    dataset = plain_set(server)
    nobody = replace(dataset, downloads=(replace(dataset.downloads[0], url="http://127.0.0.1:1/a.txt"),))
    sentence = refused(nobody, cache)
    assert sentence.startswith("this machine has no internet, 127.0.0.1 cannot be reached (connection refused): ")
    assert "run `lockstep fetch letters` on a login node" in sentence
    assert str(cache) in sentence
    assert "--set data.path=FOLDER" in sentence


def test_a_name_nobody_knows_is_no_internet_too(server: Server, cache: Path):
    dataset = plain_set(server)
    nowhere = replace(dataset, downloads=(replace(dataset.downloads[0], url="https://nowhere.invalid/a.txt"),))
    assert "this machine has no internet, nowhere.invalid cannot be reached" in refused(nowhere, cache)


def test_a_file_the_server_does_not_have_is_named(server: Server, cache: Path):
    dataset = plain_set(server)
    del server.files["b.txt"]
    assert f"{server.url}/b.txt cannot be had, the server answers 404 Not Found" in refused(dataset, cache)


def test_a_cache_that_cannot_be_written_is_named(server: Server, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=re.escape(f"cannot write to the cache folder {tmp_path / 'file'}")):
        sets.fetch(plain_set(server), tmp_path / "file" / "cache")
    assert everything(tmp_path) == ["file"]


def test_a_full_disk_is_named(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    sentence = refused(plain_set(server), cache)
    assert sentence.startswith(
        f"cannot write to the cache folder {cache} (no space left on device): check its permissions and free space"
    )


def test_two_fetches_at_once_both_end_with_the_whole_set(server: Server, cache: Path):
    dataset = archive_set(server)
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(sets.fetch(dataset, cache))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert everything(cache) == ["data", "data/packed", "data/packed/one.bin", "data/packed/two.bin"]
    assert not sets.fetch(dataset, cache), "every digest is right"


@pytest.mark.parametrize("kind", ["folder", "URL"])
def test_a_mirror_gives_the_same_files(server: Server, cache: Path, tmp_path: Path, kind: str):
    dataset = archive_set(server)
    gone = replace(dataset, downloads=(replace(dataset.downloads[0], url="http://127.0.0.1:1/elsewhere.tar.gz"),))
    folder = tmp_path / "by hand"
    folder.mkdir()
    (folder / "packed.tar.gz").write_bytes(server.files["packed.tar.gz"])
    assert sets.fetch(sets.mirrored(gone, str(folder) if kind == "folder" else server.url + "/"), cache)
    assert sets.is_cached(dataset, cache)


def test_a_mirror_without_the_file_is_refused(server: Server, cache: Path, tmp_path: Path):
    dataset = plain_set(server)
    (tmp_path / "empty").mkdir()
    assert f"there is no {tmp_path / 'empty' / 'a.txt'}" in refused(
        sets.mirrored(dataset, str(tmp_path / "empty")), cache
    )
    with pytest.raises(UserError, match="nowhere is not there"):
        sets.mirrored(dataset, str(tmp_path / "nowhere"))


def test_a_set_that_is_not_there_is_refused_with_the_command_that_gets_it(server: Server, cache: Path):
    with pytest.raises(UserError, match=r"run `lockstep fetch letters` on a machine with internet") as refusal:
        sets.find(plain_set(server), cache)
    assert str(cache) in str(refusal.value)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    assert sets.cache_folder() == tmp_path
    monkeypatch.delenv("LOCKSTEP_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sets.cache_folder() == tmp_path / ".cache" / "lockstep"


def test_a_git_digest_is_the_id_git_gives_the_file(tmp_path: Path):
    (tmp_path / "hello").write_bytes(b"hello\n")
    assert sets.digest_of(tmp_path / "hello", "git") == "git:ce013625030ba8dba906f756967f9e9ca394464a"


@pytest.mark.parametrize("name", sets.SETS)
def test_every_set_is_pinned_and_comes_over_https(name: str):
    dataset = sets.find_set(name)
    for download in dataset.downloads:
        assert download.url.startswith("https://")
        for file in (download.file, *download.members):
            kind, _, digest = file.digest.partition(":")
            assert len(digest) == {"sha256": 64, "git": 40}[kind]
            assert file.size > 0
    assert len({file.name for file in dataset.files}) == len(dataset.files)
    assert not any("/" in file.name for file in dataset.files)
