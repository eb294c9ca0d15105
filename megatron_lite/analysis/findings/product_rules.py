"""Matrix products that are slower than the hardware allows."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_lite.analysis.findings.base import (
    MAX_SHOWN,
    Edit,
    Evidence,
    Finding,
    Observation,
    Recording,
    Remedy,
    build_time_finding,
    could_not_look,
    find_lost_time,
    rule,
    saw,
    saw_wrong,
)
from megatron_lite.analysis.findings.kernel_edits import ShortenedKernels, shorten_kernels
from megatron_lite.analysis.kernels.kernel_results import MATRIX_ROLES, KernelRow, Role, RooflineRow, TensorCores
from megatron_lite.analysis.rank_facts import MATTERS, MIN_SHARE_SHOWN, RankFacts, in_ms
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.formats.file_names import RUN_FILE
from megatron_lite.formats.hardware import TILE as USUAL_TILE
from megatron_lite.formats.hardware import best_multiple, least_multiple, padded, peak_tflops
from megatron_lite.units import count, counted, significant

SIXTEEN_BITS = ("fp16", "bf16")
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
    if not one.time.on_gpu:
        return _look_at_dimensions(one)
    kernels = one.kernels
    rows = _list_without_tensor_cores(one, *SIXTEEN_BITS)
    cost = sum(row.ms for row in rows)
    on_cores = f"tensor cores run {in_ms(kernels.tensor_core_ms)} of {in_ms(kernels.matrix_ms)} of products"
    text = f"{one.of_step(cost)}; {on_cores}"
    shown = []
    for row in rows[:MAX_SHOWN]:
        times = f"{in_ms(row.ms)}, {significant(row.per_step)} per step"
        source = row.operator or "no operator"
        shown.append(Evidence(f"{row.short}: {times}, from {source}", row.phase))
    remedy = _advise_on_sizes(facts, _list_odd_sizes(one, {row.operator for row in rows}))
    found = find_lost_time(one, cost, text, remedy.advice, *shown, flags=remedy.flags)
    if isinstance(found, Finding):
        return found
    return _look_at_tensor_cores(facts, one) if kernels.matrix_ms else _look_at_dimensions(one)


def _list_without_tensor_cores(one: RankFacts, *precisions: str) -> list[KernelRow]:
    """List the products of these number formats whose kernels run on CUDA cores, longest first."""
    rows = [row for row in one.kernels.rows if row.tensor_cores is TensorCores.NO]
    return [row for row in rows if row.precision in precisions]


def _list_odd_sizes(one: RankFacts, operators: Container[str]) -> list[int]:
    """List the dimensions of these operators' products that do not fit the tiles; [] without shapes."""
    sizes: dict[int, None] = {}
    for row in one.kernels.roofline:
        if row.operator in operators:
            sizes.update(dict.fromkeys(size for size in row.dims if is_off(size)))
    return list(sizes)


def _advise_on_sizes(facts: Facts, sizes: Iterable[int]) -> Remedy:
    """Choose what makes dimensions fit the tiles. sizes: those that do not fit."""
    changes = _keep_flags(suggest_size(facts, size, enlarge(size)) for size in sizes)[:MAX_SHOWN]
    advice = "; ".join(changes) or "make the dimensions of these products multiples of 64 (at least 8)"
    return Remedy(advice, _list_flags(changes))


def _list_flags(changes: Iterable[str]) -> tuple[str, ...]:
    """List the flags of changes such as "--hidden-size 1024 (now 1000)"."""
    return tuple(change.partition(" (")[0] for change in changes if change.startswith("--"))


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
        reasons = list(kernels.without_tensor_cores.items())[:MAX_REASONS]
        why = [Evidence(f"{reason}: {one.of_step(ms)}") for reason, ms in reasons]
        in_fp32 = find_fp32_products(facts)
        if in_fp32 is not None:
            return saw_wrong(in_fp32.advice, seen, *why, *dimensions, code=in_fp32.code)
        return saw_wrong(MULTIPLES, seen, *why, *dimensions, code="no-tensor-cores")
    if 2 * slow_ms > kernels.matrix_ms:
        record = "a run whose products are in 16 bits, or a larger part of the step"
        return could_not_look(seen, *dimensions, record=record)
    if kernels.tensor_core_ms >= kernels.maybe_tensor_core_ms or dimensions:
        return saw(seen, *dimensions)
    return could_not_look(seen, record=Recording.SHAPES)


