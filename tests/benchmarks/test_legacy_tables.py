"""The benchmark's model of the manual calls does what the calls are known to do, and counts what that copies."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from bytes_moved.legacy import EFFECTS, LegacyEngine, LegacyTrainer
from bytes_moved.sizes import sizes_of
from hypothesis import given, settings
from hypothesis import strategies as st
from legacy_model import LegacyGeneration, LegacyPolicy, LegacyValue

from rl_session.testing import EmulatedDevice

SIZES = {backend: sizes_of("8b", backend, 8, scale=2**24) for backend in ("dtensor", "megatron")}  # type: ignore[arg-type]

# What each method does to parameters, gradients and optimizer state: > onto the device, < to the host, 0 destroyed, z made
# as zeros if it was destroyed, = untouched. After a slash, what holds if the flag is the other way round.
POLICY = {
    "dtensor": {
        "prepare_for_training": "P> G> O>",
        "prepare_for_lp_inference": "P> G> O=",
        "prepare_for_lp_inference(logprob)": "P> G> O<",
        "prepare_for_lp_inference(logprob, keep)": "P> G> O=",
        "finish_inference": "P< G< O=",
        "offload_before_refit": "P= G= O<",
        "offload_before_refit(not refit)": "P= G= O<",
        "offload_after_refit": "P< G< O<",
        "offload_to_cpu": "P< G< O<",
        "finish_training": "P= G= O=",
    },
    "megatron": {
        "prepare_for_training": "P> Gz O>",
        "prepare_for_lp_inference": "P> G0 O=",
        "prepare_for_lp_inference(keep)": "P> G= O=",
        "prepare_for_lp_inference(logprob)": "P> G0 O<",
        "prepare_for_lp_inference(logprob, keep)": "P> G= O=",
        "finish_inference": "P< G= O=",
        "offload_before_refit": "P= G0 O<",
        "offload_before_refit(not refit)": "P= G0 O=",
        "offload_after_refit": "P< G0 O<",
        "offload_after_refit(not refit)": "P< G0 O=",
        "offload_to_cpu(not refit)": "P< G0 O=",
        "finish_training": "P= G= O=",
    },
}
VALUE = {
    "dtensor": {
        "prepare_for_training": "P> G> O>",
        "prepare_for_inference": "P> G> O=",
        "finish_inference": "P< G< O=",
        "finish_training": "P< G< O<",
    },
    "megatron": {
        "prepare_for_training": "P> Gz O>",
        "prepare_for_inference": "P> G0 O=",
        "finish_inference": "P< G= O=",
        "finish_training": "P< G0 O<",
    },
}
NAMES = {"P": "params", "G": "grads", "O": "optimizer"}
FLAGS = {"logprob": ("offload_optimizer_for_logprob", True), "not refit": ("offload_optimizer_for_refit", False)}
CASES = [
    (backend, kind, call, effect)
    for kind, table in (("policy", POLICY), ("value", VALUE))
    for backend, methods in table.items()
    for call, effect in methods.items()
]


def after(effect: str, before: str) -> str:
    match effect:
        case ">":
            return "device" if before == "host" else before
        case "<":
            return "host" if before == "device" else before
        case "0":
            return "none"
        case "z":
            return "device" if before == "none" else before
    return before


def place(trainer: LegacyTrainer, where: dict[str, str]) -> None:
    for name, part in trainer.parts.items():
        {
            "device": lambda p: (p.make(), p.onload()),
            "host": lambda p: (p.make(), p.offload()),
            "none": lambda p: p.free(),
        }[where[name]](part)


@pytest.mark.parametrize(("backend", "kind", "call", "effect"), CASES)
def test_each_method_moves_what_the_contract_says(backend: Any, kind: Any, call: str, effect: str) -> None:
    method, _, arguments = call.rstrip(")").partition("(")
    said = [word for word in arguments.split(", ") if word]
    flags = dict(FLAGS[word] for word in said if word in FLAGS)
    keywords = {"keep_train_buffers": True} if "keep" in said else {}
    effects = dict(re.findall(r"([PGO])(.)", effect))
    for params in ("device", "host"):
        for grads in ("device", "none") if backend == "megatron" else ("device", "host", "none"):
            for optimizer in ("device", "host"):
                before = {"params": params, "grads": grads, "optimizer": optimizer}
                device = EmulatedDevice()
                trainer = LegacyTrainer(backend, kind, device, SIZES[backend], **flags)
                place(trainer, before)
                copied_in, copied_out = device.bytes_in, device.bytes_out
                trainer.call(method, **keywords)
                want = {NAMES[key]: after(how, before[NAMES[key]]) for key, how in effects.items()}
                assert {name: part.where for name, part in trainer.parts.items()} == want
                came = [n for n in want if (before[n], want[n]) == ("host", "device")]
                left = [n for n in want if (before[n], want[n]) == ("device", "host")]
                assert device.bytes_in - copied_in == sum(trainer.parts[n].nbytes for n in came)
                assert device.bytes_out - copied_out == sum(trainer.parts[n].nbytes for n in left)
                assert device.resident_bytes == sum(p.nbytes for p in trainer.parts.values() if p.where == "device")


def test_the_tables_name_no_method_that_the_contract_does_not() -> None:
    for (backend, kind), methods in EFFECTS.items():
        stated = {call.partition("(")[0] for call in (POLICY if kind == "policy" else VALUE)[backend]}
        assert set(methods) <= stated


POLICY_CALLS = ["prepare_for_training", "prepare_for_lp_inference", "finish_inference", "offload_before_refit"]
POLICY_CALLS += ["offload_after_refit", "offload_to_cpu", "finish_training"]
VALUE_CALLS = ["prepare_for_training", "prepare_for_inference", "finish_inference", "finish_training"]
SAME = {"gpu": "device", "cpu": "host", "freed": "none", "none": "none"}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_script_ends_where_the_model_of_the_legacy_objects_ends(data: st.DataObject) -> None:
    backend = data.draw(st.sampled_from(["dtensor", "megatron"]))
    kind = data.draw(st.sampled_from(["policy", "value"]))
    flags = {
        "offload_optimizer_for_logprob": data.draw(st.booleans()),
        "offload_optimizer_for_refit": data.draw(st.booleans()),
    }
    objects: Any = LegacyPolicy if kind == "policy" else LegacyValue
    model = objects("megatron" if backend == "megatron" else "dtensor_v2", **flags)
    ours = LegacyTrainer(backend, kind, EmulatedDevice(), SIZES[backend], **flags)  # type: ignore[arg-type]
    for call in data.draw(st.lists(st.sampled_from(POLICY_CALLS if kind == "policy" else VALUE_CALLS), max_size=12)):
        keep = {"keep_train_buffers": True} if call == "prepare_for_lp_inference" and data.draw(st.booleans()) else {}
        getattr(model, call)(**keep)
        ours.call(call, **keep)
        assert {name: part.where for name, part in ours.parts.items()} == {n: SAME[model.state[n]] for n in ours.parts}


def test_a_reference_pass_saves_the_weights_brings_the_reference_and_brings_them_back() -> None:
    device = EmulatedDevice()
    policy = LegacyTrainer("dtensor", "policy", device, SIZES["dtensor"])
    before, nbytes = policy.parts["params"].read(), SIZES["dtensor"].params
    counted = device.bytes_in, device.bytes_out
    policy.infer_reference()
    assert (device.bytes_in - counted[0], device.bytes_out - counted[1]) == (2 * nbytes, nbytes)
    assert torch.equal(policy.parts["params"].read(), before)


def test_bytes_survive_every_move_and_only_gradients_are_destroyed() -> None:
    device = EmulatedDevice()
    device.poison()
    policy = LegacyTrainer("megatron", "policy", device, SIZES["megatron"])
    before = {name: policy.parts[name].read() for name in ("params", "optimizer")}
    for call in ("offload_after_refit", "prepare_for_lp_inference", "finish_inference", "prepare_for_training"):
        policy.call(call)
    assert all(torch.equal(policy.parts[name].read(), content) for name, content in before.items())
    assert not policy.parts["grads"].read().any()
    policy.train()


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_computing_without_what_it_needs_is_caught(backend: Any) -> None:
    policy = LegacyTrainer(backend, "policy", EmulatedDevice(), SIZES[backend])
    policy.call("offload_before_refit")
    policy.infer()
    with pytest.raises(AssertionError, match="optimizer is on the host"):
        policy.train()
    policy.call("offload_after_refit")
    with pytest.raises(AssertionError, match="params is on the host"):
        policy.infer_reference()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([("wake",), ("wake", "weights"), ("wake", "kv_cache"), ("sleep",)]), max_size=8))
def test_the_engine_sleeps_and_wakes_as_the_legacy_object_does_and_copies_its_weights_each_time(
    script: list[tuple[str, ...]],
) -> None:
    device = EmulatedDevice()
    engine, model = LegacyEngine(device, SIZES["dtensor"]), LegacyGeneration("vllm")
    for verb, *tags in script:
        was = engine.weights.where
        counted = device.bytes_in + device.bytes_out
        if verb == "wake":
            engine.wake(*tags)
            model.prepare_for_generation(tags=tags or None)
        else:
            engine.sleep()
            model.finish_generation()
        assert engine.weights.where == SAME[model.state["weights"]]
        assert engine.kv_cache.where == SAME[model.state["kv_cache"]]
        moved = engine.weights.nbytes if engine.weights.where != was else 0
        assert device.bytes_in + device.bytes_out - counted == moved
    assert engine.bytes_copied == device.bytes_in + device.bytes_out
