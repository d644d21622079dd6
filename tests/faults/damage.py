"""What may happen to the files of a checkpoint, drawn from a seed.

Some of it is what disks and people do; some is an index made by hand, with a digest that is right, which says things
that are not so.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.disk.format import checkpoints_folder, step_folder, step_name

GOOD_STEPS = (2, 4, 6)
NEWEST = GOOD_STEPS[-1]

Body = dict[str, Any]
Named = dict[int, set[str]]
"""By step: the files of its checkpoint that are damaged, one of which a warning has to name."""


# ---- What disks and people do


class Bomb:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@dataclass(frozen=True)
class Scene:
    """A copy of the good run, and the checkpoint of it that is to be damaged."""

    draw: random.Random
    run_dir: Path
    step: int
    outside: Path
    """A folder beside the run, for what links lead to; unpickling a bomb leaves the mark in it."""

    @property
    def folder(self) -> Path:
        return step_folder(self.run_dir, self.step)

    def any_file(self) -> Path:
        return self.draw.choice(sorted(self.folder.iterdir()))

    def any_shard(self, step: int | None = None) -> Path:
        return self.draw.choice(sorted(step_folder(self.run_dir, step or self.step).glob("shard-*")))

    def other_step(self) -> int:
        return self.draw.choice([step for step in GOOD_STEPS if step != self.step])

    def is_in(self, *paths: Path) -> Named:
        return {self.step: {path.name for path in paths}}


def flip_bits(scene: Scene) -> Named:
    path = scene.any_file()
    content = bytearray(path.read_bytes())
    for _ in range(scene.draw.choice([1, 1, 2, 64])):
        content[scene.draw.randrange(len(content))] ^= 1 << scene.draw.randrange(8)
    path.write_bytes(content)
    return scene.is_in(path)


def truncate(scene: Scene) -> Named:
    path = scene.any_file()
    os.truncate(path, scene.draw.choice([0, 1, path.stat().st_size - 1, scene.draw.randrange(path.stat().st_size)]))
    return scene.is_in(path)


def extend(scene: Scene) -> Named:
    path = scene.any_file()
    with path.open("ab") as file:
        file.write(scene.draw.randbytes(scene.draw.choice([1, 8, 5000])))
    return scene.is_in(path)


def delete(scene: Scene) -> Named:
    path = scene.any_file()
    path.unlink()
    return scene.is_in(path)


def swap(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def swap_two_shards(scene: Scene) -> Named:
    one, other = sorted(scene.folder.glob("shard-*"))
    swap(one, other)
    return scene.is_in(one, other)


def swap_shards_of_two_steps(scene: Scene) -> Named:
    other = scene.other_step()
    name = scene.any_shard().name
    swap(scene.folder / name, step_folder(scene.run_dir, other) / name)
    return {scene.step: {name}, other: {name}}


def rename_a_file(scene: Scene) -> Named:
    path = scene.any_file()
    path.rename(path.with_name(scene.draw.choice(["shard-00007.safetensors", "index.json.bak", f"{path.name} "])))
    return scene.is_in(path)


def rename_the_folder(scene: Scene) -> Named:
    scene.folder.rename(step_folder(scene.run_dir, 9))
    return {9: {"index.json"}, scene.step: set()}


def respell_the_folder(scene: Scene) -> Named:
    """As somebody else would write the number: it is no name of a checkpoint, and nobody has to be told of it."""
    in_arabic = "step-0000000" + chr(ord("\N{ARABIC-INDIC DIGIT ZERO}") + scene.step)
    name = scene.draw.choice([f"step-{scene.step:09d}", f"step-{scene.step:012d}", in_arabic])
    scene.folder.rename(scene.folder.with_name(name))
    return {scene.step: set()}


def spell_the_folder_twice(scene: Scene) -> Named:
    shutil.copytree(scene.folder, scene.folder.with_name(f"step-{scene.step:010d}"))
    return flip_bits(scene)


def copy_the_folder(scene: Scene) -> Named:
    shutil.copytree(scene.folder, step_folder(scene.run_dir, 9))
    return {9: {"index.json"}}


def nothing_in_the_folder(scene: Scene) -> Named:
    shutil.rmtree(scene.folder)
    scene.folder.mkdir()
    return {scene.step: {"index.json"}}


def file_for_the_folder(scene: Scene) -> Named:
    shutil.rmtree(scene.folder)
    scene.folder.write_bytes(scene.draw.randbytes(10))
    return {scene.step: {scene.folder.name, "index.json"}}


def link_for_the_folder(scene: Scene) -> Named:
    away = scene.outside / "moved"
    scene.folder.rename(away)
    scene.folder.symlink_to(scene.draw.choice([away, scene.outside / "nowhere", scene.run_dir]))
    return {scene.step: {scene.folder.name, "index.json"}}


def directory_for_a_file(scene: Scene) -> Named:
    path = scene.any_file()
    path.unlink()
    path.mkdir()
    (path / "something").touch()
    return scene.is_in(path)


def link_for_a_file(scene: Scene) -> Named:
    path = scene.any_file()
    away = scene.outside / "away"
    shutil.move(path, away)
    path.symlink_to(scene.draw.choice([away, scene.outside / "nowhere", Path(os.devnull), path]))
    return scene.is_in(path)


def pipe_for_a_file(scene: Scene) -> Named:
    path = scene.any_file()
    path.unlink()
    os.mkfifo(path)
    return scene.is_in(path)


def pipe_for_the_index(scene: Scene) -> Named:
    (scene.folder / "index.json").unlink()
    os.mkfifo(scene.folder / "index.json")
    return {scene.step: {"index.json"}}


def empty_file(scene: Scene) -> Named:
    path = scene.any_file()
    path.write_bytes(b"")
    return scene.is_in(path)


def bomb_for_a_file(scene: Scene) -> Named:
    path = scene.any_file()
    bomb = pickle.dumps(Bomb(scene.outside / "mark"))
    path.write_bytes(bomb + b"\0" * scene.draw.choice([0, max(0, path.stat().st_size - len(bomb))]))
    return scene.is_in(path)


def bytes_in_the_index(scene: Scene) -> Named:
    path = scene.folder / "index.json"
    content = path.read_bytes()
    at = scene.draw.randrange(len(content))
    path.write_bytes(content[:at] + scene.draw.randbytes(scene.draw.randint(1, 40)) + content[at:])
    return scene.is_in(path)


def noise_for_the_index(scene: Scene) -> Named:
    path = scene.folder / "index.json"
    path.write_bytes(scene.draw.choice([scene.draw.randbytes(500), b"{}", b"[" * 100_000, b"\xff\xfe", b"null\n"]))
    return scene.is_in(path)


def index_of_another_step(scene: Scene) -> Named:
    shutil.copy(step_folder(scene.run_dir, scene.other_step()) / "index.json", scene.folder / "index.json")
    return {scene.step: {"index.json"}}


def index_of_another_step_that_says_it_is_this_one(scene: Scene) -> Named:
    body = read_body(step_folder(scene.run_dir, scene.other_step()))
    write_body(scene.folder, json.dumps(body | {"step": scene.step}).encode())
    return {scene.step: {"index.json", *(path.name for path in scene.folder.glob("shard-*"))}}


def leftovers_in_the_way(scene: Scene) -> Named:
    """What an attempt that was killed leaves, and what was set aside before, has names that are needed again."""
    for name in (
        f".{scene.folder.name}.set-aside",
        ".attempt-1-0000abcd",
        ".stale-1-0000bcde",
        ".step-00000004.deleting",
    ):
        left = checkpoints_folder(scene.run_dir) / name
        shutil.copytree(scene.folder, left / step_name(NEWEST))
    return flip_bits(scene)


ACCIDENTS: list[Callable[[Scene], Named]] = [
    flip_bits,
    truncate,
    extend,
    delete,
    swap_two_shards,
    swap_shards_of_two_steps,
    rename_a_file,
    rename_the_folder,
    respell_the_folder,
    spell_the_folder_twice,
    copy_the_folder,
    nothing_in_the_folder,
    file_for_the_folder,
    link_for_the_folder,
    directory_for_a_file,
    link_for_a_file,
    pipe_for_a_file,
    pipe_for_the_index,
    empty_file,
    bomb_for_a_file,
    bytes_in_the_index,
    noise_for_the_index,
    index_of_another_step,
    index_of_another_step_that_says_it_is_this_one,
    leftovers_in_the_way,
]


# ---- An index made by hand


def read_body(folder: Path) -> Body:
    content = (folder / "index.json").read_bytes()
    body: Body = json.loads(content)["index"]
    return body


def write_body(folder: Path, body: bytes) -> None:
    digest = hashlib.sha256(body).hexdigest().encode()
    (folder / "index.json").write_bytes(b'{"sha256":"' + digest + b'","index":' + body + b"}\n")


@dataclass(frozen=True)
class Forgery:
    """An index that is to be changed, and what there is in it."""

    draw: random.Random
    body: Body
    run_dir: Path
    step: int

    def tensor(self, where: Callable[[str, Body], bool] = lambda _, __: True) -> Body:
        """Some tensor of the model or the optimizer."""
        kind = self.draw.choice(["model/", "optimizer/"])
        tensors = sorted(self.body["tensors"].items())
        chosen: Body = self.draw.choice([one for name, one in tensors if name.startswith(kind) and where(name, one)])
        return chosen

    def chunk(self) -> Body:
        chosen: Body = self.draw.choice(self.tensor()["chunks"])
        return chosen

    def file(self) -> Body:
        chosen: Body = self.draw.choice(sorted(self.body["files"].items()))[1]
        return chosen


def lead_out(forged: Forgery) -> None:
    name = forged.draw.choice(sorted(forged.body["files"]))
    other = step_folder(forged.run_dir, 2) / name
    elsewhere = forged.draw.choice(
        [f"../{step_name(2)}/{name}", str(other), "/etc/passwd", f"./{name}", f"{name}\0", "shard-" + "0" * 5000]
    )
    forged.body["files"][elsewhere] = forged.body["files"].pop(name)
    for tensor in forged.body["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk["file"] = elsewhere if chunk["file"] == name else chunk["file"]


def chunk_in_another_file(forged: Forgery) -> None:
    forged.chunk()["file"] = forged.draw.choice(["../index.json", "index.json", "", "shard-00009.safetensors"])


def offset(forged: Forgery) -> None:
    chunk = forged.chunk()
    chunk["offset"] = forged.draw.choice([-1, -8, 1 << 59, 1 << 62, 1 << 64, 10**400, chunk["offset"] + 4, 0, 1.5, "8"])


def start(forged: Forgery) -> None:
    chunk = forged.tensor(lambda _, one: one["shape"])["chunks"][0]
    chunk["start"] = forged.draw.choice(
        [[-1] * len(chunk["shape"]), [1 << 59] * len(chunk["shape"]), [], [0] * 50, None, [math.nan]]
    )


def huge_shape(forged: Forgery) -> None:
    tensor = forged.tensor()
    shape = forged.draw.choice([[1 << 59] * 3, [1 << 40], [1 << 62], [10**30], [1] * 10_000])
    tensor["shape"] = shape
    for chunk in tensor["chunks"]:
        chunk["shape"], chunk["start"] = shape, [0] * len(shape)


def huge_shape_of_nothing(forged: Forgery) -> None:
    tensor = forged.tensor()
    tensor["shape"], tensor["chunks"] = [0, *forged.draw.choice([[1 << 59] * 3, [1 << 40], [7]])], []


def too_many_dims(forged: Forgery) -> None:
    tensor = forged.tensor(lambda _, one: len(one["shape"]) == 2)
    tensor["shape"] = [*tensor["shape"], *[1] * 100]
    for chunk in tensor["chunks"]:
        chunk["shape"], chunk["start"] = [*chunk["shape"], *[1] * 100], [*chunk["start"], *[0] * 100]


def unknown_dtype(forged: Forgery) -> None:
    forged.tensor()["dtype"] = forged.draw.choice(["F33", "", "f32", "C64", "object", None, 3])


def other_dtype(forged: Forgery) -> None:
    forged.tensor(lambda _, one: one["dtype"] == "F32")["dtype"] = forged.draw.choice(["I32", "U32"])


def chunk_twice(forged: Forgery) -> None:
    tensor = forged.tensor()
    tensor["chunks"].append(forged.draw.choice(tensor["chunks"]))


def chunk_in_place_of_another(forged: Forgery) -> None:
    """Of the right size all together, and still with a hole."""
    tensor = forged.tensor(lambda _, one: len({tuple(chunk["shape"]) for chunk in one["chunks"]}) < len(one["chunks"]))
    first, second = forged.draw.sample(tensor["chunks"], 2)
    if forged.draw.random() < 0.5:
        tensor["chunks"] = [first, first]
    else:
        second["start"] = first["start"]


def chunk_missing(forged: Forgery) -> None:
    tensor = forged.tensor()
    tensor["chunks"].remove(forged.draw.choice(tensor["chunks"]))


def chunks_the_other_way_round(forged: Forgery) -> None:
    """Which is not wrong: a chunk says itself where it belongs."""
    tensor = forged.tensor()
    tensor["chunks"].reverse()


def digests(forged: Forgery) -> None:
    chunk = forged.chunk()
    chunk["sha256"] = forged.draw.choice(
        [[], ["0" * 64], chunk["sha256"] * 2, ["x"], None, [chunk["sha256"][0].upper()], [chunk["sha256"]]]
    )


def block_bytes(forged: Forgery) -> None:
    forged.body["block_bytes"] = forged.draw.choice([0, -1, 1, 7, 1 << 70, 10**4000, 2.5, None])


def sizes_of_a_file(forged: Forgery) -> None:
    file = forged.file()
    file[forged.draw.choice(["bytes", "header_bytes"])] = forged.draw.choice([-1, 0, 1 << 59, 1 << 61, None, "100"])


def header_digest(forged: Forgery) -> None:
    forged.file()["header_sha256"] = forged.draw.choice(["", "g" * 64, None])


def files_that_are_not_there(forged: Forgery) -> None:
    forged.body["files"]["shard-00009.safetensors"] = forged.file()


def file_that_is_all_header(forged: Forgery) -> None:
    (step_folder(forged.run_dir, forged.step) / "shard-00009.safetensors").touch()
    forged.body["files"]["shard-00009.safetensors"] = forged.file() | {"bytes": 0, "header_bytes": 1 << 59}


def files_that_are_not_listed(forged: Forgery) -> None:
    del forged.body["files"][forged.draw.choice(sorted(forged.body["files"]))]


def format_and_step(forged: Forgery) -> None:
    key = forged.draw.choice(["format", "step"])
    forged.body[key] = forged.draw.choice([1, 3, 99, -1, 1 << 59, 1 << 63, None, "2", True])


def tensor_missing(forged: Forgery) -> None:
    del forged.body["tensors"][forged.draw.choice(sorted(forged.body["tensors"]))]


def tensor_too_many(forged: Forgery) -> None:
    name = forged.draw.choice(["model/nobody.weight", "optimizer/nobody.weight/exp_avg", "what/is/this", "", "model/"])
    forged.body["tensors"][name] = forged.tensor()


def state_dict(forged: Forgery) -> None:
    names = forged.body["state_dict"]
    forged.body["state_dict"] = forged.draw.choice([names | {"more": "nothing"}, {1: 2}, [], None, names | {"a": 1}])


def nested(forged: Forgery) -> None:
    deep: Any = 1
    for _ in range(forged.draw.choice([50, 150, 900])):
        deep = [deep] if forged.draw.random() < 0.5 else {"a": deep}
    target = forged.draw.choice([forged.body, forged.body["config"], forged.body["training"], forged.tensor()])
    target[forged.draw.choice(sorted(target) or ["deep"])] = deep


def not_a_number(forged: Forgery) -> None:
    value = forged.draw.choice([math.nan, math.inf, -math.inf])
    training = forged.body["training"]
    target, key = forged.draw.choice(
        [(forged.body, "time"), (training, "loss"), (training, "seed"), (training, "skipped"), (forged.body, "step")]
    )
    target[key] = value


def another_seed(forged: Forgery) -> None:
    forged.body["training"]["seed"] = forged.draw.choice([-1, 0, 10**4200, 1 << 64])


def loader(forged: Forgery) -> None:
    loader = forged.body["training"]["loaders"]["train"]
    key = forged.draw.choice(sorted(loader))
    loader[key] = forged.draw.choice([-1, None, "x", [-1, 0], [0], [0, 0, 0], math.nan, {}])


def groups(forged: Forgery) -> None:
    optimizer = forged.body["optimizer"]
    group = optimizer["groups"][0]
    match forged.draw.randrange(5):
        case 0:
            optimizer["groups"] = []
        case 1:
            optimizer["groups"].append(group)
        case 2:
            group["parameters"] = group["parameters"][1:]
        case 3:
            group["parameters"] = [*group["parameters"], "nobody.weight"]
        case 4:
            optimizer["name"] = "Adamant"


def names_that_write_to_the_terminal(forged: Forgery) -> None:
    name = "model/a\n\x1b[2Jthe run is fine\r\x07"
    match forged.draw.randrange(4):
        case 0:
            forged.body["tensors"][name] = forged.tensor()
        case 1:
            forged.body["tensors"][name] = forged.tensor() | {"dtype": "F33"}
        case 2:
            forged.body["files"][name] = forged.file()
        case 3:
            forged.body["state_dict"][name] = name


def endless_names(forged: Forgery) -> None:
    name = "model/" + "a" * 100_000
    match forged.draw.randrange(3):
        case 0:
            forged.body["tensors"][name] = forged.tensor()
        case 1:
            forged.body["files"][name] = forged.file()
        case 2:
            forged.body["optimizer"]["name"] = name


def something_somewhere(forged: Forgery) -> None:
    """Any value in it is gone, or another one."""
    at: Any = forged.body
    # Without an optimizer or a training it is what an import writes: there is nothing to notice.
    keys: list[Any] = [key for key in forged.body if key not in ("optimizer", "training")]
    while True:
        key = forged.draw.choice(keys)
        keys = []
        if isinstance(at[key], dict) and at[key]:
            keys = sorted(at[key])
        elif isinstance(at[key], list) and at[key]:
            keys = list(range(len(at[key])))
        if not keys or forged.draw.random() < 0.15:
            break
        at = at[key]
    if forged.draw.random() < 0.3:
        del at[key]
    else:
        odd: list[Any] = [
            None,
            True,
            -1,
            0,
            1 << 59,
            1 << 64,
            1.5,
            1e308,
            math.nan,
            "",
            "x",
            "../x",
            [],
            [[]],
            {},
            {"a": 1},
        ]
        at[key] = forged.draw.choice(odd)


FORGERIES: list[Callable[[Forgery], None]] = [
    lead_out,
    chunk_in_another_file,
    offset,
    start,
    huge_shape,
    huge_shape_of_nothing,
    too_many_dims,
    unknown_dtype,
    other_dtype,
    chunk_twice,
    chunk_in_place_of_another,
    chunk_missing,
    chunks_the_other_way_round,
    digests,
    block_bytes,
    sizes_of_a_file,
    header_digest,
    files_that_are_not_there,
    file_that_is_all_header,
    files_that_are_not_listed,
    format_and_step,
    tensor_missing,
    tensor_too_many,
    state_dict,
    nested,
    not_a_number,
    another_seed,
    loader,
    groups,
    names_that_write_to_the_terminal,
    endless_names,
    something_somewhere,
    something_somewhere,
]


def forge(scene: Scene, change: Callable[[Forgery], None]) -> Named:
    body = read_body(scene.folder)
    change(Forgery(scene.draw, body, scene.run_dir, scene.step))
    write_body(scene.folder, json.dumps(body, separators=(",", ":")).encode())
    return {scene.step: {"index.json", "shard-"}}


def forge_something_else(scene: Scene) -> Named:
    """The digest is right, and that is all."""
    body = json.dumps(read_body(scene.folder)).encode()
    other = [
        b"",
        b"null",
        b"[]",
        b"3",
        b"{",
        b"\xff",
        body[:-1],
        body + body,
        b"[" * 50_000,
        b'"' + b"a" * 10**6 + b'"',
    ]
    write_body(scene.folder, scene.draw.choice([*other, b'{"a":' * 5000 + b"1" + b"}" * 5000, b"\xef\xbb\xbf" + body]))
    return {scene.step: {"index.json"}}


# ---- A run to which something happened

KINDS = len(ACCIDENTS) + len(FORGERIES) + 1


@dataclass(frozen=True)
class Case:
    seed: int
    text: str
    run_dir: Path
    mark: Path
    damage: Named
    forged: bool


def make_case(seed: int, good: Path, folder: Path) -> Case:
    """Every kind of damage in turn; most to the newest checkpoint, some to an older one, some to several."""
    draw = random.Random(seed)
    run_dir, outside = folder / f"case-{seed}", folder / f"outside-{seed}"
    shutil.copytree(good, run_dir)
    outside.mkdir()
    number = seed % KINDS
    damage: Named = {}
    texts = []
    steps = draw.choices([[6], [6, 4], [4], [6, 4, 2]], [6, 2, 1, 1])[0]
    for step in steps:
        scene = Scene(draw, run_dir, step, outside / str(step))
        scene.outside.mkdir()
        if number < len(ACCIDENTS):
            kind = ACCIDENTS[number] if step == steps[0] else draw.choice([flip_bits, truncate, delete])
            texts.append(f"{kind.__name__} of step {step}")
            found = kind(scene)
        elif number < KINDS - 1:
            change = FORGERIES[number - len(ACCIDENTS)]
            texts.append(f"forged {change.__name__} in step {step}")
            found = forge(scene, change)
        else:
            texts.append(f"forge_something_else in step {step}")
            found = forge_something_else(scene)
        for one, names in found.items():
            damage[one] = damage.get(one, set()) | names
    return Case(seed, ", ".join(texts), run_dir, outside, damage, number >= len(ACCIDENTS))
