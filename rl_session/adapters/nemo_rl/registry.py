"""From a NeMo-RL object to its scopes: one state an object, however often it is looked up, and nothing set on it.

Keyed by identity and weakly, so that objects may compare equal, be unhashable, be pickled, and die.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import Any, Literal, Protocol, overload

import attrs

from rl_session.adapters.nemo_rl.effects import COMPONENTS
from rl_session.adapters.nemo_rl.engine import ENGINE_COMPONENTS, EngineGroup
from rl_session.adapters.nemo_rl.facade import EngineScopes, LegacyScopes, PolicyScopes, ValueScopes
from rl_session.adapters.nemo_rl.groups import LegacyGroup
from rl_session.adapters.nemo_rl.sharing import Sharing
from rl_session.adapters.nemo_rl.trainer import TrainerGroup
from rl_session.adapters.nemo_rl.traits import EngineTraits, TrainerTraits, read_traits
from rl_session.audit import AuditLog
from rl_session.config import check_choice
from rl_session.driver.control import Control
from rl_session.driver.run import Run
from rl_session.errors import ConfigError, ScopeError, UnsupportedError
from rl_session.lifecycle import Flags, Mode, Tier
from rl_session.offload.host_pool import HostPool
from rl_session.session import Session
from rl_session.testing import EmulatedDevice

__all__ = ["scopes", "share"]

Found = Literal["unknown", "device", "host"]


@attrs.frozen(kw_only=True)
class _Entry:
    """A known object.

    Attributes:
        legacy: The object, weakly.
        scopes: Its scopes.
        traits: Its traits.
        session: The session it was looked up with first, if any.
    """

    legacy: weakref.ref[Any]
    scopes: LegacyScopes
    traits: TrainerTraits | EngineTraits
    session: Session | None


_entries: dict[int, _Entry] = {}
_numbers = itertools.count(2)
_nowhere = Run(AuditLog(None), HostPool())
"""What objects looked up without a session have in common: a log that nobody reads."""


class _Policy(Protocol):
    @property
    def prepare_for_lp_inference(self) -> Any: ...


class _Value(Protocol):
    @property
    def prepare_for_inference(self) -> Any: ...


class _Engine(Protocol):
    @property
    def prepare_for_generation(self) -> Any: ...


@overload
def scopes(legacy: _Policy, **options: Any) -> PolicyScopes: ...
@overload
def scopes(legacy: _Value, **options: Any) -> ValueScopes: ...
@overload
def scopes(legacy: _Engine, **options: Any) -> EngineScopes: ...
@overload
def scopes(legacy: Any, **options: Any) -> Any: ...
def scopes(
    legacy: Any,
    *,
    session: Session | None = None,
    name: str | None = None,
    nbytes: Mapping[str, int] | None = None,
    found: Found | None = None,
    base: Literal["resident", "offloaded"] | None = None,
    **traits: Any,
) -> Any:
    """The scopes of a NeMo-RL ``Policy``, ``Value`` or generation object, which stays as it is.

    Options count at the first lookup; later ones may repeat them, and are an error where they say something else.

    Args:
        legacy: The object. It is held weakly.
        session: Whose log is written; without one nothing is logged.
        name: In messages and in the log; "policy", "value" or "generation" by default.
        nbytes: Component to bytes ("params", "buffers", "grads", "optimizer"; of an engine "weights", "kv_cache"), for the
            log: they cannot be measured from here.
        found: Where its bytes are now: "device", "host", or "unknown" (default), which costs a legacy call at the first
            entry that knowledge would have saved.
        base: Where it is outside scopes: "resident" on the device (the default of a policy or value that shares its GPUs with
            nobody), or "offloaded". An engine rests asleep.
        **traits: What the object's ``cfg`` does not say: ``backend``, ``optimizer``, ``offload_optimizer_for_logprob``,
            ``offload_optimizer_for_refit``, ``cpu_offload``, ``optimizer_cpu_offload``; of an engine ``backend``,
            ``colocated``.

    Returns:
        :class:`PolicyScopes`, :class:`ValueScopes` or :class:`EngineScopes`.

    Raises:
        UnsupportedError: It is no such object, or cannot be referred to weakly.
        ConfigError: An option is unknown, or contradicts ``cfg`` or an earlier lookup.
    """
    entry = _entry_of(legacy)
    if entry is None:
        return _make(legacy, session, name, nbytes or {}, found or "unknown", base, traits).scopes
    _check_repeated(entry, session, name, nbytes, found, base, traits)
    return entry.scopes


def _entry_of(legacy: Any) -> _Entry | None:
    entry = _entries.get(id(legacy))
    return entry if entry is not None and entry.legacy() is legacy else None


def _make(
    legacy: Any,
    session: Session | None,
    name: str | None,
    nbytes: Mapping[str, int],
    found: Found,
    base: str | None,
    given: Mapping[str, Any],
) -> _Entry:
    traits = read_traits(legacy, given)
    weakly = _weakly(legacy)
    check_choice("scopes", "found", found, ("unknown", "device", "host"))
    check_choice("scopes", "base", base or "resident", ("resident", "offloaded"))
    where = {"unknown": None, "device": Tier.DEVICE, "host": Tier.HOST}[found]
    is_engine = isinstance(traits, EngineTraits)
    _check_sizes(nbytes, ENGINE_COMPONENTS if is_engine else COMPONENTS)
    run = _nowhere if session is None else session._run  # noqa: SLF001 (an adapter is a participant like the library's own)
    name = _name(name, traits.kind, session)
    group: LegacyGroup
    resting = Mode.OFFLOADED if is_engine or base == "offloaded" else Mode.RESIDENT
    if isinstance(traits, EngineTraits):
        group = EngineGroup(legacy, name, nbytes, traits, where)
        mode = Mode.OFFLOADED
    else:
        group = TrainerGroup(legacy, name, nbytes, traits, where)
        mode = Mode.OFFLOADED if where is Tier.HOST else Mode.RESIDENT
    device = EmulatedDevice()  # a seat to the arbiter, which has no bytes on it: sizes are not measured here
    control = Control(name, traits.kind, group, run, Flags(), group.describe(mode), resting, device)
    group.explain, group.tell = control.explain, control.record
    kind = EngineScopes if is_engine else PolicyScopes if traits.kind == "policy" else ValueScopes
    made = kind(control, group, device, _forget)
    entry = _Entry(legacy=weakly, scopes=made, traits=traits, session=session)
    _entries[id(legacy)] = entry
    if session is not None:
        session._participants.append(made)  # type: ignore[arg-type]  # noqa: SLF001 (closed with the others)
    return entry


def _weakly(legacy: Any) -> weakref.ref[Any]:
    key = id(legacy)

    def forget(_: object) -> None:
        _entries.pop(key, None)

    try:
        return weakref.ref(legacy, forget)
    except TypeError as error:
        raise UnsupportedError(
            f"scopes({type(legacy).__name__}): the object cannot be referred to weakly",
            (),
            "add __weakref__ to its __slots__",
        ) from error


def _name(wanted: str | None, kind: str, session: Session | None) -> str:
    """A name that nobody in the session has.

    Raises:
        ConfigError: The user's own is taken.
    """
    taken = set() if session is None else {participant.name for participant in session._participants}  # noqa: SLF001
    if wanted in taken:
        raise ConfigError(
            f"scopes({kind}, name={wanted!r}): the name is taken in this session",
            (),
            f"scopes({kind}, name={wanted + '2'!r})",
        )
    default = "generation" if kind == "engine" else kind
    return wanted or (default if default not in taken else f"{default}{next(_numbers)}")


def _forget(made: LegacyScopes) -> None:
    for key, entry in list(_entries.items()):
        if entry.scopes is made:
            del _entries[key]
            if entry.session is not None:
                seats: list[Any] = entry.session._participants  # noqa: SLF001
                seats.remove(made)
    if made.group.sharing is not None:
        made.group.sharing.part(made.group)


def _check_sizes(nbytes: Mapping[str, int], components: tuple[str, ...]) -> None:
    wrong = [name for name, size in nbytes.items() if name not in components or type(size) is not int or size < 0]
    if wrong:
        raise ConfigError(
            f"scopes(nbytes={dict(nbytes)!r}): {wrong[0]!r} is no component, or its size no number of bytes",
            (f"components: {', '.join(components)}",),
            f"scopes(policy, nbytes={{{components[0]!r}: 16 * 2**30}})",
        )


def _check_repeated(
    entry: _Entry,
    session: Session | None,
    name: str | None,
    nbytes: Mapping[str, int] | None,
    found: Found | None,
    base: str | None,
    traits: Mapping[str, Any],
) -> None:
    """A later lookup may repeat what the first said, and nothing else.

    Raises:
        ConfigError: It says something else.
    """
    made = entry.scopes
    said = {
        "session": (session, entry.session),
        "name": (name, made.name),
        "nbytes": (nbytes and dict(nbytes), made.group.nbytes),
        "base": (base, "resident" if made.resting_mode is Mode.RESIDENT else "offloaded"),
        "found": (found, None),  # what was found then says nothing of now
        **{option: (value, getattr(entry.traits, option, None)) for option, value in traits.items()},
    }
    for option, (now, then) in said.items():
        if now is not None and now != then:
            raise ConfigError(
                f"scopes({entry.traits.kind}, {option}={now!r}): {made!r} was looked up otherwise before",
                (f"{option} is {then!r}",),
                f"scopes({entry.traits.kind})  # options belong to the first lookup; close() ends it",
            )


def share(
    *objects: Any,
    session: Session | None = None,
    release: Literal["lazy", "eager"] | None = None,
    only_colocated: bool = False,
) -> tuple[LegacyScopes, ...]:
    """Say that objects live on the same GPUs. Moves nothing, and may be said again.

    From then on one of them is in at a time: a scope of one sends the others away first, least recently used first. Outside
    scopes they rest offloaded. Under "lazy", leaving a scope calls nothing, and what stays is evicted when another tenant's
    scope is entered; under "eager", leaving a scope releases the memory.

    Objects that share already, with each other, stay as they are; others join them.

    Args:
        *objects: Policies, values and generation objects.
        session: As for :func:`scopes`, for objects that were not looked up before.
        release: "lazy" (default) or "eager".
        only_colocated: Leave out what shares with nobody: None, an engine with GPUs of its own, and a second mention of the
            same object. For a function that serves every topology.

    Returns:
        The scopes of the objects that share, in their order.

    Raises:
        ConfigError: No object was named, objects share with different others already, or under another release; or an engine has
            GPUs of its own.
        ScopeError: A scope of an object that is about to join is open.
    """
    check_choice("share", "release", release or "lazy", ("lazy", "eager"))
    if not objects:
        raise ConfigError(
            "share(): no object was named",
            ("it says which objects live on the same GPUs",),
            "share(policy, value_model, policy_generation)",
        )
    if only_colocated:
        objects = tuple({id(each): each for each in objects if each is not None}.values())
    made: tuple[LegacyScopes, ...] = tuple(
        scopes(each, session=session if _entry_of(each) is None else None) for each in objects
    )
    if only_colocated:
        made = tuple(each for each in made if not _has_own_gpus(each))
    sharing = _sharing_of(made, release)
    joining = [tenant for tenant in made if tenant.group.sharing is None]
    for tenant in joining:
        _check_shareable(tenant)
    if len({id(tenant) for tenant in made}) < len(made):
        raise ConfigError("share(): an object was named twice", (), "share(policy, value_model, policy_generation)")
    for tenant in joining:
        control = tenant._control  # noqa: SLF001 (what scopes() makes, share() configures)
        control.flags = attrs.evolve(control.flags, release=sharing.release)
        control.resting_mode = Mode.OFFLOADED
        sharing.join(tenant)
    _tie_weights(made)
    return made


def _sharing_of(made: tuple[LegacyScopes, ...], release: Literal["lazy", "eager"] | None) -> Sharing:
    """The group that some of them are in already, or a new one.

    Raises:
        ConfigError: They are in different groups, or release otherwise.
    """
    there = {id(tenant.group.sharing): tenant.group.sharing for tenant in made if tenant.group.sharing is not None}
    if len(there) > 1:
        there = _without_loners(made, there)
    if len(there) > 1:
        raise ConfigError(
            f"share({', '.join(map(repr, made))}): they share their GPUs with different others already",
            (),
            "share(policy, value_model, policy_generation)  # all of them, before the loop",
        )
    sharing = next(iter(there.values()), None) or Sharing(release or "lazy")
    if release is not None and release != sharing.release:
        raise ConfigError(
            f"share(release={release!r}): they share their GPUs already, under another release",
            (f"release is {sharing.release!r}",),
            f"share(policy, policy_generation, release={sharing.release!r})",
        )
    return sharing


def _without_loners(made: tuple[LegacyScopes, ...], there: dict[int, Sharing]) -> dict[int, Sharing]:
    """The groups, of which those of one, who shares with nobody yet, give way to the others."""
    loners = [tenant for tenant in made if tenant.group.sharing is not None and tenant.group.sharing.num_tenants == 1]
    for tenant in loners:
        if len(there) > 1 and tenant.group.sharing is not None and not tenant._control.frames:  # noqa: SLF001
            there = {key: sharing for key, sharing in there.items() if sharing is not tenant.group.sharing}
            tenant.group.sharing.part(tenant.group)
    return there


def _has_own_gpus(tenant: LegacyScopes) -> bool:
    return isinstance(tenant, EngineScopes) and not tenant.group.traits.colocated


def _tie_weights(made: tuple[LegacyScopes, ...]) -> None:
    """An engine that serves the training weights knows whose they are."""
    policies = [tenant.group for tenant in made if isinstance(tenant, PolicyScopes)]
    for tenant in made:
        if isinstance(tenant, EngineScopes) and tenant.group.traits.shares_weights and policies:
            tenant.group.policy, policies[0].engine = policies[0], tenant.group


def _check_shareable(tenant: LegacyScopes) -> None:
    control = tenant._control  # noqa: SLF001
    if _has_own_gpus(tenant):
        raise ConfigError(
            f"share({tenant!r}): its configuration says that it has GPUs of its own",
            ("colocated: False",),
            "share(policy, value_model)  # without the engine",
        )
    if control.frames:
        raise ScopeError(
            f"{control.label}: share() inside {control.frames[-1].describe()}",
            control.explain()[1],
            "share(policy, value_model, policy_generation)  # before the loop",
        )
