"""State of one rank that leaves and comes back: weights and checkpoints, from whichever tier holds the bytes.

Knows nothing of modes; the driver judged the call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_session.lifecycle import Component, Placement, Tier
from rl_session.offload.engine import Engine
from rl_session.offload.guard import Guard
from rl_session.workers import checkpoint as files
from rl_session.workers.replies import CallResult
from rl_session.workers.spec import WorkerSpec
from rl_session.workers.trainer import Trainer

__all__ = ["Keeper"]


class Keeper:
    """Reads and writes the state of one rank.

    Args:
        spec: What the rank is made of.
        engine: Its engine.
        guard: Its guard, which lets the library itself through.
        trainer: Knows of open steps and live gradients.
    """

    def __init__(self, spec: WorkerSpec, engine: Engine, guard: Guard, trainer: Trainer) -> None:
        self.spec = spec
        self.engine = engine
        self.guard = guard
        self.trainer = trainer
        self.ranks = trainer.ranks
        self.last_checkpoint: str | None = None
        """The checkpoint that was saved or loaded last."""

    def state_dict(self) -> dict[str, Tensor]:
        """A copy on the CPU of what ``module.state_dict()`` holds, whole, from whichever tier has the bytes.

        Of several ranks only the first gets it; all have to take part.
        """
        copies: dict[str, Any] = {}
        gathered: dict[int, str] = {}
        for name, value in self._live().items():
            tied = gathered.setdefault(id(value), name) if isinstance(value, DTensor) else name
            copy = self._cpu_copy(value) if tied == name else None  # what is tied is gathered once, on every rank
            if self.ranks.is_first:
                copies[name] = copy if tied == name else copies[tied].clone()
        return copies

    def _cpu_copy(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self._whole(value).detach().to("cpu", copy=not isinstance(value, DTensor))

    def _whole(self, tensor: Tensor) -> Tensor:
        """A tensor's values where its bytes are: itself or a view of its host copy; a sharded one gathered there."""
        readable = self.engine.readable(tensor)
        if not isinstance(readable, DTensor):
            return readable
        with torch.no_grad():
            gathered: Tensor = readable.full_tensor()
        return gathered

    def _live(self) -> dict[str, Any]:
        with self.guard.pause():
            live: dict[str, Any] = self.spec.bare.state_dict(keep_vars=True)
        return live

    def _weights(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._live().items() if isinstance(value, Tensor)}

    def weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The named weights: device tensors, or views of the host copies while offloaded; not copied unless sharded.

        Of several ranks only the first gets them; all have to take part, with the same names.
        """
        live = self._weights()
        whole = {}
        for name in names:
            value = self._whole(live[name])
            if self.ranks.is_first:
                whole[name] = value
        return whole

    def weight_sizes(self) -> dict[str, int]:
        """Bytes of each weight, whole."""
        return {name: value.numel() * value.element_size() for name, value in self._weights().items()}

    def weight_info(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each weight; no byte is read."""
        return {name: (tuple(value.shape), value.dtype) for name, value in self._weights().items()}

    def _named_tensors(self) -> dict[str, Tensor]:
        module, shards = self.spec.bare, self.engine.shards
        named: dict[str, Tensor] = dict(shards.parameters(module, remove_duplicate=False))
        named.update(module.named_buffers(remove_duplicate=False))
        named.update({f"masters[{position}]": master for position, (_, master) in enumerate(self.spec.masters)})
        return named

    def _param_names(self) -> dict[int, str]:
        names = {id(p): name for name, p in self.engine.shards.parameters(self.spec.bare)}
        groups = self.spec.optimizer.param_groups if self.spec.optimizer is not None else []
        for index, group in enumerate(groups):
            for position, parameter in enumerate(group["params"]):
                names.setdefault(id(parameter), f"param_groups[{index}][{position}]")
        return names

    def save_checkpoint(self, path: str) -> CallResult:
        """Write parameters, buffers, optimizer and scheduler state; nothing is moved. Ranks write one directory together."""
        start = time.perf_counter()
        tensors = self._named_tensors()
        with self.engine.watch.reading():
            nbytes = files.save(
                Path(path),
                module_tensors=tensors,
                optimizer=self.spec.optimizer,
                param_names=self._param_names(),
                scheduler=self.spec.scheduler,
                read=self.engine.readable,
                ranks=self.ranks,
            )
        self.last_checkpoint = str(path)
        fields: dict[str, object] = {"path": str(path), "nbytes": nbytes, "seconds": time.perf_counter() - start}
        return CallResult(None, notes=(("checkpoint.saved", fields),))

    def load_checkpoint(self, path: str) -> CallResult:
        """Read a checkpoint back, into whichever tier holds the bytes; nothing is changed unless all of it fits.

        Raises:
            CheckpointError: It is missing, damaged, or of another architecture.
            OpenStepError: A step is open.
        """
        start = time.perf_counter()
        call = f"{self.spec.label}: load_checkpoint()"
        with self.ranks.together(call):
            self.trainer.refuse_live_gradients("load_checkpoint()")
            checkpoint = files.open_checkpoint(Path(path))
            tensors = self._named_tensors()
            names = self._param_names()
            checkpoint.check(tensors, self.spec.optimizer, names)
        before = self.engine.refresh().placement
        with self.trainer.accounted() as changed, self.guard.pause():
            with self.ranks.together(call):  # no rank overwrites anything before each has read all it needs
                plan = checkpoint.prepared(tensors, self.spec.optimizer, names, self.spec.scheduler)
            plan.commit(self.engine.writable)
            nbytes = plan.nbytes()
            self.engine.forget_snapshots()
            self._settle(before)
        self.last_checkpoint = str(path)
        fields: dict[str, object] = {"path": str(path), "nbytes": nbytes, "seconds": time.perf_counter() - start}
        return CallResult(None, tuple(changed), notes=(("checkpoint.loaded", fields),))

    def _settle(self, before: Placement) -> None:
        """Optimizer state made by loading starts on the device; send it where the optimizer belongs.

        The move reshards FSDP2 modules, so that nothing gathered from the old weights is left.
        """
        after = self.engine.refresh()
        home = before[Component.OPTIMIZER]
        if home is Tier.NONE:
            home = Tier.HOST if before[Component.PARAMS] is Tier.HOST else Tier.DEVICE
        self.engine.move(after, after.placement.evolve(**{Component.OPTIMIZER: home}))
