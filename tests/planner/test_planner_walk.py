"""Rehearsals against real steps of the same plan on the CPU, to the byte; and what is done with them."""

import pytest
import torch
from support.launch import ALONE, alone
from support.rehearsal_cases import FULL, GPU, attention_arguments, planned, recorded_steps
from support.slow_cases import slowly
from support.snapshots import live_at_each_moment, protocol, types_in
from support.wording import wording
from torch import nn

from megatron_lite.analysis.memory.read import read_snapshot
from megatron_lite.cli.main import main
from megatron_lite.config.model_size import count_parameters
from megatron_lite.config.world import World
from megatron_lite.instruments.memory_summary import peak
from megatron_lite.instruments.snapshot_format import write_snapshot
from megatron_lite.planner.walk.kernels import cpu_choice
from megatron_lite.planner.walk.walk_steps import Walked
from megatron_lite.rehearsal import Rehearsal, rehearse, summarize_walk
from megatron_lite.units import size

LLAMA = (
    "--normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear --group-query-attention "
    "--num-query-groups 2 --untie-embeddings-and-output-weights --qk-layernorm"
)
TWO = World(size=2)
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
PER_TOKEN = (
    "--calculate-per-token-loss --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1 --bf16"
)


def holds_as_much(words: str, world: World = ALONE) -> Rehearsal:
    """Rehearsed and real: the same peak at the same place, and the same bytes of everything at that moment."""
    plan = planned(words, world)
    with alone():
        expected = summarize_walk(Walked(recorded_steps(plan)))
    found = rehearse(plan)
    assert peak(found.snapshot).size == peak(expected.snapshot).size
    assert (found.where, found.phase, found.categories) == (expected.where, expected.phase, expected.categories)
    assert found.reserved_peak_bytes == expected.reserved_peak_bytes
    return found


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--fp16",
        f"--bf16 {DROPOUT} {FULL}",
        f"{LLAMA} --fp16 --accumulate-allreduce-grads-in-fp32",
        "--bf16 --attention-backend unfused --recompute-activations --optimizer sgd " + DROPOUT,
        *slowly(
            (f"{LLAMA} --bf16 --recompute-granularity full --recompute-method block --recompute-num-layers 1",),
            ("--reset-attention-mask --reset-position-ids --eod-mask-loss --apply-layernorm-1p --squared-relu",),
            ("--dataloader-inter-document-masking --bf16",),
            (PER_TOKEN,),
        ),
    ],
)
def test_a_rehearsal_takes_what_real_steps_take(words):
    holds_as_much(words)


@pytest.mark.parametrize("words", ["--fp16 --ddp-bucket-size 20000", *slowly(("",), ("--bf16",))])
def test_the_stand_in_takes_what_distributed_data_parallel_takes(words):
    holds_as_much(f"{words} --global-batch-size 8", TWO)


@pytest.mark.parametrize(("words", "world"), [("--fp16", ALONE), pytest.param(FULL, TWO, marks=pytest.mark.slow)])
def test_more_micro_batches_take_no_more(words, world):
    """A real step of five, of which the rehearsal walks two or three: the second finds the gradients of the first."""
    holds_as_much(f"{words} --global-batch-size {10 * world.size}", world)


def peaks_by_step(rehearsal: Rehearsal) -> list[int]:
    """Most bytes that live during each step."""
    held, peaks = 0, {}
    for event in rehearsal.snapshot["device_traces"][0]:
        held += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        step = event["user_metadata"].partition("/")[0]
        peaks[step] = max(peaks.get(step, 0), held)
    return [peaks[f"step {number}"] for number in range(1, len(peaks)) if f"step {number}" in peaks]


