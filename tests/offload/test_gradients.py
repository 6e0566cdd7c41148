"""Gradients: disposable once a step consumed them, kept bit for bit until then, and never lost to whoever holds one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_session.errors import OffloadedAccessError
from rl_session.lifecycle import Tier

D, H, N = Tier.DEVICE, Tier.HOST, Tier.NONE
Make = Callable[..., Any]


def live(world: Any) -> int:
    return len(world.engine.refresh().live_gradients)


def gradients(world: Any) -> dict[str, Tensor]:
    return {n: p.grad for n, p in world.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_a_step_makes_its_gradients_disposable_and_a_backward_makes_them_live_again(make: Make, options: Any) -> None:
    world = make(**options)
    assert live(world) == 0
    world.backward()
    assert live(world) == 3
    world.optimizer.step()
    assert live(world) == 3, "until the engine is told"
    world.consume()
    assert live(world) == 0
    world.backward()
    assert live(world) == 3


def test_zeroing_in_place_after_a_step_makes_gradients_live_again_and_setting_to_none_does_not(make: Make) -> None:
    world = make()
    world.step(zero=False)
    world.optimizer.zero_grad(set_to_none=False)
    assert live(world) == 3, "somebody wrote them: nobody knows what they mean to do"
    world.optimizer.zero_grad()
    assert live(world) == 0


def test_another_tensor_at_the_same_address_is_not_taken_for_a_consumed_gradient(make: Make) -> None:
    world = make()
    for _ in range(3):
        world.step()
        world.backward()
        assert live(world) == 3


def test_a_second_optimizers_step_does_not_bring_back_to_life_what_the_first_consumed(make: Make) -> None:
    world = make()
    world.backward()
    world.engine.stamps.consume([world.module.body.weight.grad])
    world.engine.stamps.consume([world.module.body.bias.grad])
    assert live(world) == 1


def test_live_gradients_go_to_the_host_and_come_back_bit_for_bit(make: Make, equal: Any) -> None:
    world = make()
    world.backward()
    identity = {n: id(g) for n, g in gradients(world).items()}
    before = {n: g.clone() for n, g in gradients(world).items()}
    world.to(H)
    assert world.engine.placement["grads"] is H
    with pytest.raises(OffloadedAccessError, match=r"body\.bias\.grad"):
        world.module.body.bias.grad + 1
    assert live(world) == 3, "an open step is open wherever its gradients are"
    world.to(D)
    assert equal(gradients(world), before)
    assert {n: id(g) for n, g in gradients(world).items()} == identity
    weights = sum(data.numel() for name, data in world.contents().items() if not name.startswith("grads"))
    assert world.pool.in_use_bytes == weights, "gradients change every step: their host buffers are free for others"
    world.to(H)
    world.to(D)
    world.backward()
    assert all(torch.equal(g, 2 * before[n]) for n, g in gradients(world).items()), "and accumulate"


def test_dropped_gradients_are_none_and_their_memory_is_free(make: Make) -> None:
    world = make()
    world.step(zero=False)
    world.engine.refresh()
    held = world.device.resident_bytes
    nbytes = sum(g.nbytes for g in gradients(world).values())
    report = world.to(D, grads=N)
    assert report.dropped_bytes == nbytes
    assert gradients(world) == {}
    assert world.device.resident_bytes == held - nbytes
    assert world.engine.placement["grads"] is N
    assert world.device.bytes_out == 0, "nothing was copied"
    world.step()


def test_a_gradient_that_a_user_variable_or_view_holds_keeps_its_bytes_when_it_is_dropped(make: Make) -> None:
    world = make()
    world.step(zero=False)
    variable, view = world.module.body.bias.grad, world.module.embed.weight.grad.detach()
    before = [variable.clone(), view.clone()]
    world.to(D, grads=N)
    assert world.module.body.bias.grad is None
    assert world.module.embed.weight.grad is None
    assert torch.equal(variable, before[0])
    assert torch.equal(view, before[1])
    assert world.device.resident_bytes >= variable.nbytes + view.nbytes, "memory that is held is counted"


def test_a_gradient_set_to_none_while_it_is_away_gives_its_buffer_back(make: Make) -> None:
    world = make()
    world.step()
    world.to(H)
    in_use = world.pool.in_use_bytes
    world.to(D)
    world.backward()
    world.to(H)
    assert world.pool.in_use_bytes > in_use
    world.optimizer.zero_grad()
    gc.collect()
    world.engine.refresh()
    assert world.pool.in_use_bytes == in_use
    world.to(D)
    world.step()


@pytest.mark.parametrize("home", ["onload", "let_go", "let_go without room"])
def test_a_gradient_variable_held_while_away_comes_home_with_the_parameters(make: Make, home: str) -> None:
    world = make()
    world.backward()
    variable = world.module.body.bias.grad
    before = variable.clone()
    world.to(H)
    world.optimizer.zero_grad()
    with pytest.raises(OffloadedAccessError):
        variable.sum()
    world.to(H)
    if home == "onload":
        world.to(D, optimizer=H)
    else:
        world.device.capacity = 0 if "without" in home else None
        world.engine.let_go()
    assert torch.equal(variable, before)
    assert type(variable) is Tensor
    assert live(world) == 0, "the policy has let go of it: it is no open step"
    assert world.pool.in_use_bytes == (world.pool.in_use_bytes if home == "onload" else 0)


def flat(module: nn.Module) -> Tensor:
    """A flat gradient buffer with a ``main_grad`` view for each parameter, as Megatron keeps it."""
    trained = [p for p in module.parameters() if p.requires_grad]
    buffer = torch.zeros(sum(p.numel() for p in trained))
    start = 0
    for parameter in trained:
        parameter.main_grad = buffer[start : start + parameter.numel()].view_as(parameter)  # type: ignore[attr-defined]
        start += parameter.numel()
    return buffer


def test_a_flat_buffer_with_live_views_is_freed_in_place_and_comes_back_as_zeros(make: Make) -> None:
    world = make()
    buffer = flat(world.module)
    weight = world.module.body.weight
    main_grad, identity = weight.main_grad, id(weight.main_grad)
    buffer.fill_(3.0)
    world.engine.stamps.consume(p.main_grad for p in world.module.parameters() if hasattr(p, "main_grad"))
    world.engine.refresh()
    held = world.device.resident_bytes
    report = world.to(D, grads=N)
    assert report.dropped_bytes == buffer.nbytes
    assert world.device.resident_bytes == held - buffer.nbytes
    assert world.engine.refresh().freed_in_place == {"grads"}
    for tensor in (main_grad, buffer):
        with pytest.raises(OffloadedAccessError, match="freed"):
            tensor.sum()
    assert live(world) == 0
    world.to(D)
    assert buffer.eq(0).all()
    assert weight.main_grad is main_grad
    assert id(main_grad) == identity
    main_grad.fill_(1.0)
    assert buffer.sum() == weight.numel(), "the views are views of the buffer as before"
    assert live(world) >= 1


def test_a_flat_buffer_in_an_open_step_goes_to_the_host_whole_and_only_once(make: Make) -> None:
    world = make()
    buffer = flat(world.module)
    buffer.copy_(torch.arange(buffer.numel()))
    copied = world.device.bytes_out
    world.to(D, grads=H)
    assert world.device.bytes_out - copied == buffer.nbytes
    world.to(D)
    assert torch.equal(buffer, torch.arange(buffer.numel()).float())


def test_discarded_live_gradients_in_a_flat_buffer_are_no_open_step_any_more(make: Make) -> None:
    world = make()
    buffer = flat(world.module)
    buffer.fill_(3.0)
    assert live(world) == 3
    world.to(D, grads=N)
    assert live(world) == 0
    world.to(D)
    assert live(world) == 0
    assert buffer.eq(0).all()


@pytest.mark.parametrize("held", [True, False])
def test_gradients_that_are_views_of_a_flat_buffer_survive_moves_and_drops(make: Make, held: bool) -> None:
    world = make()
    buffer = flat(world.module)
    buffer.copy_(torch.arange(buffer.numel()))
    for parameter in world.module.parameters():
        if hasattr(parameter, "main_grad"):
            parameter.grad = parameter.main_grad
            del parameter.main_grad
    if not held:
        del buffer
    before = {n: g.clone() for n, g in gradients(world).items()}
    identity = {n: id(g) for n, g in gradients(world).items()}
    world.to(H)
    world.to(D)
    assert all(torch.equal(g, before[n]) for n, g in gradients(world).items())
    world.to(D, grads=N)
    assert world.engine.placement["grads"] is N
    world.to(D)
    assert {n: id(g) for n, g in gradients(world).items()} == identity
    assert all(g.eq(0).all() for g in gradients(world).values())
    world.step()


def test_gradients_on_masters_move_and_drop_with_the_others(make: Make) -> None:
    masters = [torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True)]
    world = make(optimizer=torch.optim.SGD(masters, lr=0.1, momentum=0.9), masters=masters)
    for master in masters:
        master.grad = torch.ones_like(master)
    world.optimizer.step()
    world.to(H)
    assert set(world.scan().values()) == {0}
    world.to(D, grads=N)
    assert all(master.grad is None for master in masters)


def test_accumulating_over_four_round_trips_equals_the_uninterrupted_run(make: Make) -> None:
    plain, moved = make(), make()
    for _ in range(4):
        plain.backward()
        moved.backward()
        moved.to(H)
        moved.to(D)
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain).values(), gradients(moved).values(), strict=True))


def test_a_sparse_gradient_is_refused_by_name(make: Make) -> None:
    from rl_session.errors import UnsupportedError

    module = nn.Embedding(7, 4, sparse=True)
    world = make(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    module(torch.arange(3)).sum().backward()
    with pytest.raises(UnsupportedError, match=r"weight\.grad(.|\n)*sparse"):
        world.engine.refresh()
    module.zero_grad()
    world.to(H)
