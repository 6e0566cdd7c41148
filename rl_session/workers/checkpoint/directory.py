"""The directory of a checkpoint: its manifest, its checksums, and how one takes the place of another.

Knows files and JSON; nothing of tensors.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from rl_session.errors import CheckpointError, CheckpointWriteError, RLSessionError
from rl_session.workers.ranks import Ranks

__all__ = [
    "MANIFEST",
    "FileIdentity",
    "file_identity",
    "free_nbytes",
    "read_manifest",
    "replacing",
    "replacing_together",
    "target_of",
    "verify",
]

MANIFEST: Final = "manifest.json"
FORMAT: Final = "rl-session-checkpoint"
VERSION: Final = 1

FileIdentity = tuple[int, int, int, int]
"""Device, inode, size and modification time of a file: what tells that it is still the one that was verified."""


# -- writing -----------------------------------------------------------------------------------------------------------


def target_of(path: str | os.PathLike[str]) -> Path:
    """Where a checkpoint for ``path`` goes: links resolved, and refused if something else is there.

    Raises:
        CheckpointError: A file is there, or a directory with anything in it that is not a checkpoint of ours.
    """
    try:
        target = Path(os.path.realpath(path))
        if not target.exists():
            return target
        if not target.is_dir():
            raise _not_ours(target, "a file is there")
        names = sorted(entry.name for entry in target.iterdir())
    except (OSError, TypeError, UnicodeError) as error:
        raise _not_ours(Path(repr(path)), "the path cannot be used", f"{type(error).__name__}: {error}") from error
    if not names:
        return target
    try:
        files = set(_parse(target)["files"]) | {MANIFEST}
    except CheckpointError as error:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise _not_ours(
            target, f"a directory is there that is no checkpoint: {len(names)} entries ({shown})", error.attempted
        ) from error
    foreign = [name for name in names if name not in files]
    if foreign:
        raise _not_ours(
            target, f"the checkpoint there also holds files that are no part of it: {', '.join(foreign[:5])}"
        )
    return target


def _not_ours(target: Path, what: str, cause: str = "") -> CheckpointError:
    return CheckpointError(
        f"cannot write a checkpoint at {target}", (what,), "give another path, or move what is there away", cause
    )


@contextmanager
def replacing(target: Path, nbytes: int) -> Iterator[Path]:
    """Give a fresh private directory beside ``target`` that takes its place when the body ends, or vanishes.

    Args:
        target: From :func:`target_of`. Missing parents are created.
        nbytes: How much the body will write, for the check of the room and for the message.

    Raises:
        CheckpointWriteError: Something could not be written; what stood at ``target`` still stands.
    """
    staging: Path | None = None
    failure: Exception
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if 0 < free_nbytes(target) < nbytes:  # 0 is what some network file systems say
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        staging = Path(tempfile.mkdtemp(prefix=_hidden(target, "tmp"), dir=target.parent))  # mode 0700
        yield staging
        _seal(staging)
        _swap(staging, target)
        return
    except RLSessionError:
        raise
    except Exception as error:
        failure = error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    raise _unwritten(target, nbytes, failure) from failure


def _unwritten(target: Path, nbytes: int, failure: Exception) -> CheckpointWriteError:
    return CheckpointWriteError(
        f"cannot write the checkpoint {target}",
        (
            f"bytes needed: {nbytes:,}; bytes free on the disk: {free_nbytes(target):,}",
            "what stood there before still stands; nothing is left of the attempt",
        ),
        "free some room, or give a path on another disk: policy.save_checkpoint(path)",
        f"{type(failure).__name__}: {failure}",
    )


@contextmanager
def replacing_together(target: Path, nbytes: int, ranks: Ranks) -> Iterator[Path]:
    """As :func:`replacing`, on several ranks at once: the first one makes the directory, and renames it when all are done.

    The body must fail on all ranks or on none.

    Raises:
        CheckpointWriteError: As for :func:`replacing`, on every rank.
    """
    if ranks.count == 1:
        with replacing(target, nbytes) as staging:
            yield staging
        return
    attempted = f"cannot write the checkpoint {target}"
    with ExitStack() as stack:
        with ranks.together(attempted):
            made = str(stack.enter_context(replacing(target, nbytes))) if ranks.is_first else ""
        staging = Path(ranks.gather_objects(made)[0])
        with ranks.together(attempted):
            if not staging.is_dir():
                raise FileNotFoundError(errno.ENOENT, "the directory of the first rank is not there", str(staging))
        try:
            yield staging
        except RLSessionError:
            raise
        except Exception as failure:
            raise _unwritten(target, nbytes, failure) from failure
        with ranks.together(attempted):
            stack.close()  # on the first rank: seal it, and rename it into place


def _hidden(target: Path, what: str) -> str:
    """How the names of our temporary siblings begin (a file name has 255 bytes at most)."""
    return f".{target.name[:40]}.{what}-"


def _seal(staging: Path) -> None:
    """Make the files private to their owner and durable."""
    for file in staging.iterdir():
        file.chmod(0o600)
        _sync(file)
    _sync(staging)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(staging: Path, target: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        staging.rename(target)
        _sync_if_possible(target.parent)
    else:
        aside = target.with_name(_hidden(target, "old") + secrets.token_hex(4))
        try:
            target.rename(aside)
            staging.rename(target)
            _sync_if_possible(target.parent)  # before the old one goes
        except BaseException:
            if aside.exists() and not target.exists():
                aside.rename(target)
            raise
        finally:
            if target.exists():
                shutil.rmtree(aside, ignore_errors=True)


def _sync_if_possible(parent: Path) -> None:
    # The new one stands by now: a file system that cannot sync directories makes it no failure.
    with suppress(OSError):
        _sync(parent)


def free_nbytes(path: Path) -> int:
    """Bytes free on the disk of ``path``, or of its nearest ancestor that exists."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def write_manifest(directory: Path, body: dict[str, Any]) -> None:
    """Write the manifest of a directory whose files are all there.

    Args:
        directory: Where.
        body: What it says, as JSON, besides the format, the table of files and its own checksum.
    """
    files = {
        file.name: {"size": file.stat().st_size, "sha256": _file_digest(file)} for file in sorted(directory.iterdir())
    }
    manifest = {"format": FORMAT, "version": VERSION, "files": files, **body}
    manifest["sha256"] = _digest(manifest)
    (directory / MANIFEST).write_text(json.dumps(manifest, allow_nan=False), encoding="utf-8")


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(manifest: dict[str, Any]) -> str:
    """SHA-256 of what a manifest says, whatever its spelling, besides its own checksum."""
    said = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# -- reading -----------------------------------------------------------------------------------------------------------


