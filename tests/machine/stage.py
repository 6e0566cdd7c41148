"""The real thing under the machine: two policies and an engine on one device, and eyes that do not ask the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from twins import Net, Twin, make_optimizer, state_of

import rl_session as rs
from rl_session.testing import EmulatedDevice, FakeEngine
from rl_session_migrate.shim.policy import LegacyPolicy

figures = {"examples": 0, "steps": 0, "faults": 0, "refusals": 0}
"""What the machine has done in this process; printed at the end of a run."""
BACKENDS = {"actor": "dtensor", "rival": "megatron"}


class Player:
    """One policy, its legacy handle, what it is made of, and its twin."""

    def __init__(self, stage: Stage, name: str, seed: int, kind: str, setup: dict[str, Any]) -> None:
        self.name = name
        self.twin = Twin(seed, kind)
        self.model = Net(seed)
        self.optimizer = make_optimizer(self.model, kind)
        self.extra = torch.arange(5.0)
        self.policy: Any = stage.session.attach(
            self.model,
            self.optimizer,
            name=name,
            device=stage.device,
            base=setup["base"],
            reference="copy" if name == "actor" else None,
            offload=rs.OffloadConfig(
                offload_optimizer_for_logprob=setup["logprob"],
                offload_optimizer_for_refit=setup["refit"],
                live_gradients=setup["live_gradients"],
            ),
        )
        self.legacy = LegacyPolicy(self.policy, backend=BACKENDS[name])  # type: ignore[arg-type]
        self.scopes: list[tuple[int, Any]] = []
        """Open scopes: the model's key, and the object."""
        self.step: Any = None
        self.checkpoint: Any = None
        """What the last checkpoint holds."""
        self.told_at: Any = None
        """What was seen when the library was asked last where the bytes are; asked again where it is another."""
        self.by_hand: set[str] = set()
        """Components that the user made or freed outside every call of the library."""

    @property
    def control(self) -> Any:
        return self.policy._control

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by component and name."""
        return state_of(self.model, self.optimizer, self.extra)

    def placement(self) -> dict[str, str]:
        """Where each component is, found by looking at storages; "mixed" where they disagree."""
        tiers: dict[str, set[str]] = {c: set() for c in "PBGOX"}
        with torch._C.DisableTorchFunctionSubclass():
            for name, tensor in self.tensors().items():
                if tensor.ndim and not (name[0] == "X" and not self.twin.has_extra):
                    tiers[name[0]].add("device" if tensor.untyped_storage().nbytes() else "host")
        return {c: "none" if not found else found.pop() if len(found) == 1 else "mixed" for c, found in tiers.items()}

    def differences(self) -> list[str]:
        """Names of tensors that are not bit for bit those of the twin, from whichever tier has them."""
        mine, wanted = self.tensors(), self.twin.state()
        if mine.keys() != wanted.keys():
            return sorted(mine.keys() ^ wanted.keys())
        read = self.policy._control.group.worker.engine.readable
        return [name for name, tensor in mine.items() if not torch.equal(read(tensor), wanted[name])]


class Stage:
    """The session and everybody in it."""

    def __init__(self, folder: Path, setup: dict[str, Any]) -> None:
        self.folder = folder
        self.log = folder / "run.jsonl"
        self.device = EmulatedDevice()
        self.device.poison()
        self.device.delay(setup["delay"])
        self.published: list[bool] = []
        """For each push since it was cleared, whether it was skipped."""
        hears = [self._hear]
        self.session = rs.Session(self.log, release=setup["release"], verify="checksum", audit_processors=hears)
        self.players = {
            name: Player(self, name, seed, setup["optimizers"][seed], setup) for seed, name in enumerate(BACKENDS)
        }
        rival = self.players["rival"]
        rival.policy.register("ema", [rival.extra])
        rival.twin.has_extra = True
        weights = sum(t.numel() * t.element_size() for t in rival.twin.model.state_dict().values())
        self.fake = FakeEngine(self.device, weights=weights, kv_nbytes=700)
        self.engine: Any = self.session.engine("vllm", self.fake, sleep_level=setup["level"])
        self.sampler = rs.InProcessEngine(self.players["actor"].policy, max_new_tokens=2)
        self.engine_scopes: list[tuple[int, Any]] = []
        self.device.peak = 0
        self.device.capacity = setup["capacity"]

    def _hear(self, _logger: object, _name: str, record: Any) -> Any:
        if record["event"] == "weights.published":
            self.published.append(bool(record.get("skipped")))
        return record

    @property
    def engine_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.engine.memory()
        return state
