"""Random programs of four participants and an engine on one device, against a model: every byte copied is accounted for.

Each program runs twice: lazily on a device of random size, and without moving anything on one without a limit. After every
action the counters of the device, the placements and the bytes held are the model's; at the end the weights, the optimizer states
and the engine's weights of both runs are the same to the last bit.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from tenants_model import LOGPROB, TRAINING, Engine, NoRoomError, Part, Participant, World
from torch import Tensor, nn

import rl_session as rs
from rl_session.audit.check import assert_log_is_consistent
from rl_session.testing import EmulatedDevice, FakeEngine

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
VOCABULARY = 7
WIDTHS = {"actor": 6, "rival": 4, "critic": 5, "teacher": 3}
ENGINE_WEIGHTS, KV_CACHE = 1024, 700


class Model(nn.Module):
    """An embedding, a layer and a head, with a bias each: five storages of five sizes."""

    def __init__(self, width: int, num_outputs: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, num_outputs)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(self.embed(input_ids))))
        return out


BATCH = {
    "input_ids": torch.tensor([[1, 2, 3, 4], [4, 3, 6, 0]]),
    "input_lengths": torch.tensor([4, 3]),
}


def policy_loss(logits: Tensor, data: Any, valid_seqs: Any, valid_tokens: Any) -> tuple[Tensor, dict[str, Any]]:
    picked = logits[:, :-1].log_softmax(-1).gather(-1, data["input_ids"][:, 1:, None])
    return -picked.sum() / valid_tokens, {}


def value_loss(values: Tensor, data: Any, valid_seqs: Any, valid_tokens: Any) -> tuple[Tensor, dict[str, Any]]:
    return (values.squeeze(-1) - 1.0).square().sum() / valid_tokens, {}


def nbytes_of(model: nn.Module) -> dict[str, int]:
    return {name: p.numel() * p.element_size() for name, p in model.named_parameters()}


class Rig:
    """The participants of one run, for real.

    Attributes:
        outputs: What every compute call gave.
    """

    def __init__(self, release: str, log: Path | None) -> None:
        self.device = EmulatedDevice()
        self.device.poison()
        self.published: list[bool] = []
        arguments = {"release": release, "verify": "checksum", "audit_processors": [self._hear]}
        self.session = rs.Session(log, **arguments)  # type: ignore[arg-type]
        self.models = {
            name: Model(width, 1 if name == "critic" else VOCABULARY, seed)
            for seed, (name, width) in enumerate(WIDTHS.items())
        }
        self.optimizers = {
            name: torch.optim.AdamW(model.parameters(), lr=0.01)
            for name, model in self.models.items()
            if name != "teacher"
        }
        self.ema = torch.zeros(40)
        self.people: dict[str, Any] = {}
        for name, model in self.models.items():
            attach = self.session.attach_value if name == "critic" else self.session.attach
            self.people[name] = attach(model, self.optimizers.get(name), name=name, device=self.device)
        self.people["rival"].register("ema", [self.ema])
        engine = FakeEngine(self.device, weights=ENGINE_WEIGHTS, kv_nbytes=KV_CACHE)
        self.engine = self.session.engine("engine", engine)
        self.outputs: list[Tensor] = []

    def _hear(self, _logger: object, _name: str, record: Any) -> Any:
        if record["event"] == "weights.published":
            self.published.append(bool(record.get("skipped")))
        return record

    # -- actions -------------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        who = self.people[name]
        with who.inference_mode() if name == "critic" else who.logprob_mode():
            result = who.get_values(BATCH)["values"] if name == "critic" else who.get_logprobs(BATCH)["logprobs"]
            self.outputs.append(result)
            yield

    def train(self, name: str) -> None:
        loss = value_loss if name == "critic" else policy_loss
        self.outputs.append(self.people[name].train(BATCH, loss)["loss"])

    def own_step(self, name: str) -> None:
        """A step of the user's own, which leaves its gradients where they are."""
        optimizer = self.optimizers[name]
        optimizer.zero_grad()
        self.models[name](BATCH["input_ids"]).square().mean().backward()
        optimizer.step()

    def write(self, name: str, unit: str) -> None:
        with torch.no_grad():
            self.models[name].get_parameter(unit).mul_(1.25)

    # -- what is -------------------------------------------------------------------------------------------------

    def contents(self) -> dict[str, Tensor]:
        """A copy of every byte that a participant has, wherever it is."""
        found = {f"{n}.{k}": v.clone() for n, who in self.people.items() for k, v in who.state_dict().items()}
        readable = [who._control.group.worker.engine.readable for who in self.people.values()]
        for name, optimizer in self.optimizers.items():
            read = readable[list(self.people).index(name)]
            for index, state in enumerate(optimizer.state.values()):
                found |= {f"{name}.state{index}.{k}": read(v).clone() for k, v in state.items()}
        found["ema"] = readable[1](self.ema).clone()
        return found


