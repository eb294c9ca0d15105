"""Scripts without data hold, byte by byte, what they hold with data; on a GPU that is not there, what its kernels take."""

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.foreign_scripts import BEGIN, MIXED_PRECISION, PERCEPTRON, SCRIPTS, SEVERAL_RANKS, UNEVEN_RANKS
from support.paths import REPO

SMALL_MODEL = [
    "--num-layers",
    "2",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "32",
    "--max-position-embeddings",
    "32",
    "--tokenizer-type",
    "ByteTokenizer",
    "--lr",
    "1e-3",
]

from megatron_lite.analysis.memory.read import analyze_snapshot
from megatron_lite.cli.main import main
from megatron_lite.formats.fit_record import ENDED_EARLY, ChangeName, FitRecord
from megatron_lite.formats.hardware import CUBLAS_THREADS, cublas_workspace_bytes
from megatron_lite.planner.find_processors import find_processor
from megatron_lite.planner.script_walks import Walker
from megatron_lite.script_walk.driverless_cuda import describe_untried

H100 = find_processor("H100")


def make_walker(folder: Path, text: str, processor=None) -> Walker:
    path = folder / "train.py"
    path.write_text(text)
    return Walker((sys.executable, str(path)), processor)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_walk_on_a_cpu_holds_what_the_run_holds(tmp_path, name):
    walker = make_walker(tmp_path, SCRIPTS[name])
    walked = walker.walk()
    trained = walker.walk(with_data=True)
    assert not walked.failure
    assert not trained.failure
    assert walked.allocated_peak_bytes == trained.allocated_peak_bytes
    assert walked.categories == trained.categories
    assert walked.phase == trained.phase


def test_a_script_finds_the_gpu_that_is_not_there(tmp_path):
    found = make_walker(tmp_path, MIXED_PRECISION, H100).walk()
    assert not found.failure
    parameters = (64 * 256 + 256 + 256 * 64 + 64) * 4
    assert found.categories["parameters"] == pytest.approx(parameters, rel=0.02)
    assert found.categories["moments"] == pytest.approx(2 * parameters, rel=0.02)
    workspaces = CUBLAS_THREADS * cublas_workspace_bytes(H100, deterministic=False)
    assert found.categories["workspace"] >= workspaces
    assert found.batch == 32


@pytest.mark.slow
def test_the_trainer_takes_what_its_own_walk_says(tmp_path):
    """As any script, on a GPU: the two ways to its memory meet in no line but the kernels' rules."""
    flags = [*SMALL_MODEL, "--micro-batch-size", "4", "--bf16", "--mock-data", "--train-iters", "9"]
    flags.append("--no-check-for-nan-in-loss-and-grad")
    trained = Walker((sys.executable, "-m", "megatron_lite", *flags), H100).walk()
    assert not trained.failure
    answer = tmp_path / "plan.json"
    assert main(["plan", "--exact", "--gpu", "H100", "--json", str(answer), *flags]) in (0, None)
    exact = json.loads(answer.read_text())["exact"]
    assert trained.allocated_peak_bytes == pytest.approx(exact["allocated_peak_bytes"], abs=8192)


@pytest.mark.slow
def test_a_changed_batch_and_less_memory_are_walked_too(tmp_path):
    walker = make_walker(tmp_path, PERCEPTRON, H100)
    base = walker.walk()
    larger = walker.walk(batch=32, wanted_batch=320)
    assert larger.allocated_peak_bytes > base.allocated_peak_bytes
    assert larger.categories["moments"] == base.categories["moments"]
    deep = PERCEPTRON.replace("nn.Sequential(", "nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Sequential(", 1)
    blocks = make_walker(tmp_path, deep.replace(").to(device)", ")).to(device)", 1), H100)
    assert not blocks.walk(change=ChangeName.RECOMPUTE).failure


