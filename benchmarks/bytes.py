"""Bytes copied between host and device in one training step: manual calls, scopes (eager, lazy), and the least possible.

Replays one steady step of every loop that NeMo-RL ships, on an emulated device that really copies and counts, for an 8B dense
and a 30B-A3B mixture-of-experts model over 8 GPUs, at 1/65536 of their bytes and the same ratios. What each column is:

    legacy      the manual calls, by a table of what they copy (``bytes_moved/legacy.py``)
    eager lazy  the same loop with scopes, under ``release="eager"`` and ``"lazy"``
    lazy+ref    lazy, with the reference model as a participant of its own instead of ``reference="copy"``
    least       the fewest bytes that any schedule of whole components can copy within the budget
    in parts    the same, if any part of a component could stay

Every run with scopes checks that the device stays within its budget, that the log claims what the device counted, and that
losses do not depend on the release policy. The engine's own copies (at sleep level 1 its weights go to the host and come back)
are in a column of their own: under the manual calls, and under lazy, where an engine that fits stays awake.

    python benchmarks/bytes.py                                   all of it: three minutes on a core
    python benchmarks/bytes.py --trace ppo --model 8b --why      one loop, and which copies the best schedule makes
    python benchmarks/bytes.py --smoke                           a few rows
"""

from __future__ import annotations

import itertools
from typing import Any

from bytes_moved.phases import TRACES
from bytes_moved.runs import Case, Count, Row, measure
from bytes_moved.sizes import BUDGETS, RECIPES, SHAPES
from harness import parser, report, show

AIMS = {"grpo": 0.5, "ppo": 0.35, "ppo-grouped": 0.35}
"""What lazy may copy of what the manual calls copy, at most, on an 80 GB card."""

_GB = 10**9


def _giga(count: Count | None) -> str:
    if count is None:
        return "-"
    return f"{count.nbytes / _GB:.1f}{'' if count.fits else ' (too big)'}"


def shown(row: Row) -> dict[str, Any]:
    """A row of the table; gigabytes of one GPU."""
    case, legacy = row.case, row.legacy.nbytes
    return {
        "loop": case.trace,
        "model": case.model,
        "backend": case.backend,
        "budget": case.budget,
        "GB": f"{row.capacity / _GB:.0f}",
        "legacy": _giga(row.legacy),
        "eager": _giga(row.eager),
        "lazy": _giga(row.lazy),
        "lazy+ref": _giga(row.lazy_own),
        "least": f"{row.least / _GB:.1f}",
        "in parts": f"{row.least_by_storage / _GB:.1f}",
        "best/legacy": f"{row.best_lazy.nbytes / legacy:.2f}" if legacy else "-",
        "best/least": f"{row.best_lazy.nbytes / row.least:.2f}" if row.least else "-",
        "engine": f"{row.legacy.engine_nbytes / _GB:.0f}, {row.best_lazy.engine_nbytes / _GB:.0f}",
    }


def numbers(row: Row) -> dict[str, Any]:
    """A row as plain numbers, for the JSON: bytes of one GPU a step."""
    counts = {"legacy": row.legacy, "eager": row.eager, "lazy": row.lazy, "lazy_own_reference": row.lazy_own}
    return {
        **row.case._asdict(),
        "capacity": row.capacity,
        **{
            name: count and {k: v for k, v in count._asdict().items() if k != "outputs"}
            for name, count in counts.items()
        },
        "least": row.least,
        "least_in_parts": row.least_by_storage,
    }


def markdown(rows: list[Row]) -> str:
    """The table as Markdown, without the columns that matter less."""
    cells = [shown(row) for row in rows]
    names = [name for name in cells[0] if name not in ("GB", "eager")]
    lines = [names, ["---"] * 4 + ["---:"] * (len(names) - 4), *([row[name] for name in names] for row in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdicts(rows: list[Row]) -> list[str]:
    """Whether the aims are met: one line each, and one for each row that misses."""
    lines = []
    for trace, aim in AIMS.items():
        for row in rows:
            if row.case.trace == trace and row.case.budget == "80gb":
                share, bound = row.best_lazy.nbytes / row.legacy.nbytes, row.least / row.legacy.nbytes
                met = "met" if share <= aim else f"missed; no schedule of whole components is below {bound:.2f}"
                lines.append(f"{trace}, {row.case.model}, {row.case.backend}: {share:.2f} of legacy, aim {aim}: {met}")
    above = [row.case for row in rows if row.lazy.nbytes > row.legacy.nbytes]
    lines.append(f"lazy above legacy: {above or 'in no row'}")
    moving = [row.case for row in rows if row.case.budget == "roomy" and row.best_lazy.nbytes]
    lines.append(f"bytes moved though everything fits: {moving or 'in no row'}")
    return lines


def _why(row: Row) -> None:
    title = f"{row.case.trace}, {row.case.model}, {row.case.backend}, {row.case.budget}: the best schedule"
    copies = [
        {"before": c.phase, "copy": c.direction, "component": c.component, "of the total": c.nbytes / max(1, _sum(row))}
        for c in row.schedule.copies
    ]
    show(title, copies or [{"before": "-", "copy": "none"}])


def _sum(row: Row) -> int:
    return sum(copy.nbytes for copy in row.schedule.copies)


def main(argv: list[str] | None = None) -> list[Row]:
    """Run; returns the rows."""
    made = parser(str(__doc__))
    made.add_argument("--trace", nargs="+", choices=list(TRACES), default=list(TRACES))
    made.add_argument("--model", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    made.add_argument("--backend", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    made.add_argument("--budget", nargs="+", choices=BUDGETS, default=list(BUDGETS))
    made.add_argument("--gpus", type=int, default=8, help="over how many GPUs a model is sharded")
    made.add_argument("--markdown", action="store_true", help="print the table as Markdown too")
    made.add_argument("--why", action="store_true", help="show the copies of the best schedule")
    options = made.parse_args(argv)
    if options.smoke:
        options.trace, options.model, options.backend = ["grpo", "ppo", "dpo"], ["8b"], ["megatron"]
        options.budget = ["80gb"]
    rows = []
    for model, backend, trace, budget in itertools.product(
        options.model, options.backend, options.trace, options.budget
    ):
        rows.append(measure(Case(trace, model, backend, options.gpus, budget)))
        if options.why:
            _why(rows[-1])
    show("GB copied a step by one GPU", [shown(row) for row in rows], note="\n".join(verdicts(rows)))
    if options.markdown:
        print(markdown(rows))
    report({"bytes": [numbers(row) for row in rows], "verdicts": verdicts(rows)}, options.json)
    return rows


if __name__ == "__main__":
    main()
