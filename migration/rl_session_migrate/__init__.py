"""Tools that move a training loop from manual offload calls to `rl_session` scopes.

Nothing is here yet: see `migration/README.md`. The package knows no engine of its own and will use the one in
`rl_session`.
"""

__all__: list[str] = []
