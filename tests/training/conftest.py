"""Models, optimizers and programs, each run twice: through scopes, and by a plain torch loop that never moves a byte.

A *program* is a list of short words ("logprob", "train", "open", ...). :class:`Scoped` runs it on an attached policy,
:class:`Plain` with torch alone; both append what they computed to ``trace``. Knows nothing of how the library works: where
bytes are is found by looking at storages.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rl_session as rs
from rl_session.testing import EmulatedDevice

VOCABULARY = 13
WIDTH = 8


# -- models ---------------------------------------------------------------------------------------------------------


class PlainLM(nn.Module):
    """Embedding, MLP with dropout, head. Dropout makes every draw from the random generator count."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        hidden = hidden + self.down(self.dropout(torch.tanh(self.up(hidden))))
        return self.head(hidden)


class FrozenLM(PlainLM):
    """Frozen embedding, and a submodule in eval under a root in train."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.weight.requires_grad_(False)
        self.up.bias.requires_grad_(False)
        self.dropout.eval()


class BufferLM(PlainLM):
    """Batch norm, a table that is in no state_dict, and a counter that every training forward rebinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scales", torch.linspace(0.5, 1.5, WIDTH), persistent=False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids) * self.scales
        hidden = self.norm(hidden.reshape(-1, WIDTH)).reshape(hidden.shape)
        if self.training:
            self.seen = self.seen + torch.tensor([1, input_ids.numel(), int(input_ids.sum())])
        return self.head(hidden + self.down(self.dropout(torch.tanh(self.up(hidden)))))


class MixedLM(PlainLM):
    """A bfloat16 MLP between float32 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up.to(torch.bfloat16)
        self.down.to(torch.bfloat16)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        inner = self.down(self.dropout(torch.tanh(self.up(hidden.bfloat16()))))
        return self.head(hidden + inner.to(hidden.dtype))


class StridedLM(nn.Module):
    """Channels-last, transposed, 0-dim and empty parameters, two that are views of one storage, an expanded buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.conv = nn.Conv2d(WIDTH, WIDTH, (3, 1), padding=(2, 0)).to(memory_format=torch.channels_last)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH).t() * 0.3)
        flat = torch.randn(2 * WIDTH) * 0.1
        self.shift = nn.Parameter(flat[:WIDTH])
        self.scale = nn.Parameter(flat[WIDTH:])
        self.nothing = nn.Parameter(torch.empty(0))
        self.gain = nn.Parameter(torch.tensor(0.9))
        self.register_buffer("ones", torch.ones(1).expand(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids) @ self.mix
        image = hidden.transpose(1, 2)[..., None].contiguous(memory_format=torch.channels_last)
        hidden = self.conv(image)[:, :, : input_ids.shape[1], 0].transpose(1, 2)
        return self.head(torch.tanh(hidden) * (self.ones + self.scale) * self.gain + self.shift)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def _lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, init_lora_weights=False)
    return get_peft_model(_llama(), config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": PlainLM,
    "tied": lambda: PlainLM(tied=True),
    "frozen": FrozenLM,
    "buffers": BufferLM,
    "mixed": MixedLM,
    "strided": StridedLM,
    "compiled": lambda: torch.compile(PlainLM(), backend="eager"),  # type: ignore[return-value]
    "llama": _llama,
    "lora": _lora,
}


# -- optimizers -----------------------------------------------------------------------------------------------------


class Preconditioner:
    """Optimizer state that is neither a tensor nor a container."""

    def __init__(self, like: Tensor) -> None:
        self.diagonal = torch.zeros_like(like)
        self.history = [torch.zeros_like(like), (torch.zeros_like(like, dtype=torch.float64),)]
        self.num_updates = 0


