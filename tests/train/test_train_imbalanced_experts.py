"""A training whose routers prefer half of the experts, which are those of one rank: what it prints, draws and reports."""

import json

import pytest
from support.launch import flags, pretrain, steps
from support.paths import TESTS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_lite.analysis.findings.order import OF_CORES

EXPERTS = (
    "--hidden-size 128 --ffn-hidden-size 512 --seq-length 64 --max-position-embeddings 64 --num-experts 4 "
    "--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-4 "
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --moe-per-layer-logging --disable-bias-linear "
    "--train-iters 16 --log-interval 4 --profile --use-pytorch-profiler --profile-ranks -1 --profile-step-start 12 "
    "--profile-step-end 14"
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("imbalanced")
    words = flags(EXPERTS, "--tensorboard-dir", folder / "tb", "--run-dir", folder / "run")
    ended = pretrain(words, ranks=2, script=TESTS / "support" / "imbalanced_experts.py")
    assert ended.code == 0, ended.err
    return folder, ended


@pytest.fixture(scope="module")
def routing(run) -> list[dict]:
    return [step["routing"] for step in steps(run[0] / "run")]


@pytest.fixture(scope="module")
def board(run) -> dict[str, list[float]]:
    events = EventAccumulator(str(run[0] / "tb"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return {tag: [scalar.value for scalar in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_the_console_has_megatrons_balancing_loss(run, routing):
    for figures in run[1].figures:
        last = int(figures["iteration"])
        interval = routing[max(last - 4, 0) : last]
        expected = sum(step["losses"]["load_balancing_loss"] for step in interval) / len(interval)
        assert float(figures["load_balancing_loss"]) == pytest.approx(expected, rel=1e-5)


def test_tensorboard_has_the_share_of_each_expert(board, routing):
    shares = [board[f"moe/share of expert {number}"] for number in range(4)]
    for step, of_step in zip(routing, zip(*shares, strict=True), strict=True):
        total = sum(step["expert_tokens"])
        assert of_step == pytest.approx([tokens / total for tokens in step["expert_tokens"]], rel=1e-6)
        assert sum(of_step) == pytest.approx(1, rel=1e-6) and sum(of_step[:2]) > 0.9
    assert min(board["moe/busiest expert, times the mean"]) >= 2
    assert set(board["moe/dropped assignments"]) == {0}
    of_layers = [board[f"moe/load_balancing_loss_layer_{layer}"] for layer in range(2)]
    means = [sum(row) / 2 for row in zip(*of_layers, strict=True)]
    assert means == pytest.approx([step["losses"]["load_balancing_loss"] for step in routing], rel=1e-5)


# what other jobs on the machine can make of any run; on CPUs the host, too, has what they leave
OF_THE_MACHINE = {
    *OF_CORES, "profiler-overhead", "slow-steps", "slowing-steps", "late-in-turns", "late-at-times", "host-gaps",
    # a rank that others keep from its core is waited for where experts exchange tokens
    "exposed-experts", "straggler",
}  # fmt: skip


def test_the_report_names_the_experts_before_all_that_is_not_about_the_machine(run):
    report = json.loads((run[0] / "run" / "report.json").read_text())
    first = next(finding for finding in report["findings"] if finding["code"] not in OF_THE_MACHINE)
    assert first["code"] == "expert-imbalance" and "--moe-aux-loss-coeff" in first["flags"]
    # one rank of two has all tokens: half of what experts take is waiting
    assert "2.00 times" in first["evidence"][0]["text"] and first["cost_ms"] > 0
