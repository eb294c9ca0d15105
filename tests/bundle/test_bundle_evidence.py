"""What a failed job left, in a bundle: the same conclusion."""

import json

import pytest
from support.bundle_check import find_secrets, make_bundle
from support.postmortem_cases import CASES
from support.run_maker import RECORD, folder, step

from megatron_lite.analysis.failed_job import find_failure
from megatron_lite.bundle.clean_folder import clean_folder
from megatron_lite.bundle.clean_records import clean_record
from megatron_lite.bundle.names import Secret, Substitutes
from megatron_lite.bundle.owners import list_hosts
from megatron_lite.postmortem.bundled_evidence import encode_evidence, read_bundled_evidence
from megatron_lite.postmortem.collect import collect_evidence
from megatron_lite.postmortem.conclude import conclude

SECRETS = ["zaphod", "heartofgold", "magrathea", "whispered", "10.11.12.13"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("evidence")


@pytest.mark.parametrize("name", CASES)
def test_a_failure_is_concluded_as_from_all_files(name, place):
    make, _ = CASES[name]
    evidence = make()
    names = Substitutes()
    for host in list_hosts(evidence):
        names.hide(Secret.HOST, host)
    path = place / "job_evidence.json"
    path.write_bytes(encode_evidence(clean_record(evidence, names)))
    found = conclude(collect_evidence([place]))
    expected = conclude(evidence)
    assert (found.kind, found.ranks, found.confidence) == (expected.kind, expected.ranks, expected.confidence)


def make_failed_job(path):
    """A run of two ranks of which one raised, with words of a document in what it says, its log and its stacks."""
    record = RECORD | {"status": "failed: RanksError: rank 1", "process": {"host": "heartofgold7", "pid": 1}}
    folder(path, [step(number) for number in range(1, 6)], record)
    told = {"host": "heartofgold7.magrathea.org", "step": 5, "wall_time": 1.6e9, "phase": "forward"}
    raised = told | {
        "left": "ValueError",
        "error": "ValueError",
        "message": "bad sample: he whispered of magrathea",
        "error_stack": ["load (/home/zaphod/train.py:12)", "main (/home/zaphod/train.py:30)"],
    }
    ranks = {"0": told | {"waits_for": "he whispered"}, "1": raised}
    verdict = "rank 1 ended in ValueError: he whispered of magrathea"
    (path / "ranks.json").write_text(json.dumps({"verdict": verdict, "ranks": ranks}))
    (path / "train.log").write_text(
        "zaphod@heartofgold7: he whispered\n"
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/home/zaphod/train.py", line 12, in load\n'
        "[rank1]:     whispered(magrathea)\n"
        "[rank1]: ValueError: bad sample: he whispered of magrathea\n"
        "zaphod asks 10.11.12.13\n"
    )
    return path


def test_a_failed_job_has_the_same_failure_and_no_secret(tmp_path):
    place = make_failed_job(tmp_path / "job")
    made, _ = make_bundle([place], tmp_path / "made")
    assert find_secrets(made, SECRETS) == []
    before = find_failure([place])
    after = find_failure([made])
    assert (before.kind, before.ranks, before.confidence) == (after.kind, after.ranks, after.confidence)
    assert after.ranks == (1,)


def test_a_folder_of_evidence_alone_is_a_bundle_too(tmp_path):
    place = make_failed_job(tmp_path / "job")
    for name in ("run.json", "steps.jsonl"):
        (place / name).unlink()
    made, _ = make_bundle([place], tmp_path / "made")
    assert find_failure([made]).ranks == (1,)


def test_bundled_evidence_that_is_damaged_is_one_line(tmp_path):
    made = tmp_path / "made"
    made.mkdir()
    clean_folder([make_failed_job(tmp_path / "job")], made)
    path = made / "job_evidence.json"
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], content.replace(b'"ends":[', b'"ends":[7,'), b"{}"):
        path.write_bytes(damaged)
        assert collect_evidence([made]).ends == ()
    path.write_bytes(content)
    assert read_bundled_evidence(path).ends
