"""Faults 44 to 56: parameters, buffers, aliases, caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from rig import Make, Net, make_batch, nll
from torch import Tensor, nn

import rl_session as rs


class Adapted(nn.Module):
    """A frozen base with low-rank adapters, named as PEFT names them."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = Net().requires_grad_(requires_grad=False)
        self.lora_A = nn.ParameterDict({"default": nn.Parameter(torch.randn(2, 11))})
        self.lora_B = nn.ParameterDict({"default": nn.Parameter(torch.zeros(11, 2))})

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        logits: Tensor = self.base_layer(input_ids)
        out: Tensor = logits + logits @ self.lora_A["default"].T @ self.lora_B["default"].T
        return out


def test_row_44_frozen_weights_and_adapters_leave_too(make: Make) -> None:
    """Others: only what is trained is moved: a frozen base or a LoRA adapter stays on the GPU.

    Here: after an exit nothing of the model is on the device, trained or not.
    By: the inventory scans the module; no name and no `requires_grad` filters it (`offload/inventory`).
    """
    rig = make(Adapted())
    with rig.policy.training_mode():
        rig.train()
    assert rig.on_device() == []
    assert rig.device.resident_bytes == 0


def test_row_45_buffers_come_back_bit_for_bit(make: Make) -> None:
    """Others: buffers are not moved, or discarded.

    Here: persistent and other buffers leave and come back with the same bits.
    By: buffers are a component of their own (`offload/inventory`).
    """
    rig = make()
    before = {name: value.clone() for name, value in rig.model.named_buffers()}
    rig.policy.offload()
    assert rig.on_device() == []
    assert rig.device.resident_bytes == 0
    with rig.policy.logprob_mode():
        assert set(before) == {"scale", "inv_freq"}
        assert all(torch.equal(value, before[name]) for name, value in rig.model.named_buffers())


def test_row_46_a_buffer_without_contents_is_refused_not_made_up(make: Make) -> None:
    """Others: a buffer that is not in the state dict (rotary frequencies) comes back uninitialised.

    Here: a tensor still on the meta device is refused by name at attach; nothing is ever filled with `empty`.
    By: a check of every tensor that is managed (`offload/tensors`).
    """
    model = Net()
    model.register_buffer("late", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(rs.UnsupportedError, match="late"):
        make(model)


class Wrapper(Tensor):
    """A wrapper subclass, as quantised and distributed tensors are: assigning its ``.data`` frees nothing."""

    inner: Tensor

    def __new__(cls, inner: Tensor) -> Self:
        made: Self = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Wrapper:
        return Wrapper(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        return func(*(unwrap(a) for a in args), **{k: unwrap(v) for k, v in (kwargs or {}).items()})


def test_row_48_what_a_wrapper_holds_is_really_freed(make: Make) -> None:
    """Others: an offload that assigns `.data` of a wrapped tensor frees nothing.

    Here: the storages inside a wrapper are found and freed; the device's own count says so.
    By: storages are resized in place, never rebound (`offload/tensors.plain_tensors`).
    """
    inner = torch.ones(64)
    rig = make(nn.Linear(4, 4), None)
    rig.policy.register("quantised", [Wrapper(inner)])
    rig.policy.offload()
    assert inner.untyped_storage().nbytes() == 0
    assert rig.device.resident_bytes == 0
    rig.policy.switch("resident")


def test_row_49_ties_and_views_move_once_and_stay_tied(make: Make) -> None:
    """Others: tied weights are copied twice, or come back as two.

    Here: a tied head, a transposed view and a slice stay the same memory, and are copied once.
    By: what moves is the storage (`offload/inventory`).
    """
    model = Net()
    model.register_buffer("transposed", model.embed.weight.detach().T, persistent=False)
    model.register_buffer("some_rows", model.embed.weight.detach()[2:5], persistent=False)
    rig = make(model, base="resident")
    shared = model.embed.weight.untyped_storage()
    copied = rig.device.bytes_out
    rig.policy.offload()
    tensors = [*model.parameters(), *model.buffers()]
    sizes = rig.policy._control.ask("sizes")
    assert rig.device.bytes_out - copied == sum(sizes.values())
    assert sum(sizes.values()) < sum(t.nbytes for t in tensors)
    rig.policy.switch("resident")
    assert model.head.weight is model.embed.weight
    assert {t.untyped_storage()._cdata for t in (model.head.weight, model.transposed, model.some_rows)} == {
        shared._cdata
    }
    with torch.no_grad():
        model.embed.weight[2, 0] = 42.0
    assert model.transposed[0, 2] == 42.0
    assert model.some_rows[0, 0] == 42.0


def test_row_51_dtypes_are_kept_each(make: Make) -> None:
    """Others: a flat buffer takes the dtype of the first tensor, and the rest is cast.

    Here: bf16, fp32, int64 and bool in one component come back bit for bit.
    By: bytes are moved, not numbers (`offload/tensors.byte_alias`).
    """
    rig = make(nn.Linear(2, 2), None)
    mixed = [
        torch.randn(5).bfloat16(),
        torch.randn(7, dtype=torch.float64),
        torch.tensor([2**62 + 1, -1]),
        torch.tensor([True, False, True]),
        torch.randn(3).to(torch.float8_e4m3fn),
    ]
    before = [t.clone() for t in mixed]
    rig.policy.register("mixed", mixed)
    rig.policy.offload()
    with rig.policy.training_mode():
        for tensor, old in zip(mixed, before, strict=True):
            assert tensor.dtype is old.dtype
            assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8))


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "zero-size": lambda: torch.empty(0, 3),
    "0-dim": lambda: torch.tensor(3.0),
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "transposed": lambda: torch.randn(3, 4).T,
    "channels-last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "offset": lambda: torch.randn(20)[7:13],
    "strided": lambda: torch.randn(20)[::3],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_53_layouts_are_kept(make: Make, layout: str) -> None:
    """Others: a copy made by shape loses strides, offsets or the memory format.

    Here: shape, stride, storage offset and contents are what they were, for every layout; sparse is refused by name.
    By: tensors are never remade: their storage is emptied and filled (`offload/engine`).
    """
    tensor = LAYOUTS[layout]()
    model = nn.Linear(2, 2)
    model.register_buffer("odd", tensor)
    facts = tensor.shape, tensor.stride(), tensor.storage_offset()
    before = tensor.clone()
    rig = make(model, None)
    rig.policy.offload()
    with rig.policy.logprob_mode():
        assert model.odd is tensor
        assert (tensor.shape, tensor.stride(), tensor.storage_offset()) == facts
        assert torch.equal(tensor, before)


