"""A loop with three participants on one device, for a long time: nothing grows, and every bit is that of a loop that never moves.

60 cycles by default; `make soak` makes 2,000 and prints what it saw.
"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import torch
from rig import Net, adamw, make_batch, nll, tensors_in
from torch import Tensor, nn

import rl_session as rs
from rl_session.audit.check import assert_log_is_consistent
from rl_session.testing import EmulatedDevice, FakeEngine

CYCLES = int(os.environ.get("RL_SESSION_SOAK_CYCLES", "60"))
WARM_UP = 3
"""Cycles after which everything has been made that is ever made."""


class Critic(Net):
    """One number a token."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 1)


@attrs.frozen
class Sample:
    """What is measured after a cycle, by looking and not by asking the log."""

    pool_held: int
    device_peak: int
    device_resident: int
    num_descriptors: int
    num_tensors: int


class Loop:
    """A policy, a critic and an engine that generates, on a device that has room for the largest phase only."""

    def __init__(self, log: Path | None, *, release: Any, capacity: int | None) -> None:
        torch.manual_seed(0)
        self.session = rs.Session(log, release=release, verify="checksum")
        self.device = EmulatedDevice(capacity)
        self.models = [Net(), Critic()]
        self.optimizers = [adamw(model) for model in self.models]
        actor, critic = zip(self.models, self.optimizers, strict=True)
        self.policy: Any = self.session.attach(*actor, name="actor", device=self.device)
        self.value: Any = self.session.attach_value(*critic, name="critic", device=self.device)
        self.fake: FakeEngine | None = None
        self.results: list[Tensor] = []

    def add_engine(self, nbytes: int) -> None:
        """An engine on the same device; the policies leave it first."""
        self.policy.offload()
        self.value.offload()
        self.fake = FakeEngine(self.device, weights=nbytes, kv_nbytes=nbytes)
        self.session.engine("vllm", self.fake)

    def cycle(self, number: int) -> None:
        batch = make_batch(2 + number % 3)
        with self.session.step(number):
            if self.fake is not None:
                self.policy.refit()
                with self.policy.generation_mode() as generating:
                    assert generating.generate(batch)["fingerprint"][0] == self.fake.pushed[-1]
            with self.policy.logprob_mode() as policy:
                self.results.append(policy.get_logprobs(batch)["logprobs"].sum())
            with self.value.inference_mode() as value:
                self.results.append(value.get_values(batch)["values"].sum())
            for trained, loss in ((self.value, squares), (self.policy, nll)):
                with trained.training_mode() as training:
                    self.results.append(training.train(batch, loss)["loss"].sum())

    def sample(self) -> Sample:
        gc.collect()
        with torch._C.DisableTorchFunctionSubclass():
            num_tensors = sum(issubclass(type(each), Tensor) for each in gc.get_objects()) - 2 * len(self.results)
        return Sample(
            self.session._run.pool.held_bytes,
            self.device.peak,
            self.device.resident_bytes,
            len(list(Path("/proc/self/fd").iterdir())),
            num_tensors,
        )

    def state(self) -> list[Tensor]:
        """Weights, buffers and moments, from whichever tier has them."""
        found: list[Tensor] = []
        for participant, model, optimizer in zip((self.policy, self.value), self.models, self.optimizers, strict=True):
            moments = [t for state in optimizer.state.values() for t in tensors_in(state)]
            read = participant._control.group.worker.engine.readable
            found += [read(t).clone() for t in (*model.parameters(), *model.buffers(), *moments)]
        return found


def squares(values: Tensor, batch: Any, seqs: Any, tokens: Any) -> tuple[Tensor, dict[str, Any]]:
    return values.float().pow(2).sum() / tokens, {}


def largest_phase() -> int:
    """Device memory that a training phase of the larger model takes, found by making one."""
    loop = Loop(None, release="eager", capacity=None)
    loop.policy.offload()
    loop.value.offload()
    loop.device.peak = 0
    loop.cycle(0)
    loop.cycle(1)
    peak = loop.device.peak
    loop.session.close()
    return peak


def records_of_each_cycle(log: Path) -> list[int]:
    counts = Counter(record.step for record in rs.read_audit(log) if record.step is not None)
    return [counts[number] for number in sorted(counts)]


def test_nothing_grows_and_no_bit_changes_however_long_a_loop_runs(tmp_path: Path) -> None:
    capacity = largest_phase()
    log = tmp_path / "soak.jsonl"
    moving, still = Loop(log, release="eager", capacity=capacity), Loop(None, release="never", capacity=None)
    moving.add_engine(capacity // 2)
    samples: list[Sample] = []
    start = time.perf_counter()
    for number in range(CYCLES):
        moving.cycle(number)
        still.cycle(number)
        if number >= WARM_UP and number % max(1, CYCLES // 12) == 0:
            samples.append(moving.sample())
    seconds = time.perf_counter() - start
    assert len(samples) >= 10
    assert len(set(samples)) == 1, f"it grows: {samples[0]} became {samples[-1]}"
    assert samples[0].device_peak <= capacity
    assert samples[0].device_resident == 0
    counts = records_of_each_cycle(log)
    assert len(counts) == CYCLES
    assert len(set(counts[WARM_UP:])) == 1, counts
    for ours, theirs in ((moving.results, still.results), (moving.state(), still.state())):
        assert len(ours) == len(theirs) > 0
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    moving.session.close()
    still.session.close()
    assert_log_is_consistent(log)
    print(  # noqa: T201 (`make soak` shows it)
        f"\n{CYCLES} cycles in {seconds:.0f} s; {counts[-1]} records a cycle, {sum(counts)} in all; "
        f"{moving.device.bytes_in + moving.device.bytes_out:,} bytes copied; capacity {capacity:,}; {samples[-1]}"
    )
