"""Who gets which rows, and results back in the caller's order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_session.errors import BatchError
from rl_session.workers.batch import size
from rl_session.workers.shares import Share, join, own_share, split


def batch(num: int) -> dict[str, Any]:
    return {
        "input_ids": torch.arange(num * 3).view(num, 3),
        "input_lengths": torch.full((num,), 3),
        "texts": [f"text {row}" for row in range(num)],
        "note": "carried as it is",
    }


@settings(deadline=None)
@given(
    num_ranks=st.integers(1, 9),
    num_steps=st.integers(1, 4),
    gbs=st.integers(1, 11),
)
def test_every_row_is_in_one_share_and_comes_back_in_order(num_ranks: int, num_steps: int, gbs: int) -> None:
    whole = batch(num_steps * gbs)
    shares = split(whole, num_ranks, gbs=gbs)
    assert sorted(row for share in shares for row in share.rows) == list(range(num_steps * gbs))
    for step in range(num_steps):  # the rows of a step stay in it, and no rank has two more than another
        rows = [
            row for share in shares if (part := share.of_step(step)) for row in (part["input_ids"][:, 0] // 3).tolist()
        ]
        assert sorted(rows) == list(range(step * gbs, (step + 1) * gbs))
        nums = [share.steps[step] for share in shares]
        assert max(nums) - min(nums) <= 1
    results = [{"ids": share.batch["input_ids"][: share.num_rows]} for share in shares]
    assert torch.equal(join(results, shares)["ids"], whole["input_ids"])


def test_a_rank_without_rows_gets_one_to_run_that_is_not_its_own() -> None:
    shares = split(batch(1), 3)
    assert [share.num_rows for share in shares] == [1, 0, 0]
    assert [size(share.batch) for share in shares] == [1, 1, 1]
    assert shares[2].rows == ()
    assert shares[2].of_step(0) is None
    assert torch.equal(shares[2].filler["input_ids"], batch(1)["input_ids"])


def test_lists_and_what_has_no_rows_go_along() -> None:
    shares = split(batch(5), 2)
    assert [share.batch["texts"] for share in shares] == [["text 0", "text 1", "text 2"], ["text 3", "text 4"]]
    assert {share.batch["note"] for share in shares} == {"carried as it is"}


def test_texts_of_different_length_are_filled_up() -> None:
    shares = split(batch(3), 2)
    results = [{"output_ids": torch.ones(2, 4)}, {"output_ids": torch.ones(1, 6)}]
    joined = join(results, shares, fill={"output_ids": 7.0})["output_ids"]
    assert joined.tolist() == [[1, 1, 1, 1, 7, 7], [1, 1, 1, 1, 7, 7], [1, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize(("gbs", "mbs"), [(4, None), (None, 4), (3, 2), (0, None)])
def test_what_cannot_be_cut_evenly_reaches_no_rank(gbs: int | None, mbs: int | None) -> None:
    with pytest.raises(BatchError, match=r"gbs|batch") as caught:
        split(batch(6), 2, "train()", gbs=gbs, mbs=mbs)
    assert caught.value.remedy


def test_a_plain_batch_is_what_this_rank_has_and_a_step_is_its_part_of_gbs() -> None:
    share = own_share(batch(6), 2, "train()", gbs=4)
    assert share.steps == (2, 2, 2)
    assert own_share(share, 2, "train()") is share
    assert isinstance(own_share(batch(2), 2, "train()"), Share)
    with pytest.raises(BatchError, match="evenly"):
        own_share(batch(6), 2, "train()", gbs=3)
    with pytest.raises(BatchError, match="global batches"):
        own_share(batch(5), 2, "train()", gbs=4)
