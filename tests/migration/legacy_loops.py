"""Training functions in legacy style, as a loop against the real objects would be written, and the same loops in scopes.

The legacy ones import nothing of rl_session and know only the manual API. Each pair records the same numbers in the same order.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class LossInput(enum.Enum):
    LOGPROB = "logprob"
    LOGIT = "logit"


class LossLevel(enum.Enum):
    TOKEN_LEVEL = "token_level"  # noqa: S105 (not a password)
    SEQUENCE_LEVEL = "sequence_level"


class ClippedPolicyLoss:
    """A clipped policy gradient with a penalty against the reference."""

    loss_type = LossLevel.TOKEN_LEVEL
    input_type = LossInput.LOGPROB

    def __call__(
        self, *, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        del global_valid_seqs
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        ratio = torch.exp(next_token_logprobs - data["prev_logprobs"][:, 1:])
        advantages = data["advantages"][:, 1:]
        surrogate = -torch.minimum(advantages * ratio, advantages * ratio.clamp(0.8, 1.2))
        gap = data["reference_policy_logprobs"][:, 1:] - next_token_logprobs
        kl = torch.exp(gap) - gap - 1
        loss = ((surrogate + 0.05 * kl) * mask).sum() / global_valid_toks
        metrics = {
            "loss": loss.item(),
            "kl": ((kl * mask).sum() / global_valid_toks).item(),
            "ratio_max": ratio.max().item(),
            "num_valid_samples": float(data["sample_mask"].sum()),
        }
        return loss, metrics


class NextTokenLoss:
    """Cross entropy of the tokens that count."""

    loss_type = LossLevel.TOKEN_LEVEL
    input_type = LossInput.LOGPROB

    def __call__(
        self, *, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        del global_valid_seqs
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        loss = -(next_token_logprobs * mask).sum() / global_valid_toks
        return loss, {"loss": loss.item(), "num_valid_samples": float(data["sample_mask"].sum())}


class PreferenceLoss:
    """Chosen and rejected sequences beside each other, against the reference."""

    loss_type = LossLevel.SEQUENCE_LEVEL
    input_type = LossInput.LOGPROB

    def __call__(
        self, *, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        del global_valid_toks
        mask = data["token_mask"][:, 1:]
        gain = ((next_token_logprobs - data["reference_policy_logprobs"][:, 1:]) * mask).sum(dim=-1)
        margin = gain[0::2] - gain[1::2]
        loss = -2 * torch.nn.functional.logsigmoid(0.5 * margin).sum() / global_valid_seqs
        return loss, {"loss": loss.item(), "num_valid_samples": float(len(gain))}


class ValueLoss:
    """Squared error of returns."""

    loss_type = LossLevel.TOKEN_LEVEL
    input_type = LossInput.LOGIT

    def __call__(
        self, *, logits: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        del global_valid_seqs
        mask = data["token_mask"][:, 1:]
        error = (logits.squeeze(-1)[:, 1:] - data["returns"][:, 1:]) ** 2
        loss = (error * mask).sum() / global_valid_toks
        return loss, {"loss": loss.item()}


# -- data -------------------------------------------------------------------------------------------------------------


def prompts(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {
        "input_ids": torch.randint(1, 7, (4, 3), generator=generator),
        "input_lengths": torch.full((4,), 3),
    }


def text(step: int, num: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(500 + step)
    return {
        "input_ids": torch.randint(0, 7, (num, 6), generator=generator),
        "input_lengths": torch.full((num,), 6),
        "token_mask": torch.ones(num, 6),
        "sample_mask": torch.ones(num),
    }


def train_data(samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    ids = samples["output_ids"]
    rewards = (ids.sum(dim=-1) % 5).float()
    mask = torch.ones(ids.shape)
    mask[:, :3] = 0
    return {
        "input_ids": ids,
        "input_lengths": samples["unpadded_sequence_lengths"],
        "token_mask": mask,
        "sample_mask": torch.ones(len(ids)),
        "advantages": (rewards - rewards.mean())[:, None] * mask,
        "returns": rewards[:, None] * mask,
    }


# -- GRPO, one device shared with an engine ----------------------------------------------------------------------------


def grpo_legacy(policy: Any, generation: Any, refit: Any, loss_fn: Any, folder: Any, history: list[Any]) -> None:
    stale = True
    for step in range(3):
        if stale:
            refit(policy, generation, True)
            stale = False
        else:
            policy.offload_after_refit()
            generation.prepare_for_generation()
        samples = generation.generate(prompts(step))
        generation.finish_generation()
        history.append(samples["output_ids"])

        data = train_data(samples)
        policy.prepare_for_lp_inference()
        data["prev_logprobs"] = policy.get_logprobs(data)["logprobs"]
        data["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
        history.append(data["prev_logprobs"])

        policy.prepare_for_training()
        stale = True
        results = policy.train(data, loss_fn, gbs=2, mbs=1)
        history += [results["loss"], results["grad_norm"]]

        if step % 2 == 1:  # a validation, and a checkpoint after it
            refit(policy, generation, True)
            stale = False
            history.append(generation.generate(prompts(50 + step))["output_ids"])
            generation.finish_generation()
            policy.prepare_for_training()
            policy.save_checkpoint(folder / f"step_{step}" / "weights", folder / f"step_{step}" / "optimizer")


def grpo_scoped(policy: Any, engine: Any, loss_fn: Any, folder: Any, history: list[Any]) -> None:
    stale = True
    for step in range(3):
        if stale:
            policy.refit(engine)
            stale = False
        with engine.awake() as awake:
            samples = awake.generate(prompts(step))
        history.append(samples["output_ids"])

        data = train_data(samples)
        with policy.logprob_mode():
            data["prev_logprobs"] = policy.get_logprobs(data)["logprobs"]
            data["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
        history.append(data["prev_logprobs"])

        with policy.training_mode():
            results = policy.train(data, loss_fn, gbs=2, mbs=1)
        stale = True
        history += [results["loss"], results["grad_norm"]]

        if step % 2 == 1:
            policy.refit(engine)
            stale = False
            with engine.awake() as awake:
                history.append(awake.generate(prompts(50 + step))["output_ids"])
            (folder / f"step_{step}").mkdir(parents=True, exist_ok=True)
            policy.save_checkpoint(folder / f"step_{step}" / "weights")


# -- PPO: policy and critic take turns ---------------------------------------------------------------------------------


def ppo_legacy(policy: Any, value: Any, generation: Any, refit: Any, losses: Any, history: list[Any]) -> None:
    loss_fn, value_loss_fn = losses
    policy.offload_to_cpu()
    value.finish_training()
    stale = True
    for step in range(2):
        if stale:
            value.finish_training()
            policy.prepare_for_lp_inference()
            refit(policy, generation, True)
            stale = False
        samples = generation.generate(prompts(step))
        generation.finish_generation()
        data = train_data(samples)

        value.prepare_for_inference()
        values = value.get_values(data)["values"].squeeze(-1)
        value.finish_inference()
        history.append(values)

        policy.prepare_for_lp_inference()
        data["prev_logprobs"] = policy.get_logprobs(data)["logprobs"]
        data["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
        policy.finish_inference()

        for epoch in range(2):
            value.prepare_for_training()
            history.append(value.train(data, value_loss_fn)["loss"])
            value.finish_training()
            policy.prepare_for_training()
            stale = True
            history.append(policy.train(data, loss_fn, mbs=2)["loss"])
            if epoch == 0:
                policy.offload_to_cpu()


def ppo_scoped(policy: Any, value: Any, engine: Any, losses: Any, history: list[Any]) -> None:
    loss_fn, value_loss_fn = losses
    policy.offload()
    value.offload()
    for step in range(2):
        policy.refit(engine)
        with engine.awake() as awake:
            samples = awake.generate(prompts(step))
        data = train_data(samples)
        with value.inference_mode():
            history.append(value.get_values(data)["values"])
        with policy.logprob_mode():
            data["prev_logprobs"] = policy.get_logprobs(data)["logprobs"]
            data["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
        for _ in range(2):
            with value.training_mode():
                history.append(value.train(data, value_loss_fn)["loss"])
            with policy.training_mode():
                history.append(policy.train(data, loss_fn, mbs=2)["loss"])


# -- DPO and SFT: prepared once, the reference in train state, validation that leaves the policy ready ------------------


def dpo_legacy(policy: Any, loss_fn: Any, history: list[Any]) -> None:
    def with_reference(numbers: range) -> Any:
        for number in numbers:
            batch = text(number)
            batch["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
            yield batch

    def validate() -> None:
        policy.prepare_for_training()
        for batch in with_reference(range(90, 92)):
            results = policy.train(batch, loss_fn, eval_mode=True)
            history.append(results["loss"])
        policy.prepare_for_training()

    policy.prepare_for_training()
    for step, batch in enumerate(with_reference(range(3))):
        history.append(policy.train(batch, loss_fn, mbs=2)["loss"])
        if step == 1:
            validate()


def dpo_scoped(policy: Any, loss_fn: Any, history: list[Any]) -> None:
    def with_reference(number: int) -> Any:
        batch = text(number)
        batch["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
        return batch

    with policy.training_mode():
        batch = with_reference(0)
        for step in range(3):
            history.append(policy.train(batch, loss_fn, mbs=2)["loss"])
            if step == 1:
                for number in (90, 91):
                    results = policy.train(with_reference(number), loss_fn, eval_mode=True)
                    history.append(results["loss"])
            if step < 2:
                batch = with_reference(step + 1)


# -- a step that stays open while log-probabilities are computed -------------------------------------------------------


def streaming_legacy(policy: Any, loss_fn: Any, history: list[Any]) -> None:
    for step in range(2):
        is_open = False
        for number in range(3):
            chunk = text(10 * step + number)
            policy.prepare_for_lp_inference(keep_train_buffers=is_open)
            history.append(policy.get_logprobs(chunk)["logprobs"])
            policy.prepare_for_training()
            if not is_open:
                policy.begin_train_step(loss_fn, mbs=2)
                is_open = True
            policy.train_microbatches_from_meta(chunk)
        results = policy.finish_train_step()
        history += [results["loss"], results["grad_norm"]]


def streaming_scoped(policy: Any, loss_fn: Any, history: list[Any]) -> None:
    for step in range(2):
        opened = None
        for number in range(3):
            chunk = text(10 * step + number)
            with policy.logprob_mode():
                history.append(policy.get_logprobs(chunk)["logprobs"])
            with policy.training_mode():
                opened = opened or policy.begin_step()
                opened.forward_backward(chunk, loss_fn, mbs=2)
                if number == 2:
                    results = opened.commit()
        history += [results["loss"], results["grad_norm"]]
