"""Training through any sequence of scopes gives the bits of a plain torch loop that never moves a byte."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rl_session as rs
from rl_session.testing import EmulatedDevice

PROGRAMS = {
    "a usual loop": "logprob reference train logprob reference train_twice",
    "training alone": "train train_twice train",
    "inference first and last": "logprob logprob train refit logprob logprob",
    "a step across scopes": "open logprob more refit commit train",
    "a step through the host": "open offloaded logprob reference more evaluate commit logprob",
    "a step across switches": "open offload logprob more switch_resident logprob commit train offload train",
    "one gradient over four scopes": "own_backward logprob own_backward offloaded own_backward own_backward own_step train",
    "an aborted step": "train open logprob abort train open more commit",
    "backward by hand": "own_backward logprob own_backward refit own_backward own_step train",
    "zeroed gradients": "own_backward own_step_zeroing logprob own_backward own_step_zeroing train logprob",
    "gradients left behind": "own_backward own_step_keeping logprob train own_backward own_step_keeping train",
    "weights written by hand": "write logprob train write offloaded train write refit write logprob",
    "refits": "train refit refit train refit logprob",
    "checkpoints": "save train save open save more save commit save logprob save",
    "nested scopes": "nested_logprob train nested_logprob logprob",
    "deeply nested scopes": "deep train deep",
    "switches": "switch_resident train switch_offloaded logprob offload train switch_resident logprob train offload offload",
}
MODELS = ("plain", "tied", "frozen", "buffers", "mixed", "strided", "compiled", "llama", "lora")
OPTIMIZERS = (
    *("adamw", "adamw-foreach", "adamw-fused", "adamw-amsgrad", "sgd", "nesterov", "adafactor"),
    *("nested", "muon", "main-grad", "masters"),
)
RELEASES = ("eager", "lazy", "never")
BASES = ("offloaded", "resident")


def words(program: str, release: str, base: str) -> list[str]:
    """The program; weights that are on the host between scopes are written inside one."""
    away = release == "eager" and base == "offloaded"
    return ["write_in_training" if word == "write" and away else word for word in program.split()]


def run_both(
    lab: SimpleNamespace,
    folder: Path,
    program: list[str],
    model: str,
    optimizer: str,
    release: str,
    base: str,
    device: EmulatedDevice,
    **flags: Any,
) -> None:
    plain = lab.Plain(lab.Kit(model, optimizer))
    kit = lab.Kit(model, optimizer)
    reference = "adapter-off" if model == "lora" else "copy"
    policy = lab.Attach(device)(kit, reference=reference, release=release, base=base, **flags)
    scoped = lab.Scoped(kit, policy, folder)
    plain.run(program)
    moved = device.bytes_in + device.bytes_out
    scoped.run(program)
    if release == "never" and "reference" not in program and "nested_logprob" not in program:
        assert device.bytes_in + device.bytes_out == moved
    lab.assert_same_trace(scoped, plain)
    policy.close()
    lab.assert_same(kit, plain.kit)
    assert lab.plain_classes(kit)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_gives_the_bits_of_a_plain_loop(
    lab: SimpleNamespace, tmp_path: Path, device: EmulatedDevice, program: str, release: str, base: str
) -> None:
    run_both(lab, tmp_path, words(PROGRAMS[program], release, base), "plain", "adamw", release, base, device)


COVERING = [
    (model, optimizer, program, RELEASES[(index + index // 17) % 3], BASES[index // 3 % 2], index % 4 == 1)
    for index, ((model, optimizer), program) in enumerate(
        zip(itertools.product(MODELS, OPTIMIZERS), itertools.cycle(PROGRAMS))
    )
]


@pytest.mark.parametrize(("model", "optimizer", "program", "release", "base", "delays"), COVERING)
def test_every_model_with_every_optimizer_gives_the_bits_of_a_plain_loop(
    lab: SimpleNamespace,
    tmp_path: Path,
    device: EmulatedDevice,
    model: str,
    optimizer: str,
    program: str,
    release: str,
    base: str,
    delays: bool,
) -> None:
    device.delay(delays)
    run_both(lab, tmp_path, words(PROGRAMS[program], release, base), model, optimizer, release, base, device)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", ["tied", "buffers", "strided"])
def test_the_longest_way_through_the_host_gives_the_same_bits_for_every_optimizer(
    lab: SimpleNamespace, tmp_path: Path, device: EmulatedDevice, model: str, optimizer: str
) -> None:
    program = (
        "train open offloaded logprob refit more save commit logprob deep own_backward offload own_backward own_step"
    )
    run_both(
        lab,
        tmp_path,
        words(program, "eager", "offloaded"),
        model,
        optimizer,
        "eager",
        "offloaded",
        device,
        offload_optimizer_for_logprob=True,
    )


NEUTRAL = (
    "logprob",
    "reference",
    "refit",
    "offloaded",
    "offload",
    "evaluate",
    "switch_resident",
    "switch_offloaded",
    "save",
)


@st.composite
def programs(draw: st.DrawFn) -> list[str]:
    """Short programs that are legal: what may come next depends on whether gradients are live."""
    state, program = "closed", []
    for _ in range(draw(st.integers(2, 7))):
        choices = {
            "closed": ("train", "train_twice", "open", "own_backward", "nested_logprob", "deep", *NEUTRAL),
            "open": ("more", "commit", "abort", *NEUTRAL),
            "own": ("own_backward", "own_step", "own_step_zeroing", *NEUTRAL),
        }[state]
        word = draw(st.sampled_from(choices))
        state = {
            "open": "open",
            "own_backward": "own",
            **dict.fromkeys(("commit", "abort", "own_step", "own_step_zeroing"), "closed"),
        }.get(word, state)
        program.append(word)
    return program


@settings(
    max_examples=70,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    program=programs(),
    model=st.sampled_from(["plain", "tied", "buffers", "strided"]),
    optimizer=st.sampled_from(["adamw", "adamw-fused", "sgd", "nested", "main-grad", "masters"]),
    release=st.sampled_from(RELEASES),
    base=st.sampled_from(BASES),
    logprob_flag=st.booleans(),
    refit_flag=st.booleans(),
    delays=st.booleans(),
)
def test_any_sequence_of_scopes_gives_the_bits_of_a_plain_loop(
    lab: SimpleNamespace,
    tmp_path: Path,
    program: list[str],
    model: str,
    optimizer: str,
    release: str,
    base: str,
    logprob_flag: bool,
    refit_flag: bool,
    delays: bool,
) -> None:
    device = EmulatedDevice()
    device.poison()
    device.delay(delays)
    run_both(
        lab,
        tmp_path,
        program,
        model,
        optimizer,
        release,
        base,
        device,
        offload_optimizer_for_logprob=logprob_flag,
        offload_optimizer_for_refit=refit_flag,
    )


@pytest.mark.parametrize("base", BASES)
def test_a_model_without_an_optimizer_gives_the_same_logprobs_in_every_scope(
    lab: SimpleNamespace, attach: Any, base: str
) -> None:
    kit = lab.Kit("buffers", None)
    batch = lab.make_batch(1)
    want = lab.naive_logprobs(kit.model, batch)
    policy = attach(kit, base=base)
    for _ in range(2):
        with policy.logprob_mode():
            assert lab.same(policy.get_logprobs(batch)["logprobs"], want)
    with policy.training_mode(), pytest.raises(rs.UnsupportedError, match="needs an optimizer"):
        policy.train(batch, lab.nll_loss)
