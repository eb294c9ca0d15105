"""postmortem, and report on a folder that shows a failure: the verdict first, whatever else is there."""

import json

import pytest
from support.flight_recordings import RecordedJob
from support.run_maker import RECORD, folder, step

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.failed_job import find_failure
from megatron_lite.analysis.verdict_word import VerdictWord
from megatron_lite.cli.main import main
from megatron_lite.postmortem.postmortem_results import FailureKind


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    """Recordings of a job whose rank 2 did not enter the last call."""
    path = tmp_path_factory.mktemp("hung")
    job = RecordedJob(4)
    for _ in range(8):
        job.call("all_reduce", shape=[1024])
    job.call("all_reduce", shape=[1024], without=[2])
    job.write(path)
    return path


def test_the_verdict_comes_first(hung, tmp_path, capsys):
    assert main(["postmortem", str(hung), "--json", str(tmp_path / "found.json")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("NEVER ENTERED: Rank 2 ")
    assert "confidence: medium" in "".join(shown.splitlines()[:3])
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["kind"], found["ranks"], found["schema"]) == ("never entered", [2], 1)
    assert found["rows"][0]["rank"] == 2
    assert found["read"] == {"flight recordings": 4}


def test_nothing_to_read_is_one_line(tmp_path, capsys):
    assert main(["postmortem", str(tmp_path)]) == 2
    assert main(["postmortem", str(tmp_path / "none")]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert str(tmp_path) in told[0]


def test_many_ranks_take_few_lines(tmp_path, capsys):
    job = RecordedJob(300)
    job.call("all_reduce")
    job.call("all_reduce", without=[123])
    job.write(tmp_path)
    assert main(["postmortem", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 40
    assert any("298" in line for line in lines)


def test_report_opens_with_the_failure_of_a_run(hung, tmp_path, capsys):
    path = tmp_path / "run"
    folder(
        path,
        [step(number) for number in range(1, 9)],
        RECORD | {"status": "failed: RuntimeError: Timed out waiting 600000ms for recv"},
    )
    assert analyze([path]).failure is None
    for file in hung.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    report = analyze([path])
    assert report.failure.kind is FailureKind.NEVER_ENTERED
    assert report.failure.ranks == (2,)
    assert report.verdict.word is VerdictWord.FAILED
    assert main(["report", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.index(f"{VerdictWord.FAILED}: ") < shown.index("The failure") < shown.index("All steps")
    written = json.loads((path / "report.json").read_text())
    assert written["failure"]["ranks"] == [2]
    assert "The failure" in (path / "report.html").read_text()


def test_report_on_recordings_alone_says_why(hung, capsys):
    assert main(["report", "--no-html", str(hung)]) == 0
    assert f"{VerdictWord.FAILED}: {FailureKind.NEVER_ENTERED.value}" in capsys.readouterr().out


def test_a_folder_without_signs_is_not_read_for_failures(tmp_path):
    (tmp_path / "console.log").write_text("Traceback (most recent call last):\n")
    assert find_failure([tmp_path]) is None
