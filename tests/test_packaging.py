"""A wheel and an sdist hold what they should, and what the wheel holds runs from there."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def modules(folder: str) -> set[str]:
    return {path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).glob("rl_session*/**/*.py")}


def test_the_wheel_holds_both_packages_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    code = {name for name in names if name.endswith(".py")}
    assert code == modules(".") | modules("migration")
    assert {"rl_session/py.typed", "rl_session_migrate/py.typed"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "docs", "examples", "benchmarks"))]


def test_the_metadata_are_complete(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    file = zipfile.ZipFile(wheel)
    (name,) = [name for name in file.namelist() if name.endswith("METADATA")]
    metadata = Parser().parsestr(file.read(name).decode())
    for field in ("Name", "Version", "Summary", "License-Expression", "Requires-Python", "Author", "Keywords"):
        assert metadata[field], field
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert {"vllm", "hf", "examples", "docs", "test", "dev"} <= set(metadata.get_all("Provides-Extra") or [])


def test_the_sdist_holds_what_it_takes_to_check_it(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "mkdocs.yml", "tests/conftest.py", "docs/design.md"):
        assert name in names


def test_the_wheel_runs_where_nothing_of_the_checkout_is(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")  # noqa: S202 (we built it)
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "import rl_session, rl_session_migrate\n"
        "assert rl_session.__file__.startswith(sys.path[0]), rl_session.__file__\n"
        "for name in rl_session.__all__: getattr(rl_session, name)\n"
        "from rl_session.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "site"), "audit", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "timeline" in done.stdout
