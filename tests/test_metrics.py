"""How metrics of micro-batches and ranks become one number."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch

from rl_session import metrics as rs
from rl_session.errors import ArgumentError
from rl_session.metrics import MetricSum


def summed(*reports: dict[str, Any]) -> MetricSum:
    total = MetricSum()
    for report in reports:
        total.add(report)
    return total


def test_plain_numbers_are_summed_whatever_type_they_have() -> None:
    total = summed({"kl": 1, "n": True}, {"kl": 0.5, "n": 2}, {"kl": torch.tensor([2.0]), "n": torch.tensor(3)})
    assert total.result() == {"kl": 3.5, "n": 6.0}
    assert all(type(value) is float for value in total.result().values())


def test_a_mean_is_weighted() -> None:
    total = summed({"ratio": rs.mean(1.0, 3)}, {"ratio": rs.mean(torch.tensor(5.0), torch.tensor(1))})
    assert total.result() == {"ratio": 2.0}


def test_a_mean_without_weights_weighs_each_micro_batch_the_same() -> None:
    assert summed({"x": rs.mean(1.0)}, {"x": rs.mean(2.0)}).result() == {"x": 1.5}


def test_a_nan_mean_of_nothing_does_not_spoil_the_others() -> None:
    nan = torch.tensor(math.nan)
    total = summed({"x": rs.mean(nan, 0)}, {"x": rs.mean(2.0, 4)}, {"x": rs.mean(nan, torch.tensor(0.0))})
    assert total.result() == {"x": 2.0}


def test_a_mean_of_nothing_at_all_is_nan() -> None:
    assert math.isnan(summed({"x": rs.mean(1.0, 0)}).result()["x"])


def test_minimum_and_maximum_are_kept() -> None:
    total = summed(*({"low": rs.min(x), "high": rs.max(torch.tensor(x))} for x in (2.0, -1.0, 7.0)))
    assert total.result() == {"low": -1.0, "high": 7.0}


def test_nan_is_not_hidden_by_a_minimum_or_maximum() -> None:
    total = summed({"low": rs.min(math.nan), "high": rs.max(1.0)}, {"low": rs.min(1.0), "high": rs.max(math.nan)})
    assert all(math.isnan(value) for value in total.result().values())


def test_names_keep_the_order_of_first_appearance() -> None:
    assert list(summed({"b": 1, "a": 1}, {"c": 1, "a": 1}).result()) == ["b", "a", "c"]


def test_merging_ranks_equals_adding_everything_in_one_place() -> None:
    reports = [{"s": float(i), "m": rs.mean(i, i + 1), "lo": rs.min(i), "hi": rs.max(i)} for i in range(4)]
    merged = summed(*reports[:2])
    merged.merge(summed(*reports[2:]))
    assert merged.result() == summed(*reports).result()


def test_merging_leaves_the_other_as_it_was() -> None:
    other = summed({"x": 1.0})
    total = MetricSum()
    total.merge(other)
    total.add({"x": 5.0})
    assert (total.result(), other.result()) == ({"x": 6.0}, {"x": 1.0})


def test_scaling_divides_sums_and_nothing_else() -> None:
    total = summed({"s": 8.0, "m": rs.mean(8.0, 2), "lo": rs.min(8.0), "hi": rs.max(8.0)})
    assert total.scaled(1 / 4).result() == {"s": 2.0, "m": 8.0, "lo": 8.0, "hi": 8.0}
    assert total.result()["s"] == 8.0


def test_large_counts_stay_exact() -> None:
    assert summed({"n": torch.tensor(2**24, dtype=torch.int64)}, {"n": torch.tensor(1)}).result() == {"n": 2**24 + 1}


def test_it_survives_pickling() -> None:
    total = summed({"s": torch.tensor(1.0), "m": rs.mean(2.0, 3)})
    assert pickle.loads(pickle.dumps(total)).result() == total.result()


def test_a_tensor_with_a_graph_is_not_kept_alive() -> None:
    x = torch.ones((), requires_grad=True)
    assert summed({"x": x * 2}).result() == {"x": 2.0}


@pytest.mark.parametrize(
    "value", ["1.0", None, [1.0], torch.zeros(2), torch.tensor(1j), rs.mean("x"), rs.mean(1.0, "y")]
)
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    total = summed({"good": 1.0})
    with pytest.raises(ArgumentError, match="'bad'") as caught:
        total.add({"good": 1.0, "bad": value})
    assert "rs.mean(" in caught.value.remedy
    assert total.result() == {"good": 1.0}  # nothing of a refused report is counted


def test_a_name_that_changes_its_kind_is_refused() -> None:
    total = summed({"x": 1.0, "y": 1.0})
    with pytest.raises(ArgumentError, match="sum before and is a mean now") as caught:
        total.add({"y": 1.0, "x": rs.mean(1.0)})
    assert "same way" in caught.value.remedy
    assert total.result() == {"x": 1.0, "y": 1.0}


@pytest.mark.gpu
def test_values_on_a_device_wait_there_until_the_end() -> None:
    total = summed(
        *({"s": torch.tensor(x, device="cuda"), "lo": rs.min(torch.tensor(x, device="cuda"))} for x in (1.0, 2.0))
    )
    total.add({"s": 1.0, "lo": rs.min(0.5)})
    assert total.result() == {"s": 4.0, "lo": 0.5}


def test_a_metric_that_is_wanted_of_each_micro_batch_is_kept_in_a_list_over_micro_batches_and_ranks() -> None:
    total = summed({"x": rs.each(1.0), "n": 1}, {"x": rs.each(torch.tensor(2.0, requires_grad=True)), "n": 1})
    other = pickle.loads(pickle.dumps(summed({"x": rs.each(3), "names": rs.each(["a"], is_share=False)})))
    total.merge(other)
    assert total.result() == {"n": 2.0, "x": [1.0, 2.0, 3], "names": [["a"]]}
    halved = total.scaled(0.5).result()
    assert halved == {"n": 1.0, "x": [0.5, 1.0, 1.5], "names": [["a"]]}, "what is no share stays as it is"
    assert "x: each" in repr(total)


def test_a_name_is_either_in_a_list_or_combined() -> None:
    total = summed({"x": rs.each(1.0), "y": 1.0})
    for wrong in ({"x": 1.0}, {"y": rs.each(1.0)}):
        with pytest.raises(ArgumentError, match="before and is a"):
            total.add(wrong)
    assert total.result() == {"y": 1.0, "x": [1.0]}
