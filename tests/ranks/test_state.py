"""Weights, checkpoints and references of sharded models: those of the whole, from whichever tier holds the bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_worker import LM, RankWorker, batch, cycle, made, made_model
from spawned import run
from torch import Tensor, nn

from rl_session.errors import CheckpointError, CheckpointWriteError, OpenStepError
from rl_session.lifecycle import Component, Mode, Tier
from rl_session.workers import checkpoint as files
from rl_session.workers import compute

WAYS = ["fsdp2", "ddp", None]
Snapshot = tuple[dict[str, Tensor], list[Tensor]]


def snapshot(worker: RankWorker) -> Snapshot:
    """Weights by their plain names, and the optimizer's state, whole."""
    worker.go(Mode.TRAINING)
    weights = {name.removeprefix("module."): value for name, value in worker.full().items()}
    return weights, worker.full_state()


def equal(left: Snapshot, right: Snapshot) -> bool:
    weights = left[0].keys() == right[0].keys() and all(torch.equal(v, right[0][k]) for k, v in left[0].items())
    return weights and all(torch.equal(a, b) for a, b in zip(left[1], right[1], strict=True))


def _saves(rank: int, how: Any, folder: Path, solo: bool) -> Snapshot:
    worker = made(how, solo=solo)
    for index in range(2):
        cycle(worker, batch(5, seed=index), gbs=5)
    expected = snapshot(worker)
    worker.go(Mode.OFFLOADED)
    copies = worker.device.num_copies
    state = worker.worker.state_dict()
    sizes = worker.worker.weight_sizes()
    first, rest = list(sizes)[:3], list(sizes)[3:]
    weights = {**worker.worker.weights(first), **worker.worker.weights(rest)}
    worker.worker.save_checkpoint(str(folder / "saved"))
    assert worker.device.num_copies == copies, "something was brought in"
    assert worker.away_bytes() == worker.device.resident_bytes == 0
    if worker.worker.ranks.is_first:
        assert state.keys() == expected[0].keys() == weights.keys()
        assert all(torch.equal(state[name], value) for name, value in expected[0].items())
        assert all(torch.equal(weights[name], value) for name, value in expected[0].items())
        assert all(sizes[name] == value.nbytes for name, value in expected[0].items())
        plain = LM()
        plain.load_state_dict(state)
    else:
        assert state == weights == {}
    worker.go(Mode.REFIT)  # and from the device
    device = worker.worker.weights(list(sizes))
    assert all(torch.equal(value, expected[0][name]) for name, value in device.items())
    return expected


def _loads(rank: int, how: Any, folder: Path, solo: bool, mode: Mode) -> Snapshot:
    worker = made(how, model=made_model(5), solo=solo)
    if mode is Mode.TRAINING:
        cycle(worker, batch(3))  # state that lives is written in place
    worker.go(mode)
    worker.worker.load_checkpoint(str(folder / "saved"))
    tier = Tier.HOST if mode is Mode.OFFLOADED else Tier.DEVICE
    assert worker.tiers()[Component.PARAMS] is worker.tiers()[Component.OPTIMIZER] is tier
    assert mode is Mode.TRAINING or worker.away_bytes() == worker.device.resident_bytes == 0
    found = snapshot(worker)
    worker.train(batch(5, seed=9))
    return found


@pytest.mark.parametrize("how", WAYS)
def test_two_ranks_write_one_checkpoint_that_any_number_of_ranks_and_a_plain_module_load(
    how: Any, tmp_path: Path
) -> None:
    saved = run(_saves, 2, how, tmp_path, False)
    assert equal(saved[0], saved[1])
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
    manifest = json.loads((tmp_path / "saved" / "manifest.json").read_text())
    assert manifest["tensors"]["model/layers.0.up.weight"]["shape"] == [10, 5]
    for num, way, solo, mode in (
        (2, "fsdp2", False, Mode.OFFLOADED),
        (2, "ddp", False, Mode.TRAINING),
        (1, None, True, Mode.OFFLOADED),
        (4, "fsdp2", False, Mode.TRAINING),
    )[: 4 if how == "fsdp2" else 1]:
        for found in run(_loads, num, way, tmp_path, solo, mode):
            assert equal(found, saved[0]), (num, way)
    plain = made_model(7)
    tensors = {**dict(plain.named_parameters(remove_duplicate=False)), **dict(plain.named_buffers())}
    files.open_checkpoint(tmp_path / "saved").apply(tensors, None, {}, None, lambda tensor: tensor.detach())
    assert all(torch.equal(value, saved[0][0][name]) for name, value in plain.state_dict().items())


def test_a_checkpoint_of_one_rank_is_loaded_by_two(tmp_path: Path) -> None:
    (saved,) = run(_saves, 1, None, tmp_path, True)
    for found in run(_loads, 2, "fsdp2", tmp_path, False, Mode.OFFLOADED):
        assert equal(found, saved)


# -- failing together ------------------------------------------------------------------------------------------------