NO_TENSOR_CORES = "this GPU has no tensor cores; audit a run on one that has"


def _list_products(one: RankFacts) -> list[RooflineRow]:
    """List the matrix products whose shapes are known."""
    return [row for row in one.kernels.roofline if row.role is Role.GEMM]


def _look_at_dimensions(one: RankFacts) -> Observation:
    """Tell whether dimensions of products fit the tiles, which shapes show on any device."""
    if one.time.on_gpu and WITHOUT_TENSOR_CORES.search(one.time.device or ""):
        return could_not_look(record=NO_TENSOR_CORES)
    rows = [row for row in _list_products(one) if row.dims]
    if not rows:
        return could_not_look(record=Recording.SHAPES)
    odd = [row for row in rows if any(map(is_off, row.dims))]
    text = f"all dimensions of {counted(len(rows), 'shape')} of products are multiples of 64 (small ones of 8)"
    if odd:
        time = one.of_step(sum(row.ms for row in odd))
        text = f"{len(odd)} of {len(rows)} shapes of products have other dimensions than multiples of 64: {time}"
    return saw(Evidence(text, one.where()))


# Of the hardware's limit, which products of a GPU reach that are long enough to be more than a launch.
MIN_EFFICIENCY = 0.05
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
        all of it where that peak is unknown, and then no bound of the gain is given and the cause is a likely one.
    Do: bf16 (no loss scale needed), or fp16 with a dynamic loss scale; masters and moments stay fp32.
    Flags: --bf16, or --fp16 on GPUs before Ampere.
    False alarm: an fp32 reference run, made on purpose.
    """
    device = one.time.device or ""
    rows = _list_without_tensor_cores(one, "fp32")
    taken_ms = sum(row.ms for row in rows) if one.time.on_gpu else _measure_fp32_on_cpu(facts, one)
    ms = min(taken_ms, _limit_to_computing(one, taken_ms))
    if WITHOUT_TENSOR_CORES.search(device):
        return could_not_look(record=NO_TENSOR_CORES)
    if one.share(ms) < MAX_FP32_SHARE:
        is_known = one.time.on_gpu or facts.hardware.bf16_products is True
        text = f"products in fp32 that 16 bits would shorten take {one.of_step(ms)}"
        return saw(Evidence(text, one.where())) if is_known else could_not_look(record=Recording.RUN_FOLDER)
    evidence = [Evidence(f"fp32 products (matrices, attention, convolution) take {one.of_step(ms)}", one.where())]
    for row in rows[:2]:
        times = f"{row.ms:,.2f} ms, {significant(row.per_step)} per step"
        evidence.append(Evidence(f"{row.short}: {times}", row.phase))
    precision = "fp16" if "V100" in device else "bf16"
    flag = f"--{precision}"
    gain_ms = _bound_gain(one, ms, precision)
    edit = None
    if gain_ms is not None and one.time.on_gpu:
        edit = _multiply_in(facts, precision, rows, kept=1 - gain_ms / taken_ms)
    return Finding(
        cost_ms=ms if gain_ms is None else gain_ms,
        gain_ms=gain_ms,
        evidence=tuple(evidence),
        advice=f"train in mixed precision: {flag}",
        flags=(flag,),
        # where no peak tells what 16 bits save, that these products are what a step loses is not known
        certain=gain_ms is not None,
        rank=one.time.rank,
        edit=edit,
    )


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
    """Bound what 16 bits save, in ms per step; None where the 16-bit peak is unknown.

    The bound is by the peaks of both formats, else by the FLOPs at the 16-bit peak.

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
    flops = sum(row.flops for row in _list_fp32_shapes(one))
    return max(0.0, ms - flops / half / 1e9)


def _multiply_in(
    facts: Facts,
    precision: str,
    products: Sequence[KernelRow],
    kept: float,
) -> Edit:
    """Build the edit of products in 16 bits.

    Args:
        facts: the run.
        precision: the 16-bit format.
        products: the kernels in fp32.
        kept: the share of their time that is left.
    """
    names = {product.name for product in products}

    def choose(rank: RankFacts) -> ShortenedKernels:
        rows = rank.rows_named(names.__contains__, Kind.KERNEL)
        return ShortenedKernels(rows, np.full(len(rows), kept))

    return shorten_kernels(facts, f"multiply in {precision}", choose)


