"""Run the benchmarks, each in a process of its own, and put their numbers into one file.

python benchmarks/everything.py                 # tables, and build/bench.json
python benchmarks/everything.py engine scope    # some of them
python benchmarks/everything.py --smoke         # whether they run
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ALL = ("engine", "bytes", "scope", "ranks", "training", "audit", "startup", "codemod", "gpu")
"""In the order of docs/performance.md."""


def run(name: str, folder: Path, *, smoke: bool) -> tuple[int, dict[str, Any]]:
    """One benchmark: its exit status, and what it found."""
    numbers = folder / f"{name}.json"
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(numbers), *(["--smoke"] if smoke else [])]
    start = time.perf_counter()
    status = subprocess.run(command, check=False).returncode
    found = json.loads(numbers.read_text()) if numbers.exists() else {}
    return status, {**found, "status": status, "seconds": time.perf_counter() - start}


def main(argv: list[str] | None = None) -> int:
    """Run; returns 1 if one of them failed."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("names", nargs="*", metavar="NAME", help=f"which ones: {', '.join(ALL)} (default all)")
    made.add_argument("--smoke", action="store_true", help="small and short: whether they run, not how fast")
    made.add_argument(
        "--json", type=Path, default=Path("build/bench.json"), metavar="PATH", help="where the numbers go"
    )
    options = made.parse_args(argv)
    unknown = [name for name in options.names if name not in ALL]
    if unknown:
        made.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(ALL)}")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names or ALL:
            print(f"== {name}", flush=True)
            _, found[name] = run(name, Path(folder), smoke=options.smoke)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=2) + "\n")
    failed = [name for name, numbers in found.items() if numbers["status"]]
    print(f"{options.json}: {', '.join(found)}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
