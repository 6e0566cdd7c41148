"""Logs made by running the library with a small model, and ways to edit one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from torch import Tensor, nn

import rl_session as rs
from rl_session.testing import EmulatedDevice

VOCABULARY = 11
Lines = list[dict[str, Any]]


class Tiny(nn.Module):
    """An embedding, a head and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(6, VOCABULARY)
        self.register_buffer("scale", torch.full((6,), 1.5))

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(input_ids) * self.scale)
        return out


def nll(logits: Tensor, batch: Any, seqs: Any, tokens: Any) -> tuple[Tensor, dict[str, Any]]:
    logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    loss = -logprobs.gather(-1, batch["input_ids"][:, 1:, None]).sum() / tokens
    return loss, {"nll": loss.detach()}


BATCH = {"input_ids": torch.arange(20).reshape(4, 5) % VOCABULARY, "input_lengths": torch.full((4,), 5)}


class Run:
    """A session being run, that notes where everything really is when it is told to look.

    Attributes:
        path: The log.
        session: The session.
        policies: Everything attached.
        seen: For each look: how many records were written, policy to component to tier, and policy to mode.
    """

    def __init__(self, path: Path, **session: Any) -> None:
        self.path = path
        self.session = rs.Session(path, **session)
        self.policies: list[Any] = []
        self.seen: list[tuple[int, dict[str, dict[str, str]], dict[str, str]]] = []

    def attach(self, name: str = "actor", *, model: nn.Module | None = None, **options: Any) -> Any:
        """A policy with a model of its own."""
        torch.manual_seed(0)
        model = Tiny() if model is None else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        options.setdefault("device", EmulatedDevice())
        policy = self.session.attach(model, optimizer, name=name, **options)
        self.policies.append(policy)
        return policy

    def look(self) -> None:
        """Note where every component is, by scanning."""
        open_ones = [policy for policy in self.policies if policy.health == "ok"]
        placements = {p.name: {c: t.value for c, t in p.placement.items()} for p in open_ones}
        num = self.path.read_bytes().count(b"\n")
        self.seen.append((num, placements, {p.name: p.mode.value for p in open_ones}))


@pytest.fixture(scope="session")
def make_run() -> Iterator[Callable[..., Run]]:
    """Make sessions to run; they are closed at the end."""
    runs: list[Run] = []

    def make(path: Path, **session: Any) -> Run:
        runs.append(Run(path, **session))
        return runs[-1]

    yield make
    for run in runs:
        run.session.close()


@pytest.fixture(scope="session")
def batch() -> dict[str, Tensor]:
    return BATCH


@pytest.fixture(scope="session")
def loss() -> Any:
    return nll


@pytest.fixture(scope="session")
def clean_log(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Run]) -> Path:
    """The log of a run with one of everything: made once, and copied before it is edited."""
    run = make_run(tmp_path_factory.mktemp("clean") / "run.jsonl", host_budget=10**6)
    actor = run.attach(reference="copy")
    with run.session:
        for n in range(2):
            with run.session.step(n):
                with actor.training_mode():
                    actor.train(BATCH, nll)
                    with actor.logprob_mode():
                        actor.get_logprobs(BATCH)
                        actor.get_reference_policy_logprobs(BATCH)
                with actor.logprob_mode(), actor.logprob_mode():
                    actor.get_logprobs(BATCH)
                with actor.training_mode():
                    step = actor.begin_step()
                    step.forward_backward(BATCH, nll)
                    with actor.refit_mode():
                        pass
                    step.commit()
        with pytest.raises(rs.ModeError):
            actor.get_logprobs(BATCH)
    return run.path


def read_lines(path: Path) -> Lines:
    """The records of a file, to be edited."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def write_lines(path: Path, lines: Lines, *, renumber: bool = False) -> Path:
    """Write records, numbered anew if asked to: only then can a missing one be known by what it said."""
    if renumber:
        lines = [{**line, "seq": seq} for seq, line in enumerate(lines)]
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


@pytest.fixture
def edit(tmp_path: Path, clean_log: Path) -> Callable[..., Path]:
    """Edit a copy of the clean log: ``edit(change)`` gives its path, ``change(lines)`` edits in place."""

    def apply(change: Callable[[Lines], object], *, renumber: bool = False) -> Path:
        lines = read_lines(clean_log)
        change(lines)
        return write_lines(tmp_path / "edited.jsonl", lines, renumber=renumber)

    return apply
