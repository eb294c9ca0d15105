"""Files and folders of a job: which are read, which are named, and what no foreign file does."""

import os
from pathlib import Path

import pytest

from megatron_lite.errors import UserError
from megatron_lite.postmortem import collect
from megatron_lite.postmortem.collect import EvidenceReader, collect_evidence
from megatron_lite.postmortem.evidence import EventKind, JobEvidence, LogEvent


def _read_line(path: Path) -> JobEvidence:
    text = path.read_text()
    if "refused" in text:
        raise UserError(f"{path}: refused.")
    if "broken" in text:
        raise RecursionError
    return JobEvidence(events=(LogEvent(EventKind.SIGNAL, str(path), text),))


READERS = (EvidenceReader("lines", lambda head, path: head.startswith(b"line"), _read_line),)


@pytest.fixture
def folder(tmp_path):
    for name, text in {"a": "line 1", "b/c/d": "line 2", "b/code.py": "import os", "b/e": "line refused",
                       "f": "line broken", ".git/g": "line 3"}.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_folder_is_walked_and_what_is_not_read_is_named(folder):
    evidence = collect_evidence([folder], READERS)
    assert [event.text for event in evidence.events] == ["line 1", "line 2"]
    assert evidence.read == {"lines": 2}
    assert [line.split(":")[0] for line in evidence.unread] == [str(folder / "b/e"), str(folder / "f")]


def test_a_named_file_that_no_reader_knows_is_named(folder):
    evidence = collect_evidence([folder / "b/code.py", folder / "none"], READERS)
    assert [line.split(":")[0] for line in evidence.unread] == [str(folder / "b/code.py"), str(folder / "none")]


def test_a_file_is_read_once(folder):
    assert collect_evidence([folder, folder / "a", folder / "b"], READERS).read == {"lines": 2}


def test_links_lead_to_files_of_the_folder_only(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "x"
    outside.write_text("line outside")
    (folder / "b" / "out").symlink_to(outside)
    (folder / "b" / "up").symlink_to(folder)
    (folder / "b" / "turn").symlink_to(folder / "b" / "turn")
    assert collect_evidence([folder], READERS).read == {"lines": 2}


def test_pipes_and_deep_folders_wait_for_nobody(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    deep = tmp_path.joinpath(*["d"] * (collect.MAX_EVIDENCE_DEPTH + 2))
    deep.mkdir(parents=True)
    (deep / "a").write_text("line")
    evidence = collect_evidence([tmp_path], READERS)
    assert not evidence.read
    assert len(evidence.unread) == 1
    assert len(collect_evidence([tmp_path / "pipe"], READERS).unread) == 1


def test_only_so_many_files_are_looked_at(folder, monkeypatch):
    monkeypatch.setattr(collect, "MAX_EVIDENCE_FILES", 1)
    evidence = collect_evidence([folder], READERS)
    assert evidence.read == {"lines": 1}
    assert len(evidence.unread) == 1


def test_files_that_disagree_on_the_number_of_ranks_are_named(folder):
    def read(path: Path) -> JobEvidence:
        return JobEvidence(world_size={"1": 8, "2": 4}.get(path.read_text()[-1:]))

    evidence = collect_evidence([folder], [EvidenceReader("lines", READERS[0].recognizes, read)])
    assert evidence.world_size == 8
    assert "4, 8" in evidence.unread[0]


def test_of_attempts_the_last_one_is_read(tmp_path):
    for name in ("run/attempt_0/3/a", "run/attempt_1/2/a", "run/attempt_1/b", "other/attempt_0/0/a", "a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"line {name}")
    evidence = collect_evidence([tmp_path], READERS)
    told = {event.text.removeprefix("line ") for event in evidence.events}
    assert told == {"run/attempt_1/2/a", "run/attempt_1/b", "other/attempt_0/0/a", "a"}
    (note,) = evidence.unread
    assert note.startswith(f"{tmp_path / 'run'}: 1 file")
    alone = collect_evidence([tmp_path / "run" / "attempt_0"], READERS)
    assert len(alone.events) == 1
    assert not alone.unread
