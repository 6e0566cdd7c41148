"""How fast ``rl-session migrate`` is: lines a second, over files full of sites and over files without any.

The loops of the repository, copied under other names until there are enough lines (about a site every eight lines, which is
more than any real loop has), and the same loops spread thin among code that moves nothing (a site every eighty lines or so).

    python benchmarks/codemod.py [--lines 20000] [--jobs 2] [--json out.json] [--smoke]
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

from harness import parser, report, show

from rl_session_migrate.codemod.batch import migrate_files
from rl_session_migrate.codemod.report import totals

LOOPS = Path(__file__).parents[1] / "migration" / "loops" / "legacy"
FILE_LINES = 2000
"""Lines of one file: the size of a real loop."""
PADDING = """
def metrics_{number}(rewards, lengths, mask, history):
    \"\"\"Numbers for the log.\"\"\"
    total = sum(rewards)
    spread = max(rewards) - min(rewards)
    table = {{"total": total, "spread": spread, "mean": total / len(rewards)}}
    for index, (reward, length) in enumerate(zip(rewards, lengths)):
        if not mask[index]:
            continue
        table[f"reward/{{index}}"] = reward
        table[f"length/{{index}}"] = length if length < 4096 else 4096
    try:
        history.append(table)
    except AttributeError as error:
        raise RuntimeError("no history to append to") from error
    return {{key: value for key, value in table.items() if value is not None}}

"""


def corpus(folder: Path, num_lines: int, *, padding: int) -> list[Path]:
    """Files with at least so many lines altogether."""
    source = "\n\n".join((LOOPS / f"{name}.py").read_text(encoding="utf-8") for name in ("grpo", "ppo", "sft", "dpo"))
    names = sorted(set(re.findall(r"^(?:async )?def (\w+)", source, flags=re.MULTILINE)) - {"refit_policy_generation"})
    paths: list[Path] = []
    written, number = 0, 0
    while written < num_lines:
        pieces: list[str] = []
        while sum(piece.count("\n") for piece in pieces) < min(FILE_LINES, num_lines - written):
            number += 1
            text = source.replace("from __future__ import annotations\n", "")
            for name in names:
                text = re.sub(rf"\b{name}\b", f"{name}_{number}", text)
            pieces.append(text + "".join(PADDING.format(number=f"{number}_{k}") for k in range(padding)))
        path = folder / f"loop_{len(paths)}.py"
        path.write_text("\n\n".join(pieces), encoding="utf-8")
        written += path.read_text(encoding="utf-8").count("\n")
        paths.append(path)
    return paths


def measure(name: str, paths: list[Path], jobs: int) -> dict[str, Any]:
    """One run over files."""
    start, worked = time.perf_counter(), _cpu_seconds()
    results = migrate_files(paths, jobs=jobs)
    seconds, worked = time.perf_counter() - start, _cpu_seconds() - worked
    counted = totals(results)
    assert not counted.files["failed"], [result.error for result in results if result.error]
    return {
        "files": name,
        "lines": counted.num_lines,
        "sites": counted.trainers.found + counted.engines.found,
        "processes": jobs,
        "seconds": seconds,
        "lines/s": counted.num_lines / seconds,
        "CPU seconds": worked,
        "20,000 lines, CPU seconds a process": 20_000 * worked / counted.num_lines / jobs,
    }


def _cpu_seconds() -> float:
    """CPU time of this process and of those that it waited for: what does not depend on who else is at work."""
    return sum(usage.ru_utime + usage.ru_stime for usage in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN)))


def main(argv: list[str] | None = None) -> None:
    """Run."""
    options_parser = parser(str(__doc__))
    options_parser.add_argument("--lines", type=int, default=20_000, help="lines of each corpus")
    options_parser.add_argument("--jobs", type=int, default=2, help="processes")
    options: argparse.Namespace = options_parser.parse_args(argv)
    num_lines = 100 if options.smoke else options.lines
    corpora = {"loops and nothing else": 0, "loops among other code": 300}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, padding in list(corpora.items())[: 1 if options.smoke else 2]:
            inside = Path(folder, name.replace(" ", "_"))
            inside.mkdir()
            rows.append(measure(name, corpus(inside, num_lines, padding=padding), options.jobs))
    show("rl-session migrate", rows, note="processes are started anew, which takes a second or two of it")
    report({"codemod": rows}, options.json)


if __name__ == "__main__":
    main()
