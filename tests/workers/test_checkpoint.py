"""Checkpoints: bit-exact round trips, damage found before anything changes, and old ones that stand when saving fails."""

from __future__ import annotations

import collections
import copy
import io
import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from rl_session.errors import CheckpointError, CheckpointWriteError, OffloadedAccessError, RLSessionError
from rl_session.offload.guard import AwayNote, hide, reveal
from rl_session.workers import checkpoint
from rl_session.workers.checkpoint import dcp, directory

MANIFEST = directory.MANIFEST


class TiedModel(nn.Module):
    """Tied weights, a buffer that is saved, one that is not, a frozen parameter and one that never gets a gradient."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        with torch.no_grad():
            self.conv.weight.set_(self.conv.weight.contiguous(memory_format=torch.channels_last))  # type: ignore[call-overload]
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 12, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(2, 2), requires_grad=False)
        self.register_buffer("cache", torch.randn(5), persistent=False)

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        words: Tensor = self.head(self.norm(self.embed(tokens)))
        picture: Tensor = self.conv(image)
        return words.square().mean() + picture.square().mean()


class Box:
    """State of its own in an optimizer: tensors as attributes, some in slots, and a function."""

    __slots__ = ("__dict__", "secret")

    def __init__(self, like: Tensor) -> None:
        self.secret = torch.zeros_like(like)
        self.count = 0
        self.fn = len


class Pair(NamedTuple):
    left: Tensor
    right: int


class Nested(torch.optim.Optimizer):
    """A momentum optimizer that keeps its state in every container there is."""

    def __init__(self, params: Any, lr: float = 0.1, *, boxes: bool = True) -> None:
        super().__init__(params, {"lr": lr, "boxes": boxes, "betas": (0.9, float("inf"))})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["moments"] = [torch.zeros_like(p), {"inner": (torch.zeros_like(p), 1, None)}]
                    state["history"] = collections.deque([torch.zeros(2)], maxlen=3)
                    state["names"] = {"a", "b"}
                    state["shape"] = p.shape
                    state[7] = torch.bfloat16
                    if group["boxes"]:
                        state["box"] = Box(p)
                        state["pair"] = Pair(torch.zeros(2), 1)
                first, (second, count, _) = state["moments"][0], state["moments"][1]["inner"]
                first.mul_(0.9).add_(p.grad)
                second.mul_(0.5).add_(first)
                state["moments"][1]["inner"] = (second, count + 1, None)
                state["history"].append(state["history"][-1] + count)
                if group["boxes"]:
                    state["box"].secret.add_(first)
                    state["box"].count += 1
                    state["pair"].left.add_(1)
                    p.add_(state["box"].secret, alpha=-0.01 * state["box"].count)
                p.add_(second + state["history"][0].mean(), alpha=-group["lr"])
        self.state["rounds"] = self.state.get("rounds", 0) + 1  # type: ignore[index, call-overload]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw plain": partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "adamw foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adamw amsgrad": partial(torch.optim.AdamW, lr=torch.tensor(1e-2), amsgrad=True),
    "sgd momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd plain": partial(torch.optim.SGD, lr=1e-2),
    "adagrad": torch.optim.Adagrad,
    "nested": partial(Nested, boxes=False),
}


class Run:
    """A model, its optimizer and its scheduler, with what the worker would pass for them."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer] | None, seed: int = 0, width: int = 8) -> None:
        torch.manual_seed(seed)
        self.model = TiedModel(width)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make([{"params": trained[:2]}, {"params": trained[2:]}]) if make is not None else None
        self.scheduler: Any = None
        self.step = 0

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            tokens = torch.randint(12, (6,), generator=generator)
            image = torch.randn(2, 3, 5, 5, generator=generator)
            assert self.optimizer is not None
            self.optimizer.zero_grad()
            self.model(tokens, image).backward()
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.step += 1
        return self

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers(remove_duplicate=False)),
        }

    @property
    def names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.model.named_parameters()}

    def save(self, path: Path, read: Callable[[Tensor], Tensor] = Tensor.detach, **keywords: Any) -> int:
        return checkpoint.save(
            path,
            module_tensors=self.tensors,
            optimizer=self.optimizer,
            param_names=self.names,
            scheduler=self.scheduler,
            read=read,
            **keywords,
        )

    def load(self, path: Path, write: Callable[[Tensor], Tensor] = Tensor.detach, **keywords: Any) -> int:
        opened = checkpoint.open_checkpoint(path)
        opened.check(self.tensors, self.optimizer, self.names, **keywords)
        return opened.apply(self.tensors, self.optimizer, self.names, self.scheduler, write, **keywords)

    def snapshot(self) -> Any:
        """All that training depends on, as plain nested data with raw bytes for tensors."""
        state = (
            []
            if self.optimizer is None
            else [(self.names.get(id(key), key), _plain(value)) for key, value in self.optimizer.state.items()]
        )
        groups = (
            []
            if self.optimizer is None
            else [_plain({k: v for k, v in group.items() if k != "params"}) for group in self.optimizer.param_groups]
        )
        scheduler = None if self.scheduler is None else _plain(self.scheduler.state_dict())
        return _plain(self.tensors), sorted(state, key=str), groups, scheduler


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (str(value.dtype), str(value.device), list(value.shape), value.detach().flatten().tolist())
    if isinstance(value, dict):
        return type(value).__name__, sorted(((str(k), _plain(v)) for k, v in value.items()), key=str)
    if isinstance(value, list | tuple | collections.deque):
        return type(value).__name__, getattr(value, "maxlen", None), [_plain(v) for v in value]
    if isinstance(value, Box):
        return "Box", _plain(value.secret), _plain(vars(value))
    return value if not isinstance(value, float) else value.hex()


