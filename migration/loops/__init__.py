"""Training loops, twice: ``legacy`` by hand, ``scoped`` exactly as ``rl-session migrate`` leaves the legacy ones."""