OWN_KERNEL = """
own = torch.library.Library("own", "DEF")
own.define("kernel(Tensor x) -> Tensor")
own.impl("kernel", lambda x: x.clone(), "CPU")
own.kernel = torch.ops.own.kernel
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "picked = x[int(loss)]",
        "values = loss.tolist()",
        "kept = loss[loss > 0]",
        "picked = x[: (loss > 0).sum().item()]",
        "lost = x @ x",
        "own.kernel(x + loss)",
    ],
)
def test_what_only_data_has_ends_the_walk_and_is_named_with_its_line(tmp_path, line):
    text, [where] = insert_lines(line)
    found = make_walker(tmp_path, text).walk()
    assert found.failure.startswith(where)
    assert where not in (*found.branches, *found.copies)


def test_what_is_done_with_values_is_named_with_its_line(tmp_path):
    """In one script, whose walk goes on behind each of them."""
    branches = (
        "if loss > 10: raise SystemExit('diverged')",
        "assert torch.isfinite(loss) and not torch.isnan(loss).any()",
        "assert not (~torch.isfinite(loss)).cpu().item()",
        "assert torch.isnan(model[0].weight).sum().item() == 0",
        "ok = torch.isfinite(loss); ok &= loss > 10; assert not ok",
    )
    copy = "kept = torch.zeros(2); kept[:1] = loss.detach()"
    shown = "print(loss.item(), loss / 2, f'{loss:.3f}')"
    text, (*places, copied, _) = insert_lines(*branches, copy, shown)
    found = make_walker(tmp_path, text).walk()
    assert not found.failure
    assert sorted(found.branches) == sorted(places)
    assert list(found.copies) == [copied]


def insert_lines(*lines: str) -> tuple[str, list[str]]:
    """A script with further lines behind its loss, and how a walk names each of them."""
    inserted = "".join(f"    {line}\n" for line in lines)
    text = PERCEPTRON.replace("    optimizer.zero_grad()\n", f"{inserted}    optimizer.zero_grad()\n")
    text = text.replace("model = ", f"{OWN_KERNEL}model = ", 1)
    return text, [f"train.py:{text[: text.index(line)].count(chr(10)) + 1}: {line}" for line in lines]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\n",
        pytest.param(f"{BEGIN}\nraise RuntimeError('broken')", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_does_not_train_says_so(tmp_path, text, capsys):
    (tmp_path / "train.py").write_text(text)
    assert main(["fit", "--quick", "--", sys.executable, str(tmp_path / "train.py")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: megatron-lite fit:")


@pytest.mark.slow
def test_a_script_that_ends_early_says_so_in_its_own_words(tmp_path):
    found = make_walker(tmp_path, f"{BEGIN}\nraise SystemExit('shards: 0')").walk()
    assert found.failure == f"{ENDED_EARLY}: shards: 0"


@pytest.mark.slow
def test_no_weights_without_values_are_written(tmp_path):
    save = f"    torch.save(model.state_dict(), {str(tmp_path / 'model.pt')!r})\n"
    found = make_walker(tmp_path, PERCEPTRON.replace("    loss.backward()\n", f"{save}    loss.backward()\n")).walk()
    assert not found.failure
    assert len(found.notes) == 1
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.slow
def test_the_answer_with_its_snapshot(tmp_path, capsys):
    (tmp_path / "train.py").write_text(PERCEPTRON)
    snapshot, answer = tmp_path / "memory.pickle", tmp_path / "fit.json"
    words = ["--gpu", "H100", "--gpu", "T4", "--snapshot", str(snapshot), "--json", str(answer)]
    assert main(["fit", *words, "--", sys.executable, str(tmp_path / "train.py")]) == 0
    report = json.loads(answer.read_text())
    record = FitRecord(**report["record"])
    assert sum(record.categories.values()) == record.allocated_peak_bytes
    assert [room["processor"]["name"] for room in report["rooms"]] == [H100.name, "T4"]
    assert report["largest"]["size"] > 32
    assert analyze_snapshot(pickle.loads(snapshot.read_bytes()), snapshot).peak_bytes == record.allocated_peak_bytes
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["FITS", "FITS"]


@pytest.mark.slow
def test_the_first_of_several_ranks_holds_gradients_and_their_buckets(tmp_path):
    """As DistributedDataParallel does unless gradients are views of buckets."""
    walker = make_walker(tmp_path, SEVERAL_RANKS, H100)
    found = replace(walker, ranks=8).walk()
    assert not found.failure
    assert found.categories["gradients"] == 2 * 256 * 256 * 4


@pytest.mark.slow
@pytest.mark.parametrize("words", ["sharded.py", "sharded.py --bf16", "data_parallel.py", "data_parallel.py --unused"])
def test_the_first_of_two_ranks_holds_what_it_holds_beside_the_other(words):
    name, *arguments = words.split()
    walker = Walker((sys.executable, str(REPO / "benchmarks" / "fit_scripts" / name), *arguments), None, ranks=2)
    walked = walker.walk()
    trained = walker.walk(with_data=True)
    assert (walked.failure, trained.failure) == ("", "")
    assert walked.allocated_peak_bytes == trained.allocated_peak_bytes
    assert walked.categories == trained.categories


@pytest.mark.slow
def test_shared_state_holds_what_torch_holds_that_shares_it(tmp_path):
    script = REPO / "benchmarks" / "fit_scripts" / "data_parallel.py"
    shared = tmp_path / "shared.py"
    wrapped = "torch.distributed.optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)"
    text = script.read_text().replace("torch.optim.AdamW(model.parameters(), lr=1e-3)", wrapped)
    assert wrapped in text
    shared.write_text(text.replace("import torch\n", "import torch\nimport torch.distributed.optim\n"))
    changed = Walker((sys.executable, str(script)), None, ranks=2, rank=1).walk(change=ChangeName.SHARED_STATE)
    trained = Walker((sys.executable, str(shared)), None, ranks=2, rank=1).walk(with_data=True)
    assert (changed.failure, trained.failure) == ("", "")
    assert changed.categories == trained.categories


@pytest.mark.slow
def test_recurrent_layers_are_named_whose_memory_on_a_gpu_is_not_known(tmp_path):
    text = PERCEPTRON.replace("(model(x) - x)", "(model(x) - recurrent(x)[0])")
    text = text.replace("optimizer = ", "recurrent = nn.LSTM(64, 64).to(device)\noptimizer = ")
    found = make_walker(tmp_path, text, H100).walk()
    (note,) = found.notes
    assert "nn.LSTM" in note
    assert note.startswith("train.py:")


def test_versions_of_torch_that_walks_were_not_compared_with_are_named():
    assert describe_untried("2.13.0+cpu") == []
    (note,) = describe_untried("2.12.1")
    assert "2.12.1" in note


@pytest.mark.slow
def test_ranks_that_differ_are_walked_and_each_finds_its_gpu(tmp_path):
    walker = replace(make_walker(tmp_path, UNEVEN_RANKS, H100), ranks=8)
    walked = walker.walk_kinds_of_ranks(lambda text: None)
    assert {record.failure for record in walked.values()} == {""}
    weights = {rank: record.categories["parameters"] for rank, record in walked.items()}
    assert list(weights) == [0, 7, 1, 4]
    assert weights[0] < weights[1] < weights[4] < weights[7]


@pytest.mark.slow
def test_a_validation_of_many_batches_is_walked_twice(tmp_path):
    loop = (
        "    model.eval()\n    with torch.no_grad():\n        for _ in range({}): told = model(x)\n    model.train()\n"
    )
    peaks = []
    for batches in (1, 5000):
        text = PERCEPTRON.replace("    optimizer.zero_grad()\n", loop.format(batches) + "    optimizer.zero_grad()\n")
        peaks.append(make_walker(tmp_path, text, H100).walk().allocated_peak_bytes)
    assert peaks[0] == peaks[1] > 0


def test_gpus_of_other_makers_are_refused(capsys):
    assert main(["fit", "--gpu", "MI300X", "--", "python", "train.py"]) == 2
    assert capsys.readouterr().err.startswith("error: --gpu MI300X: ")


@pytest.mark.slow
def test_an_optimizer_computes_in_lists_on_a_gpu(tmp_path):
    """As torch does there unless it is told otherwise: square roots of all second moments at once."""
    layers = 32
    deep = PERCEPTRON.replace(
        "nn.Linear(64, 256)", f"*[nn.Linear(64, 64) for _ in range({layers})], nn.Linear(64, 256)"
    )
    walker = make_walker(tmp_path, deep, H100)
    in_lists = walker.walk()
    one_by_one = walker.walk(change=ChangeName.ONE_BY_ONE)
    weights = layers * 64 * 64 * 4
    assert in_lists.phase == "optimizer_step"
    assert in_lists.allocated_peak_bytes - one_by_one.allocated_peak_bytes >= weights // 2
