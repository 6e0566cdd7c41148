"""The tree of ``rl-session audit show``.

Knows how a node looks; which nodes there are, ``rl_session.audit.show`` decides. Without ``--follow`` a step is drawn when
it has ended, so that its first line can say how long it took; with it, each line comes as it is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from rl_session.audit.nodes import FAILURES, Clock, Move, Node, NodeBuilder
from rl_session.audit.show import Filters, Group, Grouper, detail, prune
from rl_session.cli.text import Printer, bytes_text, printable, rate_text, seconds_text, share_text

if TYPE_CHECKING:
    from collections.abc import Iterable

_LOUD = FAILURES | {"warning"}
_TIME_WIDTH = 11
_NAME_WIDTH = 34
_MAX_VALUE = 120


def print_tree(records: Iterable[dict[str, Any]], filters: Filters, *, moves: bool = False) -> bool:
    """Print the tree of a log; returns whether there was anything to print."""
    drawer = _Drawer(filters, moves=moves)
    grouper = Grouper(filters)
    for record in records:
        for group in grouper.feed(record):
            drawer.group(group)
    for group in grouper.finish():
        drawer.group(group)
    return drawer.num_lines > 0


def follow_tree(records: Iterable[dict[str, Any]], filters: Filters, *, moves: bool = False) -> bool:
    """Print each scope as it is entered and left, and everything else as it ends."""
    drawer = _Drawer(filters, moves=moves)
    builder = _Live(drawer, filters)
    for record in records:
        builder.feed(record)
        drawer.out.flush()
    return drawer.num_lines > 0


class _Drawer:
    def __init__(self, filters: Filters, *, moves: bool) -> None:
        self.out = Printer()
        self.num_lines = 0
        self._filters = filters
        self._has_moves = moves or filters.rank is not None or filters.wants_moves
        self._has_steps = False

    # -- groups and nodes ----------------------------------------------------------------------------------------

    def group(self, group: Group) -> None:
        """Draw what happened in a step, or between two."""
        start, end = group.span
        self._has_steps = self._has_steps or group.step is not None
        if self._has_steps:
            self._step_line(group, start, end)
        for node in group.nodes:
            self._draw(node, "", "")

    def _step_line(self, group: Group, start: float, end: float) -> None:
        name = "between steps" if group.step is None else f"step {group.step}"
        moved = sum(node.bytes_moved for node in group.nodes)
        elided = sum(node.bytes_elided for node in group.nodes)
        said = [seconds_text(end - start)] if end > start else []
        if end > start and group.moving:
            said.append(f"{share_text(group.moving / (end - start))} of it moving")
        said += [f"{bytes_text(moved)} moved"] if moved else []
        said += [f"{bytes_text(elided)} elided"] if elided else []
        if self.num_lines:
            self.out.line()
        self._line(start, self.out.style(name, "head") + "  " + self.out.style(", ".join(said), "dim"))

    def _draw(self, node: Node, before: str, below: str) -> None:
        """Draw a node after ``before``, and what is inside it after ``below``."""
        self._line(node.start, self.out.style(before, "dim") + self.node_text(node, len(before)))
        parts: list[tuple[float, Node | Move]] = [(child.start, child) for child in node.children]
        parts += [(start, move) for move, start, _ in self._shown_moves(node)]
        parts.sort(key=lambda part: part[0])
        for index, (start, part) in enumerate(parts):
            is_last = index == len(parts) - 1
            head = below + (
                "\N{BOX DRAWINGS LIGHT UP AND RIGHT}" if is_last else "\N{BOX DRAWINGS LIGHT VERTICAL AND RIGHT}"
            )
            head += "\N{BOX DRAWINGS LIGHT HORIZONTAL} "
            if isinstance(part, Move):
                self._line(start, self.out.style(head, "dim") + self._move_text(part))
            else:
                self._draw(part, head, below + ("   " if is_last else "\N{BOX DRAWINGS LIGHT VERTICAL}  "))

    def _shown_moves(self, node: Node) -> list[tuple[Move, float, float]]:
        return node.lay_out() if self._has_moves and node.kind == "transition" else []

    def _line(self, at: float, text: str) -> None:
        self.out.line(self.out.style(f"{at:>{_TIME_WIDTH}.3f}  ", "dim") + text)
        self.num_lines += 1

    def live_line(self, at: float, depth: int, text: str) -> None:
        """Draw one line of a log that is being written."""
        self._line(at, self.out.style("\N{BOX DRAWINGS LIGHT VERTICAL}  " * depth, "dim") + text)

    # -- texts ---------------------------------------------------------------------------------------------------

    def node_text(self, node: Node, indent: int = 0) -> str:
        """Return the line of a node."""
        said = self._facts(node)
        name, style = _name(node)
        is_bad = node.status in ("failed", "rolled back")
        padded = printable(name).ljust(max(0, _NAME_WIDTH - indent))
        return "  ".join([self.out.style(padded, "bad" if is_bad else style), *said]).rstrip()

    def _facts(self, node: Node) -> list[str]:
        said = [self._lasted(node), *getattr(self, f"_{node.kind}_facts")(node), *self._failure(node)]
        return [part for part in said if part]

    def _lasted(self, node: Node) -> str:
        if node.end is None:
            return self.out.style("unfinished".ljust(10), "warn")
        if node.kind == "event" and not node.seconds:
            return ""
        return seconds_text(node.seconds or 0.0).ljust(10)

    def _scope_facts(self, node: Node) -> list[str]:
        whose = printable(node.policy or "") if node.depth == 0 else ""
        return [whose, self.out.style(printable(node.call_site), "where")]

    def _transition_facts(self, node: Node) -> list[str]:
        # Inside a scope the reason is plain: the way in, or the way out.
        is_told = node.depth == 0 or node.status not in ("ok", "unfinished")
        return [self._bytes(node), self.out.style(printable(node.reason), "dim") if is_told else ""]

    def _call_facts(self, node: Node) -> list[str]:
        return [self.out.style(_changed(node.record.get("changed")), "dim")]

    def _event_facts(self, node: Node) -> list[str]:
        whose = printable(node.policy or "") if node.depth == 0 else ""
        return [whose, self.out.style(_values(detail(node)), "warn" if node.name in _LOUD else "dim")]

    def _failure(self, node: Node) -> list[str]:
        if node.kind == "scope" and node.end is not None and node.entered is None:
            return [self.out.style("never entered", "bad")]  # why, its transition says
        rolled_back = "rolled back" if node.status == "rolled back" else ""
        return [self.out.style(rolled_back, "bad"), self.out.style(printable(node.error), "bad")]

    def _bytes(self, node: Node) -> str:
        moved, elided = node.bytes_moved, node.bytes_elided
        parts = []
        if moved:
            rate = rate_text(moved / node.seconds / 1e9) if node.seconds else ""
            parts.append(f"{bytes_text(moved)} moved" + (f" at {rate}" if rate else ""))
        if elided:
            parts.append(f"{bytes_text(elided)} elided")
        return ", ".join(parts) if parts else self.out.style("nothing to move", "dim")

    def _move_text(self, move: Move) -> str:
        source = "" if move.source == "driver" else f"{printable(move.source)}  "
        way = f"{move.from_tier} \N{RIGHTWARDS ARROW} {move.to_tier}"
        how = "elided" if move.elided else seconds_text(move.seconds)
        text = f"{source}{printable(move.component)} {printable(way)}  {bytes_text(move.nbytes)}  {how}"
        return self.out.style(text, "dim") if move.elided else text


class _Live:
    """Follows records: a node is drawn when it ends, a scope also when it begins."""

    def __init__(self, drawer: _Drawer, filters: Filters) -> None:
        self._drawer = drawer
        self._filters = filters
        self._builder = NodeBuilder()
        self._clock = Clock()
        self._depths: dict[str | None, int] = {}

    def feed(self, record: dict[str, Any]) -> None:
        at = self._clock.seconds(record)
        event = record["event"]
        policy = record.get("policy")
        depth = self._depths.get(policy, 0)
        if event == "scope.exited":
            depth = self._depths[policy] = max(0, depth - 1)
        elif event == "scope.entered":
            self._depths[policy] = depth + 1
        self._follow(record, at, depth)

    def _follow(self, record: dict[str, Any], at: float, depth: int) -> None:
        event = record["event"]
        self._builder.feed(record)
        ended = self._builder.touched
        if event in ("transition.started", "component.moved") or ended is None:
            return
        if prune(ended, self._filters, self._clock.start_ns or 0) is None:
            return
        out = self._drawer.out
        if event == "scope.entered":
            name = out.style(f"\N{BLACK RIGHT-POINTING SMALL TRIANGLE} {printable(ended.name)}", ended.name)
            text = f"{name}  {out.style(printable(ended.call_site), 'where')}"
            self._drawer.live_line(at, depth, text)
        elif event == "scope.exited":
            mark = "\N{BLACK LEFT-POINTING SMALL TRIANGLE} "
            self._drawer.live_line(at, depth, mark + self._drawer.node_text(ended, 2))
        else:
            self._drawer.live_line(at, depth, self._drawer.node_text(ended, 3 * depth))


def _name(node: Node) -> tuple[str, str]:
    match node.kind:
        case "scope":
            return node.name, node.name
        case "transition":
            return f"{node.from_mode} \N{RIGHTWARDS ARROW} {node.to_mode}", ""
        case "call":
            return f"{node.name}()", ""
        case _:
            return node.name, "warn" if node.name in _LOUD else ""


def _values(fields: dict[str, Any]) -> str:
    return "  ".join(f"{key} {_value(key, value)}" for key, value in fields.items())


def _value(key: str, value: object) -> str:
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and (key == "nbytes" or key.endswith(("_bytes", "_budget")))
    ):
        return bytes_text(value)
    text = value if isinstance(value, str) else orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()
    text = text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."
    return printable(text)


def _changed(changes: object) -> str:
    if not isinstance(changes, list):
        return ""
    said = []
    for change in changes:
        if isinstance(change, dict):
            nbytes = change.get("nbytes")
            size = bytes_text(nbytes) if isinstance(nbytes, int) else "?"
            said.append(f"{change.get('component')} now {size} ({change.get('tier')})")
    return printable(", ".join(said))
