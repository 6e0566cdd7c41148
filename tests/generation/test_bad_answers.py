"""What an engine or a user says that is nothing the session can work with: a typed error before anything moves, or a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engine_rig import ONE, Model, Rig, prompts

import rl_session as rs
from rl_session.testing import FakeEngine

Make = Callable[..., Rig]


def serve(rig: Rig) -> None:
    with rig.engine.awake() as engine:
        assert int(engine.generate(prompts())["fingerprint"][0]) == rig.fake.fingerprint


def raising() -> int:
    raise ConnectionError("no answer")


# -- in_flight ------------------------------------------------------------------------------------------------------------


class Telling(FakeEngine):
    """Says of its requests what it was told to say."""

    told: Any = 0
    wait_for_idle = None  # type: ignore[assignment]

    @property
    def in_flight(self) -> Any:
        return self.told


@pytest.mark.parametrize(
    "said", [[], None, "x", -1, 1.5, True, raising], ids=lambda said: getattr(said, "__name__", repr(said))
)
@pytest.mark.parametrize("on_busy", ["drain", "refuse"])
def test_an_engine_is_not_put_to_sleep_while_its_requests_cannot_be_counted(
    on_busy: Any, said: Any, make: Make
) -> None:
    rig = make()
    fake = Telling(rig.device, weights=ONE, kv_nbytes=ONE)
    handle = rig.session.engine("telling", fake, on_busy=on_busy)
    with pytest.raises(rs.EngineError, match=r"sleep\(1\): waiting for it failed") as caught, handle.awake():
        fake.told = said
    assert ("no answer" if said is raising else "no number of requests") in caught.value.cause
    assert "in flight: not known" in str(caught.value)
    assert (handle.state, handle.health, fake.occupied) == ("awake", "ok", 2 * ONE)
    assert "sleep 1" not in fake.calls
    assert handle._control.pending.startswith("leaving awake()")
    assert handle._control.frames == []
    with pytest.raises(rs.EngineError, match="waiting for it failed"):
        rig.policy.refit(handle)
    assert "update_weights" not in fake.calls
    with pytest.raises(rs.EngineError, match="in_flight cannot be read"):
        _ = handle.in_flight
    fake.told = 0
    handle.sleep()
    assert (handle.state, fake.occupied, handle._control.pending) == ("asleep", 0, "")


# -- a pending sleep ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", [False, True])
def test_entering_what_is_as_awake_as_wanted_forgets_a_sleep_that_failed(refused: bool, make: Make) -> None:
    rig = make(on_busy="refuse")
    rig.fake.fail("sleep", 1, "before")
    with pytest.raises(rs.EngineError), rig.engine.awake():
        pass
    assert rig.engine._control.pending
    calls = len(rig.fake.calls)
    rig.fake.begin_requests(int(refused))
    with rig.engine.awake() as engine:
        assert rig.engine._control.pending == ""
        engine.generate(prompts())
        rig.fake.finish_requests()
    assert rig.fake.calls[calls:] == ["generate", "sleep 1"]
    assert rig.engine.state == "asleep"


def test_an_engine_that_cannot_say_what_is_awake_sleeps_first(make: Make) -> None:
    rig = make()

    class Silent(FakeEngine):
        @property
        def awake_tags(self) -> frozenset[str]:
            return frozenset()

    fake = Silent(rig.device, weights=ONE, kv_nbytes=ONE)
    handle = rig.session.engine("silent", fake)
    fake.fail("sleep", 1, "half")
    with pytest.raises(rs.EngineError), handle.awake():
        pass
    with handle.awake() as engine:
        engine.generate(prompts())
    assert fake.calls == ["wake weights kv_cache", "sleep 1", "sleep 1", "wake weights kv_cache", "generate", "sleep 1"]


def test_a_pending_sleep_is_tried_again_when_asked_to_and_only_of_an_idle_engine(make: Make) -> None:
    rig = make()
    control = rig.engine._control
    assert control.retry_pending("for room") is False
    rig.fake.fail("sleep", 1)
    with pytest.raises(rs.EngineError), rig.engine.awake():
        pass
    rig.fake.fail("sleep", 1)
    with pytest.raises(rs.EngineError, match="asked for by: for room"):
        control.retry_pending("for room")
    assert (control.pending, rig.engine.state) == ("for room", "awake")
    assert control.retry_pending("for room again") is True
    assert (control.pending, rig.engine.state, rig.engine_bytes) == ("", "asleep", 0)
    assert rig.records("engine.slept")[-1].event.reason == "for room again"
    with rig.engine.awake():
        control.pending = "left over"
        assert control.retry_pending("for room") is False
        assert rig.engine.state == "awake"


# -- answers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "fails"), [(False, True), (0, True), (None, False), (True, False), ("", True), ("done", False)]
)
@pytest.mark.parametrize("operation", ["wake", "sleep", "update_weights"])
def test_what_is_false_and_not_none_is_a_failure(operation: str, answer: Any, fails: bool, make: Make) -> None:
    rig = make()
    done = getattr(rig.fake, operation)

    def answering(*arguments: Any) -> Any:
        done(*arguments)
        return answer

    setattr(rig.fake, operation, answering)
    if fails:
        with pytest.raises(rs.EngineError, match=f"returned {answer!r}"):
            rig.policy.refit(rig.engine)
            rig.engine.sleep()
    else:
        assert rig.policy.refit(rig.engine) == 1
        rig.engine.sleep()
        assert (rig.engine.state, rig.engine_bytes) == ("asleep", 0)
    setattr(rig.fake, operation, done)
    rig.engine.recover()
    rig.policy.refit(rig.engine)
    serve(rig)


def test_the_error_of_a_wake_says_the_state_as_it_is_then(make: Make) -> None:
    rig = make()
    rig.fake.fail("wake", 1, "after", error=False)
    with pytest.raises(rs.EngineError, match=r"wake\(\['weights', 'kv_cache'\]\) returned False") as caught:
        rig.engine.awake().__enter__()
    assert rig.engine.state == "asleep"
    assert "state: asleep (awake: nothing)" in str(caught.value)
    assert (caught.value.attempted.endswith("returned False"), caught.value.cause) == (True, "")
    assert "awake: weights" not in str(caught.value)
    rig.fake.fail("wake", 1, "after", error=False)
    rig.fake.fail("sleep", 1, "before", OSError("stuck"))
    with pytest.raises(rs.EngineError) as caught:
        rig.engine.awake().__enter__()
    assert any("stuck" in note for note in caught.value.__notes__)
    assert rig.engine.health == "faulted"
    assert "state: awake" in str(caught.value)  # all of it counts, as it may be there
    rig.engine.recover()


# -- room for a refit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["eager", "lazy"])
@pytest.mark.parametrize("host", [False, True])
def test_a_refit_whose_cache_never_fits_moves_nothing(host: bool, release: str, make: Make) -> None:
    rig = make(capacity=4 * ONE, release=release, kv=4 * ONE, fake={"accepts_host_weights": host})
    rig.train()
    moved = rig.device.bytes_in, rig.device.bytes_out
    for attempt in (lambda: rig.policy.refit(rig.engine), lambda: rig.policy.generation_mode(rig.engine).__enter__()):
        with pytest.raises(rs.DeviceMemoryError) as caught:
            attempt()
        assert f"needed: {5 * ONE} bytes" in str(caught.value)
        assert f"budget: {4 * ONE}" in str(caught.value)
        if release == "eager":
            assert (rig.device.bytes_in, rig.device.bytes_out) == moved
    assert rig.fake.calls == []
    assert (rig.engine.version, rig.policy.mode) == (0, rs.Mode.OFFLOADED)


def test_a_refit_whose_weights_never_fit_beside_the_policys_moves_nothing(make: Make) -> None:
    rig = make(capacity=4 * ONE, kv=0, bytes_needed={"weights": 3 * ONE + 1, "kv_cache": 0})
    rig.train()
    moved = rig.device.bytes_in
    with pytest.raises(rs.DeviceMemoryError, match=f"needed: {4 * ONE + 1} bytes for the weights of engine 'vllm'"):
        rig.policy.refit(rig.engine)
    assert (rig.fake.calls, rig.device.bytes_in, rig.policy.mode) == ([], moved, rs.Mode.OFFLOADED)
    assert rig.records("scope.entered")[-1].event.mode == "training"
    fits = make(capacity=4 * ONE, kv=0, bytes_needed={"weights": 3 * ONE, "kv_cache": 0})
    fits.train()
    assert fits.policy.refit(fits.engine) == 1


# -- what a user says -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "fact"),
    [
        (7, "it is no mapping"),
        ({"foo": 3}, "unknown: 'foo'"),
        ({"weights": 3}, "missing: 'kv_cache'"),
        ({"weights": -1, "kv_cache": 0}, "no number of bytes: 'weights'"),
        ({"weights": 1.5, "kv_cache": 0}, "no number of bytes: 'weights'"),
        ({"weights": "1", "kv_cache": True}, "no number of bytes: 'kv_cache'"),
    ],
)
def test_sizes_that_do_not_fit_the_tags_are_refused_when_the_engine_comes(sizes: Any, fact: str, make: Make) -> None:
    rig = make()
    with pytest.raises(rs.ConfigError, match="bytes_needed=") as caught:
        rig.session.engine("odd", FakeEngine(rig.device), bytes_needed=sizes)
    assert fact in caught.value.facts
    assert "tags of this engine: weights, kv_cache" in caught.value.facts
    assert [e.name for e in rig.session._run.engines] == ["vllm"]
    rig.session.engine("odd", FakeEngine(rig.device), bytes_needed={"weights": 1, "kv_cache": 0})


@pytest.mark.parametrize("name", ["", 3, None, ["vllm"]])
def test_a_name_is_a_string_that_says_something(name: Any, make: Make) -> None:
    rig = make()
    for attempt in (
        lambda: rig.session.engine(name, FakeEngine()),
        lambda: rig.session.engine(name),
        lambda: rig.session.engine(name, rs.InProcessEngine(rig.policy)),
        lambda: rs.InProcessEngine(rig.policy, name=name),
    ):
        with pytest.raises(rs.ConfigError, match="a name is a string"):
            attempt()


@pytest.mark.parametrize("tags", [3, "", ["foo"], [3], [], [None], {"weights": 1, "foo": 2}])
def test_tags_that_there_are_not_are_refused(tags: Any, make: Make) -> None:
    rig = make()
    with pytest.raises(rs.ConfigError, match="tags of this engine: weights, kv_cache"), rig.engine.awake(tags=tags):
        pytest.fail("entered")
    assert rig.fake.calls == []
    serve(rig)


def test_a_string_is_one_tag_of_an_engine_too(make: Make) -> None:
    rig = make()
    fake = FakeEngine(rig.device, weights=ONE, tags=("weights",))
    fake.tags = "weights"  # type: ignore[assignment]
    handle = rig.session.engine("whole", fake)
    with handle.awake():
        assert fake.awake_tags == {"weights"}
        assert handle.memory()["awake"] == {"weights": ONE}
    for wrong in ("", (), ("a", "a"), 3, None, (1,), ("weights", "")):
        fake = FakeEngine(rig.device)
        fake.tags = wrong  # type: ignore[assignment]
        with pytest.raises(rs.ConfigError, match="the engine's tags="):
            rig.session.engine("odd", fake)


def test_an_engine_is_in_the_session_once(make: Make) -> None:
    rig = make()
    mine = rig.session.engine("own", rs.InProcessEngine(rig.policy))
    for engine, name in ((rig.fake, "vllm"), (mine, "own")):
        with pytest.raises(rs.ConfigError, match="in the session already") as caught:
            rig.session.engine("second", engine)
        assert f"its name is {name!r}" in caught.value.facts
    assert mine.name == "own"
    rig.engine.close()
    again = rig.session.engine("second", rig.fake)
    with again.awake():
        again.generate(prompts())


@pytest.mark.parametrize("nbytes", ["x", 1.5, 0, -1, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_bucket_has_a_whole_number_of_bytes(own: bool, nbytes: Any, make: Make) -> None:
    rig = make()
    engine: Any = rs.InProcessEngine(rig.policy) if own else rig.engine
    with pytest.raises(rs.ConfigError, match="is no number of bytes"):
        rig.policy.refit(engine, bucket_nbytes=nbytes)
    assert (rig.fake.calls, rig.policy.mode) == ([], rs.Mode.OFFLOADED)


def test_what_has_no_policy_to_sample_from_is_no_engine(make: Make) -> None:
    rig = make()
    critic = rig.session.attach_value(Model(1), name="critic", device=rig.device)
    for wrong in (3, None, critic):
        with pytest.raises(rs.ConfigError, match="it samples with a policy"):
            rs.InProcessEngine(wrong)  # type: ignore[arg-type]
    with pytest.raises(rs.UnsupportedError, match=r"value 'critic': refit\(\): a value model has no weights"):
        critic.refit(rig.engine)
    assert rig.fake.calls == []
