"""What a rank runs: code, command, config, versions, environment. All ranks of a run have to be alike in it.

The ranks compare it when they meet, before anything that would wait for ever where layouts differ. Each counts itself
under the digest of its facts in the store they meet at, and only the first of a digest tells the facts themselves:
a few short messages a rank, however many there are.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lockstep import __version__
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.record.failure import OWN_CODE, is_users, short_host
from lockstep.runtime.rank_env import Place
from lockstep.text.units import listed

if TYPE_CHECKING:
    from torch.distributed import Store

    from lockstep.config.schema import LaunchConfig

Facts = dict[str, dict[str, str]]
"""What a rank runs, by kind and name."""

ENVIRONMENT = (
    *("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("TORCH_BLAS_PREFER_CUBLASLT", "TORCH_LINALG_PREFER_CUSOLVER", "CUDA_FORCE_PTX_JIT"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE"),
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "PYTORCH_JIT", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"),
    "PYTHONHASHSEED",
)
"""Variables that change numbers. Not those of threads: nodes with other numbers of cores have others."""

OF_ONE_RANK = re.compile(r"--?((local|node|global|machine|process|group)[-_]?(rank|id)|rank)(=.*)?", re.I)
"""Arguments that say which rank a process is, as torch.distributed.launch and scripts of one's own have them."""

MOST_KINDS = 64
SECONDS_TO_READ = 10.0
"""How long the rank that holds the store waits for the others to read what differs."""

FIXES = {
    "versions": "use one environment on all nodes",
    "code": "copy the same files to all nodes, or keep them on a disk that they share",
    "arguments": "start all ranks with the same ones; what is one node's alone can be in an environment variable",
    "config": "say the same on all nodes, on the command line and in lockstep.init(...)",
    "environment": "set it alike on all nodes, because it changes numbers",
    "call": "call it with the same arguments on all ranks",
    "data": "give every rank the whole dataset, the same on all nodes: Lockstep shares it out",
    "samples": "give every rank the whole dataset, in the same order on all nodes: Lockstep shares it out",
}
"""What to do about a difference, by kind; the first of them that differs is the one to name."""

DIGESTS = ("code", "samples")
"""Of these kinds values tell people nothing, and what only one of two ranks knows is no difference."""


class LocalCode:
    """The script and what it imports that is no library: a digest by file name, as each was when it was first seen."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        self._seen: set[str] = set()

    def files(self) -> dict[str, str]:
        """All of them until now. Names are relative to the script's folder, or as a module is imported."""
        main = _file_of(sys.modules.get("__main__"))
        folder = Path(main).resolve().parent if main and _is_local(main) else None
        for name, module in [("__main__", sys.modules.get("__main__")), *sorted(sys.modules.items())]:
            file = _file_of(module)
            if file is None or file in self._seen:
                continue
            self._seen.add(file)
            if not _is_local(file):  # thousands are not, and to resolve a path asks the disk for every folder of it
                continue
            path = Path(file).resolve()
            if _is_local(str(path)) and path.is_file():
                self._digests.setdefault(_called(name, path, folder), digest_of(path.read_bytes()))
        return dict(self._digests)


def _file_of(module: ModuleType | None) -> str | None:
    # Not getattr: some modules import others when they are asked for anything.
    file = getattr(module, "__dict__", {}).get("__file__")
    return file if isinstance(file, str) else None


def _is_local(file: str) -> bool:
    return file.endswith(".py") and is_users(file) and not file.startswith(f"{OWN_CODE}/")


def _called(module: str, path: Path, folder: Path | None) -> str:
    if folder is not None and path.is_relative_to(folder):
        return str(path.relative_to(folder))
    if module == "__main__":
        return path.name
    inside = module.replace(".", "/")
    return f"{inside}/{path.name}" if path.name == "__init__.py" else f"{inside}.py"


