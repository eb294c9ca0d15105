"""Memory in closed form: known answers, and what must hold for every plan."""

import re

import pytest
from estimate_grid import FULL, GRID, LARGE, MEDIUM, SEED, SHORT, UNFUSED, plan_for
from support.wording import wording

from megatron_lite.config.model_size import count_parameters
from megatron_lite.formats.memory_categories import CATEGORIES
from megatron_lite.formats.run_record import Moment
from megatron_lite.phases import Phase
from megatron_lite.planner.attention_kernel import MATH, predict_attention_kernel
from megatron_lite.planner.memory import predict_memory
from megatron_lite.units import GIB

SEED_PARAMETERS = 355_919_872
WORKSPACES = 2 * 8_519_680


def peak_of(words: str, ranks: int = 1, device: str = "cuda") -> Moment:
    return predict_memory(plan_for(words, ranks, device)).peak


def named(moment: Moment) -> dict[str, int]:
    return {row.name: row.num_bytes for row in moment.rows}


def at(words: str, where: str, ranks: int = 1) -> Moment:
    moments = predict_memory(plan_for(words, ranks)).moments
    [found] = [moment for moment in moments if moment.where == where and moment.phase != Phase.FORWARD]
    return found


def value(formula: str) -> int:
    """'2 x 4 bytes x 8 heads x 1,024^2 tokens + ...' -> the number."""
    products = []
    for term in formula.replace(",", "").split(" + "):
        product = 1
        for factor in term.split(" x "):
            number, power = re.match(r"(\d+)(\^2)?", factor).groups()
            product *= int(number) ** (2 if power else 1)
        ranks = re.search(r" / (\d+) ranks", term)
        product //= int(ranks[1]) if ranks else 1
        products.append(product)
    return sum(products)


@pytest.mark.parametrize(
    ("words", "per_parameter"),
    [
        (SEED, 20),  # 16 and fp32 copies of the gradients, during the update
        (SEED.replace("--fp16", "--bf16"), 18),
        (SEED.replace("--fp16", ""), 16),
        (SEED.replace("--fp16", "--bf16 --optimizer sgd"), 14),
        (SEED.replace("--fp16", "--bf16 --grad-reduce-in-bf16 --optimizer sgd --sgd-momentum 0"), 12),
    ],
)
def test_the_update_takes_so_many_bytes_per_parameter(words, per_parameter):
    others = WORKSPACES + 2 * 8 * 4 * 2048  # tokens and labels
    if "sgd" not in words:
        # step counters: a block for each of 12 tensors in 24 layers, two embeddings, and two of the last norm
        others += 512 * (24 * 12 + 4)
    assert at(words, "update of the weights").num_bytes == per_parameter * SEED_PARAMETERS + others


def test_buckets_of_several_ranks_hold_the_gradients():
    """fp16: the optimizer finds them there, and nothing more; with fp32 sums, and beside earlier micro-batches' gradients,
    they come on top."""
    assert at(SEED, "update of the weights").num_bytes == at(SEED, "update of the weights", 4).num_bytes
    for words, more in ((SEED, 2), (SEED.replace("--fp16", "--bf16"), 2), (SEED.replace("--fp16", ""), 4)):
        assert peak_of(words, 4).num_bytes - peak_of(words).num_bytes == more * SEED_PARAMETERS
    several = SEED + "--global-batch-size 64"
    assert peak_of(several, 4).num_bytes - peak_of(SEED, 4).num_bytes == 2 * SEED_PARAMETERS


def test_the_857m_script_is_highest_where_backward_begins():
    peak, tokens = peak_of(SEED), 4 * 2048
    assert (peak.phase, peak.where) == ("backward", "output layer")
    assert peak.num_bytes / GIB == pytest.approx(11.965, abs=0.005)
    logits = sum(row.num_bytes for row in peak.rows if row.category == "logits and loss")
    assert logits == 2 * tokens * 50304
    activations = sum(row.num_bytes for row in peak.rows if row.category == "activations")
    plain, statistics = 24 * 34 * tokens * 1024, 24 * (2 * 2 + 16) * 4 * tokens  # two norms, 16 heads
    assert activations == plain + statistics + tokens * (5 * 1024 + 2 * 4)  # and the last norm, the embedding's dropout


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (SEED + FULL, "gradient norm"),
        (LARGE + "--fp16 " + FULL, "gradient norm"),
        (SHORT, "embedding"),
        (MEDIUM + UNFUSED + "--padded-vocab-size 50304 --recompute-granularity selective", "output layer"),
    ],
)
def test_where_it_is_highest(words, where):
    assert peak_of(words).where == where


