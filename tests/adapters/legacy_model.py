"""A faithful model of NeMo-RL's legacy objects, built from the legacy contract: no torch, no ray, no GPU.

What the contract's tables A.2 to A.6, B.1 and C.3 say a method does to parameters, buffers, gradients, optimizer state and
the sticky train flag, these classes do, and nothing else: they are idempotent where the original is, destroy what it
destroys, swallow what it swallows, and compute in the wrong state fails as opaquely as there. Written independently of the
library's own model of them (``rl_session.adapters.nemo_rl.effects``), so that the two can be compared.

    legacy = LegacyPolicy("megatron", offload_optimizer_for_logprob=True)
    legacy.prepare_for_lp_inference()
    legacy.state        # {"params": "gpu", "grads": "freed", "optimizer": "cpu"}, and legacy.training is False
    legacy.log          # ["prepare_for_lp_inference()"]

Faults: ``legacy.fail("offload_after_refit", when="before" | "half" | "after")`` makes the next call of that name raise, with its
effect not, partly, or wholly done. Knows nothing of ``rl_session``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

GPU, CPU, FREED, NONE = "gpu", "cpu", "freed", "none"
ILLEGAL = "CUDA error: an illegal memory access was encountered"


class DeviceFullError(RuntimeError):
    """Two tenants of the same GPUs were in at once."""


class Gpus:
    """GPUs that tenants share: whoever comes in while another is in runs out of memory.

    Attributes:
        tenants: Every object made on them.
    """

    def __init__(self) -> None:
        self.tenants: list[Any] = []

    def check(self, coming: Any) -> None:
        """Fail if another tenant holds more than what may stay beside ``coming``."""
        for tenant in self.tenants:
            if tenant is not coming and not tenant.fits_beside(coming):
                raise DeviceFullError(f"CUDA out of memory: {coming!r} beside {tenant!r}")


class _Faults:
    """Calls, faults on demand, and memory."""

    def __init__(self, gpus: Gpus | None) -> None:
        self.log: list[str] = []
        self._faults: dict[str, list[tuple[str, BaseException]]] = {}
        self._gpus = gpus
        if gpus is not None:
            gpus.tenants.append(self)

    def fail(self, method: str, *, when: str = "before", error: BaseException | None = None) -> None:
        """Make the next call of ``method`` that has no fault yet raise; may be said several times."""
        self._faults.setdefault(method, []).append((when, error or RuntimeError(f"injected: {method}")))

    def heal(self) -> None:
        """Forget faults that did not strike."""
        self._faults.clear()

    def calls(self) -> list[str]:
        """What was called since the last time this was asked."""
        log, self.log = self.log, []
        return log

    @contextmanager
    def _called(self, method: str, shown: str = "") -> Iterator[str]:
        """Log a call, and strike it with its fault; yields when the fault strikes: "", "half" or "after"."""
        self.log.append(f"{method}({shown})")
        faults = self._faults.get(method)
        when, error = faults.pop(0) if faults else ("", None)
        if when == "before" and error is not None:
            raise error
        yield when
        if error is not None:
            raise error

    def _take(self) -> None:
        if self._gpus is not None:
            self._gpus.check(self)


class _Trainer(_Faults):
    """What a policy and a value have in common.

    Attributes:
        state: Component to "gpu", "cpu", "freed" (Megatron's gradient buffer without its bytes) or "none".
        training: The sticky train flag.
        accumulated: Chunks whose gradients are in the buffer, of the step that is open.
    """

    def __init__(
        self,
        backend: str,
        *,
        optimizer: bool = True,
        offload_optimizer_for_logprob: bool = False,
        offload_optimizer_for_refit: bool = True,
        cpu_offload: bool = False,
        optimizer_cpu_offload: bool = False,
        gpus: Gpus | None = None,
        with_cfg: bool = True,
    ) -> None:
        super().__init__(gpus)
        self._backend = backend
        self._megatron = backend == "megatron"
        self._has_optimizer = optimizer
        self._lp_flag = offload_optimizer_for_logprob
        self._refit_flag = offload_optimizer_for_refit
        self._cpu_offload = cpu_offload and not self._megatron
        self._optimizer_cpu_offload = optimizer_cpu_offload and self._megatron
        self.training = True
        self.accumulated = 0
        self.state = {
            "params": CPU if self._cpu_offload else GPU,
            "buffers": NONE if self._megatron else GPU,
            "grads": GPU if self._megatron and optimizer else NONE,
            "optimizer": NONE if not optimizer else CPU if self._cpu_offload or self._optimizer_cpu_offload else GPU,
        }
        if with_cfg:
            self.cfg = {
                "dtensor_cfg": {
                    "enabled": not self._megatron,
                    "_v2": backend == "dtensor_v2",
                    "cpu_offload": cpu_offload,
                },
                "megatron_cfg": {
                    "enabled": self._megatron,
                    "optimizer": {"optimizer_cpu_offload": optimizer_cpu_offload},
                },
                "offload_optimizer_for_logprob": offload_optimizer_for_logprob,
                "offload_optimizer_for_refit": offload_optimizer_for_refit,
            }

    def __eq__(self, other: object) -> bool:  # objects may compare equal, and be unhashable
        return isinstance(other, type(self)) and self._backend == other._backend

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._backend} {self.state}>"

    def fits_beside(self, coming: Any) -> bool:
        held = {name for name, where in self.state.items() if where == GPU}
        if isinstance(coming, LegacyGeneration) and coming.waking == ["weights"]:
            return held <= {"params", "buffers"}  # the refit: weights of both, and nothing else
        if isinstance(coming, LegacyGeneration) and coming.backend == "megatron":
            return held <= {"params", "buffers"}  # they are the engine's own
        return not held

    # -- movement ------------------------------------------------------------------------------------------------

    def _params(self, where: str) -> None:
        if not self._cpu_offload:
            self.state["params"] = where
        if not self._megatron:
            self.state["buffers"] = where

    def _optim(self, where: str) -> None:
        if self._has_optimizer and not self._cpu_offload and not self._optimizer_cpu_offload:
            self.state["optimizer"] = where

    def _free_grads(self) -> None:
        if self.state["grads"] == GPU:
            self.state["grads"] = FREED
            self.accumulated = 0  # destroyed, and nothing says so

    def _alloc_grads(self) -> None:
        if self.state["grads"] == FREED:
            self.state["grads"] = GPU  # zero-filled

    def prepare_for_training(self) -> None:
        with self._called("prepare_for_training") as fault:
            self._take()
            self._params(GPU)
            if fault != "half":
                self._alloc_grads()
                self._optim(GPU)
                self.training = True

    # -- computing -----------------------------------------------------------------------------------------------

    def _need(self, *components: str) -> None:
        allowed = {"params": (CPU,) if self._cpu_offload else (GPU,)}
        if self._cpu_offload or self._optimizer_cpu_offload:
            allowed["optimizer"] = (CPU,)
        for name in components:
            if self.state[name] not in (*allowed.get(name, (GPU,)), NONE):
                raise RuntimeError(ILLEGAL)

    def train(self, data: Any = None, loss_fn: Any = None, eval_mode: bool = False, **_: Any) -> dict[str, Any]:
        with self._called("train", "eval_mode=True" if eval_mode else ""):
            if not self._has_optimizer:
                raise AttributeError("'NoneType' object has no attribute 'zero_grad'")
            needs = ["params", "buffers"]
            needs += ["grads"] if self._megatron else []  # zero_grad_buffer, in evaluation too
            needs += [] if eval_mode else ["optimizer"]
            self._need(*needs)
            self.training = not eval_mode
            return {"loss": [0.5], "grad_norm": [1.0]}

    def _infer(self, method: str, result: Any) -> Any:
        with self._called(method):
            self._need("params", "buffers")
            self.training = False
            return result


class LegacyPolicy(_Trainer):
    """``Policy``; backend "dtensor_v1", "dtensor_v2" or "megatron"."""

    def __init__(self, backend: str, **flags: Any) -> None:
        super().__init__(backend, **flags)
        if backend != "dtensor_v1":
            self.finish_inference = self._finish_inference

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name not in ("finish_inference", "_gpus")}
        return {**kept, "_gpus": None}

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs  # dropped by the facade
        super().prepare_for_training()

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        with self._called("prepare_for_lp_inference", "keep_train_buffers=True" if keep_train_buffers else "") as fault:
            self._take()
            self._params(GPU)
            if fault == "half":
                return
            if not keep_train_buffers:
                self._free_grads()
                if self._lp_flag:
                    self._optim(CPU)
            self.training = False

    def _finish_inference(self) -> None:
        with self._called("finish_inference"):
            self._params(CPU)
            self.training = False

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs  # an empty placeholder
        self.log.append("finish_training()")

    def _off1(self) -> None:
        self._free_grads()
        if self._refit_flag or not self._megatron:
            self._optim(CPU)

    def offload_before_refit(self) -> None:
        with self._called("offload_before_refit") as fault:
            if fault == "half":
                self._free_grads()
            else:
                self._off1()

    def offload_after_refit(self) -> None:
        with self._called("offload_after_refit") as fault:
            self._off1()
            if fault != "half":
                self._params(CPU)
                self.training = False

    def offload_to_cpu(self) -> None:
        self.offload_after_refit()

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        del args, kwargs
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        del args, kwargs
        return True

    def get_logprobs(self, data: Any = None, timer: Any = None) -> Any:
        del timer
        return self._infer("get_logprobs", {"logprobs": data})

    def get_reference_policy_logprobs(self, data: Any = None) -> Any:
        return self._infer("get_reference_policy_logprobs", {"reference_logprobs": data})

    def save_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        with self._called("save_checkpoint"):
            if self._megatron:  # brings in what it saves, and leaves it there, in train mode
                self._params(GPU)
                if optimizer_path:
                    self._optim(GPU)
                self.training = True
            else:
                self._need("params", *(["optimizer"] if optimizer_path else []))


class LegacyTQPolicy(LegacyPolicy):
    """``TQPolicy``: a step may be split. Only Megatron's workers can."""

    def __init__(self, backend: str = "megatron", **flags: Any) -> None:
        super().__init__(backend, **flags)
        self._open = False

    def begin_train_step(self, loss_fn: Any = None) -> None:
        with self._called("begin_train_step"):
            if self._open:
                raise RuntimeError("a train step is open")
            self._need("params", "grads")
            self._open, self.accumulated, self.training = True, 0, True

    def train_microbatches_from_meta(self, meta: Any = None) -> None:
        with self._called("train_microbatches_from_meta"):
            if not self._open:
                raise RuntimeError("no train step is open")
            self._need("params", "grads")
            if not self.training:
                raise AssertionError("silently trained in eval mode")
            self.accumulated += 1

    def finish_train_step(self) -> int:
        with self._called("finish_train_step"):
            if not self._open:
                raise RuntimeError("no train step is open")
            self._need("params", "grads", "optimizer")
            self._open = False
            return self.accumulated

    def abort_train_step(self) -> None:
        with self._called("abort_train_step"):
            if self._open:
                self._need("grads")
            self._open, self.accumulated = False, 0


class LegacyValue(_Trainer):
    """``Value``; backend "dtensor_v2" or "megatron". Its methods take no arguments."""

    def prepare_for_inference(self) -> None:
        with self._called("prepare_for_inference") as fault:
            self._take()
            self._params(GPU)
            if fault != "half":
                self._free_grads()
                self.training = False

    def finish_inference(self) -> None:
        with self._called("finish_inference"):
            self._params(CPU)

    def finish_training(self) -> None:
        with self._called("finish_training") as fault:
            self._params(CPU)
            if fault != "half":
                self._free_grads()
                self._optim(CPU)
                self.training = False

    def get_values(self, data: Any = None) -> Any:
        return self._infer("get_values", {"values": data})

    def save_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        with self._called("save_checkpoint"):
            if self.state["params"] == CPU and not self._cpu_offload:
                raise RuntimeError("setStorage: ... out of bounds for storage of size 0")


class LegacyGeneration(_Faults):
    """A generation object; backend "vllm", "sglang", "megatron", "trtllm" or "dynamo".

    Attributes:
        state: "weights" and "kv_cache" to "gpu", "cpu" or "none".
        cached: Whether the prefix cache holds something.
        policy: The policy whose weights a colocated Megatron engine serves.
    """

    def __init__(
        self,
        backend: str = "vllm",
        *,
        colocated: bool = True,
        awake: bool = False,
        gpus: Gpus | None = None,
        policy: LegacyPolicy | None = None,
    ) -> None:
        super().__init__(gpus)
        self.backend = backend
        self.colocated = colocated
        self.policy = policy
        self.waking: list[str] = []
        self.cached = False
        self.cfg: dict[str, Any] = {"backend": backend, "colocated": {"enabled": colocated}}
        if backend == "sglang":
            self.cfg["sglang_server_config"] = {"needs_offload": colocated}
        is_up = awake or not colocated
        self.state = {"weights": GPU, "kv_cache": GPU} if is_up else {"weights": CPU, "kv_cache": NONE}

    def __repr__(self) -> str:
        return f"<LegacyGeneration {self.backend} {self.state}>"

    def fits_beside(self, coming: Any) -> bool:
        del coming
        return not self.colocated or GPU not in self.state.values()

    @property
    def _swallows(self) -> bool:
        return self.backend in ("vllm", "trtllm")

    @property
    def _said(self) -> bool | None:
        return None if self.backend == "sglang" else True

    def prepare_for_generation(self, *args: Any, tags: list[str] | None = None, **kwargs: Any) -> bool | None:
        del args, kwargs
        try:
            with self._called("prepare_for_generation", "" if tags is None else f"tags={tags}") as fault:
                if self.colocated:
                    self._wake(tags, half=fault == "half")
        except Exception:
            if not self._swallows:
                raise
            return False
        return self._said

    def _wake(self, tags: list[str] | None, *, half: bool) -> None:
        self.waking = tags or ["weights", "kv_cache"]
        self._take()
        if self.policy is not None:  # the training weights are the engine's
            self.policy.state["params"] = GPU
        if tags is None or "weights" in tags or self.backend == "megatron":
            self.state["weights"] = GPU
        if not half and (tags is None or "kv_cache" in tags or self.backend == "megatron"):
            self.state["kv_cache"] = GPU

    def finish_generation(self, **kwargs: Any) -> bool | None:
        if kwargs and self.backend == "megatron" and set(kwargs) != {"release_gpu"}:
            raise TypeError("finish_generation() got an unexpected keyword argument")
        try:
            with self._called("finish_generation") as fault:
                self.cached = False
                if self.colocated and fault != "half":
                    self.state = {"weights": CPU, "kv_cache": NONE}
        except Exception:
            if not self._swallows:
                raise
            return False
        return self._said

    def invalidate_kv_cache(self) -> bool:
        self.cached = False
        return True

    def generate(self, data: Any = None) -> Any:
        with self._called("generate"):
            if set(self.state.values()) != {GPU}:
                raise RuntimeError(ILLEGAL)
            self.cached = True
            return {"output_ids": data}
