"""What a batch must be, and how it is cut, moved and counted."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transformers import BatchEncoding

from rl_session.errors import BatchError
from rl_session.workers.batch import check_batch, counts, micro_batches, slice_batch, to_device, valid_mask

CALL = "policy 'actor': get_logprobs()"


def batch(**changes: Any) -> dict[str, Any]:
    made = {"input_ids": torch.arange(12).reshape(3, 4), "input_lengths": torch.tensor([4, 2, 1])}
    return {key: value for key, value in {**made, **changes}.items() if value is not None}


def rejected(bad: Any, **options: Any) -> BatchError:
    with pytest.raises(BatchError) as caught:
        check_batch(bad, CALL, **options)
    assert caught.value.attempted.startswith(CALL)
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("wrap", [dict, UserDict, BatchEncoding, lambda made: TensorDict(made, batch_size=[3])])
def test_any_kind_of_mapping_is_accepted(wrap: Callable[[dict[str, Any]], Any]) -> None:
    checked = check_batch(wrap(batch(advantages=torch.ones(3, 4))), CALL)
    assert sorted(checked) == ["advantages", "input_ids", "input_lengths"]
    assert torch.equal(checked["input_ids"], torch.arange(12).reshape(3, 4))


def test_the_result_is_a_new_dict_with_the_same_values() -> None:
    given = batch(notes=["a", "b", "c"])
    checked = check_batch(given, CALL)
    assert checked is not given
    assert all(checked[key] is given[key] for key in given)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.float32, torch.bfloat16])
def test_masks_may_be_bool_int_or_float(dtype: torch.dtype) -> None:
    masks = {"token_mask": torch.ones(3, 4, dtype=dtype), "sample_mask": torch.ones(3, dtype=dtype)}
    assert counts(check_batch(batch(**masks), CALL, needs_loss_masks=True)) == (3.0, 9.0)


@pytest.mark.parametrize("bad", [None, [1, 2], torch.zeros(2, 3), "text"])
def test_what_is_no_mapping_is_refused(bad: Any) -> None:
    error = rejected(bad)
    assert type(bad).__name__ in error.facts[0]
    assert "input_ids" in error.remedy


def test_a_missing_key_is_named_with_the_keys_there_are_and_the_likely_misspelling() -> None:
    error = rejected({"input_id": torch.zeros(1, 2), "input_lengths": torch.ones(1)})
    assert "'input_ids'" in error.attempted
    assert error.facts == ("it has input_id, input_lengths", "'input_id' looks like it")
    assert error.remedy == 'batch["input_ids"] = batch.pop("input_id")'


def test_a_batch_without_any_key_is_refused() -> None:
    assert "no keys at all" in rejected({}).facts[0]


def test_missing_lengths_are_made_from_an_attention_mask() -> None:
    error = rejected(batch(input_lengths=None, attention_mask=torch.ones(3, 4)))
    assert 'batch["attention_mask"].sum(-1)' in error.remedy


@pytest.mark.parametrize("missing", ["token_mask", "sample_mask"])
def test_masks_can_be_required(missing: str) -> None:
    masks = {"token_mask": torch.ones(3, 4), "sample_mask": torch.ones(3), missing: None}
    assert repr(missing) in rejected(batch(**masks), needs_loss_masks=True).attempted


@pytest.mark.parametrize(
    ("changes", "attempted", "fact", "remedy"),
    [
        ({"input_ids": [[1, 2]]}, "input_ids is no tensor", "list", "torch.as_tensor"),
        ({"input_ids": torch.zeros(3, 4, dtype=torch.int32)}, "wrong dtype", "torch.int32", ".long()"),
        ({"input_ids": torch.zeros(3, 4)}, "wrong dtype", "torch.float32", ".long()"),
        ({"input_ids": torch.zeros(12, dtype=torch.int64)}, "wrong shape", "[12]", "pad_sequence"),
        ({"input_ids": torch.zeros(0, 4, dtype=torch.int64)}, "empty", "no sequences", "skip the call"),
        ({"input_ids": torch.zeros(3, 0, dtype=torch.int64)}, "empty", "no positions", "skip the call"),
        ({"input_ids": torch.tensor([[1], [2], [-100]])}, "negative token id", "row 2 has token id -100", "pad token"),
        ({"input_lengths": [4, 2, 1]}, "input_lengths is no tensor", "list", "torch.as_tensor"),
        ({"input_lengths": torch.ones(3)}, "wrong dtype", "torch.float32", ".long()"),
        ({"input_lengths": torch.ones(3, dtype=torch.bool)}, "wrong dtype", "torch.bool", ".long()"),
        ({"input_lengths": torch.ones(2, dtype=torch.int64)}, "wrong shape", "[2]", "sum(-1)"),
        ({"input_lengths": torch.ones(3, 1, dtype=torch.int64)}, "wrong shape", "[3, 1]", "sum(-1)"),
        ({"input_lengths": torch.tensor([4, 0, 1])}, "does not fit", "row 1 has length 0", "sample_mask"),
        ({"input_lengths": torch.tensor([4, 4, 5])}, "does not fit", "row 2 has length 5", "1 to S"),
        ({"token_mask": torch.ones(3, 3)}, "token_mask has the wrong shape", "[3, 3], not [3, 4]", "[3, 4]"),
        ({"token_mask": [1]}, "token_mask is no tensor", "list", "[B, S]"),
        ({"sample_mask": torch.ones(3, 1)}, "sample_mask has the wrong shape", "[3, 1], not [3]", "[3]"),
        ({"sample_mask": torch.ones(3, dtype=torch.complex64)}, "wrong dtype", "torch.complex64", "real"),
        ({"token_mask": torch.tensor([[1.0] * 4, [math.nan] * 4, [1.0] * 4])}, "not finite", "row 1", "nan_to_num"),
        ({"sample_mask": torch.tensor([1.0, 1.0, math.inf])}, "sample_mask is not finite", "row 2", "nan_to_num"),
        ({"advantages": torch.ones(2, 4)}, "advantages has the wrong shape", "[2, 4]", "one row for each row"),
        ({"rewards": torch.tensor(1.0)}, "rewards has the wrong shape", "[]", "one row for each row"),
        ({"input_ids": torch.ones(3, 4, dtype=torch.int64, device="meta")}, "meta tensor", "[3, 4]", "real values"),
        ({"extra": torch.ones(3, device="meta")}, "several devices", "input_ids is on cpu", "on the CPU"),
    ],
)
def test_every_bad_batch_is_refused_with_what_is_wrong_and_what_to_write(
    changes: dict[str, Any], attempted: str, fact: str, remedy: str
) -> None:
    error = rejected(batch(**changes))
    assert attempted in error.attempted
    assert fact in error.facts[0]
    assert remedy in error.remedy


def test_a_slice_cuts_whatever_has_a_row_for_each_sequence_and_carries_the_rest() -> None:
    nested = TensorDict({"pixels": torch.arange(3)}, batch_size=[3])
    given = batch(
        names=["a", "b", "c"],
        array=np.arange(6).reshape(3, 2),
        nested=nested,
        number=torch.tensor(7),
        table=torch.ones(5, 2),
        text="abc",
        two=[1, 2],
    )
    part = slice_batch(check_batch(given, CALL), 1, 3)
    assert part["input_ids"].tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert part["names"] == ["b", "c"]
    assert part["array"].tolist() == [[2, 3], [4, 5]]
    assert part["nested"]["pixels"].tolist() == [1, 2]
    assert all(part[key] is given[key] for key in ("number", "table", "text", "two"))


def test_a_slice_of_a_tensor_is_a_view() -> None:
    given = batch()
    assert slice_batch(given, 1, 2)["input_ids"].data_ptr() == given["input_ids"][1].data_ptr()


@pytest.mark.parametrize(("mbs", "sizes"), [(None, [3]), (1, [1, 1, 1]), (2, [2, 1]), (3, [3]), (9, [3])])
def test_micro_batches_cover_the_batch_in_order(mbs: int | None, sizes: list[int]) -> None:
    parts = list(micro_batches(batch(), mbs))
    assert [len(part["input_ids"]) for part in parts] == sizes
    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), batch()["input_ids"])


@pytest.mark.parametrize("mbs", [0, -1, 1.5, True, "2"])
def test_a_micro_batch_size_that_is_no_positive_number_is_refused_at_once(mbs: Any) -> None:
    with pytest.raises(BatchError, match="mbs"):
        micro_batches(batch(), mbs)


def test_moving_to_where_it_is_copies_nothing() -> None:
    given = batch(names=["a", "b", "c"])
    assert all(value is given[key] for key, value in to_device(given, "cpu").items())


def test_moving_takes_tensors_and_leaves_the_rest() -> None:
    moved = to_device(batch(names=["a", "b", "c"], array=np.arange(3)), "meta")
    assert moved["input_ids"].device.type == "meta"
    assert moved["names"] == ["a", "b", "c"]
    assert isinstance(moved["array"], np.ndarray)


def test_tensors_made_in_inference_mode_can_be_trained_on() -> None:
    with torch.inference_mode():
        given = batch()
    moved = to_device(given, "cpu")
    assert not moved["input_ids"].is_inference()


def test_valid_positions_are_those_before_the_length() -> None:
    assert valid_mask(batch()).tolist() == [[True] * 4, [True, True, False, False], [True, False, False, False]]


def test_without_masks_every_token_but_the_first_counts() -> None:
    assert counts(batch()) == (3.0, 4.0)


def test_counts_multiply_the_token_mask_by_the_sample_mask_and_skip_the_first_token() -> None:
    token_mask = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 0], [1, 1, 1, 1]])
    sample_mask = torch.tensor([1.0, 0.5, 0.0])
    naive = (token_mask[:, 1:] * sample_mask[:, None]).sum().item()
    assert counts(batch(token_mask=token_mask, sample_mask=sample_mask)) == (1.5, naive)
