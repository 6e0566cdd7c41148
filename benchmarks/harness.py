"""What every benchmark here shares: interleaved repetitions, ratios, a description of the machine, a table, JSON.

Machines are shared and noisy: what is compared runs in turns in one process, each a number of times, and only the medians of
one run are put in a ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

__all__ = ["REPEATS", "Sample", "interleave", "machine", "parser", "report", "show"]

REPEATS = 9
"""Repetitions of each case; the median counts."""


@attrs.frozen
class Sample:
    """Seconds of the repetitions of one case."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half of the distance between the quartiles, as a share of the median: how far to trust it."""
        low, _, high = statistics.quantiles(self.seconds, n=4) if len(self.seconds) > 1 else (self.median,) * 3
        return (high - low) / 2 / self.median if self.median else 0.0


def interleave(
    cases: Mapping[str, Callable[[], object]],
    *,
    repeats: int = REPEATS,
    before: Callable[[str], object] = lambda name: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Sample]:
    """Run cases in turns; one round first that does not count.

    Args:
        cases: Name to what is timed.
        repeats: How often each is timed.
        before: Called with the name before each, not timed.
        clock: What times them. Where one thread does all the work its own time (``time.thread_time``) is less noisy: the
            time that neighbours have is not in it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(repeats + 1):
        for name, case in cases.items():
            before(name)
            start = clock()
            case()
            spent = clock() - start
            if number:
                seconds[name].append(spent)
    return {name: Sample(tuple(values)) for name, values in seconds.items()}


def machine() -> dict[str, Any]:
    """What ran it, and how busy it was."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="PATH", help="write the numbers there too")
    made.add_argument("--smoke", action="store_true", help="small and short: whether it runs, not how fast")
    made.add_argument("--repeats", type=int, default=REPEATS, help="repetitions of each case (the median counts)")
    return made


def show(title: str, rows: Sequence[Mapping[str, Any]], *, note: str = "") -> None:
    """Print rows as a table; columns are the keys of the first."""
    table = Table(title=title, title_justify="left", caption=note or None, caption_justify="left")
    for index, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    # As wide as it needs to be: a table that wraps cannot be copied.
    Console(width=160).print(table)


def report(found: Mapping[str, Any], path: Path | None) -> None:
    """Write what was found as JSON, with the machine."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), **found}, indent=2) + "\n")


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
