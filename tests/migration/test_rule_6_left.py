"""What stays on the manual API says so, in the file and in the report: place, shape, reason, and what to do by hand."""

from __future__ import annotations

import pytest
from rewriting import kept, migrated

from rl_session_migrate.codemod.finish import MARK


def test_nothing_is_said_where_nothing_stays() -> None:
    result = migrated("def f(policy, b):\n    policy.prepare_for_training()\n    policy.train(b, None)\n")
    assert MARK not in result.after.decode()
    assert all(outcome.advice == "" for outcome in result.outcomes)


OPEN_STEP = """
    async def step(policy, chunks):
        await asyncio.to_thread(policy.prepare_for_training)
        await asyncio.to_thread(policy.begin_train_step, None)
        for chunk in chunks:
            await asyncio.to_thread(policy.prepare_for_lp_inference, keep_train_buffers=True)
            chunk["prev"] = await asyncio.to_thread(policy.get_logprobs, chunk)
            await asyncio.to_thread(policy.prepare_for_training)
            await asyncio.to_thread(policy.train_microbatches_from_meta, chunk)
        await asyncio.to_thread(policy.finish_train_step)
    """


@pytest.mark.parametrize(
    ("code", "why", "shape"),
    [
        (OPEN_STEP, "", "to_thread"),
        (
            (
                "def f(policy, chunks):\n    policy.prepare_for_training()\n    policy.begin_train_step(None)\n"
                "    for c in chunks:\n        policy.train_microbatches_from_meta(c)\n    policy.finish_train_step()\n"
            ),
            "works on a train step that stays open between calls",
            "call",
        ),
        ("def f(policy):\n    save(wait_fn=policy.offload_to_cpu)\n", "passed as a value: who calls it", "value"),
        (
            "def f(policy, pool):\n    pool.submit(policy.offload_to_cpu)\n",
            "runs in another thread or task",
            "submitted",
        ),
        (
            "async def f(policy):\n    await asyncio.to_thread(policy.offload_to_cpu)\n",
            "passed as a value and runs in a thread",
            "to_thread",
        ),
        (
            "import nemo_rl\ndef f(policy):\n    policy.run_all_workers_single_data('offload_to_cpu')\n",
            "named in a string",
            "string",
        ),
        ("import nemo_rl\ndef f(policy):\n    getattr(policy, 'offload_to_cpu')()\n", "named in a string", "string"),
        ("def f(policy):\n    later(lambda: policy.offload_to_cpu())\n", "callback", "call"),
        ("async def f(policy):\n    await policy.offload_to_cpu()\n", "lifecycle methods are awaited", "awaited"),
        (
            "import nemo_rl\ndef f(policies, i):\n    policies[i + 1].offload_to_cpu()\n",
            "no name that can be written a second time",
            "call",
        ),
        ("def f(policy):\n    x = policy.offload_to_cpu()\n", "its statement does more than call it", "call"),
    ],
)
def test_every_shape_that_stays_is_explained(code: str, why: str, shape: str) -> None:
    text = kept(code, why, changed=False)
    result = migrated(code)
    assert {outcome.shape for outcome in result.outcomes} == {shape}
    for outcome in result.outcomes:
        assert outcome.line > 1
        assert outcome.function == ("step" if code is OPEN_STEP else "f.<lambda>" if "lambda" in code else "f")
    assert f"# {MARK}" in text


def test_where_a_step_is_open_is_told_from_what_stands_before_it() -> None:
    assert [outcome.why for outcome in migrated(OPEN_STEP).outcomes] == [
        "the method is passed as a value and runs in a thread",
        "a train step stays open here between calls",
        "a train step stays open here between calls",
    ]


def test_an_actor_of_another_process_is_no_handle() -> None:
    result = migrated("import nemo_rl\ndef f(actor):\n    ray.get(actor.prepare_for_training.remote())\n")
    assert not result.changed
    assert result.outcomes == ()


def test_a_transition_that_stays_is_not_believed_by_the_scopes_beside_it() -> None:
    text = migrated(
        """
        def f(policy, batch, pool):
            policy.prepare_for_lp_inference()
            policy.get_logprobs(batch)
            policy.prepare_for_training()
            pool.submit(policy.train, batch)
            policy.offload_to_cpu()
        """
    ).after.decode()
    assert "    policy.prepare_for_training()\n    scopes(policy).forget()\n    pool.submit" in text


def test_a_reason_is_written_once() -> None:
    text = migrated("def f(policy, pool):\n    pool.submit(policy.offload_to_cpu)\n").after.decode()
    assert migrated(text).after.decode().count(MARK) == 1


def test_the_report_points_at_the_file_as_it_was() -> None:
    result = migrated(
        """
        def f(policy, teacher_policy, batch, pool):
            policy.prepare_for_lp_inference()
            policy.get_logprobs(batch)

            pool.submit(teacher_policy.offload_after_refit)
        """
    )
    assert [(o.line, o.column, o.method, str(o.status)) for o in result.outcomes] == [
        (3, 5, "prepare_for_lp_inference", "rewritten"),
        (6, 17, "offload_after_refit", "left"),
    ]
