"""The manual API, as tables: which method copies which component where, with plain copies of real storages.

Built from the behaviour of NeMo-RL's workers alone: nothing remembers whether a host copy is still good, so every offload
copies out and every onload copies in; a method whose components are in place already copies nothing. Gradients are freed and
made anew without a copy where the backend does so. The device counts the bytes. Knows nothing of ``rl_session`` beyond the
emulated device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bytes_moved.sizes import Backend, Sizes
from rl_session.testing import EmulatedDevice

__all__ = ["EFFECTS", "Effect", "LegacyEngine", "LegacyTrainer", "Store"]

Action = Literal["onload", "offload", "free", "make"]
Kind = Literal["policy", "value"]


class Effect(NamedTuple):
    """One thing a method does: ``only_if`` names the flags that must all be set (and, with "not ", unset)."""

    component: str
    action: Action
    only_if: tuple[str, ...] = ()


_LEAVES_FOR_LOGPROB = ("not keep_train_buffers", "offload_optimizer_for_logprob")


def _of(action: Action, *components: str, only_if: tuple[str, ...] = ()) -> tuple[Effect, ...]:
    return tuple(Effect(component, action, only_if) for component in components)


EFFECTS: Mapping[tuple[Backend, Kind], Mapping[str, tuple[Effect, ...]]] = {
    # `model.to` takes gradients along, and nothing destroys them.
    ("dtensor", "policy"): {
        "prepare_for_training": _of("onload", "params", "grads", "optimizer"),
        "prepare_for_lp_inference": (
            *_of("onload", "params", "grads"),
            *_of("offload", "optimizer", only_if=_LEAVES_FOR_LOGPROB),
        ),
        "finish_inference": _of("offload", "params", "grads"),
        "offload_before_refit": _of("offload", "optimizer"),
        "offload_after_refit": _of("offload", "optimizer", "params", "grads"),
        "finish_training": (),
    },
    # Gradients are a flat buffer: freed, and made again as zeros.
    ("megatron", "policy"): {
        "prepare_for_training": (
            *_of("onload", "params"),
            *_of("make", "grads"),
            *_of("onload", "optimizer"),
        ),
        "prepare_for_lp_inference": (
            *_of("onload", "params"),
            *_of("free", "grads", only_if=("not keep_train_buffers",)),
            *_of("offload", "optimizer", only_if=_LEAVES_FOR_LOGPROB),
        ),
        "finish_inference": _of("offload", "params"),
        "offload_before_refit": (
            *_of("free", "grads"),
            *_of("offload", "optimizer", only_if=("offload_optimizer_for_refit",)),
        ),
        "offload_after_refit": (
            *_of("free", "grads"),
            *_of("offload", "optimizer", only_if=("offload_optimizer_for_refit",)),
            *_of("offload", "params"),
        ),
        "finish_training": (),
    },
    ("dtensor", "value"): {
        "prepare_for_training": _of("onload", "params", "grads", "optimizer"),
        "prepare_for_inference": _of("onload", "params", "grads"),
        "finish_inference": _of("offload", "params", "grads"),
        "finish_training": _of("offload", "params", "grads", "optimizer"),
    },
    ("megatron", "value"): {
        "prepare_for_training": (
            *_of("onload", "params"),
            *_of("make", "grads"),
            *_of("onload", "optimizer"),
        ),
        "prepare_for_inference": (*_of("onload", "params"), *_of("free", "grads")),
        "finish_inference": _of("offload", "params"),
        "finish_training": (
            *_of("offload", "params"),
            *_of("free", "grads"),
            *_of("offload", "optimizer"),
        ),
    },
}


class Store:
    """Bytes that are on the device, on the host, or nowhere; every change of place is a plain copy.

    Attributes:
        where: "device", "host" or "none".
    """

    def __init__(self, device: EmulatedDevice, nbytes: int, where: str) -> None:
        self.device = device
        self.nbytes = nbytes
        self.where = where
        self._storage: torch.UntypedStorage = torch.empty(0, dtype=torch.uint8).untyped_storage()
        self._host: Tensor = torch.arange(nbytes, dtype=torch.uint8)
        if where == "device":
            device.allocate([self._storage], [nbytes])
            self._write(self._host)

    def _write(self, content: Tensor) -> None:
        torch.empty(0, dtype=torch.uint8).set_(self._storage).copy_(content)

    def read(self) -> Tensor:
        """The bytes, wherever they are."""
        assert self.where != "none"
        on_device = self.where == "device"
        return torch.empty(0, dtype=torch.uint8).set_(self._storage).clone() if on_device else self._host.clone()

    def onload(self) -> None:
        """Host to device."""
        if self.where == "host":
            self.device.allocate([self._storage], [self.nbytes])
            self.copy_in()
            self.where = "device"

    def offload(self) -> None:
        """Device to host."""
        if self.where == "device":
            self.copy_out()
            self.device.free([self._storage])
            self.where = "host"

    def make(self) -> None:
        """Memory on the device, and zeros in it."""
        if self.where == "none":
            self.device.allocate([self._storage], [self.nbytes])
            self._write(torch.zeros(self.nbytes, dtype=torch.uint8))
            self.where = "device"

    def free(self) -> None:
        """Give the memory back, content and all."""
        if self.where == "device":
            self.device.free([self._storage])
        self.where = "none"

    def copy_out(self) -> None:
        """Refresh the host copy."""
        self.device.copy_out([(self._storage, self._host)])
        self.device.synchronize()

    def copy_in(self) -> None:
        """Refresh the device copy."""
        self.device.copy_in([(self._storage, self._host)])
        self.device.synchronize()


class LegacyTrainer:
    """A policy or a value model, driven by the manual calls.

    Args:
        backend: "dtensor" or "megatron".
        kind: "policy" or "value".
        device: The device.
        sizes: Bytes of its components.
        flags: ``offload_optimizer_for_logprob`` (off) and ``offload_optimizer_for_refit`` (on), by default as in the recipes.

    Attributes:
        parts: Component to its bytes. Optimizer state exists: the loop has made a step before.
    """

    def __init__(
        self,
        backend: Backend,
        kind: Kind,
        device: EmulatedDevice,
        sizes: Sizes,
        *,
        where: str = "device",
        **flags: bool,
    ) -> None:
        self.backend = backend
        self.kind = kind
        self.flags = {"offload_optimizer_for_logprob": False, "offload_optimizer_for_refit": True, **flags}
        has_buffer = backend == "megatron" and where == "device"
        self.parts = {
            "params": Store(device, sizes.params, where),
            "grads": Store(device, sizes.grads, "device" if has_buffer else "none"),
            "optimizer": Store(device, sizes.optimizer, where),
        }
        self._reference = Store(device, sizes.params, "host")

    def call(self, method: str, **flags: bool) -> None:
        """A lifecycle method, by its name."""
        method = "offload_after_refit" if method == "offload_to_cpu" else method
        known = {"keep_train_buffers": False, **self.flags, **flags}
        for component, action, only_if in EFFECTS[self.backend, self.kind][method]:
            if all(not known[flag[4:]] if flag.startswith("not ") else known[flag] for flag in only_if):
                getattr(self.parts[component], action)()

    def train(self) -> None:
        """Forward, backward, step: parameters and optimizer state have to be there, and gradients are made."""
        self._need("params", "optimizer")
        if self.backend == "megatron":
            self._need("grads")
        self.parts["grads"].make()
        if self.backend == "dtensor":
            self.parts["grads"].free()  # zero_grad() after the loop

    def infer(self) -> None:
        """Log-probabilities, values, or weights read for a refit."""
        self._need("params")

    def infer_reference(self) -> None:
        """The weights are saved to the host, the reference's come in their place, and the weights come back."""
        self._need("params")
        live, device = self.parts["params"], self.parts["params"].device
        live.copy_out()
        device.copy_in([(live._storage, self._reference._host)])
        live.copy_in()

    def _need(self, *components: str) -> None:
        for name in components:
            assert self.parts[name].where == "device", f"{self.kind}: {name} is on the {self.parts[name].where}"


class LegacyEngine:
    """A colocated vLLM-like engine: sleep level 1 copies its weights to the host and drops the cache.

    Attributes:
        bytes_copied: What its own sleeping and waking copied, of the device's count.
    """

    def __init__(self, device: EmulatedDevice, sizes: Sizes) -> None:
        self.weights = Store(device, sizes.engine_weights, "host")
        self.kv_cache = Store(device, sizes.kv_cache, "none")
        self.bytes_copied = 0

    def wake(self, *tags: str) -> None:
        """``prepare_for_generation(tags=...)``; without tags, everything. Idempotent."""
        if not tags or "weights" in tags:
            self.bytes_copied += self.weights.nbytes if self.weights.where == "host" else 0
            self.weights.onload()
        if not tags or "kv_cache" in tags:
            self.kv_cache.make()

    def sleep(self) -> None:
        """``finish_generation()``."""
        self.bytes_copied += self.weights.nbytes if self.weights.where == "device" else 0
        self.weights.offload()
        self.kv_cache.free()

    def generate(self) -> None:
        """Needs weights and cache."""
        assert self.weights.where == self.kv_cache.where == "device", "the engine is asleep"
