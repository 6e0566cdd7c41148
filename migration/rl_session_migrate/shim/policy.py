"""The legacy policy API over a policy of rl_session.

Every name, signature, return value and no-op of the manual API; ``help(LegacyPolicy)`` is its reference. What the two
backends do differently is in ``rl_session_migrate.shim.effects``. Knows nothing of generation engines.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from rl_session.driver.callsite import call_site, speaking
from rl_session.errors import UnsupportedError, UsageError
from rl_session.generation.in_process import InProcessEngine
from rl_session.lifecycle import Cell, Cells, Mode
from rl_session.policy import Policy
from rl_session.scope import Scope
from rl_session_migrate.shim.batch import BatchedDataDict
from rl_session_migrate.shim.effects import LegacyConfig, policy_effect, still_freed
from rl_session_migrate.shim.notice import warn_once
from rl_session_migrate.shim.shared import sample_shared
from rl_session_migrate.shim.trainer import Batch, LegacyTrainer
from rl_session_migrate.shim.transfer import Transfer, send

__all__ = ["LegacyPolicy", "ShardingAnnotations"]

_BY_NAME = frozenset(
    {
        "prepare_for_training",
        "prepare_for_lp_inference",
        "finish_inference",
        "finish_training",
        "offload_before_refit",
        "offload_after_refit",
        "prepare_refit_info",
        "finalize_async_save",
        "get_free_memory_bytes",
        "release_ipc_buffer",
    }
)
"""What legacy code may call on all workers by name."""
_NO_LIMIT = 2**63 - 1
_NO_ENGINE = "nothing; a policy is no engine: the call does nothing"
_PUSH = "policy.refit(engine), which tells both sides and waits for both"


class ShardingAnnotations:
    """What legacy loops ask of ``policy.sharding_annotations``.

    Args:
        num_ranks: Workers of the policy, all of them data-parallel.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def get_axis_size(self, axis: str) -> int:
        """Ranks along an axis: all for "data_parallel", 1 for any other."""
        return self._num_ranks if axis == "data_parallel" else 1


