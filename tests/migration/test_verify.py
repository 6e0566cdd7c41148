"""The proof finds what a migration got wrong, and says where; what a migration may do differently it lets pass."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import legacy_loops as loops
import pytest
import torch
from click.testing import CliRunner
from shim_rig import Actor

import rl_session as rs
from rl_session.cli import _app
from rl_session.testing import EmulatedDevice, FakeEngine
from rl_session_migrate import LegacyGeneration, LegacyPolicy, as_loss_fn, refit_policy_generation, verify

pytestmark = pytest.mark.filterwarnings("ignore:.*legacy API:DeprecationWarning")

NUM_STEPS = 3


class World:
    """A policy and an engine on one device, always built the same."""

    def __init__(self, path: Path, *, check: Any = "checksum", budget: int | None = None, **offload: Any) -> None:
        torch.manual_seed(3)
        self.path = path
        device = EmulatedDevice()
        device.poison()
        self.session = rs.Session(path, verify=check, device_budget=budget)
        model = Actor()
        self.policy = self.session.attach(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.02),
            name="actor",
            device=device,
            reference="copy",
            offload=rs.OffloadConfig(**offload),
        )
        weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
        self.engine = self.session.engine("vllm", FakeEngine(device, weights=weights, kv_nbytes=256, vocabulary=7))
        torch.manual_seed(4)


def legacy_loop(world: World) -> None:
    policy, generation = LegacyPolicy(world.policy), LegacyGeneration(world.engine)
    for step in range(NUM_STEPS):
        with world.session.step(step):
            refit_policy_generation(policy, generation, True)
            data = loops.train_data(generation.generate(loops.prompts(step)))
            generation.finish_generation()
            policy.prepare_for_lp_inference()
            data["prev_logprobs"] = policy.get_logprobs(data)["logprobs"]
            data["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
            policy.prepare_for_training()
            policy.train(data, loops.ClippedPolicyLoss())


def scoped_loop(world: World, plant: str = "") -> None:
    """The same in scopes; ``plant`` is a mistake to make in step 1."""
    policy, engine = world.policy, world.engine
    loss = as_loss_fn(loops.ClippedPolicyLoss())
    for step in range(NUM_STEPS):
        mistake = plant if step == 1 else ""
        with world.session.step(step):
            if mistake != "stale weights":
                policy.refit(engine)
            with engine.awake() as awake:
                data = loops.train_data(awake.generate(loops.prompts(step)))
            with policy.training_mode() if mistake == "another mode" else policy.logprob_mode():
                if mistake == "another order":
                    reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
                    data["prev_logprobs"] = policy.get_logprobs(data)["logprobs"]
                else:
                    data["prev_logprobs"] = policy.get_logprobs(data)["logprobs"]
                    reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
                data["reference_policy_logprobs"] = reference
                if mistake == "an extra call":
                    policy.get_logprobs(data)
            with policy.training_mode():
                if mistake == "a changed loss":
                    data["advantages"] = data["advantages"] * 1.0001
                if mistake != "a missing train":
                    policy.train(data, loss)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Run a loop over a world of its own, and give its log."""
    made: list[World] = []

    def start(name: str, loop: Callable[..., None], *args: Any, **options: Any) -> Path:
        world = World(tmp_path / f"{name}.jsonl", **options)
        made.append(world)
        loop(world, *args)
        world.session.close()
        return world.path

    yield start
    for world in made:
        world.session.close()


def test_a_migration_without_mistakes_is_the_same_and_moves_less(run: Callable[..., Path]) -> None:
    report = verify(run("legacy", legacy_loop), run("scoped", scoped_loop))
    assert report.equal, str(report)
    assert report.difference is None
    assert report.num_digests == report.legacy.num_acts == 4 * NUM_STEPS
    assert report.scoped.peak <= report.legacy.peak
    assert str(report).startswith("the same: 12 and 12 compute calls, 12 results compared")


