"""The plan of one pass: which statements are wrapped, which calls go or are replaced, which sites stay and why. Data only."""

from __future__ import annotations

import attrs
import libcst as cst

from rl_session_migrate.codemod.scoping import Run
from rl_session_migrate.sites import HelperSite, Site

__all__ = ["Found", "Plan"]

Found = Site | HelperSite


@attrs.define(eq=False)
class Plan:
    """The edits of one pass, and what stays.

    Attributes:
        runs: Statements to wrap.
        remove: Calls that go, and what covers their effect.
        replace: Calls that become another expression.
        empty: ``if`` statements that go with all they hold.
        left: Sites that stay, and why.
        covered: Helper calls whose effect a refit block covers, and how.
        assumed: What was taken for granted, in words.
    """

    runs: list[Run] = attrs.field(factory=list)
    remove: dict[Site, str] = attrs.field(factory=dict)
    replace: dict[Site, str] = attrs.field(factory=dict)
    empty: list[cst.CSTNode] = attrs.field(factory=list)
    left: dict[Found, str] = attrs.field(factory=dict)
    covered: dict[Found, str] = attrs.field(factory=dict)
    assumed: list[tuple[Site, str]] = attrs.field(factory=list)

    @property
    def changes(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.runs or self.remove or self.replace or self.empty)

    def is_decided(self, site: Site) -> bool:
        """Whether it is settled what becomes of a site."""
        return site in self.remove or site in self.replace or site in self.left
