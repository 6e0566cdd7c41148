"""A process killed in the middle of its work leaves a log that reads, and says exactly what is unfinished."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from rl_session.audit import read_audit
from rl_session.audit.check import check

# One process imports torch and forks a writer for each kill: the writer trains in every mode until it is killed. What it
# had written when `write` returned goes into shared memory, so that a line that is missing would be known.
KILLER = """
import json, mmap, os, random, signal, struct, sys, time
from pathlib import Path
import torch
import rl_session as rs
from rl_session.audit import log as audit_log
from rl_session.testing import EmulatedDevice

write = audit_log.AuditLog.write

class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11)
    def forward(self, input_ids):
        return self.head(self.embed(input_ids))

def loss(logits, batch, seqs, tokens):
    return logits.square().sum() / tokens, {}

BATCH = {"input_ids": torch.arange(20).reshape(4, 5) % 11, "input_lengths": torch.full((4,), 5)}

def work(path, shared, rounds=10**9):
    def counted(self, event, **fields):
        seq = write(self, event, **fields)
        shared[:8] = struct.pack("q", seq + 1)
        return seq
    audit_log.AuditLog.write = counted
    session = rs.Session(path)
    model = Tiny()
    policy = session.attach(model, torch.optim.AdamW(model.parameters()), device=EmulatedDevice(), reference="copy")
    n = 0
    while n < rounds:
        n += 1
        with session.step(n), policy.training_mode():
            policy.train(BATCH, loss)
            step = policy.begin_step()
            step.forward_backward(BATCH, loss)
            with policy.logprob_mode():
                policy.get_reference_policy_logprobs(BATCH)
                with policy.offloaded():
                    pass
            step.commit()

folder, num, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
generator = random.Random(seed)
torch.set_num_threads(1)
work(folder / "warm.jsonl", bytearray(8), rounds=1)  # what torch imports late is imported here, once
audit_log.AuditLog.write = write
counts = []
for k in range(num):
    shared = mmap.mmap(-1, 8)
    child = os.fork()
    if child == 0:
        try:
            work(folder / f"{k}.jsonl", shared)
        finally:
            os._exit(1)
    while struct.unpack("q", shared[:8])[0] < 3:
        time.sleep(0.001)
        if os.waitpid(child, os.WNOHANG)[0]:
            sys.exit("the writer ended by itself")
    time.sleep(generator.uniform(0.0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    counts.append(struct.unpack("q", shared[:8])[0])
print(json.dumps(counts))
"""


def open_at_end(path: Path) -> set[tuple[str, Any]]:
    """What has begun and not ended in a file, worked out without the library."""
    left: dict[tuple[str, Any], int] = {}
    for raw in path.read_bytes().splitlines():
        r = orjson.loads(raw)
        event, policy = r["event"], r["policy"]
        kind, _, what = event.partition(".")
        key = {
            "session": ("session", None),
            "policy": ("policy", policy),
            "scope": ("scope", r["scope_id"]),
            "transition": ("transition", r["transition_id"]),
            "step": ("step", policy),
            "reference": ("call", policy),
            "call": ("call", policy),
        }.get(kind)
        if key is None:
            continue
        begins = what in ("opened", "created", "entered", "started", "swapped")
        left.update({key: 1}) if begins else left.pop(key, None)
    return set(left)


@pytest.mark.parametrize("num", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_what_a_killed_writer_leaves_reads_and_names_exactly_what_is_unfinished(tmp_path: Path, num: int) -> None:
    seed = random.randrange(2**32)  # pytest-randomly's seed is in the header of the run
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", KILLER, str(tmp_path), str(num), str(seed)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environ, timeout=250)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert len(counts) == num

    kinds: set[str] = set()
    for k, count in enumerate(counts):
        path = tmp_path / f"{k}.jsonl"
        reader = read_audit(path)
        num_records = sum(1 for _ in reader)
        assert num_records - count in (0, 1), "a record that was written is in the file"
        assert (reader.torn, reader.skipped) == (0, 0)
        result = check(path)
        assert not result.findings, result.findings
        assert not result.ok
        identity = {"session": lambda _: None, "scope": lambda u: u.id, "transition": lambda u: u.id}
        named = {(u.kind, identity.get(u.kind, lambda u: u.policy)(u)) for u in result.unfinished}
        assert named == open_at_end(path)
        assert len(named) == len(result.unfinished)
        kinds |= {kind for kind, _ in named}
    assert {"session", "policy", "scope"} <= kinds