class Nested(torch.optim.Optimizer):
    """State in dicts, lists, tuples and objects, some of it replaced by a new tensor at each step."""

    def __init__(self, params: Any) -> None:
        super().__init__(list(params), {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["deep"] = {"ema": [torch.zeros_like(p)], "pair": (torch.zeros_like(p), {"n": 0})}
                    state["object"] = Preconditioner(p)
                    state["fresh"] = torch.zeros_like(p)
                ema, pair, inner = state["deep"]["ema"][0], state["deep"]["pair"], state["object"]
                ema.mul_(0.9).add_(p.grad)
                pair[0].add_(p.grad.abs())
                pair[1]["n"] += 1
                inner.diagonal.addcmul_(p.grad, p.grad)
                inner.history[0].copy_(p.grad)
                inner.history[1][0].add_(p.grad.double())
                inner.num_updates += 1
                state["fresh"] = state["fresh"] * 0.5 + ema
                update = state["fresh"] / (inner.diagonal.sqrt() + 1e-3) + inner.history[1][0].to(p.dtype) * 0.01
                p.add_(update, alpha=-group["lr"] / (1 + pair[0].mean() * 0.1).item())


class Muon(torch.optim.Optimizer):
    """Momentum under the key ``momentum_buffer``, orthogonalised for matrices."""

    def __init__(self, params: Any) -> None:
        super().__init__(list(params), {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 0.1)
                update = buffer.float()
                if update.ndim == 2:
                    update = update / (update.norm() + 1e-6)
                    update = 1.5 * update - 0.5 * update @ update.mT @ update
                p.add_(update.to(p.dtype), alpha=-group["lr"])


class MainGrad(torch.optim.Optimizer):
    """SGD over ``main_grad``, views of one flat float32 buffer that post-accumulate hooks add into."""

    def __init__(self, params: Any) -> None:
        trained = [p for p in params if p.requires_grad]
        super().__init__(trained, {"lr": 0.05})
        sizes = [p.numel() for p in trained]
        flat = torch.zeros(sum(sizes))
        for p, piece in zip(trained, flat.split(sizes), strict=True):
            p.main_grad = piece.view(p.shape)
            p.register_post_accumulate_grad_hook(self._accumulate)

    @staticmethod
    def _accumulate(p: Tensor) -> None:
        p.main_grad.add_(p.grad)
        p.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=torch.float32))
                buffer.mul_(0.9).add_(p.main_grad)
                p.add_(buffer.to(p.dtype), alpha=-group["lr"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for p in group["params"]:
                p.main_grad.zero_()


def _adamw(params: list[Tensor], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1, **options)


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda params: _adamw(params, foreach=False),
    "adamw-foreach": lambda params: _adamw(params, foreach=True),
    "adamw-fused": lambda params: _adamw(params, fused=True),
    "adamw-amsgrad": lambda params: _adamw(params, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "nested": Nested,
    "muon": Muon,
    "main-grad": MainGrad,
    "masters": _adamw,
}


# -- data and losses --------------------------------------------------------------------------------------------------


def make_batch(seed: int, num: int = 4, length: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, length + 1, (num,), generator=generator)
    valid = torch.arange(length) < lengths[:, None]
    return {
        "input_ids": torch.randint(0, VOCABULARY, (num, length), generator=generator) * valid,
        "input_lengths": lengths,
        "token_mask": valid.long(),
        "sample_mask": torch.ones(num),
    }


def nll_loss(
    logits: Tensor, batch: Mapping[str, Any], global_valid_seqs: Tensor, global_valid_tokens: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    picked = logprobs.gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    loss = -(picked * batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]).sum() / global_valid_tokens
    return loss, {"loss": loss.detach()}


def valid_tokens(batch: Mapping[str, Tensor]) -> float:
    return float((batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]).sum())


def rows(batch: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {key: value[start:stop] for key, value in batch.items()}


def run_model(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    if hasattr(model, "config"):
        mask = (torch.arange(batch["input_ids"].shape[1]) < batch["input_lengths"][:, None]).long()
        return model(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False).logits
    return model(batch["input_ids"])


def naive_logprobs(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """What ``get_logprobs`` must give, written out; every submodule's mode is put back."""
    was = [(part, part.training) for part in model.modules()]
    model.eval()
    with torch.no_grad():
        logits = run_model(model, batch).float()
    for part, training in was:
        part.training = training
    logprobs = torch.log_softmax(logits[:, :-1], dim=-1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    result = torch.zeros(batch["input_ids"].shape)
    result[:, 1:] = logprobs
    valid = torch.arange(result.shape[1]) < batch["input_lengths"][:, None]
    return result.masked_fill(~valid, 0.0)


# -- a model and its optimizer ------------------------------------------------------------------------------------------


def inner_module(model: nn.Module) -> nn.Module:
    return getattr(model, "_orig_mod", model)


class Kit:
    """A model and its optimizer, always the same for the same names."""

    def __init__(self, model: str = "plain", optimizer: str | None = "adamw") -> None:
        torch.manual_seed(7)
        self.model = MODELS[model]()
        self.masters: dict[nn.Parameter, Tensor] = {}
        params: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        if optimizer == "masters":
            self.model.to(torch.bfloat16)
            params = [p for p in self.model.parameters() if p.requires_grad]
            self.masters = {p: p.detach().float().clone() for p in params}  # type: ignore[misc]
            params = list(self.masters.values())
        self.optimizer = OPTIMIZERS[optimizer](params) if optimizer is not None else None
        self.reference = copy.deepcopy(inner_module(self.model))
        for p in self.reference.parameters():
            p.__dict__.pop("main_grad", None)

    @property
    def stepped(self) -> torch.optim.Optimizer:
        assert self.optimizer is not None
        return self.optimizer


# -- where bytes are, by looking ----------------------------------------------------------------------------------------


def walk(value: Any) -> Iterator[Tensor]:
    """Tensors in nested state, written here again so that the library's own scan is not its own judge."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from walk(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from walk(item)
    elif isinstance(value, Preconditioner):
        yield from walk(vars(value))


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, list[Tensor]]:
    model = inner_module(model)
    params = list(model.parameters())
    stepped = [p for group in optimizer.param_groups for p in group["params"]] if optimizer else []
    own = {id(p) for p in params}
    foreign = [p for p in stepped if id(p) not in own]
    slots = [p.grad for p in (*params, *foreign) if p.grad is not None]
    flat = [p.main_grad for p in params if hasattr(p, "main_grad")]
    state = [t for s in (optimizer.state.values() if optimizer else ()) for t in walk(s) if t.dim() > 0]
    return {
        "params": params,
        "buffers": list(model.buffers()),
        "grads": [*slots, *flat],
        "optimizer": [*foreign, *state],
    }


def scan(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, str]:
    """Component to "device" (all bytes there), "away" (none there), "none" (there are no bytes) or "torn"."""
    found = {}
    for name, tensors in tensors_of(model, optimizer).items():
        there = {t.untyped_storage().nbytes() > 0 for t in tensors if t.numel()}
        found[name] = {frozenset(): "none", frozenset({True}): "device", frozenset({False}): "away"}.get(
            frozenset(there), "torn"
        )
    return found


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def device_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    return storage_bytes([t for tensors in tensors_of(model, optimizer).values() for t in tensors])


def check_placement(policy: Any, kit: Kit) -> dict[str, str]:
    """The policy's own word must be what is found by looking; both and the device's counter agree."""
    found = scan(kit.model, kit.optimizer)
    said = policy.placement
    for name, tier in found.items():
        allowed = {"device": {"device"}, "away": {"host", "none"}, "none": {"none"}, "torn": {"torn"}}[tier]
        assert said[name].value in allowed, f"{name}: found {tier}, said {said[name].value}"
    return found


# -- programs ---------------------------------------------------------------------------------------------------------


class Runner:
    """What the two ways of running a program share: data by number, and a trace of results."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.trace: list[tuple[str, Any]] = []
        self.num = 0
        self.open_batch: dict[str, Tensor] | None = None

    def data(self) -> dict[str, Tensor]:
        self.num += 1
        return make_batch(self.num)

    def note(self, word: str, value: Any) -> None:
        self.trace.append((word, value))

    def run(self, program: Sequence[str]) -> None:
        torch.manual_seed(11)
        for word in program:
            getattr(self, word.replace("-", "_"))()
        self.note("random state", torch.get_rng_state())

    def backward_by_hand(self, batch: Mapping[str, Tensor]) -> Tensor:
        model = self.kit.model
        loss, _ = nll_loss(run_model(model, batch), batch, torch.tensor(1.0), torch.tensor(valid_tokens(batch)))
        loss.backward()
        return loss.detach()

    def step_by_hand(self) -> None:
        for p, master in self.kit.masters.items():
            master.grad, p.grad = (None if p.grad is None else p.grad.float()), None
        self.kit.stepped.step()
        with torch.no_grad():
            for p, master in self.kit.masters.items():
                p.copy_(master)

    def write_by_hand(self) -> None:
        tensor = next(p for p in self.kit.model.parameters() if p.requires_grad)
        tensor.data.mul_(1.25)
        if self.kit.masters:
            self.kit.masters[tensor].data.mul_(1.25)  # type: ignore[index]


class Plain(Runner):
    """The program in torch alone. It keeps modules in the modes that a policy gives them."""

    def _train_mode(self) -> list[tuple[nn.Module, bool]]:
        was = [(part, part.training) for part in self.kit.model.modules()]
        if not self.kit.model.training:
            self.kit.model.train()
        return was

    def _restore(self, was: list[tuple[nn.Module, bool]]) -> None:
        for part, training in was:
            part.training = training

    def _norm(self) -> Tensor:
        grads = [p.grad for group in self.kit.stepped.param_groups for p in group["params"] if p.grad is not None]
        return torch.nn.utils.get_total_norm(grads)

    def _step(self) -> Tensor:
        for p, master in self.kit.masters.items():
            master.grad, p.grad = (None if p.grad is None else p.grad.float()), None
        norm = self._norm()
        self.kit.stepped.step()
        with torch.no_grad():
            for p, master in self.kit.masters.items():
                p.copy_(master)
        self.kit.stepped.zero_grad()
        self.kit.model.zero_grad()
        return norm

    def logprob(self) -> None:
        self.note("logprob", naive_logprobs(self.kit.model, self.data()))

    def reference(self) -> None:
        batch = self.data()
        if hasattr(self.kit.model, "disable_adapter"):
            with self.kit.model.disable_adapter():  # type: ignore[operator]
                self.note("reference", naive_logprobs(self.kit.model, batch))
        else:
            self.note("reference", naive_logprobs(self.kit.reference, batch))

    def _train(self, parts: int) -> None:
        batch, losses, norms = self.data(), [], []
        self.kit.stepped.zero_grad()
        self.kit.model.zero_grad()
        was = self._train_mode()
        for index in range(parts):
            each = 4 // parts
            part = rows(batch, index * each, (index + 1) * each)
            total = 0.0
            for start in range(0, each, 2):
                micro = rows(part, start, start + 2)
                counts = (torch.tensor(float(each)), torch.tensor(valid_tokens(part)))
                loss, _ = nll_loss(run_model(self.kit.model, micro), micro, *counts)
                loss.backward()
                total += float(loss.detach())
            norms.append(float(self._step()))
            losses.append(total)
        self._restore(was)
        self.note("train", (torch.tensor(losses), torch.tensor(norms)))

    def train(self) -> None:
        self._train(1)

    def train_twice(self) -> None:
        self._train(2)

    def _chunk(self, start: int) -> None:
        assert self.open_batch is not None
        was = self._train_mode()
        micro = rows(self.open_batch, start, start + 2)
        counts = (torch.tensor(4.0), torch.tensor(valid_tokens(self.open_batch)))
        loss, _ = nll_loss(run_model(self.kit.model, micro), micro, *counts)
        loss.backward()
        self.total += float(loss.detach())
        self._restore(was)

    def open(self) -> None:
        self.open_batch, self.total = self.data(), 0.0
        self.kit.stepped.zero_grad()
        self.kit.model.zero_grad()
        self._chunk(0)

    def more(self) -> None:
        self._chunk(2)

    def commit(self) -> None:
        self.open_batch = None
        self.note("commit", (torch.tensor([self.total]), torch.tensor([float(self._step())])))

    def abort(self) -> None:
        self.open_batch = None
        self.kit.stepped.zero_grad()
        self.kit.model.zero_grad()

    def own_backward(self) -> None:
        was = self._train_mode()
        self.note("own backward", self.backward_by_hand(self.data()))
        self._restore(was)

    def own_step(self) -> None:
        self.step_by_hand()
        self.kit.stepped.zero_grad()
        self.kit.model.zero_grad()

    def own_step_zeroing(self) -> None:
        self.step_by_hand()
        self.kit.stepped.zero_grad(set_to_none=False)
        self.kit.model.zero_grad(set_to_none=False)

    def own_step_keeping(self) -> None:
        """The gradients stay; the next backward of one's own starts by dropping them."""
        self.step_by_hand()
        self.kit.stepped.zero_grad()
        self.kit.model.zero_grad()

    def write(self) -> None:
        self.write_by_hand()

    write_in_training = write

    def evaluate(self) -> None:
        batch = self.data()
        was = [(part, part.training) for part in self.kit.model.modules()]
        self.kit.model.eval()
        with torch.no_grad():
            counts = (torch.tensor(4.0), torch.tensor(valid_tokens(batch)))
            loss, _ = nll_loss(run_model(self.kit.model, batch), batch, *counts)
        self._restore(was)
        self.note("evaluate", torch.tensor([float(loss)]))

    def nested_logprob(self) -> None:
        self.open()
        self.logprob()
        self.reference()
        self.more()
        self.commit()

    def deep(self) -> None:
        self.open()
        self.logprob()
        self.logprob()
        self.more()
        self.commit()
        self.logprob()

    def nothing(self) -> None:
        """What only moves bytes."""

    refit = offloaded = switch_resident = switch_offloaded = offload = save = recreate = nothing


class Scoped(Runner):
    """The program through the scopes of a policy; after every word the placement is checked by looking."""

    def __init__(self, kit: Kit, policy: Any, folder: Path) -> None:
        super().__init__(kit)
        self.policy = policy
        self.folder = folder
        self.step: Any = None

    def run(self, program: Sequence[str]) -> None:
        torch.manual_seed(11)
        for word in program:
            getattr(self, word.replace("-", "_"))()
            check_placement(self.policy, self.kit)
        self.note("random state", torch.get_rng_state())

    def logprob(self) -> None:
        with self.policy.logprob_mode():
            self.note("logprob", self.policy.get_logprobs(self.data())["logprobs"])

    def reference(self) -> None:
        with self.policy.logprob_mode():
            result = self.policy.get_reference_policy_logprobs(self.data())
        self.note("reference", result["reference_logprobs"])

    def _train(self, gbs: int) -> None:
        with self.policy.training_mode():
            result = self.policy.train(self.data(), nll_loss, gbs=gbs, mbs=2)
        self.note("train", (result["loss"], result["grad_norm"]))

    def train(self) -> None:
        self._train(4)

    def train_twice(self) -> None:
        self._train(2)

    def _begin(self) -> None:
        self.open_batch = self.data()
        self.step = self.policy.begin_step(4.0, valid_tokens(self.open_batch))

    def _chunk(self, start: int) -> None:
        assert self.open_batch is not None
        self.step.forward_backward(rows(self.open_batch, start, start + 2), nll_loss)

    def _commit(self) -> None:
        result = self.step.commit()
        self.note("commit", (result["loss"], result["grad_norm"]))

    def open(self) -> None:
        with self.policy.training_mode():
            self._begin()
            self._chunk(0)

    def more(self) -> None:
        with self.policy.training_mode():
            self._chunk(2)

    def commit(self) -> None:
        with self.policy.training_mode():
            self._commit()

    def abort(self) -> None:
        self.step.abort()

    def own_backward(self) -> None:
        with self.policy.training_mode():
            self.note("own backward", self.backward_by_hand(self.data()))

    def own_step(self) -> None:
        with self.policy.training_mode():
            self.step_by_hand()
            self.kit.stepped.zero_grad()
            self.kit.model.zero_grad()

    def own_step_zeroing(self) -> None:
        with self.policy.training_mode():
            self.step_by_hand()
            self.kit.stepped.zero_grad(set_to_none=False)
            self.kit.model.zero_grad(set_to_none=False)

    def own_step_keeping(self) -> None:
        with self.policy.training_mode():
            self.step_by_hand()
        with self.policy.training_mode():
            self.kit.stepped.zero_grad()
            self.kit.model.zero_grad()

    def write(self) -> None:
        self.write_by_hand()

    def write_in_training(self) -> None:
        with self.policy.training_mode():
            self.write_by_hand()

    def evaluate(self) -> None:
        with self.policy.logprob_mode():
            self.note("evaluate", self.policy.train(self.data(), nll_loss, eval_mode=True)["loss"])

    def nested_logprob(self) -> None:
        with self.policy.training_mode():
            self._begin()
            self._chunk(0)
            with self.policy.logprob_mode():
                self.note("logprob", self.policy.get_logprobs(self.data())["logprobs"])
                result = self.policy.get_reference_policy_logprobs(self.data())
                self.note("reference", result["reference_logprobs"])
            self._chunk(2)
            self._commit()

    def deep(self) -> None:
        with self.policy.training_mode():
            self._begin()
            self._chunk(0)
            with self.policy.logprob_mode():
                self.note("logprob", self.policy.get_logprobs(self.data())["logprobs"])
                with self.policy.refit_mode():
                    with self.policy.offloaded():
                        pass
                with self.policy.offloaded():
                    pass
                self.note("logprob", self.policy.get_logprobs(self.data())["logprobs"])
            self._chunk(2)
            self._commit()
            with self.policy.training_mode(), self.policy.logprob_mode():
                self.note("logprob", self.policy.get_logprobs(self.data())["logprobs"])

    def refit(self) -> None:
        with self.policy.refit_mode():
            got = {name: w.clone() for bucket in self.policy.iter_weights(200) for name, w in bucket.items()}
        want = self.policy.state_dict()
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)

    def offloaded(self) -> None:
        with self.policy.offloaded():
            assert self.policy.state_dict()

    def switch_resident(self) -> None:
        self.policy.switch("resident")

    def switch_offloaded(self) -> None:
        self.policy.switch("offloaded")

    def offload(self) -> None:
        self.policy.offload()
        assert device_bytes(self.kit.model, self.kit.optimizer) == 0 or self.policy._control.flags.release == "never"

    def save(self) -> None:
        before = scan(self.kit.model, self.kit.optimizer)
        self.policy.save_checkpoint(self.folder / f"checkpoint-{self.num}")
        assert scan(self.kit.model, self.kit.optimizer) == before


# -- comparing ----------------------------------------------------------------------------------------------------------


def same(one: Any, other: Any) -> bool:
    """Bit for bit, dtype and strides included; NaN equals itself."""
    if isinstance(one, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape or one.stride() != other.stride():
            return False
        one, other = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
        return bool(torch.equal(one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, Preconditioner):
        return same(vars(one), vars(other))
    return bool(one == other)


def model_state(model: nn.Module) -> dict[str, Tensor]:
    module = inner_module(model)
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def optimizer_state(kit: Kit) -> list[Any]:
    """State in the order of the parameters, and the masters."""
    if kit.optimizer is None:
        return []
    params = [p for group in kit.optimizer.param_groups for p in group["params"]]
    assert len(kit.optimizer.state) <= len(params)
    return [[dict(kit.optimizer.state.get(p, {})) for p in params], list(kit.masters.values())]


def gradients(kit: Kit) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in inner_module(kit.model).named_parameters()}


def assert_same(one: Kit, other: Kit) -> None:
    """Weights, buffers, optimizer state and gradients of two kits are the same bits; all of them must be readable."""
    mine, theirs = model_state(one.model), model_state(other.model)
    assert mine.keys() == theirs.keys()
    different = [name for name in mine if not same(mine[name], theirs[name])]
    assert not different, f"differ: {different}"
    assert same(optimizer_state(one), optimizer_state(other)), "optimizer state differs"
    for name, gradient in gradients(one).items():
        twin = gradients(other)[name]
        assert (gradient is None) == (twin is None), f"{name}.grad: {gradient} and {twin}"
        assert gradient is None or same(gradient, twin), f"{name}.grad differs"


def assert_same_trace(one: Runner, other: Runner) -> None:
    assert [word for word, _ in one.trace] == [word for word, _ in other.trace]
    for index, ((word, mine), (_, theirs)) in enumerate(zip(one.trace, other.trace, strict=True)):
        assert same(mine, theirs), f"result {index} ({word}): {mine} and {theirs}"


def plain_classes(kit: Kit) -> bool:
    """Whether every tensor has the class that torch gave it."""
    tensors = [t for found in tensors_of(kit.model, kit.optimizer).values() for t in found]
    return all(type(t) in (Tensor, nn.Parameter) for t in tensors)


# -- fixtures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def device() -> EmulatedDevice:
    """An emulated device that poisons what it frees."""
    made = EmulatedDevice()
    made.poison()
    return made


class Attach:
    """Makes policies with ``verify="checksum"``; what is still open at the end is closed."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self._stack = ExitStack()

    def __call__(self, kit: Kit, *, device: EmulatedDevice | None = None, **options: Any) -> Any:
        flags = {
            name: options.pop(name)
            for name in (
                *("release", "offload_optimizer_for_logprob", "offload_optimizer_for_refit", "live_gradients"),
                "host_budget",
            )
            if name in options
        }
        if kit.masters:
            options.setdefault("masters", kit.masters)
        policy = rs.attach(
            kit.model,
            kit.optimizer,
            device=device or self.device,
            offload=rs.OffloadConfig(verify="checksum", **flags),
            **options,
        )
        self._stack.callback(policy.close)
        return policy

    def close(self) -> None:
        self._stack.close()
        gc.collect()


@pytest.fixture
def attach(device: EmulatedDevice) -> Iterator[Attach]:
    made = Attach(device)
    yield made
    made.close()


@pytest.fixture(autouse=True, scope="session")
def _small_heap() -> Iterator[None]:
    """Every move that frees something collects garbage: keep what the imports left out of its way."""
    _lora()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def lab() -> SimpleNamespace:
    """Everything above by name (test folders are no packages)."""
    names = {name: value for name, value in globals().items() if not name.startswith("_")}
    return SimpleNamespace(**names)
