"""The proof that a migrated loop does the same: the log of the legacy loop beside the log of the loop in scopes.

    report = verify("legacy.jsonl", "scoped.jsonl")
    assert report.equal, report

Two runs are the same when they make the same compute calls in the same order, each in the same mode, on the same weights, with
the same result, and when nothing is on the device at a wake of an engine that legacy did not have there, unless the budget has
room for it. Results are compared by their digests (``Session(verify="checksum")``, both runs): without them nothing is
proved, and the report says so. Moves may differ: that is what scopes are for. So a call outside every scope may run in another
mode than by hand, where the move between the two was left out: with nothing more of its tenant on the device than legacy had at
that call. Knows two runs and no log; imports neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import attrs

from rl_session.audit.replay import LogSource
from rl_session_migrate.runs import Act, Moment, OnDevice, Run, Wake, read_run

__all__ = ["Difference", "Report", "Totals", "compare", "verify"]

Verdict = Literal["equal", "different", "unproved"]
Kind = Literal["missing", "extra", "order", "call", "mode", "weights", "result", "error", "device", "peak"]

_LOOK_AHEAD = 50
"""How many acts are looked through to tell a missing one from another order."""


@attrs.frozen(kw_only=True)
class Difference:
    """Something that the two runs do differently.

    Attributes:
        kind: What: an act that is "missing" from the scoped run or "extra" in it, another "order" or another "call"; another
            "mode", other "weights", another "result" or "error"; more on the "device" at a wake; a higher "peak".
        index: Of the act, or of the act after the wake; -1 for the peak.
        legacy: The legacy side in words; "" where there is none.
        scoped: The other.
        legacy_site: Where in the user's code, or "".
        scoped_site: Likewise.
    """

    kind: Kind
    index: int
    legacy: str
    scoped: str
    legacy_site: str = ""
    scoped_site: str = ""

    def __str__(self) -> str:
        return (
            f"{_HEADLINES[self.kind]} (act {self.index})\n"
            f"  legacy: {self.legacy or 'nothing'}\n  scoped: {self.scoped or 'nothing'}"
        )


_HEADLINES: dict[Kind, str] = {
    "missing": "a call of the legacy loop is missing",
    "extra": "a call that the legacy loop does not make",
    "order": "calls in another order",
    "call": "another call",
    "mode": "the call runs in another mode",
    "weights": "other weights are served",
    "result": "another result",
    "error": "one raises, or another error",
    "device": "more on the device at a wake",
    "peak": "a higher peak on the device",
}


@attrs.frozen(kw_only=True)
class Totals:
    """Sums of one run, in bytes."""

    num_acts: int
    num_transitions: int
    bytes_moved: int
    bytes_elided: int
    peak: int

    @classmethod
    def of(cls, run: Run) -> Totals:
        """Those of a run."""
        return cls(
            num_acts=len(run.acts),
            num_transitions=run.num_transitions,
            bytes_moved=run.bytes_moved,
            bytes_elided=run.bytes_elided,
            peak=run.peak,
        )


@attrs.frozen(kw_only=True)
class Report:
    """What the comparison of two runs found.

    Attributes:
        differences: What differs, in the order of the runs. After an act that is missing, extra or out of order nothing more is
            compared; of acts that differ otherwise each is listed.
        num_digests: How many results were compared; 0 where a log has no digests.
        num_unproved: How many calls return something of which a log has no digest.
        num_elided_modes: How many calls ran outside every scope in another mode than by hand, with nothing more on the device.
        legacy: Totals of the legacy run.
        scoped: Totals of the scoped run.
        moments: At each act, wake and entry of a scope of the scoped run: what was on the device, and the peak before.
    """

    differences: tuple[Difference, ...]
    num_digests: int
    num_unproved: int
    num_elided_modes: int
    legacy: Totals
    scoped: Totals
    moments: tuple[Moment, ...]

    @property
    def verdict(self) -> Verdict:
        """``"unproved"``: no difference was found, but not every result could be compared."""
        return "different" if self.differences else "unproved" if self.num_unproved else "equal"

    @property
    def equal(self) -> bool:
        """Whether the runs are shown to be the same, but for moves."""
        return self.verdict == "equal"

    @property
    def difference(self) -> Difference | None:
        """The first difference."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        a, b = self.legacy, self.scoped
        lines = [
            f"{_VERDICTS[self.verdict]}: {a.num_acts} and {b.num_acts} compute calls, {self.num_digests} results compared",
            f"  bytes moved: {a.bytes_moved} legacy, {b.bytes_moved} scoped; elided: {a.bytes_elided}, {b.bytes_elided}",
            f"  peak on the device: {a.peak} legacy, {b.peak} scoped",
        ]
        if self.num_elided_modes:
            lines.append(
                f"  {self.num_elided_modes} calls rested in another mode than by hand, with nothing more on the device"
            )
        if self.num_unproved:
            lines.append(
                f'  {self.num_unproved} results were not compared: run both with Session(..., verify="checksum")'
            )
        return "\n".join([*lines, *(str(difference) for difference in self.differences[:3])])

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "verdict": self.verdict,
            "equal": self.equal,
            "num_digests": self.num_digests,
            "num_unproved": self.num_unproved,
            "num_elided_modes": self.num_elided_modes,
            "differences": [attrs.asdict(difference) for difference in self.differences],
            "legacy": attrs.asdict(self.legacy),
            "scoped": attrs.asdict(self.scoped),
            "moments": [attrs.asdict(moment) for moment in self.moments],
        }


