"""Tokens per second of a real training step: offloading eagerly, lazily, through the manual API, and never.

    python benchmarks/training.py
    python benchmarks/training.py --hidden 512 --layers 8

A step is what a GRPO loop does with a policy: log-probabilities of the batch in one phase, training in the next, weights
handed on in the third. The same Llama, data, optimizer and seed each way, taken in turns; everything fits on the device.

    never    ``release="never"``: nothing is ever moved
    lazy     ``release="lazy"``: a phase leaves behind what it brought in, until somebody needs the room
    eager    ``release="eager"``: memory is free whenever a block ends
    legacy   the calls of a manual loop, on ``rl_session_migrate.LegacyPolicy``

Losses have to be the same to the last bit each way, or the benchmark fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import attrs
import torch
from harness import interleave, parser, report, show
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import rl_session as rs
from rl_session_migrate import LegacyPolicy

VOCABULARY, LENGTH, ROWS, MICRO = 2048, 64, 32, 8
"""A batch is ROWS sequences of LENGTH tokens; training takes MICRO of them at a time."""
GOAL = 0.98
"""The least share of "never" that "lazy" has to reach."""

Way = Literal["never", "lazy", "eager", "legacy"]
WAYS: tuple[Way, ...] = ("never", "lazy", "eager", "legacy")


def make_batch() -> dict[str, Tensor]:
    """Random tokens: what they say does not change the time they take."""
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator),
        "input_lengths": torch.full((ROWS,), LENGTH),
        "token_mask": torch.ones(ROWS, LENGTH),
        "sample_mask": torch.ones(ROWS),
    }


def loss_fn(
    logits: Tensor, batch: dict[str, Tensor], global_valid_seqs: float, global_valid_tokens: float
) -> tuple[Tensor, dict[str, Any]]:
    """Mean next-token loss; the same for scopes and for the manual API."""
    del global_valid_seqs
    nll = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    return nll.sum() / global_valid_tokens, {}


@attrs.define
class Loop:
    """One policy and how its steps are run."""

    session: rs.Session
    policy: rs.Policy
    step: Callable[[], None]
    losses: list[float]

    @property
    def nbytes_moved(self) -> int:
        """Bytes copied so far, as the device counts them."""
        device = self.policy.device
        return int(device.bytes_in + device.bytes_out)  # type: ignore[attr-defined]


def build(way: Way, hidden: int, layers: int) -> Loop:
    """A loop over a fresh model, the same for every way."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=8,
            max_position_embeddings=LENGTH,
        )
    )
    session = rs.Session(release="eager" if way == "legacy" else way)
    policy = session.attach(model, torch.optim.AdamW(model.parameters(), lr=1e-4), name=way)
    losses: list[float] = []
    batch = make_batch()

    def scoped() -> None:
        with policy.logprob_mode():
            policy.get_logprobs(batch)
        with policy.training_mode():
            losses.extend(policy.train(batch, loss_fn, mbs=MICRO)["loss"].tolist())
        with policy.refit_mode():
            pass

    if way == "legacy":
        return Loop(session, policy, _by_hand(LegacyPolicy(policy), batch, losses), losses)
    return Loop(session, policy, scoped, losses)


def _by_hand(policy: LegacyPolicy, batch: dict[str, Tensor], losses: list[float]) -> Callable[[], None]:
    def step() -> None:
        policy.prepare_for_lp_inference()
        policy.get_logprobs(batch)
        policy.prepare_for_training()
        losses.extend(policy.train(batch, loss_fn, mbs=MICRO)["loss"].tolist())
        policy.offload_before_refit()
        policy.offload_after_refit()

    return step


def measure(options: Any) -> list[dict[str, Any]]:
    """One row a way.

    Raises:
        RuntimeError: Losses differ.
    """
    loops = {way: build(way, options.hidden, options.layers) for way in WAYS}
    for loop in loops.values():
        loop.step()  # the optimizer state comes to be
    before = {way: loop.nbytes_moved for way, loop in loops.items()}
    samples = interleave({way: loop.step for way, loop in loops.items()}, repeats=options.repeats)
    steps = options.repeats + 1
    for way, loop in loops.items():
        if loop.losses != loops["never"].losses:
            message = f"losses of {way} differ from never offloading: {loop.losses} and {loops['never'].losses}"
            raise RuntimeError(message)
    rows = [
        {
            "way": way,
            "tokens/s": ROWS * LENGTH / samples[way].median,
            "of never": samples["never"].median / samples[way].median,
            "goal": GOAL if way == "lazy" else "",
            "MiB a step": round((loops[way].nbytes_moved - before[way]) / steps / 2**20, 1),
            "spread": samples[way].spread,
        }
        for way in WAYS
    ]
    for loop in loops.values():
        loop.session.close()
    return rows


def main(argv: list[str] | None = None) -> None:
    """Run."""
    made = parser(str(__doc__))
    made.add_argument("--hidden", type=int, default=256, help="hidden size (default 256)")
    made.add_argument("--layers", type=int, default=4, help="layers (default 4)")
    options = made.parse_args(argv)
    if options.smoke:
        options.hidden, options.layers, options.repeats = 64, 2, 1
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)  # the manual calls are the point here
    rows = measure(options)
    show("A training step", rows, note="medians of one run, ways taken in turns; losses equal to the last bit")
    report({"training": rows}, options.json)


if __name__ == "__main__":
    main()
