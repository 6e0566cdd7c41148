"""The legacy contract as tables, and a model that follows them: what each call does to the state vector.

Written from the contract's tables, row by row, and from nothing of the library. The vector is P (parameters), G (gradients), O
(optimizer state), each "gpu", "cpu" or "none", G also "freed" (Megatron's flat buffer without bytes), and M ("train" or
"eval"); beside it whether a split train step is open and whether a chunk is in its gradients.

Cells: "gpu" and "cpu" move there what exists; "=" leaves; "live" brings a freed buffer back; "free" frees the buffer where no
chunk is in it, and else does what follows the colon (the one exception: gradients of an open step are kept).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Table of the policy's lifecycle methods: P, G, O, M. O: "lp" and "refit" depend on a flag.
DTENSOR: Mapping[str, tuple[str, str, str, str]] = {
    "prepare_for_training": ("gpu", "gpu", "gpu", "train"),
    "prepare_for_lp_inference": ("gpu", "gpu", "lp", "eval"),
    "prepare_for_lp_inference(keep)": ("gpu", "gpu", "=", "eval"),
    "finish_inference": ("cpu", "cpu", "=", "eval"),
    "finish_training": ("=", "=", "=", "="),
    "offload_before_refit": ("=", "=", "cpu", "="),
    "offload_after_refit": ("cpu", "cpu", "cpu", "eval"),
    "offload_to_cpu": ("cpu", "cpu", "cpu", "eval"),
    "prepare_for_generation": ("=", "=", "=", "="),
    "finish_generation": ("=", "=", "=", "="),
    "invalidate_kv_cache": ("=", "=", "=", "="),
}
MEGATRON: Mapping[str, tuple[str, str, str, str]] = {
    "prepare_for_training": ("gpu", "live", "gpu", "train"),
    "prepare_for_lp_inference": ("gpu", "free:=", "lp", "eval"),
    "prepare_for_lp_inference(keep)": ("gpu", "=", "=", "eval"),
    "finish_inference": ("cpu", "=", "=", "eval"),
    "finish_training": ("=", "=", "=", "="),
    "offload_before_refit": ("=", "free:cpu", "refit", "="),
    "offload_after_refit": ("cpu", "free:cpu", "refit", "eval"),
    "offload_to_cpu": ("cpu", "free:cpu", "refit", "eval"),
    "prepare_for_generation": ("=", "=", "=", "="),
    "finish_generation": ("=", "=", "=", "="),
    "invalidate_kv_cache": ("=", "=", "=", "="),
}
# Table of the value's.
VALUE_DTENSOR: Mapping[str, tuple[str, str, str, str]] = {
    "prepare_for_training": ("gpu", "gpu", "gpu", "train"),
    "prepare_for_inference": ("gpu", "gpu", "=", "eval"),
    "finish_inference": ("cpu", "cpu", "=", "="),
    "finish_training": ("cpu", "cpu", "cpu", "eval"),
}
VALUE_MEGATRON: Mapping[str, tuple[str, str, str, str]] = {
    "prepare_for_training": ("gpu", "live", "gpu", "train"),
    "prepare_for_inference": ("gpu", "free:=", "=", "eval"),
    "finish_inference": ("cpu", "=", "=", "="),
    "finish_training": ("cpu", "free:cpu", "cpu", "eval"),
}
# Table of the compute calls: what must be on the device, and the mode that is left; "=" leaves it.
COMPUTE: Mapping[str, tuple[str, str]] = {
    "train": ("PGO", "train"),
    "train(eval)": ("P", "eval"),
    "get_logprobs": ("P", "eval"),
    "get_values": ("P", "eval"),
    "begin_train_step": ("PG", "train"),
    "train_microbatches": ("PG", "="),
    "finish_train_step": ("PGO", "="),
    "abort_train_step": ("", "="),
}
POLICY_CALLS = (
    *DTENSOR,
    "train",
    "train(eval)",
    "get_logprobs",
    "begin_train_step",
    "train_microbatches",
    "finish_train_step",
    "abort_train_step",
    "save_checkpoint",
    "save_checkpoint(optimizer)",
)
VALUE_CALLS = (
    *VALUE_DTENSOR,
    "train",
    "train(eval)",
    "get_values",
    "begin_train_step",
    "train_microbatches",
    "finish_train_step",
    "abort_train_step",
    "save_checkpoint(optimizer)",
)


class Contract:
    """The state vector, moved by the tables.

    Args:
        kind: "policy" or "value".
        backend: "dtensor" or "megatron".
        lp: ``offload_optimizer_for_logprob``.
        refit: ``offload_optimizer_for_refit``.
        owns: ``optimizer_cpu_offload``.
    """

    def __init__(self, kind: str, backend: str, *, lp: bool = False, refit: bool = True, owns: bool = False) -> None:
        self.megatron = backend == "megatron"
        tables = (VALUE_DTENSOR, VALUE_MEGATRON) if kind == "value" else (DTENSOR, MEGATRON)
        self.table = tables[self.megatron]
        self.is_value = kind == "value"
        self.lp, self.refit, self.owns = lp, refit, owns
        self.vector = {"P": "gpu", "G": "gpu" if self.megatron else "none", "O": "none", "M": "train"}
        self.is_open = False
        self.has_chunk = False

    def key(self) -> tuple[Any, ...]:
        """The state, to compare."""
        return (*self.vector.values(), self.is_open, self.has_chunk)

    def call(self, name: str) -> str:
        """Make a call; "" when it works, else why not: "away" (bytes that it needs) or "step" (one is open, or none is)."""
        if name in self.table:
            return self._lifecycle(*self.table[name])
        if name.startswith("save_checkpoint"):
            return self._save(with_optimizer="optimizer" in name)
        return self._compute(name)

    def _lifecycle(self, p: str, g: str, o: str, m: str) -> str:
        v = self.vector
        v["P"] = p if p != "=" else v["P"]
        self._gradients(g)
        o = {"lp": "cpu" if self.lp else "=", "refit": "cpu" if self.refit else "="}.get(o, o)
        if o != "=" and v["O"] != "none" and not self.owns:
            v["O"] = o
        v["M"] = m if m != "=" else v["M"]
        return ""

    def _gradients(self, cell: str) -> None:
        v = self.vector
        if cell.startswith("free"):
            kept = cell.partition(":")[2]
            if self.has_chunk:
                v["G"] = kept if kept != "=" else v["G"]
            else:
                v["G"] = "freed"
        elif cell == "live":
            v["G"] = "gpu"
        elif cell != "=" and v["G"] in ("gpu", "cpu"):
            v["G"] = cell

    def _save(self, *, with_optimizer: bool) -> str:
        if self.megatron and not self.is_value:
            self.vector["P"] = "gpu"
            if with_optimizer and self.vector["O"] != "none" and not self.owns:
                self.vector["O"] = "gpu"
            self.vector["M"] = "train"
        return ""

    def _compute(self, name: str) -> str:
        needs, mode = COMPUTE[name]
        if name == "train(eval)" and self.megatron:
            needs = "PG"  # it zeroes the buffer for an evaluation too
        if name == "begin_train_step" and not self.megatron:
            needs = "PGO"  # legacy has no split step on DTensor: what the library's own needs
        if name == "abort_train_step" and not self.is_open:
            return ""
        if name in ("train_microbatches", "finish_train_step") and not self.is_open:
            return "step"
        if name == "finish_train_step" and not self.has_chunk:
            return "step"  # an empty one: legacy divided by nothing
        v = self.vector
        if any(v[c] in ("cpu", "freed") for c in needs):
            return "away"
        if name in ("train", "begin_train_step") and self.is_open:
            return "step"
        self._computed(name)
        v["M"] = mode if mode != "=" else v["M"]
        return ""

    def _computed(self, name: str) -> None:
        v = self.vector
        if name == "begin_train_step":
            self.is_open, self.has_chunk = True, False
        elif name == "train_microbatches":
            self.has_chunk, v["G"] = True, "gpu"
        elif name in ("train", "finish_train_step"):
            self.is_open = self.has_chunk = False
            v["G"], v["O"] = "gpu" if self.megatron else "none", "gpu"
        elif name == "abort_train_step":
            self.is_open = self.has_chunk = False
            # A kept buffer on the host is discarded where it is; legacy had freed it long before.
            v["G"] = "none" if not self.megatron else "freed" if v["G"] == "cpu" else v["G"]
