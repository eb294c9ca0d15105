"""A plan's lines on made values: what is not known is said, never guessed."""

import dataclasses

from support.command_lines import argv, plan
from support.paths import REPO
from support.wording import wording

from megatron_lite.cli.main import main
from megatron_lite.cli.plan import _parser
from megatron_lite.config.world import World
from megatron_lite.formats.hardware import Processor
from megatron_lite.formats.memory_categories import CATEGORIES
from megatron_lite.formats.run_record import LedgerRow, MemoryPrediction, Moment
from megatron_lite.planner.find_processors import find_processor
from megatron_lite.planner.plan_results import Exact, Outlook, PlanReport, Subject, Training
from megatron_lite.planner.step_time import compute_duration, predict_time
from megatron_lite.report.plan_files import as_json
from megatron_lite.report.plan_terminal import (
    STATES,
    build_exact_section,
    build_time_section,
    judge_plan,
    plan_lines,
    sum_kinds,
)
from megatron_lite.report.text import Style
from megatron_lite.units import GIB

PLAN = plan("--bf16", World(gpus=1))
ROWS = (
    LedgerRow("activations", "activations of the layers", 6 * GIB, "6 x 1 GiB"),
    LedgerRow("moments", "moments", 3 * GIB, "3 x 1 GiB"),
    LedgerRow("other", "tiny", 2**20, "1 MiB"),
)
MEMORY = MemoryPrediction((
    Moment("forward", "cross entropy", ROWS), Moment("optimizer_step", "update of the weights", ROWS[1:]),
))  # fmt: skip


def report(*processors: Processor, exact: Exact | None = None) -> PlanReport:
    outlooks = []
    for processor in processors:
        predicted = predict_time(PLAN, processor)
        takes = None
        if predicted.peak_tflops:
            tokens = PLAN.train_samples * PLAN.shape.seq_length
            takes = compute_duration(PLAN.shape, tokens, PLAN.world.size, predicted.tokens_per_s)
        outlooks.append(Outlook(processor, MEMORY, predicted, takes))
    return PlanReport(Subject("plan", "GPT 2 x 64", PLAN), Training(MEMORY, outlooks, exact=exact))


def test_rows_of_the_ledger_add_up_to_the_peak():
    lines = plan_lines(report(), Style())
    at = next(number for number, line in enumerate(lines) if line.startswith("Memory at the peak"))
    assert lines[at].endswith("one GPU, cross entropy (forward)")
    assert [line.split()[:4] for line in lines[at + 1 : at + 5]] == [
        ["activations", "of", "the", "layers"], ["moments", "3.00", "GiB", "33%"],
        ["smaller", "ones", "1.0", "MiB"], ["peak", "9.00", "GiB"],
    ]  # fmt: skip
    assert not any("6 x 1 GiB" in line for line in lines)
    assert wording("report/activations-of-layers-x", 6, 1) in plan_lines(report(), Style(), why=True)
    # parts that the model lacks are left out
    assert not any(line.strip().startswith("output") for line in lines)
    parts = Subject("plan", "", PLAN).parts
    share = f"{parts['MLP'] / sum(parts.values()):.0%}"
    assert any(line.split()[:3] == ["MLP", f"{parts['MLP']:,}", share] for line in lines)


def test_nothing_is_predicted_that_is_not_shown(monkeypatch, capsys):
    """A search shows layouts, and generating its own memory; the JSON holds the training too."""
    flags = [*argv("--bf16"), "--vocab-size", "50256"]

    def refuse(*given):
        raise AssertionError("nobody asked for it")

    monkeypatch.setattr("megatron_lite.cli.plan.predict_training", refuse)
    assert main(["plan", "--search", "--gpu", "H200", *flags]) == 0
    assert main(["plan", "--inference", "--gpu", "H200", *flags]) == 0
    assert wording("report/fastest-of-each-layout") in capsys.readouterr().out


def test_the_state_of_a_stage_counts_all_that_belongs_to_weights():
    rows = tuple(LedgerRow(category, category, 1, "") for category in CATEGORIES)
    memory = MemoryPrediction((Moment("forward", "one of each", rows),))
    kinds = sum_kinds(memory)
    assert kinds[STATES] == len({"parameters", "gathered parameters", "gradients", "master weights", "moments"})
    assert kinds.total() == len(CATEGORIES)


def test_an_unknown_peak_is_no_time():
    """A V100 does not calculate in bf16."""
    made = report(find_processor("V100"))
    assert judge_plan(made)[0].endswith(wording("report/not-known-table-has"))
    told = [
        line
        for block in build_time_section(made.training.outlooks, False).blocks
        for line in getattr(block, "texts", ())
    ]
    assert any("bf16" in line for line in told)
    sums = dict(row[:2] for row in build_time_section(made.training.outlooks, False).blocks[0].rows)
    assert (sums["step"], sums["tokens/s"], sums["whole training"]) == ("not known", "", "")


def test_a_gpu_without_any_rates_is_a_column_of_unknowns():
    known = find_processor("H200")
    blank = dataclasses.replace(known, name="X1", half_tflops=None, memory_gb_s=None, link_gb_s=None, pcie_gb_s=None)
    table = build_time_section(report(known, blank).training.outlooks, False).blocks[0]
    assert list(table.head) == ["", "H200", "X1"]
    assert {row[2] for row in table.rows} == {"not known", ""}
    assert all(row[1] for row in table.rows)


def test_of_peak_is_the_share_of_arithmetic_in_the_bound():
    made = report(find_processor("H200"))
    predicted = made.training.outlooks[0].time
    row = next(
        row for row in build_time_section(made.training.outlooks, False).blocks[0].rows if row[0] == "of peak at best"
    )
    ideal_ms = predicted.flops_causal / predicted.peak_tflops / 1e9
    assert row[1] == f"{ideal_ms / predicted.step_ms:.0%}"


def test_the_exact_peak_is_the_verdicts():
    where, held = "backward of step 2 in GPT", {"activations": 10 * GIB}
    walked = Exact(10 * GIB, 11 * GIB, 11 * GIB, "backward", where, held, ["a note"], 3.0)
    made = report(find_processor("H200"), exact=walked)
    assert "peak 10.0 of 139.7 GiB (7%), in backward" in judge_plan(made)[0]
    table, lines = build_exact_section(made.training.memory, made.training.exact).blocks
    assert ["activations", "10.00 GiB", "6.00 GiB", "-40.0%"] in map(list, table.rows)
    assert ["moments", "0 B", "3.00 GiB", "not there"] in map(list, table.rows)
    assert lines.texts[-1] == "a note"


def test_the_page_names_every_key_of_the_json_and_every_option():
    page = (REPO / "docs/planning.md").read_text(encoding="utf-8")
    found = as_json(report(find_processor("H200")))
    moment = found["memory"]["moments"][0]
    keys = {*found, *found["gpus"][0], *found["memory"], *moment, *moment["rows"][0]}
    options = {name for action in _parser()._actions for name in action.option_strings}
    assert [name for name in sorted(keys) if f"`{name}`" not in page] == []
    assert [name for name in options - {"-h", "--help", "--version"} if f"`{name}" not in page] == []
