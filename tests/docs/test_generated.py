"""What the pages say of the tables in code is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import load_script

import rl_session as rs
from rl_session_migrate import LegacyGeneration, LegacyPolicy, LegacyValue

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", sorted(DOCS.glob("**/*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert load_script("docs/_generate.py").generate(text) == text, "run: python docs/_generate.py"


def test_generated_pictures_are_up_to_date() -> None:
    pictures = load_script("docs/_generate.py").PICTURES
    assert "images/modes.svg" in pictures
    for name, draw in pictures.items():
        assert (DOCS / name).read_text(encoding="utf-8") == draw(), "run: python docs/_generate.py"


def test_a_changed_cell_is_noticed() -> None:
    text = (DOCS / "lifecycle.md").read_text(encoding="utf-8")
    changed = text.replace("| TRAINING | device | device |", "| TRAINING | device | host |")
    assert changed != text
    assert load_script("docs/_generate.py").generate(changed) == text


def manual_names() -> set[str]:
    """What only the manual API has: names that the scopes' own handles have are no manual calls."""
    manual = (LegacyPolicy, LegacyValue, LegacyGeneration)
    own = {name for cls in (rs.Policy, rs.ValueModel, rs.EngineHandle, rs.InProcessEngine) for name in dir(cls)}
    # of the shim itself, or said of how it is spread
    own |= {"scoped", "cfg", "sharding_annotations", "print_node_ip_and_gpu_id", "generate", "get_values"}
    return {name for cls in manual for name in dir(cls) if not name.startswith("_")} - own | {"save_checkpoint"}


def test_every_manual_method_is_in_the_guide_with_its_scope() -> None:
    guide = (DOCS / "lifecycle.md").read_text(encoding="utf-8")
    section = guide[guide.index("## Every manual call") : guide.index("<!-- generated: legacy-policy-table -->")]
    rows: dict[str, str] = {}
    for line in section.splitlines():
        calls, _, rest = line.removeprefix("| ").partition(" | ")
        rows |= {name: rest.removesuffix(" |").rpartition(" | ")[2] for name in re.findall(r"`(\w+)[^`]*`", calls)}
    names = manual_names() | {"refit_policy_generation"}
    assert {"prepare_for_lp_inference", "offload_after_refit", "finish_generation", "finish_training"} <= names
    assert names - set(rows) == set()
    assert [name for name in names if not rows[name].strip()] == []


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    documented = set(re.findall(r"^::: rl_session\.(?:\w+\.)*(\w+)$", pages, re.MULTILINE))
    whole = set(re.findall(r"^::: (rl_session\.\w+)$", pages, re.MULTILINE))
    for name in rs.__all__:
        home = getattr(rs, name).__module__
        in_module = (
            "rl_session.errors" in whole and issubclass(type(getattr(rs, name)), type) and name.endswith("Error")
        )
        assert name in documented or in_module, f"{name} of {home} is in no page of docs/reference"


def test_every_part_of_the_code_is_in_the_design() -> None:
    text = (DOCS / "design.md").read_text(encoding="utf-8")
    table = text[text.index("| module | one idea |") : text.index("## A transition")]
    parts = {path.stem for path in (DOCS.parent / "rl_session").iterdir() if path.suffix == ".py"} - {"__init__"}
    parts |= {path.parent.name for path in (DOCS.parent / "rl_session").glob("*/__init__.py")}
    parts |= {path.parent.name for path in (DOCS.parent / "migration" / "rl_session_migrate").glob("*/__init__.py")}
    assert {"offload", "shim", "scope"} <= parts
    rows = "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|"))
    assert {part for part in parts if not re.search(rf"`[^`]*\b{part}\b", rows)} == set()
