"""The ranks that hold one policy between them, as far as one of them has to know of the others.

Ranks must take the same decisions: one that leaves a call by an error while the others wait in a collective leaves them
waiting. So what can fail on one rank alone is done :meth:`Ranks.together`, and fails on all of them or on none. Alone
(``SOLO``) everything here is free. Numbers travel as float64. Knows nothing of models or batches.

A rank that fails in the middle of a forward or backward leaves the others waiting in a collective of the model, and waits
for them in turn. Nothing here can end that, so it is said aloud first (``on_failure``), to whoever watches from outside.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rl_session.errors import RLSessionError, UnsupportedError, WorldError
from rl_session.offload.shards import Shards

__all__ = ["SOLO", "Agreement", "Ranks", "ranks_of"]


@attrs.define(eq=False)
class Agreement:
    """Numbers that ranks tell each other at the end of :meth:`Ranks.together`.

    Attributes:
        mine: What this rank tells, filled in by the block.
        rows: What each rank told, in rank order; there after the block.
    """

    mine: list[float] = attrs.field(factory=list)
    rows: list[list[float]] = attrs.field(factory=list)

    def total(self, index: int = 0) -> float:
        """The sum over ranks of one number, added in rank order: the same bits on every rank."""
        return sum(row[index] for row in self.rows)

    def greatest(self, index: int = 0) -> float:
        """The greatest of one number."""
        return max(row[index] for row in self.rows)


class Ranks:
    """One rank's view of the group it is in.

    Args:
        group: The process group; None for the default one.
        is_solo: There are no others, whatever groups there are.

    Attributes:
        index: Which rank this is.
        count: How many there are.
        control: A gloo group of their own for what they tell each other. In the group of the model's collectives a rank
            that failed and the others in the middle of a forward would take each other's messages for their own, and
            gloo ends the process over that (measured).
        on_failure: Called with the error of this rank before the others are told, and with None once they know: if they are in
            the middle of something that needs this rank, they never will.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, is_solo: bool = False) -> None:
        self.group = group
        self.index = 0 if is_solo else dist.get_rank(group)
        self.count = 1 if is_solo else dist.get_world_size(group)
        self.control = None if self.count == 1 else _control_group(group)
        self.on_failure: Callable[[BaseException | None], None] | None = None
        self._depth = 0
        self._agreed: BaseException | None = None
        """The error that all ranks know of already, on its way out of nested blocks."""

    def __repr__(self) -> str:
        return f"<rank {self.index} of {self.count}>"

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.index == 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block in which this rank does without the others: what it has a whole copy of, it reads and writes by itself."""
        index, count = self.index, self.count
        self.index, self.count = 0, 1
        try:
            yield
        finally:
            self.index, self.count = index, count

    @contextmanager
    def together(self, attempted: str) -> Iterator[Agreement]:
        """Run a block on every rank that fails on all of them if it fails on one. No collective may be left half done in it.

        Blocks may be nested. Whatever ranks tell each other begins with whether one has failed, so that a rank that fails
        stops the others wherever they ask for the next time.

        Args:
            attempted: What the block does, for the message on ranks where it went well.

        Raises:
            BaseException: This rank's own error; else a copy of the error of the first rank that has one, with a note that
                names the rank.
            WorldError: That error cannot travel, or was an interrupt; it is told as text.
        """
        agreement = Agreement()
        if self.count == 1:
            yield agreement
            agreement.rows = [agreement.mine]
            return
        self._depth += 1
        error: BaseException | None = None
        try:
            yield agreement
        except BaseException as raised:
            error = raised
        finally:
            self._depth -= 1
        is_known = error is not None and error is self._agreed
        if not self._depth:
            self._agreed = None  # it has frames, and they have gradients
        if error is not None and is_known:
            raise error
        agreement.rows = self._exchange(agreement.mine if error is None else (), error, attempted)

    def _exchange(
        self, numbers: Sequence[float], error: BaseException | None = None, attempted: str = "a call"
    ) -> list[list[float]]:
        """The numbers of every rank, as many on each; or the error of one, raised on all."""
        if error is not None:
            raise self._tell(error, attempted)
        shown = [*numbers[:_HEAD], *[0.0] * (_HEAD - len(numbers))]
        heads = self._all_gather([0.0, *shown])
        if any(head[0] for head in heads):
            raise self._noted(self._common_error(None, attempted))
        if len(numbers) > _HEAD:
            return self._all_gather(numbers)
        return [head[1 : 1 + len(numbers)] for head in heads]

    def _tell(self, error: BaseException, attempted: str) -> BaseException:
        """Tell the others of this rank's own error, which is what all of them raise; returns it."""
        if self.on_failure is not None:
            self.on_failure(error)
        try:
            self._all_gather([1.0, *[0.0] * _HEAD])
            self._common_error(error, attempted)
        except RuntimeError as failure:  # the others are gone, or were ended where they waited for this one
            error.add_note(f"and the other ranks could not be told: {failure}")
        if self.on_failure is not None:
            self.on_failure(None)
        return self._noted(error)

    def _noted(self, error: BaseException) -> BaseException:
        self._agreed = error if self._depth else None
        return error

    def _all_gather(self, numbers: Sequence[float]) -> list[list[float]]:
        mine = torch.tensor(numbers, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(rows, mine, group=self.control)
        result: list[list[float]] = torch.stack(rows).tolist()
        return result

    def _common_error(self, error: BaseException | None, attempted: str) -> BaseException:
        told: list[bytes | None] = [None] * self.count
        dist.all_gather_object(told, None if error is None else _packed(error, attempted), group=self.control)
        if error is not None:
            return error
        rank, packed = next((rank, packed) for rank, packed in enumerate(told) if packed is not None)
        copy: BaseException = pickle.loads(packed)  # noqa: S301 (made by a rank of this group)
        copy.add_note(f"raised on rank {rank} of {self.count}; all of them stopped")
        return copy

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank, in rank order; as many on each.

        Raises:
            BaseException: As :meth:`together`, where another rank has failed meanwhile.
        """
        return [list(numbers)] if self.count == 1 else self._exchange(numbers)

    def greatest(self, number: int) -> int:
        """The greatest of one whole number of every rank."""
        return int(max(row[0] for row in self.gather([number])))

    def gather_objects(self, value: Any) -> list[Any]:
        """One picklable value of every rank, in rank order."""
        if self.count == 1:
            return [value]
        self._exchange(())
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.control)
        return values

    def sum_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over ranks, in place; the same result on every rank. Those of one dtype travel together."""
        if self.count == 1:
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            for bucket in _buckets([tensor for tensor in tensors if tensor.dtype == dtype]):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat, group=self.group)
                parts = flat.split([tensor.numel() for tensor in bucket])
                for tensor, part in zip(bucket, parts, strict=True):
                    tensor.copy_(part.view_as(tensor))

    def close(self) -> None:
        """Let the control group go; every rank does it. Idempotent."""
        control, self.control = self.control, None
        if control is not None and dist.is_initialized():
            dist.destroy_process_group(control)


