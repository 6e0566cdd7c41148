"""The model of the legacy objects with a real, tiny language model inside: a table of next-token logits.

Lifecycle effects and failures are those of ``legacy_model``; what is computed is computed, so that two runs can be compared
bit for bit. Knows nothing of ``rl_session``.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from legacy_model import Gpus, LegacyGeneration, LegacyTQPolicy, LegacyValue

VOCABULARY = 12
NEW_TOKENS = 3


class Table:
    """Logits of the next token after each token, trained with momentum."""

    def __init__(self, seed: int, width: int = VOCABULARY) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = torch.randn(VOCABULARY, width, generator=generator).requires_grad_()
        self.momentum = torch.zeros_like(self.weights)

    def logprobs(self, ids: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """``[B, S] -> [B, S]``; entry 0 is 0."""
        logits = (self.weights if weights is None else weights)[ids[:, :-1]]
        picked = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return torch.nn.functional.pad(picked, (1, 0))

    def step(self) -> float:
        """One optimizer step; returns the norm of the gradient."""
        grad = self.weights.grad
        assert grad is not None
        norm = float(grad.norm())
        self.momentum.mul_(0.9).add_(grad)
        with torch.no_grad():
            self.weights.sub_(0.5 * self.momentum)
        self.weights.grad = None
        return norm


def policy_loss(logprobs: torch.Tensor, data: Mapping[str, Any]) -> torch.Tensor:
    """A policy gradient where there are advantages, a mean negative log-likelihood otherwise."""
    mask = data["token_mask"]
    weight = data.get("advantages", torch.ones_like(mask))
    ratio = torch.exp(logprobs - data["prev_logprobs"]) if "prev_logprobs" in data else logprobs
    loss = -(ratio * weight * mask).sum() / mask.sum().clamp(min=1)
    if "reference_policy_logprobs" in data:
        loss = loss + 0.1 * ((logprobs - data["reference_policy_logprobs"]) ** 2 * mask).mean()
    return loss


def value_loss(values: torch.Tensor, data: Mapping[str, Any]) -> torch.Tensor:
    """Squared error against the returns."""
    return ((values - data["returns"]) ** 2 * data["token_mask"]).mean()


class TinyPolicy(LegacyTQPolicy):
    """A policy."""

    def __init__(self, backend: str = "megatron", *, seed: int = 1, **flags: Any) -> None:
        super().__init__(backend, **flags)
        self.table = Table(seed)
        self.reference = self.table.weights.detach().clone()
        self.outbox: torch.Tensor | None = None
        self._loss_fn: Any = None
        self._chunk_losses: list[float] = []

    def train(
        self, data: Any = None, loss_fn: Any = None, eval_mode: bool = False, timer: Any = None, **_: Any
    ) -> dict[str, Any]:
        super().train(data, loss_fn, eval_mode)
        if eval_mode:
            with torch.no_grad():
                return {"loss": loss_fn(self.table.logprobs(data["input_ids"]), data)[None], "all_mb_metrics": {}}
        loss = loss_fn(self.table.logprobs(data["input_ids"]), data)
        loss.backward()
        return {"loss": loss.detach()[None], "grad_norm": torch.tensor([self.table.step()]), "all_mb_metrics": {}}

    def get_logprobs(self, data: Any = None, timer: Any = None, micro_batch_size: int | None = None) -> Any:
        super().get_logprobs(data)
        with torch.no_grad():
            return {"logprobs": self.table.logprobs(data["input_ids"])}

    def get_reference_policy_logprobs(self, data: Any = None, **_: Any) -> Any:
        super().get_reference_policy_logprobs(data)
        return {"reference_logprobs": self.table.logprobs(data["input_ids"], self.reference)}

    def calibrate_qkv_fp8_scales(self, data: Any, include_q: bool = False) -> Any:
        return self._infer("calibrate_qkv_fp8_scales", {"layers": {"q": include_q}})

    def save_checkpoint(self, weights_path: str, optimizer_path: str | None = None, **_: Any) -> None:
        super().save_checkpoint(weights_path, optimizer_path)
        Path(weights_path).write_text(repr(self.table.weights.tolist()), encoding="utf-8")
        if optimizer_path is not None:
            Path(optimizer_path).write_text(repr(self.table.momentum.tolist()), encoding="utf-8")

    def finalize_async_save(self) -> None:
        """Saves are synchronous here."""

    def prepare_refit_info(self) -> dict[str, Any]:
        self._need("params")
        return {"weights": (tuple(self.table.weights.shape), self.table.weights.dtype)}

    def get_free_memory_bytes(self) -> int:
        return 1 << 20

    def stream_weights_via_ipc_zmq(self, buffer_size_bytes: int) -> list[Future[None]]:
        with self._called("stream_weights_via_ipc_zmq"):
            self._need("params")
            assert buffer_size_bytes > 0
            self.outbox = self.table.weights.detach().clone()
            return [_done(None)]

    # -- a step in pieces ----------------------------------------------------------------------------------------

    def begin_train_step(self, loss_fn: Any = None) -> None:
        super().begin_train_step(loss_fn)
        self._loss_fn, self._chunk_losses = loss_fn, []
        self.table.weights.grad = None

    def train_microbatches_from_meta(self, meta: Any = None) -> None:
        super().train_microbatches_from_meta(meta)
        loss = self._loss_fn(self.table.logprobs(meta["input_ids"]), meta)
        loss.backward()
        self._chunk_losses.append(loss.item())

    def finish_train_step(self) -> Any:
        num_chunks = super().finish_train_step()
        assert num_chunks == len(self._chunk_losses)  # what an offload destroys, the step would not see
        return {"loss": torch.tensor([sum(self._chunk_losses)]), "grad_norm": torch.tensor([self.table.step()])}


class TinyValue(LegacyValue):
    """A critic."""

    def __init__(self, backend: str = "megatron", *, seed: int = 2, **flags: Any) -> None:
        super().__init__(backend, **flags)
        self.table = Table(seed, width=1)

    def get_values(self, data: Any = None, timer: Any = None) -> Any:
        super().get_values(data)
        with torch.no_grad():
            return {"values": self.table.weights[data["input_ids"]].squeeze(-1)}

    def train(
        self, data: Any = None, loss_fn: Any = None, eval_mode: bool = False, timer: Any = None, **_: Any
    ) -> dict[str, Any]:
        super().train(data, loss_fn, eval_mode)
        loss = loss_fn(self.table.weights[data["input_ids"]].squeeze(-1), data)
        loss.backward()
        return {"loss": loss.detach()[None], "grad_norm": torch.tensor([self.table.step()]), "all_mb_metrics": {}}

    def save_checkpoint(self, weights_path: str, optimizer_path: str | None = None, **_: Any) -> None:
        super().save_checkpoint(weights_path, optimizer_path)
        Path(weights_path).write_text(repr(self.table.weights.tolist()), encoding="utf-8")


class TinyGeneration(LegacyGeneration):
    """An engine: it serves what was pushed to it, and whether that is stale shows in what it samples."""

    def __init__(self, source: TinyPolicy, backend: str = "vllm", **flags: Any) -> None:
        super().__init__(backend, **flags)
        self.source = source
        self.weights: torch.Tensor | None = None
        self.num_pushes = 0

    def prepare_refit_info(self, info: Any) -> None:
        assert "weights" in info

    def update_weights_via_ipc_zmq(self) -> list[Future[bool]]:
        with self._called("update_weights_via_ipc_zmq"):
            if self.state["weights"] != "gpu":
                raise RuntimeError("weights were pushed to an engine that sleeps")
            self.weights = self.source.outbox
            self.num_pushes += 1
            return [_done(True)]

    def generate(self, data: Any = None) -> Any:
        super().generate(data)
        assert self.weights is not None
        ids = data["input_ids"]
        picked = []
        for position in range(NEW_TOKENS):
            logits = self.weights[ids[:, -1]] + torch.arange(VOCABULARY) % (position + 2)
            picked.append(torch.log_softmax(logits, -1).amax(-1))
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        prompt = torch.zeros(data["input_ids"].shape)
        return {
            "output_ids": ids,
            "unpadded_sequence_lengths": data["input_lengths"] + NEW_TOKENS,
            "generation_lengths": torch.full((len(ids),), NEW_TOKENS),
            "logprobs": torch.cat([prompt, torch.stack(picked, dim=1)], dim=1),
        }


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Actors:
    """The objects of one run; ``critic`` says whether the value model is on the same GPUs."""

    def __init__(self, backend: str = "megatron", *, colocated: bool = True, critic: bool = True, **flags: Any) -> None:
        gpus = Gpus()
        self.policy = TinyPolicy(backend, gpus=gpus, **flags)
        self.value = TinyValue(backend, gpus=gpus if critic else None, **flags)
        self.generation = TinyGeneration(self.policy, colocated=colocated, gpus=gpus if colocated else None)

    def lifecycle(self) -> list[str]:
        """Every lifecycle call that was made on any of them."""
        computing = ("train", "get_", "generate", "save", "stream", "update", "calibrate", "begin", "finish_train_step")
        logs = [*self.policy.log, *self.value.log, *self.generation.log]
        return [call for call in logs if not call.startswith(computing)]
