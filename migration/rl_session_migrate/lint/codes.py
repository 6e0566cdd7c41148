"""The codes: what each finding means, an example that triggers it, and one that does not. Data only.

``docs/lint.md`` is made from this table, and the tests run every example.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from textwrap import dedent

import attrs

__all__ = ["CODES", "Code", "Severity"]


class Severity(StrEnum):
    """How bad a finding is; the words are those of GitHub's workflow commands."""

    ERROR = "error"
    """The program fails, or trains wrongly, on the path shown."""
    WARNING = "warning"
    """It fails if something else goes wrong, or with one of the backends."""
    NOTICE = "notice"
    """It works, and wastes time."""


def _example(text: str) -> str:
    return dedent(text).strip("\n") + "\n"


@attrs.frozen(kw_only=True)
class Code:
    """One kind of mistake.

    Attributes:
        code: ``RLM001``.
        name: A short name in words.
        severity: How bad it is.
        why: What it leads to, in one line.
        wrong: A program that triggers it.
        right: The same program, mended.
        more: More to say in the documentation.
    """

    code: str
    name: str
    severity: Severity
    why: str
    wrong: str = attrs.field(converter=_example)
    right: str = attrs.field(converter=_example)
    more: str = ""


_TABLE = (
    Code(
        code="RLM000",
        name="unreadable",
        severity=Severity.ERROR,
        why="what cannot be parsed cannot be checked",
        wrong="def step(policy:\n",
        right="def step(policy):\n    pass\n",
        more="Always reported, whatever is selected; the exit status is 2.",
    ),
    Code(
        code="RLM001",
        name="compute-while-away",
        severity=Severity.ERROR,
        why="kernels read freed memory: an illegal memory access, or a storage of size 0, far from the cause",
        wrong="""
            def step(policy, batch, loss_fn):
                policy.prepare_for_training()
                policy.train(batch, loss_fn)
                policy.offload_to_cpu()
                return policy.get_logprobs(batch)
        """,
        right="""
            def step(policy, batch, loss_fn):
                policy.prepare_for_training()
                policy.train(batch, loss_fn)
                result = policy.get_logprobs(batch)
                policy.offload_to_cpu()
                return result
        """,
        more=(
            "Also reported where one path prepares and another does not, with the condition of the path that does not. "
            "A function that is handed a policy and only computes is judged by its callers in the same module: without "
            "one that is known to have sent the policy away nothing is said, since a caller elsewhere may have prepared it."
        ),
    ),
    Code(
        code="RLM002",
        name="prepare-unused",
        severity=Severity.NOTICE,
        why="everything is copied to the device and back for nothing",
        wrong="""
            def step(policy, policy_generation):
                policy.prepare_for_training()
                policy.offload_to_cpu()
                policy_generation.prepare_for_generation()
        """,
        right="""
            def step(policy, policy_generation):
                policy.offload_to_cpu()
                policy_generation.prepare_for_generation()
        """,
    ),
    Code(
        code="RLM003",
        name="offload-of-what-is-next",
        severity=Severity.NOTICE,
        why="everything is copied to the host and back, and nobody used the room",
        wrong="""
            def save(policy, path):
                policy.offload_after_refit()
                policy.prepare_for_training()
                policy.save_checkpoint(path)
        """,
        right="""
            def save(policy, path):
                policy.prepare_for_training()
                policy.save_checkpoint(path)
        """,
    ),
    Code(
        code="RLM004",
        name="gradients-lost",
        severity=Severity.ERROR,
        why="Megatron frees the gradient buffer and zero-fills a new one: only later chunks are learnt from, without a word",
        wrong="""
            def step(policy, chunks, loss_fn):
                policy.prepare_for_training()
                policy.begin_train_step(loss_fn)
                for chunk in chunks:
                    policy.prepare_for_lp_inference()
                    policy.get_logprobs_from_meta(chunk)
                    policy.prepare_for_training()
                    policy.train_microbatches_from_meta(chunk)
                policy.finish_train_step()
        """,
        right="""
            def step(policy, chunks, loss_fn):
                policy.prepare_for_training()
                policy.begin_train_step(loss_fn)
                for chunk in chunks:
                    policy.prepare_for_lp_inference(keep_train_buffers=True)
                    policy.get_logprobs_from_meta(chunk)
                    policy.prepare_for_training()
                    policy.train_microbatches_from_meta(chunk)
                policy.finish_train_step()
        """,
    ),
    Code(
        code="RLM005",
        name="wake-result-ignored",
        severity=Severity.WARNING,
        why="vLLM and TensorRT-LLM swallow a failed wake and return False; it shows later as a hang or out of memory",
        wrong="""
            def rollout(policy_generation, prompts):
                policy_generation.prepare_for_generation()
                return policy_generation.generate(prompts)
        """,
        right="""
            def rollout(policy_generation, prompts):
                if policy_generation.prepare_for_generation() is False:
                    raise RuntimeError("the engine did not wake up")
                return policy_generation.generate(prompts)
        """,
        more="Compare with `is False`: SGLang returns None on success. `scopes(...).awake()` makes the check itself.",
    ),
    Code(
        code="RLM006",
        name="generate-asleep",
        severity=Severity.ERROR,
        why="a sleeping engine has no weights and no KV cache: it hangs, fails, or samples from garbage",
        wrong="""
            def rollout(policy_generation, prompts):
                policy_generation.finish_generation()
                return policy_generation.generate(prompts)
        """,
        right="""
            def rollout(policy_generation, prompts):
                result = policy_generation.generate(prompts)
                policy_generation.finish_generation()
                return result
        """,
    ),
    Code(
        code="RLM007",
        name="train-unprepared",
        severity=Severity.ERROR,
        why="gradients were freed and optimizer state may be on the host: Megatron writes into 0 bytes, DTensor mixes devices",
        wrong="""
            def step(policy, batch, loss_fn):
                policy.prepare_for_lp_inference()
                batch["prev"] = policy.get_logprobs(batch)
                policy.train(batch, loss_fn)
        """,
        right="""
            def step(policy, batch, loss_fn):
                policy.prepare_for_lp_inference()
                batch["prev"] = policy.get_logprobs(batch)
                policy.prepare_for_training()
                policy.train(batch, loss_fn)
        """,
    ),
    Code(
        code="RLM008",
        name="step-in-eval-mode",
        severity=Severity.ERROR,
        why="inference leaves eval mode behind and chunks of an open step do not set train mode: dropout is off, silently",
        wrong="""
            def step(policy, chunks, loss_fn):
                policy.prepare_for_training()
                policy.begin_train_step(loss_fn)
                for chunk in chunks:
                    policy.get_logprobs_from_meta(chunk)
                    policy.train_microbatches_from_meta(chunk)
                policy.finish_train_step()
        """,
        right="""
            def step(policy, chunks, loss_fn):
                policy.prepare_for_training()
                policy.begin_train_step(loss_fn)
                for chunk in chunks:
                    policy.get_logprobs_from_meta(chunk)
                    policy.prepare_for_training()
                    policy.train_microbatches_from_meta(chunk)
                policy.finish_train_step()
        """,
    ),
    Code(
        code="RLM009",
        name="step-out-of-order",
        severity=Severity.ERROR,
        why="the workers raise RuntimeError: a step is opened once, fed, and ended once",
        wrong="""
            def step(policy, chunk, loss_fn):
                policy.prepare_for_training()
                policy.begin_train_step(loss_fn)
                policy.train_microbatches_from_meta(chunk)
                policy.begin_train_step(loss_fn)
                policy.finish_train_step()
        """,
        right="""
            def step(policy, chunk, loss_fn):
                policy.prepare_for_training()
                policy.begin_train_step(loss_fn)
                policy.train_microbatches_from_meta(chunk)
                policy.finish_train_step()
        """,
    ),
    Code(
        code="RLM010",
        name="no-room",
        severity=Severity.WARNING,
        why="both take up the same GPUs at once: out of memory, or an engine that found too little room",
        wrong="""
            def step(policy, policy_generation, prompts, loss_fn):
                ok = policy_generation.prepare_for_generation()
                batch = policy_generation.generate(prompts)
                policy.prepare_for_training()
                policy.train(batch, loss_fn)
        """,
        right="""
            def step(policy, policy_generation, prompts, loss_fn):
                ok = policy_generation.prepare_for_generation()
                batch = policy_generation.generate(prompts)
                policy_generation.finish_generation()
                policy.prepare_for_training()
                policy.train(batch, loss_fn)
        """,
        more=(
            "For an engine: only where the function does not ask whether the engine is colocated, or on the path on which "
            "it is. For a policy and a value model: only where the function sends the other one away elsewhere, and so "
            "takes turns."
        ),
    ),
    Code(
        code="RLM011",
        name="refit-while-away",
        severity=Severity.ERROR,
        why="the weights to send are not on the device: a storage of size 0, or host tensors in a GPU collective",
        wrong="""
            def publish(policy, policy_generation, colocated):
                policy.finish_inference()
                refit_policy_generation(policy, policy_generation, colocated)
        """,
        right="""
            def publish(policy, policy_generation, colocated):
                policy.prepare_for_lp_inference()
                refit_policy_generation(policy, policy_generation, colocated)
        """,
    ),
    Code(
        code="RLM012",
        name="one-sided-transfer",
        severity=Severity.ERROR,
        why="each side of a weight transfer waits for the other: waiting for one before the other is started never ends",
        wrong="""
            def transfer(policy, policy_generation):
                ray.get(policy.broadcast_weights_for_collective())
                ray.get(policy_generation.update_weights_from_collective())
        """,
        right="""
            def transfer(policy, policy_generation):
                sending = policy.broadcast_weights_for_collective()
                receiving = policy_generation.update_weights_from_collective()
                ray.get(sending + receiving)
        """,
    ),
    Code(
        code="RLM013",
        name="transfer-outlived",
        severity=Severity.ERROR,
        why="the transfer still reads the weights that are being moved away",
        wrong="""
            def publish(policy, policy_generation):
                sending = policy.stream_weights_via_ipc_zmq(buffer_size_bytes=2**28)
                receiving = policy_generation.update_weights_via_ipc_zmq()
                policy.offload_after_refit()
                ray.get([*sending, *receiving])
        """,
        right="""
            def publish(policy, policy_generation):
                sending = policy.stream_weights_via_ipc_zmq(buffer_size_bytes=2**28)
                receiving = policy_generation.update_weights_via_ipc_zmq()
                ray.get([*sending, *receiving])
                policy.offload_after_refit()
        """,
        more="The end of a scope counts as moving away.",
    ),
    Code(
        code="RLM014",
        name="save-while-away",
        severity=Severity.WARNING,
        why="value models and DTensor policies save what is on the device; only a Megatron policy brings it there by itself",
        wrong="""
            def save(value_model, path):
                value_model.finish_training()
                value_model.save_checkpoint(path)
        """,
        right="""
            def save(value_model, path):
                value_model.prepare_for_training()
                value_model.save_checkpoint(path)
                value_model.finish_training()
        """,
    ),
    Code(
        code="RLM015",
        name="wrong-arguments",
        severity=Severity.ERROR,
        why="the call raises TypeError",
        wrong="""
            def infer(value_model, batch):
                value_model.prepare_for_inference(keep_train_buffers=True)
                return value_model.get_values(batch)
        """,
        right="""
            def infer(value_model, batch):
                value_model.prepare_for_inference()
                return value_model.get_values(batch)
        """,
    ),
    Code(
        code="RLM016",
        name="call-does-nothing",
        severity=Severity.WARNING,
        why="the call looks as if it freed or woke something; nothing happens",
        wrong="""
            def step(policy, batch, loss_fn):
                policy.prepare_for_training()
                policy.train(batch, loss_fn)
                policy.finish_training()
        """,
        right="""
            def step(policy, batch, loss_fn):
                policy.prepare_for_training()
                policy.train(batch, loss_fn)
                policy.offload_to_cpu()
        """,
        more=(
            "`finish_training()` of a policy is an empty placeholder; of a value model it offloads everything. A policy "
            "that is used under the name of an engine neither wakes nor sleeps."
        ),
    ),
    Code(
        code="RLM017",
        name="part-missing",
        severity=Severity.ERROR,
        why="the policy was built without what the call needs",
        wrong="""
            from nemo_rl.models.policy.lm_policy import Policy

            policy = Policy(cluster, config, tokenizer, init_reference_model=False)
            policy.prepare_for_lp_inference()
            policy.get_reference_policy_logprobs(batch)
        """,
        right="""
            from nemo_rl.models.policy.lm_policy import Policy

            policy = Policy(cluster, config, tokenizer, init_reference_model=True)
            policy.prepare_for_lp_inference()
            policy.get_reference_policy_logprobs(batch)
        """,
    ),
    Code(
        code="RLM018",
        name="release-during-save",
        severity=Severity.WARNING,
        why="an asynchronous Megatron checkpoint may still read the parameters, and this release does not wait for it",
        wrong="""
            def save(policy, path):
                policy.prepare_for_training()
                policy.save_checkpoint(path)
                policy.finish_inference()
        """,
        right="""
            def save(policy, path):
                policy.prepare_for_training()
                policy.save_checkpoint(path)
                policy.finalize_async_save()
                policy.finish_inference()
        """,
        more="`offload_before_refit`, `offload_after_refit` and `offload_to_cpu` wait by themselves.",
    ),
    Code(
        code="RLM101",
        name="scope-not-entered",
        severity=Severity.ERROR,
        why="making a scope does nothing; only entering it moves anything",
        wrong="""
            import rl_session as rs

            policy = rs.attach(model, optimizer)
            policy.training_mode()
            policy.train(batch, loss_fn)
        """,
        right="""
            import rl_session as rs

            policy = rs.attach(model, optimizer)
            with policy.training_mode():
                policy.train(batch, loss_fn)
        """,
    ),
    Code(
        code="RLM102",
        name="wrong-mode",
        severity=Severity.ERROR,
        why="the call raises ModeError (RLS101)",
        wrong="""
            import rl_session as rs

            policy = rs.attach(model, optimizer)
            with policy.logprob_mode():
                policy.train(batch, loss_fn)
        """,
        right="""
            import rl_session as rs

            policy = rs.attach(model, optimizer)
            with policy.training_mode():
                policy.train(batch, loss_fn)
        """,
    ),
    Code(
        code="RLM103",
        name="illegal-nesting",
        severity=Severity.ERROR,
        why="entering raises NestingError (RLS102)",
        wrong="""
            import rl_session as rs

            policy = rs.attach(model, optimizer)
            with policy.logprob_mode():
                with policy.training_mode():
                    policy.train(batch, loss_fn)
        """,
        right="""
            import rl_session as rs

            policy = rs.attach(model, optimizer)
            with policy.training_mode():
                with policy.logprob_mode():
                    policy.get_logprobs(batch)
                policy.train(batch, loss_fn)
        """,
    ),
    Code(
        code="RLM104",
        name="manual-call-in-scope",
        severity=Severity.ERROR,
        why="the scope owns the placement: a shim call and switch() raise ScopeError, a foreign object's move goes unseen",
        wrong="""
            from rl_session.adapters.nemo_rl import scopes

            with scopes(policy).training_mode():
                policy.train(batch, loss_fn)
                policy.offload_to_cpu()
        """,
        right="""
            from rl_session.adapters.nemo_rl import scopes

            with scopes(policy).training_mode():
                policy.train(batch, loss_fn)
            scopes(policy).offload()
        """,
    ),
    Code(
        code="RLM105",
        name="yield-in-scope",
        severity=Severity.ERROR,
        why="the scope stays open in whatever the caller does next, for as long as the generator lives",
        wrong="""
            import rl_session as rs


            def batches(policy: rs.Policy, loader):
                with policy.logprob_mode():
                    for batch in loader:
                        yield policy.get_logprobs(batch)
        """,
        right="""
            import rl_session as rs


            def batches(policy: rs.Policy, loader):
                for batch in loader:
                    with policy.logprob_mode():
                        result = policy.get_logprobs(batch)
                    yield result
        """,
        more="A function decorated with `contextmanager`, `asynccontextmanager` or `fixture` may yield: that is what it is for.",
    ),
    Code(
        code="RLM106",
        name="scope-reused",
        severity=Severity.ERROR,
        why="a scope works once: the second `with` raises ScopeReuseError (RLS103)",
        wrong="""
            import rl_session as rs

            policy = rs.attach(model, optimizer)
            scope = policy.logprob_mode()
            with scope:
                policy.get_logprobs(first)
            with scope:
                policy.get_logprobs(second)
        """,
        right="""
            import rl_session as rs

            policy = rs.attach(model, optimizer)
            with policy.logprob_mode():
                policy.get_logprobs(first)
            with policy.logprob_mode():
                policy.get_logprobs(second)
        """,
    ),
    Code(
        code="RLM107",
        name="outside-scopes",
        severity=Severity.ERROR,
        why="the policy rests on the host outside its scopes: the call raises ModeError (RLS101)",
        wrong="""
            import rl_session as rs

            policy = rs.attach(model, optimizer)
            with policy.training_mode():
                policy.train(batch, loss_fn)
            policy.get_logprobs(batch)
        """,
        right="""
            import rl_session as rs

            policy = rs.attach(model, optimizer)
            with policy.training_mode():
                policy.train(batch, loss_fn)
            with policy.logprob_mode():
                policy.get_logprobs(batch)
        """,
        more='Only where the call that made the policy is in sight, and does not say `base="resident"`.',
    ),
    Code(
        code="RLM108",
        name="handle-outlives-scope",
        severity=Severity.ERROR,
        why="a handle is good for its block: after it the call raises ModeError (RLS101) or runs in another mode",
        wrong="""
            import rl_session as rs

            policy = rs.attach(model, optimizer)
            with policy.training_mode() as training:
                training.train(batch, loss_fn)
            training.train(batch, loss_fn)
        """,
        right="""
            import rl_session as rs

            policy = rs.attach(model, optimizer)
            with policy.training_mode() as training:
                training.train(batch, loss_fn)
                training.train(batch, loss_fn)
        """,
    ),
)

CODES: Mapping[str, Code] = {code.code: code for code in _TABLE}
