"""The mode table and the nesting table, cell by cell, against tables written down a second time here."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_session.lifecycle import (
    CALL_MODES,
    CALL_NEEDS,
    MODE_TABLE,
    NESTING,
    Cell,
    Cells,
    Component,
    Facts,
    Flags,
    Mode,
    Placement,
    Tier,
    may_call,
    may_nest,
    modes_allowing,
    resolve,
    restore,
    scope_to_write,
)

D, H, N = Tier.DEVICE, Tier.HOST, Tier.NONE
KEPT = "kept"

WEIGHTS = {"training": D, "logprob": D, "refit": D, "generation": D, "resident": D, "offloaded": H}
# mode: (in an open step, else)
GRADS: dict[str, tuple[Any, Any]] = {
    "training": (D, D),
    "logprob": (KEPT, N),
    "refit": (H, N),
    "generation": (KEPT, N),
    "resident": (KEPT, KEPT),
    "offloaded": (H, N),
}
# mode: (with neither flag, offload_optimizer_for_logprob, offload_optimizer_for_refit)
OPTIMIZER: dict[str, tuple[Any, Any, Any]] = {
    "training": (D, D, D),
    "logprob": (KEPT, H, KEPT),
    "refit": (KEPT, KEPT, H),
    "generation": (KEPT, H, KEPT),
    "resident": (KEPT, KEPT, KEPT),
    "offloaded": (H, H, H),
}
REFERENCE = dict.fromkeys(WEIGHTS, KEPT) | {"offloaded": H}
# call: modes
CALLS = {
    "get_logprobs": "training logprob generation resident",
    "get_reference_policy_logprobs": "training logprob generation resident",
    "get_topk_logits": "training logprob generation resident",
    "score": "training logprob generation resident",
    "get_values": "training logprob generation resident",
    "train(eval_mode=True)": "training logprob generation resident",
    "train": "training resident",
    "begin_step": "training resident",
    "forward_backward": "training resident",
    "commit": "training resident",
    "generate": "generation",
    "iter_weights": "refit resident offloaded",
    "publish": "refit",
    "load_checkpoint": "training resident offloaded",
    "save_checkpoint": "training logprob refit generation resident offloaded",
    "state_dict": "training logprob refit generation resident offloaded",
}
# outer: inner modes
NESTS = {
    "training": "training logprob refit offloaded",
    "logprob": "logprob refit offloaded",
    "refit": "refit offloaded",
    "generation": "generation logprob offloaded",
    "offloaded": "offloaded",
    "resident": "",
}
READ_ONLY = {"logprob", "refit", "generation", "offloaded"}
FORWARDS = {
    "training": "train",
    "logprob": "eval",
    "refit": "unchanged",
    "generation": "eval",
    "resident": "caller",
    "offloaded": "none",
}

FLAGS = [
    Flags(offload_optimizer_for_logprob=False, offload_optimizer_for_refit=False),
    Flags(offload_optimizer_for_logprob=True, offload_optimizer_for_refit=False),
    Flags(offload_optimizer_for_logprob=False, offload_optimizer_for_refit=True),
]
MODES = [mode.value for mode in Mode]
ALL = {"params": D, "buffers": D, "grads": D, "optimizer": D, "reference": H, "ema": D}


def expect(cell: Any, now: Tier) -> Tier:
    return now if cell == KEPT or now is N else cell


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("now", [D, H])
def test_every_cell_of_the_mode_table_resolves_as_written_down_here(mode: str, now: Tier) -> None:
    for is_open, (index, flags) in itertools.product([True, False], enumerate(FLAGS)):
        facts = Facts(placement=Placement(dict.fromkeys(ALL, now)), live_gradients=is_open)
        reached = resolve(Mode(mode), facts, flags)
        assert reached["params"] is reached["buffers"] is WEIGHTS[mode]
        assert reached["grads"] is expect(GRADS[mode][0 if is_open else 1], now)
        assert reached["optimizer"] is reached["ema"] is expect(OPTIMIZER[mode][index], now), (
            "extras follow the optimizer"
        )
        assert reached["reference"] is expect(REFERENCE[mode], now)


@pytest.mark.parametrize("mode", MODES)
def test_what_has_no_bytes_stays_without_in_every_mode(mode: str) -> None:
    placement = Placement({**ALL, "grads": N, "optimizer": N})
    for is_open, flags in itertools.product([True, False], FLAGS):
        reached = resolve(Mode(mode), Facts(placement=placement, live_gradients=is_open), flags)
        assert reached["grads"] is N
        assert reached["optimizer"] is N


def test_gradients_freed_in_place_come_back_where_the_table_says_device_and_nowhere_else() -> None:
    placement = Placement({**ALL, "grads": N})
    facts = Facts(placement=placement, freed_in_place=frozenset({"grads"}))
    assert {mode for mode in MODES if resolve(Mode(mode), facts, FLAGS[0])["grads"] is D} == {"training"}


def test_calls_are_legal_in_the_modes_written_down_here_and_in_no_other() -> None:
    assert set(CALL_MODES) == set(CALLS)
    for call, modes in CALLS.items():
        assert {m.value for m in CALL_MODES[call]} == set(modes.split())
        assert {m for m in MODES if may_call(Mode(m), call)} == set(modes.split())
        assert {m.value for m in modes_allowing(call)} == set(modes.split())


def test_modes_nest_as_written_down_here_and_not_otherwise() -> None:
    assert {mode.value for mode in NESTING} == set(MODES)
    for outer, inner in itertools.product(MODES, MODES):
        assert may_nest(Mode(outer), Mode(inner)) == (inner in NESTS[outer].split()), (outer, inner)


def test_read_only_modes_and_forward_settings_are_as_written_down_here() -> None:
    assert {mode.value for mode, row in MODE_TABLE.items() if row.read_only} == READ_ONLY
    assert {mode.value: row.forwards for mode, row in MODE_TABLE.items()} == FORWARDS


def test_every_call_that_needs_a_scope_names_one_whose_mode_allows_it() -> None:
    modes = {f"{mode}_mode": mode for mode in MODES}
    for call in CALLS:
        assert may_call(Mode(modes[scope_to_write(call)]), call), call


def test_what_a_call_needs_is_on_the_device_in_every_mode_that_allows_it_after_a_first_step() -> None:
    facts = Facts(placement=Placement(dict.fromkeys(ALL, H)), live_gradients=True)
    for call, needs in CALL_NEEDS.items():
        for mode in modes_allowing(call):
            if mode is Mode.RESIDENT:  # the caller is in charge of gradients and optimizer there
                continue
            reached = resolve(mode, facts, Flags())
            assert all(reached[need] is D for need in needs), (call, mode)


@pytest.mark.parametrize("live", ["preserve", "refuse", "discard"])
@pytest.mark.parametrize("mode", MODES)
def test_only_discard_drops_live_gradients(mode: str, live: Any) -> None:
    reached = resolve(Mode(mode), Facts(placement=Placement(ALL), live_gradients=True), Flags(live_gradients=live))
    dropped = live == "discard" and mode in {"logprob", "refit", "generation", "offloaded"}
    assert (reached["grads"] is N) == dropped


@pytest.mark.parametrize("mode", MODES)
def test_under_never_nothing_moves(mode: str) -> None:
    for tiers in itertools.product([D, H], repeat=len(ALL)):
        placement = Placement(dict(zip(ALL, tiers, strict=True)))
        facts = Facts(placement=placement, live_gradients=False)
        assert resolve(Mode(mode), facts, Flags(release="never")) == placement
        assert restore(Mode(mode), Placement(ALL), facts, Flags(release="never")) == placement


@pytest.mark.parametrize("mode", MODES)
def test_under_lazy_a_mode_brings_in_what_it_needs_and_sends_nothing_away(mode: str) -> None:
    for tiers in itertools.product([D, H], repeat=len(ALL)):
        placement = Placement(dict(zip(ALL, tiers, strict=True)))
        facts = Facts(placement=placement)
        eager, lazy = (resolve(Mode(mode), facts, Flags(release=r)) for r in ("eager", "lazy"))
        for name in ALL:
            assert lazy[name] is (D if D in (eager[name], placement[name]) else placement[name])


@pytest.mark.parametrize("mode", MODES)
def test_when_something_else_owns_the_weights_only_buffers_move(mode: str) -> None:
    for now in (D, H):
        placement = Placement(dict.fromkeys(ALL, now))
        reached = resolve(Mode(mode), Facts(placement=placement), Flags(weights_move=False))
        assert reached["buffers"] is WEIGHTS[mode]
        assert {name: reached[name] for name in ALL if name != "buffers"} == dict.fromkeys(set(ALL) - {"buffers"}, now)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stored", [D, H])
def test_leaving_restores_fixed_cells_from_the_table_and_conditional_ones_from_what_was_stored(
    mode: str, stored: Tier
) -> None:
    now = H if stored is D else D
    facts = Facts(placement=Placement(dict.fromkeys(ALL, now)), live_gradients=True)
    for index, flags in enumerate(FLAGS):
        back = restore(Mode(mode), Placement(dict.fromkeys(ALL, stored)), facts, flags)
        assert back["params"] is back["buffers"] is WEIGHTS[mode]
        grads, optimizer = GRADS[mode][0], OPTIMIZER[mode]
        assert back["grads"] is (stored if grads == KEPT else grads)
        assert back["optimizer"] is (stored if optimizer[index] == KEPT else optimizer[index])
        assert back["reference"] is (H if mode == "offloaded" else stored)


@pytest.mark.parametrize("mode", ["logprob", "refit", "generation", "offloaded"])
def test_leaving_for_a_mode_without_an_open_step_drops_gradients_whatever_was_stored(mode: str) -> None:
    facts = Facts(placement=Placement(ALL), live_gradients=False)
    assert restore(Mode(mode), Placement(ALL), facts, Flags())["grads"] is N


@pytest.mark.parametrize("mode", ["logprob", "refit", "resident", "generation"])
def test_optimizer_state_that_a_first_step_made_stays_where_it_is_when_nothing_was_stored_for_it(mode: str) -> None:
    facts = Facts(placement=Placement(ALL))
    back = restore(Mode(mode), Placement({**ALL, "optimizer": N}), facts, Flags(offload_optimizer_for_refit=False))
    assert back["optimizer"] is D


tiers = st.sampled_from(list(Tier))
placements = st.fixed_dictionaries(dict.fromkeys(ALL, tiers)).map(Placement)
flags_of = st.builds(
    Flags,
    release=st.sampled_from(["eager", "lazy", "never"]),
    offload_optimizer_for_logprob=st.booleans(),
    offload_optimizer_for_refit=st.booleans(),
    live_gradients=st.sampled_from(["preserve", "refuse", "discard"]),
    weights_move=st.booleans(),
)
facts_of = st.builds(Facts, placement=placements, live_gradients=st.booleans())


@given(mode=st.sampled_from(list(Mode)), facts=facts_of, flags=flags_of)
def test_entering_the_placement_that_was_reached_changes_nothing(mode: Mode, facts: Facts, flags: Flags) -> None:
    reached = resolve(mode, facts, flags)
    assert resolve(mode, attrs.evolve(facts, placement=reached), flags) == reached


@given(mode=st.sampled_from(list(Mode)), facts=facts_of, flags=flags_of)
def test_a_transition_never_makes_bytes_and_drops_nothing_but_gradients(mode: Mode, facts: Facts, flags: Flags) -> None:
    reached = resolve(mode, facts, flags)
    for name in ALL:
        if facts.placement[name] is N:
            assert reached[name] is N
        elif reached[name] is N:
            assert name == Component.GRADS
            assert not facts.live_gradients or flags.live_gradients == "discard"


@given(mode=st.sampled_from(list(Mode)), outer=st.sampled_from(list(Mode)), facts=facts_of, flags=flags_of)
def test_going_in_and_out_of_a_mode_comes_back_to_the_placement_of_the_outer_one(
    mode: Mode, outer: Mode, facts: Facts, flags: Flags
) -> None:
    start = resolve(outer, facts, flags)
    inside = resolve(mode, attrs.evolve(facts, placement=start), flags)
    back = restore(outer, start, attrs.evolve(facts, placement=inside), flags)
    for name in ALL:
        if inside[name] is N or flags.release == "lazy":  # dropped is dropped; lazy sends nothing away
            continue
        assert back[name] is start[name], name


def test_a_placement_compares_by_where_bytes_are_and_names_without_bytes_are_as_good_as_absent() -> None:
    assert Placement({"params": D, "grads": N}) == Placement({"params": D})
    assert hash(Placement({"params": D, "grads": N})) == hash(Placement({"params": D}))
    assert Placement({"params": D}) != Placement({"params": H})
    assert Placement({"params": D}).evolve(params=H)["params"] is H
    assert Placement({})["anything"] is N
    assert Placement({Component.PARAMS: D}).as_text() == {"params": "device"}
    assert "params=device" in repr(Placement({"params": D}))


# -- placements that no mode names ------------------------------------------------------------------------------------------

PARK = Cells(weights=Cell.HOST, grads=Cell.AS_IS, optimizer=Cell.AS_IS)


def test_cells_stand_in_for_the_row_of_a_mode_on_the_way_in_and_back() -> None:
    there = Placement({"params": D, "buffers": D, "grads": D, "optimizer": D, "ema": D})
    parked = resolve(Mode.OFFLOADED, Facts(placement=there), Flags(), PARK)
    assert parked == Placement({"params": H, "buffers": H, "grads": D, "optimizer": D, "ema": D})
    away = Placement(dict.fromkeys(parked, H))
    assert restore(Mode.OFFLOADED, parked, Facts(placement=away), Flags(), PARK) == parked
    assert restore(Mode.OFFLOADED, parked, Facts(placement=away), Flags()) == away.evolve(grads=N)


@given(facts=facts_of, flags=flags_of)
def test_cells_obey_the_flags_that_rows_obey(facts: Facts, flags: Flags) -> None:
    reached = resolve(Mode.OFFLOADED, facts, flags, PARK)
    for name in ALL:
        now = facts.placement[name]
        owned_elsewhere = not flags.weights_move and name != Component.BUFFERS
        if flags.release == "never" or owned_elsewhere or now is N:
            assert reached[name] is now, name
        elif flags.release == "lazy":
            assert reached[name].height >= now.height, name


def test_what_was_freed_in_place_comes_back_for_the_device_and_for_nothing_else() -> None:
    freed = Facts(placement=Placement({"params": D, "grads": N}), freed_in_place=frozenset({"grads"}))
    for cell, tier in ((Cell.DEVICE, D), (Cell.HOST, N), (Cell.AS_IS, N), (Cell.OPEN_STAYS, N)):
        cells = Cells(weights=Cell.AS_IS, grads=cell, optimizer=Cell.AS_IS)
        assert resolve(Mode.RESIDENT, freed, Flags(), cells)["grads"] is tier, cell
