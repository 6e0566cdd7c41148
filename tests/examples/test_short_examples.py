"""The short examples run, learn, and explain themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from scripts import load_script

import rl_session as rs

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_quickstart_shows_where_the_bytes_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "run.jsonl"
    losses = load_script("examples/quickstart.py").main(["--steps", "3", "--audit", str(log)])
    assert losses[-1] < losses[0]
    shown = capsys.readouterr().out
    assert [line.split()[1:9:2] for line in shown.splitlines() if "params" in line] == [
        ["params", "device", "device", "device"]
    ]
    modes = {record.event.mode for record in rs.read_audit(log) if record.name == "scope.entered"}
    assert modes == {"logprob", "training", "refit"}


def test_dpo_learns_and_moves_nothing_between_steps(tmp_path: Path) -> None:
    log = tmp_path / "dpo.jsonl"
    before, after = load_script("examples/dpo.py").main(["--steps", "25", "--log", str(log)])
    assert after > before + 0.05
    committed = [record for record in rs.read_audit(log) if record.name == "transition.committed"]
    assert len(committed) == 7, "into and out of two evaluations and one training scope, and home at the end"
    assert not [record for record in committed if record.step is not None]


def test_asynchronous_rollouts_lag_and_learn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = load_script("examples/async_rollouts.py").main(["--steps", "24", "--log", str(tmp_path / "async.jsonl")])
    assert len(rewards) == 24
    assert sum(rewards[-4:]) / 4 > rewards[0]
    assert "12" in capsys.readouterr().out


def test_the_adapter_gives_the_losses_of_the_manual_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = load_script("examples/nemo_rl_adapter.py").main(["--steps", "5", "--log-dir", str(tmp_path)])
    hand, scoped = outcomes["by_hand"], outcomes["in_scopes"]
    assert hand.losses == scoped.losses
    assert len(set(hand.losses)) == 5
    assert scoped.rewards[-1] > scoped.rewards[0] + 0.1
    assert scoped.peak <= hand.peak
    assert "to the last bit: yes" in capsys.readouterr().out
    for name in outcomes:
        entered = {
            r.policy for r in rs.read_audit(tmp_path / f"nemo_rl_{name}.jsonl") if r.name == "transition.started"
        }
        assert entered == {"policy", "value"}


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_no_steps_is_refused_with_usage(
    example: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [example.name, "--steps", "0"])
    with pytest.raises(SystemExit) as raised:
        load_script(f"examples/{example.name}").main()
    assert raised.value.code == 2
    said = capsys.readouterr().err
    assert "usage:" in said
    assert "at least 1" in said


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_has_help(
    example: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [example.name, "--help"])
    with pytest.raises(SystemExit) as raised:
        load_script(f"examples/{example.name}").main()
    assert raised.value.code == 0
    assert "--steps" in capsys.readouterr().out
