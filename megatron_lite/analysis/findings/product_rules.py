"""Matrix products that are slower than the hardware allows."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from megatron_lite.analysis.findings.base import (
    Evidence,
    Finding,
    Observation,
    Recording,
    build_time_finding,
    could_not_look,
    find_lost_time,
    rule,
    saw,
    saw_wrong,
)
from megatron_lite.analysis.kernels.kernel_results import MATRIX_ROLES, Role, RooflineRow, TensorCores
from megatron_lite.analysis.rank_facts import MATTERS, MIN_SHARE_SHOWN, RankFacts, in_ms
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.formats.file_names import RUN_FILE
from megatron_lite.formats.hardware import TILE as USUAL_TILE
from megatron_lite.formats.hardware import best_multiple, least_multiple, padded, peak_tflops
from megatron_lite.units import count, counted, significant

SIXTEEN_BITS = ("fp16", "bf16")
MAX_SHOWN = 3


MAX_REASONS = 3
MULTIPLES = "make the dimensions of products multiples of 64 (at least 8)"
# before Volta: no faster 16-bit products
WITHOUT_TENSOR_CORES = re.compile(r"\b(K[0-9]{2}|M[0-9]{2}|P100|P40|P4|GTX|Titan Xp?)\b")


@rule(
    "no-tensor-cores",
    "16-bit matrix products without tensor cores",
    "kernels",
    "roofline",
    needs="trace",
    record=Recording.GPU_TRACE,
)
def find_no_tensor_cores(facts: Facts, one: RankFacts) -> Finding | Observation:
    """16-bit matrix products that do not run on tensor cores.

    Meaning: the data are fp16 or bf16, but the kernel's name says CUDA cores: the library found no tensor-core kernel
        for the shape, the alignment or the layout. A 16-bit product without tensor cores is no faster than fp32.
    Measured: time of such kernels against all matrix products and attention. Kernel names decide (s1688, 16816, xmma,
        nvjet, wgmma are tensor cores; sgemm, simt, ffma are not); an unknown name counts as tensor cores here.
    Cost: their time; how much remains on tensor cores depends on the shape, so that this is an upper bound.
    Do: make dimensions multiples of 8 (16 bytes), better of 64; keep tensors contiguous in their last dimension; see
        matmul-shapes for the dimensions.
    Flags: --make-vocab-size-divisible-by 128, --hidden-size and --ffn-hidden-size in multiples of 64.
    False alarm: matrix-vector products, which memory limits anyway.
    """
    kernels = one.kernels
    if not one.time.on_gpu:
        return _look_at_dimensions(one)
    rows = [row for row in kernels.rows if row.tensor_cores is TensorCores.NO and row.precision in SIXTEEN_BITS]
    cost = sum(row.ms for row in rows)
    shown = []
    for row in rows[:MAX_SHOWN]:
        times = f"{in_ms(row.ms)}, {significant(row.per_step)} per step"
        shown.append(Evidence(f"{row.short}: {times}, from {row.operator or 'no operator'}", row.phase))
    # The odd dimensions of these kernels' own operators, and what makes them; none without shapes.
    asked = {row.operator for row in rows}
    odd = [size for row in kernels.roofline if row.operator in asked for size in row.dims if is_off(size)]
    changes = _keep_flags(suggest_size(facts, size, enlarge(size)) for size in dict.fromkeys(odd))[:MAX_SHOWN]
    on_cores = f"tensor cores run {in_ms(kernels.tensor_core_ms)} of {in_ms(kernels.matrix_ms)} of products"
    text = f"{one.of_step(cost)}; {on_cores}"
    advice = "; ".join(changes) or "make the dimensions of these products multiples of 64 (at least 8)"
    flags = tuple(change.partition(" (")[0] for change in changes if change.startswith("--"))
    found = find_lost_time(one, cost, text, advice, *shown, flags=flags)
    if isinstance(found, Finding):
        return found
    return _look_at_tensor_cores(facts, one) if kernels.matrix_ms else _look_at_dimensions(one)


def _look_at_tensor_cores(facts: Facts, one: RankFacts) -> Observation:
    """Tell which products of a GPU run on tensor cores, by the kernels' names."""
    if WITHOUT_TENSOR_CORES.search(one.time.device or ""):
        return could_not_look(record=NO_TENSOR_CORES)
    kernels = one.kernels
    dimensions = _look_at_dimensions(one).evidence
    text = (
        f"tensor cores run {in_ms(kernels.tensor_core_ms)} of {in_ms(kernels.matrix_ms)} of products and attention per "
        f"step; {in_ms(kernels.maybe_tensor_core_ms)} are unknown from their names"
    )
    seen = Evidence(text, one.where())
    slow_ms = kernels.matrix_ms - kernels.tensor_core_ms - kernels.maybe_tensor_core_ms
    if one.share(slow_ms) >= MATTERS:
        in_fp32 = find_fp32_products(facts)
        remedy = in_fp32.advice if in_fp32 else MULTIPLES
        reasons = list(kernels.without_tensor_cores.items())[:MAX_REASONS]
        why = [Evidence(f"{reason}: {one.of_step(ms)}") for reason, ms in reasons]
        code = in_fp32.code if in_fp32 else "no-tensor-cores"
        return saw_wrong(remedy, seen, *why, *dimensions, code=code)
    if 2 * slow_ms > kernels.matrix_ms:
        record = "a run whose products are in 16 bits, or a larger part of the step"
        return could_not_look(seen, *dimensions, record=record)
    if kernels.tensor_core_ms >= kernels.maybe_tensor_core_ms or dimensions:
        return saw(seen, *dimensions)
    return could_not_look(seen, record=Recording.SHAPES)