def read_manifest(path: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """The directory of a checkpoint, links resolved, and its manifest, whose own checksum matched.

    Raises:
        CheckpointError: No checkpoint there, a damaged manifest, or one from a later version.
    """
    try:
        directory = Path(os.path.realpath(path))
        if not directory.exists():
            raise _unreadable(directory, "there is nothing at that path", *_clues(directory))
        if not directory.is_dir():
            raise _unreadable(directory, "it is a file; a checkpoint is a directory")
    except (OSError, TypeError, UnicodeError) as error:
        raise _unreadable(Path(repr(path)), f"the path cannot be used: {error}") from error
    manifest = _parse(directory)
    if manifest["version"] > VERSION:
        raise CheckpointError(
            f"cannot read the checkpoint {directory}",
            (f"it has format version {manifest['version']}; this library knows versions up to {VERSION}",),
            "upgrade rl-session to read it",
        )
    if manifest.get("sha256") != _digest(manifest):
        raise _damaged(directory, MANIFEST, "its content does not match its checksum")
    return directory, manifest


def _clues(directory: Path) -> Iterator[str]:
    nearest = directory.parent
    while not nearest.exists():
        nearest = nearest.parent
    yield f"the nearest directory that exists is {nearest}"
    if nearest == directory.parent:
        for sibling in nearest.iterdir():
            if sibling.name.startswith(_hidden(directory, "old")):
                yield f"a save was killed while it replaced it: the checkpoint from before is {sibling}"


def _parse(directory: Path) -> dict[str, Any]:
    """The manifest, known to be one of ours by its format; not verified yet."""
    file = directory / MANIFEST
    if not file.is_file():
        raise _unreadable(directory, f"it has no {MANIFEST}: not a checkpoint, or one that was never finished")
    try:
        manifest = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(directory, MANIFEST, "it is truncated or damaged", error) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise _unreadable(directory, f"its {MANIFEST} is not one of an rl-session checkpoint")
    if not isinstance(manifest.get("version"), int) or not isinstance(manifest.get("files"), dict):
        raise _damaged(directory, MANIFEST, "it lacks its version or its table of files")
    return manifest


def verify(directory: Path, manifest: dict[str, Any]) -> dict[str, FileIdentity]:
    """Compare every file's size and checksum with the manifest.

    Returns:
        The identity of each file, to compare again once it has been read.

    Raises:
        CheckpointError: Naming the first file that is missing, truncated or damaged.
    """
    identities = {}
    for name, expected in manifest["files"].items():
        file = directory / name
        if name != Path(name).name:
            raise _damaged(directory, MANIFEST, f"it names a file elsewhere: {name}")
        try:
            status = file.stat()
            if not stat.S_ISREG(status.st_mode):
                raise _damaged(directory, name, "it is no regular file")
            if status.st_size != expected["size"]:
                raise _damaged(directory, name, f"it has {status.st_size:,} bytes; {expected['size']:,} were written")
            if _file_digest(file) != expected["sha256"]:
                raise _damaged(directory, name, "its content does not match its checksum")
        except OSError as error:
            raise _damaged(directory, name, "it cannot be read", error) from error
        identities[name] = _identity(status)
    return identities


def file_identity(file: Path) -> FileIdentity | None:
    """The identity of a file now, or None where there is none."""
    try:
        return _identity(file.stat())
    except OSError:
        return None


def _identity(status: os.stat_result) -> FileIdentity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _unreadable(directory: Path, *facts: str) -> CheckpointError:
    return CheckpointError(
        f"cannot read the checkpoint {directory}", facts, "give the path that was passed to save_checkpoint()"
    )


def _damaged(directory: Path, name: str, what: str, cause: BaseException | None = None) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {directory} is damaged: {name}",
        (what, "nothing was loaded"),
        "load another checkpoint; this one cannot be trusted",
        "" if cause is None else f"{type(cause).__name__}: {cause}",
    )
