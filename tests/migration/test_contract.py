"""The shim does to the state vector what the contract's tables say, for every sequence of up to four legacy calls.

Sequences are not run one by one: states are explored. From every state that some sequence of up to three calls reaches, every
call is made once on a real model, and the vector found by looking at storages is compared with the one the tables give. Every
sequence is then a path of compared steps; that there are as many paths as sequences is counted, not assumed. A state is the
vector, what is known of the train step, and the library's mode; that nothing else matters is tried with long random sequences.
"""

from __future__ import annotations

import gc
import random
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import POLICY_CALLS, VALUE_CALLS, Contract
from torch import Tensor

import rl_session as rs

DEPTH = 4

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "policy-dtensor": {},
    "policy-dtensor-lp": {"lp": True},
    "policy-megatron": {"backend": "megatron"},
    "policy-megatron-lp": {"backend": "megatron", "lp": True},
    "policy-megatron-norefit": {"backend": "megatron", "refit": False},
    "policy-megatron-owns": {"backend": "megatron", "owns": True, "lp": True},
    "value-dtensor": {"kind": "value"},
    "value-megatron": {"kind": "value", "backend": "megatron", "lp": True},
}


def nll(logits: Tensor, batch: Any, seqs: Any, tokens: Any) -> tuple[Tensor, dict[str, Any]]:
    del seqs
    if logits.shape[-1] == 1:
        return logits.float().square().sum() / tokens, {}
    logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    return -logprobs.gather(-1, batch["input_ids"][:, 1:, None]).sum() / tokens, {}


BATCH = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "input_lengths": torch.tensor([3, 2])}


class World:
    """A real model behind the shim, and the contract beside it."""

    def __init__(self, make: Callable[..., Any], folder: Path, options: dict[str, Any]) -> None:
        flags = {"kind": "policy", "backend": "dtensor", "lp": False, "refit": True, "owns": False, **options}
        self.contract = Contract(
            flags["kind"], flags["backend"], lp=flags["lp"], refit=flags["refit"], owns=flags["owns"]
        )
        config = {
            "offload_optimizer_for_logprob": flags["lp"],
            "offload_optimizer_for_refit": flags["refit"],
            "megatron_cfg": {"optimizer": {"optimizer_cpu_offload": flags["owns"]}},
        }
        self.rig = make(
            kind=flags["kind"],
            backend=flags["backend"],
            flat=flags["backend"] == "megatron",
            config=config,
            log=False,
        )
        self.folder = folder

    def key(self) -> tuple[Any, ...]:
        policy = self.rig.policy
        assert (policy.open_step is not None) is self.contract.is_open
        return (*self.contract.key(), policy.mode)

    def make_call(self, name: str) -> Any:
        legacy: Any = self.rig.legacy
        special: dict[str, Callable[[], Any]] = {
            "prepare_for_lp_inference(keep)": lambda: legacy.prepare_for_lp_inference(keep_train_buffers=True),
            "train": lambda: legacy.train(BATCH, nll),
            "train(eval)": lambda: legacy.train(BATCH, nll, eval_mode=True),
            "get_logprobs": lambda: legacy.get_logprobs(BATCH),
            "get_values": lambda: legacy.get_values(BATCH),
            "begin_train_step": lambda: legacy.begin_train_step(nll),
            "train_microbatches": lambda: legacy.train_microbatches(BATCH),
            "save_checkpoint": lambda: legacy.save_checkpoint(self.folder / "weights"),
            "save_checkpoint(optimizer)": lambda: legacy.save_checkpoint(
                self.folder / "all", self.folder / "optimizer"
            ),
        }
        return special.get(name, getattr(legacy, name.partition("(")[0]))()

    def make_call_and_catch(self, name: str) -> tuple[Any, rs.RLSessionError | None]:
        try:
            return self.make_call(name), None
        except rs.RLSessionError as error:
            return None, error

    def step(self, name: str) -> None:
        """Make a call on both, and compare."""
        held = self.contract.has_chunk and self.rig.gradient_bytes()
        expected = self.contract.call(name)
        result, error = self.make_call_and_catch(name)
        if error is not None:
            check_refusal(name, expected, error)
        else:
            assert not expected, f"{name} worked, and was to be refused ({expected})"
            check_result(name, result)
        assert self.rig.seen() == self.contract.vector, f"after {name}"
        if held and self.contract.has_chunk and name != "train_microbatches":
            assert self.rig.gradient_bytes() == held, f"{name} changed gradients of the open step"