def _failing_save(rank: int, folder: Path) -> None:
    worker = made()
    cycle(worker, batch(4))
    path = str(folder / "saved")
    worker.worker.save_checkpoint(path)
    before = {file.name: file.read_bytes() for file in (folder / "saved").iterdir()}
    worker.go(Mode.TRAINING)
    worker.train(batch(4))
    worker.go(Mode.OFFLOADED)
    keeper: Any = worker.worker._keeper
    reads = keeper.engine.readable
    for failing in (0, 1):

        def read(tensor: Tensor, failing: int = failing) -> Tensor:
            if rank == failing:
                raise OSError("no bytes on this rank")
            return reads(tensor)  # type: ignore[no-any-return]

        keeper.engine.readable = read
        with pytest.raises(CheckpointWriteError, match="no bytes on this rank"):
            worker.worker.save_checkpoint(path)
        keeper.engine.readable = reads
        worker.worker.ranks.gather_objects(None)
        assert {file.name: file.read_bytes() for file in (folder / "saved").iterdir()} == before
        assert [entry.name for entry in folder.iterdir()] == ["saved"]
    with pytest.raises(CheckpointError, match="a file is there"):
        worker.worker.save_checkpoint(str(folder / "saved" / "manifest.json"))
    worker.worker.save_checkpoint(path)
    expected = snapshot(worker)
    other = made(model=made_model(3))
    other.worker.load_checkpoint(path)
    assert equal(snapshot(other), expected)


def test_a_rank_that_cannot_write_leaves_the_old_checkpoint_standing_on_all(tmp_path: Path) -> None:
    run(_failing_save, 2, tmp_path)


def _failing_load(rank: int, folder: Path) -> None:
    saved = made()
    saved.go(Mode.TRAINING)
    saved.train(batch(4))
    saved.worker.save_checkpoint(str(folder / "saved"))
    worker = made(model=made_model(3))
    worker.go(Mode.OFFLOADED)
    reads = files.loading.read_tensors  # type: ignore[attr-defined]

    def read(*args: Any) -> None:
        if rank == 1:
            raise OSError("this rank cannot read")
        reads(*args)

    files.loading.read_tensors = read  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="this rank cannot read"):
        worker.worker.load_checkpoint(str(folder / "saved"))
    files.loading.read_tensors = reads  # type: ignore[attr-defined]
    untouched = made(model=made_model(3))
    assert equal(snapshot(worker), snapshot(untouched)), "the rank that could read has loaded"
    worker.model(torch.tensor([[1, 2]])).sum().backward()
    with pytest.raises(OpenStepError):
        worker.worker.load_checkpoint(str(folder / "saved"))
    worker.optimizer.zero_grad()
    worker.worker.load_checkpoint(str(folder / "saved"))
    assert equal(snapshot(worker), snapshot(saved))


def test_a_rank_that_cannot_read_keeps_the_others_from_loading(tmp_path: Path) -> None:
    run(_failing_load, 2, tmp_path)


# -- references ------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A model with an adapter that can be switched off, as PEFT models have."""

    def __init__(self) -> None:
        super().__init__()
        self.base = made_model()
        self.adapter = nn.Linear(5, 5, bias=False)
        self.is_on = True

    def disable_adapter(self) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def off() -> Any:
            self.is_on = False
            try:
                yield
            finally:
                self.is_on = True

        return off()

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.base(input_ids)
        if self.is_on:
            logits = logits + self.base.head(self.adapter(self.base.embed(input_ids)))
        return logits


def _reference(rank: int, kind: str) -> None:
    given = batch(3)
    pristine = compute.get_logprobs(compute.Forward(made_model()), given)["logprobs"]
    options: dict[str, Any] = {"reference": kind}
    if kind == "adapter-off":
        model = Adapted()
        model.base.requires_grad_(requires_grad=False)
        options.update(model=model)
    elif kind == "module":
        options["reference"] = made_model().requires_grad_(requires_grad=False)
    elif kind == "sharded module":
        from rl_session.workers.parallel import parallelize

        options["reference"] = parallelize(made_model().requires_grad_(requires_grad=False), "fsdp2")
    worker = made("fsdp2", **options)
    cycle(worker, batch(5))
    for mode in (Mode.LOGPROB, Mode.TRAINING):
        worker.go(mode)
        live = worker.call("get_logprobs", given, mbs=1)["logprobs"]
        reference = worker.call("get_reference_policy_logprobs", given, mbs=1)["reference_logprobs"]
        assert torch.allclose(reference, pristine, atol=1e-5)
        assert not torch.allclose(live, pristine, atol=1e-3)
        assert torch.equal(worker.call("get_logprobs", given, mbs=1)["logprobs"], live)
    worker.go(Mode.OFFLOADED)
    assert worker.device.resident_bytes == 0


@pytest.mark.parametrize("kind", ["copy", "adapter-off", "module", "sharded module"])
def test_the_reference_is_the_model_as_it_was(kind: str) -> None:
    run(_reference, 2, kind)


def _swap_fails(rank: int) -> None:
    worker = made(reference="copy")
    cycle(worker, batch(4))
    worker.go(Mode.LOGPROB)
    live = worker.call("get_logprobs", batch(4))["logprobs"]
    if rank == 1:
        worker.device.fail("copy_in", k=3, point="half")
    with pytest.raises(Exception, match="injected"):
        worker.call("get_reference_policy_logprobs", batch(4))
    assert torch.equal(worker.call("get_logprobs", batch(4))["logprobs"], live)


def test_a_swap_that_fails_on_one_rank_is_undone_on_all() -> None:
    run(_swap_fails, 2)
