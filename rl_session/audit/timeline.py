"""A run as one HTML page: lanes of scopes, moves and calls, and the memory below them.

The page is one file without network, fonts or scripts from elsewhere. What a log says is data in it, never markup: it lies
in a JSON block in which ``<`` is written as an escape, and the page's script hands it to ``textContent`` and to a canvas.
A content security policy allows exactly the page's own script and style, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import attrs
import orjson

from rl_session.audit.awake import AwakePeriods, Period
from rl_session.audit.naming import rank_of
from rl_session.audit.nodes import Node, NodeBuilder, own_fields, real, whole, words
from rl_session.audit.replay import Replay

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Bits of an item's flag.
_FAILED, _ROLLED_BACK, _UNFINISHED = 1, 2, 4
_FLAGS = {"ok": 0, "failed": _FAILED, "rolled back": _FAILED | _ROLLED_BACK, "unfinished": _UNFINISHED}
# A policy's rows from top to bottom; scopes take one row per depth, ranks one each.
_ROW_ORDER = {"scope": 0, "transition": 1, "call": 2, "event": 3, "rank": 4}
# Shown elsewhere: as columns of the item, or as the session's own facts.
_NO_DETAIL = frozenset({"seconds", "error", "bytes_moved", "bytes_elided", "from_mode", "to_mode", "num_moves"})
_SESSION = "(session)"


def timeline_page(records: Iterable[dict[str, Any]], *, notes: tuple[str, ...] = ()) -> str:
    """Return the page of a run.

    Args:
        records: Plain records in the order of their time.
        notes: What a reader should know, such as lines that could not be read.
    """
    return render_page(timeline_data(records, notes=notes))


def render_page(data: dict[str, Any]) -> str:
    """Put data into the page."""
    folder = files("rl_session.audit") / "page"
    style, script, page = (
        (folder / name).read_text(encoding="utf-8") for name in ("timeline.css", "timeline.js", "timeline.html")
    )
    # ``<`` occurs in strings only, where this is the same character: no text can end the block or begin a comment.
    block = orjson.dumps(data).decode().replace("<", "\\u003c")
    parts = {
        "{{style_hash}}": _hash(style),
        "{{script_hash}}": _hash(script),
        "{{style}}": style,
        "{{script}}": script,
        "{{data}}": block,  # last, so that nothing is replaced inside it
    }
    for mark, part in parts.items():
        page = page.replace(mark, part)
    return page


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def timeline_data(records: Iterable[dict[str, Any]], *, notes: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what the page shows, as plain values; times are microseconds since the first record."""
    builder = _Builder()
    for record in records:
        builder.feed(record)
    return builder.finish(notes)