class Run:
    """A program on both rigs, and on the model."""

    def __init__(self, capacity: int, log: Path) -> None:
        self.lazy, self.never, self.log = Rig("lazy", log), Rig("never", None), log
        participants = []
        for name, model in self.lazy.models.items():
            params = nbytes_of(model)
            trains = name != "teacher"
            state = {f"{kind}.{unit}": n for kind in ("m", "v") for unit, n in params.items()}
            participants.append(Participant(name, params, trains=trains, state=state if trains else None))
            self.lazy.people[name].offload()
        self.world = World(participants, Engine(ENGINE_WEIGHTS, KV_CACHE), capacity)
        self.world.participants["rival"].parts["ema"] = Part({"ema": self.lazy.ema.nbytes})
        for number, participant in enumerate(participants):
            participant.last_used = number
            self.world.offload(participant)
        self.lazy.device.capacity = capacity
        self.lazy.device.peak = 0
        device = self.lazy.device
        self.world.bytes_in, self.world.bytes_out = device.bytes_in, device.bytes_out

    def do(self, action: tuple[Any, ...]) -> None:
        """One action; where the model says that there is no room, the library must say so, and nothing may have moved."""
        kind, *arguments = action
        getattr(self, f"do_{kind}")(*arguments)
        self.check(action)

    def _refused(self, attempt: Any) -> bool:
        """Whether the model refuses; then the library does too."""
        try:
            attempt()
        except NoRoomError:
            return True
        return False

    def do_read(self, name: str, inner: list[tuple[Any, ...]]) -> None:
        who = self.world.participants[name]
        if who.scopes:
            return
        if self._refused(lambda: self.world.enter(who, LOGPROB)):
            event("refused")
            with pytest.raises(rs.DeviceMemoryError), self.lazy.reading(name):
                pytest.fail("entered")
            return
        with self.lazy.reading(name), self.never.reading(name):
            self.world.use(who)
            self.check(("entered", name))
            for action in inner:
                self.do(action)
        self.world.leave(who)

    def do_train(self, name: str, keeps_gradients: bool) -> None:
        who = self.world.participants[name]
        if who.scopes or not who.trains:
            return
        if self._refused(lambda: self.world.enter(who, TRAINING)):
            event("refused")
            with pytest.raises(rs.DeviceMemoryError), self.lazy.people[name].training_mode():
                pytest.fail("entered")
            return
        with self.lazy.people[name].training_mode(), self.never.people[name].training_mode():
            self.check(("entered", name))
            if self.world.has_room_to_train(who):
                for rig in (self.lazy, self.never):
                    (rig.own_step if keeps_gradients else rig.train)(name)
                if keeps_gradients:
                    last = who.last_used
                    self.world.train(who, keeps_gradients=True)
                    who.last_used = last  # no call of the library's
                else:
                    self.world.train(who, keeps_gradients=False)
        self.world.leave(who)

    def do_write(self, name: str, unit: str) -> None:
        """Outside every scope: what is on the device may be written, what is away may not be touched."""
        who = self.world.participants[name]
        if who.scopes:
            return
        if who.parts["params"].on_device:
            event("written at rest")
            self.lazy.write(name, unit)
            self.never.write(name, unit)
            self.world.write(who, unit)
        else:
            with pytest.raises(rs.OffloadedAccessError):
                self.lazy.write(name, unit)

    def do_forward(self, name: str) -> None:
        """A forward of the user's own outside every scope: the caller is in charge."""
        who = self.world.participants[name]
        if not who.scopes and who.parts["params"].on_device:
            for rig in (self.lazy, self.never):
                rig.outputs.append(rig.models[name](BATCH["input_ids"]).detach())
            self.world.write(who)

    def do_offload(self, name: str) -> None:
        who = self.world.participants[name]
        if not who.scopes:
            self.lazy.people[name].offload()
            self.world.offload(who)

    def do_make_room(self, part: float) -> None:
        """Ask for what is free and for a part of what is held."""
        wanted = max(0, self.world.capacity - self.world.in_use) + int(part * self.world.in_use)
        if self._refused(lambda: self.world.make_room(wanted)):
            event("refused")
            with pytest.raises(rs.DeviceMemoryError):
                self.lazy.session.make_room(wanted)
        else:
            self.lazy.session.make_room(wanted)

    # The engine and policies that are at work exclude each other.

    @property
    def _is_quiet(self) -> bool:
        return not any(who.scopes for who in self.world.participants.values())

    def do_generate(self) -> None:
        if not self._is_quiet:
            return
        self.world.use(self.world.engine)
        self.world.wake("weights", "kv_cache")
        with self.lazy.engine.awake(), self.never.engine.awake():
            self.world.use(self.world.engine)
            for rig in (self.lazy, self.never):
                rig.outputs.append(rig.engine.generate(BATCH)["output_ids"])

    def do_refit(self, name: str) -> None:
        if not self._is_quiet:
            return
        who = self.world.participants[name]
        before = len(self.lazy.published)
        self.lazy.people[name].refit(self.lazy.engine)
        self.never.people[name].refit(self.never.engine)
        [skipped] = self.lazy.published[before:]
        if skipped:
            event("push skipped")
            assert self.world.engine.pushed == (name, who.version)
        self.world.refit(who, skipped=skipped)

    def do_sleep(self) -> None:
        self.lazy.engine.sleep()
        self.world.engine.awake = set()

    # -- checks --------------------------------------------------------------------------------------------------

    def check(self, action: tuple[Any, ...]) -> None:
        device, world = self.lazy.device, self.world
        assert (device.bytes_in, device.bytes_out) == (world.bytes_in, world.bytes_out), action
        assert device.resident_bytes == world.in_use, action
        assert device.peak <= world.capacity, action
        for name, who in world.participants.items():
            held = self.lazy.people[name]._control.group.worker.engine.refresh().nbytes
            found = {component: tiers.get(rs.Tier.DEVICE, 0) for component, tiers in held.items()}
            want = {component: part.nbytes if part.on_device else 0 for component, part in who.parts.items()}
            want["grads"] = who.grads
            assert {c: n for c, n in found.items() if n} == {c: n for c, n in want.items() if n}, (action, name)
        assert self.lazy.engine.state == {0: "asleep", 1: "weights", 2: "awake"}[len(world.engine.awake)]

    def finish(self) -> None:
        """What is left is what was computed, and the log tells the same of evictions as the model."""
        ours, theirs = self.lazy.contents(), self.never.contents()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert all(map(torch.equal, self.lazy.outputs, self.never.outputs))
        assert self.lazy.engine.engine.fingerprint == self.never.engine.engine.fingerprint
        assert evictions(self.log) == Counter(part for once in self.world.evicted for part in once)
        for rig in (self.lazy, self.never):
            rig.device.capacity = None
            rig.session.close()


