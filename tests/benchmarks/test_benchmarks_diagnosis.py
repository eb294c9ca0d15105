"""benchmarks/diagnosis: that the key is sound, that planted causes cost what they must, and that answers are scored by the rules."""

import gzip
import json
import sys

import pytest
from support.paths import REPO

sys.path.insert(0, str(REPO))

from benchmarks.diagnosis.__main__ import main
from benchmarks.diagnosis.claims import LOW, Answer, Claim, read_answer, write_answer
from benchmarks.diagnosis.made.causes import build_training, measure_share
from benchmarks.diagnosis.made.rank import MAIN_THREAD
from benchmarks.diagnosis.manifest import HELD_BACK, MIN_SHARE, Run, read_classes, read_manifest
from benchmarks.diagnosis.score import render_classes, render_mistakes, render_tools, score_run, sum_scores

RUNS = read_manifest()
CLASSES = read_classes()
MIN_RUNS = 60
SOUND = 20


def make_key(*causes: str, culprit: str = "", accepted: tuple[str, ...] = ()) -> Run:
    return Run("x01", "made", "transformer", 2, "", causes, culprit, accepted, "")


def test_the_key_names_only_classes_of_the_list():
    names = [run.name for run in RUNS]
    assert len(set(names)) == len(names)
    assert {name for run in RUNS for name in (*run.causes, *run.accepted)} <= set(CLASSES)
    assert {name for run in RUNS for name in run.causes} == set(CLASSES)
    assert sum(run.is_sound for run in RUNS) == SOUND
    assert len(RUNS) - SOUND >= MIN_RUNS


def test_the_held_back_key_has_runs_of_its_own():
    held_back = read_manifest(HELD_BACK)
    names = [run.name for run in held_back]
    assert len(set(names)) == len(names) and not {run.name for run in RUNS} & set(names)
    assert {name for run in held_back for name in (*run.causes, *run.accepted)} <= set(CLASSES)
    assert not {(run.workload, run.recipe, run.ranks) for run in RUNS} & {
        (run.workload, run.recipe, run.ranks) for run in held_back
    }


def test_a_recipe_may_have_other_numbers():
    plain = build_training("transformer", ["LateAtTimes"], ranks=4)
    changed = build_training("transformer:layers=3", ["LateAtTimes:late=1,late_us=2000"], ranks=4)
    assert (changed.layers, changed.late, changed.late_us, changed.every) == (3, 1, 2000.0, plain.every)
    assert isinstance(changed.late, int) and isinstance(changed.late_us, float)


# of several ranks, the cheap ones stand for all: the rules are the same
MADE = [run for run in RUNS if run.kind == "made" and run.causes and run.ranks <= 2]


@pytest.mark.parametrize("run", MADE, ids=lambda run: run.name)
def test_each_planted_part_takes_its_share_of_the_step(run):
    for part in run.recipe.split():
        assert measure_share(run.workload, [part], run.ranks) > MIN_SHARE


def test_a_made_run_is_the_same_file_each_time(tmp_path):
    written = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        training = build_training("transformer", ["SlowReaderOnOneRank"], ranks=2, seed=3)
        training.simulate()
        written.append([rank.write(folder).read_bytes() for rank in training.ranks])
    assert written[0] == written[1]
    data = json.loads(gzip.decompress(written[0][1]))
    waits = [event["dur"] for event in data["traceEvents"] if "DataLoader" in event["name"]]
    assert len(waits) == 5 and min(waits) > 9_000


def test_streams_of_made_ranks_run_one_kernel_at_a_time():
    training = build_training("transformer", ["OffloadsActivations"], ranks=2)
    training.simulate()
    for rank in training.ranks:
        ends: dict[int, float] = {}
        work = [event for event in rank.events if event.get("cat") in ("kernel", "gpu_memcpy")]
        for event in sorted(work, key=lambda one: one["ts"]):
            assert event["ts"] >= ends.get(event["tid"], 0.0)
            ends[event["tid"]] = event["ts"] + event["dur"]


