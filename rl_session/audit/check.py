"""Whether a log is whole and makes sense (being built)."""

from __future__ import annotations

import attrs

from rl_session.audit.replay import LogSource, Replay, as_reader

__all__ = ["CheckResult", "Finding", "Unfinished", "check"]


@attrs.frozen(kw_only=True)
class Finding:
    """Something in the log that cannot be right.

    Attributes:
        code: Short and stable, for a filter.
        message: For a person.
        source: Whose record shows it, if it is about one.
        seq: Of that record.
        path: Its file.
        line: Its line in the file, from 1.
    """

    code: str
    message: str
    source: str | None = None
    seq: int | None = None
    path: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}: " if self.path is not None else ""
        who = f" ({self.source} {self.seq})" if self.source is not None else ""
        return f"{where}{self.code}: {self.message}{who}"


@attrs.frozen(kw_only=True)
class Unfinished:
    """Something that began and has no end in the log, because the writer ended first.

    Attributes:
        kind: ``"session"``, ``"policy"``, ``"scope"``, ``"transition"``, ``"call"``, ``"step"``, ``"engine"`` or
            ``"line"`` (a torn last line).
        name: What it is called: the mode, ``"offloaded -> training"``, the method.
        policy: The policy, if it is about one.
        id: The number of a scope or transition.
        source: Who wrote its beginning.
        seq: Of its beginning.
    """

    kind: str
    name: str
    policy: str | None = None
    id: int | None = None
    source: str | None = None
    seq: int | None = None


@attrs.frozen(kw_only=True)
class CheckResult:
    """What a check found.

    Attributes:
        findings: What is wrong, in order; the first thousand.
        unfinished: What began and did not end.
        notes: What is not wrong and no record explains: bytes that user code made.
        num_findings: How many there are in all.
        num_records: How many records were read.
    """

    findings: list[Finding]
    unfinished: list[Unfinished]
    notes: list[Finding]
    num_findings: int
    num_records: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, and everything ended."""
        return not self.findings and not self.unfinished

    @property
    def is_consistent(self) -> bool:
        """Whether nothing is wrong; what a killed process leaves is consistent and unfinished."""
        return not self.findings


def check(source: LogSource) -> CheckResult:
    """Replay a log and verify every invariant.

    Args:
        source: What ``read_audit`` takes, or a reader.

    Raises:
        AuditError: It is not an audit log.
    """
    findings: list[Finding] = []
    live = Replay(lambda code, message: findings.append(Finding(code=code, message=message)))
    for record in as_reader(source).dicts():
        live.feed(record)
    return CheckResult(
        findings=findings, unfinished=[], notes=[], num_findings=len(findings), num_records=live.num_records
    )