NO_TENSOR_CORES = "this GPU has no tensor cores; audit a run on one that has"


def _look_at_dimensions(one: RankFacts) -> Observation:
    """Tell whether dimensions of products fit the tiles, which shapes show on any device."""
    if one.time.on_gpu and WITHOUT_TENSOR_CORES.search(one.time.device or ""):
        return could_not_look(record=NO_TENSOR_CORES)
    rows = [row for row in one.kernels.roofline if row.role is Role.GEMM and row.dims]
    if not rows:
        return could_not_look(record=Recording.SHAPES)
    odd = [row for row in rows if any(map(is_off, row.dims))]
    text = f"all dimensions of {counted(len(rows), 'shape')} of products are multiples of 64 (small ones of 8)"
    if odd:
        time = one.of_step(sum(row.ms for row in odd))
        text = f"{len(odd)} of {len(rows)} shapes of products have other dimensions than multiples of 64: {time}"
    return saw(Evidence(text, one.where()))


MIN_EFFICIENCY = (
    0.05  # of the hardware's limit, which products of a GPU reach that are long enough to be more than a launch
)
MIN_FLOPS_PER_SECOND = 1e9  # of a core without vector units; what takes longer on a CPU is not spent on arithmetic
MAX_FP32_SHARE = 0.10  # of the step: a few fp32 products (router, loss) belong to mixed precision


