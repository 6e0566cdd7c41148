"""vLLM as a generation engine: sleep mode, weight pushes and sampling behind the protocol of a session.

Written against vLLM's public API (``LLM``, sleep mode, ``collective_rpc`` with a worker extension) as its documentation and its
RLHF examples have it, and tested against a stand-in that keeps the same rules. It has never been run on a GPU, nor with vLLM
itself. One worker on one GPU; a policy and an engine of several ranks need a transport of their own.

What vLLM's rules mean here: its executor ignores a sleep while any part is asleep already, and a wake of what is awake, each with
no more than a warning. So the engine keeps book of what is awake, and wakes the rest for a moment before a sleep from half-awake;
room for that is not asked for. Level 2 discards the weights; what wakes then is garbage until a push, which the session
refuses to serve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_session.errors import BatchError, ConfigError, UnsupportedError
from rl_session.generation.vllm_worker import EXTENSION, packed

__all__ = ["VLLMEngine"]


class VLLMEngine:
    """A :class:`vllm.LLM` for :meth:`Session.engine`.

    Args:
        model: What ``vllm.LLM`` loads: a name or a path. None with ``llm``.
        llm: A ``vllm.LLM`` made by you, with ``enable_sleep_mode=True`` and
            ``worker_extension_cls="rl_session.generation.vllm_worker.WorkerExtension"``.
        device: The device it shares with participants of the session; None when it has a GPU of its own.
        temperature: Logits are divided by it; 0 is greedy.
        top_k: Sample among the k likeliest tokens; None for all.
        top_p: Sample among the likeliest tokens that sum to this probability; None for all.
        max_new_tokens: The most tokens to add.
        stop_ids: Token ids that end a sequence.
        pad_id: Fills up shorter sequences.
        seed: Makes sampling repeatable.
        accepts_host_weights: Whether a policy that is offloaded is read from its host copies, through vLLM's own channel, which
            copies; otherwise its weights are brought to the device first and cross by CUDA IPC.
        requires_refit: Whether the first weights are placeholders (``load_format="dummy"``).
        make_sampling_params: Makes vLLM's sampling parameters; ``vllm.SamplingParams`` by default.
        **llm_kwargs: Handed to ``vllm.LLM``, such as ``gpu_memory_utilization``.

    Raises:
        ConfigError: Neither or both of ``model`` and ``llm``.
        UnsupportedError: vLLM is not installed, sleep mode is off, or it has several workers.
    """

    tags = ("weights", "kv_cache")

    def __init__(
        self,
        model: str | None = None,
        *,
        llm: Any | None = None,
        device: Any | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        max_new_tokens: int = 64,
        stop_ids: Sequence[int] = (),
        pad_id: int = 0,
        seed: int | None = None,
        accepts_host_weights: bool = False,
        requires_refit: bool | None = None,
        make_sampling_params: Callable[..., Any] | None = None,
        **llm_kwargs: Any,
    ) -> None:
        if (model is None) == (llm is None):
            raise ConfigError("VLLMEngine: give either a model or an llm", (), 'VLLMEngine("Qwen/Qwen3-0.6B")')
        if llm is not None and llm_kwargs:
            raise ConfigError(
                f"VLLMEngine: {', '.join(sorted(llm_kwargs))} with an llm that is made already",
                (),
                "VLLMEngine(llm=llm)",
            )
        self.device = device
        self.accepts_host_weights = accepts_host_weights
        self.requires_refit = llm_kwargs.get("load_format") == "dummy" if requires_refit is None else requires_refit
        self.pad_id = pad_id
        self._make_sampling_params = make_sampling_params or _vllm().SamplingParams
        self._sampling: dict[str, Any] = {
            "temperature": temperature,
            "top_k": 0 if top_k is None else top_k,
            "top_p": 1.0 if top_p is None else top_p,
            "max_tokens": max_new_tokens,
            "stop_token_ids": list(stop_ids),
            "seed": seed,
        }
        self._llm = llm if llm is not None else _build(model, llm_kwargs)
        self._awake = set(self.tags)  # an LLM is born awake
        self._is_unsure = False
        self._sizes = self._measure()

    def __repr__(self) -> str:
        return f"VLLMEngine(awake={sorted(self._awake)})"

    # -- memory --------------------------------------------------------------------------------------------------

    def _measure(self) -> dict[str, int]:
        """Bytes by tag.

        Raises:
            UnsupportedError: There are several workers, or no sleep-mode allocator.
        """
        answers = self._llm.collective_rpc("rl_session_sizes")
        if len(answers) != 1:
            raise UnsupportedError(
                "VLLMEngine: vLLM with several workers",
                (f"workers: {len(answers)}",),
                "VLLMEngine(model, tensor_parallel_size=1)",
            )
        sizes = {str(tag): int(nbytes) for tag, nbytes in answers[0].items()}
        missing = [tag for tag in self.tags if tag not in sizes]
        if missing:
            raise UnsupportedError(
                "VLLMEngine: vLLM was built without sleep mode",
                (f"no memory is tagged: {', '.join(missing)}",),
                "vllm.LLM(..., enable_sleep_mode=True)",
            )
        return sizes

    @property
    def awake_tags(self) -> frozenset[str]:
        """What is awake; nothing after a wake or sleep that failed: then it is not known."""
        return frozenset() if self._is_unsure else frozenset(self._awake)

    def bytes_needed(self, tags: Sequence[str]) -> int:
        """Bytes of device memory that ``tags`` take, as measured when the engine was made.

        Args:
            tags: Of "weights" and "kv_cache".

        Returns:
            The number of bytes.
        """
        return sum(self._sizes[tag] for tag in tags)

    def wake(self, tags: Sequence[str]) -> None:
        """Wake what of ``tags`` is asleep, in vLLM's order: the weights first.

        Args:
            tags: Of "weights" and "kv_cache".
        """
        missing = [tag for tag in self.tags if tag in tags and tag not in self._awake]
        if not missing:
            return
        self._is_unsure = True  # a wake that fails leaves vLLM's books and its memory apart
        self._llm.wake_up(tags=missing)
        self._is_unsure = False
        self._awake.update(missing)

    def sleep(self, level: int) -> bool | None:
        """Sleep; from half-awake the rest wakes first, because vLLM ignores a sleep until all of it is awake.

        Args:
            level: 1 keeps the weights on the host; 2 discards them.

        Returns:
            False when vLLM says that it is not asleep.
        """
        if not self._awake and not self._is_unsure:
            return None
        self.wake(self.tags)
        self._is_unsure = True
        self._llm.sleep(level=level)
        is_sleeping = getattr(self._llm.llm_engine, "is_sleeping", None)
        if is_sleeping is not None and not is_sleeping():
            return False
        self._is_unsure = False
        self._awake.clear()
        return None

    # -- weights -------------------------------------------------------------------------------------------------

    def update_weights(self, buckets: Iterator[dict[str, Tensor]]) -> None:
        """Load the buckets into vLLM's model, then what vLLM does to weights once they are loaded.

        Args:
            buckets: Name to tensor; a tensor is valid until the next bucket is asked for.

        Raises:
            UnsupportedError: vLLM took another number of weights than was sent.
        """
        for bucket in buckets:
            with packed(bucket) as payload:
                counts = self._llm.collective_rpc("rl_session_load", args=(payload,))
            if counts != [len(bucket)]:
                raise UnsupportedError(
                    "VLLMEngine: vLLM did not take all weights of a bucket",
                    (f"sent: {len(bucket)}, taken: {counts}",),
                    'vllm.LLM(worker_extension_cls="rl_session.generation.vllm_worker.WorkerExtension")',
                )
        self._llm.collective_rpc("rl_session_loaded")

    def reset_cache(self) -> bool | None:
        """Forget cached prefixes.

        Returns:
            False when vLLM would not.
        """
        done = self._llm.reset_prefix_cache()
        return None if done is None else bool(done)

    # -- sampling ------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests that vLLM has not finished."""
        count = getattr(self._llm.llm_engine, "get_num_unfinished_requests", None)
        return 0 if count is None else int(count())

    def generate(self, batch: Mapping[str, Any], **overrides: Any) -> dict[str, Any]:
        """Continue the prompts of a batch.

        Args:
            batch: ``input_ids [B, S]`` right-padded prompts, ``input_lengths [B]``.
            **overrides: vLLM's sampling parameters for this call only, such as ``temperature=0.0``.

        Returns:
            CPU tensors in the caller's order: ``output_ids [B, S']`` right-padded, ``generation_lengths [B]``,
            ``unpadded_sequence_lengths [B]``, ``logprobs [B, S']`` float32 (0 on prompt and padding).

        Raises:
            BatchError: ``input_ids`` or ``input_lengths`` are missing or do not fit.
        """
        prompts = _prompts(batch)
        params = self._make_sampling_params(**{**self._sampling, "logprobs": 0, "detokenize": False, **overrides})
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        rows = [_row(prompt, output.outputs[0]) for prompt, output in zip(prompts, outputs, strict=True)]
        return _padded(prompts, rows, self.pad_id, batch["input_ids"].dtype)


