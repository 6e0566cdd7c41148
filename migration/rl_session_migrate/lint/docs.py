"""Makes ``docs/lint.md`` from the table of codes: ``python -m rl_session_migrate.lint.docs > docs/lint.md``."""

from __future__ import annotations

import sys
from textwrap import fill

from rl_session_migrate.lint.codes import CODES, Code

__all__ = ["render"]

_HEAD = """\
# `rl-session lint`

<!-- Made by `python -m rl_session_migrate.lint.docs`; a test compares the two. -->

Finds mistakes in training loops without running them: compute on weights that are away, moves that destroy gradients,
engines that are asleep, scopes that cannot work. It reads both worlds, the manual NeMo-RL API and the scopes of this
library, and imports neither torch nor your code.

```
$ rl-session lint train.py
train.py:88:12: RLM001 policy.get_logprobs() after offload_to_cpu() on line 81 sent the parameters away
  why: kernels read freed memory: an illegal memory access, or a storage of size 0, far from the cause
  write: policy.prepare_for_lp_inference() before it, or: with scopes(policy).logprob_mode():
```

`--format json` and `--format github` (marks beside the lines of a pull request) say the same. `--select RLM0` and `--ignore
RLM005` take codes or their beginnings. `# noqa: RLM001` silences a line. Exit status: 0 nothing found, 1 something found, 2
wrong usage or a file that cannot be parsed. Files are checked in parallel.

```toml
[tool.rl-session.lint]
select = ["RLM"]
ignore = ["RLM005"]
exclude = ["third_party/*"]

[tool.rl-session.migrate]      # read by the codemod too
policies = ["learner"]         # names that are policies here
values = ["baseline"]
engines = ["sampler"]
ignore = ["pg"]                # names that are no tenant here
```

## What it knows, and what it does not

*Who is a policy, a value model or an engine* is known by how an object is made (`rs.attach(...)`, `Policy(...)`), by
annotations, by the names above, by the names that loops use (`policy`, `value_model`, `policy_generation`, `_trainer`, `pg`,
...), and last by what is called on it. What is made or annotated as something else is left alone, and so is a module that
neither imports nor calls either API.

*Where a tenant is* is followed along every path of a function, through loops, branches, `with`, early exits and calls of
functions in the same module. Tests that agree are kept in agreement: what one `if` prepares, a later `if` on the same
condition may use. A finding names the call that made it so, and the tests on the way where another path is fine.

*Nothing is guessed.* A function that is handed a policy begins with "unknown", and unknown is never reported: somebody
elsewhere may have prepared it. If a caller in the same module is known to have sent it away, that is reported, at the call
that computes, with the line of the caller. A tenant that is handed to a function out of sight is unknown afterwards.

Not seen: paths through an exception (what `except` and `finally` blocks do is not followed there), other threads, tasks and
processes, methods that are called through callbacks, strings or `.remote(...)`, and which backend runs. Where backends
differ, the finding says which one is hit. Loops that speak of `MegatronGeneration` or `blocks_training` are taken to know
that a colocated Megatron engine serves the training weights: there no room is asked for. Code in `with pytest.raises(...)`
is wrong on purpose, and left alone.

Some traps cannot be seen in source at all: a checkpoint finalised by a background thread that calls the same workers, a
handle whose other half sleeps the engine in another process, parameters that are stale until gathered, a missing
`finish_inference` of an old DTensor worker. The guards and the audit log are for those.

## Codes

"""


def render() -> str:
    """The whole document."""
    rows = "".join(f"| [{c.code}](#{_anchor(c)}) | {c.name} | {c.severity} |\n" for c in CODES.values())
    table = f"| code | name | severity |\n| --- | --- | --- |\n{rows}\n"
    severities = _wrapped(
        "An *error* fails or trains wrongly on the path shown; a *warning* fails if something else goes wrong, or with "
        "one of the backends; a *notice* works, and wastes time."
    )
    return _HEAD + table + severities + "\n" + "\n".join(_section(code) for code in CODES.values())


def _wrapped(text: str) -> str:
    return fill(text, 125, break_long_words=False, break_on_hyphens=False) + "\n"


def _anchor(code: Code) -> str:
    return f"{code.code}-{code.name}".lower()


def _section(code: Code) -> str:
    more = f"\n{_wrapped(code.more)}" if code.more else ""
    why = code.why if code.why.startswith("vLLM") else code.why[0].upper() + code.why[1:]
    fence = "```" if code.code == "RLM000" else "```python"  # what does not parse is no Python
    return (
        f"### {code.code} {code.name}\n\n{why}.\n{more}\nWrong:\n\n{fence}\n{code.wrong}```\n\n"
        f"Right:\n\n{fence}\n{code.right}```\n"
    )


if __name__ == "__main__":
    sys.stdout.write(render())