class _Interned:
    """Values by number: most of what a log says it says many times."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def add(self, key: Any, value: Any = None) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.values)
            self.values.append(key if value is None else value)
        return number


@attrs.define(kw_only=True)
class _Row:
    """Items of one kind, as columns."""

    kind: str
    label: str
    items: list[tuple[int, ...]] = attrs.field(factory=list)

    def to_json(self) -> dict[str, Any]:
        self.items.sort(key=lambda item: item[:2])
        columns = zip(*self.items, strict=True) if self.items else [()] * len(_COLUMNS)
        return {"kind": self.kind, "label": self.label, **dict(zip(_COLUMNS, map(list, columns), strict=True))}


#: Begin, end, name, flags, bytes moved, bytes elided, microseconds copying, detail, step.
_COLUMNS = ("t0", "t1", "name", "flags", "moved", "elided", "copying", "detail", "step")


class _Memory:
    """Bytes by component and tier over time; each key stores only its changes."""

    def __init__(self) -> None:
        self.times: list[int] = []
        self._series: dict[tuple[str, str], tuple[list[int], list[int]]] = {}

    def add(self, at: int, placement: Mapping[str, Mapping[str, int]]) -> None:
        now = {
            (words(component), words(tier)): whole(nbytes)
            for component, tiers in placement.items()
            for tier, nbytes in tiers.items()
            if tier != "none"
        }
        changed = [key for key in now.keys() | self._series.keys() if self._latest(key) != now.get(key, 0)]
        if not changed:
            return
        if not self.times or self.times[-1] != at:
            self.times.append(at)
        index = len(self.times) - 1
        for key in changed:
            where, values = self._series.setdefault(key, ([], []))
            if where and where[-1] == index:
                values[-1] = now.get(key, 0)
            else:
                where.append(index)
                values.append(now.get(key, 0))

    def _latest(self, key: tuple[str, str]) -> int:
        series = self._series.get(key)
        return series[1][-1] if series else 0

    def to_json(self) -> dict[str, Any]:
        order = {"device": 0, "host": 1}
        keys = sorted(self._series, key=lambda key: (order.get(key[1], 2), key[0] != "params", key[0]))
        return {
            "times": self.times,
            "series": [
                {"component": component, "tier": tier, "at": where, "nbytes": values}
                for component, tier in keys
                for where, values in [self._series[component, tier]]
            ],
        }


class _Lane:
    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: dict[tuple[str, int], _Row] = {}
        self.memory = _Memory()

    def row(self, kind: str, number: int, label: str) -> _Row:
        row = self.rows.get((kind, number))
        if row is None:
            row = self.rows[kind, number] = _Row(kind=kind, label=label)
        return row

    def to_json(self) -> dict[str, Any]:
        order = sorted(self.rows, key=lambda key: (_ROW_ORDER[key[0]], key[1]))
        return {
            "name": self.name,
            "rows": [self.rows[key].to_json() for key in order],
            "memory": self.memory.to_json(),
        }


class _Builder:
    def __init__(self) -> None:
        self._nodes = NodeBuilder()
        self._replay = Replay()
        self._lanes: dict[str, _Lane] = {}
        self._names = _Interned()
        self._details = _Interned()
        self._steps: dict[int, list[int]] = {}
        self._facts: dict[str, Any] = {}
        self._num_records = 0
        self._sources: dict[str, int] = {}
        self._awake = AwakePeriods()

    # -- records -------------------------------------------------------------------------------------------------

    def feed(self, record: dict[str, Any]) -> None:
        """Take one record."""
        self._num_records += 1
        self._sources[record["source"]] = self._sources.get(record["source"], 0) + 1
        if self._num_records == 1:
            self._facts["run_id"] = record["run_id"]
        for node in self._nodes.feed(record):
            self._add_tree(node)
        self._note_session(record)
        self._replay.feed(record)
        at = _micros(self._nodes.clock.seconds(record))
        if (period := self._awake.feed(record)) is not None:
            self._add_engine(period, at)
        # A driver's moves are written when all of them are done, just before the end of their transition.
        if record.get("policy") and (record["event"] != "component.moved" or record["source"] != "driver"):
            lane = self._lane(record["policy"])
            state = self._replay.state.policies.get(record["policy"])
            lane.memory.add(at, state.components if state is not None and state.health != "closed" else {})
        if (step := record.get("step")) is not None:
            span = self._steps.setdefault(step, [at, at])
            span[1] = max(span[1], at)

    def _note_session(self, record: dict[str, Any]) -> None:
        if record["event"] == "session.opened":
            for key in ("device_budget", "host_budget", "release", "verify", "versions"):
                self._facts[key] = record.get(key)
        elif record["event"] == "session.closed":
            self._facts["closed"] = True
            self._facts["error"] = words(record.get("error"))

    def finish(self, notes: tuple[str, ...]) -> dict[str, Any]:
        """Return the data of the page."""
        for node in self._nodes.finish():
            self._add_tree(node)
        for period in self._awake.finish():
            self._add_awake(period, _micros(self._nodes.now), _UNFINISHED)
        return {
            **self._facts,
            "start_ms": (self._nodes.clock.start_ns or 0) // 1_000_000,
            "end": max(1, _micros(self._nodes.now)),
            "num_records": self._num_records,
            "sources": self._sources,
            "notes": list(notes),
            "lanes": [lane.to_json() for lane in self._lanes.values()],
            "steps": [[step, *span] for step, span in sorted(self._steps.items())],
            "names": self._names.values,
            "details": self._details.values,
        }

    # -- nodes ---------------------------------------------------------------------------------------------------

    def _lane(self, policy: str | None) -> _Lane:
        name = policy or _SESSION
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane(name)
        return lane

    def _add_tree(self, root: Node) -> None:
        for node in root.walk():
            if node.kind == "event" and node.name in ("session.opened", "session.closed") and not node.error:
                continue  # the page's two ends
            self._add(node)

    def _add(self, node: Node) -> None:
        lane = self._lane(node.policy)
        match node.kind:
            case "scope":
                row = lane.row("scope", node.depth, "scopes" if node.depth == 0 else f"depth {node.depth}")
            case "transition":
                row = lane.row("transition", 0, "moves")
                self._add_ranks(lane, node)
            case "call":
                row = lane.row("call", 0, "calls")
            case _:
                row = lane.row("event", 0, "events")
        # Of a scope, its transitions show what was moved; twice would count double.
        moved, elided = (0, 0) if node.kind == "scope" else (node.bytes_moved, node.bytes_elided)
        row.items.append(
            (
                _micros(node.start),
                _micros(self._nodes.now if node.end is None else node.end),
                self._names.add(_title(node)),
                _FLAGS[node.status],
                moved,
                elided,
                sum(_micros(move.seconds) for move in node.moves),
                self._detail(node),
                -1 if node.step is None else node.step,
            )
        )

    def _add_engine(self, period: Period, at: int) -> None:
        """An engine has a lane of its own: when it was awake, and with how many bytes."""
        memory = self._lane(f"engine {period.engine}").memory
        if period.end is None:
            memory.add(at, {woken: {"device": nbytes} for woken, nbytes in period.nbytes.items()})
        else:
            memory.add(at, {})
            self._add_awake(period, at, 0)

    def _add_awake(self, period: Period, end: int, flags: int) -> None:
        reason = words((period.end or {}).get("reason"))
        fields = [*((woken, f"{nbytes:,} bytes") for woken, nbytes in period.nbytes.items()), ("reason", reason)]
        step = period.start.get("step")
        self._lane(f"engine {period.engine}").row("event", 0, "awake").items.append(
            (
                _micros(self._nodes.clock.seconds(period.start)),
                end,
                self._names.add("awake"),
                flags,
                0,
                0,
                0,
                self._details.add(tuple((label, text) for label, text in fields if text)),
                step if isinstance(step, int) else -1,
            )
        )

    def _add_ranks(self, lane: _Lane, node: Node) -> None:
        for move, start, end in node.lay_out():
            rank = rank_of(move.source)
            if rank is None:
                continue
            row = lane.row("rank", rank, f"rank {rank}")
            name = f"{move.component} {move.from_tier} \N{RIGHTWARDS ARROW} {move.to_tier}"
            moved, elided = (0, move.nbytes) if move.elided else (move.nbytes, 0)
            fields = (("part of", _title(node)),)
            row.items.append(
                (
                    _micros(start),
                    _micros(end),
                    self._names.add(name),
                    0,
                    moved,
                    elided,
                    _micros(move.seconds),
                    self._details.add(fields),
                    -1 if node.step is None else node.step,
                )
            )

    def _detail(self, node: Node) -> int:
        """Say what a click shows: pairs of label and text, the same ones once."""
        pairs = [("error", node.error), ("at", node.call_site), ("reason", node.reason)]
        if node.kind == "event":
            pairs += [(key, _plain(value)) for key, value in own_fields(node.record).items() if key not in _NO_DETAIL]
        if node.kind == "call" and (changed := node.record.get("changed")):
            pairs.append(("changed", _plain(changed)))
        for move in node.moves:
            if rank_of(move.source) is None:
                how = ", elided" if move.elided else ""
                way = f"{move.from_tier} \N{RIGHTWARDS ARROW} {move.to_tier}"
                pairs.append((move.component, f"{way}, {whole(move.nbytes):,} bytes{how}"))
        return self._details.add(tuple((label, text) for label, text in pairs if text))


def _title(node: Node) -> str:
    match node.kind:
        case "transition":
            return f"{node.from_mode} \N{RIGHTWARDS ARROW} {node.to_mode}"
        case "call":
            return f"{node.name}()"
        case _:
            return node.name


def _plain(value: object) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else orjson.dumps(value).decode()


def _micros(seconds: float) -> int:
    return round(real(seconds) * 1e6)
