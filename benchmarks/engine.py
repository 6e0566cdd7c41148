"""What moving costs: a policy off the device and back, against the floor and against moving tensor by tensor.

    python benchmarks/engine.py
    python benchmarks/engine.py --shapes 1gib-in-16mib 64mib-in-1kib --profile

One cycle takes changed bytes out and brings them back, as users get it: guards, clean check, transaction, records.

    floor    one copy of the same bytes into warm memory, one into a fresh allocation
    bare     the least that goes tensor by tensor: packed copies, ``resize_(0)``, ``resize_(n)``, and nothing around them
    legacy   ``t.clone()`` tensor by tensor into fresh memory, each way, as a loop with ``.to("cpu")`` and ``.to("cuda")`` does
    ours     ``policy.switch("offloaded")`` and ``policy.switch("resident")``

"torch us" is what ``bare`` takes beyond the floor, "engine us" what a cycle of ours takes beyond ``bare``, both by storage
and direction. One thread does all the work, and its own time is what counts: neighbours on the machine are not in it.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Iterator
from typing import Any

import torch
from harness import interleave, parser, report, show
from torch import Tensor, nn

import rl_session as rs

KIB, MIB, GIB = 2**10, 2**20, 2**30
LEVEL = {
    "1gib-in-16mib": (GIB, 16 * MIB),
    "1gib-in-1mib": (GIB, MIB),
    "1gib-in-256kib": (GIB, 256 * KIB),
    "256mib-in-16kib": (256 * MIB, 16 * KIB),
    "64mib-in-1kib": (64 * MIB, KIB),
}


def dense_8b(scale: int) -> list[int]:
    """Elements of the weights of an 8B dense model (32 blocks of 4096, 14336 wide, 128,256 tokens), divided by ``scale``."""
    hidden, wide, kv, tokens = 4096, 14336, 1024, 128256
    block = [hidden * hidden, hidden * kv, hidden * kv, hidden * hidden, *[hidden * wide] * 3, hidden, hidden]
    return [max(16, n // scale) for n in [hidden * tokens, *block * 32, hidden, hidden * tokens]]


def moe_30b(scale: int) -> list[int]:
    """Elements of the weights of a 30B model with 128 experts in each of 48 blocks (18,867 tensors), divided by ``scale``."""
    hidden, wide, tokens = 2048, 768, 151936
    attention = [hidden * 4096, hidden * 512, hidden * 512, 4096 * hidden, 128, 128, hidden, hidden, hidden * 128]
    block = [*attention, *[hidden * wide] * (3 * 128)]
    return [max(16, n // scale) for n in [hidden * tokens, *block * 48, hidden, hidden * tokens]]


def sizes_of(shape: str, smoke: bool) -> list[int]:
    """Bytes of each storage."""
    if shape in LEVEL:
        total, each = LEVEL[shape]
        return [each] * max(2, total // each // (64 if smoke else 1))
    made = {"8b": dense_8b, "30b-moe": moe_30b}[shape](64)
    return [4 * n for n in (made[:20] if smoke else made)]


def parameters(sizes: list[int]) -> Iterator[nn.Parameter]:
    """One parameter a storage, with contents."""
    for number, nbytes in enumerate(sizes):
        yield nn.Parameter(torch.full((nbytes // 4,), float(number)))


class Bare:
    """The same movements without anything around them: no guard, no clean check, no way back, no books."""

    def __init__(self, sizes: list[int]) -> None:
        self.storages = [parameter.untyped_storage() for parameter in parameters(sizes)]
        self.sizes = sizes
        self.device = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in self.storages]
        self.host = list(torch.empty(sum(sizes), dtype=torch.uint8).split(sizes))

    def cycle(self) -> None:
        """Out and back."""
        torch._foreach_copy_(self.host, self.device)
        for storage in self.storages:
            storage.resize_(0)
        for storage, nbytes in zip(self.storages, self.sizes, strict=True):
            storage.resize_(nbytes)
        torch._foreach_copy_(self.device, self.host)


def measure(shape: str, options: Any) -> dict[str, Any]:
    """One row of the table."""
    sizes = sizes_of(shape, options.smoke)
    total = sum(sizes)
    module = nn.Module()
    for number, parameter in enumerate(parameters(sizes)):
        module.register_parameter(f"w{number}", parameter)
    session = rs.Session()
    policy = session.attach(module, base="resident")
    block, warm = torch.ones(total // 4), torch.ones(total // 4)
    there: list[Tensor] = [parameter.detach().clone() for parameter in parameters(sizes)]
    bare = Bare(sizes)

    def floor() -> None:
        warm.copy_(block)
        torch.empty(total // 4).copy_(warm)

    def legacy() -> None:
        away = [tensor.clone() for tensor in there]
        there.clear()  # the device and the host are two heaps: what one frees is no memory for the other's copy
        there.extend([tensor.clone() for tensor in away])

    def ours() -> None:
        policy.switch("offloaded")
        policy.switch("resident")  # whoever is in charge here may write: all of it counts as changed

    before = policy.device.bytes_out  # type: ignore[attr-defined]
    ours()
    assert policy.device.bytes_out - before == total  # type: ignore[attr-defined]
    if options.profile:
        _profile(ours)
    cases = {"floor": floor, "bare": bare.cycle, "legacy": legacy, "ours": ours}
    found = interleave(cases, repeats=options.repeats, clock=time.thread_time)
    session.close()
    middle = {name: sample.median for name, sample in found.items()}
    each = 1e6 / len(sizes) / 2
    return {
        "shape": shape,
        "storages": len(sizes),
        "MiB": round(total / MIB, 1),
        "floor ms": 1e3 * middle["floor"],
        "bare ms": 1e3 * middle["bare"],
        "legacy ms": 1e3 * middle["legacy"],
        "ours ms": 1e3 * middle["ours"],
        "of floor": middle["floor"] / middle["ours"],
        "x legacy": middle["legacy"] / middle["ours"],
        "torch us": each * (middle["bare"] - middle["floor"]),
        "engine us": each * (middle["ours"] - middle["bare"]),
        "spread": max(sample.spread for sample in found.values()),
    }


def _profile(work: Any) -> None:
    profile = cProfile.Profile()
    profile.runcall(work)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def main(argv: list[str] | None = None) -> None:
    """Run."""
    made = parser(str(__doc__))
    made.add_argument("--shapes", nargs="+", choices=[*LEVEL, "8b", "30b-moe"], default=[*LEVEL, "8b", "30b-moe"])
    made.add_argument("--profile", action="store_true", help="print where the time of one cycle goes")
    options = made.parse_args(argv)
    torch.set_num_threads(1)
    rows = [measure(shape, options) for shape in options.shapes]
    show("Off the device and back", rows, note="of floor: floor / ours; x legacy: legacy / ours; medians of one run")
    report({"engine": rows}, options.json)


if __name__ == "__main__":
    main()
