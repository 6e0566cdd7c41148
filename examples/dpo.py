"""DPO on a tiny Llama: prefer sorted digits, with reference log-probabilities inside the training scope.

A step needs the reference's log-probabilities of the batch it is about to train on. The loop asks for them in
`training_mode()`: all inference calls are legal there, nothing leaves the device for them, and the live weights come back
bit for bit.

    python examples/dpo.py                    under a minute on one core
    python examples/dpo.py --steps 3          a smoke run

The loss: https://arxiv.org/abs/2305.18290, equation 7.

Shapes: P pairs, B = 2 P sequences (chosen, rejected, chosen, ...), S padded length, b sequences of one micro-batch, V vocabulary.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM

import rl_session as rs

SEP, NUM_DIGITS, LENGTH = 10, 10, 5
"""Tokens 0 to 9 are digits; a sequence is LENGTH digits, SEP, and the same digits in some order."""
NUM_PAIRS, NUM_EVAL, BETA, LR = 32, 256, 0.5, 1e-3

Batch = dict[str, Tensor]


def make_pairs(rng: random.Random, num_pairs: int) -> Batch:
    """Pairs in which the chosen answer is the sorted digits, and the rejected one is another order of them."""
    rows = []
    while len(rows) < 2 * num_pairs:
        digits = [rng.randrange(NUM_DIGITS) for _ in range(LENGTH)]
        chosen, rejected = sorted(digits), rng.sample(digits, LENGTH)
        if chosen != rejected:
            rows += [[*digits, SEP, *chosen], [*digits, SEP, *rejected]]
    ids_BS = torch.tensor(rows)
    mask_BS = torch.zeros(ids_BS.shape)
    mask_BS[:, LENGTH + 1 :] = 1
    return {
        "input_ids": ids_BS,
        "input_lengths": torch.full((len(rows),), ids_BS.shape[1]),
        "token_mask": mask_BS,
        "sample_mask": torch.ones(len(rows)),
    }


def answer_logprobs(logprobs_bS: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Log-probability of each answer, ``[b]``; ``logprobs_bS`` has the layout of ``get_logprobs``."""
    return (logprobs_bS * batch["token_mask"]).sum(1)


def margins(policy_b: Tensor, reference_b: Tensor) -> Tensor:
    """By how much the policy prefers the chosen answer more than the reference does, ``[b / 2]``."""
    gain_b = policy_b - reference_b
    return BETA * (gain_b[0::2] - gain_b[1::2])


def dpo_loss(
    logits: Tensor, batch: Mapping[str, Tensor], global_valid_seqs: float, global_valid_tokens: float
) -> tuple[Tensor, dict[str, Any]]:
    """Mean over the pairs of the global batch; a micro-batch holds whole pairs."""
    ids_bS = batch["input_ids"]
    next_bS = logits[:, :-1].log_softmax(-1).gather(-1, ids_bS[:, 1:, None]).squeeze(-1)
    policy_b = answer_logprobs(torch.nn.functional.pad(next_bS, (1, 0)), batch)
    margin = margins(policy_b, answer_logprobs(batch["reference_logprobs"], batch))
    loss = -logsigmoid(margin).sum() / (global_valid_seqs / 2)
    return loss, {"right": rs.mean((margin > 0).float().mean(), len(margin))}


def build_model() -> LlamaForCausalLM:
    """A Llama small enough for one core."""
    config = LlamaConfig(
        vocab_size=NUM_DIGITS + 1,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def preference(policy: rs.Policy, pairs: Batch) -> float:
    """The share of held-out pairs in which the sorted answer is the likelier one."""
    with policy.logprob_mode():
        logprobs = policy.get_logprobs(pairs)["logprobs"]
    likely = answer_logprobs(logprobs, pairs)
    return (likely[0::2] > likely[1::2]).float().mean().item()


def main(argv: list[str] | None = None) -> tuple[float, float]:
    """Run; returns the held-out preference before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="training steps (default 120)")
    parser.add_argument("--seed", type=int, default=0, help="of data and weights (default 0)")
    parser.add_argument(
        "--log", type=Path, default=Path("runs/dpo.jsonl"), help="the audit log (default runs/dpo.jsonl)"
    )
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    rng, console = random.Random(arguments.seed), Console(highlight=False)
    held_out = make_pairs(rng, NUM_EVAL)
    model = build_model()

    with rs.Session(arguments.log) as session:
        policy = session.attach(
            model, torch.optim.AdamW(model.parameters(), lr=LR), name="policy", reference="copy", max_grad_norm=1.0
        )
        before = preference(policy, held_out)
        with policy.training_mode():
            for step in track(range(arguments.steps), description="DPO"):
                batch = make_pairs(rng, NUM_PAIRS)
                with session.step(step):
                    batch |= policy.get_reference_policy_logprobs(batch)
                    result = policy.train(batch, dpo_loss, mbs=NUM_PAIRS)
        after = preference(policy, held_out)

    committed = [r.event for r in rs.read_audit(arguments.log) if r.name == "transition.committed"]
    table = Table(title="DPO with scopes", show_header=False, min_width=60)
    table.add_row("held-out pairs in which the sorted answer is likelier", f"{before:.3f}, then {after:.3f}")
    table.add_row("margins of the last batch that are right", f"{result['metrics']['right']:.3f}")
    table.add_row("transitions, whatever the number of steps", str(len(committed)))
    table.add_row("log", str(arguments.log))
    console.print(table)
    return before, after


if __name__ == "__main__":
    main()
