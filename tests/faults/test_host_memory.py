"""Faults 37 to 42: host memory."""

from __future__ import annotations

import ast
import gc
import weakref
from pathlib import Path

from rig import Make
from torch import Tensor

import rl_session as rs
from rl_session.offload.device import EmulatedDevice

SOURCE = Path(rs.__file__).parent


def test_row_37_the_host_never_holds_the_state_twice(make: Make) -> None:
    """Others: twice the host memory at the peak, because a new pinned buffer is made while the old one lives.

    Here: over five cycles the pool holds what the state has, and never more.
    By: one buffer a storage, made once and reused for ever (`offload/host_pool`).
    """
    rig = make()
    with rig.policy.training_mode():
        rig.train()
    sizes = rig.policy._control.ask("sizes")
    state = sum(sizes.values())
    held = []
    for _ in range(5):
        with rig.policy.training_mode():
            rig.train()
        held.append(rig.policy.memory()["host_held"])
    assert max(held) <= 1.0 * state
    assert len(set(held)) == 1


class _Pins(ast.NodeVisitor):
    """Calls that pin memory, or may."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        keywords = {keyword.arg for keyword in node.keywords}
        if name == "pin_memory" or "pin_memory" in keywords or (name in ("to", "cpu") and "non_blocking" in keywords):
            self.found.append(f"line {node.lineno}: {ast.unparse(node.func)}")
        self.generic_visit(node)


def test_row_39_host_buffers_come_from_the_pool_and_nowhere_else() -> None:
    """Others: `.to("cpu", non_blocking=True)` pins memory behind everybody's back, without a budget.

    Here: no line of the library pins implicitly; the doctor's measurement is the one place that pins on purpose.
    By: a rule over the source, and one pool with a budget (`offload/host_pool`).
    """
    pins = {}
    for path in SOURCE.rglob("*.py"):
        visitor = _Pins()
        visitor.visit(ast.parse(path.read_text(encoding="utf-8")))
        if visitor.found:
            pins[path.relative_to(SOURCE).as_posix()] = visitor.found
    assert set(pins) == {"doctor/bandwidth.py"}, pins
    planted = _Pins()
    planted.visit(ast.parse("x.to('cpu', non_blocking=True); torch.empty(3, pin_memory=True); y.pin_memory()"))
    assert len(planted.found) == 3


def test_row_40_closing_gives_every_host_buffer_back(make: Make) -> None:
    """Others: pinned blocks stay cached after the last user, and Ray kills the node for it.

    Here: after `close()` the pool holds nothing and its buffers are gone.
    By: buffers are returned on close, and the pool trimmed (`offload/host_pool`).
    """
    session = rs.Session(verify="checksum")
    rig = make(session=session)
    with rig.policy.training_mode():
        rig.train()
    units = rig.policy._control.group.worker.engine.ledger.own_units()
    buffers = [weakref.ref(unit.host.data) for unit in units if unit.host is not None]
    assert buffers
    assert session.memory()["host_held"] > 0
    del units
    pool = session._run.pool
    session.close()
    gc.collect()
    assert pool.held_bytes == 0
    assert not [ref for ref in buffers if ref() is not None]


class Pinning(EmulatedDevice):
    """A device that wants pinned memory, on a machine that locks some or none."""

    wants_pinned = True

    def __init__(self, *, locks: bool) -> None:
        super().__init__()
        self.locks = locks
        self.order: list[str] = []

    def pin(self, block: Tensor) -> bool:
        self.order.append("pin")
        return self.locks


def test_row_41_a_pin_that_fails_falls_back_once_and_says_so(make: Make) -> None:
    """Others: a memlock limit makes pinning fail, and every later step is half as fast, unsaid.

    Here: pageable buffers from then on, one warning record, the same bits.
    By: the pool remembers that pinning failed (`offload/host_pool`).
    """
    rig = make(device=Pinning(locks=False), base="resident")
    before = rig.contents()
    for _ in range(3):
        rig.policy.offload()
        rig.policy.switch("resident")
    assert rig.contents() == before
    rig.train()  # makes optimizer state, which needs buffers of its own
    rig.policy.offload()
    assert rig.session._run.pool.num_allocations >= 2
    assert rig.device.order == ["pin"]
    assert [r.event.code for r in rig.records("warning")].count("pinning_failed") == 1


def test_row_42_an_affinity_hook_comes_before_the_first_pinned_block(make: Make) -> None:
    """Others: host memory on the far NUMA node halves the bandwidth.

    Here: a hook runs once, before the first pinned buffer exists; `rl-session doctor` says which node to bind to.
    By: the pool calls it before it pins (`offload/host_pool`).
    """
    device = Pinning(locks=True)
    rig = make(device=device, base="resident")
    rig.session._run.pool.before_pin = lambda: device.order.append("affinity")
    rig.policy.offload()
    rig.policy.switch("resident")
    rig.policy.offload()
    assert device.order[0] == "affinity"
    assert device.order.count("affinity") == 1
    assert "pin" in device.order
