"""The handles that users hold: ``Policy`` for a trainable model, ``ValueModel`` for a critic.

Each method says what it wants to :class:`rl_session.driver.control.Control`; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, overload

from torch import Tensor, nn

from rl_session.audit import events
from rl_session.driver.callsite import call_site
from rl_session.driver.control import Control
from rl_session.driver.engine_control import EngineControl
from rl_session.driver.handles import (
    EngineGenerationCalls,
    GenerationCalls,
    LogprobCalls,
    OffloadedCalls,
    RefitCalls,
    TrainingCalls,
    ValueCalls,
    ValueTrainingCalls,
)
from rl_session.driver.journal import changes
from rl_session.driver.passing import Passport, rebuild
from rl_session.driver.refit import buckets_of, check_bucket, refit, refuse_refit_of_value
from rl_session.engines import EngineHandle, generation_scope
from rl_session.errors import ConfigError, UsageError
from rl_session.generation.in_process import InProcessEngine
from rl_session.generation.protocol import GenerationEngine
from rl_session.lifecycle import Component, Mode, Placement
from rl_session.offload.device import Device
from rl_session.scope import Scope, Step

__all__ = ["Policy", "TrainableModel", "ValueModel"]

Batch = Mapping[str, Any]
"""Tensors with one batch axis: ``input_ids [B, S] int64`` right-padded, ``input_lengths [B]``, optional masks."""
LossFn = Callable[..., tuple[Tensor, Mapping[str, Any]]]
"""``loss_fn(logits [b, S, V], batch, global_valid_seqs, global_valid_tokens) -> (loss, metrics)``, all positional."""
_DEFAULT_BUCKET = 256 * 2**20


class TrainableModel:
    """What a policy and a value model have in common: scopes, train steps, checkpoints.

    Made by :func:`rl_session.attach` or a session; not by hand.
    """

    _kind = "policy"

    def __init__(self, control: Control, device: Device, on_close: Callable[[TrainableModel], None]) -> None:
        self._control = control
        self._device = device
        self._on_close = on_close

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {self._control.mode} mode, {self._control.health}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process gets a handle of its own, where the workers can be reached from there.

        Raises:
            UnsupportedError: The model is in this process.
        """
        return rebuild, (type(self), Passport.of(self._control))

    # -- scopes --------------------------------------------------------------------------------------------------

    def training_mode(self, *, acquire_timeout: float | None = None) -> Scope[Any]:
        """A scope with everything on the device, in train mode with autograd.

        Args:
            acquire_timeout: Seconds to wait while another thread or task owns the policy; None gives up at once.
        """
        return Scope(self._control, self, Mode.TRAINING, "training_mode()", acquire_timeout=acquire_timeout)

    def offloaded(self, *, acquire_timeout: float | None = None) -> Scope[OffloadedCalls]:
        """A scope with nothing on the device; gradients of an open step wait on the host.

        Args:
            acquire_timeout: Seconds to wait while another thread or task owns the policy; None gives up at once.
        """
        return Scope(self._control, self, Mode.OFFLOADED, "offloaded()", acquire_timeout=acquire_timeout)

    def switch(self, mode: Mode | str) -> None:
        """Change the resting mode: where the policy is outside every scope.

        Args:
            mode: The mode to rest in, such as ``Mode.RESIDENT`` or ``"offloaded"``.

        Raises:
            ConfigError: There is no such mode.
            UsageError: GENERATION, without an engine.
            ScopeError: A scope is open.
            RLSessionError: The transition failed and was rolled back; the resting mode stands.
        """
        try:
            wanted = Mode(mode)
        except ValueError as error:
            listed = ", ".join(repr(m.value) for m in Mode)
            raise ConfigError(
                f"switch({mode!r}): there is no such mode", (f"modes: {listed}",), 'switch("resident")'
            ) from error
        self._check_can_rest(wanted)
        self._control.switch(wanted, f"switch({wanted.value!r})", call_site())

    def _check_can_rest(self, mode: Mode) -> None:
        """Refuse to rest in GENERATION without an engine.

        Raises:
            UsageError: There is none.
        """
        if mode is Mode.GENERATION:
            raise UsageError(
                f"{self._control.label}: switch('generation') needs an engine, and a {self._kind} model has none",
                self._control.explain()[1],
                "value.switch('logprob')",
            )

    def offload(self) -> None:
        """Rest on the host, and really evict, also under ``release="lazy"``. The second call does nothing.

        Raises:
            ScopeError: A scope is open; use ``with policy.offloaded():`` there.
            RLSessionError: The transition failed and was rolled back.
        """
        self._control.switch(Mode.OFFLOADED, "offload()", call_site(), evict=True)

    # -- what is -------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name in messages and in the log."""
        return self._control.name

    @property
    def device(self) -> Device:
        """The device; an :class:`rl_session.testing.EmulatedDevice` when it is the CPU."""
        return self._device

    @property
    def mode(self) -> Mode:
        """The mode in effect."""
        self._control.look()
        return self._control.mode

    @property
    def resting_mode(self) -> Mode:
        """The mode outside every scope."""
        self._control.look()
        return self._control.resting_mode

    @property
    def health(self) -> str:
        """One of "ok", "faulted" (see :meth:`recover`) or "closed"."""
        self._control.look()
        return self._control.health

    @property
    def placement(self) -> Placement:
        """Where each component is, found by scanning; components without bytes are ``Tier.NONE``.

        Raises:
            ClosedError: The policy was closed.
        """
        placement = self._control.ask("placement")
        assert isinstance(placement, Placement)
        return placement

    @property
    def open_step(self) -> Step | None:
        """The train step that is open, if one is."""
        step = self._control.step
        assert step is None or isinstance(step, Step)
        return step

    def memory(self) -> dict[str, Any]:
        """Where the bytes are.

        Returns:
            ``components`` (component to tier to bytes), ``clean`` (bytes on the device that could be freed without a
            copy), ``dirty`` (component to bytes on the device that must be copied to leave), ``uncovered`` (tensors of
            no component: name to bytes), ``device_bytes`` and ``device_free`` of the whole device (None: no limit),
            ``host_in_use`` and ``host_held`` (bytes of host buffers).

        Raises:
            ClosedError: The policy was closed.
        """
        memory: dict[str, Any] = self._control.ask("memory")
        return memory

    # -- training ------------------------------------------------------------------------------------------------

    def train(
        self,
        batch: Batch,
        loss_fn: LossFn,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
        eval_mode: bool = False,
    ) -> dict[str, Any]:
        """Make ``B / gbs`` optimizer steps over a batch, then one scheduler step.

        Args:
            batch: ``input_ids [B, S]`` int64, right-padded, ``input_lengths [B]``, optional masks, and what the loss needs.
            loss_fn: ``loss_fn(logits [b, S, V], batch, global_valid_seqs, global_valid_tokens) -> (loss, metrics)``;
                micro-batch losses sum to the loss of the global batch. A value model's gets values ``[b, S, 1]``.
            gbs: Sequences an optimizer step sees; the whole batch by default.
            mbs: Sequences a forward sees; ``gbs`` by default.
            eval_mode: Only compute the loss: no gradients, no optimizer step, eval mode.

        Returns:
            ``loss`` and ``grad_norm``, float32 tensors with one entry an optimizer step, and ``metrics``: summed over
            micro-batches unless the loss marked them with ``rs.mean``, ``rs.min`` or ``rs.max``.

        Raises:
            ModeError: Not in training mode (with ``eval_mode``, not in a mode with the weights on the device).
            BatchError: The batch, ``gbs`` or ``mbs`` do not fit.
            OpenStepError: Gradients are live that no optimizer step has consumed.
            NonFiniteError: NaN in logits, loss or gradients; no step was made with them.
            OptimizerStepError: ``optimizer.step()`` failed half-way and was undone.
            FaultedError: It failed half-way and could not be undone.
        """
        gate = "train(eval_mode=True)" if eval_mode else "train"
        result: dict[str, Any] = self._control.call("train", batch, loss_fn, gbs, mbs, eval_mode, gate=gate)
        return result

    def begin_step(self, global_valid_seqs: float | None = None, global_valid_tokens: float | None = None) -> Step:
        """Open a train step that accumulates gradients until it is committed.

        Args:
            global_valid_seqs: Sequences that count in the whole step; given to every loss.
            global_valid_tokens: Tokens that count in the whole step. Without them the loss gets 1 and ``commit`` divides
                by the counts it summed.

        Returns:
            The step: ``forward_backward(chunk, loss_fn)``, then ``commit()`` or ``abort()``; or
            ``with policy.begin_step() as step:``.

        Raises:
            ModeError: Not in training mode.
            OpenStepError: A step is open already, or gradients of a backward of your own are live.
        """
        step = Step(self._control, call_site())
        with self._control.changing():  # an interrupt between the two would leave a step that nobody holds
            self._control.call(
                "begin_step",
                global_valid_seqs,
                global_valid_tokens,
                needs_owner=True,
                then=lambda result: events.StepOpened(changed=changes(result.changed)),
            )
            self._control.step = step
        return step

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """A CPU copy of ``module.state_dict()``, from whichever tier holds the bytes. Legal in every mode.

        Returns:
            Name to tensor, in the model's dtypes; yours to keep.

        Raises:
            ClosedError: The policy was closed.
        """
        state: dict[str, Tensor] = self._control.call_plain("state_dict")
        return state

    def save_checkpoint(self, path: str | Path) -> None:
        """Write parameters, buffers, optimizer and scheduler state to a directory. Legal in every mode; nothing moves.

        Args:
            path: The directory; a checkpoint that is there is replaced when the new one is complete.

        Raises:
            CheckpointError: ``path`` is something else than a checkpoint or a free name.
            CheckpointWriteError: It could not be written (disk full?); what stood at ``path`` still stands.
        """
        self._control.call("save_checkpoint", str(path))

    def load_checkpoint(self, path: str | Path) -> None:
        """Read a checkpoint back, into whichever tier holds the bytes; it also heals a faulted policy.

        Args:
            path: The directory that :meth:`save_checkpoint` wrote.

        Raises:
            ModeError: Not in OFFLOADED, RESIDENT or TRAINING.
            OpenStepError: A train step is open.
            CheckpointError: It is missing, damaged, or of another architecture; nothing was changed.
        """
        if self.health == "faulted":
            self._control.recover(str(path))
        else:
            self._control.call("load_checkpoint", str(path), needs_owner=True)

    # -- the rest ------------------------------------------------------------------------------------------------

    def register(self, name: str, value: Any) -> None:
        """Add a component of your own (EMA weights, a cache); it moves like the optimizer.

        Args:
            name: The component's name.
            value: A module, or anything tensors can be found in.

        Raises:
            ConfigError: The name is taken or is no name, or no tensor is found in the value.
        """
        given: object = name
        is_name = isinstance(given, str) and bool(given)
        if not is_name or name in set(self._control.ask("component_names")):
            what = "that component exists" if is_name else "not a name"
            raise ConfigError(f"register({name!r}): {what}", (), 'policy.register("ema", ema_model)')
        self._control.call("register_extra", name, value, gate="")

    def pin(self, *components: Component | str) -> None:
        """Keep components on the device whatever mode comes: they neither leave at an exit nor are evicted.

        Args:
            *components: Which; parameters and buffers by default.

        Raises:
            ConfigError: There is no such component.
        """
        self._control.seat.pin(components or (Component.PARAMS, Component.BUFFERS), on=True)

    def unpin(self, *components: Component | str) -> None:
        """Undo :meth:`pin`; they leave at the next transition that wants them away.

        Args:
            *components: Which; every pinned one by default.

        Raises:
            ConfigError: There is no such component.
        """
        self._control.seat.pin(components or tuple(self._control.flags.pinned), on=False)

    def add_cache_hook(self, hook: Callable[[nn.Module], None]) -> None:
        """Call ``hook(module)`` whenever bytes leave the device, to free what no component owns.

        Args:
            hook: It gets the module, on the thread that moves.

        Raises:
            ClosedError: The policy was closed.
        """
        self._control.ask("add_cache_hook", hook)

    def recover(self) -> None:
        """Leave the faulted state: from surviving host copies, or from the last checkpoint saved or loaded.

        Where workers were lost, all of them are started anew. A healthy policy that a process which is gone has left in
        a scope is taken from it, and goes to its resting mode; use it only where that process is known to be gone.

        Raises:
            FaultedError: There is nothing to restore from.
        """
        if self.health == "faulted":
            self._control.recover()
        else:
            self._control.take_over()

    def detach(self) -> None:
        """Give model and optimizer back whole, on the device where there is room and else on the CPU. Idempotent."""
        self._control.close(f"detach() at {call_site()}")
        self._on_close(self)

    def close(self) -> None:
        """As :meth:`detach`, for an attached model. Idempotent."""
        self._control.close(f"close() at {call_site()}")
        self._on_close(self)