def _list_fp32_shapes(one: RankFacts) -> list[RooflineRow]:
    """List the products and attention in fp32 whose shapes are known."""
    shaped = [row for row in one.kernels.roofline if row.role in MATRIX_ROLES]
    return [row for row in shaped if row.dtype == "fp32"]


def _limit_to_computing(one: RankFacts, ms: float) -> float:
    """Limit ms to what fp32 products can need for their arithmetic and memory, even far below the hardware's limits."""
    shaped = [row for row in _list_fp32_shapes(one) if row.ms > 0]
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
    precision = facts.plan.precision
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
    evidence = [Evidence(f"the run is in {precision}, for which this processor has no units", RUN_FILE)]
    cost = None
    one = facts.critical
    if one is not None:
        cost = sum(one.kernels.roles.get(role, 0.0) for role in MATRIX_ROLES)
        taken = Evidence(f"matrix products and attention take {one.of_step(cost)}", one.where())
        if one.share(cost) < MAX_FP32_SHARE:
            return saw(taken)
        evidence.append(taken)
    remedy = Remedy(f"use fp32: leave out --{precision}")
    if hardware.bf16_products is True:
        remedy = Remedy(f"use --bf16 instead of --{precision}", ("--bf16",))
    rank = one.time.rank if one is not None else None
    return build_time_finding(cost, evidence, remedy.advice, remedy.flags, certain=False, rank=rank)


MAX_ODD_SHARE = 0.10  # of the step in products with odd dimensions, whose cost the tiles alone do not tell
HALF_BYTES = 2  # an element of fp16 or bf16
LOAD = least_multiple(HALF_BYTES)  # 8
TILE_WIDTH = best_multiple(HALF_BYTES)  # 64
WIDE_TILE = USUAL_TILE  # 128
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
    rows = [row for row in _list_products(one) if any(map(is_off, row.dims))]
    rows.sort(key=lambda row: -row.ms)
    taken_ms = sum(row.ms for row in rows)
    padding_ms = sum(row.ms * _padding(row.dims) for row in rows)
    odd_ms = sum(row.ms for row in rows if _has_odd(row.dims))
    sizes = dict.fromkeys(size for row in rows for size in row.dims if is_off(size))
    changes = _keep_flags(dict.fromkeys(suggest_size(facts, size, enlarge(size)) for size in sizes))
    return find_lost_time(
        one,
        padding_ms,
        f"products with such dimensions take {one.of_step(taken_ms)}",
        "; ".join(changes[:MAX_SHAPES_SHOWN]),
        *(_describe_product(facts, row) for row in rows[:MAX_SHAPES_SHOWN]),
        flags=_list_flags(changes),
        certain=one.time.on_gpu,
        at_least=0.0 if one.share(odd_ms) >= MAX_ODD_SHARE else MIN_SHARE_SHOWN,
    )


def _has_odd(dims: tuple[int, ...]) -> bool:
    """Whether a dimension is large and no multiple of 8, so that more than padding may be lost."""
    return any(size > LOAD and size % LOAD for size in dims)


def _describe_product(facts: Facts, row: RooflineRow) -> Evidence:
    """Describe a product of the trace: its layer, its shape, its ms and calls per step."""
    times = f"{in_ms(row.ms)}, {significant(row.per_step)} per step"
    return Evidence(f"{name_layer(facts, row.dims)} {row.shape}: {times}", row.phase)


def is_off(dimension: int) -> bool:
    """Whether a dimension is no multiple of 8, or large and no multiple of 64.

    Dimensions up to 8 are another matter: batches, heads.
    """
    if dimension <= LOAD:
        return False
    if dimension % LOAD:
        return True
    return dimension > TILE_WIDTH and dimension % TILE_WIDTH != 0


def enlarge(dimension: int) -> int:
    """Choose what to pad a dimension to: 1000 -> 1024, 50257 -> 50304, 20 -> 24, 72 -> 128."""
    if dimension < TILE_WIDTH:
        return padded(dimension, LOAD)
    wide = padded(dimension, WIDE_TILE)
    return wide if wide <= (1 + NEAR) * dimension else padded(dimension, TILE_WIDTH)


