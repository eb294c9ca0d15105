"""Mixed precision, recomputation and compilation, each seen in the trace and in the memory snapshot."""

import json
import re
from collections import Counter

import pytest
import torch._dynamo
from support.launch import alone, flags, quietly, steps

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_tables")]

SIZE = (
    "--num-layers 6 --hidden-size 128 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 2 --global-batch-size 2 --attention-backend unfused --lr 1e-4"
)
WATCH = "--profile --use-pytorch-profiler --record-memory-history --pytorch-profiler-collect-shapes"
SWITCHES = {
    "plain": "",
    "bf16": "--bf16",
    "full": "--recompute-granularity full --recompute-method uniform",
    "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
    "selective": "--recompute-activations",
    "compiled": "--torch-compile",
}
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Seen:
    """What one run shows."""

    def __init__(self, words: str, folder):
        torch._dynamo.reset()
        window = "--train-iters 3 --profile-step-start 2 --profile-step-end 3 --memory-snapshot-path"
        _, out = quietly(flags(SIZE, words, WATCH, window, folder / "snapshot.pickle"), folder)
        self.steps = steps(folder)
        peak, unit = re.search(r"memory snapshot: .* peak ([\d.]+) (\w+),", out).groups()
        self.peak_mib = float(peak) * UNITS[unit] / UNITS["MiB"]
        [trace] = folder.glob("*.pt.trace.json*")
        events = json.loads(trace.read_text())["traceEvents"]
        self.operators = Counter(e["name"] for e in events if e.get("cat") == "cpu_op")
        # whoever follows memory on a CPU sees every operator through a mode of dispatch, which torch records once more
        names = ("aten::native_layer_norm", "aten::_softmax")
        self.norms, self.softmaxes = (self.operators[name] // 2 for name in names)
        self.types = Counter(kind for e in events for kind in e.get("args", {}).get("Input type", ()))


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("switches")
    with alone():
        runs = {name: Seen(words, folder / name) for name, words in SWITCHES.items()}
    for name, run in runs.items():
        print(
            f"{name:<10} peak {run.peak_mib:6.1f} MiB  norms {run.norms:3}  "
            f"softmaxes {run.softmaxes:3}  operators {sum(run.operators.values()):5}"
        )
    return runs


def test_recomputing_layers_takes_operators_and_saves_memory(seen):
    plain, full, block = seen["plain"], seen["full"], seen["block"]
    assert full.peak_mib < block.peak_mib < plain.peak_mib and full.peak_mib < 0.75 * plain.peak_mib
    # two per layer and the last; again for those whose layer is recomputed
    assert [run.norms for run in (plain, block, full)] == [13, 13 + 6, 13 + 12]


def test_recomputing_attention_keeps_no_scores(seen):
    plain, selective = seen["plain"], seen["selective"]
    assert selective.peak_mib < 0.95 * plain.peak_mib
    assert [run.softmaxes for run in (plain, selective)] == [6, 12]
    assert selective.norms == 13


def test_mixed_precision_halves_activations(seen):
    plain, mixed = seen["plain"], seen["bf16"]
    assert mixed.peak_mib < 0.9 * plain.peak_mib
    assert mixed.types["c10::BFloat16"] > 100 and plain.types["c10::BFloat16"] == 0


def test_compilation_is_marked_and_fuses(seen):
    plain, compiled = seen["plain"], seen["compiled"]
    assert [s["iteration"] for s in compiled.steps if s.get("compiling")] == [1]
    assert compiled.operators["Torch-Compiled Region: 0/0"] + compiled.operators["CompiledFunction"] >= 6
    assert sum(compiled.operators.values()) < 0.7 * sum(plain.operators.values())
    assert compiled.norms == 1  # the last norm is not in a layer