class Policy(TrainableModel):
    """A policy: a causal language model that trains, gives log-probabilities and generates.

    Made by :func:`rl_session.attach`, :meth:`Session.attach` or :meth:`Session.policy`. Outside every scope it rests: on the
    host, unless ``base="resident"`` or :meth:`switch` say otherwise. A scope brings in what its mode needs, and gives back
    what was there before:

        with policy.generation_mode():       # an engine samples
            rollouts = engine.generate(prompts)
        with policy.logprob_mode():          # weights on the device, eval, no_grad
            batch |= policy.get_logprobs(batch) | policy.get_reference_policy_logprobs(batch)
        with policy.training_mode():         # weights, gradients and optimizer state on the device
            result = policy.train(batch, loss_fn, mbs=4)

    :meth:`refit_mode` (or :meth:`refit`, all of it) is for handing the weights to an engine, :meth:`offloaded` for somebody
    else's turn on the device. Scopes may be nested: logprob, refit and offloaded in training, refit and offloaded in logprob.
    They are ``async with`` too, and each yields a handle that has only the calls of its mode. A call in the wrong mode is a
    ``ModeError`` that names the scope to write; :attr:`mode`, :attr:`placement` and :meth:`memory` say what is where.

    A batch is a mapping of tensors with one batch axis: ``input_ids [B, S]`` int64, right-padded, and ``input_lengths [B]``;
    where losses count, ``token_mask [B, S]`` and ``sample_mask [B]`` (bool, int or float, all ones by default); and what the
    loss reads. Results are CPU tensors in the caller's order. Every error is a subclass of ``RLSessionError``; the numbers in
    messages lead to docs/errors.md. The guide is docs/lifecycle.md.
    """

    def __init__(self, control: Control, device: Device, on_close: Callable[[TrainableModel], None]) -> None:
        super().__init__(control, device, on_close)
        self._engines: list[InProcessEngine] = []

    def training_mode(self, *, acquire_timeout: float | None = None) -> Scope[TrainingCalls]:
        """A scope with everything on the device, in train mode with autograd.

        Args:
            acquire_timeout: Seconds to wait while another thread or task owns the policy; None gives up at once.
        """
        return super().training_mode(acquire_timeout=acquire_timeout)

    def logprob_mode(self, *, acquire_timeout: float | None = None) -> Scope[LogprobCalls]:
        """A scope with the weights on the device for inference, in eval mode under no_grad.

        Args:
            acquire_timeout: Seconds to wait while another thread or task owns the policy; None gives up at once.
        """
        return Scope(self._control, self, Mode.LOGPROB, "logprob_mode()", acquire_timeout=acquire_timeout)

    def refit_mode(self, *, acquire_timeout: float | None = None) -> Scope[RefitCalls]:
        """A scope in which the weights are read and published: no gradients, no optimizer state on the device.

        Args:
            acquire_timeout: Seconds to wait while another thread or task owns the policy; None gives up at once.
        """
        return Scope(self._control, self, Mode.REFIT, "refit_mode()", acquire_timeout=acquire_timeout)

    @overload
    def generation_mode(
        self, engine: InProcessEngine | None = None, *, acquire_timeout: float | None = None
    ) -> Scope[GenerationCalls]: ...

    @overload
    def generation_mode(
        self, engine: EngineHandle | GenerationEngine, *, acquire_timeout: float | None = None
    ) -> Scope[EngineGenerationCalls]: ...

    def generation_mode(
        self,
        engine: InProcessEngine | EngineHandle | GenerationEngine | None = None,
        *,
        acquire_timeout: float | None = None,
    ) -> Scope[Any]:
        """A scope in which an engine samples.

        An in-process engine samples with the policy's own weights, on the device. For an external engine on the policy's device
        the policy leaves, and the engine is awake. Beside an engine with devices of its own the policy stays as it is.

        Args:
            engine: Which one: an in-process engine of this policy, or an engine of the session (its handle, or the engine
                itself). None means the only one there is.
            acquire_timeout: Seconds to wait while another thread or task owns the policy; None gives up at once.

        Raises:
            UsageError: There is no engine, or several and none was named.
            ConfigError: It is no engine of this policy or its session.
        """
        chosen = self._choose_engine(engine, "generation_mode()")
        if isinstance(chosen, EngineControl):
            return generation_scope(self, self._control, chosen, acquire_timeout)
        return Scope(
            self._control,
            _Generating(self, chosen),
            Mode.GENERATION,
            "generation_mode()",
            acquire_timeout=acquire_timeout,
            engine=chosen.name,
        )

    def refit(
        self,
        engine: InProcessEngine | EngineHandle | GenerationEngine | None = None,
        *,
        bucket_nbytes: int | None = None,
    ) -> int:
        """Push the weights to an engine, in the order that bounds the peak of a shared device.

        The policy goes to REFIT, the engine's weights wake, the buckets go over, the policy goes back, the KV cache wakes. The
        engine is left awake: the next scope of it finds it so, and whoever needs the room puts it to sleep. In a scope of this
        policy, or where it rests on the device, the engine goes back to what it was instead. If the engine has these very
        weights already, nothing is sent. Either both sides get there, or both are back where they were.

        Args:
            engine: Which one, as in :meth:`generation_mode`. An in-process engine has the weights anyway.
            bucket_nbytes: The most bytes in a bucket; by default what is free on the device, up to 1 GiB.

        Returns:
            The version of the weights that the engine has now; 0 for an in-process engine, which has no version.

        Raises:
            UsageError: There is no engine, or several and none was named; or it would discard the weights at once.
            ConfigError: It is no engine of this policy or its session, or ``bucket_nbytes`` is no positive integer.
            NestingError: A scope of this policy is open in which weights are not read.
            EngineError: The engine failed.
            DeviceMemoryError: There is no room.
            FaultedError: The policy or the engine was faulted before.
        """
        check_bucket(bucket_nbytes)
        chosen = self._choose_engine(engine, "refit()")
        if not isinstance(chosen, EngineControl):
            return 0
        return refit(self._control, chosen, call_site(), bucket_nbytes=bucket_nbytes)

    def _check_can_rest(self, mode: Mode) -> None:
        if mode is not Mode.GENERATION:
            return
        if not isinstance(self._choose_engine(None, "switch('generation')"), InProcessEngine):
            raise UsageError(
                f"{self._control.label}: switch('generation') with an external engine, which is awake in scopes only",
                self._control.explain()[1],
                "with policy.generation_mode(engine): ...",
            )

    def _choose_engine(self, engine: object, attempted: str) -> InProcessEngine | EngineControl:
        """The engine that is meant, or the only one."""
        known: list[InProcessEngine | EngineControl] = [*self._engines, *self._control.run.engines]
        if engine is None:
            if len(known) != 1:
                raise UsageError(
                    f"{self._control.label}: {attempted} needs an engine",
                    (f"engines of this policy and its session: {len(known)}",),
                    "engine = rs.InProcessEngine(policy, max_new_tokens=64); with policy.generation_mode(engine): ...",
                )
            return known[0]
        for one in known:
            if engine is one or (isinstance(one, EngineControl) and (engine is one.engine or engine is one.handle)):
                return one
        raise ConfigError(
            f"{self._control.label}: {attempted} with {engine!r}, which is no engine of this policy or its session",
            (f"engines: {', '.join(repr(one.name) for one in known) or 'none'}",),
            'engine = session.engine("vllm", rs.VLLMEngine(...)); with policy.generation_mode(engine): ...',
        )

    def get_logprobs(self, batch: Batch, *, temperature: float | None = None, mbs: int | None = None) -> dict[str, Any]:
        """Log-probabilities of the batch's tokens.

        Args:
            batch: ``input_ids [B, S]`` int64, right-padded, ``input_lengths [B]``.
            temperature: Logits are divided by it; the policy's own by default.
            mbs: Sequences a forward sees; all by default.

        Returns:
            ``logprobs [B, S]`` float32 on the CPU: entry t is that of token t given those before; entry 0 is 0.

        Raises:
            ModeError: Not in a mode with the weights on the device.
            BatchError: The batch does not fit.
            NonFiniteError: NaN in the logits.
        """
        result: dict[str, Any] = self._control.call("get_logprobs", batch, temperature, mbs)
        return result

    def get_reference_policy_logprobs(
        self, batch: Batch, *, temperature: float | None = None, mbs: int | None = None
    ) -> dict[str, Any]:
        """Log-probabilities under the reference; the live weights come back bit for bit, by an exception too.

        Args:
            batch: ``input_ids [B, S]`` int64, right-padded, ``input_lengths [B]``.
            temperature: Logits are divided by it; the policy's own by default.
            mbs: Sequences a forward sees; all by default.

        Returns:
            ``reference_logprobs [B, S]`` float32 on the CPU, laid out as in :meth:`get_logprobs`.

        Raises:
            ModeError: Not in a mode with the weights on the device.
            UnsupportedError: The policy was attached without a reference.
            BatchError: The batch does not fit.
        """
        result: dict[str, Any] = self._control.call("get_reference_policy_logprobs", batch, temperature, mbs)
        return result

    def get_topk_logits(self, batch: Batch, k: int, *, mbs: int | None = None) -> dict[str, Any]:
        """The k largest next-token logits.

        Args:
            batch: ``input_ids [B, S]`` int64, right-padded, ``input_lengths [B]``.
            k: How many of each token; at most the vocabulary.
            mbs: Sequences a forward sees; all by default.

        Returns:
            ``topk_logits`` float32 and ``topk_indices`` int64, both ``[B, S-1, k]`` on the CPU.

        Raises:
            ModeError: Not in a mode with the weights on the device.
            BatchError: The batch or ``k`` do not fit.
        """
        result: dict[str, Any] = self._control.call("get_topk_logits", batch, k, mbs)
        return result

    def score(self, batch: Batch) -> dict[str, Any]:
        """One score a sequence, for models with a scalar head.

        Args:
            batch: ``input_ids [B, S]`` int64, right-padded, ``input_lengths [B]``.

        Returns:
            ``scores [B]`` float32 on the CPU.

        Raises:
            ModeError: Not in a mode with the weights on the device.
            BatchError: The batch does not fit.
        """
        result: dict[str, Any] = self._control.call("score", batch)
        return result

    def iter_weights(self, bucket_nbytes: int = _DEFAULT_BUCKET) -> Iterator[dict[str, Tensor]]:
        """The weights in buckets, without a copy: device tensors, or views of the host copies while offloaded.

        Args:
            bucket_nbytes: The most bytes in a bucket; a larger weight is a bucket of its own.

        Yields:
            Name (as in ``state_dict``) to tensor. Valid until the mode changes: clone what you keep.

        Raises:
            ModeError: Not in REFIT, RESIDENT or OFFLOADED, now or when a later bucket is asked for.
            ConfigError: ``bucket_nbytes`` is not positive.
        """
        if bucket_nbytes < 1:
            raise ConfigError(f"iter_weights(bucket_nbytes={bucket_nbytes})", (), "iter_weights(bucket_nbytes=2**28)")
        with self._control.lock:
            self._control.ready("iter_weights()")
            self._control.check_mode("iter_weights")
        return buckets_of(self._control, bucket_nbytes)


