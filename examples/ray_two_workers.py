"""One policy on two Ray workers, sharded with FSDP2; half-way one of them is killed, and the run goes on.

python examples/ray_two_workers.py              half a minute on a CPU: starts Ray on this machine, nothing to download
python examples/ray_two_workers.py --steps 40   longer; --audit run.jsonl keeps a log to look at with `rl-session audit`
python examples/ray_two_workers.py --unharmed   nobody is killed: the same losses
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import rl_session as rs
from rl_session.testing import EmulatedDevice, rank_device

VOCABULARY, WIDTH = 64, 128


class TinyLM(nn.Module):
    """Logits ``[b, S, V]``. FSDP2 shards each of ``layers`` by itself, then the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, **_: Tensor) -> Tensor:
        """``input_ids [b, S]``."""
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


def loss_fn(logits: Tensor, batch: dict[str, Tensor], seqs: float, tokens: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean next-token loss over the global batch: each worker adds the share of its rows."""
    nll = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    return nll.sum() / tokens, {}


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="training steps, at least 1 (default 8)")
    parser.add_argument("--unharmed", action="store_true", help="kill nobody")
    parser.add_argument("--audit", metavar="FILE", help="keep an audit log there")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: at least 1")
    return arguments


def main(argv: list[str] | None = None) -> list[float]:
    """Run; returns the losses."""
    arguments = parsed(argv)
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(0, VOCABULARY, (7, 12)), "input_lengths": torch.full((7,), 12)}
    killed_at = None if arguments.unharmed else arguments.steps // 2
    losses: list[float] = []
    table = Table("step", "loss", "what happened", title="Two workers", title_justify="left")

    # -- what a user writes: from here ------------------------------------------------------------------------
    with tempfile.TemporaryDirectory() as folder, rs.Session(arguments.audit) as session:
        workers = rs.RayWorkers(2, resources={"CPU": 0.5}, timeout_seconds=120)
        policy = session.policy(
            model=TinyLM,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
            workers=workers,
            device=EmulatedDevice(),  # leave it out on machines with GPUs
        )
        policy.offload()
        policy.save_checkpoint(Path(folder) / "first")
        for step in track(range(arguments.steps), description="training", disable=arguments.steps < 2):
            if step == killed_at:
                rank_device(policy, 1).die("copy_in")  # the process ends in its next transition, as by kill -9
            note = ""
            try:
                with policy.training_mode():
                    result = policy.train(batch, loss_fn)
            except rs.FaultedError as error:
                note = next(fact for fact in error.facts if "lost" in fact)[:40] + "..., recovered from the checkpoint"
                policy.recover()  # all workers anew, from what was saved last
                with policy.training_mode():
                    result = policy.train(batch, loss_fn)
            policy.save_checkpoint(Path(folder) / f"{step}")
            losses += result["loss"].tolist()
            table.add_row(str(step), f"{losses[-1]:.4f}", note)
    # -- to here ----------------------------------------------------------------------------------------------

    Console().print(table)
    return losses


if __name__ == "__main__":
    main()