@pytest.mark.parametrize(
    ("plant", "kind", "said"),
    [
        ("a missing train", "missing", "actor.train()"),
        ("an extra call", "extra", "actor.get_logprobs()"),
        ("another order", "order", "actor.get_reference_policy_logprobs()"),
        ("another mode", "mode", "actor.get_logprobs() in training mode"),
        ("a changed loss", "result", "actor.train()"),
        ("stale weights", "weights", "actor after 0 updates"),
    ],
)
def test_a_mistake_is_found_where_it_is_made(run: Callable[..., Path], plant: str, kind: str, said: str) -> None:
    report = verify(run("legacy", legacy_loop), run("scoped", scoped_loop, plant))
    assert not report.equal
    difference = report.difference
    assert difference is not None
    assert difference.kind == kind, str(report)
    assert said in f"{difference.legacy if kind == 'missing' else difference.scoped}"
    for site in (difference.legacy_site, difference.scoped_site):
        assert site.startswith("test_verify.py:"), "both call sites are named"
    assert ", step 1" in difference.legacy
    assert str(report).startswith("NOT the same")


def test_more_on_the_device_at_a_wake_is_found(run: Callable[..., Path]) -> None:
    """The optimizer stays beside the engine's weights, where legacy had sent it away."""
    scoped = run("scoped", scoped_loop, offload_optimizer_for_refit=False, release="lazy")
    report = verify(run("legacy", legacy_loop), scoped)
    kinds = {difference.kind for difference in report.differences}
    assert kinds <= {"device", "peak"}
    found = [difference for difference in report.differences if "optimizer" in difference.scoped]
    assert found
    assert found[0].kind == "device"
    assert "optimizer" not in found[0].legacy
    assert "step 1" in found[0].scoped, "in step 0 there is no optimizer state yet"
    for site in (found[0].legacy_site, found[0].scoped_site):
        assert site.startswith("test_verify.py:")


def test_what_the_budget_has_room_for_beside_the_declared_demand_may_stay(run: Callable[..., Path]) -> None:
    scoped = run("scoped", scoped_loop, offload_optimizer_for_refit=False, release="lazy", budget=100_000)
    assert verify(run("legacy", legacy_loop), scoped).equal


def test_without_digests_results_are_not_compared_and_the_report_says_so(run: Callable[..., Path]) -> None:
    legacy = run("legacy", legacy_loop, check="off")
    report = verify(legacy, run("scoped", scoped_loop, "a changed loss"))
    assert report.verdict == "unproved"
    assert not report.equal, "the loss was changed, and nobody looked"
    assert report.differences == ()
    assert (report.num_digests, report.num_unproved) == (0, 4 * NUM_STEPS)
    assert str(report).startswith("NOT PROVED, though no difference was found: 12 and 12 compute calls")
    assert '12 results were not compared: run both with Session(..., verify="checksum")' in str(report)
    told = CliRunner().invoke(_app, ["audit", "diff", str(legacy), str(legacy)])
    assert told.exit_code == 1
    assert told.stdout.startswith("NOT PROVED")
    assert report.to_json()["verdict"] == "unproved"


@pytest.mark.parametrize("holds_optimizer", [False, True])
def test_a_move_that_is_left_out_passes_unless_more_is_on_the_device(
    run: Callable[..., Path], *, holds_optimizer: bool
) -> None:
    """Outside every scope a call may rest in another mode than by hand, beside no more than there was by hand."""

    def by_hand(world: World) -> None:
        policy = LegacyPolicy(world.policy)
        policy.prepare_for_training()
        policy.train(loops.text(1), loops.NextTokenLoss())
        if holds_optimizer:
            policy.offload_before_refit()
        policy.prepare_for_lp_inference()
        policy.get_logprobs(loops.text(2))

    def resting(world: World) -> None:
        world.policy.switch("training")
        world.policy.train(loops.text(1), as_loss_fn(loops.NextTokenLoss()))
        world.policy.get_logprobs(loops.text(2))

    def in_a_scope(world: World) -> None:
        with world.policy.training_mode():
            world.policy.train(loops.text(1), as_loss_fn(loops.NextTokenLoss()))
            world.policy.get_logprobs(loops.text(2))

    legacy = run("legacy", by_hand)
    report = verify(legacy, run("resting", resting))
    assert report.equal is not holds_optimizer, str(report)
    assert report.num_elided_modes == (0 if holds_optimizer else 1)
    if not holds_optimizer:
        assert "1 calls rested in another mode than by hand" in str(report)
    difference = verify(legacy, run("scope", in_a_scope)).difference
    assert difference is not None
    assert difference.kind == "mode", "a scope says which mode is meant"


