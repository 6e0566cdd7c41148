"""GRPO on one small causal LM: spell a word backward, scored by reasoning-gym.

The model (a Llama of 0.9 million parameters with random weights) reads characters. A short supervised warm-up leaves it right
about half of the time; GRPO then raises the reward on words that neither phase has seen. The loop has the shape of a real one:
generate, score, log-probabilities under the policy and under the reference (the model as the warm-up left it), train. It knows
nothing of placement: each phase says its mode, and the scope does the moves.

    python examples/grpo.py                  about a minute and a half on one core
    python examples/grpo.py --no-offload     the same losses to the last bit, and nothing moves
    python examples/grpo.py --steps 2 --warmup-steps 2     a smoke run

Group-relative advantages: https://arxiv.org/abs/2402.03300, section 4.1.
The KL estimate: http://joschu.net/blog/kl-approx.html (k3).

Shapes: B sequences, S padded length, b sequences of one micro-batch, V vocabulary, P prompts, G samples of one prompt.
"""

from __future__ import annotations

import argparse
import random
import string
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import rl_session as rs
from rl_session.audit.timeline import timeline_page

PAD, EOS, SEP = 0, 1, 2
ALPHABET = string.ascii_lowercase
MIN_WORD, MAX_WORD = 3, 5
NUM_PROMPTS, NUM_SAMPLES, NUM_EVAL = 32, 8, 256
WARMUP_STEPS, WARMUP_BATCH = 45, 128
WARMUP_LR, GRPO_LR = 2e-3, 2e-4
CLIP, KL_WEIGHT, MAX_GRAD_NORM = 0.2, 0.01, 1.0
GBS, MBS = 128, 64

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


def grpo_loss(
    logits: Tensor, batch: Mapping[str, Tensor], global_valid_seqs: float, global_valid_tokens: float
) -> tuple[Tensor, dict[str, Any]]:
    """Clipped policy gradient plus KL to the reference, a mean over the response tokens of the global batch."""
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    logprobs = next_token_logprobs(logits, batch["input_ids"])
    advantages = batch["advantages"][:, None]

    ratio = (logprobs - batch["prev_logprobs"][:, 1:]).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    log_ratio = batch["reference_logprobs"][:, 1:] - logprobs
    kl = log_ratio.exp() - 1 - log_ratio

    loss = ((KL_WEIGHT * kl - surrogate) * mask).sum() / global_valid_tokens
    return loss, {"kl": token_mean(kl, mask), "clipped": token_mean(((ratio - 1).abs() > CLIP).float(), mask)}


def token_mean(values: Tensor, mask: Tensor) -> Any:
    """A metric averaged over tokens, also across micro-batches of different sizes."""
    num_tokens = mask.sum()
    return rs.mean((values * mask).sum() / num_tokens.clamp(min=1), num_tokens)


# -- the phases of the loop ----------------------------------------------------------------------------------------------


def build_model(seed: int, device: str) -> LlamaForCausalLM:
    """A Llama small enough for one core."""
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
    )
    return LlamaForCausalLM(config).to(device)


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


def warm_up(policy: rs.Policy, entries: list[Entry], progress: Progress) -> None:
    """A few supervised steps: enough for the form of an answer and about half of its letters."""
    starts = range(0, len(entries), WARMUP_BATCH)
    with policy.training_mode():
        for start in progress.track(starts, description="warm-up"):
            policy.train(supervised_batch(entries[start : start + WARMUP_BATCH]), cross_entropy_loss)


def roll_out(policy: rs.Policy, engine: rs.InProcessEngine, dataset: Any, entries: list[Entry]) -> tuple[Batch, Tensor]:
    """Sample one response for each entry and score it; returns the batch and the rewards ``[B]``."""
    prompts = [prompt_ids(entry) for entry in entries]
    prompt_lengths_B = lengths(prompts)
    with policy.generation_mode():
        out = engine.generate({"input_ids": pad(prompts), "input_lengths": prompt_lengths_B})
    ids_BS, lengths_B = out["output_ids"], out["unpadded_sequence_lengths"]
    responses = [ids_BS[i, len(prompt) : lengths_B[i]].tolist() for i, prompt in enumerate(prompts)]
    rewards = [dataset.score_answer(decode(ids), entry) for ids, entry in zip(responses, entries, strict=True)]
    batch = {
        "input_ids": ids_BS,
        "input_lengths": lengths_B,
        "token_mask": response_mask(prompt_lengths_B, lengths_B, ids_BS.shape[1]),
        "sample_mask": torch.ones(len(entries)),
        "generation_logprobs": out["logprobs"],
    }
    return batch, torch.tensor(rewards, dtype=torch.float32)


def group_advantages(rewards_B: Tensor) -> Tensor:
    """How much better than its group each sample is, in standard deviations; a group of equals teaches nothing."""
    rewards_PG = rewards_B.view(-1, NUM_SAMPLES)
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    return (centred_PG / (rewards_PG.std(1, keepdim=True) + 1e-4)).flatten()


def shuffled(batch: Batch, rng: random.Random) -> Batch:
    """Mix the groups, so that every optimizer step of one ``train`` sees samples of every prompt."""
    order = list(range(len(batch["input_ids"])))
    rng.shuffle(order)
    return {key: value[order] for key, value in batch.items()}