def _padding(dims: tuple[int, ...]) -> float:
    """Compute the share of the tiles' work that is padding."""
    large = [dimension for dimension in dims if dimension > TILE_WIDTH]
    return 1 - math.prod(dimension / padded(dimension, TILE_WIDTH) for dimension in large)


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
    bounded = list(_list_bounded(one))
    if not bounded:
        return could_not_look(record=Recording.SHAPES)
    low = [part for part in bounded if part.efficiency < REACHES]
    low = [part for part in low if one.share(part.row.ms) >= MIN_SHARE_SHOWN]
    low.sort(key=lambda part: part.bound_ms - part.row.ms)
    cost = sum(part.row.ms - part.bound_ms for part in low)
    remedies = list(_list_faster_ways([part.row for part in low]))
    edit = None
    if one.share(cost) >= MAX_SHARE_ABOVE_FLOOR:
        edit = _reach_roofline(facts, bounded, low)
    return find_lost_time(
        one,
        cost,
        f"time above the floor: {one.of_step(cost)}",
        "; ".join(remedy.advice for remedy in remedies),
        *(_describe_slow_product(facts, part) for part in low[:MAX_SHOWN]),
        *_list_measured(one),
        flags=tuple(flag for remedy in remedies for flag in remedy.flags),
        certain=False,
        at_least=MAX_SHARE_ABOVE_FLOOR,
        edit=edit,
    )


@dataclass(frozen=True)
class BoundedProduct:
    """A product whose least time on this device is known."""

    row: RooflineRow
    bound_ms: float  # per step, by the device's peaks
    efficiency: float  # the bound over what it takes


def _reach_roofline(
    facts: Facts,
    bounded: Sequence[BoundedProduct],
    low: Sequence[BoundedProduct],
) -> Edit:
    """Build the edit of slow products that reach the hardware's limit.

    Kernels of one operator and phase share what their slow shapes lose.

    Args:
        facts: the run.
        bounded: all products whose least time is known.
        low: those that reach little of the limit.
    """
    taken_ms: defaultdict[tuple[str, str], float] = defaultdict(float)
    lost_ms: defaultdict[tuple[str, str], float] = defaultdict(float)
    for part in bounded:
        taken_ms[part.row.operator, part.row.phase] += part.row.ms
    for part in low:
        lost_ms[part.row.operator, part.row.phase] += part.row.ms - part.bound_ms
    kept_of = {place: 1 - ms / taken_ms[place] for place, ms in lost_ms.items()}
    choose = partial(_choose_products, kept_of=kept_of)
    return shorten_kernels(facts, "bring products to the hardware's limit", choose)


def _choose_products(rank: RankFacts, kept_of: Mapping[tuple[str, str], float]) -> ShortenedKernels:
    """Choose the kernels of a rank that reach the hardware's limit.

    Args:
        rank: the rank.
        kept_of: by operator and phase, the share of its kernels' time that is left.
    """
    rows = rank.in_steady_steps(rank.trace.rows[Kind.KERNEL])
    rows = rows[rank.placing.operator[rows] >= 0]
    name_of_row = rank.trace.events.name[rank.placing.operator[rows]]
    phases = ("", *rank.placing.phases)
    phase_of_row = rank.placing.phase[rows] + 1
    kept = np.ones(len(rows))
    for (name, phase), share in kept_of.items():
        if name in rank.trace.names and phase in phases:
            is_of_name = name_of_row == rank.trace.names.index(name)
            is_in_phase = phase_of_row == phases.index(phase)
            kept[is_of_name & is_in_phase] = share
    return ShortenedKernels(rows, kept)


def _list_measured(one: RankFacts) -> list[Evidence]:
    """List what the device's counters measured, where the trace has them."""
    measured = one.kernels.describe_counters()
    return [Evidence(measured, "")] if measured else []


def _list_bounded(one: RankFacts) -> Iterator[BoundedProduct]:
    """List products and attention whose operations or bytes, and the device's peaks, are known."""
    for row in one.kernels.roofline:
        if row.role in MATRIX_ROLES and row.bound_ms is not None and row.efficiency is not None:
            yield BoundedProduct(row, row.bound_ms, row.efficiency)


def _describe_slow_product(facts: Facts, part: BoundedProduct) -> Evidence:
    """Describe what a product takes, and what it would take at the device's limit."""
    row = part.row
    what = f"{name_layer(facts, row.dims)} {row.operator} {row.shape}"
    floor = f"{in_ms(part.bound_ms)} is the floor ({part.efficiency:.0%}, bound by {row.bound_by})"
    return Evidence(f"{what}: {in_ms(row.ms)} where {floor}", row.phase)


