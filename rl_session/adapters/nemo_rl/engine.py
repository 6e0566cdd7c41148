"""A generation object: what of it is awake, waking what is missing, and putting it to sleep.

Knows nothing of trainers but the one whose weights it may serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_session.adapters.nemo_rl.groups import LegacyGroup
from rl_session.adapters.nemo_rl.traits import EngineTraits
from rl_session.audit import events
from rl_session.driver.run import error_text
from rl_session.errors import EngineError, FaultedError
from rl_session.generation.protocol import refusal_of
from rl_session.lifecycle import Mode, Tier
from rl_session.offload.reports import Notice
from rl_session.workers.replies import TransitionRequest

if TYPE_CHECKING:
    from rl_session.adapters.nemo_rl.trainer import TrainerGroup

__all__ = ["ENGINE_COMPONENTS", "EngineGroup"]

ENGINE_COMPONENTS = ("weights", "kv_cache")


class EngineGroup(LegacyGroup):
    """A generation object: what of it is awake.

    Args:
        legacy: The object.
        name: Its name in the log.
        nbytes: Component to bytes.
        traits: What decides the effect of its methods.
        where: Whether it is known to be awake (the device), asleep (the host), or None.
    """

    def __init__(
        self, legacy: object, name: str, nbytes: Mapping[str, int], traits: EngineTraits, where: Tier | None
    ) -> None:
        super().__init__(legacy, name, traits.kind, nbytes)
        self.traits = traits
        self.policy: TrainerGroup | None = None
        """The policy whose training weights it serves, if it does."""
        self._tiers: dict[str, Tier | None] = dict.fromkeys(ENGINE_COMPONENTS, where)
        if where is Tier.HOST:
            self._set_asleep()

    def known(self) -> dict[str, Tier | None]:
        """Component to tier; None where nobody can know."""
        return dict(self._tiers)

    def forget(self) -> None:
        """Believe nothing of what is awake."""
        self._tiers = dict.fromkeys(ENGINE_COMPONENTS)

    @property
    def is_asleep(self) -> bool:
        """Whether it is known to sleep."""
        return self._tiers == {"weights": Tier.HOST, "kv_cache": Tier.NONE}

    @property
    def is_awake(self) -> bool:
        """Whether any of it is known to be awake."""
        return Tier.DEVICE in self._tiers.values()

    @property
    def is_released(self) -> bool:
        """Whether it gives no memory back any more."""
        return self.is_asleep or not self.traits.colocated

    def set_awake(self) -> None:
        """Somebody else woke all of it."""
        self._tiers = dict.fromkeys(ENGINE_COMPONENTS, Tier.DEVICE)

    def _set_asleep(self) -> None:
        self._tiers = {"weights": Tier.HOST, "kv_cache": Tier.NONE}

    def covers(self, tags: tuple[str, ...] | None) -> bool:
        """Whether everything that ``tags`` ask for is awake."""
        return all(self._tiers.get(tag) is Tier.DEVICE for tag in tags or ENGINE_COMPONENTS)

    def _go(self, request: TransitionRequest) -> tuple[Notice, ...]:
        if request.mode is Mode.GENERATION:
            self._wake(self._tags_of(request))
        elif self.hold or (request.stored is not None and request.flags.release == "lazy"):
            pass  # it sleeps when somebody needs the room
        elif not self.is_asleep:
            self._sleep()
        return ()

    def _tags_of(self, request: TransitionRequest) -> tuple[str, ...] | None:
        if request.stored is None:
            return self.wish.tags
        there = tuple(tag for tag in ENGINE_COMPONENTS if request.stored[tag] is Tier.DEVICE)
        return there or None

    def _wake(self, tags: tuple[str, ...] | None) -> None:
        if self.covers(tags):
            return
        missing = tuple(tag for tag in tags or ENGINE_COMPONENTS if self._tiers.get(tag) is not Tier.DEVICE)
        whole = tags is None and len(missing) == len(ENGINE_COMPONENTS)
        kwargs = {} if whole else {"tags": list(missing)}
        try:
            self._ask("prepare_for_generation", kwargs)
        except BaseException as error:
            self.forget()
            if self.traits.colocated:
                self._put_back(error)
            raise
        woken = [tag for tag in missing if tag in self._tiers]
        self._tiers.update(dict.fromkeys(woken or ENGINE_COMPONENTS, Tier.DEVICE))
        self._policy_moved()
        self.tell(events.EngineWoken(engine=self.name, tags=() if whole else missing))

    def _put_back(self, error: BaseException) -> None:
        """An engine that did not wake sleeps: half of it may be up, and an engine half up serves nobody.

        Raises:
            FaultedError: It does not sleep either.
        """
        try:
            self._ask("finish_generation", {})
        except BaseException as second:
            raise FaultedError(
                f"{self.label}: prepare_for_generation() failed, and finish_generation() after it",
                (*self.explain()[1], f"on the way back: {error_text(second)}"),
                "scopes(policy_generation).recover()  # puts it to sleep",
                error_text(error) or "",
            ) from error
        self._set_asleep()

    def _sleep(self) -> None:
        try:
            self._ask("finish_generation", {})
        except BaseException:
            self.forget()
            raise
        if self.traits.colocated:
            self._set_asleep()
        self._policy_moved()
        self.tell(events.EngineSlept(engine=self.name))

    def _policy_moved(self) -> None:
        if self.policy is not None:
            self.policy.weights_taken()

    def _ask(self, method: str, kwargs: Mapping[str, Any]) -> None:
        """Call the object; False is what its backends say instead of raising, and None says nothing.

        Raises:
            EngineError: It raised, or said what is false and not None.
        """
        cause, origin, refusal = "", None, ""
        shown = f"{method}({', '.join(f'{name}={value!r}' for name, value in kwargs.items())})"
        try:
            refusal = refusal_of(getattr(self.legacy, method)(**kwargs))
        except Exception as error:
            refusal, cause, origin = "raised", error_text(error) or "", error
        if refusal:
            raise EngineError(
                f"{self.label}: {shown} failed",
                (*self.explain()[1], "it raised" if cause else f"it {refusal}: the engine's own log says why"),
                "the same again, when the cause is gone",
                cause,
            ) from origin

    def _detach(self) -> None:
        """What these scopes woke, they put to sleep."""
        if not self.traits.colocated or not self.is_awake:
            return
        if self.is_alive:
            self._sleep()
        else:
            self.tell(events.EngineSlept(engine=self.name))
