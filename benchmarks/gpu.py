"""A policy off a CUDA device and back, against that machine's own limits; one prepared script, a few minutes at most.

    python benchmarks/gpu.py                       # needs CUDA; without it says so and measures nothing
    python benchmarks/gpu.py --device cpu --smoke  # whether the script runs; its figures mean nothing

    peak     one ``cudaMemcpyAsync`` of the same bytes between the device and page-locked memory
    legacy   ``t.to("cpu")`` and ``t.to("cuda")`` tensor by tensor, into pageable memory, as manual loops do
    ours     ``policy.switch("offloaded")`` and ``policy.switch("resident")``, as users get them

And three checks, without which the figures mean nothing: the memory is free by the driver's own account, losses are the same
to the last bit with and without offloading, and touching an offloaded parameter is an error that says what to write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from harness import Sample, interleave, parser, report, show
from torch import Tensor, nn

import rl_session as rs

MIB, GIB = 2**20, 2**30
SHAPES = {
    "4gib-in-64mib": (4 * GIB, 64 * MIB),
    "4gib-in-1mib": (4 * GIB, MIB),
    "1gib-in-256kib": (GIB, 256 * 1024),
    "64mib-in-16kib": (64 * MIB, 16 * 1024),
}
PEAK_GOAL, LEGACY_GOAL = 0.9, 8.0
"""The least share of the peak, and the least multiple of legacy."""


@attrs.frozen
class Where:
    """The device that is measured; "cpu" is for trying the script."""

    name: str

    @property
    def is_cuda(self) -> bool:
        """Whether it is real."""
        return self.name.startswith("cuda")

    def wait(self) -> None:
        """For everything under way."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def host(self, nbytes: int) -> Tensor:
        """Warm host memory, page-locked where that means something."""
        return torch.ones(nbytes, dtype=torch.uint8, pin_memory=self.is_cuda)

    def free_bytes(self) -> int:
        """What the driver says is free."""
        return torch.cuda.mem_get_info()[0] if self.is_cuda else 0

    def describe(self) -> dict[str, Any]:
        """Device, driver and versions, for the record."""
        if not self.is_cuda:
            return {"device": "cpu, emulated: no figure here means anything"}
        return {
            "device": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "GiB": round(torch.cuda.get_device_properties(0).total_memory / GIB, 1),
        }


def waiting(where: Where, work: Callable[[], object]) -> Callable[[], None]:
    """``work``, complete."""

    def run() -> None:
        work()
        where.wait()

    return run


