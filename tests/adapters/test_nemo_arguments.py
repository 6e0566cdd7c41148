"""What is said wrongly to the scopes of a NeMo-RL object: a typed error, before a legacy call is made."""

from __future__ import annotations

from typing import Any

import pytest
from legacy_model import LegacyGeneration, LegacyPolicy, LegacyValue

import rl_session as rs
from rl_session.adapters.nemo_rl import scopes, share


@pytest.mark.parametrize("tags", [["foo"], "foo", 3, [], [3], ["weights", "foo"]])
def test_tags_that_there_are_not_are_refused(session: rs.Session, tags: Any) -> None:
    engine, policy = LegacyGeneration(), LegacyPolicy("dtensor_v2")
    mine = scopes(engine, session=session)
    for attempt in (mine.awake, mine.wake, scopes(policy, session=session).awake, scopes(policy).wake):
        with pytest.raises(rs.ConfigError, match="tags of this engine: weights, kv_cache"):
            attempt(tags=tags)
    assert engine.calls() == policy.calls() == []
    assert not mine._control.frames


def test_a_string_is_one_tag(session: rs.Session) -> None:
    engine = LegacyGeneration()
    mine = scopes(engine, session=session)
    with mine.awake(tags="weights"):
        pass
    mine.wake(tags="weights")
    assert engine.calls() == [
        "prepare_for_generation(tags=['weights'])",
        "finish_generation()",
        "prepare_for_generation(tags=['weights'])",
    ]


@pytest.mark.parametrize("release", ["lazy", "eager"])
def test_a_scope_inside_one_of_the_weights_wakes_no_more_whatever_is_awake(session: rs.Session, release: Any) -> None:
    policy, engine = LegacyPolicy("dtensor_v2"), LegacyGeneration()
    share(policy, engine, session=session, release=release)
    mine = scopes(engine)
    with mine.awake(), mine.awake(tags=["weights"]), mine.awake():
        pass
    with mine.awake(tags=["weights"]):
        with pytest.raises(rs.ScopeError, match="wakes more than"), mine.awake():
            pytest.fail("entered")
        with mine.awake(tags=["weights"]):
            pass


@pytest.mark.parametrize("transfer", [3, "x", False])
def test_a_transfer_that_cannot_be_called_is_refused_before_the_engine_wakes(
    session: rs.Session, transfer: Any
) -> None:
    policy, engine = LegacyPolicy("dtensor_v2"), LegacyGeneration()
    share(policy, engine, session=session)
    with pytest.raises(rs.ConfigError, match="the transfer cannot be called"):
        scopes(policy).refit(engine, transfer)
    assert policy.calls() == engine.calls() == []
    scopes(policy).refit(engine, lambda: None)


def test_a_scope_of_another_kind_of_object_is_named_and_what_there_is(session: rs.Session) -> None:
    value, policy, engine = LegacyValue("dtensor_v2"), LegacyPolicy("dtensor_v2"), LegacyGeneration()
    for legacy, name, own in (
        (value, "logprob_mode", "training_mode, offloaded, inference_mode"),
        (value, "refit", "training_mode, offloaded, inference_mode"),
        (value, "awake", "training_mode, offloaded, inference_mode"),
        (policy, "inference_mode", "refit, legacy_refit"),
        (engine, "training_mode", "awake, wake, sleep"),
    ):
        mine: Any = scopes(legacy, session=session if legacy is not value or name == "logprob_mode" else None)
        with pytest.raises(rs.UnsupportedError, match=rf"{name}\(\) is no scope of a") as caught:
            getattr(mine, name)()
        assert own in caught.value.facts[0]
        assert not hasattr(mine, name)
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            _ = mine.nonsense
    assert value.calls() == policy.calls() == engine.calls() == []


def test_share_needs_an_object(session: rs.Session) -> None:
    with pytest.raises(rs.ConfigError, match="no object was named"):
        share(session=session)
    assert share(None, only_colocated=True) == ()  # a function for every topology may have none


@pytest.mark.parametrize("answer", [0, ""])
def test_a_wake_that_answers_what_is_false_failed(session: rs.Session, answer: Any) -> None:
    engine = LegacyGeneration()
    mine = scopes(engine, session=session)
    done = engine.prepare_for_generation
    engine.prepare_for_generation = lambda **kwargs: done(**kwargs) and answer  # type: ignore[method-assign, assignment]
    with pytest.raises(rs.EngineError, match=f"returned {answer!r}"), mine.awake():
        pytest.fail("entered")
    engine.prepare_for_generation = done  # type: ignore[method-assign]
    with mine.awake():
        pass
