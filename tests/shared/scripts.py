"""Scripts of the repository as modules: a process of its own would only import everything once more."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load_script(path: str) -> ModuleType:
    """Run a script, such as ``examples/grpo.py``, as a module that nobody else sees."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(f"script_{file.parent.name}_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