def evictions(log: Path) -> Counter[tuple[str, str]]:
    """Who was sent away to make room, and what of it, by the log: by name, or in the move of an entry of its own."""
    reasons: dict[int | None, str] = {}
    sent: set[tuple[int | None, str, str]] = set()  # a component that is dirty in part is two records of one move
    slept = 0
    for record in rs.read_audit(log):
        if record.name == "transition.started":
            reasons[record.transition_id] = record.event.reason
        elif record.name == "component.moved" and record.event.from_tier == "device":
            if reasons[record.transition_id].startswith(("evicted", "entering", "refit")):
                sent.add((record.transition_id, record.policy, record.event.component))
        elif record.name == "engine.slept" and (record.event.reason or "").startswith("evicted"):
            slept += 1
    found = Counter((policy, component) for _, policy, component in sent)
    return found + Counter({("engine", "engine"): slept})


PEOPLE = st.sampled_from(list(WIDTHS))
TRAIN = st.tuples(st.just("train"), st.sampled_from([name for name in WIDTHS if name != "teacher"]), st.booleans())
WRITE = st.tuples(
    st.just("write"),
    PEOPLE,
    st.sampled_from(["embed.weight", "body.weight", "body.bias", "head.weight", "head.bias"]),
)
FORWARD = st.tuples(st.just("forward"), PEOPLE)
OFFLOAD = st.tuples(st.just("offload"), PEOPLE)
MAKE_ROOM = st.tuples(st.just("make_room"), st.one_of(st.floats(0, 0.4), st.floats(0, 1.1)))
GENERATE = st.tuples(st.just("generate"))
REFIT = st.tuples(st.just("refit"), st.sampled_from(["actor", "rival"]))
SLEEP = st.tuples(st.just("sleep"))


