"""Bytes copied between host and device per training step: the pieces of ``benchmarks/bytes.py``.

``sizes`` says how large everything is, ``legacy`` and ``legacy_loops`` replay the manual API, ``scoped`` runs the same loops with
scopes, ``phases`` and ``bound`` say what the least is that any schedule could copy. Nothing here knows how the library decides.
"""
