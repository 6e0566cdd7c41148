"""Who shares with nobody yet may join others later, whoever was named alone before."""

from __future__ import annotations

import pytest
from legacy_model import Gpus, LegacyPolicy, LegacyValue

import rl_session as rs
from rl_session.adapters.nemo_rl import scopes, share


def test_groups_of_one_give_way_to_a_group_of_several() -> None:
    gpus = Gpus()
    policy, value = LegacyPolicy("megatron", gpus=gpus), LegacyValue("megatron", gpus=gpus)
    share(policy)
    share(value)
    share(policy, value)
    with scopes(value).training_mode():
        value.train(0, None)
    with scopes(policy).training_mode():
        policy.train(0, None)
    assert "finish_training()" in value.log, "the policy's scope sent the value away"


def test_groups_of_several_do_not() -> None:
    gpus = Gpus()
    a, b, c, d = (LegacyPolicy("megatron", gpus=gpus) for _ in range(4))
    share(a, b)
    share(c, d)
    with pytest.raises(rs.ConfigError, match="different others"):
        share(a, c)