def _control_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group of the same members; all of them are here, and where they are not all there are, nobody else has to be.

    Synchronising members only hangs where ranks have made different numbers of groups before (measured): not when it can
    be avoided.
    """
    members = dist.get_process_group_ranks(group)
    is_part = len(members) < dist.get_world_size()
    made: dist.ProcessGroup = dist.new_group(members, backend="gloo", use_local_synchronization=is_part)
    return made


_HEAD = 3
"""How many numbers travel with the word whether a rank has failed; more take a second message."""

SOLO = Ranks(is_solo=True)
"""No other ranks."""

_BUCKET_NBYTES = 32 * 2**20
"""Bytes of gradients in one all-reduce."""


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        if bucket and nbytes + tensor.nbytes > _BUCKET_NBYTES:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(tensor)
        nbytes += tensor.nbytes
    if bucket:
        yield bucket


def _packed(error: BaseException, attempted: str) -> bytes:
    """An error that other ranks can raise."""
    text = f"{type(error).__name__}: {error}"
    told = WorldError(f"{attempted} failed on another rank", (), "the same call again, once the cause is gone", text)
    if not isinstance(error, Exception):
        return pickle.dumps(told)
    try:
        packed = pickle.dumps(error)
        is_same = type(pickle.loads(packed)) is type(error)  # noqa: S301 (packed a line above)
    except Exception:
        is_same = False
    return packed if is_same else pickle.dumps(told)


def ranks_of(module: nn.Module, shards: Shards, label: str) -> Ranks:
    """The ranks that a module is spread over: those of its FSDP2 mesh, or of its DDP group; else it is alone.

    Raises:
        UnsupportedError: Parts of it are spread over different groups.
    """
    groups: list[dist.ProcessGroup | None] = []
    if isinstance(module, DistributedDataParallel):
        groups.append(module.process_group)
    for mesh in shards.meshes():
        if mesh.ndim == 1:
            groups.append(mesh.get_group())
        elif mesh.size() == dist.get_world_size():
            groups.append(dist.group.WORLD)
        else:
            raise _several(label, f"a mesh of shape {tuple(mesh.shape)} is not all {dist.get_world_size()} ranks")
    members = {tuple(dist.get_process_group_ranks(group)) for group in groups}
    if len(members) > 1:
        raise _several(label, f"groups: {', '.join(map(str, sorted(members)))}")
    return Ranks(groups[0]) if groups else SOLO


def _several(label: str, fact: str) -> RLSessionError:
    return UnsupportedError(
        f"{label}: parts of it are spread over different ranks", (fact,), 'parallelize(model, "fsdp2", mesh), one mesh'
    )
