"""Records as values, and the fixtures that users get."""

from __future__ import annotations

from pathlib import Path

import pytest
from rig import Net, adamw, make_batch, nll

import rl_session as rs
from rl_session import testing
from rl_session.testing import CapturedAudit, EmulatedDevice, FakeEngine, captured_audit

pytest_plugins = ["pytester"]


def test_a_session_without_a_file_is_heard() -> None:
    with captured_audit() as audit:
        model = Net()
        policy = rs.attach(model, adamw(model))
        with policy.training_mode():
            policy.train(make_batch(), nll)
        policy.close()
    [entered] = audit.named("scope.entered")
    assert (entered.policy, entered.event.mode) == ("policy", "training")
    assert audit.named("scope.entered", policy="somebody") == []
    assert audit.records[0].name == "session.opened"
    assert len(audit) == len(audit.records)
    audit.assert_consistent(finished=True)


def test_what_is_opened_outside_the_block_is_not_heard_and_what_is_opened_inside_is_heard_to_its_end() -> None:
    before = rs.Session()
    with captured_audit() as audit:
        before.make_room(0)
        inside = rs.Session()
    before.close()
    rs.Session().close()
    assert [record.name for record in audit.records] == ["session.opened"]
    inside.close()
    assert [record.name for record in audit.records] == ["session.opened", "session.closed"]


def test_two_sessions_are_told_apart_and_a_file_is_written_too(tmp_path: Path) -> None:
    with captured_audit() as audit, rs.Session(tmp_path / "run.jsonl"), rs.Session():
        pass
    assert len({record.run_id for record in audit.records}) == 2
    audit.assert_consistent(finished=True)
    assert [r.name for r in rs.read_audit(tmp_path / "run.jsonl")] == ["session.opened", "session.closed"]


def test_a_log_with_a_hole_is_not_consistent() -> None:
    with captured_audit() as audit:
        policy = rs.attach(Net())
        audit.clear()
        with policy.logprob_mode():
            pass
        policy.close()
    with pytest.raises(AssertionError):
        audit.assert_consistent()


def test_every_public_name_is_in_the_reference() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "testing.md").read_text(encoding="utf-8")
    for name in testing.__all__:
        assert f"`{name}`" in page or f".{name}\n" in page, name


def test_the_fixtures_serve_a_suite_of_a_user(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["rl_session.testing.pytest"]')
    pytester.makepyfile(
        """
        import pytest, torch
        import rl_session as rs
        from rl_session.testing import inject_fault

        def test_mine(checked_session, emulated_device, fake_engine, audit_records):
            model = torch.nn.Linear(3, 3)
            policy = checked_session.attach(model, device=emulated_device)
            engine = checked_session.engine("fake", fake_engine)
            policy.offload()
            assert emulated_device.resident_bytes == 0
            with inject_fault(policy, "copy_in"), pytest.raises(rs.TransitionError), policy.logprob_mode():
                pass
            policy.refit(engine)
            assert [r.name for r in audit_records.named("transition.rolled_back", "weights.published")] == [
                "transition.rolled_back",
                "weights.published",
            ]
        """
    )
    run = pytester.runpytest_inprocess("-p", "no:randomly", "-p", "no:cacheprovider", "-W", "ignore")
    assert run.parseoutcomes() == {"passed": 1}


def test_names_are_what_they_are_called() -> None:
    assert isinstance(FakeEngine(EmulatedDevice()).device, EmulatedDevice)
    assert repr(CapturedAudit()) == "<CapturedAudit of 0 records>"