class LegacyPolicy(LegacyTrainer):
    """A policy of rl_session with the methods of a legacy policy, over the same engine as the scopes.

    Each lifecycle call sets where the policy *rests*; scopes come back to that, so that a loop may be migrated block by block.
    A lifecycle call inside an open scope is a ``ShimInScopeError``. What legacy lost in an open train step (gradients) is
    kept, with a record. The log says ``via="shim"`` and where the call stands; the first call at each line warns with the
    scope to write. May be used from any thread. Reference: docs/legacy-api.md; the way to scopes, in steps: migration/README.md.

    Args:
        policy: The policy, made by ``rl_session.attach`` or a session.
        backend: Whose effects to have where they differ: "dtensor" or "megatron".
        config: A legacy policy configuration (its nested mapping), or a :class:`LegacyConfig`; flags that it lacks are those
            of the policy's ``OffloadConfig``.

    Raises:
        ConfigError: That is no policy, or there is no such backend.
    """

    _effects = staticmethod(policy_effect)

    def __init__(
        self,
        policy: Policy,
        *,
        backend: Literal["dtensor", "megatron"] = "dtensor",
        config: LegacyConfig | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(policy, backend=backend, config=config)
        _join_interfaces(
            "nemo_rl.models.policy.interfaces", ("PolicyInterface", "ColocatablePolicyInterface"), type(self)
        )
        _join_interfaces("nemo_rl.models.generation.interfaces", ("GenerationInterface",), type(self))

    # -- lifecycle: training and inference -----------------------------------------------------------------------------

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Bring weights, gradients and optimizer state to the device, and leave the module in train.

        Contract: from any state, and again; arguments are dropped. A gradient buffer that was freed comes back as zeros.
        Scope: ``with policy.training_mode(): ...`` around what trains. Guide: docs/legacy-api.md.

        Args:
            *args: Dropped.
            **kwargs: Dropped.

        Raises:
            ShimInScopeError: A scope is open.
            RLSessionError: The device has no room, or something else failed; everything is as it was.
        """
        del args, kwargs
        self._lifecycle("prepare_for_training")

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Bring the weights to the device, and leave the module in eval.

        Contract: optimizer state goes to the host if ``offload_optimizer_for_logprob`` says so, and is never brought in.
        DTensor keeps gradients; Megatron frees their buffer, except that of an open step, which legacy destroyed.
        Scope: ``with policy.logprob_mode(): ...``. Guide: docs/legacy-api.md.

        Args:
            keep_train_buffers: Leave gradients and optimizer state where they are.

        Raises:
            ShimInScopeError: A scope is open.
            RLSessionError: The device has no room, or something else failed; everything is as it was.
        """
        self._lifecycle("prepare_for_lp_inference", keep_train_buffers=bool(keep_train_buffers))

    def finish_inference(self) -> None:
        """Send the weights to the host, and leave the module in eval; optimizer state stays where it is.

        Contract: DTensor moves gradients with the weights, Megatron leaves them. Scope: none; the end of
        ``with policy.logprob_mode():`` is the way back. Guide: docs/legacy-api.md.

        Raises:
            ShimInScopeError: A scope is open.
            RLSessionError: It failed; everything is as it was.
        """
        self._lifecycle("finish_inference")

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Nothing; that of a value model really offloads.

        Contract: an empty placeholder in legacy too. Scope: none; delete the call. Guide: docs/legacy-api.md.

        Args:
            *args: Dropped.
            **kwargs: Dropped.
        """
        del args, kwargs
        warn_once("policy.finish_training()", "nothing; it never did anything")

    # -- lifecycle: refit ------------------------------------------------------------------------------------------------

    def offload_before_refit(self) -> None:
        """Make room for an engine's weights: optimizer state to the host, gradients too or away; weights stay.

        Contract: DTensor sends the optimizer always and keeps gradients where they are; Megatron sends it if
        ``offload_optimizer_for_refit`` says so and frees gradients, except those of an open step, which go to the host.
        The train flag stays. Scope: ``with policy.refit_mode(): ...``, or ``policy.refit(engine)``. Guide:
        docs/legacy-api.md.

        Raises:
            ShimInScopeError: A scope is open.
            RLSessionError: It failed; everything is as it was.
        """
        self._lifecycle("offload_before_refit")

    def offload_after_refit(self) -> None:
        """Send everything to the host, and leave the module in eval.

        Contract: nothing is brought back, whatever the name says; on Megatron with ``offload_optimizer_for_refit=False``
        optimizer state stays on the device. Scope: none; the end of a scope is the way back. Guide: docs/legacy-api.md.

        Raises:
            ShimInScopeError: A scope is open.
            RLSessionError: It failed; everything is as it was.
        """
        self._lifecycle("offload_after_refit")

    def offload_to_cpu(self) -> None:
        """As :meth:`offload_after_refit`, under another name.

        Contract: everything goes to the host, and the module is left in eval; on Megatron ``offload_optimizer_for_refit=False``
        keeps optimizer state on the device. Scope: ``with policy.offloaded(): ...``, or nothing. Guide: docs/legacy-api.md.

        Raises:
            ShimInScopeError: A scope is open.
            RLSessionError: It failed; everything is as it was.
        """
        self._lifecycle("offload_after_refit", alias="offload_to_cpu")

    def prepare_refit_info(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """What the weights are like: name to (shape, dtype). Moves nothing, in any state.

        Contract: legacy needed the weights on the device for it. Guide: docs/legacy-api.md.

        Raises:
            ClosedError: The policy was closed.
        """
        info: dict[str, tuple[tuple[int, ...], Any]] = self._control.ask("weight_info")
        return info

    # -- the policy as a generation object -------------------------------------------------------------------------------

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Nothing; True.

        Contract: a policy is no engine, and has nothing to wake; arguments are dropped. Served inside scopes too. Scope: none;
        delete the call, or make it on the engine's own :class:`LegacyGeneration`. Guide: docs/legacy-api.md.

        Args:
            *args: Dropped.
            **kwargs: Dropped.
        """
        del args, kwargs
        warn_once("policy.prepare_for_generation()", _NO_ENGINE)
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Nothing; True.

        Contract: a policy is no engine, and does not sleep; arguments are dropped. Served inside scopes too. Scope: none;
        delete the call, or make it on the engine's own :class:`LegacyGeneration`. Guide: docs/legacy-api.md.

        Args:
            *args: Dropped.
            **kwargs: Dropped.
        """
        del args, kwargs
        warn_once("policy.finish_generation()", _NO_ENGINE)
        return True

    def invalidate_kv_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Nothing; True.

        Contract: a policy caches nothing of older weights; arguments are dropped. Served inside scopes too. Scope: none;
        delete the call. Guide: docs/legacy-api.md.

        Args:
            *args: Dropped.
            **kwargs: Dropped.
        """
        del args, kwargs
        warn_once("policy.invalidate_kv_cache()", _NO_ENGINE)
        return True

    def get_logger_metrics(self) -> dict[str, Any]:
        """None that a policy keeps as a generation object: an empty dict.

        Contract: what loops log of a step's rollouts. Scope: none. Guide: docs/legacy-api.md.
        """
        return {}

    def clear_logger_metrics(self) -> None:
        """Nothing: none are kept.

        Contract: returns None. Scope: none. Guide: docs/legacy-api.md.
        """

    # -- computing -------------------------------------------------------------------------------------------------------

    def get_logprobs(self, data: Batch, timer: Any = None) -> BatchedDataDict:
        """Log-probabilities of the batch's tokens.

        Contract: needs the weights on the device, as ``prepare_for_lp_inference()`` brings them; leaves the module in eval.
        Scope: ``with policy.logprob_mode(): policy.get_logprobs(batch)``. Guide: docs/legacy-api.md.

        Args:
            data: A legacy batch or any mapping.
            timer: Taken and not used.

        Returns:
            ``logprobs [B, S]``; entry 0 of a row is 0.

        Raises:
            ModeError: The weights are away; the message names the missing legacy call and the scope.
            RLSessionError: As ``rl_session.Policy.get_logprobs``.
        """
        del timer
        mbs = self._config.logprob_batch_size
        return self._infer("get_logprobs", lambda: self._policy.get_logprobs(data, mbs=mbs))

    def get_reference_policy_logprobs(
        self, data: Batch, micro_batch_size: int | None = None, timer: Any = None
    ) -> BatchedDataDict:
        """Log-probabilities under the reference; the live weights come back, after an exception too (legacy's did not).

        Contract: needs the weights on the device, in training or inference; leaves the module in eval. Scope:
        ``with policy.logprob_mode(): ...``, or inside ``training_mode()``. Guide: docs/legacy-api.md.

        Args:
            data: A legacy batch or any mapping.
            micro_batch_size: Sequences a forward sees; the configured ``logprob_batch_size``, else all.
            timer: Taken and not used.

        Returns:
            ``reference_logprobs [B, S]``, laid out as in :meth:`get_logprobs`.

        Raises:
            ModeError: The weights are away; the message names the missing legacy call and the scope.
            UnsupportedError: The policy has no reference.
            RLSessionError: As ``rl_session.Policy.get_reference_policy_logprobs``.
        """
        del timer
        mbs = micro_batch_size or self._config.logprob_batch_size
        call = self._policy.get_reference_policy_logprobs
        return self._infer("get_reference_policy_logprobs", lambda: call(data, mbs=mbs))

    def get_topk_logits(
        self, data: Batch, k: int, micro_batch_size: int | None = None, timer: Any = None
    ) -> BatchedDataDict:
        """The k largest next-token logits.

        Contract: needs the weights on the device; leaves the module in eval. Scope: ``with policy.logprob_mode(): ...``.
        Guide: docs/legacy-api.md.

        Args:
            data: A legacy batch or any mapping.
            k: How many.
            micro_batch_size: Sequences a forward sees; the configured ``logprob_batch_size``, else all.
            timer: Taken and not used.

        Returns:
            ``topk_logits`` and ``topk_indices``, both ``[B, S-1, k]``.

        Raises:
            ModeError: The weights are away; the message names the missing legacy call and the scope.
            RLSessionError: As ``rl_session.Policy.get_topk_logits``.
        """
        del timer
        mbs = micro_batch_size or self._config.logprob_batch_size
        return self._infer("get_topk_logits", lambda: self._policy.get_topk_logits(data, k, mbs=mbs))

    def score(self, data: Batch) -> BatchedDataDict:
        """One score a sequence, for models with a scalar head.

        Contract: needs the weights on the device; leaves the module in eval. Scope: ``with policy.logprob_mode(): ...``.
        Guide: docs/legacy-api.md.

        Args:
            data: A legacy batch or any mapping.

        Returns:
            ``scores [B]``.

        Raises:
            ModeError: The weights are away; the message names the missing legacy call and the scope.
            RLSessionError: As ``rl_session.Policy.score``.
        """
        return self._infer("score", lambda: self._policy.score(data))

    def train_from_meta(self, meta: Any, loss_fn: Any, **kwargs: Any) -> dict[str, Any]:
        """As :meth:`train`; ``meta`` is the batch itself (a data plane of its own is not served).

        Contract: needs what ``train`` needs, and leaves what it leaves. Scope: ``with policy.training_mode(): ...``.
        Guide: docs/legacy-api.md.

        Args:
            meta: A mapping of tensors.
            loss_fn: As for :meth:`train`.
            **kwargs: As for :meth:`train`.

        Returns:
            As :meth:`train`.

        Raises:
            RLSessionError: As :meth:`train`.
        """
        return self.train(_batch_of(meta, "train_from_meta"), loss_fn, **kwargs)

    def get_logprobs_from_meta(self, meta: Any, **kwargs: Any) -> None:
        """As :meth:`get_logprobs`; the result is written into ``meta`` under ``prev_logprobs``.

        Contract: returns None. Scope: ``with policy.logprob_mode(): ...``. Guide: docs/legacy-api.md.

        Args:
            meta: A mutable mapping of tensors.
            **kwargs: As for :meth:`get_logprobs`.

        Raises:
            RLSessionError: As :meth:`get_logprobs`.
        """
        batch = _batch_of(meta, "get_logprobs_from_meta")
        batch["prev_logprobs"] = self.get_logprobs(batch, **kwargs)["logprobs"]

    def get_reference_policy_logprobs_from_meta(self, meta: Any, **kwargs: Any) -> None:
        """As :meth:`get_reference_policy_logprobs`; the result is written into ``meta`` (``reference_policy_logprobs``).

        Contract: returns None. Scope: ``with policy.logprob_mode(): ...``. Guide: docs/legacy-api.md.

        Args:
            meta: A mutable mapping of tensors.
            **kwargs: As for :meth:`get_reference_policy_logprobs`.

        Raises:
            RLSessionError: As :meth:`get_reference_policy_logprobs`.
        """
        batch = _batch_of(meta, "get_reference_policy_logprobs_from_meta")
        found = self.get_reference_policy_logprobs(batch, **kwargs)
        batch["reference_policy_logprobs"] = found["reference_logprobs"]

    def train_microbatches_from_meta(self, meta: Any) -> None:
        """As :meth:`train_microbatches`; ``meta`` is the chunk itself.

        Contract: needs an open step. Scope: ``step.forward_backward(chunk, loss_fn)``. Guide: docs/legacy-api.md.

        Args:
            meta: A mapping of tensors.

        Raises:
            RLSessionError: As :meth:`train_microbatches`.
        """
        self.train_microbatches(_batch_of(meta, "train_microbatches_from_meta"))

    # -- checkpoints -----------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        weights_path: Any,
        optimizer_path: Any = None,
        tokenizer_path: Any = None,
        checkpointing_cfg: Any = None,
        **kwargs: Any,
    ) -> None:
        """Write a checkpoint of weights, optimizer and scheduler state to ``weights_path``.

        Contract: from any state. On DTensor nothing moves. On Megatron the weights, and with ``optimizer_path`` the
        optimizer state, are brought to the device and stay there, and the module is left in train, as legacy did. Scope: none
        is needed. Guide: docs/legacy-api.md.

        Args:
            weights_path: Where; the checkpoint holds the optimizer too.
            optimizer_path: A note that points there is written here.
            tokenizer_path: Taken and not used: the tokenizer is the loop's.
            checkpointing_cfg: Taken and not used.
            **kwargs: Taken and not used, such as ``is_final_checkpoint``.

        Raises:
            CheckpointError: ``weights_path`` is something else than a checkpoint or a free name.
            CheckpointWriteError: It could not be written; what stood there still stands.
        """
        del tokenizer_path, checkpointing_cfg, kwargs
        site = call_site()
        if self._config.backend == "megatron" and not self._control.frames:
            with self._turn("save_checkpoint()", "training_mode()"):
                self._onload_to_save(site, optimizer_path is not None)
        with speaking("shim", site):
            self._save(weights_path, optimizer_path)

    def _onload_to_save(self, site: str, with_optimizer: bool) -> None:
        keeps = self._config.optimizer_cpu_offload or not with_optimizer
        optimizer = Cell.AS_IS if keeps else Cell.DEVICE
        cells = Cells(weights=Cell.DEVICE, grads=Cell.AS_IS, optimizer=optimizer)
        cells = still_freed(cells, self._control.resting_cells)
        self._control.switch(Mode.RESIDENT, "save_checkpoint()", site, cells=cells)
        self._control.ask("hold_mode", "train")

    def finalize_async_save(self) -> None:
        """Nothing: a checkpoint is complete when :meth:`save_checkpoint` returns.

        Contract: from any state, and from the thread that gets it as ``wait_fn``. Scope: none; delete it. Guide:
        docs/legacy-api.md.
        """

    # -- the rest --------------------------------------------------------------------------------------------------------

    def get_free_memory_bytes(self) -> int:
        """Free bytes on the device; a very large number where there is no limit.

        Contract: the least over ranks; legacy loops size the bucket of a push by it. Scope: none; ``policy.refit(engine)`` sizes
        its own. Guide: docs/legacy-api.md.

        Raises:
            ClosedError: The policy was closed.
        """
        free = self._policy.memory()["device_free"]
        return _NO_LIMIT if free is None else int(free)

    def release_ipc_buffer(self) -> None:
        """Nothing: no buffer is shared with other processes.

        Contract: returns None, in any state. Scope: none; delete it. Guide: docs/legacy-api.md.
        """

    def print_node_ip_and_gpu_id(self) -> None:
        """Print the device of each rank.

        Contract: returns None, in any state. Guide: docs/legacy-api.md.
        """
        print(f"{self._control.label}: {self._control.group.num_ranks} rank(s) on {self._policy.device!r}")  # noqa: T201

    @property
    def sharding_annotations(self) -> ShardingAnnotations:
        """How the policy is spread over ranks.

        Contract: ``get_axis_size("data_parallel")`` is the number of ranks, that of any other axis 1. Guide: docs/legacy-api.md.
        """
        return ShardingAnnotations(self._control.group.num_ranks)

    def run_all_workers_single_data(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method by its name; one result a rank.

        Contract: as the method itself; arguments by keyword only. Scope: that of the method. Guide: docs/legacy-api.md.

        Args:
            method_name: One of the lifecycle methods.
            *args: Refused.
            **kwargs: Handed on.

        Raises:
            ValueError: There are positional arguments.
            AttributeError: There is no such method.
        """
        if args:
            raise ValueError(f"run_all_workers_single_data({method_name!r}): arguments by keyword only")
        if method_name not in _BY_NAME:
            raise AttributeError(f"no worker method {method_name!r}; there are {', '.join(sorted(_BY_NAME))}")
        return [getattr(self, method_name)(**kwargs)] * self._control.group.num_ranks

    def calibrate_qkv_fp8_scales(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not served, as on DTensor.

        Contract: raises, as DTensor's does. Guide: docs/legacy-api.md.

        Args:
            *args: Dropped.
            **kwargs: Dropped.

        Raises:
            NotImplementedError: Always.
        """
        del args, kwargs
        raise NotImplementedError("calibrate_qkv_fp8_scales() is not served: rl_session has no fp8 KV scales")

    def stream_weights_via_ipc_zmq(self, buffer_size_bytes: int, kv_scales: Any = None) -> list[Transfer]:
        """Send the weights to the engine of the same session that is told to receive; one future.

        Contract: needs the weights on the device; nothing moves. Tell both sides, then wait for both. Scope:
        ``policy.refit(engine)``. Guide: docs/legacy-api.md.

        Args:
            buffer_size_bytes: The most bytes in a bucket.
            kv_scales: Taken and not used.

        Raises:
            ModeError: The weights are away; the message names the missing legacy call and the scope.
        """
        del kv_scales
        warn_once("policy.stream_weights_via_ipc_zmq(...)", _PUSH)
        return [self._send(int(buffer_size_bytes))]

    def broadcast_weights_for_collective(self, kv_scales: Any = None) -> list[Transfer]:
        """As :meth:`stream_weights_via_ipc_zmq`, to an engine with devices of its own.

        Contract: needs the weights on the device; nothing moves. Tell both sides, then wait for both. Scope:
        ``policy.refit(engine)``. Guide: docs/legacy-api.md.

        Args:
            kv_scales: Taken and not used.

        Raises:
            ModeError: The weights are away; the message names the missing legacy call and the scope.
        """
        del kv_scales
        warn_once("policy.broadcast_weights_for_collective()", _PUSH)
        return [self._send(None)]

    def _send(self, nbytes: int | None) -> Transfer:
        site = call_site()
        with speaking("shim", site):
            turn = lambda: self._turn("a push of weights", "refit_mode()")  # noqa: E731 (made anew where it is used)
            return send(self._control, site, None if nbytes is None else max(1, nbytes), turn)

    def generate(self, data: Batch, greedy: bool = False, **kwargs: Any) -> BatchedDataDict:
        """Sample with the policy's own in-process engine.

        Contract: needs the weights on the device; leaves the module in eval. Scope: ``with policy.generation_mode() as p:
        p.generate(batch)``. Guide: docs/legacy-api.md.

        Args:
            data: ``input_ids [B, S]`` right-padded prompts, ``input_lengths [B]``.
            greedy: Take the likeliest token.
            **kwargs: Sampling parameters.

        Returns:
            ``output_ids``, ``generation_lengths``, ``unpadded_sequence_lengths``, ``logprobs``.

        Raises:
            UsageError: The policy has no engine of its own, or several.
            ModeError: The weights are away; the message names the missing legacy call and the scope.
        """
        site = call_site()
        engines: list[InProcessEngine] = self._policy._engines  # noqa: SLF001 (two faces of one policy)
        if len(engines) != 1:
            names = ", ".join(repr(engine.name) for engine in engines) or "none"
            make = "" if engines else 'session.engine("sampler", InProcessEngine(policy))  # before; or '
            raise UsageError(
                f"{self._control.label}: generate() at {site} needs one engine that samples from its own weights",
                (*self._control.explain()[1], f"engines that sample from {self._control.label}: {names}"),
                f"{make}LegacyGeneration(engine).generate(batch)  # or: with engine.awake() as e: e.generate(batch)",
            )
        with speaking("shim", site):
            return sample_shared(engines[0], data, greedy, site, kwargs)

    # -- scopes, for loops that are half migrated ------------------------------------------------------------------------

    def logprob_mode(self, **options: Any) -> Scope[Any]:
        """The scope of the policy behind this handle; inside it this handle's compute calls may be made.

        Contract: not of the legacy API; comes back to where the last lifecycle call left the policy. Guide: docs/legacy-api.md.
        """
        scope: Scope[Any] = self._policy.logprob_mode(**options)
        return scope

    def refit_mode(self, **options: Any) -> Scope[Any]:
        """The scope of the policy behind this handle.

        Contract: not of the legacy API; comes back to where the last lifecycle call left the policy. Guide: docs/legacy-api.md.
        """
        scope: Scope[Any] = self._policy.refit_mode(**options)
        return scope

    def generation_mode(self, *args: Any, **options: Any) -> Scope[Any]:
        """The scope of the policy behind this handle.

        Contract: not of the legacy API; comes back to where the last lifecycle call left the policy. Guide: docs/legacy-api.md.
        """
        scope: Scope[Any] = self._policy.generation_mode(*args, **options)
        return scope


def _batch_of(meta: Any, call: str) -> Any:
    if hasattr(meta, "keys") and hasattr(meta, "__getitem__"):
        return meta
    raise UnsupportedError(
        f"{call}() of a {type(meta).__name__}",
        ("there is no data plane behind the shim: the batch itself is handed on",),
        f"{call}(batch)  # a mapping of tensors",
    )


def _join_interfaces(module: str, names: tuple[str, ...], cls: type) -> None:
    """Be an instance of the legacy interfaces too, where the loop has imported them."""
    found = sys.modules.get(module)
    for name in names:
        register = getattr(getattr(found, name, None), "register", None)
        if register is not None:
            register(cls)
