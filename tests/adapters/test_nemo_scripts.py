"""Random programs over tenants of the same GPUs, with failures: what is believed is true, what is computed is there.

The GPUs of the model refuse two tenants at once, and computing on what is away fails, as there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from legacy_model import CPU, FREED, GPU, NONE, Gpus, LegacyGeneration, LegacyPolicy, LegacyTQPolicy, LegacyValue

import rl_session as rs
from rl_session.adapters.nemo_rl import EngineScopes, scopes, share
from rl_session.audit.check import assert_log_is_consistent
from rl_session.lifecycle import Tier

TIERS = {GPU: Tier.DEVICE, CPU: Tier.HOST, FREED: Tier.NONE, NONE: Tier.NONE}
METHODS = (
    "prepare_for_training",
    "prepare_for_lp_inference",
    "offload_before_refit",
    "offload_after_refit",
    "prepare_for_inference",
    "finish_inference",
    "finish_training",
    "prepare_for_generation",
    "finish_generation",
)
COMPUTE = {
    "training_mode": "train",
    "logprob_mode": "get_logprobs",
    "inference_mode": "get_values",
    "awake": "generate",
}
SCOPES = (
    ("policy", "training_mode"),
    ("policy", "logprob_mode"),
    ("policy", "refit_mode"),
    ("policy", "offloaded"),
    ("value", "training_mode"),
    ("value", "inference_mode"),
    ("engine", "awake"),
)
step = st.one_of(
    st.tuples(st.just("scope"), st.sampled_from(SCOPES), st.lists(st.sampled_from(SCOPES), max_size=2)),
    st.tuples(st.just("refit"), st.booleans()),
    st.tuples(st.just("offload"), st.sampled_from(["policy", "value", "engine"])),
    st.tuples(st.just("fail"), st.sampled_from(METHODS), st.sampled_from(["before", "half", "after"])),
    st.tuples(st.just("recover")),
)


class Rig:
    def __init__(self, session: rs.Session, release: str, backend: str, **flags: bool) -> None:
        gpus = Gpus()
        policy_class = LegacyTQPolicy if backend == "megatron" else LegacyPolicy
        self.objects: dict[str, Any] = {
            "policy": policy_class(backend, gpus=gpus, **flags),
            "value": LegacyValue(backend, gpus=gpus, **flags),
            "engine": LegacyGeneration(gpus=gpus, awake=True),
        }
        sizes = {"params": 16, "optimizer": 96, "grads": 32}
        for name in ("policy", "value"):
            scopes(self.objects[name], session=session, nbytes=sizes)
        share(*self.objects.values(), session=session, release=release)  # type: ignore[arg-type]

    def enter(self, path: list[tuple[str, str]]) -> None:
        if not path:
            return
        (name, mode), *inner = path
        legacy = self.objects[name]
        with getattr(scopes(legacy), mode)() as handle:
            call = COMPUTE.get(mode)
            if call is not None:
                getattr(handle, call)()
            self.enter(inner)
            if call is not None:
                getattr(legacy, call)()

    def refit(self, *, works: bool) -> None:
        def transfer() -> None:
            if not works:
                raise ValueError

        scopes(self.objects["policy"]).refit(self.objects["engine"], transfer)

    def check(self) -> None:
        for legacy in self.objects.values():
            mine = scopes(legacy)
            for name, tier in mine.group.known().items():
                assert tier in (None, TIERS[legacy.state[name]]), (legacy, name)


@settings(max_examples=60, deadline=None)
@given(
    script=st.lists(step, max_size=12),
    release=st.sampled_from(["lazy", "eager"]),
    backend=st.sampled_from(["dtensor_v1", "dtensor_v2", "megatron"]),
    lp=st.booleans(),
)
def test_beliefs_are_true_and_nothing_is_computed_on_what_is_away(
    script: list[Any], release: str, backend: str, lp: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "audit.jsonl"
        with rs.Session(path) as session:
            rig = Rig(session, release, backend, offload_optimizer_for_logprob=lp)
            for action, *arguments in script:
                run_step(rig, action, arguments)
                rig.check()
            for legacy in rig.objects.values():
                legacy.heal()
                scopes(legacy).recover()
            for name, mode in SCOPES:  # whatever happened, everything works again
                rig.enter([(name, mode)])
                rig.check()
        assert_log_is_consistent(path)


def run_step(rig: Rig, action: str, arguments: list[Any]) -> None:
    try:
        if action == "scope":
            rig.enter([arguments[0], *arguments[1]])
        elif action == "refit":
            rig.refit(works=arguments[0])
        elif action == "offload":
            scopes(rig.objects[arguments[0]]).offload()
        elif action == "fail":
            for legacy in rig.objects.values():
                legacy.fail(arguments[0], when=arguments[1])
        else:
            for legacy in rig.objects.values():
                legacy.heal()
                scopes(legacy).recover()
    except (rs.RLSessionError, ValueError):
        assert action != "fail"


def test_the_engine_of_the_rig_is_one() -> None:
    assert isinstance(scopes(LegacyGeneration()), EngineScopes)
