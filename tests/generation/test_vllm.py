"""The vLLM engine against a stand-in for ``vllm.LLM`` that keeps vLLM's rules, as its source and documentation have them."""

from __future__ import annotations

import multiprocessing
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_rig import ONE, Model, Rig, prompts
from torch import Tensor

import rl_session as rs
from rl_session.generation import vllm_worker
from rl_session.testing import EmulatedDevice

Make = Callable[..., Rig]


class FakeModel:
    """The model of a vLLM worker: weights in device memory of the sleep-mode allocator."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}
        self.weights: dict[str, Tensor] | None = {name: tensor.clone() for name, tensor in weights.items()}

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> set[str]:
        assert self.weights is not None, "illegal memory access: a load into unmapped weights"
        for name, tensor in weights:
            self.weights[name].copy_(tensor)
        return {name for name, _ in weights}


class FakeWorker(vllm_worker.WorkerExtension):
    """A worker with our extension mixed in."""

    def __init__(self, model: FakeModel, sizes: dict[str, int]) -> None:
        self.model_runner = SimpleNamespace(model=model)
        self.model_config = None
        self.device = torch.device("cpu")
        self.sizes = sizes
        self.num_loaded = 0

    def rl_session_sizes(self) -> dict[str, int]:
        return self.sizes

    def rl_session_loaded(self) -> None:
        super().rl_session_loaded()
        self.num_loaded += 1


class FakeLLM:
    """What of ``vllm.LLM`` the engine uses. A sleep or wake out of order is ignored, as vLLM's executor does with a warning."""

    def __init__(self, device: EmulatedDevice | None = None, num_workers: int = 1, *, sleep_mode: bool = True) -> None:
        self.device = device or EmulatedDevice()
        self.model = FakeModel(Model(3).state_dict())
        sizes = {"weights": ONE, "kv_cache": 2 * ONE} if sleep_mode else {}
        self.workers = [FakeWorker(self.model, sizes) for _ in range(num_workers)]
        self.sleeping_tags: set[str] = set()
        self.is_sleeping = False
        self.ignored: list[str] = []
        self.calls: list[str] = []
        self.fail_next = ""
        self.cached = 0
        self.backup: dict[str, Tensor] | None = None
        self.llm_engine = SimpleNamespace(get_num_unfinished_requests=lambda: 0, is_sleeping=lambda: self.is_sleeping)
        self.blocks = {tag: self.device.occupy(nbytes) for tag, nbytes in sizes.items()}

    def sleep(self, level: int = 1) -> None:
        self.calls.append(f"sleep {level}")
        self.reset_prefix_cache()
        if self.is_sleeping:
            self.ignored.append("sleep")
            return
        for block in self.blocks.values():
            self.device.vacate(block)
        self.blocks = {}
        self.backup = self.model.weights if level == 1 else None
        self.model.weights = None
        self.sleeping_tags, self.is_sleeping = {"weights", "kv_cache"}, True

    def wake_up(self, tags: list[str] | None = None) -> None:
        wanted = tags or sorted(self.sleeping_tags)
        self.calls.append(f"wake_up {' '.join(wanted)}")
        if not self.is_sleeping or not set(wanted) <= self.sleeping_tags:
            self.ignored.append("wake_up")
            return
        if self.fail_next == "wake_up":
            self.fail_next = ""
            raise torch.OutOfMemoryError("CUDA out of memory")
        for tag in wanted:
            self.blocks[tag] = self.device.occupy({"weights": ONE, "kv_cache": 2 * ONE}[tag])
            if tag == "weights":
                poison = {n: torch.full(s, float("nan"), dtype=d) for n, (s, d) in self.model.shapes.items()}
                self.model.weights, self.backup = self.backup or poison, None
        self.sleeping_tags -= set(wanted)
        self.is_sleeping = bool(self.sleeping_tags)

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        return [getattr(worker, method)(*args) for worker in self.workers]

    def reset_prefix_cache(self) -> bool:
        self.cached = 0
        return True

    def generate(self, requests: list[dict[str, Any]], params: Any, *, use_tqdm: bool) -> list[Any]:
        assert not self.is_sleeping, "illegal memory access"
        assert not use_tqdm
        assert self.model.weights is not None
        self.cached += len(requests)
        crc = self.fingerprint
        outputs = []
        for index, request in enumerate(requests):
            ids = [(crc + index + step) % 11 for step in range(min(params.max_tokens, 1 + index))]
            logprobs = [{token: SimpleNamespace(logprob=-0.5 * (step + 1))} for step, token in enumerate(ids)]
            completion = SimpleNamespace(token_ids=tuple(ids), logprobs=logprobs if params.logprobs == 0 else None)
            outputs.append(SimpleNamespace(prompt_token_ids=request["prompt_token_ids"], outputs=[completion]))
        return outputs

    @property
    def fingerprint(self) -> int:
        assert self.model.weights is not None
        return _crc(self.model.weights)


