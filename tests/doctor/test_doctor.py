"""The doctor: facts are read right, judged right, and every warning says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

from rl_session.cli import _app
from rl_session.doctor import Level, examine, judge
from rl_session.doctor.bandwidth import measure_copies
from rl_session.doctor.facts import cgroup_limit, gather, meminfo, numa_of_cpus, parse_cpulist
from rl_session.doctor.verdict import Accelerator, Copies, Facts

GIB = 2**30
GPU = Accelerator(index=0, name="H200", total_bytes=140 * GIB, free_bytes=139 * GIB, numa_node=0)
FAST = Copies(
    where="cuda:0", pinned_out=55e9, pinned_in=55e9, pageable_out=9e9, pageable_in=9e9, fresh_out=2e9, pin_error=""
)
GOOD = Facts(
    python=(3, 11, 7),
    torch="2.13.0+cu130",
    ray="2.60.0",
    cuda_built="13.0",
    cuda_driver=(13, 0),
    accelerators=(GPU,),
    host_total=2000 * GIB,
    host_available=1900 * GIB,
    memlock=None,
    shm_free=64 * GIB,
    numa_nodes=(0,),
    numa_affinity=(0,),
    cpus=64,
    copies=FAST,
)


def levels(facts: Facts) -> dict[str, Level]:
    return {finding.topic: finding.level for finding in judge(facts)}


def test_a_good_machine_has_nothing_to_mend() -> None:
    findings = judge(GOOD)
    assert {finding.level for finding in findings} == {Level.OK}
    assert not any(finding.advice for finding in findings)


@pytest.mark.parametrize(
    ("change", "topic", "level", "advice"),
    [
        ({"python": (3, 10, 1)}, "python", Level.FAILURE, "3.11"),
        ({"torch": None, "torch_error": "no such file"}, "torch", Level.FAILURE, "pip install"),
        ({"torch": "2.5.1"}, "torch", Level.FAILURE, "pip install"),
        ({"accelerators": (), "cuda_driver": (12, 2)}, "cuda", Level.WARNING, "driver"),
        ({"accelerators": (), "cuda_error": "no device"}, "cuda", Level.WARNING, "CUDA_VISIBLE_DEVICES"),
        ({"accelerators": (attrs.evolve(GPU, free_bytes=GIB),)}, "cuda:0", Level.WARNING, "nvidia-smi"),
        ({"host_total": 64 * GIB}, "host memory", Level.WARNING, "host_budget"),
        (
            {"copies": attrs.evolve(FAST, pinned_out=None, pin_error="no room")},
            "pinned memory",
            Level.WARNING,
            "ulimit",
        ),
        ({"memlock": 8 * 2**20}, "pinned memory", Level.NOTE, "ulimit"),
        ({"copies": attrs.evolve(FAST, pinned_out=9e9)}, "copies cuda:0", Level.WARNING, "NUMA"),
        ({"numa_nodes": (0, 1), "numa_affinity": (1,)}, "numa", Level.WARNING, "--cpunodebind=0"),
        ({"numa_nodes": (0, 1), "numa_affinity": (0, 1)}, "numa", Level.NOTE, "--membind=0"),
        ({"ray": None}, "ray", Level.WARNING, "pip install ray"),
        ({"shm_free": 64 * 2**20}, "ray", Level.WARNING, "--shm-size"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(
    change: dict[str, object], topic: str, level: Level, advice: str
) -> None:
    found = {finding.topic: finding for finding in judge(attrs.evolve(GOOD, **change))}
    assert found[topic].level is level
    assert advice in found[topic].advice
    others = {name: finding.level for name, finding in found.items() if name != topic}
    assert Level.FAILURE not in others.values()


def test_a_cpu_build_is_a_note_and_no_warning() -> None:
    facts = attrs.evolve(GOOD, cuda_built=None, accelerators=(), cuda_driver=None, copies=None)
    assert levels(facts)["cuda"] is Level.NOTE
    assert Level.WARNING not in levels(facts).values()


def test_what_cannot_be_read_is_left_out() -> None:
    assert set(levels(Facts(python=(3, 11, 0), torch="2.6.0", ray="2.40"))) == {
        "python",
        "torch",
        "cuda",
        "pinned memory",
        "ray",
    }


def test_meminfo_is_read_in_bytes() -> None:
    text = "MemTotal:       24664132 kB\nMemAvailable:   100 kB\nHugePages_Total:       0\n"
    assert meminfo(text) == {"MemTotal": 24664132 * 1024, "MemAvailable": 102400}


@pytest.mark.parametrize(("text", "numbers"), [("0-3", {0, 1, 2, 3}), ("0,2-3\n", {0, 2, 3}), ("", set()), ("7", {7})])
def test_cpu_lists_are_read(text: str, numbers: set[int]) -> None:
    assert parse_cpulist(text) == numbers


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tightest_control_group_limit_counts(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/outer/inner\n")
    write(tmp_path / "sys/fs/cgroup/outer/inner/memory.max", "max\n")
    write(tmp_path / "sys/fs/cgroup/outer/memory.max", "4096\n")
    assert cgroup_limit(tmp_path) == 4096
    write(tmp_path / "sys/fs/cgroup/outer/inner/memory.max", "1024\n")
    assert cgroup_limit(tmp_path) == 1024


def test_no_control_group_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_limit(tmp_path) is None
    write(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert cgroup_limit(tmp_path) is None


def test_numa_nodes_are_those_of_the_cpus(tmp_path: Path) -> None:
    write(tmp_path / "sys/devices/system/node/node0/cpulist", "0-1\n")
    write(tmp_path / "sys/devices/system/node/node1/cpulist", "2-3\n")
    assert numa_of_cpus(tmp_path, {2}) == ((0, 1), (1,))


def test_an_empty_root_gives_facts_all_the_same(tmp_path: Path) -> None:
    facts = gather(measure=False, root=tmp_path)
    assert facts.host_total is None
    assert facts.torch is not None
    assert facts.copies is None


def test_copies_are_really_timed() -> None:
    copies = measure_copies("cpu", nbytes=2**16, repeats=2)
    assert copies.pageable_out > 0
    assert copies.pageable_in > 0
    assert copies.pinned_out is None
    assert copies.where == "cpu"


def test_this_machine_is_examined_whole() -> None:
    topics = [finding.topic for finding in examine(measure=False)]
    assert topics[:2] == ["python", "torch"]
    assert "ray" in topics


def test_the_command_prints_json_and_its_status() -> None:
    result = CliRunner().invoke(_app, ["doctor", "--json", "--no-measure"])
    told = json.loads(result.stdout)
    assert result.exit_code == (0 if told["ok"] else 1)
    assert {"topic", "level", "found", "advice"} == set(told["findings"][0])


def test_a_failure_is_exit_status_one(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = judge(attrs.evolve(GOOD, torch=None, torch_error="libfoo.so: \x1b[31mnot found"))
    monkeypatch.setattr("rl_session.doctor.examine", lambda measure: broken)
    result = CliRunner().invoke(_app, ["doctor"])
    assert result.exit_code == 1
    assert "do: pip install" in result.stdout
    assert "\x1b" not in result.stdout
    assert "1 failure, 0 warnings" in result.stdout
