"""Outside every scope anything may write what lies on the device: what nobody touched is dropped, the rest is copied."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save as safetensors_save
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rl_session.lifecycle import Tier
from rl_session.offload import unit as units
from rl_session.offload import write_barrier
from rl_session.offload.device import EmulatedDevice
from rl_session.offload.host_pool import HostPool
from rl_session.offload.swap import capture, replaced
from rl_session.offload.tensors import library_access
from rl_session.offload.watch import Stance

D, H = Tier.DEVICE, Tier.HOST
Make = Callable[..., Any]
Touch = Callable[[nn.Parameter], Any]
ONE = 8 * 8 * 4
"""Bytes of one weight."""
ALL = 2 * ONE + 64
"""Bytes of the model."""


class Pair(nn.Module):
    """Two weights and a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.register_buffer("count", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


def at_rest(make: Make, **options: Any) -> Any:
    """A world on the device with host copies, outside every scope."""
    world = make(Pair(), optimizer=None, **options)
    world.to(H)
    world.to(D)
    world.engine.rest()
    return world


def leave(world: Any) -> int:
    """Bytes that an eviction copies; contents are compared on the way, and with what they were."""
    before, copied = world.contents(), world.device.bytes_out
    world.to(H)
    assert world.device.resident_bytes == 0
    out: int = world.device.bytes_out - copied
    world.to(D)
    after = world.contents()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before), "bytes were lost"
    return out


def dirty_bytes(world: Any) -> int:
    held = world.engine.on_device(world.engine.refresh())
    return sum(dirty for _, dirty in held.values())


def test_what_nobody_touched_is_dropped(make: Make) -> None:
    world = at_rest(make)
    assert dirty_bytes(world) == 0
    assert leave(world) == 0
    assert leave(world) == 0, "brought in at rest, it rests as well"


def test_nothing_about_a_tensor_at_rest_is_different(make: Make) -> None:
    world = make(Pair(), optimizer=None)
    weight = world.module.first.weight
    world.to(H)
    world.to(D)
    version = weight._version
    world.engine.rest()
    assert type(weight) is nn.Parameter
    assert type(world.module.count) is Tensor
    assert weight._version == version
    assert type(copy.deepcopy(weight)) is nn.Parameter


def test_optimizer_state_rests_as_weights_do(make: Make) -> None:
    world = make()
    world.step()
    world.to(H)
    world.to(D)
    world.engine.rest()
    assert leave(world) == 0
    state = world.optimizer.state[world.module.body.bias]["exp_avg"]
    state.data.add_(1)
    assert leave(world) == state.nbytes


# -- what writes ---------------------------------------------------------------------------------------------------------


def set_item(w: nn.Parameter) -> None:
    w[0] = 3.0


def add_in_place(w: nn.Parameter) -> None:
    w += 1


def storage_item(w: nn.Parameter) -> None:
    w.untyped_storage()[3] = 7


def through_numpy(w: nn.Parameter) -> None:
    w.detach().numpy()[...] = 3


def through_data(w: nn.Parameter) -> None:
    other = torch.ones(1)
    other.data = w
    other.mul_(2)


def through_set(w: nn.Parameter) -> None:
    torch.ones(1).set_(w).mul_(2)


def optimizer_step(cls: type[torch.optim.Optimizer], **options: Any) -> Touch:
    def step(w: nn.Parameter) -> None:
        w.grad = torch.ones_like(w)
        cls([w], lr=0.1, **options).step()  # type: ignore[call-arg]
        w.grad = None

    return step


def through_address(w: nn.Parameter) -> None:
    ctypes.memset(w.data_ptr(), 1, 8)


def through_storage_address(w: nn.Parameter) -> None:
    ctypes.memset(w.untyped_storage().data_ptr(), 1, 8)


def batch_norm(w: nn.Parameter) -> None:
    rows = w.detach()
    F.batch_norm(torch.arange(32.0).reshape(4, 8), rows[0], rows[1], training=True)


def scripted(w: nn.Parameter) -> None:
    graph = torch._C.parse_ir(
        """
        graph(%x : Tensor):
          %two : int = prim::Constant[value=2]()
          %y : Tensor = aten::mul_(%x, %two)
          return (%y)
        """
    )
    torch._C._create_function_from_graph("double", graph)(w)


