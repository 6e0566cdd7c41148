"""What ``rl_session_migrate`` exports, and that importing it is light."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rl_session_migrate


def test_exports_are_sorted_listed_and_found_at_their_homes() -> None:
    names = rl_session_migrate.__all__
    assert list(names) == sorted(set(names))
    assert dir(rl_session_migrate) == list(names)
    assert set(names) == set(rl_session_migrate._HOME_OF)
    for name in names:
        value = getattr(rl_session_migrate, name)
        home = sys.modules[rl_session_migrate._HOME_OF[name]]
        assert value is getattr(home, name)
        assert name in home.__all__
        assert value.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'LegacyTeacher'"):
        rl_session_migrate.LegacyTeacher  # noqa: B018


@pytest.mark.parametrize("name", ["LegacyConfig", "verify", "Report"])
def test_what_needs_no_torch_loads_none(name: str) -> None:
    script = f"import sys, rl_session_migrate as m; m.{name}; assert not {{'torch', 'ray'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)
