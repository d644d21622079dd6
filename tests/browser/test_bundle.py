"""The page's script: its lint, types and unit tests; what is committed of it is what its sources give."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.browser.conftest import FIX, FRONT

pytestmark = pytest.mark.browser

ASSETS = FRONT.parent / "assets"


def test_lint_types_and_unit_tests_of_the_script_pass() -> None:
    npm = shutil.which("npm")
    if npm is None or not (FRONT / "node_modules/eslint").exists():
        pytest.skip(f"needs npm and the npm packages of the page: {FIX}")
    done = subprocess.run([npm, "run", "check"], cwd=FRONT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_committed_bundle_is_what_the_sources_give(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not (FRONT / "node_modules/esbuild").exists():
        pytest.skip(f"needs node and the npm packages of the page: {FIX}")
    subprocess.run([node, str(FRONT / "build.mjs"), str(tmp_path)], check=True)
    for name in ("page.js", "page.css", "LICENSES.txt"):
        assert (tmp_path / name).read_bytes() == (ASSETS / name).read_bytes(), (
            f"{name} is old: `make page` makes it anew"
        )


def test_the_lock_file_names_exact_versions_and_no_host() -> None:
    packages = json.loads((FRONT / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert not any("resolved" in package for package in packages.values())
    wanted = json.loads((FRONT / "package.json").read_text(encoding="utf-8"))
    versions = [*wanted["dependencies"].values(), *wanted["devDependencies"].values()]
    assert all(version[0].isdigit() for version in versions)