_VERDICTS: dict[Verdict, str] = {
    "equal": "the same",
    "different": "NOT the same",
    "unproved": "NOT PROVED, though no difference was found",
}
_WITHOUT_RESULT = frozenset({"save_checkpoint", "load_checkpoint", "begin_step", "forward_backward", "abort"})
"""Acts that return nothing that a digest could be made of."""


def verify(legacy_log: LogSource, scoped_log: LogSource) -> Report:
    """Compare the log of a legacy loop (on the shim) with that of the same loop in scopes.

    Args:
        legacy_log: What ``read_audit`` takes, or a reader.
        scoped_log: Likewise.

    Raises:
        AuditError: One is not an audit log.
    """
    return compare(read_run(legacy_log), read_run(scoped_log))


def compare(legacy: Run, scoped: Run) -> Report:
    """Compare two runs; see :func:`verify`."""
    differences = [
        *_compare_acts(legacy.acts, scoped.acts),
        *_compare_wakes(legacy, scoped),
        *_compare_peaks(legacy, scoped),
    ]
    differences.sort(key=lambda difference: difference.index if difference.index >= 0 else len(scoped.acts) + 1)
    pairs = list(zip(legacy.acts, scoped.acts, strict=False))
    return Report(
        differences=tuple(differences),
        num_digests=sum(a.digest is not None and b.digest is not None for a, b in pairs),
        num_unproved=sum(_is_unproved(a, b) for a, b in pairs),
        num_elided_modes=sum(_name(a) == _name(b) and _elides_mode(a, b) for a, b in pairs),
        legacy=Totals.of(legacy),
        scoped=Totals.of(scoped),
        moments=tuple(scoped.moments()),
    )


# -- acts ----------------------------------------------------------------------------------------------------------------


def _compare_acts(legacy: Sequence[Act], scoped: Sequence[Act]) -> Iterator[Difference]:
    for index in range(max(len(legacy), len(scoped))):
        a = legacy[index] if index < len(legacy) else None
        b = scoped[index] if index < len(scoped) else None
        if a is None or b is None or _name(a) != _name(b):
            yield _difference(_parting(legacy[index:], scoped[index:]), index, a, b)
            return
        kind = _unlike(a, b)
        if kind is not None:
            yield _difference(kind, index, a, b)


def _name(act: Act) -> tuple[str, str]:
    return (act.tenant, act.method)


def _unlike(a: Act, b: Act) -> Kind | None:
    """What is the first thing that two acts of one name differ in."""
    if a.mode != b.mode and not _elides_mode(a, b):
        return "mode"
    if a.served != b.served:
        return "weights"
    if a.error != b.error:
        return "error"
    if a.digest is not None and b.digest is not None and a.digest != b.digest:
        return "result"
    return None


def _is_unproved(a: Act, b: Act) -> bool:
    """Whether two calls return something, and a log does not say what."""
    returns = a.method not in _WITHOUT_RESULT and not a.error and not b.error
    return returns and (a.digest is None or b.digest is None)


def _elides_mode(a: Act, b: Act) -> bool:
    """Whether a call runs in another mode only because a move to that of the legacy run was left out."""
    if a.mode == b.mode or b.in_scope:
        return False
    before, after = (act.moment.on_device.get(act.tenant, {}) for act in (a, b))
    return _within({b.tenant: after}, {b.tenant: before})


