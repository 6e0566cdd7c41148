"""Checking: a log that the library wrote passes, and each fault planted in it is found, by its own rule."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from rl_session.audit import AuditLog, events, sibling_path
from rl_session.audit.check import CheckResult, assert_log_is_consistent, check
from rl_session.audit.envelope import ENVELOPE

Line = dict[str, Any]
Edit = Callable[..., Path]


def find(lines: list[Line], event: str, *, skip: int = 0, **fields: Any) -> int:
    """Index of a record, by its event and fields."""
    found = [n for n, r in enumerate(lines) if r["event"] == event and all(r.get(k) == v for k, v in fields.items())]
    return found[skip]


def drop(event: str, **fields: Any) -> Callable[[list[Line]], None]:
    def change(lines: list[Line]) -> None:
        del lines[find(lines, event, **fields)]

    change.__name__ = event
    return change


def put(event: str, key: str, value: Any, **fields: Any) -> Callable[[list[Line]], None]:
    """Set a field of one record; ``value`` may be a function of the old one."""

    def change(lines: list[Line]) -> None:
        line = lines[find(lines, event, **fields)]
        line[key] = value(line[key]) if callable(value) else value

    where = ",".join(f"{name}={wanted}" for name, wanted in fields.items())
    change.__name__ = f"{event}[{where}].{key}{'' if callable(value) else f'={value}'}"
    return change


def twice(event: str, **fields: Any) -> Callable[[list[Line]], None]:
    def change(lines: list[Line]) -> None:
        index = find(lines, event, **fields)
        lines.insert(index + 1, dict(lines[index]))

    return change


def codes(result: CheckResult) -> set[str]:
    return {finding.code for finding in result.findings}


def insert(lines: list[Line], index: int, event: events.Event) -> None:
    """Put a record behind another, with its envelope."""
    envelope = {key: lines[index][key] for key in ENVELOPE}
    lines.insert(index + 1, {**envelope, "event": event.event, **event.to_fields()})


def test_a_log_that_the_library_wrote_is_whole(clean_log: Path) -> None:
    result = assert_log_is_consistent(clean_log)
    assert result.ok
    assert result.is_consistent
    assert result.num_records == clean_log.read_bytes().count(b"\n")
    assert not result.notes


# -- planted: records that are missing, twice, or out of place -------------------------------------------------


@pytest.mark.parametrize("renumber", [False, True], ids=["gap", "renumbered"])
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (drop("transition.started"), "transition_not_started"),
        (drop("transition.committed"), "transition_not_ended"),
        (drop("scope.entered"), "scope_not_entered"),
        (drop("scope.exited", mode="training"), "scope_not_exited"),
        (drop("step.opened"), "step_not_open"),
        (drop("policy.created"), "unknown_policy"),
        (drop("session.opened"), "session_not_opened"),
        (drop("component.moved", component="params"), "bytes_moved"),
        (drop("component.moved", component="reference"), "reference"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_missing_record_is_found(edit: Edit, change: Any, code: str, *, renumber: bool) -> None:
    result = check(edit(change, renumber=renumber))
    assert code in codes(result)
    assert ("gap" in codes(result)) is not renumber


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ("transition.committed", "transition_not_started"),
        ("transition.started", "transition_not_ended"),
        ("scope.exited", "scope_not_entered"),
        ("step.committed", "step_not_open"),
        ("step.opened", "step_open"),
        ("policy.created", "created_twice"),
        ("session.opened", "session_twice"),
        ("session.closed", "session_twice"),
    ],
)
def test_a_record_that_is_there_twice_is_found(edit: Edit, event: str, code: str) -> None:
    assert code in codes(check(edit(twice(event), renumber=True)))
    assert "seq_back" in codes(check(edit(twice(event))))


def test_swapped_lines_of_one_source_are_found_and_placed(edit: Edit) -> None:
    def swap(lines: list[Line]) -> None:
        lines[10], lines[11] = lines[11], lines[10]

    path = edit(swap)
    result = check(path)
    assert {"gap", "seq_back", "time_back"} <= codes(result)
    first = result.findings[0]
    assert (first.path, first.line, first.source, first.seq) == (str(path), 11, "driver", 11)
    assert str(first).startswith(f"{path}:11: gap: record 10 missing")


def test_a_dropped_middle_is_found_with_what_is_missing(edit: Edit) -> None:
    def cut(lines: list[Line]) -> None:
        del lines[20:30]

    result = check(edit(cut))
    assert result.findings[0].message == "records 20 to 29 missing"


def test_a_dropped_beginning_is_found(edit: Edit) -> None:
    def cut(lines: list[Line]) -> None:
        del lines[:3]

    assert check(edit(cut)).findings[0].message == "records 0 to 2 missing"


def test_a_repeated_number_is_found(edit: Edit) -> None:
    assert codes(check(edit(put("call.finished", "seq", lambda seq: seq - 1)))) == {"seq_back", "gap"}


# -- planted: values that cannot be ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (put("transition.started", "from_mode", "refit"), "from_mode"),
        (put("transition.committed", "from_mode", "refit"), "transition_modes"),
        (put("transition.committed", "to_mode", "refit"), "transition_modes"),
        (put("scope.exited", "restored_mode", "refit"), "restored_mode"),
        (put("scope.exited", "restored_mode", "refit", mode="training"), "restored_mode"),
        (put("scope.exited", "restored_mode", "refit", mode="training", skip=2), "restored_mode"),
        (put("scope.exited", "mode", "refit"), "mode"),
        (put("scope.entered", "mode", "refit", mode="training"), "mode"),
        (put("scope.entered", "outer_mode", "refit", depth=1), "outer_mode"),
        (put("scope.entered", "depth", lambda depth: depth + 1), "depth"),
        (put("component.moved", "nbytes", lambda nbytes: nbytes + 1, component="params"), "bytes_moved"),
        (put("transition.committed", "bytes_moved", lambda nbytes: nbytes + 8, num_moves=3), "bytes_moved"),
        (put("transition.committed", "bytes_elided", lambda nbytes: nbytes + 8), "bytes_elided"),
        (put("transition.committed", "num_moves", lambda num: num + 1), "num_moves"),
        (put("component.moved", "elided", lambda elided: not elided, component="params"), "bytes_elided"),
        (put("component.moved", "from_tier", "host", component="params", from_tier="device"), "moved_from"),
        (put("component.moved", "from_tier", "device", component="params", from_tier="host"), "moved_from"),
        (put("call.finished", "mode", "offloaded", method="train"), "call_mode"),
        (put("call.finished", "mode", "refit", method="get_logprobs"), "call_mode"),
        (put("call.finished", "mode", "refit", method="commit"), "mode"),
        (put("guard.rejected", "mode", "training"), "mode"),
        (put("call.finished", "run_id", "other"), "run_id"),
        (put("call.finished", "time_ns", lambda ns: ns - 10**9), "time_back"),
        (put("call.finished", "mono_ns", lambda ns: ns - 10**9), "time_back"),
        (put("session.opened", "host_budget", 100), "budget"),
        (put("session.opened", "device_budget", 100), "budget"),
        (put("call.finished", "seconds", "long"), "malformed"),
        (put("scope.entered", "mode", "dreaming"), "malformed"),
        (put("reference.swapped", "direction", "out"), "reference"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_value_that_cannot_be_is_found(edit: Edit, change: Any, code: str) -> None:
    result = check(edit(change))
    assert code in codes(result)
    assert not result.ok
    with pytest.raises(AssertionError, match=code):
        assert_log_is_consistent(edit(change))


def test_a_call_that_may_only_evaluate_and_made_bytes_is_found(edit: Edit) -> None:
    def change(lines: list[Line]) -> None:
        index = find(lines, "call.finished", method="get_logprobs")
        lines[index]["method"] = "train"
        lines[index]["changed"] = [{"component": "grads", "tier": "device", "nbytes": 8}]

    assert "call_mode" in codes(check(edit(change)))


def test_nesting_that_the_table_forbids_is_found(edit: Edit) -> None:
    def change(lines: list[Line]) -> None:
        # A pair of logprob scopes becomes logprob with generation inside: entered and exited, and no transition between.
        index = find(lines, "scope.entered", mode="logprob", depth=1, outer_mode="logprob")
        lines[index]["mode"] = "generation"
        lines[find(lines, "scope.exited", scope_id=lines[index]["scope_id"])]["mode"] = "generation"

    assert "nesting" in codes(check(edit(change)))


def test_a_step_committed_twice_and_a_version_that_goes_back_are_found(edit: Edit) -> None:
    def publish(lines: list[Line]) -> None:
        for version in (1, 2, 2, 1):
            insert(lines, find(lines, "step.committed", skip=1), events.WeightsPublished(version=version, nbytes=8))

    assert "weights_version" in codes(check(edit(publish, renumber=True)))

    def forward(lines: list[Line]) -> None:
        for version in (3, 2, 1):  # each goes in front of the one before
            insert(lines, find(lines, "step.committed", skip=1), events.WeightsPublished(version=version, nbytes=8))

    assert check(edit(forward, renumber=True)).ok
    assert "step_not_open" in codes(check(edit(twice("step.committed"), renumber=True)))


def test_the_next_wrong_record_is_reported_as_itself(edit: Edit) -> None:
    """A contradiction is believed and said once: what follows from it is not wrong too."""
    result = check(edit(put("transition.started", "from_mode", "refit")))
    assert [finding.code for finding in result.findings] == ["from_mode", "transition_modes"]


# -- planted: files that are damaged, mixed or missing ----------------------------------------------------------


def test_an_unparsable_line_in_the_middle_is_found_and_placed(tmp_path: Path, clean_log: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = clean_log.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:7], lines[7][:40] + b"\n", *lines[8:]]))
    result = check(path)
    places = [(finding.code, finding.path, finding.line) for finding in result.findings]
    assert ("unparsable", str(path), 8) in places
    assert "gap" in codes(result)


def test_a_truncated_last_line_is_unfinished_and_nothing_is_wrong(tmp_path: Path, clean_log: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(clean_log.read_bytes()[:-40])
    result = check(path)
    assert not result.findings
    assert not result.ok
    assert result.is_consistent
    num = clean_log.read_bytes().count(b"\n")
    assert [(left.kind, left.name) for left in result.unfinished] == [("line", f"{path}:{num}"), ("session", "session")]


@pytest.mark.parametrize("how", ["one after the other", "interleaved"])
def test_two_runs_in_one_file_are_found_and_told_apart(tmp_path: Path, clean_log: Path, how: str) -> None:
    lines = [orjson.loads(line) for line in clean_log.read_bytes().splitlines()]
    other = [{**line, "run_id": "other"} for line in lines]
    pairs = zip(lines, other, strict=True)
    mixed = [*lines, *other] if how.startswith("one") else [line for pair in pairs for line in pair]
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in mixed))
    result = check(path)
    assert codes(result) == {"mixed_runs"}
    assert result.num_findings == 1


def test_a_wrong_run_id_on_one_line_is_that_and_nothing_else(edit: Edit) -> None:
    result = check(edit(put("call.finished", "run_id", "other")))
    assert [finding.code for finding in result.findings] == ["run_id"]


def with_ranks(lines: list[Line], folder: Path, num_ranks: int = 2) -> Path:
    """The same run with workers: the moves are written by the ranks, each its part, in files of their own."""
    files: dict[str, list[Line]] = {"driver": []}
    for line in lines:
        if line["event"] != "component.moved":
            files["driver"].append(line)
            if line["event"] == "policy.created":
                line["num_ranks"] = num_ranks
            if line["event"] == "transition.committed":
                line["num_moves"] *= num_ranks
            continue
        parts = [line["nbytes"] // num_ranks] * num_ranks
        parts[0] += line["nbytes"] - sum(parts)
        for rank, nbytes in enumerate(parts):
            files.setdefault(f"rank:{rank}", []).append({**line, "nbytes": nbytes, "source": f"rank:{rank}"})
    path = folder / "run.jsonl"
    for source, found in files.items():
        numbered = [orjson.dumps({**line, "seq": seq}) + b"\n" for seq, line in enumerate(found)]
        (path if source == "driver" else sibling_path(path, source)).write_bytes(b"".join(numbered))
    return path


def test_moves_of_several_ranks_add_up_also_when_their_clocks_differ(tmp_path: Path, clean_log: Path) -> None:
    lines = [orjson.loads(line) for line in clean_log.read_bytes().splitlines()]
    assert check(with_ranks(lines, tmp_path)).ok
    for skew in (-(10**9), 10**6, 10**9):
        for rank in range(2):
            path = sibling_path(tmp_path / "run.jsonl", f"rank:{rank}")
            moved = [orjson.loads(line) for line in path.read_bytes().splitlines()]
            late = [orjson.dumps({**line, "time_ns": line["time_ns"] + skew}) + b"\n" for line in moved]
            path.write_bytes(b"".join(late))
        assert not {"bytes_moved", "num_moves", "moved_outside"} & codes(check(tmp_path / "run.jsonl"))


def test_a_dropped_source_is_found(tmp_path: Path, clean_log: Path) -> None:
    path = with_ranks([orjson.loads(line) for line in clean_log.read_bytes().splitlines()], tmp_path)
    sibling_path(path, "rank:1").unlink()
    result = check(path)
    assert {"bytes_moved", "num_moves", "not_ended"} <= codes(result)
    assert any("rank:1" in finding.message for finding in result.findings)


def test_the_end_of_a_source_that_is_missing_is_found_by_its_sums(tmp_path: Path, clean_log: Path) -> None:
    path = with_ranks([orjson.loads(line) for line in clean_log.read_bytes().splitlines()], tmp_path)
    rank = sibling_path(path, "rank:1")
    rank.write_bytes(b"".join(rank.read_bytes().splitlines(keepends=True)[:-1]))
    assert {"bytes_moved", "num_moves"} <= codes(check(path))


def test_a_lost_rank_need_not_have_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with AuditLog(path) as log:
        log.write(events.SessionOpened(release="eager", verify="off"))
        created = events.PolicyCreated(mode="offloaded", placement={}, nbytes={}, num_ranks=2)
        log.write(created, policy="actor")
        with AuditLog(sibling_path(path, "rank:0"), run_id=log.run_id, source="rank:0") as rank:
            rank.write(events.RankReported(outcome="ok", placement={}), policy="actor")
        assert ("source", "rank:1") in {(left.kind, left.name) for left in check(path).unfinished}
        log.write(events.WorkerLost(rank=1, cause="killed"), policy="actor")
        log.write(events.PolicyClosed(reason="close"), policy="actor")
        log.write(events.SessionClosed(seconds=1.0))
    assert check(path).ok


# -- logs that stop ---------------------------------------------------------------------------------------------


def naive_open(lines: list[Line]) -> set[tuple[str, Any]]:
    """What has begun and not ended, worked out without the library."""
    left: dict[tuple[str, Any], bool] = {}
    for r in lines:
        kind, _, what = r["event"].partition(".")
        reference = ("call", "get_reference_policy_logprobs")
        key = {
            "session": ("session", None),
            "policy": ("policy", r["policy"]),
            "scope": ("scope", r["scope_id"]),
            "transition": ("transition", r["transition_id"]),
            "step": ("step", r["policy"]),
            "reference": reference,
            "call": reference,
        }.get(kind)
        if key is None:
            continue
        begins = what in ("opened", "created", "entered", "started", "swapped")
        left.update({key: True}) if begins else left.pop(key, None)
    return set(left)


def named(result: CheckResult) -> set[tuple[str, Any]]:
    """What a check says is unfinished, in the same words."""
    identity = {"session": lambda _: None, "policy": lambda u: u.policy, "step": lambda u: u.policy}
    return {
        (u.kind, identity.get(u.kind, lambda u: u.name if u.kind == "call" else u.id)(u)) for u in result.unfinished
    }


def test_a_log_cut_after_any_record_is_consistent_and_names_what_is_open(tmp_path: Path, clean_log: Path) -> None:
    path = tmp_path / "run.jsonl"
    raw = clean_log.read_bytes().splitlines(keepends=True)
    lines = [orjson.loads(line) for line in raw]
    for num in range(1, len(lines) + 1):
        path.write_bytes(b"".join(raw[:num]))
        result = check(path)
        assert not result.findings, result.findings
        assert named(result) == naive_open(lines[:num])


def test_a_log_cut_in_any_byte_of_its_tail_is_consistent(tmp_path: Path, clean_log: Path) -> None:
    path = tmp_path / "run.jsonl"
    raw = clean_log.read_bytes()
    generator = random.Random(0)
    for cut in generator.sample(range(len(raw) // 2, len(raw)), 60):
        path.write_bytes(raw[:cut])
        result = check(path)
        assert not result.findings, (cut, result.findings)
        is_whole = raw[cut - 1 : cut] == b"\n" or raw[cut : cut + 1] == b"\n"
        assert ("line" in {left.kind for left in result.unfinished}) is not is_whole


def test_an_engine_that_stays_awake_is_unfinished(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with AuditLog(path) as log:
        log.write(events.EngineWoken(engine="vllm"))
        log.write(events.EngineWoken(engine="other"))
        log.write(events.EngineSlept(engine="other"))
    (left,) = check(path).unfinished
    assert (left.kind, left.name, left.seq) == ("engine", "vllm", 0)


# -- what is not wrong ------------------------------------------------------------------------------------------


def test_later_schemas_and_unknown_events_are_noted_and_not_wrong(edit: Edit) -> None:
    def change(lines: list[Line]) -> None:
        index = find(lines, "guard.rejected")
        lines.insert(index, {**lines[index], "event": "moon.landed"})
        lines.insert(index, {**lines[index], "event": "call.finished", "schema": 2, "method": "x", "changed": []})

    result = check(edit(change, renumber=True))
    assert {note.code for note in result.notes} == {"unknown_event", "later_schema"}
    assert result.ok


def test_findings_are_counted_and_their_list_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with AuditLog(path) as log:
        for n in range(3000):
            log.write(
                events.ScopeExited(mode="training", restored_mode="training", seconds=0.0), policy="a", scope_id=n
            )
    result = check(path)
    assert len(result.findings) == 1000
    assert result.num_findings > 3000