WRITES: dict[str, Touch] = {
    "mul_": lambda w: w.mul_(2),
    "copy_": lambda w: w.copy_(torch.ones(8, 8)),
    "fill_": lambda w: w.fill_(1),
    "zero_": lambda w: w.zero_(),
    "normal_": lambda w: w.normal_(),
    "set item": set_item,
    "+=": add_in_place,
    ".data": lambda w: w.data.mul_(2),
    "detach": lambda w: w.detach().add_(1),
    "a view of a view": lambda w: w.detach().T[1:3].neg_(),
    "other dtype": lambda w: w.detach().view(torch.uint8).fill_(1),
    "init": nn.init.ones_,
    "out=": lambda w: torch.add(torch.ones(8, 8), 1, out=w),
    "mm out=": lambda w: torch.mm(torch.ones(8, 8), torch.ones(8, 8), out=w),
    "cat out=": lambda w: torch.cat([torch.ones(4, 8), torch.ones(4, 8)], out=w),
    "sort out=": lambda w: torch.sort(torch.rand(8, 8), out=(w, torch.empty(8, 8, dtype=torch.long))),
    "qr out=": lambda w: torch.linalg.qr(torch.rand(8, 8), out=(w, torch.empty(0))),
    "foreach": lambda w: torch._foreach_add_([w], 1.0),
    "foreach copy": lambda w: torch._foreach_copy_([w], [torch.ones(8, 8)]),
    "aten": lambda w: torch.ops.aten.add_.Tensor(w, 1),
    "index_put_": lambda w: w.index_put_((torch.tensor([0]),), torch.tensor(5.0)),
    "index_copy_": lambda w: w.index_copy_(0, torch.tensor([0]), torch.ones(1, 8)),
    "scatter_": lambda w: w.scatter_(0, torch.zeros(1, 8, dtype=torch.long), 9.0),
    "masked_fill_": lambda w: w.masked_fill_(w > 0, 9.0),
    "clamp_": lambda w: w.clamp_(-0.01, 0.01),
    "bernoulli_": lambda w: w.bernoulli_(),
    "apply_": lambda w: w.data.apply_(lambda _: 1.0),
    "map_": lambda w: w.data.map_(torch.ones(8, 8), lambda _, b: b),
    "vmap": torch.vmap(lambda row: row.mul_(2)),
    "functionalize": lambda w: torch.func.functionalize(lambda x: x.mul_(2))(w.detach()),
    "storage item": storage_item,
    "storage fill": lambda w: w.untyped_storage().fill_(3),
    "storage copy": lambda w: w.untyped_storage().copy_(torch.ones(8, 8).untyped_storage()),
    "numpy": through_numpy,
    "a tensor given it as .data": through_data,
    "a tensor set_ to it": through_set,
    "dlpack": lambda w: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(w)).mul_(2),
    "numpy of dlpack": lambda w: torch.from_numpy(np.from_dlpack(w.detach())).mul_(2),
    "frombuffer": lambda w: torch.frombuffer(memoryview(w.detach().numpy()), dtype=torch.float32).mul_(2),
    "address": through_address,
    "address of the storage": through_storage_address,
    "SGD, fused": optimizer_step(torch.optim.SGD, fused=True),
    "AdamW, fused": optimizer_step(torch.optim.AdamW, fused=True),
    "AdamW, foreach": optimizer_step(torch.optim.AdamW, foreach=True),
    "AdamW, plain": optimizer_step(torch.optim.AdamW, foreach=False),
    "batch norm in training": batch_norm,
    "embedding that renormalises": lambda w: F.embedding(torch.tensor([0, 1]), w, max_norm=0.01),
    "compiled": torch.compile(lambda x: x.mul_(2), backend="aot_eager"),
    "C++ program": scripted,
    "load_state_dict": lambda w: nn.ParameterList([w]).load_state_dict({"0": torch.ones(8, 8)}),
}
SILENT = frozenset(
    {".data", "storage item", "storage fill", "storage copy", "numpy", "a tensor given it as .data"}
    | {"a tensor set_ to it", "dlpack", "numpy of dlpack", "frombuffer", "address", "address of the storage"}
    | {"SGD, fused", "AdamW, fused", "apply_", "map_"}
)
"""Those that change no version counter: nothing but the barrier can tell."""


