"""Finding every tensor by scanning: wherever it hides, once a storage, and nothing changed by looking."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import attrs
import pytest
import torch
from torch import Tensor, nn

from rl_session.errors import UnsupportedError
from rl_session.lifecycle import Component, Tier
from rl_session.offload.inventory import Sources, reachable_tensors, scan

Make = Callable[..., Any]


class Slotted:
    """State of an optimizer that is no dictionary."""

    __slots__ = ("absmax", "missing")

    def __init__(self) -> None:
        self.absmax = torch.ones(3)


@attrs.define
class QuantState:
    """As bitsandbytes keeps it."""

    absmax: Tensor
    code: Tensor
    nested: Any = None


class Pair(NamedTuple):
    left: Tensor
    right: int


class HashableTensors(list[Tensor]):
    """A list subclass with an attribute."""

    extra: Tensor


def names(sources: Sources, component: str) -> set[str]:
    return {entry.name for entry in scan(sources).entries(component)}


CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda t: {"exp_avg": t},
    "list": lambda t: [1, [t]],
    "tuple": lambda t: (None, (t,)),
    "set": lambda t: {t},
    "deque": lambda t: deque([t]),
    "ordered": lambda t: OrderedDict(a=t),
    "named tuple": lambda t: Pair(t, 1),
    "attrs": lambda t: QuantState(t, t, {"deep": [t]}),
    "namespace": lambda t: SimpleNamespace(momentum=t),
    "list of lists of dicts": lambda t: [[{"a": [{"b": t}]}]],
    "default dict": lambda t: defaultdict(list, a=[t]),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_optimizer_state_is_found_in_containers_and_objects(container: str) -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = torch.ones(5)
    optimizer.state[module.weight] = {"key nobody knows": CONTAINERS[container](state)}
    (found,) = [f for f in scan(Sources(module, optimizer)).storages.values() if f.components == ("optimizer",)]
    assert list(found.aliases.values()) == [state] or found.aliases.keys() == {id(state)}
    assert found.name.startswith("optimizer.state[0]")


def test_slots_list_subclasses_and_cycles_are_walked_once() -> None:
    slotted, items = Slotted(), HashableTensors([torch.ones(2)])
    items.extra = torch.ones(3)
    looped: list[Any] = [slotted, items]
    looped.append(looped)
    assert next(name for name, _ in reachable_tensors(looped, "x")) == "x[0].absmax"
    assert len(list(reachable_tensors(looped, "x"))) >= 2


def test_scalars_of_the_optimizer_are_left_where_torch_put_them() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = scan(Sources(module, optimizer))
    assert all(entry.tensor.dim() > 0 for entry in found.entries(Component.OPTIMIZER))
    assert len(list(found.entries(Component.OPTIMIZER))) == 4


def test_looking_never_grows_the_state_of_the_optimizer(make: Make) -> None:
    world = make()
    for tier in (Tier.HOST, Tier.DEVICE):
        world.to(tier)
    assert len(world.optimizer.state) == 0
    world.step()
    assert world.module.frozen not in world.optimizer.state
    before = len(world.optimizer.state)
    world.to(Tier.HOST)
    assert len(world.optimizer.state) == before


def test_tied_parameters_and_transposed_views_are_one_storage(make: Make) -> None:
    world = make()
    found = scan(world.engine.ledger.sources)
    tied = [f for f in found.storages.values() if f.name == "embed.weight"]
    assert len(tied) == 1
    assert len(tied[0].aliases) == 1
    (viewed,) = [f for f in found.storages.values() if any(e.name == "body.weight" for e in f.entries)]
    assert set(viewed.components) == {"params", "buffers"}
    assert len(viewed.aliases) == 3, "the parameter, the view of it, and the detached tensor that it is a view of"


def test_buffers_are_found_whether_they_persist_or_not(make: Make) -> None:
    assert names(make().engine.ledger.sources, Component.BUFFERS) == {"scale", "table", "flipped"}


def test_gradients_of_every_kind_are_found(make: Make) -> None:
    master = torch.zeros(4, 4)
    master.grad = torch.ones(4, 4)
    world = make(masters=[master])
    world.backward()
    world.module.body.weight.main_grad = torch.zeros(4, 4)
    sources = world.engine.ledger.sources
    assert names(sources, Component.GRADS) == {
        *("embed.weight.grad", "body.weight.grad", "body.bias.grad", "body.weight.main_grad", "masters[0].grad")
    }
    assert "optimizer master 0" in names(sources, Component.OPTIMIZER)


def test_extras_and_a_reference_module_are_components_of_their_own(make: Make) -> None:
    ema = {"weights": [torch.ones(3)]}
    world = make(reference=nn.Linear(2, 2), extras={"ema": ema, "critic": nn.BatchNorm1d(2)})
    assert names(world.engine.ledger.sources, "ema") == {"ema['weights'][0]"}
    assert "critic.running_mean" in names(world.engine.ledger.sources, "critic")
    assert names(world.engine.ledger.sources, Component.REFERENCE) == {"reference.weight", "reference.bias"}
    world.to(Tier.HOST, ema=Tier.DEVICE)
    assert ema["weights"][0].tolist() == [1.0] * 3, "an extra has a tier of its own"
    assert world.engine.placement["critic"] is Tier.HOST


def test_what_no_component_covers_is_reported_with_its_bytes() -> None:
    module = nn.Linear(2, 2)
    module.cache = [torch.ones(100)]  # type: ignore[assignment]
    module.alias = module.weight.detach()
    module.counter = torch.ones(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.side = {"basis": torch.ones(50)}  # type: ignore[attr-defined]
    found = scan(Sources(module, optimizer))
    assert dict(found.uncovered.values()) == {"cache[0]": 400, "optimizer.side['basis']": 200}
    weight = next(f for f in found.storages.values() if f.name == "weight")
    assert id(module.alias) in weight.aliases, "a plain attribute over a known storage is an alias of it"


def test_only_a_deep_scan_walks_into_objects_that_submodules_hold() -> None:
    module = nn.Linear(2, 2)
    module.helper = SimpleNamespace(rope=torch.ones(100))  # type: ignore[assignment]
    assert not scan(Sources(module)).uncovered
    assert dict(scan(Sources(module), deep=True).uncovered.values()) == {"helper.rope": 400}


def test_odd_shapes_and_strides_come_back_as_they_were(make: Make, equal: Any) -> None:
    module = nn.Module()
    base = torch.randn(64)
    odd = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "expanded": torch.randn(3, 1).expand(3, 5),
        "channels": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "sliced": base[5:50:3],
        "other": base[50:],
        "flags": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "sixteen": torch.randn(5).half(),
        "fp8": torch.randn(5).to(torch.float8_e4m3fn),
    }
    for name, tensor in odd.items():
        module.register_buffer(name, tensor)
    world = make(module, optimizer=None)
    before = {n: t.clone() for n, t in odd.items()}
    layout = {n: (t.stride(), t.storage_offset()) for n, t in odd.items()}
    world.to(Tier.HOST)
    assert all(size == 0 for size in world.scan().values())
    assert module.empty.numel() == 0
    world.to(Tier.DEVICE)
    for name, tensor in odd.items():
        assert tensor.equal(before[name]) if name != "fp8" else tensor.float().equal(before[name].float())
        assert (tensor.stride(), tensor.storage_offset()) == layout[name]
        assert getattr(module, name) is tensor


def test_a_mix_of_dtypes_moves_by_bytes_exactly_once(make: Make, equal: Any) -> None:
    world = make()
    world.step()
    before = world.contents()
    total = sum(data.numel() for data in before.values())
    report = world.to(Tier.HOST)
    assert report.bytes_moved == total == world.device.bytes_out
    assert equal(world.contents(), before)
    world.to(Tier.DEVICE)
    assert equal(world.contents(), before)
    assert world.device.bytes_in == total


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3)


def _quantized() -> Tensor:
    with pytest.warns(UserWarning, match="deprecated"):
        return torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.quint8)


REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "meta": (lambda: torch.ones(3, device="meta"), "meta tensor"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "mkldnn": (lambda: torch.eye(3).to_mkldnn(), "mkldnn"),
    "inference": (_inference, "inference_mode"),
    "shared": (lambda: torch.ones(3).share_memory_(), "shared with another process"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_moved_is_refused_by_name_and_nothing_is_touched(make: Make, kind: str) -> None:
    build, why = REFUSED[kind]
    module = nn.Linear(2, 2)
    module.register_buffer("culprit", build())
    world = make(module, optimizer=None)
    with pytest.raises(UnsupportedError, match="culprit") as caught:
        world.engine.refresh()
    assert why in str(caught.value)
    assert caught.value.remedy
    assert module.weight.sum().isfinite()
    assert type(module.weight) is nn.Parameter


def test_a_quantized_tensor_is_refused_by_name(make: Make) -> None:
    if not hasattr(torch, "quantize_per_tensor"):
        pytest.skip("this torch has no quantized tensors any more")
    try:
        culprit = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.quint8)
    except UserWarning:
        culprit = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.quint8)
    module = nn.Linear(2, 2)
    module.register_buffer("culprit", culprit)
    with pytest.raises(UnsupportedError, match=r"culprit(.|\n)*quantized"):
        make(module, optimizer=None).engine.refresh()


class Scaled(Tensor):
    """A wrapper subclass: int8 values and a scale, as quantised weights are kept."""

    values: Tensor
    factor: Tensor

    @staticmethod
    def __new__(cls: type[Self], values: Tensor, factor: Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, values: Tensor, factor: Tensor) -> None:
        self.values, self.factor = values, factor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "factor"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["values"], inner["factor"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].values, args[0].factor)
        plain = [a.values.float() * a.factor if isinstance(a, Scaled) else a for a in args]
        return func(*plain, **(kwargs or {}))


def test_a_wrapper_subclass_moves_by_its_inner_tensors_bit_for_bit_and_is_guarded_while_away(make: Make) -> None:
    from rl_session.errors import OffloadedAccessError

    module = nn.Module()
    weight = Scaled(torch.arange(-8, 8, dtype=torch.int8).reshape(4, 4), torch.rand(4))
    module.weight = nn.Parameter(weight, requires_grad=False)
    world = make(module, optimizer=None)
    before = module.weight + 0
    assert {f.name for f in world.engine.refresh().inventory.storages.values()} == {"weight.0", "weight.1"}
    world.to(Tier.HOST)
    assert set(world.scan().values()) == {0}
    with pytest.raises(OffloadedAccessError, match="weight"):
        module.weight + 0
    world.to(Tier.DEVICE)
    assert torch.equal(module.weight + 0, before)
