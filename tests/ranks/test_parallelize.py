"""How a model is spread over ranks: which blocks, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_worker import LM, made, made_model
from spawned import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from rl_session.errors import ConfigError, UnsupportedError
from rl_session.workers.parallel import blocks_of, parallelize


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=13, num_hidden_layers=3, tie_word_embeddings=True, **sizes))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))


def test_blocks_are_the_members_of_the_longest_list_of_one_class() -> None:
    assert blocks_of(llama()) == list(llama_layers := llama().model.layers) or len(llama_layers) == 3
    model = LM(num_blocks=4)
    assert blocks_of(model) == list(model.layers)


def test_both_stacks_of_an_encoder_decoder_are_blocks_and_experts_stay_with_theirs() -> None:
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=13, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_decoder_layers=3, num_heads=2)
    )
    assert blocks_of(t5) == [*t5.encoder.block, *t5.decoder.block]
    mixture = nn.ModuleDict(
        {"layers": nn.ModuleList([Experts(), Experts()]), "heads": nn.ModuleList([nn.Linear(2, 2)])}
    )
    assert blocks_of(mixture) == list(mixture["layers"])  # type: ignore[call-overload]


def test_a_model_without_lists_has_no_blocks() -> None:
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []
    mixed = nn.Module()
    mixed.parts = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])
    assert blocks_of(mixed) == []


def test_none_gives_the_model_back_and_what_is_no_way_is_refused() -> None:
    model = nn.Linear(2, 2)
    assert parallelize(model, None) is model
    with pytest.raises(ConfigError, match="'zero3'") as caught:
        parallelize(model, "zero3")  # type: ignore[arg-type]
    assert "fsdp2" in caught.value.remedy
    with pytest.raises(ConfigError, match="mp_policy"):
        parallelize(model, "ddp", mp_policy=MixedPrecisionPolicy())
    with pytest.raises(UnsupportedError, match="no ranks"):
        parallelize(model, "fsdp2")


def _spread(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = llama()
    given = dict(model.named_modules())
    assert parallelize(model, "fsdp2", mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)) is model
    sharded = {name for name, part in given.items() if isinstance(part, FSDPModule)}
    assert sharded == {"", "model.layers.0", "model.layers.1", "model.layers.2"}
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(torch.tensor([[1, 2]])).logits.dtype is torch.bfloat16
    replicated = parallelize(made_model(), "ddp")
    assert isinstance(replicated, DistributedDataParallel)
    assert replicated.gradient_as_bucket_view
    seen: list[Any] = []

    def own(model: nn.Module, mesh: Any) -> nn.Module:
        seen.append(mesh)
        return parallelize(model, "fsdp2", mesh)

    assert isinstance(parallelize(made_model(), own, mesh), FSDPModule)
    assert seen == [mesh]
    with pytest.raises(ConfigError, match="returned a NoneType"):
        parallelize(made_model(), lambda model, mesh: None, mesh)  # type: ignore[arg-type, return-value]


def test_blocks_then_the_root_are_sharded_ddp_wraps_and_a_function_does_what_it_wants() -> None:
    run(_spread, 2)


class _Shared(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        if tied:
            self.layers[1].weight = self.layers[0].weight


def _refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def refusal(model: nn.Module, how: Any = "fsdp2", **options: Any) -> str:
        with pytest.raises(UnsupportedError) as caught:
            parallelize(model, how, mesh, **options)
        assert caught.value.remedy
        return str(caught.value)

    assert "shared between blocks" in refusal(_Shared(tied=True))
    scalar = _Shared(tied=False)
    scalar.temperature = nn.Parameter(torch.tensor(1.0))
    assert "temperature has no dimension" in refusal(scalar)
    transposed = _Shared(tied=False)
    transposed.layers[0].weight = nn.Parameter(torch.randn(3, 3).t())
    assert "layers.0.weight is not contiguous" in refusal(transposed)
    several = _Shared(tied=False)
    several.layers[0].bias.data = several.layers[0].bias.data.bfloat16()
    assert "several dtypes" in refusal(several)
    assert "meta" in refusal(_Shared(tied=False).to("meta"))
    assert "pins memory" in refusal(_Shared(tied=False), offload_policy=CPUOffloadPolicy())
    frozen = _Shared(tied=False).requires_grad_(requires_grad=False)
    assert "requires a gradient" in refusal(frozen, "ddp")
    assert "spread over ranks already" in refusal(parallelize(made_model(), "fsdp2", mesh))
    assert "spread over ranks already" in refusal(parallelize(made_model(), "ddp", mesh), "fsdp2")
    with pytest.raises(UnsupportedError, match="FSDP1"):
        made(None, model=_fsdp1())
    tensor_parallel = made_model()
    from torch.distributed.tensor import Replicate, distribute_tensor

    tensor_parallel.bias = nn.Parameter(distribute_tensor(tensor_parallel.bias.data, mesh, [Replicate()]))
    with pytest.raises(UnsupportedError, match="bias is spread over 2 ranks"):
        made(None, model=tensor_parallel)


def _fsdp1() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_spread_is_refused_by_name() -> None:
    run(_refused, 2, timeout=25)