def test_a_call_that_raises_in_one_run_is_found(run: Callable[..., Path]) -> None:
    def failing(world: World) -> None:
        legacy_loop(world)
        with pytest.raises(rs.BatchError):
            LegacyPolicy(world.policy).train({}, loops.NextTokenLoss())

    def working(world: World) -> None:
        scoped_loop(world)
        with world.policy.training_mode():
            world.policy.train(loops.text(1), as_loss_fn(loops.NextTokenLoss()))

    difference = verify(run("legacy", failing), run("scoped", working)).difference
    assert difference is not None
    assert difference.kind == "error"
    assert "raised BatchError" in difference.legacy


def test_the_report_says_what_was_on_the_device_at_each_scope_and_wake(run: Callable[..., Path]) -> None:
    report = verify(run("legacy", legacy_loop), run("scoped", scoped_loop))
    scopes = [moment for moment in report.moments if moment.kind == "scope" and moment.name == "training"]
    assert [sorted(moment.on_device["actor"]) for moment in scopes] == [
        ["buffers", "params"],
        ["buffers", "optimizer", "params"],
        ["buffers", "optimizer", "params"],
    ]
    wakes = [moment for moment in report.moments if moment.kind == "wake"]
    assert [moment.name for moment in wakes] == ["vllm: weights", "vllm: kv_cache"] * NUM_STEPS
    assert all(set(moment.on_device.get("actor", ())) <= {"params", "buffers"} for moment in wakes)
    assert all(moment.peak >= moment.nbytes for moment in report.moments)
    assert max(moment.peak for moment in report.moments) == report.scoped.peak
    json.dumps(report.to_json())


# -- the command ---------------------------------------------------------------------------------------------------------


def test_the_command_compares_a_legacy_run_with_its_migration(run: Callable[..., Path]) -> None:
    legacy, same, other = (
        run("legacy", legacy_loop),
        run("scoped", scoped_loop),
        run("other", scoped_loop, "a changed loss"),
    )
    runner = CliRunner()
    good = runner.invoke(_app, ["audit", "diff", str(legacy), str(same)])
    assert good.exit_code == 0, good.output
    assert good.stdout.startswith("the same: 12 and 12 compute calls")
    bad = runner.invoke(_app, ["audit", "diff", str(legacy), str(other), "--migrated"])
    assert bad.exit_code == 1
    assert "another result (act 7)" in bad.stdout
    assert "test_verify.py:" in bad.stdout
    told = runner.invoke(_app, ["audit", "diff", str(legacy), str(other), "--migrated", "--json"])
    assert json.loads(told.stdout)["differences"][0]["kind"] == "result"
    plain = runner.invoke(_app, ["audit", "diff", str(legacy), str(same), "--exact"])
    assert plain.exit_code == 1, "record by record the two differ: that is what the proof sees past"
    assert "compute calls" not in plain.stdout
    twice = runner.invoke(_app, ["audit", "diff", str(same), str(same)])
    assert twice.exit_code == 0
    assert "compute calls" not in twice.stdout, "a run in scopes is compared record by record"


def test_the_proof_needs_neither_torch_nor_ray(run: Callable[..., Path]) -> None:
    script = (
        "import sys; from rl_session_migrate import verify; assert verify(sys.argv[1], sys.argv[2]).equal; "
        "assert not {'torch', 'ray'} & set(sys.modules)"
    )
    logs = [str(run("legacy", legacy_loop)), str(run("scoped", scoped_loop))]
    subprocess.run([sys.executable, "-W", "error", "-c", script, *logs], check=True)
