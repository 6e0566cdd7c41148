"""Storages that cannot be resized get a home of their own, and everything that shared them still does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rl_session.errors import TransitionError, UnsupportedError
from rl_session.lifecycle import Tier
from rl_session.offload.device import EmulatedDevice
from rl_session.offload.tensors import num_holders, storage_of

D, H = Tier.DEVICE, Tier.HOST
Make = Callable[..., Any]


def from_numpy(tmp_path: Path) -> nn.Module:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.from_numpy(np.random.default_rng(0).random((4, 4), dtype=np.float32)))
    return module


def mapped(tmp_path: Path) -> nn.Module:
    torch.manual_seed(1)
    torch.save(nn.Linear(4, 4).state_dict(), tmp_path / "weights.pt")
    module = nn.Linear(4, 4)
    module.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True, weights_only=True), assign=True)
    return module


def pretrained(tmp_path: Path) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    module: nn.Module = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    return module


@pytest.mark.parametrize("build", [from_numpy, mapped, pretrained])
def test_loaded_weights_go_and_come_back_bit_for_bit_with_identity_and_version(
    make: Make, equal: Any, tmp_path: Path, build: Callable[[Path], nn.Module]
) -> None:
    module = build(tmp_path)
    if build is not pretrained:
        assert not any(module.weight.untyped_storage().resizable() for _ in [0])
    world = make(module, optimizer=None)
    before = {name: p.detach().clone() for name, p in module.state_dict().items()}
    identity = {name: (id(p), p._version) for name, p in module.named_parameters()}
    resident = sum(world.scan().values())
    world.engine.refresh()
    for _ in range(2):
        world.to(H)
        assert set(world.scan().values()) == {0}
        assert world.device.resident_bytes == 0
        world.to(D)
        assert world.device.resident_bytes == resident or build is pretrained
        assert {n: (id(p), p._version) for n, p in module.named_parameters()} == identity
        assert equal({n: p.detach() for n, p in module.state_dict().items()}, before)


def test_a_pretrained_model_computes_the_same_logits_afterwards_and_stays_tied(make: Make, tmp_path: Path) -> None:
    module = pretrained(tmp_path)
    ids = torch.arange(6)[None]
    before = module(ids).logits
    world = make(module, optimizer=None)
    world.to(H)
    world.to(D)
    assert torch.equal(module(ids).logits, before)
    assert module.get_input_embeddings().weight is module.get_output_embeddings().weight


def test_aliases_and_transposed_views_stay_tied_over_the_new_home(make: Make) -> None:
    module = nn.Module()
    base = torch.from_numpy(np.arange(12, dtype=np.float32).reshape(3, 4))
    module.weight = nn.Parameter(base)
    module.register_buffer("flipped", base.t())
    module.register_buffer("row", base[1])
    world = make(module, optimizer=None)
    world.to(H)
    world.to(D)
    with torch.no_grad():
        module.weight[1, 2] = 100.0
    assert module.flipped[2, 1] == 100.0
    assert module.row.tolist() == [4.0, 5.0, 100.0, 7.0]
    assert module.flipped.stride() == (1, 4)


def test_after_numpy_was_called_on_a_parameter_it_still_moves_and_the_array_keeps_its_bytes(make: Make) -> None:
    module = nn.Linear(64, 64)
    module.register_buffer("table", torch.arange(4096.0))
    module.weight.requires_grad_(False)
    arrays = [module.weight.numpy(), module.table.numpy(), module.bias.detach().numpy()]
    before = [array.copy() for array in arrays]
    assert not module.weight.untyped_storage().resizable()
    world = make(module, optimizer=None)
    for _ in range(2):
        world.to(H)
        assert set(world.scan().values()) == {0}
        gc.collect()
        [torch.full((4096,), 7.0) for _ in range(20)]  # whatever was freed by mistake is written over
        assert all(np.array_equal(a, b) for a, b in zip(arrays, before, strict=True))
        world.to(D)
    assert torch.equal(module.weight, torch.from_numpy(before[0]))


def test_a_lazy_conjugate_keeps_its_conjugation_over_a_new_home(make: Make) -> None:
    module = nn.Module()
    base = torch.from_numpy(np.array([1 + 2j, 3 - 4j], dtype=np.complex64))
    module.register_buffer("conjugate", base.conj())
    module.register_buffer("imaginary", base.conj().imag)
    world = make(module, optimizer=None)
    world.to(H)
    world.to(D)
    assert module.conjugate.tolist() == [1 - 2j, 3 + 4j]
    assert module.imaginary.tolist() == [-2.0, 4.0]
    assert world.engine.readable(module.conjugate).tolist() == [1 - 2j, 3 + 4j]


def test_weights_shared_with_another_process_are_refused_and_stay_usable(make: Make) -> None:
    module = nn.Linear(4, 4)
    module.share_memory()
    with pytest.raises(UnsupportedError, match=r"weight(.|\n)*p\.data\.clone\(\)"):
        make(module, optimizer=None).engine.refresh()
    assert module(torch.ones(1, 4)).shape == (1, 4)


def test_a_holder_we_cannot_see_is_counted_in_a_notice(make: Make) -> None:
    world = make()
    assert world.to(H).notices == ()
    world.to(D)
    view = world.module.body.bias.detach()
    report = world.to(H)
    (notice,) = report.notices
    assert (notice.code, notice.nbytes, notice.count) == ("unknown_holders", 16, 1)
    world.to(D)
    assert torch.equal(view, world.module.body.bias.detach()), "the view sees the bytes again"


def test_a_live_graph_is_counted_as_a_holder_too(make: Make) -> None:
    world = make()
    loss = world.loss()
    (notice,) = world.to(H).notices
    assert notice.code == "unknown_holders"
    assert notice.count >= 1
    world.to(D)
    loss.backward()


def test_version_counters_are_unchanged_by_a_round_trip(make: Make) -> None:
    world = make()
    world.step()
    before = {name: tensor._version for name, tensor in world.tensors().items()}
    world.to(H)
    world.to(D)
    assert {name: tensor._version for name, tensor in world.tensors().items()} == before


@pytest.mark.parametrize("loaded", [False, True])
def test_a_graph_made_before_a_round_trip_gives_bit_identical_gradients_afterwards(make: Make, loaded: bool) -> None:
    def build() -> Any:
        world = make()
        if loaded:  # and its storages are re-homed on the way
            with torch.no_grad():
                world.module.embed.weight.data = torch.from_numpy(world.module.embed.weight.numpy().copy())
                world.module.head.weight = world.module.embed.weight
        world.step()
        return world

    plain = build()
    plain.backward()
    expected = {n: p.grad.clone() for n, p in plain.module.named_parameters() if p.grad is not None}
    world = build()
    loss = world.loss()
    world.to(H)
    world.to(D)
    loss.backward()
    gradients = {n: p.grad for n, p in world.module.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[n], expected[n]) for n in expected)


def test_the_count_of_holders_is_exact_before_and_after(make: Make) -> None:
    world = make()
    world.to(H)
    world.to(D)
    storage = storage_of(world.module.body.bias)
    unit = world.device.units[storage._cdata]
    assert num_holders(storage) == unit.num_known_holders() == 2, (
        "the parameter, and the bytes of it that the engine keeps"
    )
    keep = world.module.body.bias.detach()
    assert num_holders(storage) == 3
    assert unit.num_known_holders() == 2
    del keep


def test_a_model_that_something_else_has_offloaded_is_refused_by_name(make: Make) -> None:
    module = nn.Linear(4, 4)
    module.weight.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedError, match="weight has no bytes"):
        make(module, optimizer=None).engine.refresh()


class Labelled(EmulatedDevice):
    """As CUDA is to the CPU: only what it was given is on it, a model built elsewhere is not."""

    def is_resident(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._resident


def test_a_model_built_elsewhere_moves_in_once_and_lives_there(make: Make, equal: Any) -> None:
    world = make(device=Labelled())
    world.step()
    assert world.engine.refresh().placement["params"] is H
    before, identity = world.contents(), [id(p) for p in world.module.parameters()]
    assert world.device.resident_bytes == 0
    world.to(D)
    assert world.device.resident_bytes == sum(data.numel() for data in before.values())
    assert equal(world.contents(), before)
    world.to(H)
    assert set(world.scan().values()) == {0}
    world.to(D)
    assert equal(world.contents(), before)
    assert [id(p) for p in world.module.parameters()] == identity
    assert world.module.flipped.t().equal(world.module.body.weight)
    world.step()


def test_a_failed_move_in_leaves_the_model_where_it_was_built(make: Make, equal: Any) -> None:
    world = make(device=Labelled())
    world.step()
    before = world.contents()
    world.device.fail("synchronize", 1)
    with pytest.raises(TransitionError):
        world.to(D)
    assert world.engine.refresh().placement["params"] is H
    assert equal(world.contents(), before)
    assert world.device.resident_bytes == 0
    world.step()
    world.engine.let_go()
    world.step()
