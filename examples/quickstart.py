"""Attach a model, open three scopes, look at where its bytes are in each.

python examples/quickstart.py              a few seconds on a CPU; nothing to download
python examples/quickstart.py --steps 20   longer; --audit run.jsonl keeps a log to look at with `rl-session audit`
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import rl_session as rs

VOCABULARY, WIDTH = 64, 256


class TinyLM(nn.Module):
    """Logits ``[b, S, V]`` of the next token from the tokens before: enough of a language model to train."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, **_: Tensor) -> Tensor:
        """``input_ids [b, S]``."""
        return self.head(self.mix(self.embed(input_ids))[0])


def loss_fn(logits: Tensor, batch: dict[str, Tensor], seqs: float, tokens: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean next-token loss over the global batch."""
    nll = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    return nll.sum() / tokens, {}


def main(argv: list[str] | None = None) -> list[float]:
    """Run; returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="training steps (default 5)")
    parser.add_argument("--audit", metavar="FILE", help="keep an audit log there")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    torch.manual_seed(0)
    torch.set_num_threads(1)

    # -- what a user writes: from here ------------------------------------------------------------------------
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = {"input_ids": torch.randint(0, VOCABULARY, (16, 12)), "input_lengths": torch.full((16,), 12)}
    placements, losses, likely = {}, [], []
    with rs.Session(arguments.audit) as session:
        policy = session.attach(model, optimizer, name="policy")
        for step in track(range(arguments.steps), description="training", disable=arguments.steps < 2):
            with session.step(step):
                with policy.logprob_mode():
                    likely += [policy.get_logprobs(batch)["logprobs"].sum()]
                    placements["logprob_mode()"] = policy.placement
                with policy.training_mode():
                    losses += policy.train(batch, loss_fn)["loss"].tolist()
                    placements["training_mode()"] = policy.placement
                with policy.refit_mode():
                    placements["refit_mode()"] = policy.placement
        placements["outside"] = policy.placement
        with policy.logprob_mode():
            likely += [policy.get_logprobs(batch)["logprobs"].sum()]
        moved = policy.device.bytes_in + policy.device.bytes_out
    # -- to here ----------------------------------------------------------------------------------------------

    table = Table("component", *placements, title="Where the bytes are", title_justify="left")
    for component in ("params", "grads", "optimizer"):
        table.add_row(component, *(placement[component].value for placement in placements.values()))
    console = Console()
    console.print(table)
    console.print(
        f"loss {losses[0]:.3f} to {losses[-1]:.3f}, log-probability of the batch {likely[0]:.0f} to {likely[-1]:.0f}"
    )
    console.print(f"{moved:,} bytes copied between the device and the host, as the device counted")
    return losses


if __name__ == "__main__":
    main()
