"""Files of others: their weights are read, and nothing that is hidden in them runs."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file

from lockstep.checkpoint.exchange.foreign import import_weights, open_foreign
from lockstep.errors import UserError


class Bomb:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "boom"


def refused(source: Path, run: Path) -> str:
    with pytest.raises(UserError) as refusal:
        import_weights(source, run)
    assert not run.exists(), "a refusal leaves nothing behind"
    return str(refusal.value)


def torch_files(folder: Path, mark: Path) -> dict[str, Path]:
    """Bombs as torch.save writes them, alone and beside weights, new and old, and swapped into a good file."""
    torch.save(Bomb(mark), folder / "alone.pt")
    torch.save({"model": {"w": torch.ones(2)}, "note": Bomb(mark)}, folder / "beside.pt")
    torch.save({"w": Bomb(mark)}, folder / "old.pt", _use_new_zipfile_serialization=False)
    (folder / "pickle.pt").write_bytes(pickle.dumps(Bomb(mark)))
    torch.save({"w": torch.ones(2)}, folder / "good.pt")
    with zipfile.ZipFile(folder / "good.pt") as good, zipfile.ZipFile(folder / "swapped.pt", "w") as swapped:
        for record in good.infolist():
            content = pickle.dumps(Bomb(mark)) if record.filename.endswith("data.pkl") else good.read(record)
            swapped.writestr(record, content)
    (folder / "good.pt").unlink()
    return {path.name: path for path in folder.glob("*.pt")}


def test_a_bomb_in_a_torch_file_does_not_go_off(tmp_path: Path, mark: Path) -> None:
    files = torch_files(tmp_path, mark)
    assert len(files) == 5
    for path in files.values():
        said = refused(path, tmp_path / "run")
        assert "nothing of it was executed" in said
        assert "weights_only" not in said, "torch's advice is to switch the safety off"
        assert not mark.exists(), path
    pickle.loads(files["pickle.pt"].read_bytes())
    assert mark.exists(), "the bomb does go off when it is unpickled"


def distributed(folder: Path) -> Path:
    content = {"model": {"w": torch.arange(6.0).view(2, 3), "b": torch.tensor(4)}, "epoch": 3}
    torch.distributed.checkpoint.save(content, checkpoint_id=folder, no_dist=True)
    return folder


class Exploding(dict[str, Any]):
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_a_bomb_in_a_distributed_checkpoint_does_not_go_off(tmp_path: Path, mark: Path) -> None:
    folder = distributed(tmp_path / "dcp")
    good = (folder / ".metadata").read_bytes()
    metadata = pickle.loads(good)
    metadata.planner_data = Exploding(mark)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "nothing of it was executed" in refused(folder, tmp_path / "run")
    for call in (b"cos\nsystem\n(S'touch %s'\ntR.", b"cbuiltins\nexec\n(S'open(%r, \"w\")'\ntR."):
        (folder / ".metadata").write_bytes(call % str(mark).encode())
        assert "nothing of it was executed" in refused(folder, tmp_path / "run")
    (folder / ".metadata").write_bytes(good)
    metadata = pickle.loads(good)
    [data] = folder.glob("*.distcp")
    info = next(info for at, info in metadata.storage_data.items() if at.fqn == "model.w")
    content = bytearray(data.read_bytes())
    bomb = io.BytesIO()
    torch.save(Bomb(mark), bomb)
    content[info.offset : info.offset + info.length] = bomb.getvalue().ljust(info.length, b"\0")[: info.length]
    data.write_bytes(content)
    refused(folder, tmp_path / "run")
    assert not mark.exists()


@pytest.mark.parametrize("place", ["../outside.distcp", "/etc/hostname", "missing.distcp"])
def test_a_distributed_checkpoint_cannot_lead_out_of_its_folder(tmp_path: Path, place: str) -> None:
    folder = distributed(tmp_path / "dcp")
    (tmp_path / "outside.distcp").write_bytes(b"secret")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = place
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "use a folder you trust" in refused(folder, tmp_path / "run")


@pytest.mark.parametrize("value", [-1, 2**40, 2**63, 10**30, 1.5, None, "x", float("nan")])
@pytest.mark.parametrize("what", ["size", "offset", "length", "shape and nothing in it", "name"])
def test_absurd_numbers_in_a_distributed_checkpoint_are_refused(tmp_path: Path, what: str, value: Any) -> None:
    folder = distributed(tmp_path / "dcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    if what in ("size", "shape and nothing in it"):
        metadata.state_dict_metadata["model.w"].size = (2, value) if what == "size" else (0, value, 2**62)
    elif what == "name":
        metadata.planner_data = dict.fromkeys(metadata.planner_data, ("model", "\ud800"))
    else:
        for info in metadata.storage_data.values():
            setattr(info, what, value)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(folder, tmp_path / "run")


def test_a_sharded_distributed_checkpoint_is_put_together(tmp_path: Path) -> None:
    foreign = open_foreign(distributed(tmp_path / "dcp"))
    assert foreign.shapes == {"w": (2, 3), "b": ()}
    assert torch.equal(foreign.read("w"), torch.arange(6.0).view(2, 3))
    assert foreign.read("b").item() == 4
    assert foreign.left_out == ["epoch"]


@pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/hostname", "missing.safetensors"])
def test_an_index_of_shards_cannot_lead_out_of_its_folder(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": place}}))
    assert "outside of the folder" in refused(folder, tmp_path / "run") or "missing" in place


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.safetensors", b"", "is not a safetensors file"),
        ("a.safetensors", b"\xff" * 40, "is not a safetensors file"),
        ("a.pt", b"", "nothing of it was executed"),
        ("a.pt", b"PK\x03\x04 nothing", "nothing of it was executed"),
        ("a.pt", b"text", "nothing of it was executed"),
    ],
)
def test_a_file_that_is_none_is_refused_in_a_sentence(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert sentence in refused(tmp_path / name, tmp_path / "run")


@pytest.mark.parametrize("content", [{"epoch": 3}, [1, 2], {"model": {}}, {"model": {"w": 3}}, {}])
def test_a_torch_file_without_a_model_is_refused_and_says_what_it_has(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", tmp_path / "run")