def read(*inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(st.just("read"), PEOPLE, st.lists(st.one_of(*inner), max_size=3) if inner else st.just([]))


INSIDE = (read(), read(TRAIN, WRITE, read()), TRAIN, TRAIN, WRITE, FORWARD, OFFLOAD, MAKE_ROOM)
ACTIONS = st.one_of(
    *(TRAIN, TRAIN, TRAIN, REFIT, REFIT, GENERATE, GENERATE),
    *(read(), read(), read(), read(*INSIDE), MAKE_ROOM, MAKE_ROOM, MAKE_ROOM, WRITE, FORWARD, OFFLOAD, SLEEP),
)
LARGEST = 4 * sum(nbytes_of(Model(WIDTHS["actor"], VOCABULARY, 0)).values())
"""Training the actor: weights, gradients, two moments. The engine with a policy's weights beside it takes less."""
EVERYTHING = LARGEST * len(WIDTHS) + ENGINE_WEIGHTS + KV_CACHE
CAPACITIES = st.one_of(st.integers(LARGEST, 2 * LARGEST), st.integers(LARGEST, EVERYTHING))
LENGTH = 40 if NIGHTLY else 20


@settings(
    max_examples=1500 if NIGHTLY else 10,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(CAPACITIES, st.lists(ACTIONS, min_size=LENGTH // 2, max_size=LENGTH))
# The weights have been out and back, and are clean; the moments are not, and stay.
@example(LARGEST, [("train", "actor", False), ("make_room", 0.1), ("read", "actor", []), ("make_room", 0.1)])
# What is left of the oldest is not enough; the gradients of the newest are.
@example(EVERYTHING, [("train", "rival", False), ("train", "actor", True), ("make_room", 0.1)])
# Weights that would leave first stay, because the moments leave and are enough.
@example(EVERYTHING, [("train", "actor", False), ("make_room", 0.5)])
def test_no_byte_is_copied_that_the_model_does_not_explain(capacity: int, script: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(capacity, Path(folder) / "run.jsonl")
        for action in script:
            run.do(action)
        run.finish()
        assert_log_is_consistent(Path(folder) / "run.jsonl")
