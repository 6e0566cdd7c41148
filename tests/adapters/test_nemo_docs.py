"""Every Python block of docs/nemo-rl.md runs, against the model of the legacy objects."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from legacy_model import Gpus, LegacyGeneration, LegacyTQPolicy, LegacyValue

import rl_session as rs
from rl_session.adapters.nemo_rl import scopes

DOCS = Path(__file__).parents[2] / "docs" / "nemo-rl.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)


class Policy(LegacyTQPolicy):
    def get_logprobs_from_meta(self, meta: Any) -> None:
        self.get_logprobs(meta)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs(number: int) -> None:
    gpus = Gpus()
    names: dict[str, Any] = {
        "scopes": scopes,
        "policy": Policy(gpus=gpus),
        "value_model": LegacyValue("megatron", gpus=gpus),
        "policy_generation": LegacyGeneration(gpus=gpus),
        "transfer": lambda: None,
        "refit_policy_generation": lambda policy, generation, colocated: policy.offload_before_refit(),
        "colocated": True,
        "batch": {},
        "prompts": {},
        "chunks": [1, 2],
        "loss_fn": None,
        "value_loss": None,
    }
    if "share" not in BLOCKS[number]:  # one object alone
        gpus.tenants.clear()
    exec(BLOCKS[number], names)  # noqa: S102


def test_the_guards_message_is_as_shown() -> None:
    policy = Policy()
    mine = scopes(policy, found="host", base="offloaded")
    with pytest.raises(rs.ModeError) as raised:
        mine.check("get_logprobs")
    shown = DOCS.read_text(encoding="utf-8")
    lines = str(raised.value).splitlines()
    assert all(line in shown for line in (lines[0], lines[1], *lines[3:]))
