"""Touching what is away, on real ranks: a typed error on each, before FSDP gathers; nothing hangs, and all goes on."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_worker import RankWorker, batch, made
from spawned import run
from torch import nn

from rl_session.errors import OffloadedAccessError
from rl_session.lifecycle import Mode

IDS = torch.tensor([[1, 2, 3]])
HIDDEN = torch.ones(1, 3, 5)

Touch = Callable[[RankWorker, Any], Any]

TOUCHES: dict[str, Touch] = {
    "forward of the root": lambda w, p: w.model(IDS),
    "forward of a block alone": lambda w, p: w.model.layers[0](HIDDEN),  # type: ignore[index, operator]
    "forward of a layer inside a block": lambda w, p: w.model.layers[0].up(HIDDEN),  # type: ignore[index, union-attr]
    "forward of what the root shards": lambda w, p: w.model.head(HIDDEN),  # type: ignore[operator]
    "optimizer.step": lambda w, p: w.optimizer.step(),
    "state_dict": lambda w, p: w.model.state_dict(),
    "state_dict of a block": lambda w, p: w.model.layers[0].state_dict(),  # type: ignore[index, union-attr]
    "optimizer.state_dict": lambda w, p: w.optimizer.state_dict(),
    "load_state_dict": lambda w, p: w.model.load_state_dict({}, strict=False),
    "load of a block": lambda w, p: w.model.layers[0].load_state_dict({}, strict=False),  # type: ignore[index, union-attr]
    "full_tensor": lambda w, p: p.full_tensor(),
    "to_local": lambda w, p: p.to_local().sum(),
    "the shard": lambda w, p: p._local_tensor.sum(),
    "add": lambda w, p: p + 1,
    "clone": lambda w, p: p.clone(),
    "detach": lambda w, p: p.detach(),
    "data": lambda w, p: p.data,
    "copy_": lambda w, p: p.copy_(p),
    "foreach": lambda w, p: torch._foreach_add([p], [p]),
    "norm": lambda w, p: torch.nn.utils.get_total_norm([p]),
    "linear": lambda w, p: nn.functional.linear(torch.ones(2, 5), p),
    "repr": lambda w, p: repr(p),
    "deepcopy": lambda w, p: copy.deepcopy(p),
    "pickle": lambda w, p: pickle.dumps(p),
    "optimizer state": lambda w, p: w.optimizer.state[p]["exp_avg"].sum(),
    "a weight that one rank has nothing of": lambda w, p: w.model.bias.full_tensor(),  # type: ignore[union-attr, operator]
    "its state": lambda w, p: w.optimizer.state[w.model.bias]["exp_avg"].full_tensor(),  # type: ignore[index]
}


def _touched(rank: int) -> None:
    worker = made()
    worker.go(Mode.TRAINING)
    worker.train(batch(4))
    with torch.no_grad():
        before = worker.model(IDS)
    parameter = worker.model.layers[0].up.weight  # type: ignore[index, union-attr]
    worker.go(Mode.OFFLOADED)
    assert parameter.shape == (10, 5)  # metadata is no touch
    assert (parameter.requires_grad, parameter.dtype, parameter.device_mesh.size()) == (True, torch.float32, 2)
    for name, touch in TOUCHES.items():
        with pytest.raises(OffloadedAccessError) as caught:
            touch(worker, parameter)
        assert "policy 'actor'" in caught.value.attempted, name
        assert "policy." in caught.value.remedy, name
        states = {part._get_fsdp_state()._training_state.name for part in worker.worker.sources.shards.modules}
        assert states == {"IDLE"}, f"{name}: FSDP's hooks ran first"
    assert worker.away_bytes() == 0, "something gathered, or brought bytes back"
    assert not worker.worker.sources.shards.gathered()
    worker.go(Mode.TRAINING)
    with torch.no_grad():
        assert torch.equal(worker.model(IDS), before)
    worker.train(batch(4))


def test_each_touch_is_a_typed_error_on_both_ranks_and_work_goes_on() -> None:
    run(_touched, 2)


def _backward(rank: int, reshard: bool) -> None:
    worker = made(options={"reshard_after_forward": reshard})
    worker.go(Mode.TRAINING)
    loss = worker.model(IDS).sum()
    worker.worker.sources.shards.reshard()
    block = worker.model.layers[0](HIDDEN.requires_grad_()).sum()  # type: ignore[index, operator]
    worker.go(Mode.OFFLOADED)
    for graph in (loss, block):
        with pytest.raises(OffloadedAccessError, match="backward"):
            graph.backward()
    worker.worker.sources.shards.reset()
    worker.go(Mode.TRAINING)
    worker.train(batch(4))


@pytest.mark.parametrize("reshard", [True, False])
def test_backward_through_an_older_graph_is_refused_before_fsdp_gathers(reshard: bool) -> None:
    run(_backward, 2, reshard)


def _order(rank: int) -> None:
    worker = made()
    seen: list[str] = []

    def gathers(module: nn.Module, args: Any) -> None:
        seen.append("gathered")

    worker.model.register_forward_pre_hook(gathers, prepend=True)
    worker.model.layers[0].register_forward_pre_hook(gathers, prepend=True)  # type: ignore[index, union-attr]
    worker.go(Mode.OFFLOADED)
    for forward in (lambda: worker.model(IDS), lambda: worker.model.layers[0](HIDDEN)):  # type: ignore[index, operator]
        with pytest.raises(OffloadedAccessError):
            forward()
    assert seen == []
    worker.go(Mode.LOGPROB)
    with torch.no_grad():
        worker.model(IDS)
    assert seen == ["gathered", "gathered"]


def test_hooks_that_others_put_in_front_later_run_after_ours() -> None:
    run(_order, 2)
