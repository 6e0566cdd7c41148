"""From facts about a machine to findings: what is fine, what will be slow, what cannot work, and how to mend it.

Pure: no torch, no files. A fact that could not be read is None and never a failure by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import attrs

__all__ = ["Accelerator", "Copies", "Facts", "Finding", "Level", "judge"]

MIN_PYTHON = (3, 11)
"""The oldest Python that the package installs on (``requires-python``)."""
MIN_TORCH = (2, 6)
"""The oldest torch that the package installs with."""
_GIB = 2**30


class Level(StrEnum):
    """How good a finding is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing to mend."""
    WARNING = "warning"
    """Works, but falls back to something slower."""
    FAILURE = "failure"
    """Does not work."""


@attrs.frozen(kw_only=True)
class Finding:
    """One fact, judged.

    Attributes:
        topic: What it is about, such as "pinned memory".
        level: How good it is.
        found: The fact, in words.
        advice: What to do about it; empty when there is nothing to do.
    """

    topic: str
    level: Level
    found: str
    advice: str = ""


@attrs.frozen(kw_only=True)
class Accelerator:
    """One CUDA device.

    Attributes:
        index: Its number.
        name: What it is called.
        total_bytes: Its memory.
        free_bytes: What is free of it now.
        numa_node: The node it hangs on; None where unknown.
    """

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    numa_node: int | None = None


@attrs.frozen(kw_only=True)
class Copies:
    """Measured throughput in bytes a second (decimal).

    Attributes:
        where: "cuda:0", or "cpu" for the emulated device.
        pinned_out: Device to page-locked host memory; None without CUDA or when pinning failed.
        pinned_in: The way back.
        pageable_out: Device to pageable host memory that is warm.
        pageable_in: The way back.
        fresh_out: Device to host memory allocated for the copy: what ``tensor.cpu()`` pays.
        pin_error: Why pinning failed, if it did.
    """

    where: str
    pinned_out: float | None
    pinned_in: float | None
    pageable_out: float
    pageable_in: float
    fresh_out: float
    pin_error: str = ""


@attrs.frozen(kw_only=True)
class Facts:
    """What was read from the machine.

    Attributes:
        python: Version.
        torch: Version of torch; None when it cannot be imported.
        torch_error: Why torch cannot be imported.
        ray: Installed version of ray; None when it is not.
        ray_address: ``RAY_ADDRESS``, when set.
        cuda_built: The CUDA version that torch was built for; None for a CPU build.
        cuda_driver: The newest CUDA version that the driver serves, as (major, minor).
        cuda_error: Why CUDA is not available although torch was built for it.
        accelerators: CUDA devices.
        host_total: Bytes of host memory that this process may use (the control group's limit counts).
        host_available: Bytes of it that are free.
        memlock: Bytes that this process may lock; None for no limit.
        shm_free: Free bytes of ``/dev/shm``, which Ray's object store lives in; None where there is none.
        numa_nodes: NUMA nodes with memory.
        numa_affinity: Nodes of the CPUs that this process may run on.
        cpus: CPUs that this process may run on.
        copies: Measured throughput; None when not measured.
    """

    python: tuple[int, int, int]
    torch: str | None = None
    torch_error: str = ""
    ray: str | None = None
    ray_address: str | None = None
    cuda_built: str | None = None
    cuda_driver: tuple[int, int] | None = None
    cuda_error: str = ""
    accelerators: tuple[Accelerator, ...] = ()
    host_total: int | None = None
    host_available: int | None = None
    memlock: int | None = None
    shm_free: int | None = None
    numa_nodes: tuple[int, ...] = ()
    numa_affinity: tuple[int, ...] = ()
    cpus: int = 1
    copies: Copies | None = None


def judge(facts: Facts) -> list[Finding]:
    """What the facts mean, in a fixed order."""
    return [
        _python(facts),
        _torch(facts),
        *_cuda(facts),
        *_accelerators(facts),
        *_host(facts),
        *_pinning(facts),
        *_copies(facts),
        *_numa(facts),
        *_ray(facts),
    ]


def _python(facts: Facts) -> Finding:
    found = ".".join(map(str, facts.python))
    if facts.python[:2] < MIN_PYTHON:
        return Finding(topic="python", level=Level.FAILURE, found=found, advice="install Python 3.11 or newer")
    return Finding(topic="python", level=Level.OK, found=found)


def _torch(facts: Facts) -> Finding:
    if facts.torch is None:
        advice = "pip install 'torch>=2.6'"
        return Finding(
            topic="torch", level=Level.FAILURE, found=f"cannot be imported: {facts.torch_error}", advice=advice
        )
    number = tuple(int(part) for part in facts.torch.split("+")[0].split(".")[:2] if part.isdigit())
    if number < MIN_TORCH:
        return Finding(topic="torch", level=Level.FAILURE, found=facts.torch, advice="pip install 'torch>=2.6'")
    return Finding(topic="torch", level=Level.OK, found=facts.torch)


def _cuda(facts: Facts) -> Iterator[Finding]:
    if facts.torch is None:
        return
    if facts.cuda_built is None:
        found = "torch was built without it: the CPU stands in as an emulated device, good for tests and small models"
        yield Finding(topic="cuda", level=Level.NOTE, found=found)
        return
    driver = "" if facts.cuda_driver is None else f", driver serves up to {'.'.join(map(str, facts.cuda_driver))}"
    found = f"torch was built for {facts.cuda_built}{driver}"
    if facts.accelerators:
        yield Finding(topic="cuda", level=Level.OK, found=found)
        return
    built = tuple(int(part) for part in facts.cuda_built.split(".")[:2])
    is_old = facts.cuda_driver is not None and facts.cuda_driver[0] < built[0]
    advice = (
        "update the NVIDIA driver, or install a torch build for it"
        if is_old
        else "check nvidia-smi and CUDA_VISIBLE_DEVICES"
    )
    reason = f": {facts.cuda_error}" if facts.cuda_error else ""
    yield Finding(topic="cuda", level=Level.WARNING, found=f"{found}; no device is usable{reason}", advice=advice)


def _accelerators(facts: Facts) -> Iterator[Finding]:
    for each in facts.accelerators:
        found = f"{each.name}, {_size(each.total_bytes)}, {_size(each.free_bytes)} free"
        if each.free_bytes < each.total_bytes // 2:
            advice = "another process holds it (nvidia-smi); budgets are measured from what is free at session start"
            yield Finding(topic=f"cuda:{each.index}", level=Level.WARNING, found=found, advice=advice)
        else:
            yield Finding(topic=f"cuda:{each.index}", level=Level.OK, found=found)


def _host(facts: Facts) -> Iterator[Finding]:
    if facts.host_total is None:
        return
    available = "" if facts.host_available is None else f", {_size(facts.host_available)} free"
    found = f"{_size(facts.host_total)}{available}, {facts.cpus} CPUs"
    largest = max((each.total_bytes for each in facts.accelerators), default=0)
    if largest and facts.host_total < largest * len(facts.accelerators):
        advice = "what leaves the devices may not fit: set Session(host_budget=...) and offload fewer models at once"
        yield Finding(topic="host memory", level=Level.WARNING, found=found, advice=advice)
    else:
        yield Finding(topic="host memory", level=Level.OK, found=found)


def _pinning(facts: Facts) -> Iterator[Finding]:
    limit = "no limit" if facts.memlock is None else f"at most {_size(facts.memlock)} locked"
    error = facts.copies.pin_error if facts.copies is not None else ""
    if error:
        advice = "ulimit -l unlimited (docker run --ulimit memlock=-1); until then host buffers are pageable"
        yield Finding(topic="pinned memory", level=Level.WARNING, found=f"failed: {error} ({limit})", advice=advice)
    elif not facts.accelerators:
        yield Finding(topic="pinned memory", level=Level.NOTE, found=f"{limit}; only used with CUDA")
    elif facts.memlock is not None and facts.host_total is not None and facts.memlock < facts.host_total // 2:
        # CUDA's own registration is not bound by the limit everywhere; where it is, it fails with a clear error.
        yield Finding(topic="pinned memory", level=Level.NOTE, found=f"works; {limit}", advice="ulimit -l unlimited")
    else:
        yield Finding(topic="pinned memory", level=Level.OK, found=limit)


def _copies(facts: Facts) -> Iterator[Finding]:
    copies = facts.copies
    if copies is None:
        return
    rates = [("pageable", copies.pageable_out, copies.pageable_in), ("fresh memory", copies.fresh_out, None)]
    if copies.pinned_out is not None:
        rates.insert(0, ("pinned", copies.pinned_out, copies.pinned_in))
    found = "; ".join(
        f"{name} {_rate(out)} out" + ("" if back is None else f", {_rate(back)} in") for name, out, back in rates
    )
    slow = copies.pinned_out is not None and copies.pinned_out < 1.2 * copies.pageable_out
    advice = (
        "pinned copies are no faster than pageable ones: check NUMA placement and the PCIe link (nvidia-smi -q)"
        if slow
        else ""
    )
    yield Finding(topic=f"copies {copies.where}", level=Level.WARNING if slow else Level.OK, found=found, advice=advice)


def _numa(facts: Facts) -> Iterator[Finding]:
    if len(facts.numa_nodes) < 2:
        return
    found = f"{len(facts.numa_nodes)} nodes; this process runs on {', '.join(map(str, facts.numa_affinity)) or '?'}"
    nodes = {each.numa_node for each in facts.accelerators if each.numa_node is not None and each.numa_node >= 0}
    foreign = nodes.difference(facts.numa_affinity)
    if foreign or (nodes and len(facts.numa_affinity) > 1):
        node = min(foreign or nodes)
        advice = f"bind each worker to its device's node before the first copy: numactl --cpunodebind={node} --membind={node} ..."
        yield Finding(topic="numa", level=Level.WARNING if foreign else Level.NOTE, found=found, advice=advice)
    else:
        yield Finding(topic="numa", level=Level.OK, found=found)


def _ray(facts: Facts) -> Iterator[Finding]:
    if facts.ray is None:
        advice = "pip install ray  # only RayWorkers needs it"
        yield Finding(topic="ray", level=Level.WARNING, found="not installed", advice=advice)
        return
    address = f", RAY_ADDRESS={facts.ray_address}" if facts.ray_address else ""
    if facts.shm_free is not None and facts.shm_free < _GIB:
        advice = "docker run --shm-size=8g: Ray's object store falls back to disk with less"
        found = f"{facts.ray}{address}; /dev/shm has {_size(facts.shm_free)} free"
        yield Finding(topic="ray", level=Level.WARNING, found=found, advice=advice)
    else:
        yield Finding(topic="ray", level=Level.OK, found=f"{facts.ray}{address}")


def _size(nbytes: float) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB / 10 else f"{nbytes / 2**20:.1f} MiB"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f} GB/s"
