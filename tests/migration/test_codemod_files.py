"""Files: which are found, that none is ever half written, and that a bad one does not end the run."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import orjson
import pytest

import rl_session as rs
from rl_session_migrate.codemod import files
from rl_session_migrate.codemod.batch import FileResult, FileStatus, migrate_file, migrate_files
from rl_session_migrate.codemod.files import ChangedMeanwhileError, discover, write_atomically
from rl_session_migrate.codemod.report import to_json, totals
from rl_session_migrate.lint import load_config
from rl_session_migrate.settings import read_settings

LOOP = "def f(policy, b):\n    policy.prepare_for_training()\n    policy.train(b, None)\n"
BROKEN = "def f(:\n    policy.prepare_for_training()\n"


def make(folder: Path, **texts: str) -> dict[str, Path]:
    """Files by name; ``__`` is a folder."""
    made = {}
    for name, text in texts.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        made[name] = path
    return made


def test_nothing_is_found_in_an_empty_folder(tmp_path: Path) -> None:
    assert discover([tmp_path]) == []
    assert migrate_files([]) == []


def test_folders_are_searched_without_what_is_nobodys_source(tmp_path: Path) -> None:
    made = make(tmp_path, a="", b__c="", venv__d="", b__node_modules__e="", __pycache__f="")
    make(tmp_path / ".hidden", g="")
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    assert discover([tmp_path]) == sorted([made["a"], made["b__c"]])
    assert discover([tmp_path, tmp_path / "b", made["a"]]) == sorted([made["a"], made["b__c"]])
    assert discover([tmp_path / "venv"]) == [made["venv__d"]]  # named by hand
    assert discover([tmp_path], ["b"]) == [made["a"]]
    assert discover([tmp_path], ["b/*.py"]) == [made["a"]]
    assert discover([tmp_path / "notes.txt"]) == [tmp_path / "notes.txt"]
    with pytest.raises(rs.UsageError, match="no such file"):
        discover([tmp_path / "missing"])


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(b"old")
    path.chmod(0o750)
    write_atomically(path, b"new", expected=b"old")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert os.listdir(tmp_path) == ["a.py"]  # noqa: PTH208 (names are enough)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "a.py", tmp_path / "link.py"
    path.write_bytes(b"old")
    link.symlink_to(path)
    write_atomically(link, b"new", expected=b"old")
    assert link.is_symlink()
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
def test_a_write_that_fails_leaves_the_file_and_no_litter(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(b"old")

    def fail(*_: object, **__: object) -> None:
        assert path.read_bytes() == b"old"
        raise OSError("disk full")

    monkeypatch.setattr(files.os, step, fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new", expected=b"old")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.py"]


def test_a_file_that_somebody_changed_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(b"newer")
    with pytest.raises(ChangedMeanwhileError, match="changed since"):
        write_atomically(path, b"new", expected=b"old")
    assert path.read_bytes() == b"newer"


def test_a_bad_file_is_a_result(tmp_path: Path) -> None:
    made = make(tmp_path, good=LOOP, broken=BROKEN, plain_broken="x = (\n", other="x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# prepare_for_training \xe9\n")
    (tmp_path / "zero.py").write_bytes(b"prepare_for_training\0")
    results = {result.path.stem: result for result in migrate_files(discover([tmp_path]))}
    assert {name: str(result.status) for name, result in results.items()} == {
        "good": "rewritten",
        "broken": "failed",
        "plain_broken": "failed",
        "other": "unchanged",
        "latin": "failed",
        "zero": "failed",
    }
    assert results["broken"].error.startswith("line 1, column 7: no Python")
    assert results["good"].num_lines == 3
    assert made["good"].read_text(encoding="utf-8") == LOOP  # nothing is written yet


def test_a_file_that_cannot_be_read_is_a_result(tmp_path: Path) -> None:
    result = migrate_file(tmp_path / "gone.py")
    assert result.status is FileStatus.FAILED
    assert "cannot be read" in result.error


def test_an_error_of_the_codemod_leaves_the_file_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path, a=LOOP)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr("rl_session_migrate.codemod.batch.rewrite", fail)
    result = migrate_file(made["a"])
    assert result.status is FileStatus.FAILED
    assert "AssertionError: a bug" in result.error


HELPER = """
def refit_policy_generation(policy, policy_generation):
    policy.offload_before_refit()
    policy_generation.prepare_for_generation(tags=["weights"])
    push(policy, policy_generation)
    policy.offload_after_refit()
    policy_generation.prepare_for_generation(tags=["kv_cache"])
"""
USER = """
{imported}

def train(policy, policy_generation):
    policy.prepare_for_lp_inference()
    refit_policy_generation(policy, policy_generation)