def _crc(weights: dict[str, Tensor]) -> int:
    crc = 0
    for tensor in weights.values():
        crc = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes(), crc)
    return crc


def sampling_params(**fields: Any) -> Any:
    return SimpleNamespace(**fields)


def engine_over(llm: FakeLLM, **arguments: Any) -> rs.VLLMEngine:
    return rs.VLLMEngine(llm=llm, max_new_tokens=3, make_sampling_params=sampling_params, **arguments)


@pytest.fixture
def pair(make: Make) -> tuple[Rig, FakeLLM, Any]:
    """A rig, and a vLLM engine on its device."""
    rig = make(capacity=4 * ONE)
    llm = FakeLLM(rig.device)
    return rig, llm, rig.session.engine("real", engine_over(llm), device=rig.device)


def test_it_is_an_engine_that_comes_awake_and_knows_its_bytes(pair: tuple[Rig, FakeLLM, Any]) -> None:
    rig, llm, handle = pair
    assert isinstance(handle.engine, rs.GenerationEngine)
    assert handle.state == "awake"
    assert handle.memory()["awake"] == {"weights": ONE, "kv_cache": 2 * ONE}
    assert rig.session.memory()["devices"][0]["in_use"] == 3 * ONE == rig.device.resident_bytes
    rig.train()
    assert (handle.state, llm.is_sleeping) == ("asleep", True)
    assert llm.ignored == []


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("release", ["eager", "lazy"])
def test_a_loop_over_it_serves_what_was_pushed_and_breaks_none_of_vllms_rules(
    release: str, level: int, make: Make
) -> None:
    rig = make(capacity=4 * ONE, release=release)
    llm = FakeLLM(rig.device)
    handle = rig.session.engine("real", engine_over(llm), device=rig.device, sleep_level=level)
    for _ in range(3):
        rig.policy.refit(handle)
        with rig.policy.generation_mode(handle) as policy:
            out = policy.generate(prompts())
        assert int(out["output_ids"][0, 6]) == rig.weights_crc() % 11
        rig.train()
    assert llm.ignored == []
    assert rig.device.peak <= 4 * ONE
    assert llm.workers[0].num_loaded == 3


def test_results_come_back_padded_in_order_with_logprobs_of_what_was_sampled(pair: tuple[Rig, FakeLLM, Any]) -> None:
    _, llm, handle = pair
    with handle.awake() as engine:
        out = engine.generate(prompts(), temperature=0.0)
    assert out["output_ids"].shape == (4, 9)
    assert out["generation_lengths"].tolist() == [1, 2, 3, 3]
    assert out["unpadded_sequence_lengths"].tolist() == [7, 7, 9, 6]
    assert out["output_ids"][3, 6:].tolist() == [0, 0, 0]
    assert out["output_ids"][1, :5].tolist() == prompts()["input_ids"][1, :5].tolist()
    assert out["logprobs"][2].tolist() == [0, 0, 0, 0, 0, 0, -0.5, -1.0, -1.5]
    assert out["logprobs"][3].tolist() == [0, 0, 0, -0.5, -1.0, -1.5, 0, 0, 0]
    assert llm.ignored == []


