"""One rank of a policy as the tests drive it: a small language model, a worker over it, and its own emulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from rl_session import metrics as rs
from rl_session.lifecycle import Component, Flags, Mode, Tier
from rl_session.offload.device import EmulatedDevice
from rl_session.offload.host_pool import HostPool
from rl_session.workers import shares
from rl_session.workers.parallel import How, parallelize
from rl_session.workers.ranks import SOLO, Ranks
from rl_session.workers.replies import CallResult, TransitionReply, TransitionRequest
from rl_session.workers.spec import WorkerSpec
from rl_session.workers.worker import Worker

VOCABULARY = 13


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.down(torch.tanh(self.up(hidden)))
        return out


class LM(nn.Module):
    """Widths that no number of ranks divides, a frozen parameter, a tied head, and a buffer."""

    scale: Tensor

    def __init__(self, width: int = 5, num_blocks: int = 2, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.bias = nn.Parameter(torch.randn(1, width))  # shorter than the ranks are many
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(width) + 0.5)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids) + self.bias
        for layer in self.layers:
            hidden = layer(hidden)
        out: Tensor = self.head((hidden * self.scale + self.frozen).to(self.head.weight.dtype))
        return out


def made_model(seed: int = 0, **options: Any) -> LM:
    """The same weights on every rank."""
    torch.manual_seed(seed)
    return LM(**options)


def batch(num: int = 6, length: int = 5, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * seed + num)
    token_mask = (torch.rand(num, length, generator=generator) > 0.3).long()
    token_mask[:, 1] = 1
    return {
        "input_ids": torch.randint(0, VOCABULARY, (num, length), generator=generator),
        "input_lengths": torch.randint(2, length + 1, (num,), generator=generator),
        "token_mask": token_mask,
        "sample_mask": (torch.arange(num) % 3 != 2).float(),
        "weights": torch.rand(num, generator=generator),
    }


def loss_fn(logits: Tensor, given: Any, seqs: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Weighted negative log-likelihood over the valid tokens of the global batch."""
    logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    picked = logprobs.gather(-1, given["input_ids"][:, 1:, None]).squeeze(-1)
    mask = given["token_mask"][:, 1:] * given["sample_mask"][:, None] * given["weights"][:, None]
    loss = -(picked * mask).sum() / tokens
    marks = {
        "least": rs.min(picked.min()),
        "most": rs.max(picked.max()),
        "mean": rs.mean(picked.mean(), picked.numel()),
    }
    return loss, {"nll": loss.detach(), "rows": len(picked), **marks}


@attrs.define(eq=False)
class RankWorker:
    """A worker and what a driver would say to it."""

    worker: Worker
    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: EmulatedDevice
    release: Any = "eager"

    def go(self, mode: Mode, **changes: Any) -> TransitionReply:
        """One transition into a mode."""
        flags = Flags(release=self.release, **changes)
        return self.worker.transition(TransitionRequest(mode=mode, flags=flags, leaves_library=mode is Mode.OFFLOADED))

    def call(self, method: str, given: dict[str, Any], *args: Any, gbs: int | None = None, **kwargs: Any) -> Any:
        """A compute call on this rank's share of a batch that every rank knows; joined where every row has a result."""
        parts = shares.split(given, self.worker.ranks.count, gbs=gbs)
        if method == "train":
            kwargs = {"gbs": gbs, "mbs": None, "eval_mode": False, **kwargs}
        result = getattr(self.worker, method)(parts[self.worker.ranks.index], *args, **kwargs)
        value = result.value if isinstance(result, CallResult) else result
        if method in ("train", "forward_backward"):
            return value
        return shares.join(self.worker.ranks.gather_objects(value), parts)

    def train(self, given: dict[str, Any], loss: Any = loss_fn, **kwargs: Any) -> dict[str, Any]:
        value: dict[str, Any] = self.call("train", given, loss, **kwargs)
        return value

    def full(self) -> dict[str, Tensor]:
        """Whole weights by name, on every rank."""
        return {name: whole(value) for name, value in self.model.state_dict().items()}

    def full_state(self) -> list[Tensor]:
        """Every tensor of the optimizer's state, whole."""
        return [whole(v) for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]

    def tiers(self) -> dict[str, Tier]:
        return dict(self.worker.engine.refresh().placement)

    def away_bytes(self) -> int:
        """Bytes of parameter shards in their own storages, found by looking at them."""
        return sum(shard_of(p).untyped_storage().nbytes() for p in self.parameters())

    def parameters(self) -> list[Tensor]:
        return [p for _, p in self.worker.sources.shards.parameters(self.worker.module)]


def whole(tensor: Tensor) -> Tensor:
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # type: ignore[no-untyped-call]
    return full.detach().clone()


def shard_of(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def made(
    how: How = "fsdp2",
    *,
    model: nn.Module | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    release: str = "eager",
    capacity: int | None = None,
    solo: bool = False,
    options: dict[str, Any] | None = None,
    **spec: Any,
) -> RankWorker:
    """A worker over a parallelized model; ``solo`` for one that has all of it to itself."""
    model = model if model is not None else made_model()
    if not solo and how is not None:
        model = parallelize(model, how, init_device_mesh("cpu", (dist.get_world_size(),)), **(options or {}))
    trained = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.05)
    device = EmulatedDevice(capacity)
    device.poison()
    device.delay()
    if callable(spec.get("scheduler")):
        spec["scheduler"] = spec["scheduler"](trained)
    full_spec = WorkerSpec(model=model, optimizer=trained, verify=True, **spec)
    ranks = SOLO if solo else Ranks() if how is None else None
    worker = Worker(full_spec, device, HostPool(), lambda: ("policy 'actor'", ()), ranks)
    worker.start()
    return RankWorker(worker, model, trained, device, release)


def cycle(rank: RankWorker, given: dict[str, Any], **train: Any) -> dict[str, Any]:
    """Log-probabilities and a step, each in a mode of its own, with everything away before, between and after."""
    rank.go(Mode.OFFLOADED)
    rank.go(Mode.LOGPROB)
    logprobs = rank.call("get_logprobs", given, mbs=2)["logprobs"]
    rank.go(Mode.OFFLOADED)
    rank.go(Mode.TRAINING)
    result = rank.train(given, **train)
    rank.go(Mode.OFFLOADED)
    return {"logprobs": logprobs, **result}


ALL = (Component.PARAMS, Component.BUFFERS, Component.GRADS, Component.OPTIMIZER)