def test_recomputation_keeps_a_vector_per_token_and_layer():
    plain, again = named(at(SEED, "cross entropy")), named(at(SEED + FULL, "cross entropy"))
    assert again["inputs of recomputed layers"] == 24 * 2 * 8192 * 1024
    assert (
        wording("planner/queries-keys-and-values") in plain and wording("planner/queries-keys-and-values") not in again
    )


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_rows_say_what_they_are_made_of(device):
    plans = [plan_for(words, ranks, device) for words, ranks, *_ in GRID.values()]
    for moment in (moment for plan in plans for moment in predict_memory(plan).moments):
        assert moment.rows and {row.category for row in moment.rows} <= set(CATEGORIES)
        assert [row for row in moment.rows if value(row.formula) != row.num_bytes] == []
        assert len({row.name for row in moment.rows}) == len(moment.rows)
        assert [row.num_bytes for row in moment.rows] == sorted((row.num_bytes for row in moment.rows), reverse=True)


@pytest.mark.parametrize(
    ("more", "less"),
    [
        (SEED, SEED + FULL),
        (SEED + UNFUSED, SEED + UNFUSED + "--recompute-activations"),
        (SEED + UNFUSED, SEED),
        (SEED, SEED + "--micro-batch-size 2"),
        (SEED, SEED + "--hidden-dropout 0"),
        (SEED + "--global-batch-size 8", SEED),
        (MEDIUM, MEDIUM + "--bf16"),
        (MEDIUM, MEDIUM + "--optimizer sgd"),
        (MEDIUM + "--swiglu", MEDIUM + "--num-layers 3"),
    ],
)
def test_what_takes_more(more, less):
    assert peak_of(more).num_bytes > peak_of(less).num_bytes


def test_cpus_keep_wider_masks_and_have_no_workspace():
    plain = MEDIUM + "--bf16 --attention-dropout 0"
    on_gpu, on_cpu = named(peak_of(plain)), named(peak_of(plain, device="cpu"))
    assert on_cpu["dropout masks"] == 2 * on_gpu["dropout masks"]
    assert on_gpu["cuBLAS workspaces"] == WORKSPACES and "cuBLAS workspaces" not in on_cpu


@pytest.mark.parametrize(
    ("words", "device", "found"),
    [
        ("--bf16", "cuda", ("fused", True)),
        ("", "cuda", ("fused", False)),
        ("--kv-channels 10", "cuda", (MATH, False)),
        ("--bf16 --reset-attention-mask", "cuda", ("fused", True)),
        ("--reset-attention-mask", "cuda", ("fused", False)),
        ("--bf16 --kv-channels 264", "cuda", ("fused", False)),
        (UNFUSED, "cuda", ("unfused", False)),
        ("--bf16", "cpu", (MATH, False)),
        ("--attention-dropout 0", "cpu", ("fused", True)),
    ],
)
def test_attention_is_torchs_choice(words, device, found):
    plan = plan_for(MEDIUM + words, device=device)
    backend, masked = plan.args.model.attention_backend, plan.args.data.reset_attention_mask
    assert predict_attention_kernel(plan.shape, plan.precision, device, backend, masked) == found


def test_16_bit_training_with_fp32_sums_takes_20_bytes_per_parameter_among_ranks():
    """Weights 2, DistributedDataParallel's buckets 2, fp32 sums 4, masters 4, moments 8; never the sums twice."""
    words = SHORT + "--bf16"
    states = {"parameters": 2, "gradients": 6, "master weights": 4, "moments": 8}
    update = at(words, "update of the weights", 2)
    held = {category: sum(row.num_bytes for row in update.rows if row.category == category) for category in states}
    number = count_parameters(plan_for(words).shape)
    held["moments"] -= 512 * (4 * 12 + 4)  # step counters
    assert held == {category: per * number for category, per in states.items()}