def test_row_53_sparse_is_refused_by_name(make: Make) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", torch.eye(3).to_sparse())
    with pytest.raises(rs.UnsupportedError, match="odd"):
        make(model, None)


def test_row_55_caches_that_no_component_owns_are_freed_by_hooks(make: Make) -> None:
    """Others: fp8 workspaces and rotary caches stay on the GPU: they are in no parameter and no buffer.

    Here: a registry of hooks runs whenever bytes leave; the built-in ones empty workspaces of modules that have them.
    By: cache hooks on the way out (`offload/caches`).
    """

    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self._fp8_workspaces = {"weight": torch.ones(100)}

    model = nn.Sequential(Layer())
    rig = make(model, None)
    freed = []
    rig.policy.add_cache_hook(freed.append)
    rig.policy.offload()
    assert freed == [model]
    assert model[0]._fp8_workspaces == {}


def test_row_56_nested_containers_are_walked(make: Make) -> None:
    """Others: a KV cache given as a list of lists, or a LoRA in a dictionary, is missed.

    Here: an extra may be any nesting of containers and objects; every tensor in it moves.
    By: the walk over containers (`offload/inventory.reachable_tensors`).
    """
    rig = make()
    layers = [[torch.ones(4), torch.ones(4)] for _ in range(2)]
    nested = {"kv": layers, "lora": {"a": (torch.ones(2),), "b": {"c": torch.ones(3)}}}
    rig.policy.register("nested", nested)
    rig.policy.offload()
    tensors = [*layers[0], *layers[1], nested["lora"]["a"][0], nested["lora"]["b"]["c"]]  # type: ignore[index]
    assert len(tensors) == 6
    assert all(t.untyped_storage().nbytes() == 0 for t in tensors)
    with rig.policy.training_mode():
        rig.policy.train(make_batch(), nll)
        assert all(torch.equal(t, torch.ones_like(t)) for t in tensors)
