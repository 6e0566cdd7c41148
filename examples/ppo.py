"""PPO with four tenants of one device: spell a word backward, scored by reasoning-gym.

An actor, a critic, the reference (inside the actor) and an engine that samples from the actor share an emulated device which is
too small for them: training the actor takes four times its weights (weights, gradients, Adam's two moments), training the critic
as much, and that is all the device has. The loop knows nothing of it. Each phase opens the scope of the model that it uses, and
the library finds the room: with ``--release lazy`` what fits stays, and only what is in the way leaves; with ``--release eager``
each scope sends away what it brought.

    python examples/ppo.py                     about two minutes on one core
    python examples/ppo.py --release eager     the same losses to the last bit, and more bytes move
    python examples/ppo.py --steps 2 --warmup-steps 2     a smoke run

Proximal policy optimization: https://arxiv.org/abs/1707.06347.
Advantages over values (here with gamma = lambda = 1): https://arxiv.org/abs/1506.02438.

Shapes: B sequences, S padded length, b sequences of one micro-batch, V vocabulary.
"""

from __future__ import annotations

import argparse
import random
import string
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import reasoning_gym
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification

import rl_session as rs
from rl_session.audit.timeline import timeline_page
from rl_session.testing import EmulatedDevice

PAD, EOS, SEP = 0, 1, 2
ALPHABET = string.ascii_lowercase
MIN_WORD, MAX_WORD = 3, 5
BATCH, NUM_EVAL = 256, 256
WARMUP_STEPS, WARMUP_BATCH = 45, 128
WARMUP_LR, ACTOR_LR, CRITIC_LR = 2e-3, 2e-4, 5e-4
CLIP, KL_WEIGHT, MAX_GRAD_NORM = 0.2, 0.01, 1.0
NUM_EPOCHS, GBS, MBS = 2, 128, 64
SLACK = 64 * 2**10
"""Bytes of the device beyond four times the weights: buffers, and Adam's step counters."""

Entry = dict[str, Any]
Batch = dict[str, Tensor]


# -- the task: a character tokenizer, prompts, and entries that share no word --------------------------------------------


def encode(text: str) -> list[int]:
    """Ids of the letters of ``text``."""
    return [ALPHABET.index(character) + 3 for character in text]


def decode(ids: list[int]) -> str:
    """The text of a response; whatever is no letter shows as '?', the end token as nothing."""
    return "".join(ALPHABET[i - 3] if i >= 3 else "?" for i in ids if i != EOS)


def prompt_ids(entry: Entry) -> list[int]:
    """The question without its boilerplate: the word and a separator."""
    return [*encode(entry["metadata"]["word"].lower()), SEP]


def build_task(seed: int, num_train: int) -> tuple[Any, list[Entry], list[Entry]]:
    """The dataset (it owns the scoring), entries to train on, and held-out entries with other words."""
    size = 2 * (num_train + NUM_EVAL)
    dataset = reasoning_gym.create_dataset(
        "spell_backward", seed=seed * 10_000_000, size=size, min_word_len=MIN_WORD, max_word_len=MAX_WORD
    )
    entries = [entry for entry in dataset if set(entry["answer"].lower()) <= set(ALPHABET)]
    held_out = entries[:NUM_EVAL]
    held_words = {entry["answer"].lower() for entry in held_out}
    train = [entry for entry in entries[NUM_EVAL:] if entry["answer"].lower() not in held_words]
    return dataset, train[:num_train], held_out


