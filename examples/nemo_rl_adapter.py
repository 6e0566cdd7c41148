"""One loop over NeMo-RL's methods twice: with manual calls, and in scopes through the adapter. The losses are the same bits.

NeMo-RL is not needed, and was not run with: `make_tenants` builds stand-ins that have its methods with their effects
(`rl_session_migrate.LegacyPolicy` and its kin, over an emulated device). With NeMo-RL, its own `Policy`, `Value` and
generation objects go there, and `in_scopes` stays as it is: the adapter calls nothing but their methods.

    python examples/nemo_rl_adapter.py               under a minute on a CPU
    python examples/nemo_rl_adapter.py --steps 2     a smoke run

The task: say token 7 as often as possible. The tenants: an actor, a critic, and an engine with a copy of the actor's weights,
all on one device that has room for one of them at work.

Shapes: B sequences, S tokens each, V vocabulary.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import rl_session as rs
from rl_session.adapters.nemo_rl import scopes, share
from rl_session.testing import EmulatedDevice
from rl_session_migrate import LegacyGeneration, LegacyPolicy, LegacyValue, refit_policy_generation

VOCABULARY, WIDTH, WANTED, PROMPT, NEW = 16, 64, 7, 2, 6
NUM_SAMPLES, LR, KV_NBYTES = 32, 1e-2, 100_000

Batch = dict[str, Tensor]


class Net(nn.Module):
    """``out`` numbers a token, from the tokens up to it: ``[b, S] -> [b, S, out]``."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, out)

    def forward(self, input_ids: Tensor) -> Tensor:
        """``input_ids [b, S]``."""
        logits: Tensor = self.head(self.mix(self.embed(input_ids))[0])
        return logits


class Engine:
    """A colocated engine: a copy of the weights and a KV cache, asleep unless woken. It serves what was pushed last."""

    tags = ("weights", "kv_cache")
    in_flight = 0

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self.net = Net(VOCABULARY)
        self.taken: dict[str, Any] = {}
        self.random = torch.Generator().manual_seed(0)

    def bytes_needed(self, tags: Iterable[str]) -> int:
        """Bytes on the device while ``tags`` are awake."""
        weights = sum(parameter.nbytes for parameter in self.net.parameters())
        return sum({"weights": weights, "kv_cache": KV_NBYTES}[tag] for tag in tags)

    def wake(self, tags: Iterable[str]) -> None:
        """Take the device memory of ``tags``."""
        for tag in tags:
            if tag not in self.taken:
                self.taken[tag] = self.device.occupy(self.bytes_needed([tag]))

    def sleep(self, level: int) -> None:
        """Give all of it back."""
        while self.taken:
            self.device.vacate(self.taken.popitem()[1])

    def update_weights(self, buckets: Iterable[Mapping[str, Tensor]]) -> None:
        """Serve new weights."""
        own = self.net.state_dict()
        for bucket in buckets:
            for name, tensor in bucket.items():
                own[name].copy_(tensor)

    @torch.no_grad()
    def generate(self, batch: Mapping[str, Tensor], **_: Any) -> Batch:
        """Sample ``NEW`` tokens behind each prompt ``input_ids [B, P]``."""
        ids_BS = batch["input_ids"]
        for _step in range(NEW):
            odds_BV = self.net(ids_BS)[:, -1].softmax(-1)
            ids_BS = torch.cat([ids_BS, torch.multinomial(odds_BV, 1, generator=self.random)], 1)
        lengths_B = torch.full((len(ids_BS),), ids_BS.shape[1])
        return {"output_ids": ids_BS, "unpadded_sequence_lengths": lengths_B, "logprobs": torch.zeros(ids_BS.shape)}


def policy_loss(logits: Tensor, batch: Any, seqs: Any, tokens: Any) -> tuple[Tensor, dict[str, Any]]:
    """Policy gradient against the critic's values."""
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    ratio = (logprobs - batch["prev_logprobs"][:, 1:]).exp()
    return -(ratio * batch["advantages"][:, 1:] * batch["token_mask"][:, 1:]).sum() / tokens, {}


def value_loss(values: Tensor, batch: Any, seqs: Any, tokens: Any) -> tuple[Tensor, dict[str, Any]]:
    """Squared distance to the reward of the next token."""
    errors = values.squeeze(-1)[:, :-1] - batch["rewards"][:, 1:]
    return (errors.square() * batch["token_mask"][:, 1:]).sum() / tokens, {}


class Tenants(NamedTuple):
    """Who shares the device."""

    policy: Any
    value: Any
    generation: Any


def make_tenants(session: rs.Session, device: EmulatedDevice) -> Tenants:
    """Stand-ins for NeMo-RL's objects. With NeMo-RL: its own."""
    actor, critic = Net(VOCABULARY), Net(1)
    optimizer = torch.optim.Adam(critic.parameters(), lr=LR)
    value = session.attach_value(critic, optimizer, name="value", device=device)
    value.offload()
    policy = session.attach(actor, torch.optim.Adam(actor.parameters(), lr=LR), name="policy", device=device)
    generation = LegacyGeneration(session.engine("generation", Engine(device)))
    return Tenants(LegacyPolicy(policy, backend="megatron"), LegacyValue(value, backend="megatron"), generation)