def _list_faster_ways(slow: Sequence[RooflineRow]) -> Iterator[Remedy]:
    """List what may make slow products faster, of what they do not have yet."""
    products = [row for row in slow if row.role is not Role.ATTENTION]
    if len(products) < len(slow):
        yield Remedy("another attention kernel", ("--attention-backend auto",))
    if products:
        yield Remedy("larger products", ("--micro-batch-size",))
    if any(is_off(size) for row in products for size in row.dims):
        yield Remedy("dimensions in multiples of 64")
    if any(row.dtype == "fp32" for row in slow):
        yield Remedy("16 bits", ("--bf16",))


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
    padded_size = facts.shape.padded_vocab_size
    used = facts.plan.vocab_size
    if not padded_size or not used:
        return could_not_look(record=Recording.RUN_FOLDER)
    if padded_size <= padded(used, FIT):
        return saw(Evidence(f"{used:,} of {padded_size:,} rows of the vocabulary are used", RUN_FILE))
    products = [row for row in _list_products(one) if padded_size in row.dims]
    taken_ms = sum(row.ms for row in products)
    cost = taken_ms * (padded_size - used) / padded_size
    text = (
        f"{count(used)} of {count(padded_size)} rows are used; products with them take {in_ms(taken_ms)}, "
        f"the padding {one.of_step(cost)}"
    )
    flag = f"--make-vocab-size-divisible-by {FIT}"
    advice = f"pad the vocabulary to a multiple of {FIT} only: {flag}"
    return find_lost_time(one, cost, text, advice, flags=(flag,), cheap=True)


# --- which layer a matrix product is, and which flag makes a dimension: by the run's own shape


def name_layer(facts: Facts, dims: tuple[int, ...]) -> str:
    """Name the layer of a product, as in "MLP fc1".

    It is known by two of the product's three dimensions, in any order (backward transposes). The third should be the
    micro-batch's tokens: these may number as many as another layer's features.
    """
    fitting = {}
    for name, (hidden, features) in _list_weights(facts).items():
        weights = Counter((hidden, features))
        if not weights - Counter(dims):
            fitting[name] = Counter(dims) - weights
    tokens = Counter([facts.micro_batch_tokens])
    return min(fitting, key=lambda name: fitting[name] != tokens, default="product")


def _list_weights(facts: Facts) -> dict[str, tuple[int, int]]:
    """List the sizes of each layer's weights, by the run's plan; {} where it does not tell all of them."""
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
        return {}
    hidden, ffn, width, heads, groups, vocabulary = known
    weights = {"output projection to the vocabulary": (hidden, vocabulary)}
    if shape.activation == "swiglu":
        weights["MLP fc1"] = (hidden, 2 * ffn)
        weights["MLP fc2"] = (hidden, ffn)
    else:
        weights["MLP"] = (hidden, ffn)
    weights["attention QKV projection"] = (hidden, (heads + 2 * groups) * width)
    weights["attention output projection"] = (hidden, heads * width)
    return weights


def _keep_flags(changes: Iterable[str]) -> list[str]:
    """Leave out sizes that no flag names, where flags name others.

    Those sizes follow, as the QKV projection's follows the width.
    """
    listed = list(changes)
    return [change for change in listed if change.startswith("--")] or listed


def _name_companion(facts: Facts, name: str, wanted: int) -> str:
    """Name the flag without which this run would refuse the size `wanted`; "" where it would take it."""
    heads = facts.shape.num_attention_heads
    if name == "hidden_size" and heads and wanted % heads and not facts.settings.kv_channels:
        fewer = max(part for part in range(1, heads + 1) if wanted % part == 0)
        return f" --num-attention-heads {fewer}"
    positions = facts.settings.max_position_embeddings
    if name == "seq_length" and positions and positions < wanted:
        return f" --max-position-embeddings {wanted}"
    return ""


def suggest_size(facts: Facts, dimension: int, wanted: int) -> str:
    """Advise what turns `dimension` into `wanted`, as in "--hidden-size 1024 (now 1000)".

    Args:
        facts: The run.
        dimension: A dimension of its products.
        wanted: What it should be.
    """
    shape = facts.shape
    sizes = {
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "kv_channels": shape.kv_channels,
        "seq_length": shape.seq_length,
    }
    for name, value in sizes.items():
        if value == dimension:
            flag = f"--{name.replace('_', '-')} {wanted}"
            return f"{flag}{_name_companion(facts, name, wanted)} (now {dimension})"
    if dimension == shape.padded_vocab_size:
        return f"--make-vocab-size-divisible-by 128 (the vocabulary has now {dimension} rows)"
    return f"pad {dimension} to {wanted}"
