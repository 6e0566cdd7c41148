"""The same loops with scopes, over real models and optimizers whose components have the sizes of ``sizes``.

A loop is written as its user would write it: it opens the scope of what it is about to do, and says nothing about memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import rl_session as rs
from bytes_moved.legacy import Store
from bytes_moved.phases import TRACES
from bytes_moved.sizes import NUM_STORAGES, SCALE, Backend, Sizes
from rl_session.driver import refit
from rl_session.testing import EmulatedDevice, FakeEngine

__all__ = ["LOOPS", "Tenants", "move_in"]

_SEQS, _LENGTH, _VOCABULARY = 2, 4, 8

refit._BUCKET_CAP = 2**30 // SCALE  # the one number of bytes that the library itself brings


class Layers(nn.Module):
    """As many flat layers as a component has storages; every parameter takes part in every forward.

    Args:
        num_params: In all layers together.
        num_outputs: Entries of the last axis: a vocabulary, or 1 for values.
        dtype: Of the weights.
        seed: Of the weights.
    """

    def __init__(self, num_params: int, num_outputs: int, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        size = num_params // NUM_STORAGES
        self.num_outputs = num_outputs
        self.layers = nn.ParameterList(
            nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for _ in range(NUM_STORAGES)
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        """``input_ids [B, S]`` to outputs ``[B, S, num_outputs]``: each looks up entries of every layer."""
        at = input_ids[..., None] * self.num_outputs + torch.arange(self.num_outputs)
        out: Tensor = torch.stack([layer[at % len(layer)].float() for layer in self.layers]).sum(0)
        return out


class MasterAdamW(torch.optim.Optimizer):
    """AdamW over bf16 weights, with fp32 masters in its state beside the two moments, as Megatron's precision-aware one."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of masters and moments in fp32; the weights are the masters, rounded."""
        del closure
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, master=p.float(), exp_avg=_zeros(p), exp_avg_sq=_zeros(p))
                state["step"] += 1
                gradient = p.grad.float()
                state["exp_avg"].lerp_(gradient, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                correction = math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
                denominator = state["exp_avg_sq"].sqrt().add_(group["eps"])
                state["master"].addcdiv_(state["exp_avg"], denominator, value=-group["lr"] * correction)
                p.copy_(state["master"])


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.float32)


def policy_loss(logits: Tensor, batch: Any, _num_seqs: Any, num_tokens: Any) -> tuple[Tensor, dict[str, Any]]:
    """Cross entropy of the tokens."""
    picked = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])
    return -picked.sum() / num_tokens, {}


def value_loss(values: Tensor, _batch: Any, _num_seqs: Any, num_tokens: Any) -> tuple[Tensor, dict[str, Any]]:
    """Squares of the values."""
    return values.square().sum() / num_tokens, {}


BATCH: Mapping[str, Tensor] = {
    "input_ids": torch.arange(_SEQS * _LENGTH).reshape(_SEQS, _LENGTH) % _VOCABULARY,
    "input_lengths": torch.full((_SEQS,), _LENGTH),
}


# -- who takes part --------------------------------------------------------------------------------------------------------


class SleepyEngine(FakeEngine):
    """A colocated engine that counts what its sleeping and waking copies, as level 1 does: its weights, each way."""

    bytes_copied = 0

    def wake(self, tags: Sequence[str]) -> bool | None:
        """Take memory; weights that were kept on the host are copied in."""
        comes = "weights" in tags and "weights" not in self.awake_tags and self._host is not None
        self.bytes_copied += self._sizes["weights"] if comes else 0
        return super().wake(tags)

    def sleep(self, level: int) -> bool | None:
        """Give memory back; level 1 copies the weights out."""
        leaves = "weights" in self.awake_tags and level == 1
        self.bytes_copied += self._sizes["weights"] if leaves else 0
        return super().sleep(level)


class Tenants(NamedTuple):
    """What a loop uses; what it does not use is None."""

    session: rs.Session
    actor: rs.Policy
    critic: rs.ValueModel | None
    reference: rs.Policy | None
    engine: rs.EngineHandle | None
    sampler: rs.InProcessEngine | None
    kv_cache: Store | None
    losses: list[Tensor]

    def engine_bytes(self) -> int:
        """What the engine itself copied."""
        return self.engine.engine.bytes_copied if self.engine is not None else 0


def _build(backend: Backend, sizes: Sizes, seed: int, num_outputs: int = _VOCABULARY) -> tuple[nn.Module, Any]:
    dtype = torch.bfloat16 if backend == "megatron" else torch.float32
    model = Layers(sizes.num_params, num_outputs, dtype, seed)
    make = MasterAdamW if backend == "megatron" else torch.optim.AdamW
    return model, make(model.parameters(), lr=1e-2)


