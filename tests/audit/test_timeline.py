"""The timeline's data, and its page: what it holds, what it allows, and that a log cannot execute in it."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rl_session.audit import read_audit
from rl_session.audit.timeline import timeline_data, timeline_page
from rl_session.cli import _app

GB = 10**9
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = [
    "</script><script>document.title='pwned'</script>",
    "<img src=x onerror=\"document.title='pwned'\">",
    "<!--<script>",
    "\"};document.title='pwned';//",
    "javascript:document.title='pwned'",
    "{{script}}{{data}}",
    "]]>&lt;b&gt;\u2028\u2029\0",
]


def data_of(path: Path) -> dict[str, Any]:
    return timeline_data(read_audit(path).dicts())


def row(data: dict[str, Any], policy: str, kind: str, number: int = 0) -> dict[str, Any]:
    lane = next(lane for lane in data["lanes"] if lane["name"] == policy)
    rows: list[dict[str, Any]] = [row for row in lane["rows"] if row["kind"] == kind]
    return rows[number]


class _Page(html.parser.HTMLParser):
    """The elements of a page, with the text in each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag in ("script", "style"):
            self.text.setdefault(tag, []).append("")

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style"):
            self.text[self._inside][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


# -- data ------------------------------------------------------------------------------------------------


def test_scopes_lie_in_rows_by_depth_and_span_their_entry_and_exit(whole_run: Path) -> None:
    data = data_of(whole_run)
    outer, inner = row(data, "actor", "scope"), row(data, "actor", "scope", 1)
    assert [data["names"][name] for name in outer["name"]] == ["training"] * 3
    assert [data["names"][name] for name in inner["name"]] == ["logprob"] * 3
    for a, b, c, d in zip(outer["t0"], inner["t0"], inner["t1"], outer["t1"], strict=True):
        assert a < b < c < d
    assert outer["step"] == [0, 1, 2]


def test_transitions_hold_their_bytes_and_every_rank_its_moves(whole_run: Path) -> None:
    data = data_of(whole_run)
    transitions = row(data, "actor", "transition")
    assert sum(transitions["moved"]) == 120 * GB
    ranks = [row for row in data["lanes"][0]["rows"] if row["kind"] == "rank"]
    assert [rank["label"] for rank in ranks] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert {sum(rank["moved"]) for rank in ranks} == {30 * GB}


def test_memory_follows_what_moved(whole_run: Path) -> None:
    memory = data_of(whole_run)["lanes"][0]["memory"]
    series = {(one["component"], one["tier"]): one for one in memory["series"]}
    on_device = series["optimizer", "device"]
    assert max(on_device["nbytes"]) == 16 * GB
    assert on_device["nbytes"][-1] == 0
    assert [key[1] for key in series] == sorted(key[1] for key in series)  # the device at the bottom


def test_what_failed_or_never_ended_is_marked(bad_run: Path) -> None:
    data = data_of(bad_run)
    assert [flags for flags in row(data, "actor", "transition")["flags"] if flags] == [3, 4]
    assert row(data, "critic", "scope")["flags"] == [4]
    assert row(data, "critic", "scope")["t1"] == [data["end"]]
    assert 1 in row(data, "actor", "call")["flags"]
    assert not data.get("closed")


def test_steps_are_bounded_by_their_records(whole_run: Path) -> None:
    steps = data_of(whole_run)["steps"]
    assert [step[0] for step in steps] == [0, 1, 2]
    for (_, _, end), (_, start, _) in itertools.pairwise(steps):
        assert end <= start


def test_what_is_said_many_times_is_written_once(fake_run: Any) -> None:
    fake_run.open("actor")
    for step in range(100):
        fake_run.training_step(step)
    data = data_of(fake_run.save())
    assert len(data["details"]) < 20
    assert len(data["names"]) < 30


# -- page ------------------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_asks_nobody_for_anything(whole_run: Path) -> None:
    text = timeline_page(read_audit(whole_run).dicts())
    page = _Page(text)
    for tag, attributes in page.elements:
        assert "src" not in attributes, tag
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "data:,") == "data:,"
    assert not re.search(r"url\(|@import|https?://|fetch\(|XMLHttpRequest|innerHTML|document\.write|eval\(", text)


def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else(whole_run: Path) -> None:
    page = _Page(timeline_page(read_audit(whole_run).dicts()))
    policy = next(attributes["content"] for tag, attributes in page.elements if "http-equiv" in attributes)
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    (block, script), (style,) = page.text["script"], page.text["style"]
    assert rules["script-src"] == digest(script)
    assert rules["style-src"] == digest(style)
    assert json.loads(block)["run_id"] == "fake-run"


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_log_says_stays_data(name: str, hostile_run: Callable[[str], Path]) -> None:
    text = timeline_page(read_audit(hostile_run(name)).dicts())
    page, plain = _Page(text), _Page(timeline_page([]))
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
    assert "<" not in page.text["script"][0]
    assert name in [lane["name"] for lane in json.loads(page.text["script"][0])["lanes"]]


def test_the_command_writes_beside_the_log_and_says_where(whole_run: Path) -> None:
    result = CliRunner().invoke(_app, ["audit", "timeline", str(whole_run)])
    assert result.exit_code == 0
    page = whole_run.with_name("run.html")
    assert str(page) in result.stderr
    assert page.read_text().startswith("<!doctype html>")


def test_lines_that_cannot_be_read_are_noted_on_the_page(whole_run: Path) -> None:
    whole_run.write_bytes(whole_run.read_bytes() + b'{"torn')
    result = CliRunner().invoke(_app, ["audit", "timeline", str(whole_run), "--json"])
    assert json.loads(result.stdout)["notes"] == ["1 file ends in half a line, as after a crash"]


# -- in a browser ----------------------------------------------------------------------------------------


def dump(page: Path, profile: Path, *flags: str) -> str:
    """Return the page's document as it is when its script has run."""
    assert CHROMIUM is not None
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    result = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            *quiet,
            f"--user-data-dir={profile}",
            "--virtual-time-budget=4000",
            "--enable-logging=stderr",
            *flags,
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    console = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    assert console == []
    return result.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_a_browser_draws_the_page_and_executes_nothing_of_the_log(
    hostile_run: Callable[[str], Path], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text(timeline_page(read_audit(hostile_run("".join(HOSTILE[:4]))).dicts()))
    document = dump(page, tmp_path / "profile")
    assert "<title>rl-session timeline</title>" in document
    shown = _Page(document)
    assert {tag for tag, _ in shown.elements}.isdisjoint({"img", "b"})
    assert document.count("<script") == 2 + HOSTILE[0].count("&lt;script")
    assert "Slowest transitions" in document  # the script ran to its end
    assert "refused calls" in document


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_a_page_without_records_draws_too(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(timeline_page([]))
    assert "Press ? for keys" in dump(page, tmp_path / "profile")
