"""Two runs beside each other: what is noise and what is not, matched work, refusals, words."""

import dataclasses
import json
import random
import re

import numpy as np
import pytest
from support.report_cases import HOSTILE, record_of, report, run_of, snapshot
from support.run_maker import PLAN, RECORD, folder, step
from support.trace_maker import gpu_run
from support.training_maker import gpu
from support.training_maker import run as made_run
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.compare.compare import compare
from megatron_lite.analysis.compare.compare_results import Change
from megatron_lite.analysis.compare.limits import Outcome, judge, read_limit
from megatron_lite.analysis.compare.settings import exact, paired, paired_samples
from megatron_lite.analysis.memory.memory_results import Held
from megatron_lite.analysis.run.read import read_run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.cli.main import main
from megatron_lite.errors import ConfigError, UserError
from megatron_lite.report.comparison import comparison_lines
from megatron_lite.report.json_file import plain
from megatron_lite.report.text import Style

CLEAR = {Change.MORE, Change.LESS}


def noisy(mean, spread, number, seed):
    source = random.Random(seed)
    return [source.gauss(mean, spread) for _ in range(number)]


@pytest.mark.parametrize(
    ("a", "b", "change"),
    [
        (noisy(100, 1, 50, 1), noisy(100, 1, 50, 2), Change.SAME),
        (noisy(100, 1, 50, 1), noisy(108, 1, 50, 2), Change.MORE),
        (noisy(100, 1, 50, 1), noisy(92, 1, 50, 2), Change.LESS),
        (noisy(100, 60, 6, 1), noisy(110, 60, 6, 2), Change.UNCLEAR),
        ([100, 100], [50, 50, 50], Change.UNCLEAR),
        ([100, 101, 102], [50, 51, 50], Change.LESS),
        ([], [1.0, 1, 1], Change.ONLY_B),
        ([1.0, 1, 1], [], Change.ONLY_A),
        ([], [], Change.UNCLEAR),
        ([5.0, 5, 5], [5.02, 5.02, 5.02], Change.SAME),
    ],
)
def test_noise(a, b, change):
    assert paired_samples(a, b).change is change


def test_a_drift_within_a_run_widens_its_band():
    steady = noisy(100, 3, 60, 1)
    assert paired_samples(sorted(steady), sorted(steady)).band > 1.5 * paired_samples(steady, steady).band


def test_equal_runs_seldom_differ():
    pairs = [paired_samples(noisy(100, 5, 30, seed), noisy(100, 5, 30, -seed - 1)) for seed in range(400)]
    assert sum(pair.change in CLEAR for pair in pairs) < 0.08 * len(pairs)
    told = [pair.change for pair in (exact(1000, 1005), exact(1000, 900), exact(0, 5), paired(None, None, 1.0))]
    assert told == [Change.SAME, Change.LESS, Change.MORE, Change.UNCLEAR]


def traced(folder, name="a", rename=(), **more) -> Facts:
    made = gpu_run(**more)
    for event in made.events:
        for old, new in rename:
            event["name"] = event["name"].replace(old, new)
    return analyze([made.write(folder / name)]).facts


def test_differences_of_rows_sum_to_the_steps(tmp_path):
    slow = traced(tmp_path, "b", steps=6, step_us=1300.0, all_reduce_us=350.0, item=True)
    found = compare(traced(tmp_path, steps=6), slow)
    [step] = [total.pair for total in found.totals]
    assert step.difference == pytest.approx(0.3) and step.change is Change.MORE
    assert sum(pair.difference for pair in found.rows.values()) == pytest.approx(step.difference)
    assert found.rows["exposed_communication"].b == pytest.approx(0.15) and found.rows["compute"].change is Change.SAME
    assert wording("analysis/b-takes-more-time", 30, 1, 1.3) in found.sentence


