"""What the pages say of the tables in code is what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import rl_session as rs

DOCS = Path(__file__).parents[2] / "docs"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "_generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", sorted(DOCS.glob("**/*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert generator().generate(text) == text, "run: python docs/_generate.py"


def test_generated_pictures_are_up_to_date() -> None:
    pictures = generator().PICTURES
    assert "images/modes.svg" in pictures
    for name, draw in pictures.items():
        assert (DOCS / name).read_text(encoding="utf-8") == draw(), "run: python docs/_generate.py"


def test_a_changed_cell_is_noticed() -> None:
    text = (DOCS / "lifecycle.md").read_text(encoding="utf-8")
    changed = text.replace("| TRAINING | device | device |", "| TRAINING | device | host |")
    assert changed != text
    assert generator().generate(changed) == text


def test_every_manual_method_is_in_the_guide_with_its_scope() -> None:
    guide = (DOCS / "lifecycle.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)\([^`]*\)` \|.*\| ([^|]+) \|$", guide, re.MULTILINE))
    for method in (
        *("prepare_for_training", "prepare_for_lp_inference", "prepare_for_inference", "finish_inference"),
        *("finish_training", "offload_before_refit", "offload_after_refit", "offload_to_cpu"),
        *("prepare_for_generation", "finish_generation", "refit_policy_generation", "invalidate_kv_cache"),
        *("save_checkpoint", "finalize_async_save", "prepare_refit_info"),
    ):
        assert rows[method].strip(), method


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