@pytest.mark.parametrize("write", WRITES)
def test_a_write_of_any_kind_makes_exactly_its_storage_dirty(make: Make, write: str) -> None:
    world = at_rest(make)
    weight = world.module.first.weight
    before, version = weight.detach().clone(), weight._version
    with torch.no_grad():
        WRITES[write](weight)
    assert not torch.equal(weight, before), "it writes"
    if write in SILENT:
        assert weight._version == version
    assert dirty_bytes(world) == ONE
    assert leave(world) == ONE
    world.engine.protect()
    assert leave(world) == 0, "the copy stands for it from now on"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


COLLECTIVES: dict[str, Touch] = {
    "broadcast": lambda w: dist.broadcast(w, 0),
    "all_reduce": dist.all_reduce,
    "scatter": lambda w: dist.scatter(w, [torch.ones(8, 8)], 0),
    "all_gather": lambda w: dist.all_gather([w], torch.ones(8, 8)),
    "reduce_scatter": lambda w: dist.reduce_scatter(w, [torch.ones(8, 8)]),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_collective_that_may_write_a_weight_makes_it_dirty(make: Make, collective: str) -> None:
    world = at_rest(make)
    with torch.no_grad():
        COLLECTIVES[collective](world.module.first.weight)
    assert leave(world) == ONE


SHARDED: dict[str, Touch] = {
    "in place": lambda w: w.mul_(2),
    "local": lambda w: w.to_local().mul_(2),
    "data of local": lambda w: w.to_local().data.mul_(2),
    "collective": lambda w: dist.broadcast(w.to_local(), 0),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("touch", [*SHARDED, None])
def test_the_local_shard_of_a_distributed_tensor_rests_as_a_tensor_does(make: Make, touch: str | None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    module = Pair()
    module.first.weight = nn.Parameter(distribute_tensor(module.first.weight.detach(), mesh, [Shard(0)]))
    world = make(module, optimizer=None)
    world.to(H)
    world.to(D)
    world.engine.rest()
    if touch is not None:
        with torch.no_grad():
            SHARDED[touch](module.first.weight)
    assert leave(world) == (0 if touch is None else ONE)


REPLACED: dict[str, Touch] = {
    "setting .data": lambda w: setattr(w, "data", torch.ones(8, 8)),
    "set_": lambda w: w.set_(torch.ones(8, 8)),
    "vector_to_parameters": lambda w: nn.utils.vector_to_parameters(torch.ones(64), [w]),
}


@pytest.mark.parametrize("how", REPLACED)
def test_a_weight_that_got_other_memory_is_copied(make: Make, how: str) -> None:
    world = at_rest(make)
    with torch.no_grad():
        REPLACED[how](world.module.first.weight)
    assert torch.equal(world.module.first.weight, torch.ones(8, 8))
    assert leave(world) == ONE


# -- what reads ----------------------------------------------------------------------------------------------------------

READS: dict[str, Touch] = {
    "clone": lambda w: w.clone(),
    "norm": lambda w: w.norm(),
    "linear": lambda w: F.linear(torch.ones(2, 8), w),
    "matmul": lambda w: torch.ones(2, 8) @ w,
    "bmm": lambda w: torch.bmm(w[None], w[None]),
    "embedding": lambda w: F.embedding(torch.tensor([1]), w),
    "convolution": lambda w: F.conv1d(torch.ones(1, 8, 5), w[:, :, None]),
    "attention": lambda w: F.scaled_dot_product_attention(w[None, None], w[None, None], w[None, None]),
    "layer norm": lambda w: F.layer_norm(torch.ones(2, 8), (8,), w[0], w[1]),
    "cast": lambda w: w.bfloat16(),
    "softmax": lambda w: w.softmax(-1),
    "foreach norm": lambda w: torch._foreach_norm([w])[0],
    "isfinite": lambda w: torch.isfinite(w).all(),
    "item": lambda w: w[0, 0].item(),
    "list": lambda w: w.tolist(),
    "print": repr,
    "equal": lambda w: torch.equal(w, torch.ones(8, 8)),
    "torch.tensor": lambda w: torch.tensor(w.tolist()),
    "parameters_to_vector": lambda w: nn.utils.parameters_to_vector([w]),
    "vmap": torch.vmap(lambda row: row.sum()),
    "deepcopy": copy.deepcopy,
    "state_dict": lambda w: nn.ParameterList([w]).state_dict()["0"].sum(),
    "storage": lambda w: w.untyped_storage().tolist(),
    "backward": lambda w: torch.autograd.grad(F.linear(torch.ones(2, 8), w).square().sum(), w)[0],
    "compiled": torch.compile(lambda x: x * 2, backend="aot_eager"),
}
POINTERS: dict[str, Touch] = {
    "data_ptr": lambda w: w.data_ptr() and None,
    "numpy": lambda w: float(w.detach().numpy().sum()),
    "dlpack": lambda w: torch.from_dlpack(w.detach()).sum(),
    "pickle": lambda w: len(pickle.dumps(w)),
    "torch.save": lambda w: torch.save(w, io.BytesIO()),
    "safetensors": lambda w: len(safetensors_save({"w": w.detach()})),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_through_torch_gives_the_same_and_leaves_everything_clean(make: Make, read: str) -> None:
    world = at_rest(make)
    weight = world.module.first.weight
    alone = nn.Parameter(weight.detach().clone())
    found, wanted = READS[read](weight), READS[read](alone)
    assert torch.equal(found, wanted) if isinstance(found, Tensor) else found == wanted
    del found
    assert leave(world) == 0


@pytest.mark.parametrize("take", POINTERS)
def test_whoever_gets_a_pointer_to_write_may_have_written(make: Make, take: str) -> None:
    world = at_rest(make)
    weight = world.module.first.weight
    alone = nn.Parameter(weight.detach().clone())
    found, wanted = POINTERS[take](weight), POINTERS[take](alone)
    assert found == wanted
    assert dirty_bytes(world) == ONE
    assert leave(world) == ONE


# -- what the barrier cannot tell, and what is done about it ----------------------------------------------------------------


@pytest.mark.parametrize("hold", ["view", ".data", "numpy", "given as .data"])
def test_what_something_unknown_holds_too_is_never_clean_at_rest(make: Make, hold: str) -> None:
    world = make(Pair(), optimizer=None)
    world.to(H)
    world.to(D)
    weight = world.module.first.weight
    given = torch.ones(1)
    if hold == "given as .data":
        given.data = weight
    makers = {
        "view": lambda: weight.detach()[0],
        ".data": lambda: weight.data,
        "numpy": lambda: weight.detach().numpy(),
    }
    held = makers.get(hold, lambda: given)()
    assert dirty_bytes(world) == 0, "in a scope of a read-only mode it is"
    world.engine.rest()
    assert dirty_bytes(world) == ONE
    held[...] = 5.0
    assert leave(world) == ONE
    assert world.module.first.weight[0].eq(5.0).all()


def test_a_holder_is_seen_beside_an_alias_that_left_the_storage(make: Make) -> None:
    world = make(Pair(), optimizer=None)
    world.to(H)
    world.to(D)
    first, second = world.module.first, world.module.second
    world.module.also = first.weight.detach()
    world.engine.refresh()
    world.to(H)
    world.to(D)
    held = first.weight.detach().numpy()  # writes past every barrier
    first.weight.data = second.weight.detach().clone()
    world.engine.rest()
    held[...] = 5.0
    world.module.first.weight.data = world.module.also
    assert leave(world) >= ONE
    assert first.weight.eq(5.0).all()


def test_it_stays_dirty_after_the_holder_is_gone(make: Make) -> None:
    world = make(Pair(), optimizer=None)
    world.to(H)
    world.to(D)
    held = world.module.first.weight.data
    world.engine.rest()
    held.fill_(5.0)
    del held
    world.engine.rest()
    assert dirty_bytes(world) == ONE
    assert leave(world) == ONE


def test_a_pointer_taken_at_rest_is_remembered_until_the_bytes_come_anew(make: Make) -> None:
    world = at_rest(make)
    contents = capture(world.engine, ["params"])
    weight = world.module.first.weight
    address = weight.data_ptr()
    world.engine.protect()
    with replaced(world.engine, contents, ["params"], stays_valid=True):
        pass
    assert dirty_bytes(world) == 0, "a reference pass made a host copy of it"
    world.engine.rest()
    ctypes.memset(address, 1, 8)
    assert leave(world) == ONE
    assert dirty_bytes(world) == 0, "it has other memory now"


def test_memory_that_torch_cannot_mark_is_copied_as_ever(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_barrier, "put_up", lambda _: False)
    assert units.write_barrier is write_barrier
    assert leave(at_rest(make)) == ALL


@pytest.mark.parametrize("kind", ["numpy", "shared", "file"])
def test_memory_of_others_gets_no_barrier(kind: str, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(16))
    tensor = {
        "numpy": lambda: torch.from_numpy(np.ones(4, dtype=np.float32)),
        "shared": lambda: torch.ones(4).share_memory_(),
        "file": lambda: torch.from_file(str(tmp_path / "bytes"), shared=True, size=4),
    }[kind]()
    with library_access():
        assert not write_barrier.put_up(tensor)
    tensor.add_(1)


def test_a_barrier_costs_no_copy_and_moves_nothing(make: Make) -> None:
    world = at_rest(make)
    weight = world.module.first.weight
    address = torch._C._data_address(weight)  # type: ignore[attr-defined]
    assert torch._C._is_cow_tensor(weight)  # type: ignore[attr-defined]
    weight.data.add_(1)
    assert torch._C._data_address(weight) == address  # type: ignore[attr-defined]
    world.engine.protect()
    assert not any(torch._C._is_cow_tensor(t) for t in world.module.parameters())  # type: ignore[attr-defined]


def test_an_eviction_at_rest_waits_for_every_stream_before_it_frees(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = at_rest(make)
    drained = []
    monkeypatch.setattr(EmulatedDevice, "drain", lambda device: drained.append(device.resident_bytes))
    world.to(H)
    assert drained == [ALL]
    world.to(D)
    world.engine.protect()
    world.to(H)
    assert drained == [ALL], "in a scope nothing was behind a barrier"


# -- stances -------------------------------------------------------------------------------------------------------------


def test_where_the_caller_is_in_charge_nothing_is_clean(make: Make) -> None:
    world = at_rest(make)
    world.engine.expose()
    assert world.engine.watch.stance is Stance.EXPOSED
    assert dirty_bytes(world) == ALL
    assert leave(world) == ALL


def test_what_comes_in_dirty_leaves_once_by_copy_and_then_for_nothing(make: Make) -> None:
    world = at_rest(make)
    world.engine.expose()
    world.module.first.weight.data.add_(1)
    world.engine.rest()
    assert leave(world) == ALL
    assert leave(world) == 0


def test_a_touch_at_rest_is_found_on_the_way_into_a_scope(make: Make) -> None:
    world = at_rest(make)
    world.module.first.weight.data.add_(1)
    world.engine.protect()
    assert dirty_bytes(world) == ONE
    assert leave(world) == ONE


@pytest.mark.parametrize("stance", ["rest", "expose"])
def test_the_epoch_counts_what_was_written_up_to_the_last_moment(make: Make, stance: str) -> None:
    world = at_rest(make)
    getattr(world.engine, stance)()
    number = world.engine.weights_epoch
    world.module.first.weight.data.add_(1)
    world.engine.protect()
    assert world.engine.weights_epoch > number
    assert world.engine.weights_epoch == world.engine.weights_epoch


def test_a_step_cannot_fall_back_on_a_copy_from_before_a_touch(make: Make) -> None:
    world = at_rest(make)
    world.engine.begin_snapshots()
    assert world.engine.restore_snapshot(["params"])
    world.engine.rest()
    world.module.first.weight.data.add_(1)
    written = world.module.first.weight.detach().clone()
    world.engine.refresh()
    world.engine.begin_snapshots()
    assert not world.engine.restore_snapshot(["params"])
    assert torch.equal(world.module.first.weight, written)


def test_what_the_library_reads_is_no_touch(make: Make) -> None:
    world = at_rest(make)
    with world.engine.watch.reading():
        for parameter in world.module.parameters():
            parameter.data_ptr()
    assert dirty_bytes(world) == 0
    assert leave(world) == 0


def test_a_touch_before_the_library_reads_is_still_one(make: Make) -> None:
    world = at_rest(make)
    world.module.first.weight.data.add_(1)
    with world.engine.watch.reading():
        world.module.second.weight.data_ptr()
    assert leave(world) == ONE


def test_a_failed_eviction_at_rest_loses_nothing(make: Make) -> None:
    world = at_rest(make)
    before = world.contents()
    world.device.fail("free", 2, "after")
    with pytest.raises(Exception, match="rolled back"):
        world.to(H)
    assert all(torch.equal(data, before[name]) for name, data in world.contents().items())
    world.module.second.weight.data.add_(1)
    world.module.first.weight.data.add_(1)
    assert leave(world) >= 2 * ONE


def test_what_is_given_back_has_no_barrier(make: Make) -> None:
    world = at_rest(make)
    world.engine.let_go()
    assert not any(torch._C._is_cow_tensor(t) for t in world.module.parameters())  # type: ignore[attr-defined]


# -- two policies over one storage -----------------------------------------------------------------------------------------


def partners(make: Make) -> tuple[Any, Any]:
    """Two worlds that share their first weight, on the device with host copies."""
    device, pool = EmulatedDevice(), HostPool()
    one, other = Pair(), Pair()
    other.first = one.first
    worlds = [make(module, optimizer=None, device=device, pool=pool) for module in (one, other)]
    for world in worlds:
        world.engine.refresh()
    for tier in (H, D):
        for world in worlds:
            world.to(tier)
            world.engine.protect()
    return worlds[0], worlds[1]


def leave_both(one: Any, other: Any) -> int:
    before, copied = one.contents() | other.contents(), one.device.bytes_out
    one.to(H)
    other.to(H)
    assert one.device.resident_bytes == 0
    after = one.contents() | other.contents()
    assert all(torch.equal(before[name], after[name]) for name in before)
    out: int = one.device.bytes_out - copied
    return out


def test_what_two_at_rest_share_is_dropped_when_neither_touched_it(make: Make) -> None:
    one, other = partners(make)
    one.engine.rest()
    other.engine.rest()
    assert leave_both(one, other) == 0


@pytest.mark.parametrize("who", [0, 1])
def test_a_touch_through_one_makes_it_dirty_for_both(make: Make, who: int) -> None:
    one, other = partners(make)
    one.engine.rest()
    other.engine.rest()
    (one, other)[who].module.first.weight.data.add_(1)
    assert leave_both(one, other) == ONE


def test_while_one_is_at_rest_what_it_shares_is_watched_in_the_scopes_of_the_other(make: Make) -> None:
    one, other = partners(make)
    one.engine.rest()
    other.engine.rest()
    other.engine.protect()
    other.module(torch.ones(1, 8))
    one.module.first.weight.data.add_(1)
    assert leave_both(one, other) == ONE


def test_the_scopes_of_one_leave_the_barriers_that_the_other_needs(make: Make) -> None:
    one, other = partners(make)
    one.engine.rest()
    other.engine.rest()
    other.engine.protect()
    other.module(torch.ones(1, 8))
    assert leave_both(one, other) == 0


def test_the_work_of_one_makes_it_dirty_for_the_one_at_rest(make: Make) -> None:
    one, other = partners(make)
    one.engine.rest()
    other.engine.expose()
    other.module.first.weight.data.add_(1)
    assert leave_both(one, other) >= ONE
    assert one.module.first.weight is other.module.first.weight


def test_resting_beside_one_who_writes_trusts_nothing_that_is_shared(make: Make) -> None:
    one, other = partners(make)
    other.engine.expose()
    contents = capture(one.engine, ["params"])
    one.engine.protect()
    with replaced(one.engine, contents, ["params"], stays_valid=True):
        pass
    one.engine.rest()
    other.module.first.weight.data.add_(1)
    assert leave_both(one, other) >= ONE


def test_a_reference_pass_of_one_is_no_touch_of_what_the_other_has_at_rest(make: Make) -> None:
    one, other = partners(make)
    one.engine.rest()
    contents = capture(other.engine, ["params"])
    other.engine.protect()
    with replaced(other.engine, contents, ["params"], stays_valid=True):
        pass
    assert leave_both(one, other) == 0


def test_a_storage_found_at_rest_is_watched_from_then_on(make: Make) -> None:
    one, other = partners(make)
    one.engine.rest()
    one.module.second.weight = other.module.second.weight
    one.engine.refresh()
    one.module.second.weight.data.add_(1)
    assert leave_both(one, other) == ONE