def test_a_run_differs_from_itself_in_nothing(tmp_path):
    found = compare(traced(tmp_path, all_reduce_us=300.0), traced(tmp_path, "b", all_reduce_us=300.0))
    pairs = [total.pair for total in found.totals] + [one.ms for one in found.kernels]
    pairs += [*found.rows.values(), *found.roles.values()]
    pairs += [pair for phase in found.phases for pair in (phase.host, phase.device)]
    assert len(pairs) > 20 and {pair.change for pair in pairs} == {Change.SAME}
    assert found.sentence.startswith(wording("analysis/b-steps-take-as"))


def test_kernels_are_matched_by_operator_and_phase_not_by_name(tmp_path):
    half = [("ampere_sgemm_128x64_tn", "ampere_fp16_s1688gemm_fp16_128x128_ldg8_relu_f2f_stages_32x1_tn")]
    found = compare(traced(tmp_path), traced(tmp_path, "b", rename=half))
    [product] = [one for one in found.kernels if (one.operator, one.phase) == ("aten::mm", "forward")]
    assert (product.names_a, product.role) == (("ampere_sgemm_128x64_tn",), "matrix products")
    assert product.names_b[0].startswith("ampere_fp16") and product.per_step.change is Change.SAME
    [forward] = [one for one in found.phases if one.name == "forward"]
    # of a phase the label's time and the truth
    times = [product.ms.a, product.ms.b, forward.host.a, forward.device.a]
    assert times == pytest.approx([0.2, 0.2, 0.04, 0.2])


def with_run(tmp_path, name, ms=10.0, plan=None, **more) -> Facts:
    record = RECORD | {"plan": plan or PLAN} | more
    run = read_run(folder(tmp_path / name, [step(n, ms + n % 3 / 10) for n in range(1, 30)], record))
    return Facts(ranks_seen=(), ranks=None, snapshots=(), run=run, gaps=())


def changed(facts: Facts, **columns) -> Facts:
    return dataclasses.replace(facts, run=dataclasses.replace(facts.run, **columns))


def test_flags_that_differ(tmp_path):
    args = {"training": {"micro_batch_size": 2, "bf16": True, "seed": 1}, "model": {"recompute_granularity": "full"}}
    other = {"training": {"micro_batch_size": 4, "bf16": False, "seed": 1}, "model": {"recompute_granularity": None}}
    other |= {"watch": {"save": "/b", "data_path": ["x", "y"]}}
    a = with_run(tmp_path, "a", plan=PLAN | {"args": args, "precision": "bf16"}, versions={"torch": "2.13"})
    plan = PLAN | {"args": other, "precision": "fp32", "world": {"size": 4}}
    b = with_run(tmp_path, "b", plan=plan, versions={"torch": "2.14"})
    assert {(flag.name, flag.a, flag.b) for flag in compare(a, b).flags} == {
        ("--micro-batch-size", "2", "4"),
        ("--bf16", "on", "off"),
        ("--recompute-granularity", "full", "not given"),
        ("--data-path", "not given", "x y"),
        ("precision", "bf16", "fp32"),
        ("ranks", "2", "4"),
        ("torch", "2.13", "2.14"),
    }


def test_runs_without_traces(tmp_path):
    a, b = with_run(tmp_path, "a", 20.0), with_run(tmp_path, "b", 10.0)
    found = compare(a, b)
    totals = {total.name: total.pair for total in found.totals}
    assert totals["step"].change is Change.LESS and totals["tokens per second"].change is Change.MORE and not found.rows
    assert totals["tokens per second"].ratio == pytest.approx(2, rel=0.02)
    assert totals["MFU, causal attention"].change is Change.MORE
    slow = changed(b, phases_ms={"forward": np.full(29, 5.0), "backward": np.full(29, 15.0)})
    said = compare(b, slow).sentence
    assert said.startswith(wording("analysis/b-steps-take-as-long")) and "backward" not in said
    quick = changed(a, phases_ms={"forward": np.full(29, 4.0), "backward": np.full(29, 15.0)})
    # forward takes longer: no reason
    assert compare(quick, b).sentence == wording("analysis/b-takes-less-time", 50, 20.1, 10.1)
    assert [phase.name for phase in found.phases] == ["forward"] and found.phases_of.startswith("steps.jsonl")


