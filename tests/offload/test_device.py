"""The emulated device: real copies, honest counters, and faults at every point of every operation."""

from __future__ import annotations

import copy
import pickle
from typing import Any, get_args

import pytest
import torch

from rl_session.errors import ConfigError, UnsupportedError
from rl_session.offload.device import Device, EmulatedDevice, InjectedFault, Operation, Point, as_device
from rl_session.testing import EmulatedDevice as PublicDevice


def storage(values: list[int]) -> torch.UntypedStorage:
    return torch.tensor(values, dtype=torch.uint8).untyped_storage()


def content(data: torch.UntypedStorage | torch.Tensor) -> list[int]:
    return list(data) if isinstance(data, torch.UntypedStorage) else data.tolist()


def test_a_round_trip_really_frees_really_copies_and_counts_every_byte() -> None:
    device = EmulatedDevice()
    one, two = storage([1, 2, 3]), storage([4, 5])
    hosts = [torch.zeros(3, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)]
    device.adopt([one, two])
    assert (device.resident_bytes, device.peak) == (5, 5)
    device.copy_out([(one, hosts[0]), (two, hosts[1])])
    device.synchronize()
    device.free([one, two])
    assert [content(h) for h in hosts] == [[1, 2, 3], [4, 5]]
    assert (one.nbytes(), two.nbytes(), device.resident_bytes) == (0, 0, 0)
    device.allocate([one], [3])
    device.copy_in([(one, hosts[0])])
    device.synchronize()
    assert content(one) == [1, 2, 3]
    assert (device.bytes_out, device.bytes_in, device.num_copies) == (5, 3, 3)
    assert (device.resident_bytes, device.peak) == (3, 5)


def test_a_storage_that_dies_is_no_longer_counted() -> None:
    device = EmulatedDevice()
    data = storage([1, 2, 3])
    device.adopt([data])
    del data
    assert device.resident_bytes == 0
    assert device.peak == 3


def test_beyond_its_capacity_it_runs_out_of_memory_and_says_how_much_was_in_use() -> None:
    device = EmulatedDevice(capacity=10)
    held, first, second = storage([0] * 4), storage([]), storage([])
    device.adopt([held])
    assert device.free_bytes() == 6
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 5 bytes, 8 of 10"):
        device.allocate([first, second], [4, 5])
    assert (first.nbytes(), second.nbytes()) == (4, 0)
    assert (device.resident_bytes, device.peak) == (8, 8)
    device.allocate([second], [2])
    assert device.free_bytes() == 0


def test_without_a_capacity_there_is_no_limit() -> None:
    assert EmulatedDevice().free_bytes() is None


@pytest.mark.parametrize("capacity", [-1, 1.5, "1GB", True])
def test_a_capacity_that_is_no_number_of_bytes_is_refused(capacity: Any) -> None:
    with pytest.raises(ConfigError, match="capacity") as caught:
        EmulatedDevice(capacity=capacity)
    assert "EmulatedDevice(capacity=" in caught.value.remedy


def test_a_delayed_copy_is_seen_only_after_synchronize() -> None:
    device = EmulatedDevice()
    device.delay()
    data, host = storage([1, 2, 3]), torch.zeros(3, dtype=torch.uint8)
    device.copy_out([(data, host)])
    assert content(host) == [255, 255, 255], "until then the target holds poison"
    device.synchronize()
    assert content(host) == [1, 2, 3]
    device.copy_in([(data, torch.tensor([7, 8, 9], dtype=torch.uint8))])
    assert content(data) == [255, 255, 255]
    device.delay(on=False)
    assert content(data) == [7, 8, 9], "turning the delay off awaits what is under way"


def test_freeing_before_the_copy_was_awaited_leaves_poison_on_the_host() -> None:
    device = EmulatedDevice()
    device.delay()
    data, host = storage([1, 2, 3]), torch.zeros(3, dtype=torch.uint8)
    device.copy_out([(data, host)])
    device.free([data])
    device.synchronize()
    assert content(host) == [255, 255, 255]


def test_poisoned_memory_is_seen_through_a_forgotten_view_and_after_allocation() -> None:
    device = EmulatedDevice()
    device.poison()
    data = storage([])
    device.allocate([data], [4])
    assert content(data) == [255] * 4
    assert torch.tensor(0.0).set_(data, 0, (1,)).isnan().all()
    device.poison(on=False)


