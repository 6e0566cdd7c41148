"""What the tools of the audit make of engines: rules, spans and a lane of their own in the timeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engine_rig import ONE, Rig, prompts

from rl_session.audit import AuditLog, events
from rl_session.audit.check import check
from rl_session.audit.reader import AuditReader
from rl_session.audit.spans import spans
from rl_session.audit.timeline import timeline_data

Make = Callable[..., Rig]


def loop(rig: Rig) -> None:
    for step in range(2):
        with rig.session.step(step):
            rig.policy.refit()
            with rig.policy.generation_mode() as policy:
                policy.generate(prompts())
            rig.train()


@pytest.mark.parametrize("release", ["eager", "lazy", "never"])
def test_the_log_of_a_loop_is_consistent_and_finished_when_the_session_is_closed(release: str, make: Make) -> None:
    rig = make(release=release)
    loop(rig)
    rig.session.close()
    result = check(rig.path)
    assert (result.findings, result.unfinished) == ([], [])


def test_an_engine_that_is_awake_is_one_span_whatever_woke_first(make: Make) -> None:
    rig = make(capacity=4 * ONE)
    loop(rig)
    rig.session.close()
    found = [span for span in spans(rig.path) if span.kind == "engine"]
    assert [(span.name, span.policy, span.complete) for span in found] == [("vllm", None, True)] * 2
    assert found[0].fields["tags"] == ["weights", "kv_cache"]
    assert "leaving generation_mode()" in found[0].fields["reason"]


def test_the_timeline_has_a_lane_for_each_engine_with_its_bytes(make: Make) -> None:
    rig = make(capacity=4 * ONE)
    loop(rig)
    data = timeline_data(AuditReader(rig.path).dicts())
    (lane,) = [lane for lane in data["lanes"] if lane["name"] == "engine vllm"]
    (row,) = lane["rows"]
    assert row["label"] == "awake"
    assert len(row["t0"]) == 2
    assert all(begin < end for begin, end in zip(row["t0"], row["t1"], strict=True))
    series = {s["component"]: s["nbytes"] for s in lane["memory"]["series"]}
    assert series == {"weights": [ONE, 0, ONE, 0], "kv_cache": [2 * ONE, 0, 2 * ONE, 0]}


def test_an_engine_that_is_awake_at_the_end_of_an_unfinished_log_is_shown_as_such(make: Make) -> None:
    rig = make(release="lazy")
    with rig.engine.awake():
        pass
    data = timeline_data(AuditReader(rig.path).dicts())
    (lane,) = [lane for lane in data["lanes"] if lane["name"] == "engine vllm"]
    assert [bool(flag) for flag in lane["rows"][0]["flags"]] == [True]
    assert [left.kind for left in check(rig.path).unfinished].count("engine") == 1


def test_versions_count_for_each_engine_and_a_skip_repeats_one(tmp_path: Any) -> None:
    path = tmp_path / "log.jsonl"
    log = AuditLog(path)
    log.write(events.PolicyCreated(mode="offloaded", placement={}, nbytes={}), policy="p")
    for version, engine, skipped in ((1, "a", None), (1, "b", None), (2, "a", None), (2, "a", True), (2, "b", None)):
        log.write(events.WeightsPublished(version=version, nbytes=0, engine=engine, skipped=skipped), policy="p")
    assert check(path).findings == []
    log.write(events.WeightsPublished(version=2, nbytes=0, engine="b"), policy="p")
    log.write(events.WeightsPublished(version=1, nbytes=0, engine="a", skipped=True), policy="p")
    log.close()
    assert [finding.code for finding in check(path).findings] == ["weights_version"] * 2
    path.unlink()  # it is meant to be wrong
