"""From placement to placement: which storages move, in which order, and how they are counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rl_session.lifecycle import Placement, Tier
from rl_session.planning import Move, Moved, StorageFacts, plan, summarise

D, H, N = Tier.DEVICE, Tier.HOST, Tier.NONE
COMPONENTS = ("params", "buffers", "grads", "optimizer")


def facts(
    key: int, *components: str, tier: Tier = D, nbytes: int = 8, clean: bool = False, floor: Tier = N
) -> StorageFacts:
    return StorageFacts(key, components[0], components, nbytes, tier, clean, floor)


def test_offloads_come_before_drops_and_drops_before_onloads() -> None:
    storages = [facts(1, "params", tier=H), facts(2, "grads"), facts(3, "optimizer")]
    made = plan(storages, Placement({"params": D, "optimizer": H}))
    assert [move.key for move in made.moves] == [3, 2, 1]
    assert [move.key for move in made.offloads] == [3]
    assert [move.key for move in made.drops] == [2]
    assert [move.key for move in made.onloads] == [1]
    assert (made.nbytes_freed, made.nbytes_onload, made.nbytes_copied, made.nbytes_elided) == (16, 8, 16, 8)


def test_clean_storages_leave_first_and_are_not_copied_and_the_order_is_else_that_of_the_scan() -> None:
    storages = [facts(k, "params", clean=clean) for k, clean in enumerate([False, True, False, True])]
    made = plan(storages, Placement({"params": H}))
    assert [(move.key, move.elided) for move in made.offloads] == [(1, True), (3, True), (0, False), (2, False)]


def test_a_shared_storage_goes_to_the_highest_tier_that_any_of_its_components_needs() -> None:
    shared = facts(1, "params", "optimizer", tier=H)
    assert plan([shared], Placement({"params": H, "optimizer": D})).onloads[0].to_tier is D
    assert not plan([shared], Placement({"params": H}))


def test_a_storage_that_another_policy_needs_on_the_device_stays_there() -> None:
    assert not plan([facts(1, "params", floor=D)], Placement({"params": H}))
    assert plan([facts(1, "grads", floor=H)], Placement({})).offloads[0].to_tier is H


def test_a_gradient_on_the_host_is_dropped_too_and_one_freed_in_place_comes_back_without_a_copy() -> None:
    dropped = plan([facts(1, "grads", tier=H)], Placement({}))
    assert [(m.from_tier, m.to_tier, m.elided) for m in dropped.drops] == [(H, N, True)]
    assert dropped.nbytes_freed == 0, "host memory is no room on the device"
    back = plan([facts(1, "grads", tier=N)], Placement({"grads": D}))
    assert [(m.from_tier, m.to_tier, m.elided) for m in back.onloads] == [(N, D, True)]
    assert not plan([facts(1, "grads", tier=N)], Placement({"grads": H})), "nothing to copy, nowhere to go"


def test_where_everything_is_where_it_should_be_the_plan_is_empty() -> None:
    made = plan([facts(1, "params"), facts(2, "optimizer", tier=H)], Placement({"params": D, "optimizer": H}))
    assert not made
    assert made.moves == ()


def test_moves_are_summed_by_component_ends_and_elision_in_order_of_appearance() -> None:
    moves = [
        Move(1, "params", 8, D, H, elided=False),
        Move(2, "optimizer", 4, D, H, elided=False),
        Move(3, "params", 2, D, H, elided=True),
        Move(4, "params", 1, D, H, elided=False),
    ]
    assert summarise(moves) == (
        Moved("params", D, H, 9, 2, elided=False),
        Moved("optimizer", D, H, 4, 1, elided=False),
        Moved("params", D, H, 2, 1, elided=True),
    )
    assert summarise([]) == ()


tiers = st.sampled_from(list(Tier))
storages_of = st.lists(
    st.tuples(
        st.lists(st.sampled_from(COMPONENTS), min_size=1, max_size=3, unique=True),
        st.integers(1, 100),
        tiers,
        st.booleans(),
        tiers,
    ),
    max_size=12,
).map(lambda rows: [StorageFacts(key, c[0], tuple(c), n, t, x, f) for key, (c, n, t, x, f) in enumerate(rows)])
targets = st.dictionaries(st.sampled_from(COMPONENTS), tiers).map(Placement)


def goal_of(storage: StorageFacts, target: Placement) -> Tier:
    wanted = {storage.floor, *(target[c] for c in storage.components)}
    return D if D in wanted else H if H in wanted else N


@given(storages=storages_of, target=targets)
def test_every_storage_ends_at_its_goal_and_moves_at_most_once(storages: list[StorageFacts], target: Placement) -> None:
    made = plan(storages, target)
    ends = {storage.key: storage.tier for storage in storages}
    for move in made.moves:
        assert ends[move.key] is move.from_tier
        assert move.from_tier is not move.to_tier
        ends[move.key] = move.to_tier
    assert len({move.key for move in made.moves}) == len(made.moves)
    for storage in storages:
        goal = goal_of(storage, target)
        stays = storage.tier is N and goal is H
        assert ends[storage.key] is (N if stays else goal)


@given(storages=storages_of, target=targets)
def test_the_device_never_holds_more_than_at_the_start_or_at_the_end(
    storages: list[StorageFacts], target: Placement
) -> None:
    sizes = {storage.key: storage.nbytes for storage in storages}
    held = start = sum(s.nbytes for s in storages if s.tier is D)
    highs = []
    for move in plan(storages, target).moves:
        held += sizes[move.key] * ((move.to_tier is D) - (move.from_tier is D))
        highs.append(held)
    assert max(highs, default=0) <= max(start, held)


@given(storages=storages_of, target=targets)
def test_clean_offloads_come_first_and_only_clean_or_contentless_moves_are_elided(
    storages: list[StorageFacts], target: Placement
) -> None:
    made = plan(storages, target)
    elided = [move.elided for move in made.offloads]
    assert elided == sorted(elided, reverse=True)
    by_key = {storage.key: storage for storage in storages}
    assert all(move.elided == by_key[move.key].clean for move in made.offloads)
    assert all(move.elided for move in made.drops)
    assert all(move.elided == (move.from_tier is N) for move in made.onloads)


@given(storages=storages_of, target=targets)
def test_sums_lose_no_byte_and_no_storage(storages: list[StorageFacts], target: Placement) -> None:
    made = plan(storages, target)
    moved = summarise(made.moves)
    assert sum(m.nbytes for m in moved if not m.elided) == made.nbytes_copied
    assert sum(m.nbytes for m in moved if m.elided) == made.nbytes_elided
    assert sum(m.num_storages for m in moved) == len(made.moves)