def measure(shape: str, where: Where, options: Any) -> dict[str, Any]:
    """One row: seconds out and in, three ways, taken in turns."""
    total, each = SHAPES[shape]
    count = max(2, total // each // (64 if options.smoke else 1))
    total = count * each
    module = nn.Module()
    for number in range(count):
        values = torch.full((each // 4,), float(number), device=where.name)
        module.register_parameter(f"w{number}", nn.Parameter(values))
    tensors = [torch.ones(each // 4, device=where.name) for _ in range(count)]
    hosts: list[Tensor] = [tensor.to("cpu", copy=True) for tensor in tensors]
    block, pinned = torch.ones(total, dtype=torch.uint8, device=where.name), where.host(total)

    def legacy_out() -> None:
        hosts[:] = [tensor.to("cpu", copy=True) for tensor in tensors]

    def legacy_in() -> None:
        tensors[:] = [host.to(where.name, copy=True) for host in hosts]

    with rs.Session() as session:
        policy = session.attach(module, base="resident", device=where.name)
        policy.switch("offloaded")
        policy.switch("resident")
        cases = {
            "peak out": lambda: pinned.copy_(block, non_blocking=True),
            "legacy out": legacy_out,
            "ours out": lambda: policy.switch("offloaded"),
            "peak in": lambda: block.copy_(pinned, non_blocking=True),
            "legacy in": legacy_in,
            "ours in": lambda: policy.switch("resident"),
        }
        found = interleave({name: waiting(where, case) for name, case in cases.items()}, repeats=options.repeats)
        policy.switch("resident")
    return {"shape": shape, "storages": count, "MiB": total // MIB, **_rates(found, total)}


def _rates(found: dict[str, Sample], total: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for way in ("out", "in"):
        peak, legacy, ours = (found[f"{who} {way}"].median for who in ("peak", "legacy", "ours"))
        row |= {
            f"{way} GB/s": total / ours / 1e9,
            f"peak {way} GB/s": total / peak / 1e9,
            f"{way} of peak": peak / ours,
            f"{way} x legacy": legacy / ours,
        }
    return row


class Small(nn.Module):
    """A model whose kernels are deterministic on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 256)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
        self.head = nn.Linear(256, 128)

    def forward(self, input_ids: Tensor, **_: Tensor) -> Tensor:
        """``input_ids [b, S]`` to logits ``[b, S, V]``."""
        hidden = self.embed(input_ids)
        return self.head(hidden + self.layers(hidden))  # type: ignore[no-any-return]


def losses(where: Where, release: str, steps: int) -> list[float]:
    """Losses of a few steps; the optimizer's state goes out and comes back between them, or not."""
    torch.manual_seed(0)
    model = Small().to(where.name)
    ids = torch.randint(0, 128, (8, 32), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "input_lengths": torch.full((8,), 32)}
    found: list[float] = []
    with rs.Session(release=release, verify="checksum") as session:  # type: ignore[arg-type]
        policy = session.attach(model, torch.optim.AdamW(model.parameters(), lr=1e-3), device=where.name)
        for _ in range(steps):
            with policy.logprob_mode():
                found += [policy.get_logprobs(batch)["logprobs"].sum().item()]
            with policy.training_mode():
                found += policy.train(batch, _loss)["loss"].tolist()
    return found


def _loss(logits: Tensor, batch: dict[str, Tensor], seqs: float, tokens: float) -> tuple[Tensor, dict[str, Any]]:
    del seqs
    ids = batch["input_ids"].to(logits.device)
    nll = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2).float(), ids[:, 1:], reduction="sum")
    return nll / tokens, {}


def check(where: Where, options: Any) -> list[dict[str, str]]:
    """The three checks, each with what was seen.

    Raises:
        RuntimeError: One of them does not hold.
    """
    nbytes = (4 if options.smoke else 1024) * MIB
    model = nn.Linear(1, nbytes // 4, bias=False, device=where.name)
    with rs.Session() as session:
        policy = session.attach(model, base="resident", device=where.name)
        held = where.free_bytes()
        policy.switch("offloaded")
        freed = where.free_bytes() - held
        if where.is_cuda and freed < 0.99 * nbytes:
            message = f"{nbytes:,} bytes went out, and the driver has {freed:,} more"
            raise RuntimeError(message)
        try:
            model.weight.sum()
        except rs.RLSessionError as error:
            said = str(error)
        else:
            message = "an offloaded parameter could be used"
            raise RuntimeError(message)
    steps = 2 if options.smoke else 10
    moved, stayed = (losses(where, release, steps) for release in ("eager", "never"))
    if moved != stayed:
        message = f"losses differ: {moved} with offloading, {stayed} without"
        raise RuntimeError(message)
    return [
        {"check": "freed, by mem_get_info", "seen": f"{freed:,} of {nbytes:,} bytes"},
        {"check": "losses with and without offloading", "seen": f"{len(moved)} numbers, equal to the last bit"},
        {"check": "touching what is away", "seen": said},
    ]


def main(argv: list[str] | None = None) -> None:
    """Run."""
    made = parser(str(__doc__))
    made.add_argument("--device", default="cuda", help='"cuda", or "cpu" to try the script')
    made.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    options = made.parse_args(argv)
    where = Where(options.device)
    if where.is_cuda and not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured")
        return
    if options.smoke:
        options.repeats = 1
    checks = check(where, options)
    rows = [measure(shape, where, options) for shape in options.shapes]
    goals = f"goals: {PEAK_GOAL} of the peak, {LEGACY_GOAL} x legacy"
    show("Off the device and back", rows, note=f"medians of one run; {goals}; {where.describe()}")
    show("Checks", checks)
    report({"gpu": rows, "checks": checks, **where.describe()}, options.json)


if __name__ == "__main__":
    main()
