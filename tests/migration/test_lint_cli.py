"""``rl-session lint``: formats, choices, configuration, exit statuses, many files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import orjson
import pytest

import rl_session as rs
from rl_session.cli import main
from rl_session_migrate.lint import LintConfig, lint_files, lint_text, load_config
from rl_session_migrate.lint.engine import find_files

AWAY = "def f(policy, d):\n    policy.prepare_for_lp_inference()\n    policy.offload_to_cpu()\n    policy.get_logprobs(d)\n"
WAKE = "def f(policy_generation):\n    policy_generation.prepare_for_generation()\n"
CLEAN = "def f(policy, d):\n    policy.prepare_for_lp_inference()\n    policy.get_logprobs(d)\n"


class Done(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def lint(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["rl-session", "lint", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Done(int(ended.value.code or 0), out, err)

    return lint


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_a_clean_folder_exits_with_0_and_says_so(tmp_path: Path, run: Run) -> None:
    done = run(write(tmp_path, clean=CLEAN))
    assert (done.status, done.out) == (0, "")
    assert "1 file: nothing found" in done.err


def test_a_finding_exits_with_1_and_has_three_lines(tmp_path: Path, run: Run) -> None:
    done = run(write(tmp_path, away=AWAY) / "away.py", "--select", "RLM001")
    assert done.status == 1
    what, why, remedy = done.out.splitlines()
    assert what.startswith(f"{tmp_path}/away.py:4:5: RLM001 policy.get_logprobs() after offload_to_cpu() on line 3")
    assert why.startswith("  why: ")
    assert remedy.startswith("  write: policy.prepare_for_lp_inference()")


def test_a_file_that_does_not_parse_exits_with_2_and_hides_nothing(tmp_path: Path, run: Run) -> None:
    done = run(write(tmp_path, away=AWAY, torn="def f(policy:\n    policy.get_logprobs(\n"), "--select", "RLM001")
    assert done.status == 2
    assert "torn.py:" in done.out
    assert "RLM000" in done.out
    assert "RLM001" in done.out


@pytest.mark.parametrize("text", ["x = (\n", "def f(policy:\n", "policy.get_logprobs(\n", "\x00", "print 'x'\n"])
def test_whatever_does_not_parse_is_one_finding(text: str) -> None:
    (finding,) = lint_text(text, "torn.py")
    assert finding.code == "RLM000"


def test_bytes_in_another_encoding_are_read_as_they_say(tmp_path: Path) -> None:
    file = tmp_path / "latin.py"
    file.write_bytes("# coding: latin-1\n# Grüße\n".encode("latin-1") + AWAY.encode())
    assert [f.code for f in lint_files([file], LintConfig(select=("RLM001",))).findings] == ["RLM001"]
    file.write_bytes(b"# coding: nonsense\n" + AWAY.encode())
    assert [f.code for f in lint_files([file], LintConfig()).findings] == ["RLM000"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no path was given"),
        (("nowhere.py",), "there is no such file or folder"),
        (("--select", "RLX", "."), "there is no such code"),
        (("--explain", "RLM999"), "there is no such code"),
        (("--format", "xml", "."), "xml"),
        (("--jobs", "0", "."), "--jobs"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.status == 2
    assert says in done.err
    assert done.out == ""


def test_json_is_whole(tmp_path: Path, run: Run) -> None:
    document = orjson.loads(run(write(tmp_path, away=AWAY, clean=CLEAN), "-f", "json").out)
    assert document["num_files"] == 2
    codes = [finding["code"] for finding in document["findings"]]
    assert "RLM001" in codes
    assert set(document["findings"][0]) == {
        "path",
        "line",
        "column",
        "code",
        "name",
        "severity",
        "what",
        "why",
        "write",
    }


def test_github_commands_are_escaped(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "a,b:c"
    folder.mkdir()
    done = run(write(folder, wake=WAKE), "-f", "github")
    (line,) = done.out.splitlines()
    assert line.startswith("::warning file=")
    assert "a%2Cb%3Ac/wake.py,line=2,col=5,title=RLM005 wake-result-ignored::" in line
    assert "%0Awhy: " in line


@pytest.mark.parametrize(
    ("arguments", "codes"),
    [
        (("--select", "RLM005"), {"RLM005"}),
        (("--select", "RLM0", "--ignore", "RLM005"), {"RLM001", "RLM002"}),
        (("--ignore", "RLM00"), set()),
        (("--select", "RLM1"), set()),
        (("--select", "RLM001,RLM005"), {"RLM001", "RLM005"}),
    ],
)
def test_codes_are_chosen_by_their_beginnings(
    tmp_path: Path, run: Run, arguments: tuple[str, ...], codes: set[str]
) -> None:
    document = orjson.loads(run(write(tmp_path, a=AWAY, w=WAKE), "-f", "json", *arguments).out)
    assert {finding["code"] for finding in document["findings"]} == codes


@pytest.mark.parametrize(
    ("comment", "silent"),
    [
        ("# noqa", True),
        ("# noqa: RLM001", True),
        ("# noqa: E501, RLM001", True),
        ("#NOQA:rlm001", True),
        ("# noqa: RLM005", False),
        ("# why not", False),
    ],
)
def test_a_comment_silences_its_line(comment: str, silent: bool) -> None:
    text = AWAY.replace("get_logprobs(d)", f"get_logprobs(d)  {comment}")
    assert ("RLM001" not in [f.code for f in lint_text(text)]) is silent


BROKEN_UP = """\
def f(policy, d):
    policy.offload_to_cpu()
    policy.get_logprobs({first}
        {second}
    ){last}
    policy.offload_to_cpu()
    with timer.time(
        policy.get_logprobs(d)
    ):{header}
        policy.get_logprobs(d)