def test_first_steps_take_no_more_than_later_ones():
    """Sums in fp32 lie where buckets want them, without a second copy while buckets are laid out."""
    few_tokens = "--seq-length 16 --micro-batch-size 1 --hidden-size 128 --global-batch-size 4"
    found = rehearse(planned(f"--bf16 --ddp-bucket-size 20000 {few_tokens}", TWO), steps=3)
    first, second, third = peaks_by_step(found)
    assert max(first, second) <= third + 512


@pytest.mark.parametrize(
    ("groups", "masked", "dropout"), [(4, False, 0.0), (2, False, 0.0), (4, True, 0.0), (4, False, 0.1)]
)
def test_the_rules_of_a_cpus_attention_are_torchs(groups, masked, dropout):
    for dtype in (torch.bfloat16, torch.float32):
        arguments = attention_arguments(dtype, 16, groups, masked, "cpu") | {"dropout_p": dropout}
        assert cpu_choice(*arguments.values()) == torch._fused_sdp_choice(**arguments)


@pytest.fixture(scope="module")
def rehearsed():
    return rehearse(planned("--fp16 --global-batch-size 2 " + DROPOUT, GPU))


def test_categories_add_up_to_the_peak(rehearsed):
    assert sum(rehearsed.categories.values()) == rehearsed.allocated_peak_bytes
    assert rehearsed.allocated_peak_bytes <= rehearsed.expandable_reserved_bytes
    assert rehearsed.allocated_peak_bytes <= rehearsed.reserved_peak_bytes
    parameters = count_parameters(planned().shape)
    held = rehearsed.categories
    assert held["master weights"] == pytest.approx(4 * parameters, rel=0.05)
    assert held["moments"] == pytest.approx(8 * parameters, rel=0.1)  # small ones are rounded up to 512 bytes
    assert held["parameters"] == pytest.approx(2 * parameters, rel=0.05)


def test_the_snapshot_is_read_as_one_of_a_gpu(rehearsed, tmp_path, capsys):
    path = tmp_path / "folder" / "rehearsed.pickle"
    write_snapshot(path, rehearsed.snapshot)
    read = read_snapshot(path)
    assert protocol(path) == 4
    assert types_in(rehearsed.snapshot) <= {dict, list, tuple, str, int, float, bool, type(None)}
    assert (read.peak_bytes, read.simulated, read.complete) == (rehearsed.allocated_peak_bytes, True, True)
    assert [step.name for step in read.steps] == ["step 1", "step 2"]
    assert max(total for _, total in live_at_each_moment(rehearsed.snapshot)) == peak(rehearsed.snapshot).size
    tags = {event["user_metadata"] for event in rehearsed.snapshot["device_traces"][0]}
    for phase in ("forward", "backward"):
        assert {f"step 2/{phase}/decoder.layers.{n}.mlp.linear_fc1" for n in range(2)} <= tags
    assert {"step 1/optimizer_step", "setup"} <= tags
    assert main(["report", str(path), "--no-html"]) == 0
    assert size(rehearsed.allocated_peak_bytes) in capsys.readouterr().out


def test_nothing_of_the_process_is_changed():
    threads, before = torch.get_num_threads(), torch.get_default_dtype()
    x = torch.ones(1000)
    torch.manual_seed(1)
    expected = nn.functional.dropout(x, 0.5)
    rehearse(planned("--bf16 " + DROPOUT, GPU))
    torch.manual_seed(1)
    assert torch.equal(nn.functional.dropout(x, 0.5), expected)
    assert (torch.get_default_dtype(), torch.get_num_threads()) == (before, threads)


def test_what_is_left_out_is_said(rehearsed):
    outside, compiling = rehearsed.notes
    assert compiling == wording("planner/layers-is-not-rehearsed", "--torch-compile")
    assert outside == wording("planner/cuda-own-memory-outside")
    [several] = rehearse(planned("--torch-compile none --global-batch-size 8", World(size=2, gpus=1)), 0).notes
    assert several.startswith(wording("planner/cuda-own-memory-and"))
    assert rehearse(planned(), 0).notes == ()
