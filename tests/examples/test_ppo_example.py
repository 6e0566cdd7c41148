"""The PPO example fits into its device, its losses do not depend on when bytes leave, and its log is consistent."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from scripts import load_script

import rl_session as rs
from rl_session.audit.check import assert_log_is_consistent

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ppo.py"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("ppo")
    return {release: folder / f"{release}.jsonl" for release in ("eager", "lazy")}


@pytest.fixture(scope="module")
def outputs(logs: dict[str, Path]) -> dict[str, str]:
    """What the example prints, two steps each way."""
    example, found = load_script("examples/ppo.py"), {}
    for release, log in logs.items():
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
            patch.setenv("COLUMNS", "200")
            example.main(["--steps", "2", "--warmup-steps", "2", "--losses", "--release", release, "--log", str(log)])
        found[release] = printed.getvalue()
    return found


def losses(output: str) -> list[str]:
    return re.findall(r"(?:actor|critic) loss \S+", output)


def number(output: str, row: str) -> int:
    """The number in a row of the table."""
    found = re.search(rf"{re.escape(row)}\W+([\d,]+)", output)
    assert found, output
    return int(found[1].replace(",", ""))


def bytes_moved(log: Path) -> int:
    return sum(r.event.bytes_moved for r in rs.read_audit(log) if r.name == "transition.committed")


def bytes_swapped(log: Path) -> int:
    return sum(r.event.nbytes for r in rs.read_audit(log) if r.name == "reference.swapped")


def test_losses_are_the_same_to_the_last_bit_eager_and_lazy(outputs: dict[str, str]) -> None:
    assert len(losses(outputs["eager"])) == 4
    assert losses(outputs["eager"]) == losses(outputs["lazy"])


def test_lazy_moves_fewer_bytes_and_the_table_says_what_the_log_says(
    outputs: dict[str, str], logs: dict[str, Path]
) -> None:
    moved = {release: bytes_moved(log) for release, log in logs.items()}
    swapped = {release: bytes_swapped(log) for release, log in logs.items()}
    assert 0 < moved["lazy"] + swapped["lazy"] < moved["eager"] + swapped["eager"]
    for release, output in outputs.items():
        assert number(output, "bytes moved") == moved[release]
        assert number(output, "bytes swapped for the reference") == swapped[release]


@pytest.mark.parametrize("release", ["eager", "lazy"])
def test_four_tenants_never_hold_more_than_the_device_has(
    outputs: dict[str, str], logs: dict[str, Path], release: str
) -> None:
    capacity = number(outputs[release], "device capacity")
    peak = number(outputs[release], "device peak")
    assert 0 < peak <= capacity
    assert re.search(r"peak <= capacity\W+True", outputs[release])

    # Not even the weights and moments of the two fit side by side: the capacity is a real one.
    nbytes = {
        record.policy: sum(record.event.nbytes.values())
        for record in rs.read_audit(logs[release])
        if record.name == "policy.created"
    }
    assert capacity < nbytes["actor"] + 3 * nbytes["critic"]


@pytest.mark.parametrize("release", ["eager", "lazy"])
def test_the_log_of_a_run_is_consistent(outputs: dict[str, str], logs: dict[str, Path], release: str) -> None:
    assert outputs[release]
    assert_log_is_consistent(logs[release])


def test_lazy_evicts_one_tenant_for_the_other(outputs: dict[str, str], logs: dict[str, Path]) -> None:
    assert outputs["lazy"]
    evicted = {
        record.policy
        for record in rs.read_audit(logs["lazy"])
        if record.name == "transition.started" and record.event.reason.startswith("evicted for ")
    }
    assert evicted == {"actor", "critic"}
