"""Under lazy release a policy rests on its device: what only the library read is dropped when it has to leave."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rl_session as rs
from rl_session.testing import EmulatedDevice

Rig = Any
Make = Callable[..., Any]


class Normed(nn.Module):
    """Batch statistics, which a forward in train mode writes and no version counter tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.embed(input_ids).transpose(1, 2)).transpose(1, 2))
        return out


def lazy(make: Make, **options: Any) -> Rig:
    """A policy at rest on its device, trained once, with host copies of all it has."""
    rig = make(release="lazy", **options)
    rig.policy.offload()
    with rig.policy.training_mode():
        pass
    rig.policy.offload()
    with rig.policy.logprob_mode():
        rig.policy.get_logprobs(rig.batch)
    assert rig.seen()["params"] == "device"
    assert rig.policy.mode is rs.Mode.OFFLOADED
    return rig


def leave(rig: Rig) -> int:
    """Bytes that leaving the device copies; nothing is lost on the way there and back."""
    before, copied = rig.contents(), rig.device.bytes_out
    rig.policy.offload()
    assert rig.seen()["params"] == "host"
    out: int = rig.device.bytes_out - copied
    assert rig.contents() == before
    with rig.policy.logprob_mode():
        assert rig.contents() == before
    return out


def size(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def weights_size(rig: Rig) -> int:
    return size(*rig.model.parameters(), *rig.model.buffers())


def dirty(rig: Rig) -> dict[str, int]:
    worker = rig.policy._control.group.worker
    return {held.component: held.dirty_nbytes for held in worker.holdings([rig.policy.mode], rig.policy._control.flags)}


def test_what_only_the_library_read_is_dropped_again_and_again(make: Make) -> None:
    rig = lazy(make)
    for _ in range(3):
        with rig.policy.logprob_mode():
            rig.policy.get_logprobs(rig.batch)
            rig.policy.get_topk_logits(rig.batch, 2)
        with rig.policy.refit_mode():
            list(rig.policy.iter_weights(bucket_nbytes=64))
        assert set(dirty(rig).values()) == {0}
        assert leave(rig) == 0


def test_training_makes_dirty_and_one_eviction_makes_clean_again(make: Make) -> None:
    rig = lazy(make)
    with rig.policy.training_mode():
        rig.train()
    assert leave(rig) >= weights_size(rig)
    assert leave(rig) == 0


def test_reading_between_scopes_is_no_change_and_writing_is_one_of_that_storage(make: Make) -> None:
    rig = lazy(make)
    assert rig.model.head.weight.norm().isfinite()
    assert copy.deepcopy(rig.model)(rig.batch["input_ids"]).isfinite().all()
    kept = rig.model.state_dict()
    assert dirty(rig)["params"] == 0
    del kept
    rig.model.head.weight.data.mul_(2.0)
    assert dirty(rig)["params"] == size(rig.model.head.weight)
    assert leave(rig) == size(rig.model.head.weight)


def test_saving_and_copying_state_at_rest_is_no_touch(make: Make, tmp_path: Path) -> None:
    rig = lazy(make)
    rig.policy.save_checkpoint(tmp_path / "checkpoint")
    assert len(rig.policy.state_dict()) == len(rig.model.state_dict())
    rig.policy.memory()
    assert leave(rig) == 0


def test_a_forward_at_rest_puts_the_caller_in_charge(make: Make) -> None:
    rig = lazy(make)
    rig.model(rig.batch["input_ids"])
    rig.model.head.weight.data.mul_(2.0)
    assert dirty(rig)["params"] == size(*rig.model.parameters())
    assert leave(rig) == weights_size(rig)
    assert leave(rig) == 0


class Writing(nn.Module):
    """Writes a weight in its forward, as spectral norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, input_ids: Tensor) -> Tensor:
        self.embed.weight.data.mul_(0.5)
        out: Tensor = self.head(self.embed(input_ids))
        return out


def test_what_a_forward_at_rest_writes_is_kept(make: Make) -> None:
    rig = lazy(make)
    session = rig.session
    model = Writing()
    policy = session.attach(model, name="writer", device=EmulatedDevice())
    policy.offload()
    with policy.refit_mode():
        pass
    before = model.embed.weight.detach().clone()
    model(rig.batch["input_ids"])
    policy.offload()
    assert torch.equal(policy.state_dict()["embed.weight"], before * 0.5)


@pytest.mark.parametrize("how", ["step", "load", "submodule load"])
def test_what_the_users_own_step_or_load_changes_at_rest_is_kept(make: Make, how: str) -> None:
    rig = lazy(make)
    if how == "step":  # of an optimizer that nobody attached, and that changes no version counter
        weight = rig.model.head.weight
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.1, fused=True).step()
        weight.grad = None
        assert leave(rig) == size(weight)
        return
    target = rig.model if how == "load" else rig.model.head
    target.load_state_dict({name: torch.ones_like(value) for name, value in target.state_dict().items()})
    assert leave(rig) == weights_size(rig), "a load is not asked what it changed"
    assert rig.policy.state_dict()["head.bias"].eq(1).all()


def test_an_offloaded_scope_under_lazy_notices_a_write(make: Make) -> None:
    rig = lazy(make)
    with rig.policy.logprob_mode():
        with rig.policy.offloaded():
            assert rig.seen()["params"] == "device"
            rig.model.head.weight.data.mul_(2.0)
        rig.policy.get_logprobs(rig.batch)
    assert leave(rig) == size(rig.model.head.weight)


def test_a_policy_that_rests_resident_is_in_the_callers_hands(make: Make) -> None:
    rig = make(release="lazy", base="resident")
    rig.policy.offload()
    rig.policy.switch(rs.Mode.RESIDENT)
    with rig.policy.logprob_mode():
        rig.policy.get_logprobs(rig.batch)
    rig.model.head.weight.data.mul_(2.0)
    assert dirty(rig)["params"] == size(*rig.model.parameters())
    before = rig.contents()
    rig.policy.offload()
    assert rig.contents() == before


def test_batch_statistics_written_in_a_read_only_scope_are_dirty(make: Make) -> None:
    rig = lazy(make, model=Normed())
    with rig.policy.refit_mode():
        rig.model.train()(rig.batch["input_ids"])
    assert leave(rig) == size(*rig.model.buffers())


def test_a_copy_made_for_a_partner_does_not_stand_for_what_training_writes_later(make: Make) -> None:
    rig = make()
    trunk, heads = nn.Embedding(11, 6), (nn.Linear(6, 11), nn.Linear(6, 11))
    actor, critic = (
        rig.session.attach(
            nn.Sequential(trunk, head), name=f"part{index}", device=rig.device, reference=None if index else "copy"
        )
        for index, head in enumerate(heads)
    )
    actor.offload()
    critic.offload()
    with critic.training_mode(), actor.logprob_mode():
        actor.get_reference_policy_logprobs(rig.batch)
        trunk.weight.data.add_(1)
        written = trunk.weight.detach().clone()
    assert critic.placement["params"] is rs.Tier.HOST
    assert torch.equal(critic.state_dict()["0.weight"], written)


def test_a_failed_eviction_loses_nothing_and_the_next_one_works(make: Make) -> None:
    rig = lazy(make)
    rig.model.head.weight.data.mul_(2.0)
    before = rig.contents()
    rig.device.fail("free", 2, "after")
    with pytest.raises(rs.TransitionError):
        rig.policy.offload()
    assert rig.contents() == before
    rig.model.head.bias.data.mul_(2.0)
    leave(rig)
    assert leave(rig) == 0


def test_a_model_that_is_given_back_carries_no_marks(make: Make) -> None:
    rig = lazy(make)
    assert any(torch._C._is_cow_tensor(p) for p in rig.model.parameters())
    rig.policy.detach()
    assert not any(torch._C._is_cow_tensor(p) for p in rig.model.parameters())


def test_a_compiled_model_is_not_compiled_again_for_having_been_at_rest(make: Make) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        del inputs
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model = Normed()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    session = rs.Session(release="lazy", verify="checksum")
    policy = session.attach(compiled, name="compiled", device=EmulatedDevice())
    batch = {"input_ids": torch.zeros(4, 5, dtype=torch.long), "input_lengths": torch.full((4,), 5)}
    for _ in range(3):
        with policy.logprob_mode():
            want = policy.get_logprobs(batch)["logprobs"]
        with torch.no_grad():  # at rest: the attached wrapper, one that nobody attached, and a part alone
            model.eval()
            compiled(batch["input_ids"])
            torch.compile(model, backend=backend, fullgraph=True)(batch["input_ids"])
            model.head(torch.zeros(1, 6))
        policy.offload()
    with policy.logprob_mode():
        assert torch.equal(policy.get_logprobs(batch)["logprobs"], want)
    session.close()
    assert len(graphs) <= 2, "once for each wrapper"


# -- the weights epoch -------------------------------------------------------------------------------------------------------


def epoch(rig: Rig) -> int:
    number: int = rig.policy._control.ask("weights_epoch")
    return number


def bits(rig: Rig) -> list[bytes]:
    return [v.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for v in rig.policy.state_dict().values()]


def _step(rig: Rig) -> None:
    with rig.policy.training_mode():
        rig.train()


def _train_nothing(rig: Rig) -> None:
    with rig.policy.training_mode():
        pass


def _logprobs(rig: Rig) -> None:
    with rig.policy.logprob_mode():
        rig.policy.get_logprobs(rig.batch)


def _refit(rig: Rig) -> None:
    with rig.policy.refit_mode():
        list(rig.policy.iter_weights(bucket_nbytes=64))


def _generate(rig: Rig) -> None:
    with rig.policy.generation_mode() as engine:
        engine.generate(rig.batch)


def _nested(rig: Rig) -> None:
    with rig.policy.logprob_mode(), rig.policy.refit_mode(), rig.policy.offloaded():
        pass


def _write_data(rig: Rig) -> None:
    rig.model.head.weight.data.add_(1)


def _write_buffer(rig: Rig) -> None:
    rig.model.scale.add_(1)


def _write_numpy(rig: Rig) -> None:
    rig.model.scale.numpy()[0] += 1


def _write_address(rig: Rig) -> None:
    ctypes.memset(rig.model.scale.data_ptr(), 1, 4)


def _load(rig: Rig) -> None:
    rig.model.load_state_dict({name: torch.ones_like(value) for name, value in rig.policy.state_dict().items()})


def _other_weight(rig: Rig) -> None:
    layer = rig.model.frozen[0]
    layer.weight = nn.Parameter(layer.weight.detach() + 1, requires_grad=False)


def _other_memory(rig: Rig) -> None:
    rig.model.head.weight.data = torch.ones_like(rig.model.head.weight)


def _turned(rig: Rig) -> None:
    rig.model.frozen[0].weight.data = rig.model.frozen[0].weight.data.t()


def _other_layer(rig: Rig) -> None:
    rig.model.frozen[0] = nn.Linear(6, 6).requires_grad_(requires_grad=False).eval()


def _read(rig: Rig) -> None:
    assert rig.model.head.weight.norm().isfinite()


def _forward(rig: Rig) -> None:
    with torch.no_grad():
        rig.model(rig.batch["input_ids"])


def _resident(rig: Rig) -> None:
    rig.policy.switch(rs.Mode.RESIDENT)
    rig.policy.switch(rs.Mode.OFFLOADED)


def _fail(rig: Rig) -> None:
    rig.device.fail("free", 1, "before")
    with pytest.raises(rs.TransitionError):
        rig.policy.offload()


NO_CHANGE: dict[str, Callable[[Rig], Any]] = {
    "logprobs": _logprobs,
    "refit": _refit,
    "generate": _generate,
    "nested read-only scopes": _nested,
    "evicted": lambda rig: rig.policy.offload(),
    "evicted and back": lambda rig: (rig.policy.offload(), _logprobs(rig)),
    "a read at rest": _read,
    "state_dict": lambda rig: rig.policy.state_dict(),
    "memory": lambda rig: rig.policy.memory(),
}
MAY_CHANGE: dict[str, Callable[[Rig], Any]] = {
    "training without a step": _train_nothing,
    "resident": _resident,
    "a forward at rest": _forward,
    "a failed eviction": _fail,
    "a pointer taken": lambda rig: rig.model.head.weight.data_ptr(),
}
CHANGE: dict[str, Callable[[Rig], Any]] = {
    "a step": _step,
    ".data": _write_data,
    "a buffer": _write_buffer,
    "numpy": _write_numpy,
    "address": _write_address,
    "load_state_dict": _load,
    "another parameter": _other_weight,
    "other memory": _other_memory,
    "another view": _turned,
    "another layer": _other_layer,
}


@pytest.mark.parametrize("operation", NO_CHANGE)
@pytest.mark.parametrize("asked", [False, True])
def test_the_epoch_stands_while_nothing_can_have_changed(make: Make, operation: str, asked: bool) -> None:
    rig = lazy(make)
    if asked:
        epoch(rig)
    before, number = bits(rig), epoch(rig)
    NO_CHANGE[operation](rig)
    assert epoch(rig) == number
    assert bits(rig) == before
    with rig.policy.refit_mode():
        assert epoch(rig) == number == epoch(rig)
    assert epoch(rig) == number


@pytest.mark.parametrize("operation", [*MAY_CHANGE, *CHANGE])
def test_the_epoch_moves_on_when_something_may_have_changed(make: Make, operation: str) -> None:
    rig = lazy(make)
    before, number = bits(rig), epoch(rig)
    assert epoch(rig) == number
    {**MAY_CHANGE, **CHANGE}[operation](rig)
    assert (bits(rig) != before) == (operation in CHANGE)
    with rig.policy.refit_mode():
        inside = epoch(rig)
        assert inside > number
        assert epoch(rig) == inside


@pytest.mark.parametrize("operation", CHANGE)
def test_a_change_is_counted_when_nobody_asks_before_it_is_over(make: Make, operation: str) -> None:
    rig = lazy(make)
    with rig.policy.refit_mode():
        number, before = epoch(rig), bits(rig)
    CHANGE[operation](rig)
    rig.policy.offload()
    _logprobs(rig)
    with rig.policy.refit_mode():
        assert bits(rig) != before
        assert epoch(rig) > number


def test_while_the_caller_is_in_charge_every_reading_differs(make: Make) -> None:
    rig = lazy(make)
    with rig.policy.training_mode():
        numbers = [epoch(rig) for _ in range(3)]
        with rig.policy.logprob_mode():
            inner = [epoch(rig) for _ in range(3)]
        numbers += [inner[0], epoch(rig)]
    numbers.append(epoch(rig))
    assert numbers == sorted(set(numbers))
    assert len(set(inner)) == 1


def test_batch_statistics_written_in_a_read_only_scope_move_the_epoch(make: Make) -> None:
    rig = lazy(make, model=Normed())
    with rig.policy.refit_mode():
        number = epoch(rig)
        rig.model.train()(rig.batch["input_ids"])
        assert epoch(rig) > number


def test_reading_the_epoch_in_a_scope_looks_at_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = lazy(make)
    with rig.policy.refit_mode():
        number = epoch(rig)
        ledger = rig.policy._control.group.worker.engine.ledger
        monkeypatch.setattr(ledger, "refresh", lambda **_: pytest.fail("a look"))
        assert epoch(rig) == number
        monkeypatch.undo()


def test_what_a_partner_writes_moves_the_epoch_of_who_shares_it(make: Make) -> None:
    rig = lazy(make)
    other = nn.Sequential(rig.model.embed, nn.Linear(6, 3))
    critic = rig.session.attach(other, torch.optim.SGD(other.parameters(), lr=0.1), name="critic", device=rig.device)
    critic.offload()
    with critic.logprob_mode():
        pass
    _logprobs(rig)
    number = epoch(rig)
    assert epoch(rig) == number
    with critic.training_mode():
        inside = epoch(rig)
        assert inside > number
        assert epoch(rig) > inside
        rig.model.embed.weight.data.add_(1)
    with rig.policy.refit_mode():
        after = epoch(rig)
        assert after > inside
        rig.model.embed.weight.data.add_(1)  # through the critic, which is at rest
        assert epoch(rig) > after


def test_what_a_partner_wrote_counts_in_a_scope_when_the_partner_is_gone(make: Make) -> None:
    rig = lazy(make)
    other = nn.Sequential(rig.model.embed, nn.Linear(6, 3))
    critic = rig.session.attach(other, torch.optim.SGD(other.parameters(), lr=0.1), name="critic", device=rig.device)
    with rig.policy.refit_mode():
        epoch(rig)
        with critic.logprob_mode():
            number = epoch(rig)
            assert epoch(rig) == number
        with critic.training_mode():
            rig.model.embed.weight.data.add_(1)
        critic.close()
        assert epoch(rig) > number


OPERATIONS = {**NO_CHANGE, **MAY_CHANGE, **CHANGE}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(st.sampled_from([*OPERATIONS, "ask", "ask in a scope"]), min_size=4, max_size=14))
def test_equal_epochs_mean_equal_bits_whatever_happened_between(make: Make, names: list[str]) -> None:
    rig = lazy(make)
    seen: dict[int, list[bytes]] = {}

    def look() -> None:
        number = epoch(rig)
        assert seen.setdefault(number, bits(rig)) == bits(rig)

    for name in names:
        if name == "ask in a scope":
            with rig.policy.refit_mode():
                look()
        elif name == "ask":
            look()
        else:
            _bring_in(rig)
            OPERATIONS[name](rig)
    look()
    leave(rig)
    rig.policy.close()


def _bring_in(rig: Rig) -> None:
    if rig.seen()["params"] != "device":
        _logprobs(rig)
