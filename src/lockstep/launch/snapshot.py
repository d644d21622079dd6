"""A copy of a script's code in the run folder: the job runs what was submitted, whatever is edited later."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lockstep.errors import UserError

MOST_FILES = 2000
MOST_BYTES = 50_000_000
NO_CODE = {"__pycache__", "site-packages", "node_modules"}


def files_of(script: Path, runs: Path) -> list[Path]:
    """What a copy of a script's code has, relative to its folder: what git tracks there, and Python files.

    Of a folder without git only Python files; nothing of `runs`, where the runs are. Too much of it is refused.
    """
    folder = script.resolve().parent
    found: dict[Path, int] = {}
    for path in (Path(script.name), *(_tracked(folder) or _python_files(folder))):
        whole = folder / path
        if path == Path(script.name) or (whole.is_file() and not whole.is_relative_to(runs.resolve())):
            found[path] = whole.stat().st_size
        if len(found) > MOST_FILES or sum(found.values()) > MOST_BYTES:
            raise UserError(
                f"the code in {folder} has more than {MOST_FILES} files or {MOST_BYTES / 1e6:.0f} MB",
                "put the script into a folder with its code alone, keep data out of git, or leave --snapshot out",
            )
    return sorted(found)


def copy_code(script: Path, files: list[Path], target: Path) -> None:
    """Put a copy into `target`, all of it or nothing; one that is there already gives way."""
    new = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        for path in files:
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(script.resolve().parent / path, new / path)
        shutil.rmtree(target, ignore_errors=True)
        new.rename(target)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _tracked(folder: Path) -> list[Path]:
    """What git tracks below a folder, and Python files that it does not ignore; nothing where there is no git."""
    found: list[Path] = []
    for what in (["--cached"], ["--others", "--exclude-standard", "--", "*.py"]):
        with suppress(OSError, subprocess.SubprocessError):
            command = ["git", "ls-files", "-z", *what]
            done = subprocess.run(command, cwd=folder, capture_output=True, timeout=60, check=True)
            found += [Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name]
    return found


def _python_files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in NO_CODE]
        if Path(place, "pyvenv.cfg").exists():
            folders.clear()
            continue
        yield from (Path(place, name).relative_to(folder) for name in sorted(names) if name.endswith(".py"))
