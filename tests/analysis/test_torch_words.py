"""Jobs that are not this trainer's get PyTorch's words in place of flags: in findings, audit, pages of rules and notes."""

import dataclasses
import json
import re

import pytest
from support.finding_cases import CASES, MORE_TRIGGERS
from support.training_maker import cpu, gpu
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.findings.rules import RULES, get_page
from megatron_lite.analysis.torch_words import FILE, in_torch_words, list_torch_words, names_flag
from megatron_lite.formats.file_names import RUN_FILE
from megatron_lite.report.json_file import json_text
from megatron_lite.report.sections.all import build_limitations
from megatron_lite.report.terminal import terminal_lines
from megatron_lite.report.text import Style

TRIGGERS = [*((code, case[0]) for code, case in CASES.items()), *MORE_TRIGGERS]


def report_of_script(folder, write):
    """On a job that is another's: its files alone, or where they hold a run's record, one of `megatron-lite watch`."""
    write(folder)
    record = folder / RUN_FILE
    if record.exists():
        told = json.loads(record.read_text())
        told.pop("plan", None)
        record.write_text(json.dumps(told | {"command": ["train.py"]}))
    return analyze([folder])


@pytest.mark.parametrize(("code", "write"), TRIGGERS, ids=[code for code, _ in TRIGGERS])
def test_a_foreign_job_is_told_no_flag(tmp_path, code, write):
    report = report_of_script(tmp_path, write)
    said = [text for one in report.findings for text in (one.advice, *one.flags, *(seen.text for seen in one.evidence))]
    said += [text for check in report.checks for text in (check.remedy, *map(str, check.evidence))]
    said += [report.verdict.headline, *build_limitations(report)]
    assert [text for text in said if names_flag(text)] == []
    assert all(one.advice and "\0" not in one.advice for one in report.findings)
    assert [text for text in said if re.search(r"\(\)(?<!\w\(\))|: *$|,,", text)] == []


def test_a_run_of_the_trainer_keeps_its_flags(tmp_path):
    write = CASES["fp32-products"][0]
    (tmp_path / "own").mkdir()
    write(tmp_path / "own")
    (tmp_path / "own" / RUN_FILE).write_text(json.dumps({"schema": 1, "status": "finished", "plan": {"args": {}}}))
    own = analyze([tmp_path / "own"]).findings
    assert [one.flags for one in own if one.code == "fp32-products"] == [("--bf16",)]
    (tmp_path / "other").mkdir()
    [other] = [one for one in report_of_script(tmp_path / "other", write).findings if one.code == "fp32-products"]
    assert other.flags == () and "torch.autocast" in other.advice
    content = json.loads(json_text(analyze([tmp_path / "other"])))
    assert [one["flags"] for one in content["findings"] if one["code"] == "fp32-products"] == [[]]


@pytest.mark.parametrize(
    ("text", "words", "watched"),
    [
        ("load ahead: --num-workers 4 (now 2)", "load ahead: DataLoader(num_workers=4) (now 2)", None),
        (
            "larger buckets: --ddp-bucket-size 6553600",
            "larger buckets: DistributedDataParallel(bucket_cap_mb=25)",
            None,
        ),
        ("less often (--eval-interval)", "less often", None),
        (
            "gc.collect(): --save-interval, --async-save",
            "gc.collect(): torch.distributed.checkpoint.async_save",
            None,
        ),
        ("a longer run: --train-iters, or more", "a longer run, or more", None),
        ("in Megatron-LM --overlap-grad-reduce", "in Megatron-LM --overlap-grad-reduce", None),
        ("for Megatron-LM itself --bf16", "for Megatron-LM itself --bf16", None),
        ("nsys profile --cuda-graph-trace=node", "nsys profile --cuda-graph-trace=node", None),
        ("audit it --against another run", "audit it --against another run", None),
        ("no flag at all", "no flag at all", None),
        (
            "--profile-step-start 10",
            "torch.profiler.schedule(wait=10, ...)",
            "megatron-lite watch --steps 10:M -- COMMAND",
        ),
    ],
)
def test_flags_of_the_trainer_alone_become_words(text, words, watched):
    assert in_torch_words(text) == words
    assert in_torch_words(text, watched=True) == (watched or words)


def test_an_unknown_flag_is_seen_and_stays():
    assert in_torch_words("try --no-such-flag") == "try --no-such-flag" and names_flag("try --no-such-flag")
    assert not names_flag("in Megatron-LM --tp-comm-overlap; megatron-lite watch --memory -- COMMAND")


def test_the_table_has_a_row_per_flag_and_no_row_is_hidden_by_one_above():
    lines = [line.split("\t") for line in FILE.read_text().splitlines() if not line.startswith("#")][1:]
    assert all(len(line) == 3 for line in lines)
    for flag, torch, _ in lines:
        example = re.sub(r"\((?:\\d\+\|N|\\d\+)\)", "7", flag)
        example = re.sub(r"\\([()])", r"\1", re.sub(r"\([^()]*(?:\\.[^()]*)*\)\?", "", example))
        if torch and "\\" not in torch:
            assert in_torch_words(example) == torch


def test_a_page_shows_both_kinds_of_words():
    for code, rule in RULES.items():
        page = get_page(code)
        flags = rule.page.partition("\nFlags:")[2].partition("\nFalse alarm:")[0]
        named = list_torch_words(flags)
        assert (wording("analysis/in-script-of-your") in page) == bool(named)
        flat = " ".join(page.split())
        assert all(
            f"{' '.join(flag.split())} is {words}" in flat for flag, words in list_torch_words(" ".join(flags.split()))
        )


def test_the_memory_of_a_foreign_trace_names_no_flag(tmp_path):
    gpu(tmp_path)
    report = analyze([tmp_path])
    said = " ".join(terminal_lines(report, Style(), True))
    assert not names_flag(re.sub(r"with --all", "", said))
    assert report.facts.is_foreign and not dataclasses.replace(report.facts, run=None).has_plan


def test_a_watched_job_on_a_cpu_is_not_sent_to_device_times(tmp_path):
    def write(folder):
        CASES["profiler-overhead"][0](folder)
        cpu(folder)

    [found] = [one for one in report_of_script(tmp_path, write).findings if one.code == "profiler-overhead"]
    assert wording("analysis/unprofiled-step-time") in found.advice and "device times" not in found.advice