def grpo_step(
    policy: rs.Policy, engine: rs.InProcessEngine, dataset: Any, entries: list[Entry], rng: random.Random
) -> dict[str, float]:
    """Generate, score, two sets of log-probabilities, train."""
    batch, rewards_B = roll_out(policy, engine, dataset, [entry for entry in entries for _ in range(NUM_SAMPLES)])
    batch["advantages"] = group_advantages(rewards_B)
    batch = shuffled(batch, rng)
    with policy.logprob_mode():
        batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
        batch["reference_logprobs"] = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
    with policy.training_mode():
        result = policy.train(batch, grpo_loss, gbs=GBS, mbs=MBS)
    return {"reward": rewards_B.mean().item(), "loss": result["loss"].mean().item(), **result["metrics"]}


def run(arguments: argparse.Namespace, session: rs.Session, console: Console) -> tuple[float, float]:
    """The whole job; returns the held-out reward before and after GRPO."""
    num_warmup = arguments.warmup_steps * WARMUP_BATCH
    dataset, train, held_out = build_task(arguments.seed, num_warmup + arguments.steps * NUM_PROMPTS)
    model = build_model(arguments.seed, arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARMUP_LR, weight_decay=0.0)
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        policy = session.attach(model, optimizer, name="warm-up", max_grad_norm=MAX_GRAD_NORM)
        warm_up(policy, train[:num_warmup], progress)
        policy.detach()

        # The moments stay: a fresh AdamW begins with a kick away from the reference.
        optimizer.param_groups[0]["lr"] = GRPO_LR
        policy = session.attach(model, optimizer, name="actor", max_grad_norm=MAX_GRAD_NORM, reference="copy")
        engine = rs.InProcessEngine(
            policy, max_new_tokens=MAX_WORD + 2, stop_ids=[EOS], pad_id=PAD, seed=arguments.seed
        )
        before = roll_out(policy, engine, dataset, held_out)[1].mean().item()
        rng = random.Random(arguments.seed)
        task = progress.add_task("GRPO", total=arguments.steps)
        for step in range(arguments.steps):
            start = num_warmup + step * NUM_PROMPTS
            with session.step(step):
                row = grpo_step(policy, engine, dataset, train[start : start + NUM_PROMPTS], rng)
            progress.update(task, advance=1, description=f"GRPO, reward {row['reward']:.3f}")
            if arguments.losses or (step + 1) % 10 == 0 or step + 1 == arguments.steps:
                console.print(
                    f"step {step + 1:3d}  reward {row['reward']:.3f}  kl {row['kl']:.4f}  loss {row['loss']!r}"
                )
        after = roll_out(policy, engine, dataset, held_out)[1].mean().item()
    return before, after


# -- what the log says ---------------------------------------------------------------------------------------------------


def summary(log: Path, rewards: tuple[float, float], seconds: float) -> Table:
    """A table of rewards, and of what the audit log tells about moves."""
    transitions: Counter[str] = Counter()
    moved = elided = swapped = 0
    moving = 0.0
    for record in rs.read_audit(log):
        if record.name == "transition.committed":
            transitions[f"{record.event.from_mode} to {record.event.to_mode}"] += 1
            moved += record.event.bytes_moved
            elided += record.event.bytes_elided
            moving += record.event.seconds
        elif record.name == "reference.swapped":
            swapped += record.event.nbytes
    table = Table(title="GRPO with scopes", show_header=False, min_width=60)
    table.add_row("held-out reward after warm-up", f"{rewards[0]:.3f}")
    table.add_row("held-out reward after GRPO", f"{rewards[1]:.3f}  ({rewards[1] - rewards[0]:+.3f})")
    table.add_section()
    for name, count in transitions.most_common():
        table.add_row(f"transitions {name}", str(count))
    table.add_section()
    table.add_row("bytes moved", f"{moved:,}")
    table.add_row("bytes elided (not copied)", f"{elided:,}")
    table.add_row("bytes swapped for the reference", f"{swapped:,}")
    table.add_row("seconds moving, of all", f"{moving:.1f} of {seconds:.1f}")
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
    parser.add_argument("--steps", type=int, default=80, help="GRPO steps (default 80)")
    parser.add_argument(
        "--warmup-steps", type=int, default=WARMUP_STEPS, help=f"supervised steps (default {WARMUP_STEPS})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of data, weights and sampling (default 0)")
    parser.add_argument("--device", default="cpu", help="cpu (an emulated device) or cuda (default cpu)")
    parser.add_argument("--no-offload", action="store_true", help="never move anything; the losses are the same")
    parser.add_argument("--losses", action="store_true", help="print every step's loss, to compare runs bit for bit")
    parser.add_argument("--log", type=Path, help="the audit log (default runs/grpo-<seed>.jsonl)")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1 or arguments.warmup_steps < 1:
        parser.error("--steps and --warmup-steps must be at least 1")
    if arguments.device != "cpu" and not (arguments.device.startswith("cuda") and torch.cuda.is_available()):
        parser.error(f"--device {arguments.device}: not here; `rl-session doctor` says what this machine has")
    return arguments


def main(argv: list[str] | None = None) -> tuple[float, float]:
    """Run the job and print the table; returns the held-out reward before and after."""
    arguments = parse(argv)
    # On a model this small one thread is as fast as two, and does not wait for cores that others use.
    torch.set_num_threads(1)
    console = Console(highlight=False)
    log = arguments.log or Path("runs") / f"grpo-{arguments.seed}.jsonl"
    start = time.perf_counter()
    try:
        with rs.Session(log, release="never" if arguments.no_offload else "eager") as session:
            rewards = run(arguments, session, console)
    except KeyboardInterrupt:
        console.print(f"interrupted; the log is closed and readable: {log}")
        raise SystemExit(130) from None
    console.print(summary(log, rewards, time.perf_counter() - start))
    return rewards


if __name__ == "__main__":
    main()
