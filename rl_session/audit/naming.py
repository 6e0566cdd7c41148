"""Where the files of one run lie: the driver's, those of other sources beside it, and older runs moved aside.

Knows names only; it neither reads nor writes a log.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path
from urllib.parse import quote

_SUFFIX = ".jsonl"


def sibling_path(path: str | os.PathLike[str], source: str) -> Path:
    """Return the file of another source beside the driver's: ``run.jsonl`` to ``run.rank:0.jsonl``.

    Args:
        path: The driver's file.
        source: Such as ``"rank:0"``. Characters that a file name cannot hold are percent-encoded.
    """
    path = Path(path)
    stem = path.name.removesuffix(_SUFFIX)
    return path.with_name(f"{stem}.{quote(source, safe=':@+=, ', errors='surrogateescape')}{_SUFFIX}")


def find_siblings(path: Path) -> list[Path]:
    """Return the files that may be siblings of ``path``, by name only and sorted.

    The name alone cannot tell ``run.rank:0.jsonl`` from the main file of a log called ``run.b.jsonl``: the
    caller compares run ids.
    """
    stem = glob.escape(path.name.removesuffix(_SUFFIX))
    return sorted(found for found in path.parent.glob(f"{stem}.*{_SUFFIX}") if found.name != path.name)


def rotate(path: Path) -> Path | None:
    """Move a non-empty file out of the way and say where it went; None when there was nothing to move.

    The new name ends in ``.bak-<n>``, never in ``.jsonl``, so that no reader takes it for a sibling.

    Raises:
        OSError: The file could not be renamed.
    """
    # Only a regular file has an older run in it: /dev/stderr stays where it is.
    if not path.is_file() or path.stat().st_size == 0:
        return None
    n = 1
    while os.path.lexists(target := path.with_name(f"{path.name}.bak-{n}")):
        n += 1
    path.rename(target)
    return target