def test_what_one_layout_exchanges_and_another_does_not(tmp_path):
    """Ranks of a layout of one dimension share one group, which no description tells apart: the plan does."""
    sides = []
    for name, sizes in (("a", {"tensor": 2}), ("b", {"data": 2})):
        for rank in range(2):
            gpu(tmp_path / name, rank, reduce="tail")
        made_run(tmp_path / name, plan={"layout": {"tensor": 1, "context": 1, "data": 1, "pipeline": 1} | sizes})
        sides.append(analyze([tmp_path / name]).facts)
    found = compare(*sides)
    assert {name: pair.difference for name, pair in found.groups.items()} == pytest.approx(
        {"tensor": -0.8, "data": 0.8}
    )
    shown = "\n".join(comparison_lines(found, Style()))
    assert wording("analysis/communication-not-overlapped-with") in shown and " -100% " in shown
    assert compare(sides[0], sides[0]).groups == {}


def test_noisy_machines_and_short_windows_are_said(tmp_path):
    a, b = (with_run(tmp_path, name) for name in "ab")
    wild = compare(a, changed(b, training_ms=np.array(noisy(12, 9, b.run.steps, 3))))
    assert wording("analysis/may-come-from-machine") in " ".join(wild.notes) and wild.sentence.startswith(
        wording("analysis/it-is-unclear-whether")
    )
    few = compare(traced(tmp_path, "c", steps=2), traced(tmp_path, "d", steps=2))
    assert (
        wording("analysis/few-steps-were-seen") in " ".join(few.notes)
        and wording("analysis/too-few-steps") in few.sentence
    )


def test_another_model_or_batch_is_refused_unless_told(tmp_path):
    a = with_run(tmp_path, "a")
    b = with_run(tmp_path, "b", plan=PLAN | {"shape": PLAN["shape"] | {"num_layers": 4, "seq_length": 32}})
    with pytest.raises(ConfigError) as raised:
        compare(a, b)
    [line] = raised.value.lines
    assert line == wording(
        "analysis/against-against-another-model", "--num-layers", 2, 4, "--seq-length", 16, 32, "--force"
    )
    assert compare(a, b, force=True).forced == ("--num-layers 2 against 4, --seq-length 16 against 32: another model",)
    larger = changed(a, batch_sizes=np.full(a.run.steps, 8.0))
    with pytest.raises(ConfigError, match="--global-batch-size 4 against 8 samples per step: another batch; --force"):
        compare(a, larger)


def test_nothing_in_common_is_one_line(tmp_path):
    only_memory = Facts(ranks_seen=(), ranks=None, snapshots=(snapshot(),), run=None, gaps=())
    with pytest.raises(UserError, match="nothing in common"):
        compare(with_run(tmp_path, "a"), only_memory)


def test_memory_by_category():
    held = (Held("moments", 8 * 2**30, 1), Held("activations", 4 * 2**30, 1))
    less = dataclasses.replace(snapshot(), peak_bytes=24 * 2**30, held=held)
    a, b = (Facts(ranks_seen=(), ranks=None, snapshots=(one,), run=None, gaps=()) for one in (snapshot(), less))
    found = compare(a, b)
    assert found.memory["activations"].difference == -8 * 2**30 and found.memory["moments"].change is Change.SAME
    assert found.sentence == wording("analysis/peak-memory-is-less", 25, "32.00", "24.00")
    assert list(found.memory)[:2] == ["parameters", "gradients"] and found.step_ms == 0


