"""Where the files of one run lie: the driver's, those of other sources beside it, parts, and older runs moved aside.

    run.jsonl                  the driver's, being written
    run.jsonl.part-1, .part-2  what it held before, when a log is rotated by size; oldest first
    run.rank:0.jsonl           another source's
    run.rank:0@critic.jsonl    a rank of another policy of the run
    run.rank:0+1.jsonl         a rank that was started anew after it was lost
    run.jsonl.bak-1            an older run of that name, and its parts: run.jsonl.bak-1.part-1

Knows names only; it neither reads nor writes a log.
"""

from __future__ import annotations

import glob
import os
import re
from functools import lru_cache
from pathlib import Path

_SUFFIX = ".jsonl"
_RANK = re.compile(r"rank:(0|[1-9][0-9]*)(?:@.*?)?(?:\+[1-9][0-9]*)?$")
_PART = re.compile(r"\.part-([1-9][0-9]*)$")


def sibling_path(path: str | os.PathLike[str], source: str) -> Path:
    """Return the file of another source beside the driver's: ``run.jsonl`` to ``run.rank:0.jsonl``.

    Args:
        path: The driver's file.
        source: Such as ``"rank:0"``. Characters that a file name cannot hold are percent-encoded.
    """
    from urllib.parse import quote  # only who writes needs it

    path = Path(path)
    stem = path.name.removesuffix(_SUFFIX)
    return path.with_name(f"{stem}.{quote(source, safe=':@+=, ', errors='surrogateescape')}{_SUFFIX}")


def rank_source(rank: int, *, policy: str = "", restarts: int = 0) -> str:
    """Return the source of a rank's records: ``rank:0``, ``rank:0@critic``, ``rank:0+1``.

    Args:
        rank: Its number.
        policy: Whose, where another policy of the run has ranks too.
        restarts: How often it was started anew. A worker that was killed leaves a file of its own: nobody knows how far
            its numbers went.
    """
    return f"rank:{rank}{f'@{policy}' if policy else ''}{f'+{restarts}' if restarts else ''}"


@lru_cache(maxsize=4096)
def rank_of(source: str) -> int | None:
    """Return the number of the rank that a source is, or None where it is something else."""
    match = _RANK.match(source)
    return int(match[1]) if match else None


def find_siblings(path: Path) -> list[Path]:
    """Return the files that may be siblings of ``path``, by name only and sorted.

    The name alone cannot tell ``run.rank:0.jsonl`` from the main file of a log called ``run.b.jsonl``: the
    caller compares run ids. A file of which only parts are left (a crash in the middle of a rotation) counts.
    """
    stem = glob.escape(path.name.removesuffix(_SUFFIX))
    whole = set(path.parent.glob(f"{stem}.*{_SUFFIX}"))
    parted = {part.with_name(_PART.sub("", part.name)) for part in path.parent.glob(f"{stem}.*{_SUFFIX}.part-*")}
    return sorted(found for found in whole | parted if found.name != path.name and found.name.endswith(_SUFFIX))


def find_parts(path: Path) -> list[tuple[int, Path]]:
    """Return the parts of ``path`` and their numbers, oldest first; ``path`` itself is not among them."""
    numbered = []
    for found in path.parent.glob(f"{glob.escape(path.name)}.part-*"):
        match = _PART.search(found.name)
        if match and found.name == f"{path.name}{match[0]}":
            numbered.append((int(match[1]), found))
    return sorted(numbered)


def next_part(path: Path) -> Path:
    """Return the name under which the content of ``path`` becomes its newest part."""
    parts = find_parts(path)
    return path.with_name(f"{path.name}.part-{parts[-1][0] + 1 if parts else 1}")


def rotate(path: Path) -> Path | None:
    """Move a non-empty file and its parts out of the way and say where to; None when there was nothing to move.

    The new name ends in ``.bak-<n>``, never in ``.jsonl``, so that no reader takes it for a sibling.

    Raises:
        OSError: A file could not be renamed.
    """
    # Only a regular file has an older run in it: /dev/stderr stays where it is.
    has_content = path.is_file() and path.stat().st_size > 0
    parts = find_parts(path)
    if not has_content and not parts:
        return None
    n = 1
    while os.path.lexists(target := path.with_name(f"{path.name}.bak-{n}")) or find_parts(target):
        n += 1
    for _, part in parts:
        part.rename(target.with_name(f"{target.name}{part.name.removeprefix(path.name)}"))
    if has_content:
        path.rename(target)
    return target
