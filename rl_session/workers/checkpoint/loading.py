"""Reading a checkpoint: verified when opened, compared with what lives, then applied all at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from rl_session.errors import CheckpointError, HostMemoryError
from rl_session.workers.checkpoint.dcp import parse_metadata, read_tensors
from rl_session.workers.checkpoint.directory import FileIdentity, file_identity, read_manifest, verify
from rl_session.workers.checkpoint.restoring import ABSENT, Home, Plan, empty_like
from rl_session.workers.checkpoint.saving import masters_of
from rl_session.workers.checkpoint.skeleton import Node, identity_of, inner_tensors, tensor_keys

__all__ = ["Checkpoint", "open_checkpoint"]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint and verify all of it: manifest, version, and the size and SHA-256 of every file.

    Raises:
        CheckpointError: It is missing, truncated, damaged, from a later version, or none of ours.
    """
    directory, manifest = read_manifest(path)
    identities = verify(directory, manifest)
    verified = parse_metadata(directory, identities, manifest["tensors"])
    return Checkpoint(directory, manifest, identities, verified)


@attrs.define(eq=False, repr=False)
class Checkpoint:
    """A checkpoint whose files were verified. Made by :func:`open_checkpoint`.

    Attributes:
        directory: Where it is, links resolved.
    """

    directory: Path
    _manifest: dict[str, Any]
    _identities: dict[str, FileIdentity]
    _metadata: Metadata

    def __repr__(self) -> str:
        return (
            f"<Checkpoint {self.directory}: {len(self._table)} tensors, written with torch {self._manifest['torch']}>"
        )

    @property
    def extra(self) -> dict[str, Any]:
        """What was passed to ``save`` as ``extra``."""
        extra: dict[str, Any] = Plan(self._table).build(self._manifest["extra"], ABSENT, "extra")
        return extra

    @property
    def has_optimizer(self) -> bool:
        """Whether it holds the state of an optimizer."""
        return self._manifest["optimizer"] is not None

    @property
    def has_scheduler(self) -> bool:
        """Whether it holds the state of a scheduler."""
        return self._manifest["scheduler"] is not None

    @property
    def _table(self) -> dict[str, dict[str, Any]]:
        table: dict[str, dict[str, Any]] = self._manifest["tensors"]
        return table

    # -- does it fit? --------------------------------------------------------------------------------------------------

    def check(
        self,
        module_tensors: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None,
        param_names: Mapping[int, str],
        scheduler: Any | None = None,
        *,
        optimizer_optional: bool = False,
    ) -> None:
        """Compare it with what lives; reads nothing but metadata and changes nothing.

        A checkpoint that has an optimizer or a scheduler fits where there is none: that part is not loaded.

        Args:
            module_tensors: As for ``save``.
            optimizer: As for ``save``.
            param_names: As for ``save``.
            scheduler: As for ``save``.
            optimizer_optional: Accept a checkpoint without optimizer or scheduler where there is one, which then
                stays as it is.

        Raises:
            CheckpointError: It does not fit; the facts say what is missing, unexpected and different.
        """
        self._planned(module_tensors, optimizer, param_names, scheduler, None, optimizer_optional=optimizer_optional)

    def _planned(
        self,
        module_tensors: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None,
        param_names: Mapping[int, str],
        scheduler: Any | None,
        loaded: Mapping[str, Tensor] | None,
        *,
        optimizer_optional: bool,
    ) -> Plan:
        self._compare(self._manifest["model"], module_tensors, "the model")
        plan = Plan(self._table, loaded)
        for name, tensor in module_tensors.items():
            kept = plan.build(self._manifest["model"][name], tensor, f"model/{name}")
            assert kept is tensor
        parts: tuple[tuple[str, str, Any], ...] = (("an", "optimizer", optimizer), ("a", "scheduler", scheduler))
        for article, part, live in parts:
            if live is not None and self._manifest[part] is None and not optimizer_optional:
                raise self._misfit(
                    (f"it was saved without {article} {part}, and there is one",),
                    f"load it into a policy without {article} {part}",
                )
        if optimizer is not None and self.has_optimizer:
            self._compare_optimizer(optimizer, module_tensors, param_names)
            self._plan_optimizer(plan, optimizer, module_tensors, param_names)
        if scheduler is not None and self.has_scheduler:
            state = plan.build(self._manifest["scheduler"], scheduler.state_dict(), "scheduler")
            plan.actions.append(lambda: scheduler.load_state_dict(state))
        if plan.problems:
            remedy = "take one optimizer step first, so that your optimizer makes these objects, then load"
            raise self._misfit(_shown(plan.problems, "cannot be restored"), remedy)
        return plan

    def _compare(self, saved: Mapping[str, Node], live: Mapping[str, Tensor], what: str) -> None:
        different = [
            name for name in saved.keys() & live.keys() if self._description(saved[name]) != _describe(live[name])
        ]
        facts = [
            *_shown(sorted(live.keys() - saved.keys()), f"in {what}, missing in the checkpoint"),
            *_shown(sorted(saved.keys() - live.keys()), f"in the checkpoint, not in {what}"),
            *_shown(
                [f"{n} {self._description(saved[n])} -> {_describe(live[n])}" for n in sorted(different)],
                f"different (checkpoint -> {what})",
            ),
        ]
        if not facts:
            facts += _shown(self._untied(saved, live), f"tied in {what}, but not in the checkpoint")
        if facts:
            raise self._misfit(
                tuple(facts), "build the model and optimizer that were saved, or load another checkpoint"
            )

    def _description(self, node: Node) -> str:
        if node["kind"] == "wrapper":
            parts = (f"{name}={self._description(part)}" for name, part in sorted(node["attributes"].items()))
            return f"{node['type'].rpartition('.')[2]}({', '.join(parts)})"
        table = self._table[node["key"]]
        return f"{table['dtype']}{table['shape']}"

    def _untied(self, saved: Mapping[str, Node], live: Mapping[str, Tensor]) -> list[str]:
        first: dict[Any, str] = {}
        pairs = []
        for name, tensor in live.items():
            other = first.setdefault(identity_of(tensor), name)
            if list(tensor_keys(saved[name])) != list(tensor_keys(saved[other])):
                pairs.append(f"{other} = {name}")
        return pairs

    def _compare_optimizer(
        self, optimizer: torch.optim.Optimizer, module_tensors: Mapping[str, Tensor], param_names: Mapping[int, str]
    ) -> None:
        saved = self._manifest["optimizer"]
        remedy = "build the optimizer that was saved, with the same groups, or load another checkpoint"
        if saved["type"] != type(optimizer).__name__:
            raise self._misfit((f"it was saved with {saved['type']}; this is {type(optimizer).__name__}",), remedy)
        groups = [sorted(param_names[id(p)] for p in group["params"]) for group in optimizer.param_groups]
        before = [sorted(group["params"]) for group in saved["groups"]]
        if groups != before:
            everything = {name for group in groups for name in group}, {name for group in before for name in group}
            facts = (
                f"parameters per group: {[len(g) for g in before]} in the checkpoint, {[len(g) for g in groups]} here",
                *_shown(sorted(everything[0] - everything[1]), "in the optimizer, missing in the checkpoint"),
                *_shown(sorted(everything[1] - everything[0]), "in the checkpoint, not in the optimizer"),
            )
            raise self._misfit(facts, remedy)
        self._compare(saved["masters"], masters_of(optimizer, module_tensors, param_names), "the optimizer")

    def _plan_optimizer(
        self,
        plan: Plan,
        optimizer: torch.optim.Optimizer,
        module_tensors: Mapping[str, Tensor],
        param_names: Mapping[int, str],
    ) -> None:
        saved = self._manifest["optimizer"]
        for name, master in masters_of(optimizer, module_tensors, param_names).items():
            plan.build(saved["masters"][name], master, f"masters/{name}")
        state: dict[Any, Any] = {}
        for index, (group, was) in enumerate(zip(optimizer.param_groups, saved["groups"], strict=True)):
            options = {
                name: plan.build(node, group.get(name, ABSENT), f"param_groups/{index}/{name}")
                for name, node in was["options"]
            }
            plan.actions.append(lambda group=group, options=options: group.update(options))  # type: ignore[misc]
            for parameter in group["params"]:
                name = param_names[id(parameter)]
                if name in saved["state"]:
                    live, home = optimizer.state.get(parameter, ABSENT), Home(parameter, options)
                    state[parameter] = plan.build(saved["state"][name], live, f"optimizer/{name}", home)
        for key_node, node in saved["shared"]:
            key = plan.build(key_node, ABSENT, "optimizer")
            state[key] = plan.build(node, optimizer.state.get(key, ABSENT), f"optimizer/{key}")
        plan.actions.append(lambda: _replace_state(optimizer.state, state))

    # -- applying ------------------------------------------------------------------------------------------------------

    def apply(
        self,
        module_tensors: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None,
        param_names: Mapping[int, str],
        scheduler: Any | None,
        write: Callable[[Tensor], Tensor],
        *,
        optimizer_optional: bool = False,
    ) -> int:
        """Load it. Everything is read, compared and made ready before the first live byte changes.

        Live tensors of the recorded shape and dtype are overwritten in place. Optimizer state of parameters that have
        none yet is made anew, on the parameter's device where torch would put it there; state that the checkpoint does
        not have goes. Hyperparameters that the checkpoint does not know stay.

        Args:
            module_tensors: As for ``save``.
            optimizer: As for ``save``.
            param_names: As for ``save``.
            scheduler: As for ``save``.
            write: Gives, for a live tensor, one through which its values may be overwritten wherever its bytes are.
            optimizer_optional: As for :meth:`check`.

        Returns:
            Bytes of the tensors restored.

        Raises:
            CheckpointError: It does not fit, or its files changed since it was opened; nothing was changed.
            HostMemoryError: No room to read it; nothing was changed.
        """
        plan = self.prepared(module_tensors, optimizer, param_names, scheduler, optimizer_optional=optimizer_optional)
        plan.commit(write)
        return plan.nbytes()

    def prepared(
        self,
        module_tensors: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None,
        param_names: Mapping[int, str],
        scheduler: Any | None,
        *,
        optimizer_optional: bool = False,
    ) -> Plan:
        """The first half of :meth:`apply`: everything is read and made ready; ``commit`` of the result does the rest.

        Raises:
            CheckpointError, HostMemoryError: As for :meth:`apply`.
        """
        live = (module_tensors, optimizer, param_names, scheduler)
        layouts = self._planned(*live, None, optimizer_optional=optimizer_optional).layouts
        loaded = self._read(self._needed(optimizer, scheduler), layouts)
        return self._planned(*live, loaded, optimizer_optional=optimizer_optional)

    def _needed(self, optimizer: Any, scheduler: Any) -> set[str]:
        parts = ["model", *["optimizer"] * (optimizer is not None), *["scheduler"] * (scheduler is not None)]
        return {key for part in parts for key in tensor_keys(self._manifest[part])}

    def _read(self, keys: Iterable[str], layouts: Mapping[str, DTensor]) -> dict[str, Tensor]:
        attempted = f"cannot load the checkpoint {self.directory}"
        try:
            loaded = {
                key: empty_like(self._table[key]["shape"], getattr(torch, self._table[key]["dtype"]), layouts.get(key))
                for key in keys
            }
        except (RuntimeError, MemoryError) as error:
            nbytes = sum(file["size"] for file in self._manifest["files"].values())
            needed = (f"about {nbytes:,} bytes of host memory are needed", "nothing was changed")
            raise HostMemoryError(attempted, needed, "free host memory, then load again", str(error)) from error
        failure: Exception | None = None
        try:
            read_tensors(self.directory, self._metadata, loaded)
        except Exception as error:
            failure = error
        changed = [name for name, was in self._identities.items() if file_identity(self.directory / name) != was]
        if failure is not None or changed:
            facts: tuple[str, ...] = (
                *_shown(changed, "changed or replaced since it was opened"),
                "nothing was changed",
            )
            cause = "" if failure is None else f"{type(failure).__name__}: {failure}"
            raise CheckpointError(attempted, facts, "open it again, then load", cause) from failure
        return loaded

    def _misfit(self, facts: tuple[str, ...], remedy: str) -> CheckpointError:
        return CheckpointError(f"the checkpoint {self.directory} does not fit; nothing was changed", facts, remedy)


def _describe(tensor: Tensor) -> str:
    inner = None if isinstance(tensor, DTensor) else inner_tensors(tensor)
    if inner is not None:
        return (
            f"{type(tensor).__name__}({', '.join(f'{name}={_describe(part)}' for name, part in sorted(inner.items()))})"
        )
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _shown(names: list[str], what: str) -> tuple[str, ...]:
    """One fact: how many, and the first five."""
    if not names:
        return ()
    return (f"{len(names)} {what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}",)


def _replace_state(live: Any, state: dict[Any, Any]) -> None:
    for owner in [owner for owner in live if owner not in state]:
        del live[owner]
    live.update(state)