@pytest.mark.parametrize(("events", "outcome"), [(10, Outcome.KEPT), (0, Outcome.UNCLEAR)])
def test_what_a_snapshot_without_history_holds_is_no_peak(events, outcome):
    less = dataclasses.replace(snapshot(), peak_bytes=2**30, events=events)
    a, b = (Facts(ranks_seen=(), ranks=None, snapshots=(one,), run=None, gaps=()) for one in (snapshot(), less))
    for first, second in ((a, b), (b, a)):
        found = compare(first, second)
        [total] = found.totals
        assert (total.pair.change is Change.UNCLEAR) is (events == 0)
        assert any("history" in note for note in found.notes) is (events == 0)
        assert {pair.change is Change.UNCLEAR for pair in found.memory.values()} == {events == 0}
    [judged] = judge(compare(a, b), [read_limit("peak_bytes > +5%")])
    assert judged.outcome is outcome


@pytest.mark.parametrize(("ranks", "noted"), [((0, 1), False), ((0,), True), ((None,), False)])
def test_peaks_of_other_ranks_are_noted(ranks, noted):
    both, some = (tuple(dataclasses.replace(snapshot(), rank=rank) for rank in ones) for ones in ((0, 1), ranks))
    a, b = (Facts(ranks_seen=(), ranks=None, snapshots=ones, run=None, gaps=()) for ones in (both, some))
    assert any("0 to 1" in note for note in compare(a, b).notes) is noted


def test_ranks_that_were_not_read_are_noted():
    def of(missing: tuple[int, ...]) -> Facts:
        facts = report().facts
        ranks = facts.ranks
        return dataclasses.replace(facts, ranks=dataclasses.replace(ranks, world_size=8, missing=missing))

    unread = [note for note in compare(of(()), of((3, 5))).notes if "of 8 ranks" in note]
    assert [note[:4] for note in unread] == ["B: 2"] and "3, 5" in unread[0]
    assert not [note for note in compare(of(()), of(())).notes if "of 8 ranks" in note]


def test_lines_are_narrow_and_harmless(tmp_path):
    a, plan = report(name=HOSTILE).facts, {"args": {"x": {"tokenizer_model": HOSTILE}}, "shape": PLAN["shape"]}
    b = dataclasses.replace(report(name="forward").facts, run=dataclasses.replace(run_of(), record=record_of(plan)))
    lines = comparison_lines(compare(a, b, True, (HOSTILE, "B")), Style(), everything=True)
    assert max(map(len, lines)) <= 100 and all(line.isprintable() for line in lines) and len(lines) > 20
    json.dumps(plain(compare(a, b, True)), allow_nan=False)


