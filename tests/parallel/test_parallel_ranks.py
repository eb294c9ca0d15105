"""What two data parallel ranks do beside each other: gradients by hand, what they send when, and what each drops."""

import hashlib
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from support.launch import (
    EOD,
    build_bare,
    checkpoint,
    flags,
    losses,
    on_ranks,
    part,
    plan_of,
    train_all,
    write_documents,
    write_no_tables,
)

from megatron_lite.data.batch import make_batch
from megatron_lite.parallel import data_parallel
from megatron_lite.parallel.data_parallel import DataParallel
from megatron_lite.train import step
from megatron_lite.train.data_streams import DataStreams
from megatron_lite.train.loop import Progress

# on two ranks; their losses are those of one rank: test_parallel_layouts
PROFILED = {
    "one parameter a bucket": "--ddp-bucket-size 1",
    "bf16": "--bf16",
    "bf16, small buckets": "--bf16 --ddp-bucket-size 500",
    "a million gradients": "--vocab-size 40000",
}
# one step whose change of the weights is the gradient itself
ONE_STEP = (
    "--train-iters 1 --optimizer sgd --sgd-momentum 0 --lr 1 --lr-decay-style constant --clip-grad 0 "
    "--weight-decay 0 --eod-mask-loss"
)
GRADIENT = {
    f"gradient{words}": f"{ONE_STEP} --micro-batch-size 3 --global-batch-size 12 {words}"
    for words in ("", " --calculate-per-token-loss")
}
WINDOW = "--profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 5 --profile-ranks -1"
DROPPING = {f"dropout {number}": "--train-iters 1 --hidden-dropout 0.5" for number in (1, 2)}


def run_all(world, scenarios: str):
    """For on_ranks: every scenario; for those of DROPPING also a fingerprint of the first dropout mask."""
    inner, masks = torch.nn.Dropout.forward, []

    def forward(self, hidden):
        dropped = inner(self, hidden)
        masks.append((dropped == 0).numpy().tobytes())
        return dropped

    torch.nn.Dropout.forward = forward
    write_no_tables()
    train_all(world, scenarios)
    half = len(masks) // 2
    for first in (0, half):
        print(f"\nMASK {hashlib.sha256(masks[first]).hexdigest()}")


def hold_reductions(world, scenario: str):
    """For on_ranks: trains while no reduction ends before this rank has told that it has its gradients.

    Told after the wait for reductions, they would never end.
    """
    reduce, call, held = DataParallel._reduce_bucket, data_parallel.call_when_computed, []

    def hold(self, sums, bucket):
        done = torch.futures.Future()
        held.append((reduce(self, sums, bucket), done))
        return done

    def release(action):
        action()
        print(f"\nREDUCED {len(held)}")
        for reduced, done in held:
            done.set_result(reduced.wait())
        held.clear()

    DataParallel._reduce_bucket = hold
    step.call_when_computed = lambda loss, action: call(loss, partial(release, action))
    train_all(world, scenario)


def test_a_rank_has_its_gradients_before_it_waits_for_others(tmp_path):
    words = flags("--train-iters 3 --log-interval 1 --global-batch-size 8 --bf16 --ddp-bucket-size 20000")
    (tmp_path / "one.json").write_text(json.dumps({"run": words}))
    for output in on_ranks(hold_reductions, tmp_path, str(tmp_path / "one.json")):
        reduced = [int(line.split()[1]) for line in output.splitlines() if line.startswith("REDUCED")]
        assert len(reduced) == 3 and min(reduced) >= 1 and max(reduced) > 1, reduced


@pytest.fixture(scope="module")
def outputs():
    return []


@pytest.fixture(scope="module")
def runs(tmp_path_factory, outputs):
    """Every scenario, in folder 2."""
    folder = tmp_path_factory.mktemp("ranks")
    # documents of very different lengths, so that ranks differ in their number of masked tokens
    data = write_documents(folder / "data", [2, 30, 3, 3, 3, 3, 50, 1, 1, 1, 1, 1, 40] * 20)
    scenarios = {}
    for name, words in (GRADIENT | DROPPING | PROFILED).items():
        words = f"--train-iters 5 --global-batch-size 8 {words} {WINDOW if name in PROFILED else ''}"
        saves = ["--save", Path(name)] if name in GRADIENT else []
        scenarios[name] = flags(words, *saves, data=data if name in GRADIENT else None)
    (folder / "scenarios.json").write_text(json.dumps(scenarios))
    outputs += on_ranks(run_all, folder / "2", str(folder / "scenarios.json"))
    return folder


@pytest.mark.parametrize("name", GRADIENT)
def test_gradient_and_loss_against_a_reference_by_hand(runs, name):
    """Gradient: the mean of the micro-batches' means over tokens, or of all tokens; loss: the mean over all tokens."""
    plan = plan_of(json.loads((runs / "scenarios.json").read_text())[name])
    batches = DataStreams(plan).training(Progress())
    model = build_bare(plan)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    sums, tokens = [], []
    for _ in range(4):  # two passes of two ranks, here one after the other
        batch = make_batch(
            next(batches), eod=EOD, eod_mask_loss=True, reset_position_ids=False, reset_attention_mask=False
        )
        counted = batch.tokens_BT != EOD
        sums.append(model(batch.tokens_BT, batch.labels_BT)[counted].sum())
        tokens.append(int(counted.sum()))
    assert len(set(tokens)) > 1, "micro-batches must differ in their tokens, or the test can tell nothing"
    per_token = name.endswith("per-token-loss")
    (sum(sums) / sum(tokens) if per_token else sum(s / n for s, n in zip(sums, tokens)) / 4).backward()
    [loss] = losses(runs / "2" / name)
    assert loss == pytest.approx(sum(s.item() for s in sums) / sum(tokens), rel=1e-6)
    after = part(checkpoint(runs / "2" / name, 1), "model.")
    for key, parameter in model.named_parameters():
        assert torch.allclose(before[key] - after[key], parameter.grad, rtol=1e-3, atol=2e-7), key


@pytest.mark.parametrize("name", PROFILED)
@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_last_micro_batch_talks(runs, name, rank):
    [path] = (runs / "2" / name).glob(f"*_rank{rank}.*.pt.trace.json")
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    backwards = sorted((e for e in events if e["name"] == "backward"), key=lambda event: event["ts"])
    reductions = [e for e in events if e["name"] == "gloo:all_reduce"]
    assert len(backwards) == 2 * 4
    begun = [sum(b["ts"] <= r["ts"] <= b["ts"] + b["dur"] for r in reductions) for b in backwards]
    assert begun[:3] == begun[4:7] == [0, 0, 0] and begun[3] == begun[7], begun
    buckets = begun[3]
    assert buckets == 1 if name in ("bf16", "a million gradients") else buckets >= 8, buckets


def test_each_rank_drops_out_its_own(runs, outputs):
    first, second = ([line.split()[1] for line in output.splitlines() if line.startswith("MASK")] for output in outputs)
    assert first[0] == first[1] and second[0] == second[1], "a seed repeats"
    assert first[0] != second[0], "ranks differ"
