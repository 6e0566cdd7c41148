"""Host buffers: exact, reused, within a budget, pinned at most once over, and given back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_session.errors import HostMemoryError
from rl_session.offload.device import EmulatedDevice
from rl_session.offload.host_pool import HostPool

BIG = 1 << 20


class PinningDevice(EmulatedDevice):
    """Looks like CUDA to the pool: counts what is pinned, and can refuse."""

    wants_pinned = True

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__()
        self.torch_device = torch.device("cuda", 0)
        self.refuses = refuses
        self.pinned: list[tuple[int, int]] = []
        self.attempts = 0

    def pin(self, block: torch.Tensor) -> bool:
        self.attempts += 1
        if not self.refuses:
            self.pinned.append((block.data_ptr(), block.numel()))
        return not self.refuses

    def unpin(self, block: torch.Tensor) -> None:
        self.pinned.remove((block.data_ptr(), block.numel()))


def test_buffers_are_exactly_as_long_as_asked_and_do_not_overlap() -> None:
    pool = HostPool()
    sizes = [1, 63, 64, 65, 1000, BIG + 3]
    buffers = pool.acquire(sizes)
    assert [b.data.numel() for b in buffers] == sizes
    for value, buffer in enumerate(buffers):
        buffer.data.fill_(value)
    assert all(bool((buffer.data == value).all()) for value, buffer in enumerate(buffers))
    assert pool.held_bytes == pool.in_use_bytes == sum(sizes)


def test_small_buffers_asked_for_together_share_one_block_and_large_ones_have_their_own() -> None:
    pool = HostPool()
    buffers = pool.acquire([10, BIG, 20])
    assert buffers[0].block is buffers[2].block
    assert buffers[1].block is not buffers[0].block
    assert pool.num_allocations == 2


def test_a_second_cycle_reuses_the_same_memory_and_allocates_nothing() -> None:
    pool = HostPool()
    first = pool.acquire([10, 20, BIG])
    pool.release(first)
    assert (pool.in_use_bytes, pool.held_bytes) == (0, 30 + BIG)
    before = pool.num_allocations
    second = pool.acquire([20, 10, BIG])
    assert {id(b) for b in second} == {id(b) for b in first}
    assert pool.num_allocations == before


def test_an_idle_buffer_serves_only_its_own_size() -> None:
    pool = HostPool()
    pool.release(pool.acquire([10]))
    assert pool.acquire([11])[0].data.numel() == 11
    assert pool.held_bytes == 21


def test_over_its_budget_it_refuses_by_bytes_and_nothing_is_acquired() -> None:
    pool = HostPool(budget=100)
    held = pool.acquire([60])
    with pytest.raises(HostMemoryError, match="41 more bytes do not fit") as caught:
        pool.acquire([41])
    assert caught.value.facts == ("budget: 100 bytes", "held: 60 bytes")
    assert "host_budget" in caught.value.remedy
    assert pool.held_bytes == pool.in_use_bytes == 60
    pool.release(held)
    with pytest.raises(HostMemoryError):
        pool.acquire([60, 41])
    assert pool.in_use_bytes == 0, "the idle buffer that was taken is idle again"


def test_idle_buffers_make_room_within_the_budget() -> None:
    pool = HostPool(budget=100)
    pool.release(pool.acquire([60]))
    assert pool.acquire([100])[0].data.numel() == 100
    assert pool.held_bytes == 100


def test_trimming_frees_blocks_that_are_idle_as_a_whole_and_only_those() -> None:
    pool = HostPool()
    kept, idle = pool.acquire([10, 20])
    alone = pool.acquire([30])
    pool.release([idle, *alone])
    assert pool.trim() == 30
    assert (pool.held_bytes, pool.in_use_bytes) == (30, 10)
    pool.release([kept])
    assert pool.trim() == 30
    assert (pool.held_bytes, pool.in_use_bytes) == (0, 0)


def test_each_block_is_pinned_whole_on_a_page_and_unpinned_when_it_goes() -> None:
    pool, device = HostPool(), PinningDevice()
    buffers = pool.acquire([10, 20, BIG], device)
    assert len(device.pinned) == 2
    assert all(address % 4096 == 0 for address, _ in device.pinned)
    pool.release(buffers)
    assert pool.acquire([10], device)[0] in buffers
    assert device.attempts == 2, "a reused buffer is pinned already"
    pool.release(buffers[:1])
    pool.trim()
    assert device.pinned == []


def test_pinning_is_skipped_when_it_is_not_wanted_and_on_devices_without_a_use_for_it() -> None:
    device = PinningDevice()
    HostPool().acquire([10], device, pin=False)
    HostPool().acquire([10])
    HostPool().acquire([10], EmulatedDevice())
    assert device.attempts == 0


def test_when_pinning_fails_it_falls_back_once_with_one_warning_and_right_data() -> None:
    told: list[str] = []
    pool, device = HostPool(warn=told.append), PinningDevice(refuses=True)
    first, second = pool.acquire([10], device)[0], pool.acquire([20], device)[0]
    first.data.fill_(7)
    assert first.data.tolist() == [7] * 10
    assert second.data.numel() == 20
    assert device.attempts == 1
    assert len(told) == 1
    assert "ulimit" in told[0]


def test_the_affinity_hook_runs_once_and_before_the_first_pin() -> None:
    order: list[str] = []
    pool, device = HostPool(), PinningDevice()
    pin = device.pin

    def recording(block: torch.Tensor) -> bool:
        order.append("pin")
        return pin(block)

    device.pin = recording  # type: ignore[method-assign]
    pool.before_pin = lambda: order.append("affinity")
    pool.acquire([10, BIG], device)
    pool.acquire([11], device)
    assert order == ["affinity", "pin", "pin", "pin"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no memory"), MemoryError()])
def test_a_failure_half_way_gives_everything_back(error: BaseException) -> None:
    pool, device = HostPool(), PinningDevice()
    pool.release(pool.acquire([10], device))

    def failing(block: torch.Tensor) -> bool:
        if block.numel() >= BIG + 64:
            raise error
        return PinningDevice.pin(device, block)

    device.pin = failing  # type: ignore[method-assign]
    expected: Any = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else HostMemoryError
    with pytest.raises(expected):
        pool.acquire([10, BIG, BIG + 1], device)
    assert pool.in_use_bytes == 0
    assert pool.held_bytes == 10
    assert len(device.pinned) == 1, "only the block of the idle buffer is pinned"


def test_the_host_itself_having_no_room_is_a_typed_error() -> None:
    with pytest.raises(HostMemoryError, match="no room"):
        HostPool().acquire([1 << 60])
