"""Writes the parts of the pages that come from the code: `python docs/_generate.py` rewrites, `--check` only compares.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_session.lifecycle import CALL_MODES, MODE_TABLE, NESTING, Cell, Facts, Flags, Mode, Placement, Tier, resolve
from rl_session_migrate.shim.effects import Effect, LegacyConfig, policy_effect, value_effect

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


_SCOPES = {
    Mode.TRAINING: "training_mode()",
    Mode.LOGPROB: "logprob_mode()",
    Mode.REFIT: "refit_mode()",
    Mode.GENERATION: "generation_mode()",
    Mode.OFFLOADED: "offloaded()",
}


def _nested() -> list[tuple[Mode, Mode]]:
    """Every scope that may be opened inside another of another mode: outer, inner."""
    return [(outer, inner) for outer, allowed in NESTING.items() for inner in _SCOPES if inner in allowed - {outer}]


_PLACES = {
    None: (410, 60),
    Mode.TRAINING: (150, 190),
    Mode.LOGPROB: (410, 190),
    Mode.GENERATION: (670, 190),
    Mode.REFIT: (225, 320),
    Mode.OFFLOADED: (540, 320),
}
"""The middle of each box; None is rest."""
_BOX = (150, 44)
_STYLE = (
    "text{font:14px system-ui,sans-serif;text-anchor:middle;dominant-baseline:central;fill:#222}"
    ".small{font-size:12px;fill:#555}rect{fill:#eef1fb;stroke:#3f51b5}.rest{fill:#f4f4f4;stroke:#666;stroke-dasharray:5 3}"
    "path{stroke:#666;fill:none;marker-end:url(#head);marker-start:url(#tail)}"
)


def _edge(start: tuple[int, int], end: tuple[int, int]) -> tuple[float, float, float, float]:
    """From the border of one box to the border of another."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    across, along = _BOX[0] / 2 / abs(dx) if dx else 9.0, _BOX[1] / 2 / abs(dy) if dy else 9.0
    cut = min(across, along) + 4 / (dx * dx + dy * dy) ** 0.5
    return start[0] + cut * dx, start[1] + cut * dy, end[0] - cut * dx, end[1] - cut * dy