@pytest.mark.parametrize("operation", get_args(Operation))
@pytest.mark.parametrize("point", get_args(Point))
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_fault_strikes_the_kth_storage_at_its_point_and_only_once(operation: Any, point: Any, k: int) -> None:
    device = EmulatedDevice()
    datas = [storage([1, 2, 3, 4]) for _ in range(3)]
    hosts = [torch.zeros(4, dtype=torch.uint8) for _ in range(3)]
    pairs = list(zip(datas, hosts, strict=True))
    if operation == "allocate":
        device.free(datas)
    actions = {
        "copy_out": lambda: device.copy_out(pairs),
        "copy_in": lambda: device.copy_in(pairs),
        "allocate": lambda: device.allocate(datas, [4] * 3),
        "free": lambda: device.free(datas),
        "synchronize": lambda: [device.synchronize() for _ in range(3)],
    }
    fault = device.fail(operation, k, point)
    with pytest.raises(InjectedFault, match=f"{operation} of storage {k}, {point}"):
        actions[operation]()
    assert fault.fired
    through = {"before": 0, "half": 2, "after": 4}[point]
    if operation == "copy_out":
        assert content(hosts[k - 1]) == [1, 2, 3, 4][:through] + [0] * (4 - through)
        assert device.bytes_out == 4 * (k - 1) + through
    if operation == "copy_in":
        assert content(datas[k - 1]) == [0] * through + [1, 2, 3, 4][through:]
    if operation in ("allocate", "free"):
        done = k - (point == "before")
        sizes = [4] * done + [0] * (3 - done)
        assert [d.nbytes() for d in datas] == (sizes if operation == "allocate" else [4 - n for n in sizes])
    actions[operation]()
    assert not device._faults


def test_half_a_synchronize_carries_out_half_of_what_is_pending() -> None:
    device = EmulatedDevice()
    device.delay()
    hosts = [torch.zeros(1, dtype=torch.uint8) for _ in range(4)]
    device.copy_out([(storage([9]), host) for host in hosts])
    device.fail("synchronize", 1, "half")
    with pytest.raises(InjectedFault):
        device.synchronize()
    assert [content(h) for h in hosts] == [[9], [9], [255], [255]]


def test_any_error_can_be_injected_and_unfired_faults_can_be_healed() -> None:
    device = EmulatedDevice()
    device.fail("free", 1, "before", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        device.free([storage([1])])
    error = torch.OutOfMemoryError("mine")
    device.fail("free", error=error)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        device.free([storage([1])])
    assert caught.value is error
    device.fail("free")
    device.heal()
    device.free([storage([1])])


@pytest.mark.parametrize(
    ("operation", "k", "point"), [("copy", 1, "before"), ("free", 0, "before"), ("free", 1, "end")]
)
def test_a_fault_that_could_never_strike_is_refused(operation: Any, k: int, point: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EmulatedDevice().fail(operation, k, point)
    assert "copy_in" in str(caught.value)
    assert 'point="half"' in caught.value.remedy


def test_checksums_of_device_and_host_agree_and_tell_one_changed_byte() -> None:
    device = EmulatedDevice()
    data, host = storage([1, 2, 3]), torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert device.checksum(data) == device.host_checksum(host)
    host[1] = 3
    assert device.checksum(data) != device.host_checksum(host)


def test_a_device_is_made_from_what_the_user_wrote() -> None:
    cpu = torch.device("cpu")
    assert isinstance(as_device(None, cpu), EmulatedDevice)
    assert isinstance(as_device("cpu", cpu), EmulatedDevice)
    given: Device = EmulatedDevice()
    assert as_device(given, cpu) is given
    with pytest.raises(UnsupportedError, match="meta"):
        as_device("meta", cpu)
    with pytest.raises(ConfigError, match="not a device"):
        as_device("gpu please", cpu)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_device_where_there_is_none_is_refused() -> None:
    for wanted in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match="there is no CUDA device") as caught:
            as_device(wanted, torch.device("cpu"))
        assert 'device="cpu"' in caught.value.remedy


def test_the_public_device_is_the_one_the_library_uses_and_injected_faults_survive_pickling() -> None:
    assert PublicDevice is EmulatedDevice
    assert str(pickle.loads(pickle.dumps(InjectedFault("x")))) == "x"
    assert "resident_bytes=0" in repr(EmulatedDevice(capacity=4))


def test_a_copy_of_a_device_is_another_device_of_the_same_capacity() -> None:
    device, data = EmulatedDevice(capacity=100), storage([1, 2, 3])
    device.adopt([data])
    for other in (copy.deepcopy(device), pickle.loads(pickle.dumps(device))):
        assert other is not device
        assert (other.capacity, other.resident_bytes) == (100, 0)
        del other
    assert device.resident_bytes == 3