def prompts() -> Batch:
    """A batch of random prompts."""
    ids_BP = torch.randint(0, VOCABULARY, (NUM_SAMPLES, PROMPT))
    return {"input_ids": ids_BP, "input_lengths": torch.full((NUM_SAMPLES,), PROMPT)}


def scored(rollout: Mapping[str, Tensor]) -> Batch:
    """A training batch, with ``rewards [B, S]``: 1 for each sampled token that is the wanted one."""
    ids_BS = rollout["output_ids"]
    mask_BS = torch.zeros(ids_BS.shape)
    mask_BS[:, PROMPT:] = 1
    rewards_BS = (ids_BS == WANTED) * mask_BS
    lengths_B = rollout["unpadded_sequence_lengths"]
    return {"input_ids": ids_BS, "input_lengths": lengths_B, "token_mask": mask_BS, "rewards": rewards_BS}


def advantages(batch: Batch) -> Tensor:
    """What the critic did not expect of each token, ``[B, S]``."""
    expected_BS = nn.functional.pad(batch["values"][:, :-1], (1, 0))
    return (batch["rewards"] - expected_BS) * batch["token_mask"]


def mean_reward(batch: Batch) -> float:
    """The share of sampled tokens that are the wanted one."""
    return (batch["rewards"].sum() / batch["token_mask"].sum()).item()


def by_hand(tenants: Tenants) -> tuple[float, float]:
    """A step with manual calls; returns reward and loss."""
    policy, value, generation = tenants
    refit_policy_generation(policy, generation, colocated_inference=True)
    batch = scored(generation.generate(prompts()))
    generation.finish_generation()

    value.prepare_for_inference()
    batch["values"] = value.get_values(batch)["values"]
    value.finish_inference()

    policy.prepare_for_lp_inference()
    batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
    policy.offload_to_cpu()
    batch["advantages"] = advantages(batch)

    value.prepare_for_training()
    value.train(batch, value_loss)
    value.finish_training()

    policy.prepare_for_training()
    loss = policy.train(batch, policy_loss)["loss"]
    return mean_reward(batch), loss.item()


def in_scopes(tenants: Tenants) -> tuple[float, float]:
    """The same step in scopes; returns reward and loss."""
    policy, value, generation = tenants
    share(policy, value, generation)
    with scopes(policy).legacy_refit(generation):
        refit_policy_generation(policy, generation, colocated_inference=True)
    with scopes(generation).awake():
        batch = scored(generation.generate(prompts()))
    with scopes(value).inference_mode():
        batch["values"] = value.get_values(batch)["values"]
    with scopes(policy).logprob_mode():
        batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
    batch["advantages"] = advantages(batch)
    with scopes(value).training_mode():
        value.train(batch, value_loss)
    with scopes(policy).training_mode():
        loss = policy.train(batch, policy_loss)["loss"]
    return mean_reward(batch), loss.item()


class Outcome(NamedTuple):
    """What a run gave, and what it cost."""

    rewards: list[float]
    losses: list[float]
    num_moves: int
    num_bytes: int
    peak: int


def run(step: Callable[[Tenants], tuple[float, float]], steps: int, log: Path) -> Outcome:
    """Run a loop on tenants of its own, from the same seed."""
    torch.manual_seed(0)
    net = sum(parameter.nbytes for parameter in Net(VOCABULARY).parameters())
    device = EmulatedDevice(capacity=5 * net)  # weights, gradients, two moments: one at work, with little to spare
    torch.manual_seed(0)
    with rs.Session(log) as session:
        tenants = make_tenants(session, device)
        results = [
            step(tenants) for _ in track(range(steps), description=step.__name__.replace("_", " "), disable=steps < 2)
        ]
        moved = device.bytes_in + device.bytes_out
    moves = [record for record in rs.read_audit(log) if record.name == "transition.committed"]
    return Outcome([r for r, _ in results], [loss for _, loss in results], len(moves), moved, device.peak)


def main(argv: list[str] | None = None) -> dict[str, Outcome]:
    """Run both; returns the outcome of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="training steps of each loop (default 12)")
    parser.add_argument("--log-dir", type=Path, default=Path("runs"), help="where the audit logs go (default runs)")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    torch.set_num_threads(1)
    console = Console(highlight=False)
    outcomes = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what the stand-ins say at each manual call
        for step in (by_hand, in_scopes):
            outcomes[step.__name__] = run(step, arguments.steps, arguments.log_dir / f"nemo_rl_{step.__name__}.jsonl")
    hand, scoped = outcomes["by_hand"], outcomes["in_scopes"]
    table = Table("", "by hand", "in scopes", title="One loop over NeMo-RL's methods (stand-ins)", title_justify="left")
    table.add_row(
        "reward, first and last step", *(f"{o.rewards[0]:.3f}, {o.rewards[-1]:.3f}" for o in outcomes.values())
    )
    table.add_row("loss of the last step", *(f"{o.losses[-1]:.6f}" for o in outcomes.values()))
    table.add_row("transitions of policy and value", *(str(o.num_moves) for o in outcomes.values()))
    table.add_row("bytes copied", *(f"{o.num_bytes:,}" for o in outcomes.values()))
    table.add_row("peak on the device, bytes", *(f"{o.peak:,}" for o in outcomes.values()))
    console.print(table)
    console.print(f"every loss is the same to the last bit: {'yes' if hand.losses == scoped.losses else 'NO'}")
    return outcomes


if __name__ == "__main__":
    main()