class Hidden:
    """Tensors that are away: their memory is freed, every touch raises, and copies stand for them."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = list({id(t): t for t in tensors}.values())
        self.copies = {id(t): t.detach().clone() for t in self.tensors}
        self.sizes = [t.untyped_storage().nbytes() for t in self.tensors]
        for tensor in self.tensors:
            tensor.untyped_storage().resize_(0)
            hide(tensor, AwayNote("a tensor", "params", "on the host", lambda: ("policy 'actor'", ())))

    def reach(self, tensor: Tensor) -> Tensor:
        return self.copies.get(id(tensor), tensor).detach()

    def bring_back(self) -> None:
        for tensor, nbytes in zip(self.tensors, self.sizes, strict=True):
            reveal(tensor)
            tensor.untyped_storage().resize_(nbytes)
            with torch.no_grad():
                tensor.copy_(self.copies[id(tensor)])


ADAMW = OPTIMIZERS["adamw plain"]


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Path]:
    """The path of a checkpoint; in the end nothing temporary may lie beside it."""
    path = tmp_path / "parent" / "step-3"
    yield path
    assert [p.name for p in path.parent.glob("*")] in ([], [path.name])


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


# -- round trips -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_three_steps_then_a_reload_then_three_more_equal_six_steps_bit_for_bit(kind: str, where: Path) -> None:
    whole = Run(OPTIMIZERS[kind]).train(6)
    half = Run(OPTIMIZERS[kind]).train(3)
    before = half.snapshot()
    nbytes = half.save(where)
    assert half.snapshot() == before
    fresh = Run(OPTIMIZERS[kind], seed=99)
    assert fresh.snapshot() != before
    assert fresh.load(where) == nbytes
    assert fresh.snapshot() == before
    fresh.step = 3
    assert fresh.train(3).snapshot() == whole.snapshot()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_loading_over_other_progress_keeps_the_tensors_and_takes_the_values(kind: str, where: Path) -> None:
    half = Run(OPTIMIZERS[kind]).train(3)
    half.save(where)
    other = Run(OPTIMIZERS[kind], seed=5).train(4)
    assert other.optimizer is not None
    kept = {id(t) for state in other.optimizer.state.values() for t in _tensors(state)}
    identities = {name: id(t) for name, t in other.tensors.items()}
    other.load(where)
    assert other.snapshot() == half.snapshot()
    assert {name: id(t) for name, t in other.tensors.items()} == identities
    if kind != "nested":  # its history has grown by a tensor
        assert {id(t) for state in other.optimizer.state.values() for t in _tensors(state)} == kept


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple | collections.deque):
        for inner in value:
            yield from _tensors(inner)


def test_state_objects_are_restored_where_they_live(where: Path) -> None:
    half = Run(Nested).train(3)
    half.save(where)
    other = Run(Nested, seed=5).train(1)
    assert other.optimizer is not None
    state = other.optimizer.state[other.model.embed.weight]
    box, secret = state["box"], state["box"].secret
    box.extra = "goes"
    other.load(where)
    assert other.snapshot() == half.snapshot()
    assert state["box"] is box
    assert box.secret is secret
    assert box.count == 3
    assert box.fn is len
    assert not hasattr(box, "extra")
    other.step = 3
    assert other.train(3).snapshot() == Run(Nested).train(6).snapshot()


def test_state_objects_that_do_not_live_are_named_with_the_way_out(where: Path) -> None:
    Run(Nested).train(3).save(where)
    fresh = Run(Nested, seed=5)
    before = fresh.snapshot()
    with pytest.raises(CheckpointError, match=r"embed\.weight/box: .*Box.*only your program can make") as caught:
        fresh.load(where)
    assert "one optimizer step first" in caught.value.remedy
    assert fresh.snapshot() == before


def test_state_that_the_checkpoint_does_not_have_goes(where: Path) -> None:
    untrained = Run(ADAMW)
    untrained.save(where)
    trained = Run(ADAMW, seed=5).train(2)
    assert trained.optimizer is not None
    assert len(trained.optimizer.state) > 0
    trained.load(where)
    assert dict(trained.optimizer.state) == {}
    assert trained.snapshot() == untrained.snapshot()


def test_parameters_without_state_get_none_by_saving_or_loading(where: Path) -> None:
    half = Run(ADAMW).train(1)
    assert half.optimizer is not None
    assert half.model.unused not in half.optimizer.state
    half.save(where)
    assert half.model.unused not in half.optimizer.state
    fresh = Run(ADAMW, seed=5)
    fresh.load(where)
    assert fresh.optimizer is not None
    assert fresh.model.unused not in fresh.optimizer.state
    assert fresh.model.embed.weight in fresh.optimizer.state


def test_tied_weights_are_written_once(where: Path) -> None:
    run = Run(None)
    distinct = {id(t): t for t in run.tensors.values()}.values()
    assert len(run.tensors) == len(distinct) + 1
    assert run.save(where) == sum(t.nbytes for t in distinct)
    assert len(json.loads((where / MANIFEST).read_text())["tensors"]) == len(distinct)


def test_a_checkpoint_of_tied_weights_fits_untied_ones_but_not_the_other_way_round(tmp_path: Path) -> None:
    tied = Run(None)
    untied = Run(None, seed=5)
    untied.model.head.weight = nn.Parameter(torch.randn(12, 8))
    untied.save(tmp_path / "untied")
    tied.save(tmp_path / "tied")
    with pytest.raises(CheckpointError, match=r"1 tied in the model.*: embed\.weight = head\.weight"):
        tied.load(tmp_path / "untied")
    untied.load(tmp_path / "tied")
    assert torch.equal(untied.model.head.weight, tied.model.head.weight)
    assert untied.model.head.weight is not untied.model.embed.weight


def test_new_moments_are_laid_out_as_their_parameter_and_steps_stay_scalars_on_the_host(where: Path) -> None:
    half = Run(ADAMW).train(1)
    half.save(where)
    fresh = Run(ADAMW, seed=5)
    fresh.load(where)
    assert fresh.optimizer is not None
    state = fresh.optimizer.state[fresh.model.conv.weight]
    assert state["exp_avg"].stride() == fresh.model.conv.weight.stride()
    assert not state["exp_avg"].is_contiguous()
    assert state["step"].shape == ()
    assert state["step"].device.type == "cpu"


def test_every_dtype_and_shape_comes_back_bit_for_bit(where: Path) -> None:
    raw = torch.randint(-128, 128, (64,), dtype=torch.int8)
    odd = {
        **{str(d): raw.clone().view(d) for d in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64)},
        "complex": torch.randn(3, dtype=torch.complex64),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
        "slice": torch.randn(10)[3:5],
        "expanded": torch.randn(1, 3).expand(2, 3),
        "transposed": torch.randn(3, 4).t(),
        "slash/and.dot": torch.randn(2),
    }
    keywords: dict[str, Any] = {"optimizer": None, "param_names": {}, "scheduler": None}
    checkpoint.save(where, module_tensors=odd, read=Tensor.detach, **keywords)
    live = {name: torch.zeros_like(t, memory_format=torch.contiguous_format) for name, t in odd.items()}
    checkpoint.open_checkpoint(where).apply(live, None, {}, None, Tensor.detach)
    for name, tensor in odd.items():
        expected = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(live[name].reshape(-1).view(torch.uint8), expected), name


def test_nothing_to_write_is_a_checkpoint_too(where: Path) -> None:
    checkpoint.save(where, module_tensors={}, optimizer=None, param_names={}, scheduler=None, read=Tensor.detach)
    assert checkpoint.open_checkpoint(where).apply({}, None, {}, None, Tensor.detach) == 0


def test_tensors_that_are_away_are_saved_and_loaded_without_being_touched(where: Path) -> None:
    half = Run(ADAMW).train(3)
    before = half.snapshot()
    assert half.optimizer is not None
    moments = [t for state in half.optimizer.state.values() for t in _tensors(state) if t.dim() > 0]
    away = Hidden([*half.tensors.values(), *moments])
    with pytest.raises(OffloadedAccessError):
        half.model.embed.weight.sum()
    half.save(where, away.reach)
    away.bring_back()
    assert half.snapshot() == before

    other = Run(ADAMW, seed=5).train(1)
    assert other.optimizer is not None
    moments = [t for state in other.optimizer.state.values() for t in _tensors(state) if t.dim() > 0]
    away = Hidden([*other.tensors.values(), *moments])
    other.load(where, away.reach)
    with pytest.raises(OffloadedAccessError):
        other.model.embed.weight.sum()
    away.bring_back()
    assert other.snapshot() == before


def test_new_state_of_parameters_that_are_away_can_be_made(where: Path) -> None:
    half = Run(ADAMW).train(3)
    half.save(where)
    fresh = Run(ADAMW, seed=5)
    away = Hidden(list(fresh.tensors.values()))
    fresh.load(where, away.reach)
    away.bring_back()
    assert fresh.snapshot() == half.snapshot()


def test_masters_that_only_the_optimizer_has_are_saved_with_it(where: Path) -> None:
    def build(seed: int) -> tuple[nn.Linear, Tensor, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
        master = model.weight.detach().float().requires_grad_()
        optimizer = torch.optim.AdamW([master], lr=0.1)
        master.grad = torch.ones_like(master)
        optimizer.step()
        return model, master, optimizer

    model, master, optimizer = build(0)
    names = {id(master): "masters[0]"}
    tensors = dict(model.named_parameters())
    checkpoint.save(where, module_tensors=tensors, optimizer=optimizer, param_names=names, scheduler=None, read=_detach)
    other, other_master, other_optimizer = build(1)
    assert not torch.equal(other_master, master)
    opened = checkpoint.open_checkpoint(where)
    opened.apply(dict(other.named_parameters()), other_optimizer, {id(other_master): "masters[0]"}, None, _detach)
    assert torch.equal(other_master, master)
    assert torch.equal(other.weight, model.weight)
    third = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    opened.apply(dict(third.named_parameters()), None, {}, None, _detach)
    assert torch.equal(third.weight, model.weight)


def _detach(tensor: Tensor) -> Tensor:
    return tensor.detach()


def test_a_tensor_shared_by_two_states_stays_shared_and_a_parameter_in_state_stays_itself(where: Path) -> None:
    run = Run(OPTIMIZERS["sgd plain"])
    assert run.optimizer is not None
    shared = torch.ones(3)
    run.optimizer.state[run.model.unused] = {"shared": shared, "anchor": run.model.embed.weight}
    run.optimizer.state[run.model.embed.weight] = {"shared": shared, "by": {run.model.unused: 4}}
    run.save(where)
    fresh = Run(OPTIMIZERS["sgd plain"], seed=5)
    fresh.load(where)
    assert fresh.optimizer is not None
    first, second = fresh.optimizer.state[fresh.model.unused], fresh.optimizer.state[fresh.model.embed.weight]
    assert first["shared"] is second["shared"]
    assert first["anchor"] is fresh.model.embed.weight
    assert second["by"] == {fresh.model.unused: 4}


def test_one_live_tensor_that_stood_for_two_values_is_taken_apart(where: Path) -> None:
    run = Run(OPTIMIZERS["sgd plain"])
    assert run.optimizer is not None
    run.optimizer.state[run.model.unused] = {"a": torch.zeros(2), "b": torch.ones(2)}
    run.save(where)
    shared = torch.full((2,), 7.0)
    run.optimizer.state[run.model.unused] = {"a": shared, "b": shared}
    run.load(where)
    state = run.optimizer.state[run.model.unused]
    assert state["a"].tolist() == [0, 0]
    assert state["b"].tolist() == [1, 1]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "multi step": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 2, 2]),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 20),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_continue_where_they_were(kind: str, where: Path) -> None:
    def build(seed: int) -> Run:
        run = Run(OPTIMIZERS["sgd momentum"], seed)
        assert run.optimizer is not None
        run.scheduler = SCHEDULERS[kind](run.optimizer)
        return run

    whole, half, fresh = build(0).train(6), build(0).train(3), build(5)
    half.save(where)
    fresh.load(where)
    fresh.step = 3
    fresh.train(3)
    assert whole.scheduler.get_last_lr() == fresh.scheduler.get_last_lr()
    assert fresh.snapshot()[:3] == whole.snapshot()[:3]


def test_a_plateau_scheduler_keeps_its_infinite_best(where: Path) -> None:
    run = Run(ADAMW)
    assert run.optimizer is not None
    run.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer)
    run.save(where)
    run.scheduler.step(1.0)
    assert run.scheduler.best == 1.0
    run.load(where)
    assert run.scheduler.best == float("inf")


def test_what_the_caller_adds_comes_back(where: Path) -> None:
    extra = {"step": 3, "name": "a\udc80ctor", "limits": [1.5, float("inf"), None, True], "deep": {"x": {}}}
    Run(None).save(where, extra=extra)
    assert checkpoint.open_checkpoint(where).extra == extra
    with pytest.raises(CheckpointWriteError, match="extra/t is a tensor"):
        Run(None).save(where, extra={"t": torch.ones(1)})


def test_loading_ignores_an_optimizer_where_there_is_none_but_needs_a_flag_for_the_reverse(tmp_path: Path) -> None:
    trained = Run(ADAMW).train(2)
    trained.save(tmp_path / "full")
    bare = Run(None, seed=5)
    bare.load(tmp_path / "full")
    assert bare.snapshot()[0] == trained.snapshot()[0]
    bare.save(tmp_path / "bare")
    other = Run(ADAMW, seed=6).train(1)
    before = other.snapshot()
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        other.load(tmp_path / "bare")
    assert other.snapshot() == before
    other.load(tmp_path / "bare", optimizer_optional=True)
    assert other.snapshot()[0] == trained.snapshot()[0]
    assert other.snapshot()[1:] == before[1:]


def test_sharded_parameters_are_saved_as_the_whole_that_they_are_and_fit_a_plain_module(where: Path) -> None:
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def build(seed: int) -> tuple[nn.Parameter, torch.optim.Optimizer]:
            torch.manual_seed(seed)
            parameter = nn.Parameter(distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)]))
            return parameter, torch.optim.AdamW([parameter], lr=0.1)

        def step(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
            parameter.grad = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
            optimizer.step()

        parameter, optimizer = build(0)
        step(parameter, optimizer)
        arguments = {"w": parameter}, optimizer, {id(parameter): "w"}
        checkpoint.save(
            where,
            module_tensors=arguments[0],
            optimizer=optimizer,
            param_names=arguments[2],
            scheduler=None,
            read=_detached,
        )
        fresh, fresh_optimizer = build(1)
        opened = checkpoint.open_checkpoint(where)
        opened.apply({"w": fresh}, fresh_optimizer, {id(fresh): "w"}, None, _detached)
        step(fresh, fresh_optimizer)
        step(parameter, optimizer)
        assert torch.equal(fresh.to_local(), parameter.to_local())  # type: ignore[attr-defined]
        plain = nn.Parameter(torch.zeros(4, 2))
        opened.apply({"w": plain}, None, {}, None, _detached)
        saved = checkpoint.open_checkpoint(where)
        reread, reread_optimizer = build(2)
        saved.apply({"w": reread}, reread_optimizer, {id(reread): "w"}, None, _detached)
        assert torch.equal(plain, reread.to_local())  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach()


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_another_architecture_is_refused_with_the_names_that_differ(where: Path) -> None:
    Run(ADAMW).train(1).save(where)
    wide = Run(ADAMW, width=16)
    before = wide.snapshot()
    with pytest.raises(CheckpointError, match=r"embed\.weight float32\[12, 8\] -> float32\[12, 16\]") as caught:
        wide.load(where)
    assert "different (checkpoint -> the model)" in str(caught.value)
    assert wide.snapshot() == before

    longer = Run(ADAMW)
    for index in range(7):
        longer.model.register_parameter(f"more{index}", nn.Parameter(torch.zeros(1)))
    del longer.model.conv
    with pytest.raises(CheckpointError) as caught:
        longer.load(where)
    text = str(caught.value)
    assert "7 in the model, missing in the checkpoint: more0, more1, more2, more3, more4, ..." in text
    assert "2 in the checkpoint, not in the model: conv.bias, conv.weight" in text
    assert "build the model" in caught.value.remedy


def test_another_dtype_is_refused(where: Path) -> None:
    Run(None).save(where)
    half = Run(None)
    half.model.half()
    with pytest.raises(CheckpointError, match=r"float32\[12, 8\] -> float16\[12, 8\]"):
        half.load(where)


def test_another_optimizer_or_other_groups_are_refused(where: Path) -> None:
    Run(ADAMW).train(1).save(where)
    with pytest.raises(CheckpointError, match="saved with AdamW; this is SGD"):
        Run(OPTIMIZERS["sgd momentum"]).load(where)
    other = Run(None)
    other.optimizer = torch.optim.AdamW([other.model.embed.weight])
    with pytest.raises(CheckpointError, match=r"\[2, 4\] in the checkpoint, \[1\] here"):
        other.load(where)


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage", ["truncated", "emptied", "removed", "flipped first", "flipped middle", "flipped last"]
)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", MANIFEST])
def test_a_damaged_file_is_named_before_anything_is_loaded(name: str, damage: str, where: Path) -> None:
    Run(ADAMW).train(1).save(where)
    assert sorted(files_of(where)) == sorted(["__0_0.distcp", ".metadata", MANIFEST])
    file = where / name
    data = bytearray(file.read_bytes())
    if damage == "removed":
        file.unlink()
    else:
        if damage == "truncated":
            del data[len(data) * 2 // 3 :]
        elif damage == "emptied":
            data.clear()
        else:
            position = {"first": 0, "middle": len(data) // 2, "last": len(data) - 1}[damage.split()[1]]
            data[position] ^= 0x41
        file.write_bytes(data)
    victim = Run(ADAMW, seed=5).train(1)
    before = victim.snapshot()
    with pytest.raises(CheckpointError) as caught:
        victim.load(where)
    assert name in str(caught.value)
    assert str(where) in str(caught.value)
    assert victim.snapshot() == before


def test_a_manifest_that_was_changed_by_hand_is_damaged(where: Path) -> None:
    Run(ADAMW).train(1).save(where)
    file = where / MANIFEST
    file.write_text(file.read_text().replace("0.01", "0.02"))
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        checkpoint.open_checkpoint(where)


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", "inner/../../../secret"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused_though_its_checksums_hold(where: Path, name: str) -> None:
    Run(None).save(where)
    (where.parent.parent / "secret").write_bytes(b"x")
    (where / "inner").mkdir()
    named = where / name
    manifest = json.loads((where / MANIFEST).read_text())
    manifest["files"][name] = {"size": named.stat().st_size, "sha256": directory._file_digest(named)}
    manifest["sha256"] = directory._digest(manifest)
    (where / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="damaged") as caught:
        checkpoint.open_checkpoint(where)
    assert caught.value.facts[0] == f"it names a file elsewhere: {name}"


def test_a_checkpoint_from_the_future_is_refused_by_version(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(directory, "VERSION", 7)
        Run(None).save(where)
    with pytest.raises(CheckpointError, match=r"version 7.*up to 1") as caught:
        checkpoint.open_checkpoint(where)
    assert "upgrade" in caught.value.remedy


def test_what_is_no_checkpoint_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing at that path\n.*exists is .*"):
        checkpoint.open_checkpoint(tmp_path / "no" / "where")
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(CheckpointError, match="it is a file"):
        checkpoint.open_checkpoint(file)
    with pytest.raises(CheckpointError, match="has no manifest"):
        checkpoint.open_checkpoint(tmp_path)
    (tmp_path / MANIFEST).write_text("[1, 2]")
    with pytest.raises(CheckpointError, match="not one of an rl-session checkpoint"):
        checkpoint.open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be used"):
        checkpoint.open_checkpoint(tmp_path / ("x" * 300))
    with pytest.raises(CheckpointError, match="cannot be used"):
        Run(None).save(tmp_path / ("x" * 300))


def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(where: Path) -> None:
    Run(None).save(where)
    (where / ".metadata").unlink()
    os.mkfifo(where / ".metadata")
    with pytest.raises(CheckpointError, match="no regular file"):
        checkpoint.open_checkpoint(where)


class Bomb:
    def __init__(self, crater: Path) -> None:
        self.crater = crater

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.crater),))


def test_metadata_that_names_anything_but_plain_records_is_not_executed(where: Path, tmp_path: Path) -> None:
    Run(None).save(where)
    crater = tmp_path / "crater"
    (where / ".metadata").write_bytes(pickle.dumps(Bomb(crater)))
    manifest = json.loads((where / MANIFEST).read_text())
    # A forger can make every checksum match.
    body = {k: v for k, v in manifest.items() if k not in ("format", "version", "files", "sha256")}
    (where / MANIFEST).unlink()
    directory.write_manifest(where, body)
    with pytest.raises(CheckpointError, match=r"mkdir has no place in the metadata"):
        checkpoint.open_checkpoint(where)
    assert not crater.exists()


def test_metadata_that_points_elsewhere_or_contradicts_the_manifest_is_refused(where: Path) -> None:
    Run(None).save(where)
    opened = checkpoint.open_checkpoint(where)
    with pytest.raises(CheckpointError, match="names files that are no part of it"):
        dcp.parse_metadata(where, {".metadata": None}, {})
    table = copy.deepcopy(opened._table)
    next(iter(table.values()))["shape"] = [1]
    with pytest.raises(CheckpointError, match="disagree on"):
        dcp.parse_metadata(where, opened._identities, table)


def test_a_checkpoint_that_is_replaced_between_opening_and_loading_is_noticed(where: Path) -> None:
    Run(ADAMW).train(1).save(where)
    opened = checkpoint.open_checkpoint(where)
    Run(ADAMW).train(2).save(where)
    victim = Run(ADAMW, seed=5).train(1)
    before = victim.snapshot()
    with pytest.raises(CheckpointError, match="changed or replaced since it was opened"):
        opened.apply(victim.tensors, victim.optimizer, victim.names, None, Tensor.detach)
    shutil.rmtree(where)
    with pytest.raises(CheckpointError, match="changed or replaced since it was opened"):
        opened.apply(victim.tensors, victim.optimizer, victim.names, None, Tensor.detach)
    assert victim.snapshot() == before


def test_a_write_that_is_refused_changes_nothing(where: Path) -> None:
    Run(ADAMW).train(1).save(where)
    victim = Run(ADAMW, seed=5).train(1)
    before = victim.snapshot()
    asked: list[Tensor] = []

    def write(tensor: Tensor) -> Tensor:
        asked.append(tensor)
        if len(asked) == 9:
            raise RuntimeError("no")
        return tensor.detach()

    with pytest.raises(RuntimeError, match="no"):
        victim.load(where, write)
    assert victim.snapshot() == before


# -- writing -----------------------------------------------------------------------------------------------------------


def test_files_are_private_to_their_owner(where: Path) -> None:
    Run(ADAMW).save(where)
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in where.iterdir()} == {0o600}


def test_the_manifest_is_plain_json_and_nothing_else_is_pickled_by_us(where: Path) -> None:
    Run(ADAMW).train(1).save(where)
    manifest = json.loads((where / MANIFEST).read_text(), parse_constant=pytest.fail)
    assert manifest["torch"] == torch.__version__
    assert manifest["tensors"]["optimizer/embed.weight/exp_avg"] == {"shape": [12, 8], "dtype": "float32"}


def test_saving_again_replaces_our_own_checkpoint(where: Path) -> None:
    Run(ADAMW).train(1).save(where)
    later = Run(ADAMW).train(2)
    later.save(where)
    fresh = Run(ADAMW, seed=5)
    fresh.load(where)
    assert fresh.snapshot() == later.snapshot()


def test_a_link_stays_a_link_and_an_empty_directory_is_taken(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "latest"
    real.mkdir()
    link.symlink_to(real)
    for steps in (1, 2):
        Run(ADAMW).train(steps).save(link)
        assert link.is_symlink()
        assert (real / MANIFEST).is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "real"]


def test_what_is_not_ours_is_never_replaced(tmp_path: Path) -> None:
    run = Run(None)
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(CheckpointError, match="a file is there"):
        run.save(file)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("precious")
    with pytest.raises(CheckpointError, match=r"no checkpoint: 1 entries \(thesis\.tex\)"):
        run.save(foreign)
    ours = tmp_path / "ours"
    run.save(ours)
    (ours / "tokenizer.json").write_text("precious")
    with pytest.raises(CheckpointError, match=r"no part of it: tokenizer\.json"):
        run.save(ours)
    assert file.read_text() == "precious"
    assert (foreign / "thesis.tex").read_text() == "precious"
    assert (ours / "tokenizer.json").read_text() == "precious"
    checkpoint.open_checkpoint(ours)
    with pytest.raises(CheckpointWriteError, match=r"FileExistsError|NotADirectoryError"):
        run.save(file / "below")


FAILURES = [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed"), KeyboardInterrupt()]


@pytest.mark.parametrize("failure", FAILURES, ids=["OSError", "RuntimeError", "KeyboardInterrupt"])
@pytest.mark.parametrize("point", ["read", "half-way", "sync", "manifest", "rename aside", "rename in"])
def test_a_failure_while_replacing_keeps_the_old_checkpoint(
    point: str, failure: BaseException, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run(ADAMW).train(1).save(where)
    before = files_of(where)
    later = Run(ADAMW).train(2)
    read: Callable[[Tensor], Tensor] = Tensor.detach
    count = 0

    def fail_at(nth: int, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            if count == nth:
                raise failure
            return real(*args, **keywords)

        return call

    with monkeypatch.context() as patch:
        if point == "read":
            read = fail_at(3, Tensor.detach)
        elif point == "half-way":
            patch.setattr(torch, "save", fail_at(4, torch.save))
        elif point == "sync":
            patch.setattr(directory, "_sync", fail_at(2, directory._sync))
        elif point == "manifest":
            patch.setattr(Path, "write_text", fail_at(1, Path.write_text))
        else:
            # DCP renames its metadata first.
            patch.setattr(Path, "rename", fail_at(2 if point == "rename aside" else 3, Path.rename))
        expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else CheckpointWriteError
        with pytest.raises(expected) as caught:
            later.save(where, read)
    assert count > 0
    if isinstance(caught.value, CheckpointWriteError):
        assert str(where) in caught.value.attempted
        assert "bytes needed" in str(caught.value)
        assert "bytes free on the disk" in str(caught.value)
        assert str(failure) in caught.value.cause
        assert "another disk" in caught.value.remedy
    assert files_of(where) == before
    checkpoint.open_checkpoint(where)
    later.save(where)
    assert files_of(where) != before


def test_an_error_of_ours_while_reading_comes_through_as_it_is(where: Path) -> None:
    def read(tensor: Tensor) -> Tensor:
        raise OffloadedAccessError("touched")

    with pytest.raises(OffloadedAccessError, match="touched"):
        Run(None).save(where, read)
    assert not where.exists()


def test_a_disk_known_to_be_too_small_is_not_filled(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "free_nbytes", lambda path: 100)
    with pytest.raises(CheckpointWriteError, match=r"bytes free on the disk: 100\n") as caught:
        Run(ADAMW).save(where)
    assert "No space left" in caught.value.cause


@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "ctrl-c"]
)
def test_a_failure_inside_a_tensor_is_not_hidden_by_what_torch_makes_of_it(
    failure: BaseException, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaking(io.FileIO):
        def write(self, data: Any, /) -> int:
            if len(data) > 1000:
                raise failure
            return super().write(data) or 0

    real = Path.open

    def open_file(self: Path, mode: str = "r", *args: Any, **keywords: Any) -> Any:
        return Breaking(self, "w") if self.suffix == ".distcp" and "w" in mode else real(self, mode, *args, **keywords)

    monkeypatch.setattr(Path, "open", open_file)
    keywords: dict[str, Any] = {"optimizer": None, "param_names": {}, "scheduler": None, "read": Tensor.detach}
    expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else CheckpointWriteError
    with pytest.raises(expected) as caught:
        checkpoint.save(where, module_tensors={"w": torch.ones(5000)}, **keywords)
    if isinstance(caught.value, CheckpointWriteError):
        assert caught.value.cause.startswith("OSError: [Errno 28]")


def test_a_file_size_limit_reached_half_way_leaves_the_old_checkpoint(where: Path) -> None:
    program = """
