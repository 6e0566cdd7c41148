"""How large the components of real runs are, and the same ratios at a size that a test machine copies in microseconds.

Everything is one GPU's share. Parameters, gradients and optimizer state are sharded evenly over the GPUs of the job (FSDP2; or
Megatron with tensor, pipeline and expert parallelism over all of them); the engine has a shard of its own tensor parallelism.
Pure: no torch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["BUDGETS", "RECIPES", "SCALE", "SHAPES", "Backend", "Recipe", "Shape", "Sizes", "sizes_of"]

Backend = Literal["dtensor", "megatron"]

SCALE = 65_536
"""One byte here stands for so many on the GPU."""

NUM_STORAGES = 8
"""Each component is so many storages, as a model is so many layers."""

_GB = 10**9
_CARD = 80 * _GB
_OVERHEAD = 8 * _GB
"""CUDA context, communication buffers, activations under checkpointing: room that is nobody's component. An assumption."""
_ENGINE_FRACTION = 0.6
"""``gpu_memory_utilization`` of NeMo-RL's GRPO and PPO recipes (examples/configs/grpo_math_1B.yaml, ppo_math_1B.yaml)."""
_MEGATRON_KV = 20 * _GB
"""``mcore_generation_config.buffer_size_gb`` of the same recipes: the cache of an engine on the training weights."""


class Shape(NamedTuple):
    """A model: how many parameters, and over how many GPUs one engine replica spreads its bf16 copy."""

    num_params: int
    engine_gpus: int


SHAPES = {
    # meta-llama/Llama-3.1-8B; one vLLM replica a GPU, as grpo_math_8B_megatron.yaml has it.
    "8b": Shape(8_030_261_248, 1),
    # Qwen/Qwen3-30B-A3B (128 experts, 8 active; all of them have to be somewhere); a bf16 copy fits beside a cache over 4 GPUs.
    "30b-moe": Shape(30_532_122_624, 4),
}


class Recipe(NamedTuple):
    """Bytes a parameter."""

    params: int
    grads: int
    optimizer: int


RECIPES: dict[Backend, Recipe] = {
    # NeMo-RL's DTensor workers load and keep fp32 weights (autocast to bf16), so gradients and AdamW's two moments are fp32.
    "dtensor": Recipe(params=4, grads=4, optimizer=8),
    # bf16 weights; bf16 gradient buffer (grad_reduce_in_fp32: false in the recipes); fp32 master, exp_avg and exp_avg_sq, all
    # three in the optimizer's state (use_precision_aware_optimizer: true).
    "megatron": Recipe(params=2, grads=2, optimizer=12),
}


class Sizes(NamedTuple):
    """Bytes of one GPU's share, scaled down.

    Attributes:
        num_params: Parameters of the scaled share.
        params: Of the policy; a value model and a reference are as large.
        grads: While they are there.
        optimizer: Masters included.
        engine_weights: The engine's bf16 copy.
        kv_cache: The rest of what the engine takes.
        megatron_kv_cache: The cache of an engine that samples with the training weights.
        card: What an 80 GB card leaves for components.
    """

    num_params: int
    params: int
    grads: int
    optimizer: int
    engine_weights: int
    kv_cache: int
    megatron_kv_cache: int
    card: int

    def by_name(self) -> dict[str, int]:
        """Bytes of every component that a phase may name; of a value model and a reference too."""
        trainer = {"params": self.params, "grads": self.grads, "optimizer": self.optimizer}
        return {
            **trainer,
            **{f"value_{name}": nbytes for name, nbytes in trainer.items()},
            "reference": self.params,
            "engine_weights": self.engine_weights,
            "kv_cache": self.kv_cache,
            "megatron_kv_cache": self.megatron_kv_cache,
        }


BUDGETS = ("tight", "80gb", "roomy")
"""The largest phase and not a byte more; an 80 GB card; everything at once."""


def sizes_of(model: str, backend: Backend, num_gpus: int, scale: int = SCALE) -> Sizes:
    """Bytes of one GPU's share of ``model`` over ``num_gpus``, divided by ``scale``."""
    shape, recipe = SHAPES[model], RECIPES[backend]
    num_params = NUM_STORAGES * round(shape.num_params / num_gpus / scale / NUM_STORAGES)
    engine_weights = round(2 * shape.num_params / shape.engine_gpus / scale)
    return Sizes(
        num_params=num_params,
        params=recipe.params * num_params,
        grads=recipe.grads * num_params,
        optimizer=recipe.optimizer * num_params,
        engine_weights=engine_weights,
        kv_cache=round(_ENGINE_FRACTION * _CARD / scale) - engine_weights,
        megatron_kv_cache=round(_MEGATRON_KV / scale),
        card=round((_CARD - _OVERHEAD) / scale),
    )