class _Generating:
    """A policy with the engine of its ``generation_mode()``, for the handle."""

    def __init__(self, policy: Policy, engine: InProcessEngine) -> None:
        self._policy = policy
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def __repr__(self) -> str:
        return repr(self._policy)

    def generate(self, batch: Batch) -> dict[str, Any]:
        """Sample from the engine."""
        return self._engine.generate(batch)


class ValueModel(TrainableModel):
    """A critic: gives one value a token, and trains.

    Made by :meth:`Session.attach_value` or :meth:`Session.value_model`. As :class:`Policy`, with other scopes:

        with value.inference_mode():
            batch |= value.get_values(batch)
        with value.training_mode():
            value.train(batch, value_loss)

    The model gives ``[b, S, 1]``, and that is what the loss of :meth:`train` is given in place of logits. To infer only,
    ``[b, S]`` will do as well.
    """

    _kind = "value"

    def training_mode(self, *, acquire_timeout: float | None = None) -> Scope[ValueTrainingCalls]:
        """A scope with everything on the device, in train mode with autograd.

        Args:
            acquire_timeout: Seconds to wait while another thread or task owns the model; None gives up at once.
        """
        return super().training_mode(acquire_timeout=acquire_timeout)

    def inference_mode(self, *, acquire_timeout: float | None = None) -> Scope[ValueCalls]:
        """A scope with the weights on the device for inference, in eval mode under no_grad.

        Args:
            acquire_timeout: Seconds to wait while another thread or task owns the model; None gives up at once.
        """
        return Scope(self._control, self, Mode.LOGPROB, "inference_mode()", acquire_timeout=acquire_timeout)

    def refit(self, *_: object, **__: object) -> NoReturn:
        """Nothing to push: engines sample from policies.

        Args:
            *_: Not read.
            **__: Not read.

        Raises:
            UnsupportedError: Always.
        """
        refuse_refit_of_value(self._control)

    def get_values(self, batch: Batch) -> dict[str, Any]:
        """One value a token.

        Args:
            batch: ``input_ids [B, S]`` int64, right-padded, ``input_lengths [B]``.

        Returns:
            ``values [B, S]`` float32 on the CPU, 0 beyond ``input_lengths``.

        Raises:
            ModeError: Not in a mode with the weights on the device.
            BatchError: The batch does not fit.
        """
        result: dict[str, Any] = self._control.call("get_values", batch)
        return result