def test_a_batch_that_does_not_fit_is_refused(pair: tuple[Rig, FakeLLM, Any]) -> None:
    _, _, handle = pair
    with handle.awake() as engine:
        for batch in ({}, {"input_ids": torch.zeros(2, 3), "input_lengths": torch.tensor([4, 1])}):
            with pytest.raises(rs.BatchError):
                engine.generate(batch)


def test_asleep_twice_or_awake_twice_never_reaches_vllm(pair: tuple[Rig, FakeLLM, Any]) -> None:
    _, llm, handle = pair
    engine = handle.engine
    engine.wake(["weights"])
    engine.sleep(1)
    engine.sleep(1)
    engine.wake(["kv_cache", "weights"])
    engine.wake(["weights", "kv_cache"])
    assert llm.calls == ["rl_session_sizes", "sleep 1", "wake_up weights kv_cache"]
    assert llm.ignored == []


def test_from_half_awake_the_rest_wakes_for_a_moment_because_vllm_ignores_the_sleep_otherwise(make: Make) -> None:
    llm = FakeLLM()
    engine = engine_over(llm)
    engine.sleep(1)
    engine.wake(["weights"])
    before = llm.fingerprint
    engine.sleep(1)
    assert (llm.is_sleeping, llm.ignored, llm.device.resident_bytes) == (True, [], 0)
    engine.wake(["weights", "kv_cache"])
    assert llm.fingerprint == before


def test_a_wake_that_fails_in_vllm_is_slept_off_and_tried_again(pair: tuple[Rig, FakeLLM, Any]) -> None:
    rig, llm, handle = pair
    handle.sleep()
    llm.fail_next = "wake_up"
    with pytest.raises(rs.DeviceMemoryError, match="CUDA out of memory"), handle.awake():
        pytest.fail("entered")
    assert (handle.state, handle.health, rig.device.resident_bytes) == ("asleep", "ok", 0)
    with handle.awake() as engine:
        engine.generate(prompts())
    assert llm.ignored == []


def test_level_two_is_never_served_without_a_push(make: Make) -> None:
    rig = make(capacity=4 * ONE)
    llm = FakeLLM(rig.device)
    handle = rig.session.engine("real", engine_over(llm), device=rig.device, sleep_level=2)
    handle.sleep()
    with handle.awake() as engine:
        assert all(torch.isnan(t).all() for t in llm.model.weights.values())  # type: ignore[union-attr]
        with pytest.raises(rs.StaleWeightsError):
            engine.generate(prompts())


def test_a_push_in_place_resets_the_prefix_cache(pair: tuple[Rig, FakeLLM, Any]) -> None:
    rig, llm, _ = pair
    apart = rig.session.engine("apart", engine_over(FakeLLM()))
    with apart.awake() as engine:
        engine.generate(prompts())
        assert apart.engine._llm.cached == 4
        rig.policy.refit(apart)
        assert apart.engine._llm.cached == 0
    assert llm.ignored == []


def test_host_copies_cross_as_bytes_when_it_takes_them(make: Make) -> None:
    rig = make()
    llm = FakeLLM(rig.device)
    handle = rig.session.engine("real", engine_over(llm, accepts_host_weights=True), device=rig.device)
    moved = rig.device.bytes_in
    rig.policy.refit(handle)
    assert rig.device.bytes_in == moved
    assert llm.fingerprint == rig.weights_crc()


def _receive(connection: Any) -> None:
    """A worker in a process of its own: takes a payload, gives the CRC of what it loaded."""
    worker = FakeWorker(FakeModel({n: torch.zeros_like(t) for n, t in Model(3).state_dict().items()}), {})
    payload = connection.recv()
    num = worker.rl_session_load(payload)
    connection.send((num, _crc(worker.model_runner.model.weights)))


