"""What a migration did, as numbers and as JSON: sites found, rewritten and left, and why.

Policy and value sites are counted apart from engine sites: how much of an engine's use a loop shows is not up to the codemod.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import orjson

from rl_session_migrate.codemod.batch import FileResult, FileStatus
from rl_session_migrate.codemod.rewrite import Outcome, Status

__all__ = ["Count", "Totals", "to_json", "totals"]

SCHEMA = 1


@attrs.define
class Count:
    """Sites of one sort.

    Attributes:
        found: How many there are.
        rewritten: How many are gone, their effect covered.
        left: How many stay.
    """

    found: int = 0
    rewritten: int = 0
    left: int = 0

    @property
    def share(self) -> float:
        """Rewritten of found; 1 where there are none."""
        return self.rewritten / self.found if self.found else 1.0


@attrs.define
class Totals:
    """What a run did.

    Attributes:
        files: How many files of each status.
        num_lines: Lines in all of them.
        trainers: Policy and value sites.
        engines: Engine sites.
        unknown: Sites of somebody who is not known; all of them stay.
        reasons: Why sites stay, with how many of each.
    """

    files: Counter[str] = attrs.field(factory=Counter)
    num_lines: int = 0
    trainers: Count = attrs.field(factory=Count)
    engines: Count = attrs.field(factory=Count)
    unknown: Count = attrs.field(factory=Count)
    reasons: Counter[str] = attrs.field(factory=Counter)


def totals(results: Iterable[FileResult]) -> Totals:
    """Add up results."""
    found = Totals()
    for result in results:
        found.files[str(result.status)] += 1
        found.num_lines += result.num_lines
        for outcome in result.result.outcomes if result.result is not None else ():
            count = _count_of(found, outcome)
            count.found += 1
            if outcome.status is Status.REWRITTEN:
                count.rewritten += 1
            else:
                count.left += 1
                found.reasons[_sort_of(outcome.why)] += 1
    return found


def _count_of(found: Totals, outcome: Outcome) -> Count:
    if outcome.tenant == "unknown":
        return found.unknown
    return found.engines if outcome.tenant in ("engine", "synchronizer") else found.trainers


def _sort_of(why: str) -> str:
    """A reason without its places, so that equal ones add up."""
    words = why.partition(";")[0].split()
    return " ".join("N" if word.strip(",:").isdigit() else word for word in words)


def to_json(results: Sequence[FileResult]) -> bytes:
    """The report as JSON: every site of every file, and the totals."""
    counted = totals(results)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "files": [
            _file(result) for result in results if result.status is not FileStatus.UNCHANGED or _outcomes(result)
        ],
        "totals": {
            "files": dict(counted.files),
            "lines": counted.num_lines,
            "policy_and_value": attrs.asdict(counted.trainers),
            "engine": attrs.asdict(counted.engines),
            "unknown": attrs.asdict(counted.unknown),
            "reasons": dict(counted.reasons.most_common()),
        },
    }
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _outcomes(result: FileResult) -> tuple[Outcome, ...]:
    return result.result.outcomes if result.result is not None else ()


def _file(result: FileResult) -> dict[str, Any]:
    return {
        "path": str(result.path),
        "status": str(result.status),
        "error": result.error,
        "sites": [attrs.asdict(outcome) for outcome in _outcomes(result)],
        "assumed": list(result.result.assumed) if result.result is not None else [],
    }
