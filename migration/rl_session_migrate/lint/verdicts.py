"""What was found wrong on which path, and the findings that this makes.

Verdicts are kept with their paths, so that a finding can say on which path it holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import attrs
import libcst as cst

from rl_session_migrate.lint.codes import CODES
from rl_session_migrate.lint.findings import Finding
from rl_session_migrate.lint.interpret import Interpreter
from rl_session_migrate.lint.phrases import cause, is_fresh, is_here, remedy
from rl_session_migrate.lint.state import Path, State
from rl_session_migrate.rules import Kind, Tenant
from rl_session_migrate.sites import HelperSite, Module, Site
from rl_session_migrate.tree import code, walk

__all__ = ["Verdict", "Verdicts"]


@attrs.frozen
class Verdict:
    """One mistake on one path."""

    code: str
    node: cst.CSTNode
    path: Path
    what: str
    write: str
    caller: int
    why: str = ""
    since: Site | HelperSite | None = None


class Verdicts:
    """Collects verdicts on one module, and the paths that reached each place.

    Args:
        module: The module.
        interpreter: Who walks it.
    """

    def __init__(self, module: Module, interpreter: Interpreter) -> None:
        self.module = module
        self.interpreter = interpreter
        self.verdicts: list[Verdict] = []
        self.seen: dict[cst.CSTNode, set[Path]] = defaultdict(set)

    def saw(self, path: Path, node: cst.CSTNode) -> None:
        """A path reached a place."""
        self.seen[node].add(path)

    def say(
        self,
        rule: str,
        node: cst.CSTNode,
        path: Path,
        what: str,
        write: str,
        why: str = "",
        since: Site | HelperSite | None = None,
    ) -> None:
        """Something is wrong on a path; ``since`` is the call that made it so."""
        caller = self.module.source.line(self.interpreter.calls[-1]) if self.interpreter.calls else 0
        self.verdicts.append(Verdict(rule, node, path, what, write, caller, why, since))

    # -- the end -------------------------------------------------------------------------------------------------

    def findings(self) -> Iterator[Finding]:
        """What is wrong, each once, with the path it is wrong on."""
        by_place: dict[tuple[str, cst.CSTNode], list[Verdict]] = defaultdict(list)
        for verdict in self.verdicts:
            if not verdict.path.is_vague:
                by_place[verdict.code, verdict.node].append(verdict)
        for (rule, node), verdicts in by_place.items():
            shortest = min(verdicts, key=lambda v: (len(v.path.facts), v.what))
            when = self._when(shortest, {verdict.path for verdict in verdicts}, shortest.since)
            called = f" (called from line {shortest.caller})" if shortest.caller else ""
            yield self._finding(rule, node, shortest.what + when + called, shortest.write, shortest.why)
        yield from self._unused()

    def _finding(self, rule: str, node: cst.CSTNode, what: str, write: str, why: str = "") -> Finding:
        position = self.module.source.position(node)
        return Finding(
            self.module.source.path, position.line, position.column, rule, what, why or CODES[rule].why, write
        )

    def _when(self, verdict: Verdict, bad: set[Path], since: Site | HelperSite | None = None) -> str:
        """How the tests came out on the path that is wrong, where other paths to the same place are right."""
        if not {path for path in self.seen[verdict.node] if not path.is_vague} - bad:
            return ""
        said: dict[tuple[int, bool], str] = {}
        for step in reversed(verdict.path.trail):
            if step.within is None:
                if since is not None and step.node is since.node:
                    break
                continue
            if verdict.node not in set(walk(step.within)):
                line = self.module.source.line(step.node)
                said.setdefault(
                    (line, step.outcome), f"`{code(step.node)}` on line {line} is {str(step.outcome).lower()}"
                )
        told = list(said.values())[:3]
        return f", when {' and '.join(reversed(told))}" if told else ""

    def _unused(self) -> Iterator[Finding]:
        """Moves that every path undoes at once."""
        for site in self.module.sites:
            receiver, paths = site.receiver, self.seen.get(site.node)
            if receiver is None or not paths or not receiver.is_single or receiver.may_be or not site.shape.runs_here:
                continue
            states = [path.of(receiver.identity) for path in paths]
            if any(path.is_vague for path in paths) or any(state.scopes for state in states):
                continue
            name = f"{receiver}.{site.method}()"
            if site.rule.kind is Kind.OFFLOAD and all(is_fresh(state) for state in states):
                what = f"{name} undoes {cause(states[0])}, and nothing used {receiver} in between"
                yield self._finding("RLM002", site.node, what, "neither of the two")
            if site.rule.kind is Kind.PREPARE and all(self._left_for_nothing(site, state) for state in states):
                what = f"{name} brings back what {cause(states[0])} sent away, and nobody else came in between"
                yield self._finding("RLM003", site.node, what, "the prepare alone")

    @staticmethod
    def _left_for_nothing(site: Site, state: State) -> bool:
        """Whether a tenant left in the same block of statements, and no tenant did anything since."""
        by = state.by
        if not state.is_idle or not isinstance(by, Site) or by.function is not site.function:
            return False
        return by.parents[:-2] == site.parents[:-2]

    def half_prepared(self) -> Iterator[Finding]:
        """Compute that one path prepares for and another does not. Asked of a walk that goes round no loop."""
        for site in self.module.sites:
            receiver, paths = site.receiver, self.seen.get(site.node, set())
            if receiver is None or not receiver.is_single or receiver.may_be or any(path.is_vague for path in paths):
                continue
            if not site.rule.computes or receiver.tenant is Tenant.ENGINE or site.is_conditional:
                continue
            states = {path: path.of(receiver.identity) for path in paths}
            prepared = [path for path, state in states.items() if is_fresh(state) and is_here(state, site)]
            bare = [path for path, state in states.items() if state == State()]
            if not prepared or not bare or any(state.scopes for state in states.values()):
                continue
            when = self._when(Verdict("RLM001", site.node, min(bare, key=lambda p: len(p.facts)), "", "", 0), set(bare))
            prepare, scope = remedy(site.rule, receiver)
            by = cause(states[prepared[0]])
            what = f"{receiver}.{site.method}(): {by} prepares for it, but not on every path{when}"
            write = f"{prepare} on that path too, or: with scopes({receiver}).{scope}():"
            yield self._finding("RLM001", site.node, what, write)