def test_the_command(tmp_path, capsys):
    for name, ms in (("a", 20.0), ("b", 10.0)):
        with_run(tmp_path, name, ms)
    paths = [str(tmp_path / name) for name in "ab"]
    assert main(["compare", *paths, "--json", str(tmp_path / "c.json")]) == 0
    out = capsys.readouterr().out
    assert (
        wording("analysis/b-takes-less-time-per", 50) in out
        and "written:" in out
        and wording("analysis/to-keep-in-mind") in out
    )
    assert json.loads((tmp_path / "c.json").read_text())["totals"][0]["pair"]["change"] == "less"
    wrong = {"none": [paths[0], f"{tmp_path}/none"], "--help": paths[:1], "--json": [*paths, "--json", str(tmp_path)]}
    for said, argv in wrong.items():
        assert main(["compare", *argv]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and said in error


def test_the_page_of_a_comparison_is_the_report_s_with_both_sides_in_every_chart(tmp_path, capsys):
    paths = []
    for name, step_us in (("a", 1000.0), ("b", 1300.0)):
        steps = [step(number, step_us / 1000 + number % 3 / 10) | {"loss": 5 - number / 10} for number in range(1, 30)]
        folder(tmp_path / name, steps)
        gpu_run(steps=6, step_us=step_us, item=name == "b").write(tmp_path / name)
        paths.append(str(tmp_path / name))
    page = tmp_path / "c.html"
    assert main(["compare", *paths, "--html", str(page), "--fail-if", "step_ms > +5%"]) == 1
    assert f"written: {page}" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert "default-src 'none'" in text and '<nav id="contents"' in text and "Limit step_ms &gt; +5%: exceeded" in text
    figures = {
        re.search(r'id="chart-(\w+)"', part)[1]: part for part in re.findall(r"<figure>.*?</figure>", text, re.DOTALL)
    }
    assert set(figures) >= {"rows", "phases", "losses"}
    told = re.findall(r"<title>(A|B), [^<]*: ([\d.]+) ms per step</title>", figures["rows"])
    sums = [sum(float(ms) for name, ms in told if name == side) for side in "AB"]
    assert sums == pytest.approx([1.0, 1.3], rel=0.01)
    for key in ("phases", "losses"):
        legend = figures[key].partition('class="legend"')[2].partition("</ul>")[0]
        assert re.findall(r"</i>(\w+)</li>", legend) == ["A", "B"]
    # nothing but the page's own script, and nothing that is loaded
    assert text.count("<script") == 1
    assert not re.search(r'<(link|img|script|iframe)[^>]* (src|href)="(?!data:)', text)


ONE_RANK = {
    "args": {"training": {"seed": 1}, "data": {"data_path": ["x"]}, "model": {"num_layers": 2}, "optimizer": {}, "parallel": {"tp": 1}},
    "precision": "fp32", "shape": {"num_layers": 2, "padded_vocab_size": 128}, "vocab_size": 100,
}  # fmt: skip
TWO_RANKS = ONE_RANK | {
    "args": ONE_RANK["args"] | {"parallel": {"tp": 2}}, "shape": {"num_layers": 2, "padded_vocab_size": 256},
}  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "loss", "norm", "dropout", "said"),
    [
        ("fp32", 2.0 + 2e-6, 1.0 + 1e-5, 0.0, "rounding in fp32"),
        ("fp32", 2.0, 1.098, 0.0, "one of them computes something else"),
        ("fp32", 2.0 + 1e-4, 1.0, 0.0, "one of them computes something else"),
        ("fp32", 2.001, 1.01, 0.1, "dropout draws other masks on another layout"),
        ("bf16", 2.001, 1.005, 0.0, "rounding in bf16"),
        ("bf16", 2.001, 1.098, 0.0, "one of them computes something else"),
    ],
)
def test_losses_of_layouts_differ_by_rounding_or_by_an_error(tmp_path, precision, loss, norm, dropout, said):
    sides = []
    for name, plan, first, first_norm in (("a", ONE_RANK, 2.0, 1.0), ("b", TWO_RANKS, loss, norm)):
        settings = {"hidden_dropout": dropout}
        facts = with_run(tmp_path, name, plan=plan | {"settings": settings, "precision": precision})
        losses, norms = np.full(29, 1.5), np.full(29, 1.0)
        losses[0], norms[0], losses[7] = first, first_norm, 1.5 + (0.25 if name == "b" else 0.0)
        sides.append(changed(facts, losses=losses, grad_norms=norms))
    found = compare(*sides)
    assert said in found.losses.verdict and found.losses.is_error == ("something else" in said)
    assert (found.losses.iterations, found.losses.largest, found.losses.largest_at) == ((1, 29), 0.25, 8)
    shown = " ".join(" ".join(comparison_lines(found, Style(False))).split())
    assert (
        wording("analysis/do-they-compute-same") in shown
        and wording("analysis/largest-difference-of-loss", 1, 29, 0.25, 8) in shown
    )


def test_runs_that_were_not_meant_to_compute_the_same_are_not_judged(tmp_path):
    other = ONE_RANK | {"args": ONE_RANK["args"] | {"optimizer": {"lr": 1.0}}}
    a, b = with_run(tmp_path, "a", plan=ONE_RANK), with_run(tmp_path, "b", plan=other)
    assert compare(a, b).losses is None and compare(a, a).losses.largest == 0.0