def _vllm() -> Any:
    """The vLLM package.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        import vllm
    except ImportError as error:
        raise UnsupportedError(
            "VLLMEngine: vLLM is not installed", (), "pip install 'rl-session[vllm]'", str(error)
        ) from error
    return vllm


def _build(model: str | None, kwargs: dict[str, Any]) -> Any:
    return _vllm().LLM(model=model, enable_sleep_mode=True, worker_extension_cls=EXTENSION, **kwargs)


def _prompts(batch: Mapping[str, Any]) -> list[list[int]]:
    """The prompts without their padding.

    Raises:
        BatchError: They cannot be told.
    """
    ids, lengths = batch.get("input_ids"), batch.get("input_lengths")
    if (
        not isinstance(ids, Tensor)
        or not isinstance(lengths, Tensor)
        or ids.ndim != 2
        or lengths.shape != ids.shape[:1]
        or bool(((lengths < 1) | (lengths > ids.shape[1])).any())
    ):
        raise BatchError(
            "VLLMEngine: generate() needs input_ids [B, S] and input_lengths [B] between 1 and S",
            (f"keys: {', '.join(map(str, batch))}",),
            'engine.generate({"input_ids": ids, "input_lengths": lengths})',
        )
    return [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]


def _row(prompt: list[int], completion: Any) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities of prompt and completion."""
    ids = list(completion.token_ids)
    chosen = [step[token].logprob for step, token in zip(completion.logprobs or [], ids, strict=True)]
    return prompt + ids, [0.0] * len(prompt) + chosen


def _padded(
    prompts: list[list[int]], rows: list[tuple[list[int], list[float]]], pad_id: int, dtype: torch.dtype
) -> dict[str, Any]:
    lengths = torch.tensor([len(ids) for ids, _ in rows])
    width = int(lengths.max()) if rows else 0
    output = torch.full((len(rows), width), pad_id, dtype=dtype)
    logprobs = torch.zeros((len(rows), width), dtype=torch.float32)
    for index, (ids, values) in enumerate(rows):
        output[index, : len(ids)] = torch.tensor(ids, dtype=dtype)
        logprobs[index, : len(ids)] = torch.tensor(values)
    return {
        "output_ids": output,
        "generation_lengths": lengths - torch.tensor([len(prompt) for prompt in prompts]),
        "unpadded_sequence_lengths": lengths,
        "logprobs": logprobs,
    }
