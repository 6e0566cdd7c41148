"""What is read from the system: versions, memory, limits, NUMA, CUDA devices.

Reads and never judges. What cannot be read is None. Paths under ``root`` can be made up by tests.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rl_session.doctor.bandwidth import measure_copies
from rl_session.doctor.verdict import Accelerator, Facts

__all__ = ["cgroup_limit", "gather", "meminfo", "numa_of_cpus", "parse_cpulist"]


def gather(*, measure: bool = True, root: Path = Path("/")) -> Facts:
    """Everything that can be read here.

    Args:
        measure: Whether copies are timed too.
        root: Where ``proc`` and ``sys`` are.
    """
    total, available = _host_memory(root)
    cpus = _affinity()
    nodes, here = numa_of_cpus(root, cpus)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    facts: dict[str, Any] = {
        "python": sys.version_info[:3],
        "ray": _installed("ray"),
        "ray_address": os.environ.get("RAY_ADDRESS"),
        "host_total": total,
        "host_available": available,
        "memlock": None if soft == resource.RLIM_INFINITY else soft,
        "shm_free": _free_of(root / "dev/shm"),
        "numa_nodes": nodes,
        "numa_affinity": here,
        "cpus": len(cpus),
    }
    try:
        import torch
    except Exception as error:  # a broken install raises anything: OSError of a missing library, ...
        return Facts(**facts, torch_error=f"{type(error).__name__}: {error}")
    facts |= _cuda_facts(torch, root)
    copies = measure_copies("cuda:0" if facts["accelerators"] else "cpu") if measure else None
    return Facts(**facts, torch=torch.__version__, copies=copies)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _free_of(path: Path) -> int | None:
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def meminfo(text: str) -> dict[str, int]:
    """``/proc/meminfo`` as bytes by name."""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def cgroup_limit(root: Path) -> int | None:
    """The memory limit of this process's control group (version 2 or 1), or None where there is none."""
    own = _read(root / "proc/self/cgroup") or ""
    unified = re.search(r"^0::(/.*)$", own, re.MULTILINE)
    folder = unified.group(1).lstrip("/") if unified else ""
    limits = []
    places = [root / "sys/fs/cgroup" / folder, *(root / "sys/fs/cgroup" / folder).parents]
    for place in places:  # a limit of an outer group binds too
        if not place.is_relative_to(root / "sys/fs/cgroup"):
            break
        limits += [_read(place / "memory.max")]
    limits += [_read(root / "sys/fs/cgroup/memory/memory.limit_in_bytes")]
    # Version 1 says "no limit" as a number near 2**63.
    found = [int(text) for text in limits if text and text.strip().isdigit() and int(text) < 2**60]
    return min(found, default=None)


def _host_memory(root: Path) -> tuple[int | None, int | None]:
    text = _read(root / "proc/meminfo")
    if text is None:
        return None, None
    known = meminfo(text)
    total, available = known.get("MemTotal"), known.get("MemAvailable")
    limit = cgroup_limit(root)
    if limit is not None and total is not None and limit < total:
        return limit, None if available is None else min(available, limit)
    return total, available


def parse_cpulist(text: str) -> set[int]:
    """``0-3,8`` as numbers."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def numa_of_cpus(root: Path, cpus: Iterable[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """All NUMA nodes, and those of ``cpus``."""
    wanted = set(cpus)
    nodes: dict[int, set[int]] = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        nodes[int(folder.name[4:])] = parse_cpulist(_read(folder / "cpulist") or "")
    return tuple(sorted(nodes)), tuple(sorted(node for node, own in nodes.items() if own & wanted))


def _cuda_facts(torch: Any, root: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"cuda_built": torch.version.cuda, "accelerators": ()}
    if torch.version.cuda is None:
        return facts
    number = torch._C._cuda_getDriverVersion() if hasattr(torch._C, "_cuda_getDriverVersion") else 0  # noqa: SLF001
    facts["cuda_driver"] = (number // 1000, number % 1000 // 10) if number else None
    try:
        torch.cuda.init()
        facts["accelerators"] = tuple(_accelerator(torch, index, root) for index in range(torch.cuda.device_count()))
    except Exception as error:  # no driver, no device, a device that is broken
        facts["cuda_error"] = str(error).splitlines()[0] if str(error) else type(error).__name__
    return facts


def _accelerator(torch: Any, index: int, root: Path) -> Accelerator:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    bus = f"{getattr(properties, 'pci_domain_id', 0):04x}:{getattr(properties, 'pci_bus_id', 0):02x}:00.0"
    node = _read(root / "sys/bus/pci/devices" / bus / "numa_node")
    return Accelerator(
        index=index,
        name=properties.name,
        total_bytes=total,
        free_bytes=free,
        numa_node=int(node) if node is not None and node.strip().lstrip("-").isdigit() else None,
    )