@rule("fp32-products", "matrix products in fp32", "kernels", "operators", "roofline", needs="trace")
def find_fp32_products(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Matrix products run in fp32 where 16 bits would be faster.

    Meaning: weights and activations are fp32. Tensor cores multiply fp16 and bf16 many times faster than CUDA cores
        multiply fp32; processors with AVX512-BF16 or AMX have such units too. Activations and copies are half as large
        besides.
    Measured: time of fp32 matrix products and attention per steady step, from kernel names, or without a GPU from the
        operators' types; these need --pytorch-profiler-collect-shapes, else the run's plan is used.
        Of products whose shapes are known only the time counts that they can need for what they compute and move: tiny
        products take the time of dispatch or of a busy machine, which no precision shortens.
    Cost: what 16 bits could save of it at best, by the peaks in the hardware table, or by the FLOPs at the 16-bit peak;
        all of it where that peak is unknown, and then no bound of the gain is given.
    Do: bf16 (no loss scale needed), or fp16 with a dynamic loss scale; masters and moments stay fp32.
    Flags: --bf16, or --fp16 on GPUs before Ampere.
    False alarm: an fp32 reference run, made on purpose.
    """
    device = one.time.device or ""
    rows = [row for row in one.kernels.rows if row.tensor_cores is TensorCores.NO and row.precision == "fp32"]
    ms = sum(row.ms for row in rows) if one.time.on_gpu else _measure_fp32_on_cpu(facts, one)
    ms = min(ms, _limit_to_computing(one, ms))
    if WITHOUT_TENSOR_CORES.search(device):
        return could_not_look(record=NO_TENSOR_CORES)
    if one.share(ms) < MAX_FP32_SHARE:
        is_known = one.time.on_gpu or facts.hardware.bf16_products is True
        text = f"products in fp32 that 16 bits would shorten take {one.of_step(ms)}"
        return saw(Evidence(text, one.where())) if is_known else could_not_look(record=Recording.RUN_FOLDER)
    flag = "--fp16" if "V100" in device else "--bf16"
    gain = _bound_gain(one, ms, flag.removeprefix("--"))
    seen = Evidence(f"fp32 products (matrices, attention, convolution) take {one.of_step(ms)}", one.where())
    texts = (f"{row.short}: {row.ms:,.2f} ms, {significant(row.per_step)} per step" for row in rows[:2])
    shown = [Evidence(text, row.phase) for text, row in zip(texts, rows)]
    advice = f"train in mixed precision: {flag}"
    found = build_time_finding(ms if gain is None else gain, (seen, *shown), advice, (flag,), rank=one.time.rank)
    return replace(found, gain_ms=gain)


def _measure_fp32_on_cpu(facts: Facts, one: RankFacts) -> float:
    """Measure ms per step of fp32 products on a processor that multiplies bf16 faster, as the run says; else 0."""
    if facts.hardware.bf16_products is not True:
        return 0.0
    shaped = [row for row in one.kernels.roofline if row.role in MATRIX_ROLES]
    if shaped:
        return sum(row.ms for row in shaped if row.dtype == "fp32")
    if facts.plan.precision == "fp32":
        return sum(one.kernels.roles.get(role, 0.0) for role in MATRIX_ROLES)
    return 0.0


def _bound_gain(one: RankFacts, ms: float, precision: str) -> float | None:
    """What 16 bits save at best: by both peaks, else by the FLOPs at the 16-bit peak; None where that is unknown.

    Args:
        one: the rank that multiplies.
        ms: what its products in fp32 take per step.
        precision: the 16-bit format.
    """
    device = one.time.device or ""
    full = peak_tflops(device, "fp32")
    half = peak_tflops(device, precision)
    if half and full:
        return ms * (1 - full / half)
    if not half:
        return None
    flops = sum(row.flops for row in one.kernels.roofline if row.role in MATRIX_ROLES and row.dtype == "fp32")
    return max(0.0, ms - flops / half / 1e9)


def _limit_to_computing(one: RankFacts, ms: float) -> float:
    """The part of `ms` that fp32 products can need for their arithmetic and memory,
    even far below the hardware's limits."""
    shaped = [row for row in one.kernels.roofline if row.role in MATRIX_ROLES and row.dtype == "fp32" and row.ms > 0]
    total_ms = sum(row.ms for row in shaped)
    if not total_ms:
        return ms
    computing_ms = 0.0
    for row in shaped:
        most_ms = row.ms
        if one.time.on_gpu and row.bound_ms is not None:
            most_ms = row.bound_ms / MIN_EFFICIENCY
        elif not one.time.on_gpu:
            most_ms = 1000 * row.flops / MIN_FLOPS_PER_SECOND
        computing_ms += min(row.ms, most_ms)
    return ms * computing_ms / total_ms


@rule("slow-16-bit-products", "16-bit products without hardware support", "kernels", "roofline")
def find_slow_16_bit_products(facts: Facts) -> Finding | Observation:
    """16-bit matrix products on a processor that has no units for them.

    Meaning: without AVX512-FP16, AVX512-BF16 or AMX a CPU converts 16-bit operands and multiplies in fp32, or
        multiplies them one by one: slower than fp32 from the start, fp16 several times.
    Measured: the run's precision, the processor it recorded, and the time of matrix products and attention
        per steady step.
    Cost: that time; fp32 would take part of it; run it to see how much.
    Do: train in fp32 on this machine, or in bf16 where the processor has units for it.
    Flags: without --fp16 and --bf16; --bf16 where the processor multiplies it.
    False alarm: a rehearsal on a CPU of what a GPU is meant to run.
    """
    precision, one = facts.plan.precision, facts.critical
    if not facts.plan.device:
        return could_not_look(record=Recording.RUN_FOLDER)
    if facts.plan.device != "cpu" or precision not in SIXTEEN_BITS:
        return saw(Evidence("no 16-bit products on a CPU", RUN_FILE))
    hardware = facts.hardware
    has_units = hardware.fp16_products if precision == "fp16" else hardware.bf16_products
    # a run of before says nothing of fp16, for which hardly any processor has units
    if has_units is True:
        return saw(Evidence(f"this processor has units for {precision}", RUN_FILE))
    if has_units is None and precision == "bf16":
        return could_not_look(record=Recording.RUN_FOLDER)
    cost, seen = None, [Evidence(f"the run is in {precision}, for which this processor has no units", "run.json")]
    if one is not None:
        cost = sum(one.kernels.roles.get(role, 0.0) for role in MATRIX_ROLES)
        seen.append(Evidence(f"matrix products and attention take {one.of_step(cost)}", one.where()))
        if one.share(cost) < MAX_FP32_SHARE:
            return saw(seen[1])
    flag = "--bf16" if facts.hardware.bf16_products is True else ""
    advice = f"use {flag} instead of --{precision}" if flag else f"use fp32: leave out --{precision}"
    rank = one.time.rank if one is not None else None
    return build_time_finding(cost, seen, advice, (flag,) if flag else (), certain=False, rank=rank)


MAX_ODD_SHARE = 0.10  # of the step in products with odd dimensions, whose cost the tiles alone do not tell
HALF_BYTES = 2  # an element of fp16 or bf16
LOAD, TILE, WIDE_TILE = least_multiple(HALF_BYTES), best_multiple(HALF_BYTES), USUAL_TILE  # 8, 64, 128
NEAR = 0.05  # a dimension may grow by so much to reach a multiple of 128
MAX_SHAPES_SHOWN = 4


@rule("matmul-shapes", "matrix sizes that are not multiples of the tile size", "roofline", needs="trace")
def find_matmul_shapes(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Matrix sizes are not multiples of the hardware's tile size.

    Meaning: matrix units work on tiles. A dimension that is no multiple of 8 (16 bytes of fp16) may lose tensor cores
        or wide loads altogether; one that is no multiple of 64 leaves part of the last tile, and of each cache line,
        empty. hidden 1000 is a multiple of 8 and still no good: 1024 has the same number of tiles.
    Measured: dimensions of the products in the trace (needs --pytorch-profiler-collect-shapes), their layers according
        to the run's plan, and their time. The cost is the part of the tiles' work that is padding: 1 - product of
        (dimension / next multiple of 64), which is arithmetic; that a lost tensor core costs more is in
        no-tensor-cores.
    Cost: at least the padding; odd dimensions (no multiple of 8) often cost several times as much.
    Do: the next multiple of 128 where it is near, else of 64.
    Flags: --hidden-size, --ffn-hidden-size, --kv-channels, --make-vocab-size-divisible-by 128, --seq-length.
    False alarm: products so small that launching them costs more than their tiles.
    """
    if not one.kernels.roofline:
        return could_not_look(record=Recording.SHAPES)
    rows = [row for row in one.kernels.roofline if row.role is Role.GEMM and any(map(is_off, row.dims))]
    rows.sort(key=lambda row: -row.ms)
    ms, cost = sum(row.ms for row in rows), sum(row.ms * _padding(row.dims) for row in rows)
    odd = sum(row.ms for row in rows if any(size > LOAD and size % LOAD for size in row.dims))
    sizes = dict.fromkeys(size for row in rows for size in row.dims if is_off(size))
    changes = _keep_flags(dict.fromkeys(suggest_size(facts, size, enlarge(size)) for size in sizes))
    shown = [_describe_product(facts, row) for row in rows[:MAX_SHAPES_SHOWN]]
    text = f"products with such dimensions take {one.of_step(ms)}"
    advice = "; ".join(changes[:MAX_SHAPES_SHOWN])
    flags = tuple(change.partition(" (")[0] for change in changes if change.startswith("--"))
    limit = 0.0 if one.share(odd) >= MAX_ODD_SHARE else MIN_SHARE_SHOWN
    return find_lost_time(one, cost, text, advice, *shown, flags=flags, certain=one.time.on_gpu, at_least=limit)


def _describe_product(facts: Facts, row: RooflineRow) -> Evidence:
    """Describe a product of the trace: its layer, its shape, its ms and calls per step."""
    times = f"{in_ms(row.ms)}, {significant(row.per_step)} per step"
    return Evidence(f"{name_layer(facts, row.dims)} {row.shape}: {times}", row.phase)


def is_off(dimension: int) -> bool:
    """No multiple of 8, or large and no multiple of 64. Dimensions up to 8 are another matter: batches, heads."""
    return dimension > LOAD and (dimension % LOAD != 0 or dimension > TILE and dimension % TILE != 0)


def enlarge(dimension: int) -> int:
    """What to pad to: 1000 -> 1024, 50257 -> 50304, 20 -> 24, 72 -> 128."""
    if dimension < TILE:
        return padded(dimension, LOAD)
    wide = padded(dimension, WIDE_TILE)
    return wide if wide <= (1 + NEAR) * dimension else padded(dimension, TILE)


def _padding(dims: tuple[int, ...]) -> float:
    """Share of the tiles' work that is padding."""
    return 1 - math.prod(dimension / padded(dimension, TILE) for dimension in dims if dimension > TILE)


REACHES = 0.35  # of its floor's rate: libraries reach half on ordinary shapes
MAX_SHARE_ABOVE_FLOOR = 0.10  # of the step above the floor


@rule("below-roofline", "products far below the hardware's limit", "roofline", needs="gpu")
def find_below_roofline(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Matrix products and attention far below what the hardware can do.

    Meaning: every kernel has a floor: its operations at the device's peak, or its bytes at the memory's bandwidth,
        whichever is longer. Good libraries reach 50 to 80% of it on large, regular shapes.
    Measured: operations and bytes from the operators' shapes (needs --pytorch-profiler-collect-shapes), the device's
        peaks from the hardware table, device time from the trace. Cost is the time above the floor of those that reach
        little.
    Cost: an upper bound: no kernel reaches its floor.
    Do: larger products (micro-batch), dimensions in multiples of 64, 16 bits, another attention kernel; compile with
        max-autotune to try more kernels.
    Flags: --micro-batch-size, --bf16, --attention-backend auto, --hidden-size and --kv-channels in multiples of 64.
    False alarm: a GPU that is throttled or shared; then all kernels are low.
    """
    bounded = [
        (row, row.bound_ms, row.efficiency)
        for row in one.kernels.roofline
        if row.role in MATRIX_ROLES and row.bound_ms is not None and row.efficiency is not None
    ]
    if not bounded:
        return could_not_look(record=Recording.SHAPES)
    low = [part for part in bounded if part[2] < REACHES and one.share(part[0].ms) >= MIN_SHARE_SHOWN]
    low.sort(key=lambda part: part[1] - part[0].ms)
    cost = sum(row.ms - bound_ms for row, bound_ms, _ in low)
    shown, slow = [], [row for row, *_ in low]
    for row, bound_ms, efficiency in low[:MAX_SHOWN]:
        floor = f"{in_ms(bound_ms)} is the floor ({efficiency:.0%}, bound by {row.bound_by})"
        what = f"{name_layer(facts, row.dims)} {row.operator} {row.shape}"
        shown.append(Evidence(f"{what}: {in_ms(row.ms)} where {floor}", row.phase))
    products = [row for row in slow if row.role is not Role.ATTENTION]
    remedies = {  # only what these rows do not have yet
        ("another attention kernel", "--attention-backend auto"): len(products) < len(slow),
        ("larger products", "--micro-batch-size"): bool(products),
        ("dimensions in multiples of 64", ""): any(is_off(size) for row in products for size in row.dims),
        ("16 bits", "--bf16"): any(row.dtype == "fp32" for row in slow),
    }
    fitting = [remedy for remedy, fits in remedies.items() if fits]
    advice = "; ".join(text for text, _ in fitting)
    flags = tuple(flag for _, flag in fitting if flag)
    seen = f"time above the floor: {one.of_step(cost)}"
    return find_lost_time(one, cost, seen, advice, *shown, flags=flags, certain=False, at_least=MAX_SHARE_ABOVE_FLOOR)


FIT = 128  # the multiple that is enough


@rule("vocabulary-padding", "vocabulary rows that are only padding", "roofline", "memory", needs="trace")
def find_vocabulary_padding(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Rows of the vocabulary that no token uses.

    Meaning: the vocabulary is padded to a multiple, so that its product fits the hardware. A small vocabulary padded to
        a large multiple (or --padded-vocab-size far above it) multiplies and stores rows for nothing.
    Measured: padded against real vocabulary in the run's plan, times the time of the products with that dimension in
        the trace (needs --pytorch-profiler-collect-shapes).
    Cost: that share of the output projection and its gradients.
    Do: a multiple that fits the vocabulary: 128 for fp16 and bf16 is enough.
    Flags: --make-vocab-size-divisible-by 128; no --padded-vocab-size beyond it.
    False alarm: padding that a checkpoint or tensor parallelism asks for.
    """
    padded, used = facts.shape.padded_vocab_size, facts.plan.vocab_size
    if not padded or not used:
        return could_not_look(record=Recording.RUN_FOLDER)
    if padded <= -(-used // FIT) * FIT:
        return saw(Evidence(f"{used:,} of {padded:,} rows of the vocabulary are used", RUN_FILE))
    ms = sum(row.ms for row in one.kernels.roofline if row.role is Role.GEMM and padded in row.dims)
    cost = ms * (padded - used) / padded
    text = (
        f"{count(used)} of {count(padded)} rows are used; products with them take {in_ms(ms)}, the padding "
        f"{one.of_step(cost)}"
    )
    advice = f"pad the vocabulary to a multiple of {FIT} only: --make-vocab-size-divisible-by {FIT}"
    flags = (f"--make-vocab-size-divisible-by {FIT}",)
    return find_lost_time(one, cost, text, advice, flags=flags, cheap=True)


# --- which layer a matrix product is, and which flag makes a dimension: by the run's own shape


def name_layer(facts: Facts, dims: tuple[int, ...]) -> str:
    """ "MLP fc1", by two of the product's three dimensions in any order (backward transposes).

    The third should be the micro-batch's tokens: these may number as many as another layer's features.
    """
    shape = facts.shape
    values = [
        shape.hidden_size,
        shape.ffn_hidden_size,
        shape.kv_channels,
        shape.num_attention_heads,
        shape.num_query_groups,
        shape.padded_vocab_size,
    ]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "product"
    hidden, ffn, width, heads, groups, vocabulary = known
    fc1 = ffn * (2 if shape.activation == "swiglu" else 1)
    layers = [
        ("output projection to the vocabulary", vocabulary),
        *([("MLP", ffn)] if fc1 == ffn else [("MLP fc1", fc1), ("MLP fc2", ffn)]),
        ("attention QKV projection", (heads + 2 * groups) * width),
        ("attention output projection", heads * width),
    ]
    fitting = [(name, Counter((hidden, features))) for name, features in layers]
    fitting = [(name, Counter(dims) - pair) for name, pair in fitting if not pair - Counter(dims)]
    tokens = Counter([facts.micro_batch_tokens])
    return min(fitting, key=lambda one: one[1] != tokens)[0] if fitting else "product"


def _keep_flags(changes: Iterable[str]) -> list[str]:
    """Without the sizes that no flag names, where flags name others: those follow,
    as the QKV projection's follows the width."""
    listed = list(changes)
    return [change for change in listed if change.startswith("--")] or listed


def _name_companion(facts: Facts, name: str, wanted: int) -> str:
    """The flag without which this run would refuse the size `wanted`; '' where it would take it."""
    heads = facts.shape.num_attention_heads
    if name == "hidden_size" and heads and wanted % heads and not facts.settings.kv_channels:
        fewer = max(part for part in range(1, heads + 1) if wanted % part == 0)
        return f" --num-attention-heads {fewer}"
    positions = facts.settings.max_position_embeddings
    if name == "seq_length" and positions and positions < wanted:
        return f" --max-position-embeddings {wanted}"
    return ""


def suggest_size(facts: Facts, dimension: int, wanted: int) -> str:
    """What to change to turn `dimension` into `wanted`: "--hidden-size 1024 (now 1000)"."""
    shape = facts.shape
    sizes = {
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "kv_channels": shape.kv_channels,
        "seq_length": shape.seq_length,
    }
    for name, value in sizes.items():
        if value == dimension:
            return f"--{name.replace('_', '-')} {wanted}{_name_companion(facts, name, wanted)} (now {dimension})"
    if dimension == shape.padded_vocab_size:
        return f"--make-vocab-size-divisible-by 128 (the vocabulary has now {dimension} rows)"
    return f"pad {dimension} to {wanted}"
