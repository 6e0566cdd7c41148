"""Faults 1 to 12: a missing guard, or a call in the wrong state."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from rig import Make, make_batch, nll

import rl_session as rs
from rl_session.errors import ModeError, OffloadedAccessError
from rl_session_migrate import LegacyPolicy

COMPUTE = {
    "get_logprobs": lambda p: p.get_logprobs(make_batch()),
    "get_reference_policy_logprobs": lambda p: p.get_reference_policy_logprobs(make_batch()),
    "get_topk_logits": lambda p: p.get_topk_logits(make_batch(), 2),
    "score": lambda p: p.score(make_batch()),
    "train": lambda p: p.train(make_batch(), nll),
    "train(eval_mode=True)": lambda p: p.train(make_batch(), nll, eval_mode=True),
    "begin_step": lambda p: p.begin_step(),
}


@pytest.mark.parametrize("call", COMPUTE)
def test_row_01_a_call_without_its_scope_names_the_scope(make: Make, call: str) -> None:
    """Others: an illegal memory access far from the cause, because weights were still on the CPU.

    Here: a typed error that names the call, where the bytes are, and the scope to write; nothing was touched.
    By: the mode table, read by every call (`lifecycle.may_call`).
    """
    rig = make(reference="copy")
    rig.policy.offload()
    before = rig.contents()
    with pytest.raises(ModeError) as raised:
        COMPUTE[call](rig.policy)
    assert call.partition("(")[0] in raised.value.attempted
    assert "on the host" in raised.value.attempted
    assert "with policy." in raised.value.remedy
    assert rig.contents() == before
    assert len(rig.records("guard.rejected")) == 1


def test_row_03_a_gather_over_weights_that_are_away_is_refused_first(make: Make) -> None:
    """Others: a collective over CPU tensors, while the weights were offloaded.

    Here: what reads all weights (a state dict, a concatenation of them) is refused before it reads one.
    By: the class of a tensor that is away, and hooks before the module's own (`offload/guard`).
    """
    rig = make()
    rig.policy.offload()
    with pytest.raises(OffloadedAccessError):
        torch.cat([p.flatten() for p in rig.model.parameters()])
    with pytest.raises(OffloadedAccessError, match=r"state_dict\(\)"):
        rig.model.state_dict()
    with pytest.raises(OffloadedAccessError, match=r"forward\(\)"):
        rig.model(make_batch()["input_ids"])


@pytest.mark.parametrize("scope", ["training_mode", "logprob_mode", "refit_mode", "offloaded"])
def test_row_04_after_a_scope_nothing_is_left_on_the_device(make: Make, scope: str) -> None:
    """Others: gigabytes left on the GPU after an offload, because a helper brought them back inside it.

    Here: after every exit the placement found by looking at storages is the declared one.
    By: the worker plans from a scan, moves, and reports what it sees (`workers/worker`).
    """
    rig = make()
    with rig.policy.training_mode():
        rig.train()
    with getattr(rig.policy, scope)():
        pass
    assert rig.on_device() == []
    assert rig.device.resident_bytes == 0
    assert {tier.value for tier in rig.policy.placement.values()} <= {"host", "none"}


LEGACY: dict[str, tuple[bool | None, bool | None]] = {
    "prepare_for_training": (True, True),
    "prepare_for_lp_inference": (True, None),
    "finish_inference": (False, None),
    "offload_before_refit": (None, False),
    "offload_after_refit": (False, False),
}
"""Legacy call to where it leaves weights and optimizer state: on the device, away, or as they are."""


@pytest.mark.filterwarnings("ignore:.*legacy API:DeprecationWarning")
@pytest.mark.parametrize("rest", ["offloaded", "resident"])
def test_row_05_a_legacy_call_means_one_state_whoever_makes_it(make: Make, rest: str) -> None:
    """Others: a call is named for the phase it was written for, and does something else, or too little, in another.

    Here: each legacy call leads to its one target, after any other call and from either resting mode, and no byte is lost.
    By: a table of what each call asks of each component, carried out by the engine of the scopes (`shim/effects`).
    """
    rig = make()
    with rig.policy.training_mode():
        rig.train()
    before = rig.contents()
    legacy = LegacyPolicy(rig.policy)
    for calls in itertools.product(LEGACY, repeat=2):
        rig.policy.switch(rest)
        expected = [rest == "resident", any(t.untyped_storage().nbytes() for t in rig.optimizer_tensors())]
        for call in calls:
            getattr(legacy, call)()
            expected = [then if wanted is None else wanted for then, wanted in zip(expected, LEGACY[call], strict=True)]
            weights = [t.untyped_storage().nbytes() > 0 for t in (*rig.model.parameters(), *rig.model.buffers())]
            moments = [t.untyped_storage().nbytes() > 0 for t in rig.optimizer_tensors()]
            assert weights == [expected[0]] * len(weights), calls
            assert moments == [expected[1]] * len(moments), calls
        assert rig.contents() == before


def test_row_07_offloading_twice_does_nothing_the_second_time(make: Make) -> None:
    """Others: a second `sleep` kills the actor.

    Here: `offload()` and every scope may be repeated; the second time no byte moves.
    By: a plan is the difference between where bytes are and where they should be (`planning.plan`).
    """
    rig = make()
    rig.policy.offload()
    before, moved = rig.contents(), rig.device.bytes_out
    rig.policy.offload()
    with rig.policy.offloaded(), rig.policy.offloaded():
        pass
    assert rig.device.bytes_out == moved
    assert rig.contents() == before


def test_row_08_state_is_kept_for_each_storage(make: Make) -> None:
    """Others: one flag for a whole process; blocks freed or mapped twice.

    Here: each storage has its own record: a failure between two of them undoes exactly what was done, and a retry works.
    By: the transaction knows each storage it freed, allocated or copied (`offload/transaction`).
    """
    rig = make()
    rig.policy.offload()
    before = rig.contents()
    for k in range(1, 6):
        fault = rig.device.fail("allocate", k=k, point="after")
        with pytest.raises(rs.RLSessionError), rig.policy.logprob_mode():
            pass
        assert fault.fired
        assert rig.device.resident_bytes == 0
        assert rig.contents() == before
    with rig.policy.logprob_mode():
        assert rig.contents() == before


def test_row_12_a_state_dict_while_offloaded_comes_from_the_host_copies(make: Make) -> None:
    """Others: `state_dict` of an offloaded FSDP model trips an assertion.

    Here: the raw call is a typed error whose cure is `policy.state_dict()`, which reads the host copies and moves nothing.
    By: a hook before `state_dict`, and reads from whichever tier holds the bytes (`workers/keeper`).
    """
    rig = make()
    expected = {name: value.clone() for name, value in rig.model.state_dict().items()}
    rig.policy.offload()
    with pytest.raises(OffloadedAccessError) as raised:
        rig.model.state_dict()
    assert raised.value.remedy == "policy.state_dict()"
    copied = rig.device.bytes_in
    served: dict[str, Any] = rig.policy.state_dict()
    assert rig.device.bytes_in == copied
    assert served.keys() == expected.keys()
    assert all(torch.equal(served[name], expected[name]) for name in expected)
    assert [r.event.method for r in rig.records("call.finished")] == ["state_dict"]
