"""Releases: whether the memory that one frees is wanted next by a scope, which makes its own room.

If so, the call may go; otherwise it becomes an explicit ``offload()``. Looks at every tenant, not at one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rl_session_migrate.codemod.paths import is_our_line
from rl_session_migrate.codemod.program import Doing, Event, Program, Spot
from rl_session_migrate.flow import How, Part
from rl_session_migrate.rules import Api, Kind
from rl_session_migrate.sites import Site

__all__ = ["Releases"]


class Releases:
    """Follows paths from a release to whatever uses the device next.

    Args:
        program: The module.
        removed: Transitions that go.
        is_placed: Whether a use of the device is a scope of a registered tenant.
    """

    def __init__(
        self,
        program: Program,
        removed: Mapping[Site, str],
        is_placed: Callable[[Event], bool],
    ) -> None:
        self._program = program
        self._removed = removed
        self._is_placed = is_placed

    def is_made_by_scopes(self, site: Site) -> bool:
        """Whether on every path the next use of the device is a scope, which sends the others away by itself."""
        todo = list(self._program.spots_behind(site.function, site.node))
        seen: set[Spot] = set()
        met = False
        while todo:
            spot = todo.pop()
            if spot in seen:
                continue
            seen.add(spot)
            is_scope = self._is_scope_next(spot)
            if is_scope is False:
                return False
            if is_scope:
                met = True
                continue
            graph = self._program.graph(spot.function)
            if graph.nodes[spot.index].part is Part.EXIT:
                return False  # a caller may share the device with others
            quiet = bool(spot.done) or is_our_line(graph.nodes[spot.index].ast)
            todo += [
                Spot(spot.function, edge.target)
                for edge in graph.edges[spot.index]
                if edge.target != graph.raising and not (quiet and edge.how is How.EXCEPTION)
            ]
        return met

    def _is_scope_next(self, spot: Spot) -> bool | None:
        """Whether a scope is what uses the device next on this path; None where the path goes on."""
        for event in self._program.events(spot.function, spot.index)[spot.done :]:
            if self._is_placed(event):
                return True
            if event.doing is not Doing.LIFECYCLE or not self._goes_on(event):
                return False
        return None

    def _goes_on(self, event: Event) -> bool:
        """Whether a transition takes nothing: it goes, or it frees, or it is ours."""
        site = event.site
        assert site is not None
        if site in self._removed or site.rule.kind in (Kind.OFFLOAD, Kind.SLEEP):
            return site.shape.runs_here
        if site.rule.api is Api.SCOPED:
            return site.method != "wake"
        return False
