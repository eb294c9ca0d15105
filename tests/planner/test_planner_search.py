"""plan --search: nothing that fits is missed, what it names is what the flags give, and what it says."""

import itertools
import json
import re

import pytest
from support.command_lines import argv, plan
from support.wording import wording

from megatron_lite.cli.main import main
from megatron_lite.cli.planned_run import planned_run
from megatron_lite.config.plan import plan_stages
from megatron_lite.config.world import World
from megatron_lite.errors import ConfigError
from megatron_lite.planner.find_processors import find_processor
from megatron_lite.planner.memory import predict_memory
from megatron_lite.planner.search import search
from megatron_lite.planner.step_time import predict_time
from megatron_lite.planner.what_if import NO_RECOMPUTE, change_plan, full_recompute
from megatron_lite.units import GIB

GPU = find_processor("A100-40")
MODEL = (
    "--num-layers 24 --hidden-size 3072 --num-attention-heads 24 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --global-batch-size 32 --bf16 --hidden-dropout 0 --attention-dropout 0"
)
EIGHT = World(size=8, local_size=8, gpus=8)


@pytest.fixture(scope="module")
def found():
    return search(plan(MODEL, EIGHT, 50257), GPU, 0.08)


def measure(flags: str):
    """(peak of the stage that holds most, time) of a command line; None where the trainer refuses it."""
    try:
        one = plan(f"{MODEL} {flags}", EIGHT, 50257)
    except ConfigError:
        return None
    return max(predict_memory(stage, GPU).peak.num_bytes for stage in plan_stages(one)), predict_time(one, GPU).step_ms


def test_nothing_faster_is_missed(found):
    """All flags by hand, without recomputation."""
    times = []
    for tensor, context, pipeline, chunks, micro in itertools.product(
        (1, 2, 4, 8), (1, 2), (1, 2, 4, 8), (1, 2, 3, 4), (1, 2, 4, 8)
    ):
        flags = f"--tensor-model-parallel-size {tensor} --context-parallel-size {context} --pipeline-model-parallel-size {pipeline}"
        flags += f" --micro-batch-size {micro}" + " --sequence-parallel" * (tensor > 1)
        flags += f" --num-virtual-stages-per-pipeline-rank {chunks}" if chunks > 1 else ""
        for sharing in ("", " --use-distributed-optimizer", " --use-torch-fsdp2"):
            one = measure(flags + sharing)
            if one and one[0] <= found.budget_bytes:
                times.append(one[1])
    assert len(times) > 20 and found.fitting[0].step_ms <= min(times) * (1 + 1e-9)
    assert min(one.step_ms for one in found.fitting if not one.plan.recomputed_layers) == pytest.approx(min(times))


def test_what_is_listed_fits_and_is_what_its_flags_give(found):
    assert found.budget_bytes == int(GPU.memory_gib * GIB * 0.92) and len(found.fitting) <= found.tried * 2
    assert [one.step_ms for one in found.fitting] == sorted(one.step_ms for one in found.fitting)
    layouts = [one.plan.layout.sizes for one in found.best_of_layouts]
    assert len(set(layouts)) == len(layouts) > 5
    for one in [*found.best_of_layouts[:8], *found.front]:
        assert not one.changed.drop
        assert (one.peak_bytes, pytest.approx(one.step_ms)) == measure(" ".join(one.changed.add))
        assert one.peak_bytes <= found.budget_bytes


def test_a_layer_less_recomputed_would_not_fit(found):
    """Of candidates that recompute some layers, and none where all or none of them would do."""
    refined = [one for one in found.fitting if 0 < one.plan.recomputed_layers < len(one.plan.stage.layers)]
    assert len(refined) > 5
    for one in refined:
        number = one.plan.args.model.recompute_num_layers - 1
        mode = full_recompute(number, "block") if number else NO_RECOMPUTE
        changed = change_plan(plan(MODEL, EIGHT, 50257), one.changes | mode)
        assert (
            max(predict_memory(stage, GPU).peak.num_bytes for stage in plan_stages(changed.plan)) > found.budget_bytes
        )


def test_nothing_beats_the_front(found):
    for one in found.front:
        assert not any(o.step_ms < one.step_ms and o.peak_bytes <= one.peak_bytes for o in found.fitting)
    assert found.front[0] == found.fitting[0] and len(found.front) > 2


def run(capsys, *words: str) -> str:
    given = [*argv(MODEL), "--vocab-size", "50256"]
    code = main(["plan", *words, *given])
    told = capsys.readouterr()
    return told.out if code == 0 else told.err