def test_nodes_of_backward_have_the_numbers_of_the_forward_operations_they_belong_to():
    training = build_training("transformer", ["Recomputes"])
    training.simulate()
    numbers: dict[str, list[int]] = {"forward": [], "backward": [], "again": []}
    for event in training.ranks[0].events:
        number = event.get("args", {}).get("Sequence number")
        if number is None or event["name"].startswith("autograd::engine"):
            continue
        is_forward = not event["args"]["Fwd thread id"]
        kind = "backward" if not is_forward else "forward" if event["tid"] == MAIN_THREAD else "again"
        numbers[kind].append(number)
    layers = training.layers * len(training.step_us)
    assert len(set(numbers["again"])) == 10 * layers
    assert not set(numbers["again"]) & set(numbers["backward"])
    assert set(numbers["backward"]) == set(numbers["forward"])


def test_a_run_is_made_read_and_scored(tmp_path, capsys):
    only = ["--only", "g31"]
    assert main(["make", str(tmp_path), *only]) == 0
    assert main(["run", "report", str(tmp_path), *only]) == 0
    assert main(["score", str(tmp_path), *only]) == 0
    assert read_answer(tmp_path / "answers" / "megatron-lite report" / "g31.json").claims
    assert "| memory-bound-kernels | 1 | 1, 1 of 1 |" in capsys.readouterr().out


def test_a_claim_is_right_by_class_by_an_accepted_class_or_by_family_alone():
    key = make_key("straggler", culprit="rank 1", accepted=("slow-loader",))
    right = Answer("x01", (Claim(("straggler",), culprit="rank 1"), Claim(("sync",))))
    score = score_run(key, right, CLASSES)
    assert score.first_class and score.first_family and score.named_all and score.culprit
    assert (score.high, score.high_right) == (2, 1)
    accepted = score_run(key, Answer("x01", (Claim(("slow-loader",)),)), CLASSES)
    assert accepted.first_class and not accepted.named_all and accepted.culprit is False
    where = score_run(key, Answer("x01", (Claim(families=("host", "input")),)), CLASSES)
    assert not where.first_class and where.first_family and where.high_right == 1
    other = score_run(key, Answer("x01", (Claim(("late-in-turns",)),)), CLASSES)
    assert not other.first_class and other.first_family and other.high_right == 0


def test_missing_cores_count_neither_for_nor_against():
    answer = Answer("x01", (Claim(("cores",)), Claim(("host-work",))))
    key = make_key("host-work")
    assert not score_run(key, answer, CLASSES).first_class
    disturbed = score_run(key, answer, CLASSES, core_wait=0.3)
    assert disturbed.first_class and (disturbed.high, disturbed.high_right) == (1, 1)
    assert score_run(make_key(), Answer("x01", answer.claims[:1]), CLASSES, core_wait=0.3).high == 0
    assert score_run(make_key("cores"), answer, CLASSES, core_wait=0.3).first_class


def test_what_a_tool_does_not_read_is_not_wrong():
    scores = [
        score_run(make_key("sync"), Answer("x01", not_read="no GPU"), CLASSES),
        score_run(make_key("sync"), Answer("x01", (Claim(("sync",)),)), CLASSES),
        score_run(make_key("sync", "host-work"), Answer("x01"), CLASSES),
        score_run(make_key(), Answer("x01", (Claim(("sync",)), Claim(("sync",)))), CLASSES),
        score_run(make_key(), Answer("x01", (Claim(("sync",), confidence=LOW),)), CLASSES),
    ]
    total = sum_scores(scores)
    assert (total.causes, total.causes_read, total.first_class, total.named_class) == (3, 2, 1, 1)
    assert (total.two_causes, total.two_named, total.sound_read, total.alarms) == (1, 0, 2, 1)
    assert (total.high, total.high_right) == (3, 1)
    table = render_tools({"one": scores})
    assert table[2].split(" | ")[1:3] == ["2 of 3", "1 of 2"]
    assert render_classes({"one": scores})[2] == "| sync | 3 | 1, 1 of 2 |"
    assert len(render_mistakes(scores)) == 2


def test_answers_survive_the_file(tmp_path):
    answer = Answer("x01", (Claim(("sync",), ("host",), "rank 1", LOW, "said"),), "")
    write_answer(answer, tmp_path / "answers" / "x01.json")
    assert read_answer(tmp_path / "answers" / "x01.json") == answer