def check_refusal(name: str, expected: str, error: rs.RLSessionError) -> None:
    assert expected, f"{name} raised where legacy worked: {error}"
    assert isinstance(error, rs.UsageError | rs.ArgumentError)
    if expected == "away":
        assert "prepare_for_" in error.remedy, "the missing legacy call is named"
        assert "with " in error.remedy, "the scope is named"
        assert "_mode()" in error.remedy


def check_result(name: str, result: Any) -> None:
    if name in ("prepare_for_generation", "finish_generation", "invalidate_kv_cache"):
        assert result is True
    elif name.startswith("train") and name != "train_microbatches":
        assert {"loss", "grad_norm", "all_mb_metrics"} <= result.keys()
    elif name == "finish_train_step":
        assert result["loss"].shape == (1,)
    elif name == "get_logprobs":
        assert result["logprobs"].shape == (2, 3)
    elif name == "get_values":
        assert result["values"].shape == (2, 3)
    else:
        assert result is None


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    """Each release collects garbage: what was there before the test need not be looked at every time."""
    warnings.simplefilter("ignore", DeprecationWarning)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Explorer:
    """Walks the graph of states, trying every call in every state that is reached within the depth.

    Attributes:
        edges: State to call to the state that follows.
        num_worlds: How many models it took.
    """

    def __init__(self, build: Callable[[], World], calls: tuple[str, ...]) -> None:
        self.build = build
        self.calls = calls
        self.world = build()
        self.num_worlds = 1
        self.start = self.world.key()
        self.edges: dict[Any, dict[str, Any]] = {self.start: {}}

    def explore(self, depth: int) -> None:
        while True:
            distance = self._distances()
            wanted = {s for s, d in distance.items() if d < depth and len(self.edges[s]) < len(self.calls)}
            if not wanted:
                return
            self._go_to(wanted)
            here = self.world.key()
            self._try(next(call for call in self.calls if call not in self.edges[here]))

    def _try(self, call: str) -> None:
        before = self.world.key()
        self.world.step(call)
        after = self.world.key()
        known = self.edges[before].setdefault(call, after)
        assert known == after, f"{call} in {before} led to {known} before, and to {after} now"
        self.edges.setdefault(after, {})

    def _distances(self) -> dict[Any, int]:
        distance, queue = {self.start: 0}, deque([self.start])
        while queue:
            state = queue.popleft()
            for after in self.edges[state].values():
                if after not in distance:
                    distance[after] = distance[state] + 1
                    queue.append(after)
        return distance

    def _go_to(self, wanted: set[Any]) -> None:
        """The shortest way over known edges to one of ``wanted``, from here or from a new model."""
        here = self.world.key()
        path = self._path(here, wanted)
        if path is None:
            self.world = self.build()
            self.num_worlds += 1
            path = self._path(self.world.key(), wanted)
        assert path is not None
        for call in path:
            self._try(call)

    def _path(self, start: Any, wanted: set[Any]) -> list[str] | None:
        queue, seen = deque([(start, list[str]())]), {start}
        while queue:
            state, path = queue.popleft()
            if state in wanted:
                return path
            for call, after in self.edges.get(state, {}).items():
                if after not in seen:
                    seen.add(after)
                    queue.append((after, [*path, call]))
        return None

    def num_sequences(self, depth: int) -> list[int]:
        """How many sequences of each length are paths of compared steps."""
        found, frontier = [], Counter({self.start: 1})
        for _ in range(depth):
            following: Counter[Any] = Counter()
            for state, count in frontier.items():
                for after in self.edges[state].values():
                    following[after] += count
            found.append(following.total())
            frontier = following
        return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_sequence_of_up_to_four_calls_does_what_the_tables_say(
    make: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    options = CONFIGURATIONS[name]
    calls = VALUE_CALLS if options.get("kind") == "value" else POLICY_CALLS
    explorer = Explorer(lambda: World(make, tmp_path, options), calls)
    explorer.explore(DEPTH)
    assert explorer.num_sequences(DEPTH) == [len(calls) ** length for length in range(1, DEPTH + 1)]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_long_random_sequences_do_too(make: Callable[..., Any], tmp_path: Path, name: str) -> None:
    """What the exploration takes for one state may not behave as two."""
    options = CONFIGURATIONS[name]
    calls = VALUE_CALLS if options.get("kind") == "value" else POLICY_CALLS
    draw = random.Random(name)
    for _ in range(5):
        world = World(make, tmp_path, options)
        for _ in range(24):
            world.step(draw.choice(calls))
