"""Scopes inside scopes: one table, and every exit restores what was around it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

import rl_session as rs

SCOPES = ["training", "logprob", "refit", "generation", "offloaded"]
LEGAL = {  # the design's rule 5, written down once more
    "training": {"training", "logprob", "refit", "offloaded"},
    "logprob": {"logprob", "refit", "offloaded"},
    "refit": {"refit", "offloaded"},
    "generation": {"generation", "logprob", "offloaded"},
    "offloaded": {"offloaded"},
}


def enter_all(rig: Any, names: tuple[str, ...]) -> None:
    """Open ``names`` one in the other, checking what is around each before and after."""
    name, rest = names[0], names[1:]
    control = rig.policy._control
    before = rig.state()
    outer = control.frames[-1] if control.frames else None
    if outer is not None and name not in LEGAL[str(outer.mode)]:
        with pytest.raises(rs.NestingError) as caught:
            rig.scope(name).__enter__()
        text = str(caught.value)
        assert outer.describe() in text
        spelling = "offloaded()" if name == "offloaded" else f"{name}_mode()"
        assert f"{spelling} at test_nesting.py:" in text
        assert rig.state() == before
        return
    with rig.scope(name):
        assert rig.policy.mode == name
        assert rig.contents() == before[3]
        if rest:
            enter_all(rig, rest)
        assert rig.policy.mode == name
    assert rig.state() == before


@pytest.mark.parametrize("for_logprob", [False, True])
@pytest.mark.parametrize("base", ["offloaded", "resident"])
@pytest.mark.parametrize("outer", SCOPES)
def test_every_triple_of_scopes_restores_or_refuses(
    outer: str, base: str, for_logprob: bool, make: Callable[..., Any]
) -> None:
    rig = make(base=base, offload_optimizer_for_logprob=for_logprob)
    for middle, inner in itertools.product(SCOPES, SCOPES):
        enter_all(rig, (outer, middle, inner))
    assert rig.policy._control.ownership._token is None


@pytest.mark.parametrize(
    ("names", "optimizer"),
    [
        (("logprob",), ["host"]),
        (("training", "logprob"), ["device", "device"]),
        (("training", "logprob", "refit"), ["device", "device", "host"]),
        (("training", "refit"), ["device", "host"]),
        (("training", "logprob", "offloaded"), ["device", "device", "host"]),
        (("generation", "logprob"), ["host", "host"]),
        (("generation", "offloaded"), ["host", "host"]),
    ],
)
def test_what_a_mode_leaves_where_it_is_depends_on_what_is_around_it(
    names: tuple[str, ...], optimizer: list[str], make: Callable[..., Any]
) -> None:
    rig = make()
    entered, way_in, way_out = [], [], []
    for name in names:
        entered.append(rig.scope(name))
        entered[-1].__enter__()
        way_in.append(rig.seen()["optimizer"])
    for scope in reversed(entered):
        way_out.append(rig.seen()["optimizer"])
        scope.__exit__(None, None, None)
    assert way_in == optimizer
    assert way_out == optimizer[::-1]
    assert rig.seen()["optimizer"] == "host"


def test_the_table_binds_scopes_and_not_the_resting_mode(make: Callable[..., Any]) -> None:
    rig = make()
    for mode, name in itertools.product(rs.Mode, SCOPES):
        rig.policy.switch(mode)
        before = rig.state()
        with rig.scope(name):
            assert rig.policy.mode == name
        assert rig.state() == before


def test_the_log_tells_the_nesting(make: Callable[..., Any]) -> None:
    rig = make()
    start = len(rig.records())
    with rig.policy.training_mode(), rig.policy.logprob_mode(), rig.policy.logprob_mode():
        pass
    records = rig.records()[start:]
    entered = [r.event for r in records if r.name == "scope.entered"]
    assert [(e.mode, e.outer_mode, e.depth, e.via) for e in entered] == [
        ("training", "offloaded", 0, "scope"),
        ("logprob", "training", 1, "scope"),
        ("logprob", "logprob", 2, "scope"),
    ]
    assert all(e.call_site.startswith("test_nesting.py:") for e in entered)
    exited = [r.event for r in records if r.name == "scope.exited"]
    assert [(e.mode, e.restored_mode) for e in exited] == [
        ("logprob", "logprob"),
        ("logprob", "training"),
        ("training", "offloaded"),
    ]
    ends = [r.name for r in records if r.name.startswith("transition.")]
    assert ends == ["transition.started", "transition.committed"] * 4