@pytest.mark.slow
def test_a_bucket_reaches_a_worker_in_another_process() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_receive, args=(there,))
    process.start()
    bucket = dict(Model(5).state_dict())
    bucket["head.bias"] = bucket["body.weight"].view(-1)[:11]  # two over one storage
    with vllm_worker.packed(bucket) as payload:
        here.send(payload)
        assert here.poll(240)
        num, crc = here.recv()
    process.join()
    assert (num, crc) == (len(bucket), _crc(bucket))
    assert vllm_worker._HERE == {}


def test_handles_of_device_memory_cross_as_plain_values(monkeypatch: pytest.MonkeyPatch) -> None:
    import orjson

    handle = [7, "handle", 4096, 512, False, "counter", 3, "event", True]  # bytes where it is real
    told = (Tensor, torch.Size([2, 3]), (3, 1), 5, torch.storage.TypedStorage, torch.bfloat16, *handle)
    sent = orjson.loads(orjson.dumps(vllm_worker.plain(told)))
    seen: list[Any] = []
    monkeypatch.setattr(vllm_worker, "rebuild_cuda_tensor", lambda *arguments: seen.append(arguments))
    vllm_worker.rebuilt(sent, 2)
    assert seen == [(*told[:6], 2, *handle[1:])]


def test_what_it_cannot_serve_is_refused_when_it_is_made() -> None:
    with pytest.raises(rs.UnsupportedError, match="workers: 2"):
        engine_over(FakeLLM(num_workers=2))
    with pytest.raises(rs.UnsupportedError, match="enable_sleep_mode=True"):
        engine_over(FakeLLM(sleep_mode=False))
    with pytest.raises(rs.ConfigError, match="either a model or an llm"):
        rs.VLLMEngine()
    with pytest.raises(rs.ConfigError, match="gpu_memory_utilization"):
        engine_over(FakeLLM(), gpu_memory_utilization=0.5)


def test_without_vllm_it_says_what_to_install() -> None:
    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(rs.UnsupportedError, match=r"rl-session\[vllm\]"):
            rs.VLLMEngine("some/model")
    else:
        pytest.skip("vLLM is installed here")


def test_placeholders_are_known_by_the_load_format(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_session.generation import vllm

    made: dict[str, Any] = {}

    def build(**kwargs: Any) -> FakeLLM:
        made.update(kwargs)
        return FakeLLM()

    monkeypatch.setattr(vllm, "_vllm", lambda: SimpleNamespace(LLM=build, SamplingParams=sampling_params))
    engine = rs.VLLMEngine("some/model", load_format="dummy", gpu_memory_utilization=0.4)
    assert engine.requires_refit
    assert not rs.VLLMEngine("some/model").requires_refit
    assert made["model"] == "some/model"
    assert made["enable_sleep_mode"] is True
    module, _, name = made["worker_extension_cls"].rpartition(".")
    assert getattr(__import__(module, fromlist=[name]), name) is vllm_worker.WorkerExtension


def test_after_a_sleep_that_failed_it_claims_nothing_is_awake(pair: tuple[Rig, FakeLLM, Any]) -> None:
    _, llm, handle = pair
    engine = handle.engine
    with handle.awake():
        assert engine.awake_tags == {"weights", "kv_cache"}
    sleep = llm.sleep

    def broken(*, level: int) -> None:
        raise RuntimeError("half of it is gone")

    llm.sleep = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(rs.EngineError, match="sleep"), handle.awake():
        pass
    assert engine.awake_tags == frozenset()
    llm.sleep = sleep  # type: ignore[method-assign]
    with handle.awake():  # it cannot be sure, so it sleeps first
        assert engine.awake_tags == {"weights", "kv_cache"}
    assert (handle.state, llm.is_sleeping) == ("asleep", True)