import resource, sys, warnings
import torch
from torch import Tensor
from rl_session.errors import CheckpointWriteError
from rl_session.workers import checkpoint

warnings.simplefilter("error")
none = {"optimizer": None, "param_names": {}, "scheduler": None, "read": Tensor.detach}
checkpoint.save(sys.argv[1], module_tensors={"w": torch.ones(4)}, **none)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
try:
    checkpoint.save(sys.argv[1], module_tensors={str(i): torch.ones(50_000) for i in range(9)}, **none)
except CheckpointWriteError as error:
    print("refused:", error.cause)
print(checkpoint.open_checkpoint(sys.argv[1]))
"""
    done = subprocess.run([sys.executable, "-c", program, str(where)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "refused: OSError: [Errno 27] File too large" in done.stdout
    assert "1 tensors" in done.stdout


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "tiny"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("no right to mount a file system")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize("checked", [True, False], ids=["seen before", "found half-way"])
def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(
    checked: bool, tiny_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"w": torch.ones(4)}
    large = {str(i): torch.ones(20_000) for i in range(5)}
    keywords: dict[str, Any] = {"optimizer": None, "param_names": {}, "scheduler": None, "read": Tensor.detach}
    path = tiny_disk / "last"
    checkpoint.save(path, module_tensors=small, **keywords)
    if not checked:
        monkeypatch.setattr(directory, "free_nbytes", lambda path: 0)
    with pytest.raises(CheckpointWriteError, match="bytes needed: 400,000") as caught:
        checkpoint.save(path, module_tensors=large, **keywords)
    assert [p.name for p in tiny_disk.iterdir()] == ["last"]
    assert "No space left on device" in caught.value.cause
    checkpoint.open_checkpoint(path).apply(small, None, {}, None, Tensor.detach)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.Generator(), "cannot be written without pickle"),
        (b"bytes", "cannot be written without pickle"),
        (nn.Linear(1, 1), "cannot be written without pickle"),
        ({torch.ones(1): 1}, "a tensor that is no parameter is a key"),
        (torch.ones(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(2, device="meta"), "on meta"),
    ],
    ids=["generator", "bytes", "module", "tensor key", "sparse", "meta"],
)
def test_state_that_cannot_be_written_without_pickle_is_named(value: Any, why: str, where: Path) -> None:
    run = Run(ADAMW).train(1)
    assert run.optimizer is not None
    run.optimizer.state[run.model.embed.weight]["odd"] = [value]
    with pytest.raises(CheckpointWriteError, match=f"optimizer/embed.weight/odd/0.*{why}"):
        run.save(where)


def test_state_that_refers_to_itself_is_named(where: Path) -> None:
    run = Run(ADAMW).train(1)
    assert run.optimizer is not None
    loop: list[Any] = []
    loop.append(loop)
    run.optimizer.state[run.model.embed.weight]["loop"] = loop
    with pytest.raises(CheckpointWriteError, match="refers to itself"):
        run.save(where)


def test_state_of_a_parameter_in_no_group_is_named(where: Path) -> None:
    run = Run(ADAMW).train(1)
    assert run.optimizer is not None
    run.optimizer.state[torch.ones(3)] = {"step": torch.zeros(())}
    with pytest.raises(CheckpointWriteError, match=r"\(3,\) tensor that is in none of its groups"):
        run.save(where)


def test_a_killed_swap_is_told_when_the_checkpoint_is_missed(tmp_path: Path) -> None:
    Run(None).save(tmp_path / "last")
    (tmp_path / "last").rename(tmp_path / ".last.old-1234")
    with pytest.raises(CheckpointError, match=r"the checkpoint from before is .*\.last\.old-1234"):
        checkpoint.open_checkpoint(tmp_path / "last")
    checkpoint.open_checkpoint(tmp_path / ".last.old-1234")


def test_every_error_says_what_to_do(tmp_path: Path) -> None:
    caught: list[RLSessionError] = []
    for attempt in (
        lambda: checkpoint.open_checkpoint(tmp_path / "none"),
        lambda: Run(None).save(Path(__file__)),
    ):
        with pytest.raises(CheckpointError) as error:
            attempt()
        caught.append(error.value)
    assert all(error.attempted and error.facts and error.remedy for error in caught)
