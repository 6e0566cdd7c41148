"""A train step that stays open is seen from wherever it is worked on: helpers in it stay by hand, across files too."""

from __future__ import annotations

from pathlib import Path

from rewriting import migrated, rewritten

from rl_session_migrate.codemod.batch import migrate_files

STEP = """
def step(policy, chunks, loss_fn):
    policy.prepare_for_training()
    policy.begin_train_step(loss_fn)
    for chunk in chunks:
        helper(policy, chunk)
        policy.train_microbatches_from_meta(chunk)
    return policy.finish_train_step()
"""
HELPER = """
def helper(policy, chunk):
    policy.prepare_for_lp_inference()
    out = policy.get_logprobs(chunk)
    policy.prepare_for_training()
    return out
"""
UNUSED = "nothing in sight uses what it prepares"
CALM = """
def calm(policy, chunk):
    helper(policy, chunk)
    policy.train(chunk, None)
"""


def whys(text: str) -> dict[str, str]:
    """Reasons of the helper's sites, by method; "" of those that were rewritten."""
    found = migrated(text).outcomes
    return {o.method: o.why if o.status == "left" else "" for o in found if o.function.endswith("helper")}


def test_nothing_stays_of_a_helper_that_no_step_is_open_around() -> None:
    assert whys(HELPER + CALM) == {"prepare_for_lp_inference": "", "prepare_for_training": ""}
    outcomes = migrated(HELPER + CALM + STEP.replace("        helper(policy, chunk)\n", "")).outcomes
    assert [o.method for o in outcomes if o.status == "left"] == ["prepare_for_training"]  # the step's own


def test_a_helper_that_is_called_in_an_open_step_stays_by_hand_to_its_last_line() -> None:
    why = "a train step may be open when step() calls it"
    assert whys(HELPER + STEP) == {"prepare_for_lp_inference": why, "prepare_for_training": why}
    text = migrated(HELPER + STEP).after.decode()
    assert "scopes(" not in text


def test_a_helper_of_a_helper_stays_too() -> None:
    between = "\ndef between(policy, chunk):\n    helper(policy, chunk)\n"
    why = "a train step may be open when between() calls it"
    assert whys(HELPER + between + STEP.replace("helper(", "between(")) == {
        "prepare_for_lp_inference": why,
        "prepare_for_training": why,
    }


def test_what_is_called_before_the_step_is_opened_or_after_it_is_finished_goes_on() -> None:
    before = STEP.replace("        helper(policy, chunk)\n", "").replace(
        "    policy.prepare_for_training()\n", "    helper(policy, chunks)\n    policy.prepare_for_training()\n"
    )
    assert set(whys(HELPER + before).values()) == {""}
    after = STEP.replace("        helper(policy, chunk)\n", "").replace(
        "    return policy.finish_train_step()\n",
        "    policy.finish_train_step()\n    policy.offload_to_cpu()\n    helper(policy, chunk)\n    policy.offload_to_cpu()\n",
    )
    result = migrated(HELPER + after)
    assert [o.why for o in result.outcomes if o.status == "left" and o.method != "prepare_for_training"] == []


def test_a_helper_that_may_keep_gradients_stays_by_hand_whoever_calls_it() -> None:
    found = whys(HELPER.replace("inference()", "inference(keep_train_buffers=chunk.is_late)"))
    assert all("keep_train_buffers keeps gradients here" in why for why in found.values())
    assert len(found) == 2
    assert whys(HELPER.replace("inference()", "inference(keep_train_buffers=False)")) == {
        "prepare_for_lp_inference": "",
        "prepare_for_training": UNUSED,
    }


def test_the_attribute_of_a_class_carries_the_step_into_its_methods() -> None:
    text = """
        class Loop:
            def helper(self, chunk):
                self._trainer.prepare_for_lp_inference()
                self._trainer.get_logprobs(chunk)
                self._trainer.prepare_for_training()

            def step(self, chunks):
                self._trainer.begin_train_step(None)
                for chunk in chunks:
                    self.helper(chunk)
                    self._trainer.train_microbatches_from_meta(chunk)
                self._trainer.finish_train_step()
        """
    assert set(whys(text).values()) == {"a train step may be open when Loop.step() calls it"}


def left(folder: Path, **texts: str) -> dict[str, list[str]]:
    """Why sites stay, by file, of files that are migrated together."""
    paths = []
    for name, text in texts.items():
        paths.append(folder / f"{name}.py")
        paths[-1].write_text(text, encoding="utf-8")
    found = {}
    for result in migrate_files(paths):
        assert result.result is not None, result.error
        found[result.path.stem] = [o.why for o in result.result.outcomes if o.status == "left"]
    return found


def test_a_step_of_another_file_is_seen(tmp_path: Path) -> None:
    why = "a train step may be open when step() of main.py calls it"
    found = left(tmp_path, helpers=HELPER, main="from helpers import helper\n" + STEP)
    assert found["helpers"] == [why, why]
    assert left(tmp_path, helpers=HELPER, main="from helpers import helper\n" + CALM)["helpers"] == [UNUSED]


def test_a_step_is_seen_through_a_file_between(tmp_path: Path) -> None:
    between = "import helpers\ndef between(policy, chunk):\n    helpers.helper(policy, chunk)\n"
    main = "from middle import between\n" + STEP.replace("helper(", "between(")
    found = left(tmp_path, helpers=HELPER, middle=between, main=main)
    assert found["helpers"] == ["a train step may be open when between() of middle.py calls it"] * 2


def test_a_helper_of_which_no_step_is_known_is_rewritten_by_itself(tmp_path: Path) -> None:
    assert left(tmp_path, helpers=HELPER)["helpers"] == [UNUSED]
    assert rewritten(migrated(HELPER + CALM).outcomes)