"""


@pytest.mark.parametrize(
    ("comments", "lines"),
    [
        ({}, [3, 8]),
        ({"last": "  # noqa: RLM001"}, [8]),
        ({"last": "  # noqa: RLM005"}, [3, 8]),
        ({"first": "  # noqa: RLM001"}, [8]),
        ({"second": "d  # noqa: RLM001"}, [3, 8]),
        ({"header": "  # noqa: RLM001"}, [3]),
        ({"second": '"# noqa: RLM001"'}, [3, 8]),
    ],
)
def test_a_comment_at_the_end_of_a_statement_speaks_for_all_its_lines(
    comments: dict[str, str], lines: list[int]
) -> None:
    text = BROKEN_UP.format(**{"first": "", "second": "d", "last": "", "header": "", **comments})
    found = lint_text(text, config=LintConfig(select=("RLM001",)))
    assert [finding.line for finding in found] == lines


def test_the_project_is_asked_for_names_codes_and_folders(tmp_path: Path, run: Run) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.rl-session.migrate]\npolicies = ["learner"]\nignore = ["policy"]\n'
        '[tool.rl-session.lint]\nignore = ["RLM002"]\nexclude = ["other/*"]\n'
    )
    write(tmp_path, away=AWAY, mine=AWAY.replace("policy", "learner"))
    (tmp_path / "other").mkdir()
    write(tmp_path / "other", mine=AWAY.replace("policy", "learner"))
    document = orjson.loads(run(tmp_path, "-f", "json").out)
    assert [(Path(f["path"]).name, f["code"]) for f in document["findings"]] == [("mine.py", "RLM001")]
    assert document["num_files"] == 2


def test_the_same_configuration_is_found_from_below(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.rl-session.lint]\nselect = ["RLM1"]\n')
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    assert load_config(below).select == ("RLM1",)
    assert load_config(tmp_path).reports("RLM101")
    assert not load_config(tmp_path).reports("RLM001")


@pytest.mark.parametrize(
    "text",
    [
        "[tool.rl-session.lint]\nselect = 'RLM'\n",
        "[tool.rl-session.lint]\nselect = ['RLX']\n",
        "[tool.rl-session.lint]\nnothing = ['RLM']\n",
        "[tool.rl-session.migrate]\npolicies = [1]\n",
        "[tool.rl-session]\nlint = 3\n",
        "[tool\n",
    ],
)
def test_a_configuration_that_cannot_be_is_refused(tmp_path: Path, run: Run, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    done = run(write(tmp_path, clean=CLEAN))
    assert done.status == 2
    assert "pyproject.toml" in done.err
    with pytest.raises(rs.ConfigError):
        load_config(tmp_path)


def test_explain_shows_the_example(run: Run) -> None:
    done = run("--explain", "rlm004")
    assert done.status == 0
    assert "gradients-lost (error)" in done.out
    assert "keep_train_buffers=True" in done.out


def test_many_processes_find_what_one_finds(tmp_path: Path) -> None:
    for number in range(12):
        write(tmp_path, **{f"a{number}": AWAY, f"w{number}": WAKE, f"c{number}": CLEAN})
    files = find_files([tmp_path], LintConfig())
    assert len(files) == 36
    seen: list[Path] = []
    one = lint_files(files, LintConfig(), jobs=1)
    two = lint_files(files, LintConfig(), jobs=2, progress=seen.append)
    assert one == two
    assert sorted(seen) == sorted(files)
    assert [finding.code for finding in one.findings].count("RLM001") == 12


def test_folders_nobody_wrote_are_left_out(tmp_path: Path) -> None:
    for name in (".venv", "__pycache__", "node_modules", "build", "src"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, away=AWAY)
    assert find_files([tmp_path], LintConfig()) == [tmp_path / "src" / "away.py"]


def test_a_file_is_looked_at_once(tmp_path: Path) -> None:
    write(tmp_path, away=AWAY)
    assert len(find_files([tmp_path, tmp_path / "away.py"], LintConfig())) == 1


def test_a_file_that_vanishes_is_one_finding(tmp_path: Path) -> None:
    report = lint_files([tmp_path / "gone.py"], LintConfig())
    assert [f.code for f in report.findings] == ["RLM000"]
    assert report.num_unreadable == 1


def test_names_that_hold_control_characters_are_printed_harmlessly(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "a\x1b[31mb"
    folder.mkdir()
    assert "\x1b" not in run(write(folder, wake=WAKE)).out