def state_picture() -> str:
    """The modes, and the scopes that lead from one to another, drawn. Every arrow is an entry; the way back is the exit."""
    edges = [(None, mode) for mode in _SCOPES if mode is not Mode.OFFLOADED] + _nested()
    assert set(_PLACES) == {None, *_SCOPES}, "a mode has no place in the picture"
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 380" role="img">',
        "<title>The modes of a policy, and which scope may be opened inside which</title>",
        f"<style>{_STYLE}</style>",
        (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0 8 4 0 8z" style="fill:#666;stroke:none;marker-end:none;marker-start:none"/></marker>'
            '<marker id="tail" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="5" markerHeight="5">'
            '<circle cx="4" cy="4" r="3" fill="#666"/></marker></defs>'
        ),
    ]
    for outer, inner in edges:
        x, y, to_x, to_y = _edge(_PLACES[outer], _PLACES[inner])
        parts.append(f'<path d="M{x:.0f} {y:.0f} {to_x:.0f} {to_y:.0f}"/>')
    for mode, (x, y) in _PLACES.items():
        name, small = ("rest", "on host or device") if mode is None else (mode.name, _SCOPES[mode])
        left, top = x - _BOX[0] // 2, y - _BOX[1] // 2
        is_rest = ' class="rest"' if mode is None else ""
        parts += [
            f'<rect x="{left}" y="{top}" width="{_BOX[0]}" height="{_BOX[1]}" rx="6"{is_rest}/>',
            f'<text x="{x}" y="{y - 8}">{name}</text><text class="small" x="{x}" y="{y + 11}">{small}</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])


# -- transitions: what `resolve` makes of the mode table ----------------------------------------------------------------

_HOST = Placement({"params": Tier.HOST, "buffers": Tier.HOST, "grads": Tier.NONE, "optimizer": Tier.HOST})
_FLAGS = ("offload_optimizer_for_logprob", "offload_optimizer_for_refit")


def _placed(mode: Mode) -> Placement:
    """Where things are in a mode that was entered from rest on the host, with gradients where the mode keeps them."""
    placement = resolve(mode, Facts(placement=_HOST), Flags())
    return placement.evolve(grads=Tier.DEVICE) if MODE_TABLE[mode].grads is Cell.DEVICE else placement


def _goes(before: Tier, after: Tier) -> str:
    """What happens to a component, in a word; empty where nothing does."""
    if before is after:
        return ""
    return "dropped" if after is Tier.NONE else "in" if after is Tier.DEVICE else "out"


def _moves(before: Placement, mode: Mode) -> str:
    """What a transition moves by default, and what a flag changes of it."""
    told = []
    for label, component in (("weights", "params"), ("gradients", "grads"), ("optimizer", "optimizer")):
        is_open = component == "grads" and before["grads"] is Tier.DEVICE
        words = [_goes(before[component], _resolved(mode, before)[component])]
        told += [f"{label} {words[0]}"] if words[0] else []
        if is_open and words[0]:
            kept = _goes(before["grads"], _resolved(mode, before, live=True)["grads"])
            told[-1] += f" (an open step's: {kept or 'stay'})"
        for flag in _FLAGS:
            turned = Flags(**{flag: not getattr(Flags(), flag)})
            other = _goes(before[component], _resolved(mode, before, turned)[component])
            if other != words[0]:
                told += [f"{label} {other} with `{flag}`"] if other else []
                told[-1] += "" if other else f", unless `{flag}=False`"
    return "; ".join(told) or "nothing"


def _resolved(mode: Mode, before: Placement, flags: Flags | None = None, *, live: bool = False) -> Placement:
    return resolve(mode, Facts(placement=before, live_gradients=live), flags or Flags())


_BY_HAND = {
    Mode.TRAINING: "prepare_for_training",
    Mode.LOGPROB: "prepare_for_lp_inference",
    Mode.REFIT: "offload_before_refit",
    Mode.OFFLOADED: "offload_after_refit",
}


def _by_hand(mode: Mode, before: Placement, *, open_step: bool = False) -> str:
    """The manual calls that lead to a mode from where things are."""
    if mode is Mode.GENERATION:
        return "`prepare_for_generation()`"
    calls = [_BY_HAND[mode]]
    assert policy_effect(calls[0], LegacyConfig()).mode is mode, f"{calls[0]} does not lead to {mode}"
    if policy_effect(calls[0], LegacyConfig()).cells.weights is Cell.AS_IS and before["params"] is not Tier.DEVICE:
        calls.insert(0, _BY_HAND[Mode.LOGPROB])
    keep = "keep_train_buffers=True" if open_step and calls[0] == "prepare_for_lp_inference" else ""
    return ", ".join(f"`{call}({keep})`" for call in calls)


def _hand_back(inner: Mode, outer: Mode | None) -> str:
    """The manual calls that lead from a mode back to an outer one, or to rest."""
    if inner is Mode.GENERATION:
        return "`finish_generation()`"
    if outer is None:
        return "`finish_inference()`" if inner is Mode.LOGPROB else "`offload_after_refit()`"
    if outer is Mode.GENERATION:
        return "none" if inner is Mode.LOGPROB else "`prepare_for_generation()`"
    return _by_hand(outer, _placed(inner))


def transition_table() -> str:
    """Every transition between rest on the host and the scopes: what moves, and the manual calls."""
    head = ["from", "scope", "what moves on the way in", "manual call", "manual call back"]
    rows = []
    for outer, inner in [(None, mode) for mode in _SCOPES if mode is not Mode.OFFLOADED] + _nested():
        before = _HOST if outer is None else _placed(outer)
        hands = _by_hand(inner, before, open_step=outer is Mode.TRAINING), _hand_back(inner, outer)
        name = "rest" if outer is None else outer.name
        rows.append([name, f"`{_SCOPES[inner]}`", _moves(before, inner), *hands])
    return _table(head, rows)


def optimizer_table() -> str:
    """What an entry does with optimizer state, under each setting of the flags."""
    settings = {
        "by default": Flags(),
        "`offload_optimizer_for_logprob=True`": Flags(offload_optimizer_for_logprob=True),
        "`offload_optimizer_for_refit=False`": Flags(offload_optimizer_for_refit=False),
        '`release="lazy"`': Flags(release="lazy"),
        '`release="never"`': Flags(release="never"),
        "`cpu_offload=True`": Flags(weights_move=False),
    }
    sure = {
        (Tier.DEVICE, Tier.DEVICE): "stays",
        (Tier.DEVICE, Tier.HOST): "leaves",
        (Tier.HOST, Tier.HOST): "stays",
        (Tier.HOST, Tier.DEVICE): "comes",
    }
    rows = []
    for setting, flags in settings.items():
        rows.append([setting])
        for mode in MODE_TABLE:
            facts = [Facts(placement=Placement({"params": now, "optimizer": now})) for now in (Tier.DEVICE, Tier.HOST)]
            after = [resolve(mode, each, flags)["optimizer"] for each in facts]
            rows[-1].append(f"{sure[Tier.DEVICE, after[0]]} / {sure[Tier.HOST, after[1]]}")
    return _table(["with", *(mode.name for mode in MODE_TABLE)], rows)


# -- the manual API: what the tables of its shim say ----------------------------------------------------------------------

_ALONE = {
    Cell.DEVICE: "to the device",
    Cell.HOST: "to the host",
    Cell.AS_IS: "unmoved",
    Cell.OPEN_STAYS: "freed, an open step's too",
    Cell.OPEN_TO_HOST: "freed, an open step's too",
}


def _legacy_rows(call: str, effects: Callable[[LegacyConfig], Effect]) -> list[list[str]]:
    """One row for both backends where they agree, else one each."""
    rows = []
    for backend in ("dtensor", "megatron"):
        effect = effects(LegacyConfig(backend=backend))
        flagged = effects(
            LegacyConfig(backend=backend, offload_optimizer_for_logprob=True, offload_optimizer_for_refit=False)
        )
        words = [_ALONE[cell] for cell in (effect.cells.weights, effect.cells.grads, effect.cells.optimizer)]
        if effect.cells.optimizer is not flagged.cells.optimizer:
            flag = _FLAGS[effect.cells.optimizer is Cell.HOST]
            words[2] = f"to the host if `{flag}`, else unmoved"
        rows.append([f"`{call}`", {"dtensor": "DTensor", "megatron": "Megatron"}[backend], *words])
        rows[-1].append(effect.forwards or "as it was")
    if rows[0][2:] == rows[1][2:]:
        return [[rows[0][0], "both", *rows[0][2:]]]
    return rows


def legacy_table(method_of: str, calls: list[str]) -> str:
    """What each manual lifecycle call does to each component."""
    head = ["manual call", "backend", "PARAMS, BUFFERS", "GRADS", "OPTIMIZER", "train flag left"]
    rows = []
    for call in calls:
        method, _, rest = call.partition("(")
        keep = "True" in rest
        rows += _legacy_rows(
            call,
            lambda config, method=method, keep=keep: (
                value_effect(method, config)
                if method_of == "value"
                else policy_effect(method, config, keep_train_buffers=keep)
            ),
        )
    return _table(head, rows)


def legacy_policy_table() -> str:
    """The policy's."""
    calls = [
        "prepare_for_training()",
        "prepare_for_lp_inference()",
        "prepare_for_lp_inference(keep_train_buffers=True)",
    ]
    return legacy_table("policy", [*calls, "finish_inference()", "offload_before_refit()", "offload_after_refit()"])


def legacy_value_table() -> str:
    """The value model's."""
    calls = ["prepare_for_training()", "prepare_for_inference()", "finish_inference()", "finish_training()"]
    return legacy_table("value", calls)


def _faults() -> list[list[str]]:
    """One row a test that tells its story, wherever it stands: others, here, by; and the bites that guard it."""
    guards = _guards()
    rows = []
    for path in sorted((DOCS.parent / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            told = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if not isinstance(node, ast.FunctionDef) or told is None or not node.name.startswith("test_row_"):
                continue
            parts = dict(re.findall(r"^(Others|Here|By): (.*?)(?=\n(?:Here|By):|\Z)", told, re.MULTILINE | re.DOTALL))
            cells = [" ".join(parts[key].split()) for key in ("Others", "Here", "By")]
            rows.append([str(int(node.name.split("_")[2])), *cells, f"`{node.name}`", guards[node.name]])
    return sorted(rows, key=lambda row: int(row[0]))


def _bites() -> list[tuple[str, dict[str, Any]]]:
    """Every bite, with the area it stands in."""
    return [
        (path.stem, entry)
        for path in sorted((DOCS.parent / "tests" / "bites").glob("*.toml"))
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["bite"]
    ]


def _guards() -> dict[str, str]:
    """Test to the numbers of the bites that it has to notice."""
    found: dict[str, list[str]] = defaultdict(list)
    for number, (_, entry) in enumerate(_bites(), 1):
        for test in entry["tests"]:
            found[test.partition("::")[2]].append(str(number))
    return defaultdict(str, {test: ", ".join(numbers) for test, numbers in found.items()})


def fault_table() -> str:
    """What others report, and what happens here."""
    head = ["row", "what others report", "what happens here", "the mechanism", "the test", "bites"]
    return _table(head, _faults())


def bite_table() -> str:
    """What is taken away, where, and which tests notice."""
    rows = [
        [str(number), area, entry["mechanism"], f"`{entry['file']}`", _noticed(entry["tests"])]
        for number, (area, entry) in enumerate(_bites(), 1)
    ]
    return _table(["bite", "area", "what is true while the mechanism is there", "where", "noticed by"], rows)


def _noticed(tests: list[str]) -> str:
    return ", ".join(f"`{test.partition('::')[2]}`" for test in tests)


PARTS: dict[str, Callable[[], str]] = {
    "mode-table": mode_table,
    "call-table": call_table,
    "nesting-table": nesting_table,
    "transition-table": transition_table,
    "optimizer-table": optimizer_table,
    "legacy-policy-table": legacy_policy_table,
    "legacy-value-table": legacy_value_table,
    "fault-table": fault_table,
    "bite-table": bite_table,
}


PICTURES: dict[str, Callable[[], str]] = {"images/modes.svg": state_picture}
"""File to what draws it."""


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
    for name, draw in PICTURES.items():
        if not (DOCS / name).exists() or (DOCS / name).read_text() != draw():
            stale.append(name)
            if not options.check:
                (DOCS / name).write_text(draw())
    if stale:
        print("out of date:" if options.check else "written:", ", ".join(stale))  # noqa: T201 (a script talks to a person)
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