@pytest.mark.parametrize(("wait_ms", "code"), [(60.0, 3), (0.0, 0)])
def test_a_baseline_of_a_busy_machine_gates_nothing(tmp_path, wait_ms, code):
    """A run as long on a quiet machine may be much slower than the baseline would have been there."""
    spent = {"cpu_ms": 100.0 - wait_ms, "core_wait_ms": wait_ms, "involuntary_switches": int(wait_ms)}
    times = noisy(100, 0.5, 60, 1)
    busy = folder(tmp_path / "busy", [step(number, ms, **spent) for number, ms in enumerate(times, 1)])
    quiet = made_with(tmp_path, "quiet", 100, seed=2)
    baseline = str(tmp_path / "base.json")
    assert main(["report", str(busy), "--no-html", "--baseline", baseline]) == 0
    for before in (str(busy), baseline):
        assert main(["compare", before, quiet, "--fail-if", "step_ms > +5%"]) == code


def test_a_baseline_of_a_watched_script_keeps_its_arguments_to_itself(tmp_path):
    lines = [step(number, 10.0) for number in range(1, 9)]
    run = folder(tmp_path / "run", lines, {**RECORD, "command": ["train.py", "--key", "secret"]})
    assert main(["report", str(run), "--no-html", "--baseline", str(tmp_path / "b.json")]) == 0
    content = (tmp_path / "b.json").read_text()
    assert "secret" not in content and json.loads(content)["run"]["command"] == []


def made_with(tmp_path, name, mean, spread=0.5, seed=1):
    lines = [step(number, ms) for number, ms in enumerate(noisy(mean, spread, 60, seed), 1)]
    return str(folder(tmp_path / name, lines))


def test_limits_are_exceeded_kept_or_cannot_be_told(tmp_path, capsys):
    """Ten times each: a run 8% slower, an equal one, and one so noisy that nothing can be told; also against a baseline."""
    base, baseline, table = made_with(tmp_path, "base", 100), str(tmp_path / "base.json"), tmp_path / "table.md"
    assert main(["report", base, "--no-html", "--baseline", baseline]) == 0
    assert (tmp_path / "base.json").stat().st_size < 20_000 and '"process"' not in (tmp_path / "base.json").read_text()
    codes = {}
    for kind, mean, spread in (("slow", 108, 0.5), ("equal", 100, 0.5), ("noisy", 105, 25)):
        words = ["--fail-if", "step_ms > +5%", "--markdown", str(table)]
        runs = {seed: made_with(tmp_path, f"{kind}{seed}", mean, spread, seed) for seed in range(12, 22)}
        codes[kind] = [main(["compare", (base, baseline)[seed % 2], run, *words]) for seed, run in runs.items()]
    assert codes["slow"] == [1] * 10 and codes["equal"] == [0] * 10 and codes["noisy"] == [3] * 10
    text = table.read_text()
    assert "| `step_ms > +5%` |" in text and "| cannot tell |" in text and text.startswith("**")
    assert capsys.readouterr().out.count("Limits") == 30


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ("step_ms > +12%", 0), ("step_ms>5.5%", 1), ("tokens_per_second < -5%", 1), ("tokens_per_second < -20 %", 0),
        ("forward_ms > +5%", 0), ("peak_bytes > 0%", 3), ("step_ms < +20%", 1),
    ],
)  # fmt: skip
def test_names_of_limits(tmp_path, limit, code):
    a, b = (made_with(tmp_path, name, mean) for name, mean in (("a", 100), ("b", 110)))
    assert main(["compare", a, b, "--fail-if", limit, "--fail-if", "step_ms > +50%"]) == code


def test_mistakes_in_limits_are_one_line(tmp_path, capsys):
    a = made_with(tmp_path, "a", 100)
    for limit, said in {
        "step_ms": "give a name",
        "x_ms > 5%": "there are step_ms, tokens_per_second, mfu, peak_bytes, forward_ms",
    }.items():
        assert main(["compare", a, a, "--fail-if", limit]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f'error: --fail-if "{limit}": ') and said in error and error.count("\n") == 1
    trace = gpu(tmp_path / "trace")
    assert main(["report", str(trace), "--no-html", "--baseline", str(tmp_path / "b.json")]) == 2
    assert wording("analysis/no-run-folder") in capsys.readouterr().err