def _parting(legacy: Sequence[Act], scoped: Sequence[Act]) -> Kind:
    """Why two sequences part here."""
    a, b = ([_name(act) for act in acts[:_LOOK_AHEAD]] for acts in (legacy, scoped))
    if not b or (a and a[1:][: len(b)] == b[: len(a) - 1] and len(a) > len(b)):
        return "missing"
    if not a or (b[1:][: len(a)] == a[: len(b) - 1] and len(b) > len(a)):
        return "extra"
    if sorted(a) == sorted(b):
        return "order"
    return "missing" if len(legacy) > len(scoped) else "extra" if len(scoped) > len(legacy) else "call"


def _difference(kind: Kind, index: int, a: Act | None, b: Act | None) -> Difference:
    texts = [act.describe() if act is not None else "" for act in (a, b)]
    if kind == "weights" and a is not None and b is not None:
        texts = [f"{text}, on {', '.join(act.served)}" for text, act in zip(texts, (a, b), strict=True)]
    if kind == "result" and a is not None and b is not None:
        texts = [f"{text}, digest {act.digest}" for text, act in zip(texts, (a, b), strict=True)]
    sites = [act.moment.call_site if act is not None else "" for act in (a, b)]
    return Difference(
        kind=kind, index=index, legacy=texts[0], scoped=texts[1], legacy_site=sites[0], scoped_site=sites[1]
    )


# -- the device ------------------------------------------------------------------------------------------------------------


def _compare_wakes(legacy: Run, scoped: Run) -> Iterator[Difference]:
    for wake in scoped.wakes:
        if _fits(wake.moment, scoped.budget):
            continue
        allowed = _beside(legacy, wake)
        if any(_within(wake.moment.on_device, held.on_device) for held in allowed):
            continue
        nearest = allowed[0] if allowed else None
        yield Difference(
            kind="device",
            index=wake.before,
            legacy="" if nearest is None else f"{nearest.name} at {nearest.call_site}: {nearest.describe()}",
            scoped=f"{wake.moment.name} before {_next_act(scoped, wake)}: {wake.moment.describe()}",
            legacy_site="" if nearest is None else _next_site(legacy, wake),
            scoped_site=_next_site(scoped, wake),
        )


def _fits(moment: Moment, budget: int | None) -> bool:
    """Whether the budget has room for the demand that the engine declared, beside what is there."""
    return budget is not None and moment.nbytes <= budget


def _beside(legacy: Run, wake: Wake) -> list[Moment]:
    """What legacy had on the device beside the same part of the engine: at this place of the loop, or else at any."""
    same = [w for w in legacy.wakes if (w.engine, w.tag) == (wake.engine, wake.tag)]
    here = [w.moment for w in same if w.before == wake.before]
    acts = legacy.acts[wake.before : wake.before + 1]
    here += [act.moment for act in acts if wake.engine in act.moment.engines]
    return here or [w.moment for w in same]


def _within(inner: OnDevice, outer: OnDevice) -> bool:
    return all(
        nbytes <= outer.get(tenant, {}).get(component, 0)
        for tenant, held in inner.items()
        for component, nbytes in held.items()
    )


def _next_act(run: Run, wake: Wake) -> str:
    return run.acts[wake.before].describe() if wake.before < len(run.acts) else "the end"


def _next_site(run: Run, wake: Wake) -> str:
    return run.acts[wake.before].moment.call_site if wake.before < len(run.acts) else ""


def _compare_peaks(legacy: Run, scoped: Run) -> Iterator[Difference]:
    if scoped.peak <= legacy.peak or (scoped.budget is not None and scoped.peak <= scoped.budget):
        return
    a, b = (max(run.moments(), key=lambda moment: moment.peak, default=None) for run in (legacy, scoped))
    yield Difference(
        kind="peak",
        index=-1,
        legacy=_peak_text(legacy.peak, a),
        scoped=_peak_text(scoped.peak, b),
        legacy_site=a.call_site if a is not None else "",
        scoped_site=b.call_site if b is not None else "",
    )


def _peak_text(nbytes: int, at: Moment | None) -> str:
    return f"{nbytes} bytes" if at is None else f"{nbytes} bytes before {at.name} at {at.call_site}"
