"""The committed script and style are what their sources give, and say whose code they contain."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.browser.conftest import FIX, FRONT

pytestmark = pytest.mark.browser

ASSETS = FRONT.parent / "assets"


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
    text = (FRONT / "package-lock.json").read_text(encoding="utf-8")
    assert "://" not in text.replace("https://opencollective.com", "").replace("https://github.com", "")
    wanted = json.loads((FRONT / "package.json").read_text(encoding="utf-8"))
    versions = [*wanted["dependencies"].values(), *wanted["devDependencies"].values()]
    assert all(version[0].isdigit() for version in versions)
