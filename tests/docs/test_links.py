"""Every link of the README files and the documentation leads somewhere: the file is there, and so is the heading."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("**/*.md"),
        *(ROOT / "migration").glob("*.md"),
        *(ROOT / "benchmarks").glob("**/*.md"),
    }
)
SOURCES = sorted({*ROOT.glob("rl_session/**/*.py"), *ROOT.glob("migration/**/*.py"), *ROOT.glob("examples/*.py")})
_FENCE = re.compile(r"^(`{3,}).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#+ (.+?)(?: \{#(\S+)\})?$", re.MULTILINE)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and mkdocs make it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    plain = unicodedata.normalize("NFKD", plain)
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def anchors(text: str) -> set[str]:
    found = [own or slug(title) for title, own in _HEADING.findall(_FENCE.sub("", text))]
    return {*found, *re.findall(r'id="([^"]+)"', text)}


def broken(page: Path, text: str) -> Iterator[str]:
    """The links of a page that lead nowhere."""
    for link in _LINK.findall(re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            if not re.fullmatch(r"https://[\w.-]+(?:/\S*)?", link):
                yield f"{link}: not an https address"
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or ROOT not in target.parents:
            yield f"{link}: no such file"
        elif anchor and target.suffix == ".md":
            there = target.read_text(encoding="utf-8") if path else text
            if anchor not in anchors(there):
                yield f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken(page, page.read_text(encoding="utf-8"))) == []


def test_a_broken_link_is_noticed() -> None:
    text = (
        "# Some *heading*, with `code`\n[a](README.md) [b](nothing.md) [c](README.md#nothing) [d](#nothing)"
        " [e](#some-heading-with-code) [f](http://x.org) [g](https://x.org/y) `[h](nothing.md)`\n"
        "```\n[i](nothing.md)\n```\n![j](docs/images/nothing.png) [k](../outside.md)"
    )
    found = [line.partition(":")[0] for line in broken(ROOT / "README.md", text)]
    assert found == ["nothing.md", "README.md#nothing", "#nothing", "http", "docs/images/nothing.png", "../outside.md"]


def test_pages_that_the_code_names_are_there() -> None:
    named = {
        (found, source.relative_to(ROOT).as_posix())
        for source in SOURCES
        for found in re.findall(r"\b(?:docs|migration)/[\w/-]+\.md", source.read_text(encoding="utf-8"))
    }
    assert {name for name, _ in named} >= {"docs/legacy-api.md"}
    assert [each for each in named if not (ROOT / each[0]).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    told = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("**/*.md")}
    assert told == pages


def test_the_site_shows_pages_of_elsewhere_and_links_to_them() -> None:
    site: dict[str, object] = {"__file__": str(ROOT / "docs" / "_site.py")}
    exec((ROOT / "docs" / "_site.py").read_text(encoding="utf-8"), site)  # noqa: S102
    markdown: Any = site["on_page_markdown"]

    def page(path: str) -> SimpleNamespace:
        return SimpleNamespace(file=SimpleNamespace(src_uri=path))

    link = "[a](../../migration/README.md#3-read-the-diff) [b](../../docs/lint.md) [c](attach.md)"
    assert (
        markdown(link, page=page("how-to/x.md"))
        == "[a](../migration.md#3-read-the-diff) [b](../lint.md) [c](attach.md)"
    )
    guide = markdown("", page=page("migration.md"))
    assert guide.startswith("# From a loop")
    assert "](nemo-rl.md)" in guide
    content: Any = site["on_page_content"]
    assert content(
        "see :meth:<code>Policy.train</code> or :class:<code>~rl_session.Mode</code>, <code>:func:</code>"
    ) == ("see <code>Policy.train</code> or <code>Mode</code>, <code>:func:</code>")


@pytest.mark.parametrize("page", ["README.md", "docs/demo.md"])
def test_every_example_is_listed(page: str) -> None:
    examples = {path.name for path in (ROOT / "examples").glob("*.py")}
    rows = re.findall(r"^\| (?:\[)?`(\w+\.py)`", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(examples)


def test_the_readme_leads_to_every_how_to() -> None:
    guides = {f"docs/how-to/{path.name}" for path in (ROOT / "docs" / "how-to").glob("*.md")}
    linked = set(re.findall(r"\]\((docs/how-to/[\w-]+\.md)\)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert linked == guides