def digest_of(content: bytes) -> str:
    """A short text that differs where the content does."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def facts_of(code: LocalCode, config: LaunchConfig, place: Place, device: str, backend: str) -> Facts:
    """What this rank runs."""
    from lockstep.config.checked import flatten

    values = dict(flatten(config.model_dump(mode="json", exclude={"nproc"})))
    values |= {"device": device, "backend": backend}
    with suppress(UserError):  # it is refused once all ranks are known to have it
        values["layout"] = str(Layout.parse(config.layout).resolve(place.world_size))
    arguments = "" if place.launcher == "explicit" else " ".join(_shared_arguments(sys.argv[1:]))
    return {
        "versions": _versions(device),
        "code": code.files(),
        "arguments": {"arguments": arguments},
        "config": {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()},
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def _shared_arguments(arguments: Sequence[str]) -> list[str]:
    """Without those that say which rank this is."""
    found: list[str] = []
    skips = False
    for word in arguments:
        if skips and not word.startswith("-"):
            skips = False
        elif match := OF_ONE_RANK.fullmatch(word):
            skips = match[4] is None
        else:
            skips = False
            found.append(word)
    return found


def _versions(device: str) -> dict[str, str]:
    import numpy
    import torch

    found = {"lockstep": __version__ + _own_sources(), "torch": str(torch.__version__)}
    found |= {"python": platform.python_version(), "numpy": numpy.__version__}
    if device == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


@cache
def _own_sources() -> str:
    """What tells one checkout of Lockstep from another of the same version; nothing where it is installed."""
    if "site-packages" in OWN_CODE or "dist-packages" in OWN_CODE:
        return ""
    sources = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(OWN_CODE).rglob("*.py")):
        sources.update(str(path.relative_to(OWN_CODE)).encode() + path.read_bytes())
    return f" (sources {sources.hexdigest()})"


@dataclass(frozen=True)
class Told:
    """What one rank says of itself."""

    rank: int
    host: str
    facts: Facts

    @property
    def who(self) -> str:
        """The rank, to stand inside of a sentence."""
        return f"rank {self.rank} on {self.host}"


def tell(rank: int, facts: Facts) -> Told:
    """What this rank says of itself."""
    return Told(rank, short_host(), facts)


def check_all_alike(store: Store, place: Place, facts: Facts, timeout: datetime.timedelta) -> None:
    """Refuse to go on, on all ranks, where two of them do not run the same thing. Every rank calls it, once a start."""
    mine = digest_of(json.dumps(facts, sort_keys=True).encode())
    if store.add(f"identity/ranks with/{mine}", 1) == 1:
        number = store.add("identity/kinds", 1)
        store.set(f"identity/kind/{number}", json.dumps([mine, asdict(tell(place.rank, facts))]))
    if store.add("identity/ranks", 1) == place.world_size:
        store.set("identity/all are here", str(store.add("identity/kinds", 0)))
    store.wait(["identity/all are here"], timeout)
    kinds = int(store.get("identity/all are here"))
    if kinds == 1:
        return
    found = [json.loads(store.get(f"identity/kind/{number}")) for number in range(1, min(kinds, MOST_KINDS) + 1)]
    found.sort(key=lambda one: (-store.add(f"identity/ranks with/{one[0]}", 0), one[1]["rank"]))
    store.add("identity/read", 1)
    end = time.monotonic() + SECONDS_TO_READ
    while place.rank == 0 and store.add("identity/read", 0) < place.world_size and time.monotonic() < end:
        time.sleep(0.01)
    refuse_difference([Told(**told) for _, told in found])


def refuse_difference(told: Sequence[Told], where: str = "") -> None:
    """Refuse the first of these ranks that differs from the first of them.

    A file that only one of them has imported is no difference: whether it is imported, the script says.
    """
    usual = told[0]
    for odd in told[1:]:
        found = differences(usual.facts, odd.facts)
        if not found:
            continue
        kind, name = found[0]
        here, there = (one.facts.get(kind, {}).get(name) for one in (odd, usual))
        if kind in DIGESTS:
            others = [other for other_kind, other in found[1:] if other_kind == kind]
            cause = f"{where}{odd.who} has another {_and([name, *others])} than {usual.who}"
        else:
            cause = f"{where}{odd.who} has {_said(name, here)} and {usual.who} {_said(name, there)}"
            if more := [other for _, other in found[1:]]:
                cause += f" ({_and(more)} {'differs' if len(more) == 1 else 'differ'} too)"
        raise UserError(cause, FIXES[kind])


def differences(one: Facts, other: Facts) -> list[tuple[str, str]]:
    """Kind and name of every fact in which two ranks differ, the most telling first."""
    found = []
    for kind in FIXES:
        ours, theirs = one.get(kind, {}), other.get(kind, {})
        names = ours.keys() & theirs.keys() if kind in DIGESTS else ours.keys() | theirs.keys()
        found += [(kind, name) for name in sorted(names, key=_as_listed(ours)) if ours.get(name) != theirs.get(name)]
    return found


def _as_listed(facts: Mapping[str, Any]) -> Any:
    places = {name: number for number, name in enumerate(facts)}
    return lambda name: (places.get(name, len(places)), name)


def _said(name: str, value: str | None) -> str:
    return f"{name} not set" if value is None else f"{name} = {value or repr(value)}"


def _and(names: Sequence[str], most: int = 4) -> str:
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return listed(names)