def pad(rows: list[list[int]]) -> Tensor:
    """Right-pad lists of ids to one ``[B, S]`` tensor."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


def lengths(rows: list[list[int]]) -> Tensor:
    """``[B]``, how many ids each row has."""
    return torch.tensor([len(row) for row in rows])


def response_mask(prompt_lengths_B: Tensor, total_lengths_B: Tensor, num_columns: int) -> Tensor:
    """1 on the tokens the model wrote, the end token included; 0 on the prompt and on padding."""
    columns_S = torch.arange(num_columns)
    return ((columns_S >= prompt_lengths_B[:, None]) & (columns_S < total_lengths_B[:, None])).float()


# -- the losses ----------------------------------------------------------------------------------------------------------


def next_token_logprobs(logits_bSV: Tensor, ids_bS: Tensor) -> Tensor:
    """Log-probability of each token given those before it, ``[b, S - 1]``."""
    return logits_bSV[:, :-1].log_softmax(-1).gather(-1, ids_bS[:, 1:, None]).squeeze(-1)


def cross_entropy_loss(
    logits: Tensor, batch: Mapping[str, Tensor], global_valid_seqs: float, global_valid_tokens: float
) -> tuple[Tensor, dict[str, Any]]:
    """Mean over the answer tokens of the global batch."""
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    loss = -(next_token_logprobs(logits, batch["input_ids"]) * mask).sum() / global_valid_tokens
    return loss, {}


def actor_loss(
    logits: Tensor, batch: Mapping[str, Tensor], global_valid_seqs: float, global_valid_tokens: float
) -> tuple[Tensor, dict[str, Any]]:
    """Clipped policy gradient, a mean over the response tokens of the global batch."""
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    advantages = batch["advantages"][:, 1:]
    ratio = (next_token_logprobs(logits, batch["input_ids"]) - batch["prev_logprobs"][:, 1:]).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(surrogate * mask).sum() / global_valid_tokens, {}


def critic_loss(
    values: Tensor, batch: Mapping[str, Tensor], global_valid_seqs: float, global_valid_tokens: float
) -> tuple[Tensor, dict[str, Any]]:
    """Squared distance to the returns. What the critic says at one token is the value of the next one's state."""
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    errors = values.squeeze(-1)[:, :-1] - batch["returns"][:, 1:]
    return (errors.square() * mask).sum() / global_valid_tokens, {}


def add_advantages(batch: Batch, rewards_B: Tensor) -> None:
    """Set ``returns`` and ``advantages [B, S]``: the reward falls on the last token, a little KL on every one."""
    mask_BS = batch["token_mask"]
    rewards_BS = -KL_WEIGHT * (batch["prev_logprobs"] - batch["reference_logprobs"]) * mask_BS
    rewards_BS[torch.arange(len(rewards_B)), batch["input_lengths"] - 1] += rewards_B

    # With gamma = lambda = 1 a return is all that is still to come, and an advantage what the critic did not expect of it.
    batch["returns"] = rewards_BS.flip(1).cumsum(1).flip(1)
    advantages_BS = torch.zeros_like(rewards_BS)
    advantages_BS[:, 1:] = batch["returns"][:, 1:] - batch["values"][:, :-1]

    written = advantages_BS[mask_BS.bool()]
    batch["advantages"] = (advantages_BS - written.mean()) / (written.std() + 1e-6) * mask_BS


# -- the tenants ---------------------------------------------------------------------------------------------------------


class Tenants(NamedTuple):
    """Who shares the device; the reference is inside the actor."""

    actor: rs.Policy
    critic: rs.ValueModel
    engine: rs.InProcessEngine


