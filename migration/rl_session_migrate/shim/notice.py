"""What the shim says to the user: a deprecation warning once a call site. Knows nothing of policies."""

from __future__ import annotations

import threading
import warnings

from rl_session.driver.callsite import call_frame

__all__ = ["GUIDE", "warn_once"]

GUIDE = "docs/legacy-api.md"

_warned: set[tuple[str, int, str]] = set()
_lock = threading.Lock()


def warn_once(call: str, instead: str) -> None:
    """Warn with a ``DeprecationWarning`` at the user's line, once for each line and call.

    Where warnings are errors it is raised before anything was done, and again the next time.

    Args:
        call: The legacy call, such as ``"policy.prepare_for_training()"``.
        instead: What to write.
    """
    frame = call_frame()
    name, line = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("<a thread>", 1)
    key = (name, line, call)
    with _lock:
        if key in _warned:
            return
    module = str(frame.f_globals.get("__name__", "?")) if frame is not None else "?"
    message = f"{call} is of the legacy API; write: {instead}  ({GUIDE})"
    warnings.warn_explicit(message, DeprecationWarning, name, line, module=module)
    with _lock:
        _warned.add(key)
