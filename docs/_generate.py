"""Writes the parts of the pages that come from the code: `python docs/_generate.py` rewrites, `--check` only compares.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path

from rl_session.lifecycle import CALL_MODES, MODE_TABLE, NESTING, Mode

DOCS = Path(__file__).parent
_PART = re.compile(r"(<!-- generated: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_FORWARDS = {
    "train": "train, autograd on",
    "eval": "eval, no_grad",
    "unchanged": "unchanged",
    "caller": "as the caller set it",
    "none": "-",
}


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def mode_table() -> str:
    """What is where in each mode."""
    head = ["mode", "PARAMS, BUFFERS", "GRADS", "OPTIMIZER, extras", "forwards"]
    rows = [
        [mode.name, row.weights.value, row.grads.value, row.optimizer.value, _FORWARDS[row.forwards]]
        for mode, row in MODE_TABLE.items()
    ]
    return _table(head, rows)


def call_table() -> str:
    """Which call is legal in which mode."""
    head = ["call", *(mode.name for mode in MODE_TABLE)]
    rows = [
        [f"`{call}`", *("yes" if mode in modes else "" for mode in MODE_TABLE)]
        for call, modes in CALL_MODES.items()
        if call != "publish"
    ]
    return _table(head, rows)


def nesting_table() -> str:
    """Which scope may be opened inside which."""
    inner = [mode for mode in Mode if NESTING[mode]]
    head = ["inside", *(mode.name for mode in inner)]
    return _table(head, [[m.name, *("yes" if i in NESTING[m] else "" for i in inner)] for m in inner])


def state_diagram() -> str:
    """The modes, and the scopes that lead from one to another."""
    spelling = {
        Mode.TRAINING: "training_mode()",
        Mode.LOGPROB: "logprob_mode()",
        Mode.REFIT: "refit_mode()",
        Mode.GENERATION: "generation_mode()",
        Mode.OFFLOADED: "offloaded()",
    }
    lines = ["stateDiagram-v2", "    [*] --> REST : attach"]
    lines += [f"    REST --> {mode.name} : {name}" for mode, name in spelling.items() if mode is not Mode.OFFLOADED]
    lines += [
        f"    {outer.name} --> {inner.name} : {spelling[inner]}"
        for outer, allowed in NESTING.items()
        for inner in spelling
        if inner in allowed and inner is not outer
    ]
    lines += ["    note right of REST : OFFLOADED or RESIDENT, as base= or switch() says"]
    return "```mermaid\n" + "\n".join(lines) + "\n```\n"


def _faults() -> list[list[str]]:
    """One row a test that tells its story: others, here, by."""
    rows = []
    for path in sorted((DOCS.parent / "tests" / "faults").glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            told = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if not isinstance(node, ast.FunctionDef) or told is None or not node.name.startswith("test_row_"):
                continue
            parts = dict(re.findall(r"^(Others|Here|By): (.*?)(?=\n(?:Here|By):|\Z)", told, re.MULTILINE | re.DOTALL))
            cells = [" ".join(parts[key].split()) for key in ("Others", "Here", "By")]
            rows.append([str(int(node.name.split("_")[2])), *cells, f"`{node.name}`"])
    return sorted(rows, key=lambda row: int(row[0]))


def fault_table() -> str:
    """What others report, and what happens here."""
    return _table(["row", "what others report", "what happens here", "the mechanism", "the test"], _faults())


PARTS: dict[str, Callable[[], str]] = {
    "mode-table": mode_table,
    "call-table": call_table,
    "nesting-table": nesting_table,
    "state-diagram": state_diagram,
    "fault-table": fault_table,
}


def generate(text: str) -> str:
    """A page with its generated parts made anew.

    Raises:
        KeyError: It names a part that does not exist.
    """
    return _PART.sub(lambda found: found[1] + PARTS[found[2]]() + found[4], text)


def main() -> int:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a page is out of date")
    options = parser.parse_args()
    stale = []
    for page in sorted(DOCS.glob("**/*.md")):
        text = page.read_text()
        made = generate(text)
        if made != text:
            stale.append(page.name)
            if not options.check:
                page.write_text(made)
    if stale:
        print("out of date:" if options.check else "written:", ", ".join(stale))  # noqa: T201 (a script talks to a person)
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
