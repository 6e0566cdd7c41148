"""Digests of results: equal for equal tensors, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_session.workers.digest import digest_of


def test_equal_results_have_equal_digests_whatever_the_order_of_keys_and_the_numbers_beside_them() -> None:
    one = {"loss": torch.tensor([1.0, 2.0]), "grad_norm": torch.tensor([3.0]), "metrics": {"kl": 0.1}}
    two = {"metrics": {"kl": [0.1]}, "grad_norm": torch.tensor([3.0]), "loss": torch.tensor([1.0, 2.0])}
    assert digest_of(one) == digest_of(two)
    assert digest_of({"a": torch.arange(6).view(2, 3).t()}) == digest_of(
        {"a": torch.arange(6).view(2, 3).t().contiguous()}
    )


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.tensor([1.0, 2.0000002])},
        {"y": torch.tensor([1.0, 2.0])},
        {"x": torch.tensor([[1.0, 2.0]])},
        {"x": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor(True)},
        [torch.tensor([1.0, 2.0])],
    ],
)
def test_other_results_have_other_digests(other: Any) -> None:
    assert digest_of(other) != digest_of({"x": torch.tensor([1.0, 2.0])})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.float16, torch.int64])
def test_every_dtype_and_the_empty_tensor_have_one(dtype: torch.dtype) -> None:
    assert digest_of(torch.ones(2, dtype=dtype)) != digest_of(torch.zeros(2, dtype=dtype))
    assert len(digest_of(torch.ones(0, dtype=dtype)) or "") == 16
    assert digest_of(torch.tensor(1.0, requires_grad=True)) == digest_of(torch.tensor(1.0))


def test_without_a_tensor_there_is_none() -> None:
    assert digest_of(None) is None
    assert digest_of({"metrics": {"kl": 0.1}}) is None