def test_the_command(capsys, tmp_path):
    path = tmp_path / "found.json"
    shown = run(capsys, "--search", "--gpu", "A100-40", "--gpus", "8", "--json", str(path))
    search = json.loads(path.read_text())["search"]
    best = search["layouts"][0]
    assert all(flag in " ".join(shown.split()) for flag in best["add"])
    assert (
        wording("report/fastest-of-each-layout") in shown
        and wording("cli/time-against-memory") in shown
        and wording("planner/its-traffic-stays-within") in shown
    )
    assert f"at best {best['step_ms']:,.1f} ms" in " ".join(shown.split())
    assert best["peak_bytes"] <= search["budget_bytes"] and search["fitting"] > len(search["layouts"]) > 3
    assert wording("cli/memory-at-peak") not in shown


def test_where_nothing_fits_the_least_is_named(capsys):
    shown = " ".join(run(capsys, "--search", "--gpu", "T4", "--gpus", "1").split())
    assert wording("planner/none-of-layouts-fits", 2, 13.34, 8) in shown
    assert "--recompute-granularity full" in shown and wording("report/fastest-of-each-layout") not in shown


@pytest.mark.parametrize(
    "words", [["--search"], ["--search", "--gpu", "T4", "H100"], ["--search", "--gpu", "T4", "--inference"]]
)
def test_what_does_not_go_with_a_search_is_one_line(capsys, words):
    shown = run(capsys, *words)
    assert shown == "error: --search: needs one --gpu NAME, and neither --fit nor --inference; change that.\n"


def test_the_network_decides_between_nodes(capsys, tmp_path):
    words = [*argv(f"{MODEL} --use-distributed-optimizer"), "--vocab-size", "50256"]

    def exposed_ms(*network: str) -> float:
        path = tmp_path / "plan.json"
        assert main(["plan", "--gpu", "A100-40", "--gpus", "16", *network, "--json", str(path), *words]) == 0
        rows = json.loads(path.read_text())["gpus"][0]["time"]["rows"]
        return next(row["ms"] for row in rows if row["name"] == "reduce-scatter, not overlapped")

    capsys.readouterr()
    assert exposed_ms("--network", "1") > exposed_ms("--network", "200") == exposed_ms()


def test_a_pipelines_stages_are_listed_heaviest_first(capsys, tmp_path):
    path = tmp_path / "plan.json"
    words = [*argv(MODEL), "--pipeline-model-parallel-size", "4", "--vocab-size", "50256"]
    assert main(["plan", "--gpu", "A100-40", "--gpus", "4", "--json", str(path), *words]) == 0
    shown = capsys.readouterr().out
    assert (
        wording("planner/memory-by-stage") in shown
        and wording("planner/micro-batches-in-flight", 4, 2) in shown
        and "(the embedding)" in shown
    )
    stages = json.loads(path.read_text())["stages"]
    assert [one["stage"] for one in stages] == [0, 1, 2, 3] and stages[0]["peak_bytes"] > stages[3]["peak_bytes"]
    [table] = [part for part in shown.split("\n\n") if part.startswith("Memory by stage")]
    assert table.splitlines()[2].split()[0] == "1"
    assert planned_run([*words, "--seed", "2"], 4).plan.stage.number == 0


def test_the_page_has_pictures_of_stages_schedule_and_layouts(capsys, tmp_path):
    path, words = tmp_path / "plan.html", [*argv(MODEL), "--vocab-size", "50256"]
    assert (
        main(
            [
                "plan",
                "--gpu",
                "A100-40",
                "--gpus",
                "4",
                "--page",
                str(path),
                *words,
                "--pipeline-model-parallel-size",
                "4",
            ]
        )
        == 0
    )
    page = path.read_text()
    assert f"written: {path}" in capsys.readouterr().out
    charts = find_figures(page)
    assert set(charts) == {"stages", "schedule"} and wording("planner/time-of-step-at") in page
    assert re.findall(r"</i>(\w+)</li>", charts["stages"]) == ["state", "activations", "logits", "other"]
    assert len(re.findall(r", micro-batch \d+: ", charts["schedule"])) == 2 * 4 * 32
    assert main(["plan", "--search", "--gpu", "A100-40", "--gpus", "8", "--page", str(path), *words]) == 0
    every, front = find_figures(path.read_text())["layouts"].split('<g class="points"')[1:]
    assert (
        every.count("<circle") > front.count("<circle") > 2 and wording("planner/fastest-that-fits") in path.read_text()
    )


def find_figures(page: str) -> dict[str, str]:
    """The charts of a page by their keys."""
    figures = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    return {re.search(r'id="chart-(\w+)"', figure)[1]: figure for figure in figures}


def test_the_bubbles_formula_knows_split_backwards(capsys):
    words = [*argv(f"{MODEL} --pipeline-model-parallel-size 4 --torch-compile none"), "--vocab-size", "50256"]
    shown = []
    for schedule in ("1F1B", "ZeroBubble"):
        assert main(["plan", "--gpu", "A100-40", "--gpus", "4", *words, "--pipeline-schedule", schedule]) == 0
        shown.append(capsys.readouterr().out)
    assert "bubble: 9% by formula" in shown[0] and "bubble: 3% by formula" in shown[1]  # 3 of 35, and 1 of 33
