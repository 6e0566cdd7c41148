"""Every Python block of the README and of the documentation runs, in order, as a reader would run it.

A block under `<!-- sketch: why -->` is only compiled. Pages with tests of their own are named with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

import pytest
from world import world

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "docs/lint.md": "tests/migration/test_lint_codes.py",
    "migration/README.md": "tests/migration/test_guide.py",
    "docs/nemo-rl.md": "tests/adapters/test_nemo_docs.py",
}
"""Pages whose blocks another test runs."""
SEPARATE = {"docs/errors.md"}
"""Pages whose first block sets up, and whose other blocks each start from there."""
_BLOCK = re.compile(r"(?:<!-- sketch: (?P<why>[^>]+) -->\n)?```python\n(?P<code>.*?)```", re.DOTALL)


class Block(NamedTuple):
    page: str
    line: int
    code: str
    is_sketch: bool


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("**/*.md"))
    yield ROOT / "migration" / "README.md"


def blocks(page: Path) -> list[Block]:
    if not page.exists():
        return []
    text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix()
    return [
        Block(name, text.count("\n", 0, found.start("code")) + 1, found["code"], found["why"] is not None)
        for found in _BLOCK.finditer(text)
    ]


ALL = {page.relative_to(ROOT).as_posix(): found for page in pages() if (found := blocks(page))}
RUN = [name for name in ALL if name not in ELSEWHERE]


def compiled(block: Block, folder: Path) -> object:
    # The line of the page, so that a traceback points there.
    return compile("\n" * (block.line - 1) + block.code, str(ROOT / block.page), "exec")


def scripts(name: str) -> list[list[Block]]:
    """Lists of blocks that run one after the other in one namespace."""
    run = [block for block in ALL[name] if not block.is_sketch]
    if name in SEPARATE:
        return [[run[0], block] for block in run[1:]]
    return [run]


CASES = [pytest.param(script, id=f"{name}:{script[-1].line}") for name in RUN for script in scripts(name) if script]


@pytest.mark.parametrize("script", CASES)
def test_the_blocks_run(script: list[Block], tmp_path: Path) -> None:
    names = world(tmp_path)
    session = names["session"]
    try:
        with chdir(tmp_path):
            for block in script:
                exec(compiled(block, tmp_path), names)  # type: ignore[arg-type] # noqa: S102
    finally:
        session.close()


@pytest.mark.parametrize("block", [b for found in ALL.values() for b in found], ids=lambda b: f"{b.page}:{b.line}")
def test_every_block_compiles(block: Block, tmp_path: Path) -> None:
    assert compiled(block, tmp_path)


@pytest.mark.parametrize("page", ELSEWHERE)
def test_pages_run_elsewhere_are_run_there(page: str) -> None:
    test = (ROOT / ELSEWHERE[page]).read_text(encoding="utf-8")
    assert Path(page).name in test
    assert "exec(" in test
