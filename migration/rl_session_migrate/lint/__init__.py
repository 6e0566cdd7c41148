"""Finds mistakes in training loops without running them: wrong order of moves, wrong mode, scopes that cannot work.

    from rl_session_migrate.lint import lint_text

    for finding in lint_text(source, "train.py"):
        print(finding)

Every finding is a statement about a path that the source shows. What the source does not show (where a policy is when a
function is handed it, which backend runs) is never guessed at: unknown means silent.
"""

from rl_session_migrate.lint.codes import CODES, Code, Severity
from rl_session_migrate.lint.config import LintConfig, load_config
from rl_session_migrate.lint.engine import Report, lint_files, lint_text
from rl_session_migrate.lint.findings import Finding

__all__ = [
    "CODES",
    "Code",
    "Finding",
    "LintConfig",
    "Report",
    "Severity",
    "lint_files",
    "lint_text",
    "load_config",
]