"""


@pytest.mark.parametrize(
    ("imported", "in_run"),
    [
        ("from .helpers import refit_policy_generation", True),
        ("from pack.helpers import refit_policy_generation", True),
        ("from pack.helpers import refit_policy_generation", False),
        ("from elsewhere import refit_policy_generation", True),
    ],
)
def test_helpers_of_other_files_of_the_run_are_looked_up(imported: str, in_run: bool, tmp_path: Path) -> None:
    helper = HELPER.replace("push(policy, policy_generation)", "push_all()")
    made = make(tmp_path, pack__helpers=helper, pack__loop=USER.format(imported=imported))
    paths = [made["pack__loop"], made["pack__helpers"]][: 2 if in_run else 1]
    result = migrate_files(paths)[0].result
    assert result is not None
    text = result.after.decode()
    is_known = in_run and "elsewhere" not in imported
    assert ("legacy_refit" in text) == (not is_known)
    assert "prepare_for_lp_inference" not in text


def test_a_file_that_relies_on_what_another_of_the_run_prepared_gets_scopes_too(tmp_path: Path) -> None:
    validate = (
        "def validate(policy, b):\n    policy.prepare_for_training()\n"
        "    return policy.train(b, None, eval_mode=True)\n"
    )
    train = (
        "from .validation import validate\n\n\ndef train(policy, batches):\n    for b in batches:\n"
        "        validate(policy, b)\n        policy.get_logprobs(b)\n        policy.train_from_meta(b)\n"
    )
    made = make(tmp_path, pack__validation=validate, pack__train=train)
    alone = migrate_files([made["pack__train"]])[0].result
    assert alone is not None
    assert not alone.changed  # who prepares is not in sight, and may be nobody
    together = migrate_files(list(made.values()))
    assert all(result.result is not None and result.result.changed for result in together)
    text = together[1].result.after.decode()  # type: ignore[union-attr]
    assert "        with scopes(policy).training_mode():\n            policy.train_from_meta(b)\n" in text
    assert "forget" not in text  # what the other file does is in sight
    for result in together:
        assert result.result is not None
        result.path.write_bytes(result.result.after)
    assert not any(result.result is None or result.result.changed for result in migrate_files(list(made.values())))


@pytest.mark.parametrize(
    ("helper", "is_safe"),
    [
        ("policy.prepare_for_lp_inference()\n    return policy.score(b)", True),
        ("policy.prepare_for_lp_inference()\n    return submit(policy.score, b)", False),
        ("policy.offload_to_cpu()\n    return elsewhere(policy)", False),
        ("return policy.score(b)", False),  # nothing says that this `policy` is one of ours
        ("return print(b)", False),
    ],
)
def test_what_is_handed_to_a_function_of_the_run_is_followed_there(helper: str, is_safe: bool, tmp_path: Path) -> None:
    loop = (
        "from .helpers import judge\n\n\ndef train(policy, b):\n    policy.prepare_for_lp_inference()\n"
        "    policy.get_logprobs(b)\n    return judge(policy, b)\n"
    )
    made = make(tmp_path, pack__loop=loop, pack__helpers=f"def judge(policy, b):\n    {helper}\n")
    result = migrate_files(list(made.values()))[0].result
    assert result is not None
    assert ("prepare_for_lp_inference" not in result.after.decode()) == is_safe


def test_files_that_import_each_other_end(tmp_path: Path) -> None:
    made = make(
        tmp_path,
        a=USER.format(imported="from .b import refit_policy_generation"),
        b=USER.format(imported="from .a import refit_policy_generation"),
    )
    assert [str(result.status) for result in migrate_files(list(made.values()))] == ["rewritten"] * 2


def test_processes_find_what_one_process_finds(tmp_path: Path) -> None:
    texts = {f"loop{number}": LOOP.replace("def f", f"def f{number}") for number in range(6)}
    paths = list(make(tmp_path, broken=BROKEN, **texts).values())
    seen: list[FileResult] = []
    alone = migrate_files(paths, jobs=1)
    together = migrate_files(paths, jobs=2, on_done=seen.append)
    assert [(r.path, r.status, r.result, r.error) for r in together] == [
        (r.path, r.status, r.result, r.error) for r in alone
    ]
    assert {result.path for result in seen} == set(paths)


def test_the_report_counts_trainers_and_engines_apart(tmp_path: Path) -> None:
    text = LOOP + "    policy_generation.finish_generation(release_gpu=b)\n    later(policy.offload_to_cpu)\n"
    results = migrate_files(list(make(tmp_path, a=text, b="x = 1\n", c=BROKEN).values()))
    counted = totals(results)
    assert (counted.trainers.found, counted.trainers.rewritten, counted.trainers.left) == (2, 0, 2)
    assert (counted.engines.found, counted.engines.rewritten, counted.engines.left) == (1, 0, 1)
    assert counted.files == {"rewritten": 1, "unchanged": 1, "failed": 1}
    document = orjson.loads(to_json(results))
    assert document["schema"] == 1
    assert [entry["path"] for entry in document["files"]] == [str(tmp_path / "a.py"), str(tmp_path / "c.py")]
    assert document["totals"]["policy_and_value"] == {"found": 2, "rewritten": 0, "left": 2}
    sites = document["files"][0]["sites"]
    assert [site["method"] for site in sites] == ["prepare_for_training", "finish_generation", "offload_to_cpu"]
    assert all(site["why"] and site["advice"] for site in sites)


def test_a_project_says_its_names_and_what_to_leave_out(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.rl-session.migrate]\npolicies = ["learner"]\nexclude = ["old/*"]\n', encoding="utf-8"
    )
    found = read_settings(tmp_path / "deep" / "folder")
    assert found.names.policies == {"learner"}
    assert found.exclude == ("old/*",)
    (tmp_path / "pyproject.toml").write_text('[tool.rl-session.migrate]\npolices = ["x"]\n', encoding="utf-8")
    with pytest.raises(rs.ConfigError, match="polices"):
        read_settings(tmp_path)


def test_a_name_to_ignore_is_one_for_both_tools(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.rl-session.migrate]\nignore = ["pg"]\n', encoding="utf-8")
    assert read_settings(tmp_path).names.ignore == {"pg"}
    assert load_config(tmp_path).names.ignore == {"pg"}


def test_a_project_that_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n", encoding="utf-8")
    assert read_settings(tmp_path).exclude == ()