def build_models(seed: int) -> tuple[LlamaForCausalLM, LlamaForTokenClassification]:
    """Two Llamas small enough for one core: one with a head over the vocabulary, one with a head of a single number."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(ALPHABET) + 3,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
        num_labels=1,
        classifier_dropout=0.0,
    )
    return LlamaForCausalLM(config), LlamaForTokenClassification(config)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def supervised_batch(entries: list[Entry]) -> Batch:
    """Prompts with their right answers."""
    prompts = [prompt_ids(entry) for entry in entries]
    answers = [[*encode(entry["answer"].lower()), EOS] for entry in entries]
    sequences = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    ids_BS, lengths_B = pad(sequences), lengths(sequences)
    return {
        "input_ids": ids_BS,
        "input_lengths": lengths_B,
        "token_mask": response_mask(lengths(prompts), lengths_B, ids_BS.shape[1]),
        "sample_mask": torch.ones(len(entries)),
    }


def move_in(
    session: rs.Session, device: EmulatedDevice, seed: int, warmup_entries: list[Entry], progress: Progress
) -> Tenants:
    """Warm the actor up on right answers, and attach everybody."""
    model, value_model = build_models(seed)
    device.capacity = 4 * max(weight_bytes(model), weight_bytes(value_model)) + SLACK
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARMUP_LR, weight_decay=0.0)

    warm_up = session.attach(model, optimizer, name="warm-up", device=device, max_grad_norm=MAX_GRAD_NORM)
    with warm_up.training_mode():
        for start in progress.track(range(0, len(warmup_entries), WARMUP_BATCH), description="warm-up"):
            warm_up.train(supervised_batch(warmup_entries[start : start + WARMUP_BATCH]), cross_entropy_loss)
    warm_up.detach()

    # The moments stay: a fresh AdamW begins with a kick away from the reference. The critic begins as the actor's body.
    optimizer.param_groups[0]["lr"] = ACTOR_LR
    value_model.model.load_state_dict(model.model.state_dict())
    value_optimizer = torch.optim.AdamW(value_model.parameters(), lr=CRITIC_LR, weight_decay=0.0)

    # `attach` takes a model where it is, on the device: the actor makes room before the critic comes.
    actor = session.attach(model, optimizer, name="actor", device=device, max_grad_norm=MAX_GRAD_NORM, reference="copy")
    actor.offload()
    critic = session.attach_value(
        value_model, value_optimizer, name="critic", device=device, max_grad_norm=MAX_GRAD_NORM
    )
    critic.offload()
    engine = rs.InProcessEngine(actor, max_new_tokens=MAX_WORD + 2, stop_ids=[EOS], pad_id=PAD, seed=seed)
    return Tenants(actor, critic, engine)


# -- the phases of the loop ----------------------------------------------------------------------------------------------


def roll_out(tenants: Tenants, dataset: Any, entries: list[Entry]) -> tuple[Batch, Tensor]:
    """Sample one response for each entry and score it; returns the batch and the rewards ``[B]``."""
    prompts = [prompt_ids(entry) for entry in entries]
    prompt_lengths_B = lengths(prompts)
    with tenants.actor.generation_mode():
        out = tenants.engine.generate({"input_ids": pad(prompts), "input_lengths": prompt_lengths_B})
    ids_BS, lengths_B = out["output_ids"], out["unpadded_sequence_lengths"]
    responses = [ids_BS[i, len(prompt) : lengths_B[i]].tolist() for i, prompt in enumerate(prompts)]
    rewards = [dataset.score_answer(decode(ids), entry) for ids, entry in zip(responses, entries, strict=True)]
    batch = {
        "input_ids": ids_BS,
        "input_lengths": lengths_B,
        "token_mask": response_mask(prompt_lengths_B, lengths_B, ids_BS.shape[1]),
        "sample_mask": torch.ones(len(entries)),
    }
    return batch, torch.tensor(rewards, dtype=torch.float32)


def ppo_step(tenants: Tenants, dataset: Any, entries: list[Entry], rng: random.Random) -> dict[str, float]:
    """Generate, score, two sets of log-probabilities, values, train the critic, train the actor."""
    actor, critic, _ = tenants
    batch, rewards_B = roll_out(tenants, dataset, entries)
    with actor.logprob_mode():
        batch["prev_logprobs"] = actor.get_logprobs(batch)["logprobs"]
        batch["reference_logprobs"] = actor.get_reference_policy_logprobs(batch)["reference_logprobs"]
    with critic.inference_mode():
        batch["values"] = critic.get_values(batch)["values"]
    add_advantages(batch, rewards_B)

    orders = [rng.sample(range(len(entries)), len(entries)) for _ in range(NUM_EPOCHS)]
    epochs = [{key: value[order] for key, value in batch.items()} for order in orders]
    with critic.training_mode():
        critic_losses = [critic.train(epoch, critic_loss, gbs=GBS, mbs=MBS)["loss"] for epoch in epochs]
    with actor.training_mode():
        actor_losses = [actor.train(epoch, actor_loss, gbs=GBS, mbs=MBS)["loss"] for epoch in epochs]

    log_ratios = (batch["prev_logprobs"] - batch["reference_logprobs"]) * batch["token_mask"]
    return {
        "reward": rewards_B.mean().item(),
        "kl": (log_ratios.sum() / batch["token_mask"].sum()).item(),
        "actor loss": torch.cat(actor_losses).mean().item(),
        "critic loss": torch.cat(critic_losses).mean().item(),
    }


def run(
    arguments: argparse.Namespace, session: rs.Session, device: EmulatedDevice, console: Console
) -> tuple[float, float]:
    """The whole job; returns the held-out reward before and after PPO."""
    num_warmup = arguments.warmup_steps * WARMUP_BATCH
    dataset, train, held_out = build_task(arguments.seed, num_warmup + arguments.steps * BATCH)
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tenants = move_in(session, device, arguments.seed, train[:num_warmup], progress)
        before = roll_out(tenants, dataset, held_out)[1].mean().item()
        rng = random.Random(arguments.seed)
        task = progress.add_task("PPO", total=arguments.steps)
        for step in range(arguments.steps):
            start = num_warmup + step * BATCH
            with session.step(step):
                row = ppo_step(tenants, dataset, train[start : start + BATCH], rng)
            progress.update(task, advance=1, description=f"PPO, reward {row['reward']:.3f}")
            if arguments.losses or (step + 1) % 10 == 0 or step + 1 == arguments.steps:
                console.print(
                    f"step {step + 1:3d}  reward {row['reward']:.3f}  kl {row['kl']:.4f}  "
                    f"actor loss {row['actor loss']!r}  critic loss {row['critic loss']!r}"
                )
        after = roll_out(tenants, dataset, held_out)[1].mean().item()
    return before, after


# -- what the log says ---------------------------------------------------------------------------------------------------


def summary(log: Path, device: EmulatedDevice, release: str, rewards: tuple[float, float], seconds: float) -> Table:
    """A table of rewards, of the device, and of what the audit log tells about moves."""
    records = list(rs.read_audit(log))
    committed = [record.event for record in records if record.name == "transition.committed"]
    swapped = [record.event for record in records if record.name == "reference.swapped"]
    table = Table(title=f"PPO with scopes, release={release}", show_header=False, min_width=60)
    table.add_row("held-out reward after warm-up", f"{rewards[0]:.3f}")
    table.add_row("held-out reward after PPO", f"{rewards[1]:.3f}  ({rewards[1] - rewards[0]:+.3f})")
    table.add_section()
    table.add_row("device capacity", f"{device.capacity:,}")
    table.add_row("device peak", f"{device.peak:,}")
    table.add_row("peak <= capacity", str(device.capacity is not None and device.peak <= device.capacity))
    table.add_section()
    table.add_row("transitions", f"{len(committed):,}")
    table.add_row("bytes moved", f"{sum(event.bytes_moved for event in committed):,}")
    table.add_row("bytes elided (not copied)", f"{sum(event.bytes_elided for event in committed):,}")
    table.add_row("bytes swapped for the reference", f"{sum(event.nbytes for event in swapped):,}")
    table.add_row("seconds moving, of all", f"{sum(event.seconds for event in committed):.1f} of {seconds:.1f}")
    table.add_row("log", str(log))
    table.add_row("picture: open it in a browser", str(draw(log)))
    return table


def draw(log: Path) -> Path:
    """Draw the run as one HTML page beside its log, as ``rl-session audit timeline`` does."""
    page = log.with_suffix(".html")
    page.write_text(timeline_page(rs.read_audit(log).dicts()), encoding="utf-8")
    return page


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="PPO steps (default 40)")
    parser.add_argument(
        "--warmup-steps", type=int, default=WARMUP_STEPS, help=f"supervised steps (default {WARMUP_STEPS})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of data, weights and sampling (default 0)")
    parser.add_argument(
        "--release",
        choices=("eager", "lazy"),
        default="lazy",
        help="when bytes leave the device: at each scope's end, or when room is short (default lazy)",
    )
    parser.add_argument("--losses", action="store_true", help="print every step's losses, to compare runs bit for bit")
    parser.add_argument("--log", type=Path, help="the audit log (default runs/ppo-<seed>.jsonl)")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1 or arguments.warmup_steps < 1:
        parser.error("--steps and --warmup-steps must be at least 1")
    return arguments


def main(argv: list[str] | None = None) -> tuple[float, float]:
    """Run the job and print the table; returns the held-out reward before and after."""
    arguments = parse(argv)
    # On a model this small one thread is as fast as two, and does not wait for cores that others use.
    torch.set_num_threads(1)
    console = Console(highlight=False)
    log = arguments.log or Path("runs") / f"ppo-{arguments.seed}.jsonl"
    device = EmulatedDevice()
    start = time.perf_counter()
    try:
        with rs.Session(log, release=arguments.release) as session:
            rewards = run(arguments, session, device, console)
    except KeyboardInterrupt:
        console.print(f"interrupted; the log is closed and readable: {log}")
        raise SystemExit(130) from None
    console.print(summary(log, device, arguments.release, rewards, time.perf_counter() - start))
    return rewards


if __name__ == "__main__":
    main()
