"""The only place that talks to torch.distributed.checkpoint: a flat table of tensors to files and back.

Knows nothing of models or optimizers. DCP wraps every failure, interrupts included, in an exception of its own that is
no ``Exception``; what comes out of here is the original.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from rl_session.errors import CheckpointError
from rl_session.workers.ranks import SOLO, Ranks

__all__ = ["METADATA", "parse_metadata", "read_tensors", "write_tensors"]

METADATA: Final = ".metadata"
"""The file in which DCP keeps where each tensor is."""

_KNOWN: Final = frozenset(
    {
        *((metadata.__name__, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
        *((metadata.__name__, f"{name}Metadata") for name in ("ChunkStorage", "TensorStorage", "BytesStorage")),
        (metadata.__name__, "TensorProperties"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
    }
)
"""What a ``.metadata`` file may refer to, besides torch's dtypes: plain records."""


class _Writer(FileSystemWriter):
    def storage_meta(self) -> None:
        """Leave out where it was written: a place that the checkpoint is renamed away from."""


class _Reader(FileSystemReader):
    """Reads with metadata that was verified and parsed before, instead of unpickling the file again."""

    def __init__(self, path: Path, verified: metadata.Metadata) -> None:
        super().__init__(path)
        self._verified = verified

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return self._verified


class _Unpickler(pickle.Unpickler):
    """Refuses every class it does not know."""

    def find_class(self, module_name: str, name: str, /) -> Any:
        dtype = getattr(torch, name, None) if module_name == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module_name, name) in _KNOWN:
            return super().find_class(module_name, name)
        raise pickle.UnpicklingError(f"{module_name}.{name} has no place in the metadata of a checkpoint")


def write_tensors(directory: Path, tensors: Mapping[str, Tensor], ranks: Ranks = SOLO) -> None:
    """Write a table of tensors into an empty directory, synced to disk.

    Device tensors are copied to the CPU a few at a time; views of larger storages are written without the rest. Each of
    several ranks writes its own shards, and a part of what all of them have.

    Raises:
        OSError: The disk is full, or any other error of the file system.
        RuntimeError: torch's own for the same.
    """
    solo = ranks.count == 1
    with _plainly():
        dcp_save(dict(tensors), storage_writer=_Writer(directory), process_group=ranks.control, no_dist=solo)


def read_tensors(directory: Path, verified: metadata.Metadata, tensors: dict[str, Tensor]) -> None:
    """Fill ``tensors`` from a directory whose files were verified: of a DTensor the shard, whatever shards were written.

    Raises:
        Exception: Whatever DCP came across.
    """
    with _plainly():
        dcp_load(tensors, storage_reader=_Reader(directory, verified), no_dist=True)


@contextmanager
def _plainly() -> Iterator[None]:
    """Silence the one warning that says what ``no_dist=True`` asked for, and unwrap DCP's exception."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", r"torch\.distributed is disabled, unavailable or uninitialized", UserWarning
            )
            yield
    except CheckpointException as error:
        raise _original(next(original for original, _ in error.failures.values())) from error


def _original(error: BaseException) -> BaseException:
    """What happened first, where closing torch's archive after it raised a ``RuntimeError`` of its own (measured)."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    interrupts = [link for link in chain if not isinstance(link, Exception)]
    system_errors = [link for link in chain if isinstance(link, OSError)]
    return [*interrupts, *system_errors, error][0]


def parse_metadata(directory: Path, files: Mapping[str, Any], tables: Mapping[str, Any]) -> metadata.Metadata:
    """Read DCP's ``.metadata``, whose checksum must have matched, without executing anything it could name.

    Args:
        directory: The checkpoint.
        files: The files that were verified: it may name no other.
        tables: Tensor key to shape and dtype, from the manifest: it must know each.

    Raises:
        CheckpointError: It names a class that is no plain record of DCP, or contradicts the manifest.
    """
    attempted = f"cannot read the checkpoint {directory}"
    remedy = "load a checkpoint that this library wrote"
    try:
        parsed = _Unpickler(io.BytesIO((directory / METADATA).read_bytes())).load()
        elsewhere = {place.relative_path for place in parsed.storage_data.values()} - set(files)
        unknown = [key for key, table in tables.items() if not _agrees(parsed.state_dict_metadata.get(key), table)]
    except Exception as error:
        facts = (f"{METADATA} is no metadata of torch.distributed.checkpoint",)
        raise CheckpointError(attempted, facts, remedy, f"{type(error).__name__}: {error}") from error
    if elsewhere:
        raise CheckpointError(
            attempted, (f"{METADATA} names files that are no part of it: {sorted(elsewhere)}",), remedy
        )
    if unknown:
        raise CheckpointError(attempted, (f"{METADATA} and the manifest disagree on {unknown[:5]}",), remedy)
    verified: metadata.Metadata = parsed
    return verified


def _agrees(record: Any, table: Mapping[str, Any]) -> bool:
    return (
        isinstance(record, metadata.TensorStorageMetadata)
        and list(record.size) == table["shape"]
        and str(record.properties.dtype) == f"torch.{table['dtype']}"
    )