def move_in(
    name: str,
    backend: Backend,
    sizes: Sizes,
    device: EmulatedDevice,
    *,
    release: str,
    own_reference: bool,
    log: Path,
) -> Tenants:
    """Everybody that the loop ``name`` needs, attached and off the device where the loop shares it.

    Args:
        name: One of :data:`LOOPS`.
        backend: Which recipe the sizes are of.
        sizes: Bytes of the components.
        device: The device, without a limit as yet.
        release: Of the session.
        own_reference: Whether the reference is a participant of its own, not a copy inside the policy.
        log: The audit log.
    """
    trace = TRACES[name]
    session = rs.Session(log, release=release, verify="checksum")  # type: ignore[arg-type]
    # Who never leaves the device under the manual API rests on it; who shares it with an engine rests off it.
    base: Any = "offloaded" if trace.leaves_device else "resident"
    shares_weights = trace.engine == "training weights"
    offload = rs.OffloadConfig(
        offload_optimizer_for_logprob=shares_weights, offload_optimizer_for_refit=trace.leaves_device
    )
    copy = "copy" if trace.has_reference and not own_reference else None
    model, optimizer = _build(backend, sizes, seed=0)
    actor = session.attach(model, optimizer, name="actor", device=device, base=base, reference=copy, offload=offload)
    critic = reference = None
    if trace.has_value:
        value_model, value_optimizer = _build(backend, sizes, seed=1, num_outputs=1)
        critic = session.attach_value(value_model, value_optimizer, name="critic", device=device, base=base)
    if trace.has_reference and own_reference:
        frozen, _ = _build(backend, sizes, seed=0)
        reference = session.attach(frozen, name="reference", device=device)
    engine = None
    if trace.engine == "own weights":
        made = SleepyEngine(device, weights=sizes.engine_weights, kv_nbytes=sizes.kv_cache)
        engine = session.engine("engine", made)  # sleep level 1, as the legacy loops have it
    return Tenants(
        session,
        actor,
        critic,
        reference,
        engine,
        rs.InProcessEngine(actor, max_new_tokens=1, seed=0) if shares_weights else None,
        Store(device, sizes.megatron_kv_cache, "none") if shares_weights else None,
        [],
    )


# -- one step of each loop -------------------------------------------------------------------------------------------------


def _train(tenants: Tenants) -> None:
    with tenants.actor.training_mode():
        tenants.losses.append(tenants.actor.train(BATCH, policy_loss)["loss"])


def _train_critic(tenants: Tenants) -> None:
    assert tenants.critic is not None
    with tenants.critic.training_mode():
        tenants.losses.append(tenants.critic.train(BATCH, value_loss)["loss"])


def _logprobs(tenants: Tenants, *, with_reference: bool) -> None:
    with tenants.actor.logprob_mode():
        tenants.actor.get_logprobs(BATCH)
        if with_reference and tenants.reference is None:
            tenants.losses.append(tenants.actor.get_reference_policy_logprobs(BATCH)["reference_logprobs"])
    if with_reference:
        _reference(tenants)


def _reference(tenants: Tenants) -> None:
    """Ask a reference that is a participant of its own."""
    if tenants.reference is not None:
        with tenants.reference.logprob_mode():
            tenants.losses.append(tenants.reference.get_logprobs(BATCH)["logprobs"])


def _roll_out(tenants: Tenants) -> None:
    assert tenants.engine is not None
    tenants.actor.refit(tenants.engine)
    with tenants.engine.awake():
        tenants.engine.generate(BATCH)


def _grpo(tenants: Tenants) -> None:
    _roll_out(tenants)
    _logprobs(tenants, with_reference=True)
    _train(tenants)


def _grpo_nokl(tenants: Tenants) -> None:
    _roll_out(tenants)
    _logprobs(tenants, with_reference=False)
    _train(tenants)


def _publish(tenants: Tenants) -> None:
    with tenants.actor.refit_mode():
        for bucket in tenants.actor.iter_weights():
            assert bucket


def _grpo_async(tenants: Tenants) -> None:
    _logprobs(tenants, with_reference=True)
    _train(tenants)
    _publish(tenants)


def _grpo_async_megatron(tenants: Tenants) -> None:
    assert tenants.kv_cache is not None
    assert tenants.sampler is not None
    with tenants.actor.generation_mode():
        tenants.session.make_room(tenants.kv_cache.nbytes)
        tenants.kv_cache.make()
        tenants.sampler.generate(BATCH)
        tenants.kv_cache.free()
    _logprobs(tenants, with_reference=True)
    _train(tenants)


def _values_and_epochs(tenants: Tenants, num_epochs: int) -> None:
    assert tenants.critic is not None
    with tenants.critic.inference_mode():
        tenants.critic.get_values(BATCH)
    _logprobs(tenants, with_reference=False)
    for _ in range(num_epochs):
        _train_critic(tenants)
        _train(tenants)


def _ppo(tenants: Tenants) -> None:
    _roll_out(tenants)
    _values_and_epochs(tenants, TRACES["ppo"].num_epochs)


def _ppo_grouped(tenants: Tenants) -> None:
    assert tenants.critic is not None
    _roll_out(tenants)
    with tenants.critic.inference_mode():
        tenants.critic.get_values(BATCH)
    _logprobs(tenants, with_reference=False)
    with tenants.critic.training_mode():
        for _ in range(TRACES["ppo-grouped"].num_epochs):
            tenants.losses.append(tenants.critic.train(BATCH, value_loss)["loss"])
    with tenants.actor.training_mode():
        for _ in range(TRACES["ppo-grouped"].num_epochs):
            tenants.losses.append(tenants.actor.train(BATCH, policy_loss)["loss"])


def _ppo_async(tenants: Tenants) -> None:
    _values_and_epochs(tenants, TRACES["ppo-async"].num_epochs)
    _publish(tenants)


def _dpo(tenants: Tenants) -> None:
    if tenants.reference is None:
        with tenants.actor.logprob_mode():
            tenants.losses.append(tenants.actor.get_reference_policy_logprobs(BATCH)["reference_logprobs"])
    _reference(tenants)
    _train(tenants)


LOOPS: Mapping[str, Callable[[Tenants], None]] = {
    "grpo": _grpo,
    "grpo-nokl": _grpo_nokl,
    "grpo-async": _grpo_async,
    "grpo-async-megatron": _grpo_async_megatron,
    "grpo-sync": _grpo,
    "ppo": _ppo,
    "ppo-grouped": _ppo_grouped,
    "ppo-async": _ppo_async,
    "sft": _train,
    "dpo": _dpo,
    "rm": _train,
}
