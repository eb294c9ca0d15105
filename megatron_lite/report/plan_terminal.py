"""A plan as lines for a terminal: the verdict first, then what it is made of, at last what was assumed."""

from collections.abc import Callable, Iterator, Sequence

from megatron_lite.estimate.what_if import Fit, Variant
from megatron_lite.report.plan_figures import Outlook, PlanReport
from megatron_lite.report.plan_verdict import fit_sentence, span, verdicts
from megatron_lite.report.section import Lines, Section, Table
from megatron_lite.report.section_text import section_lines
from megatron_lite.report.text import Style, flops, heading, milliseconds, percent, share, wrapped
from megatron_lite.units import GIB, count, short_count, size

# --- how fast a planned run can be, as a section: parts of a step, tokens/s, days

CAVEAT = "real steps take longer: kernels miss the peak, and launches and the host take time"


def time(report: PlanReport, why: bool) -> Section:
    """The parts of a step at best: with limits and bars for one GPU, a column for each of several."""
    outlooks = report.outlooks
    table = _one(outlooks[0]) if len(outlooks) == 1 else _several(outlooks)
    formulas = [f"{row.name} = {row.formula}" for outlook in outlooks for row in outlook.time.rows]
    notes = dict.fromkeys(note for outlook in outlooks for note in outlook.time.notes)
    blocks = [table, *([Lines(formulas, quiet=True)] if why else []), Lines([CAVEAT, *notes], quiet=True)]
    of = f"{outlooks[0].processor.name}, a lower bound" if len(outlooks) == 1 else "lower bounds"
    return Section("time", "Time of a step at best", of, blocks)


def _one(outlook: Outlook) -> Table:
    parts = outlook.time.rows
    rows = [[row.name, _ms(row.ms, outlook), row.bound] for row in parts]
    rows += [[name, text(outlook), ""] for name, text in _sums([outlook])]
    return Table(rows, "lrl", shares=[share(row.ms, outlook.time.step_ms) for row in parts])


def _several(outlooks: Sequence[Outlook]) -> Table:
    names = dict.fromkeys(row.name for outlook in outlooks for row in outlook.time.rows)
    rows = [[name, *(_part(name, outlook) for outlook in outlooks)] for name in names]
    rows += [[name, *map(text, outlooks)] for name, text in _sums(outlooks)]
    return Table(rows, "l" + "r" * len(outlooks), ["", *(outlook.processor.name for outlook in outlooks)])


def _part(name: str, outlook: Outlook) -> str:
    found = next((row for row in outlook.time.rows if row.name == name), None)
    return _ms(found.ms, outlook) if found else "not known"


def _ms(value: float, outlook: Outlook) -> str:
    return f"{milliseconds(value, outlook.time.step_ms)} ms"


def _sums(outlooks: Sequence[Outlook]) -> list[tuple[str, Callable[[Outlook], str]]]:
    lengths = [outlook.duration.tokens for outlook in outlooks if outlook.duration]
    return [
        ("step", lambda one: _ms(one.time.step_ms, one) if one.time.peak_tflops else "not known"),
        ("tokens/s", lambda one: count(one.time.tokens_per_s) if one.time.peak_tflops else ""),
        ("of peak at best", lambda one: percent(utilisation(one))),
        (
            f"{short_count(lengths[0])} tokens" if lengths else "whole training",
            lambda one: span(one.duration) if one.duration else "",
        ),
        ("GPU hours", lambda one: f"{one.duration.gpu_hours:,.1f}" if one.duration else ""),
    ]


def utilisation(outlook: Outlook) -> float | None:
    """Of the peak, half of attention counted (Megatron-LM's convention), if the bound were reached."""
    time = outlook.time
    if not time.peak_tflops:
        return None
    return time.flops_causal / (time.step_ms / 1000) / (time.peak_tflops * 1e12)


# --- sections of a plan: parameters, work, memory, time, what if, fit, inference, environment

ALL_LAYERS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EQUAL = 0.0005  # of a figure: formula and walk are called equal
SMALL = 0.005  # of the peak: rows of less stand together


def plan_sections(report: PlanReport, why: bool) -> Iterator[Section]:
    """In the order of a reader's questions: of training or of inference. `why`: the formula of every line."""
    training = not report.inference
    if report.inference:
        yield inference(report, why)
    if training:
        yield memory_at_peak(report, why)
        yield moments(report)
    if report.exact:
        yield exact(report)
    if training and report.outlooks:
        yield time(report, why)
    if training:
        yield work(report)
    yield parameters(report)
    if training and report.variants:
        yield what_if(report)
    if report.fit:
        yield fit(report)
    if report.hints is not None:
        none = ["nothing in flags and variables that would cost anything"]
        yield Section("environment", "Environment", "", [Lines(list(report.hints) or none)])


def memory_at_peak(report: PlanReport, why: bool) -> Section:
    """What tensors hold when they hold most; rows add up to the peak."""
    peak = report.memory.peak
    shown = [row for row in peak.rows if why or row.num_bytes >= SMALL * peak.num_bytes]
    rest = peak.num_bytes - sum(row.num_bytes for row in shown)
    rows = [(row.name, size(row.num_bytes), percent(share(row.num_bytes, peak.num_bytes))) for row in shown]
    rows += [("smaller ones", size(rest), percent(share(rest, peak.num_bytes)))] if rest else []
    rows.append(("peak", size(peak.num_bytes), ""))
    shares = [share(row.num_bytes, peak.num_bytes) for row in shown] + [None] * (len(rows) - len(shown))
    blocks = [Table(rows, "lrr", shares=shares)]
    if why:
        blocks.append(Lines([f"{row.name} = {row.formula}" for row in shown if row.formula], quiet=True))
    return Section("memory", "Memory at the peak", f"estimate for one GPU, {peak.where} ({peak.phase})", blocks)


def moments(report: PlanReport) -> Section:
    """Where the peak can be, in the order of a step."""
    peak = report.memory.peak.num_bytes
    rows = [(moment.phase, moment.where, size(moment.num_bytes)) for moment in report.memory.moments]
    shares = [share(moment.num_bytes, peak) for moment in report.memory.moments]
    return Section("moments", "Memory through a step", "estimate for one GPU", [Table(rows, "llr", shares=shares)])


def exact(report: PlanReport) -> Section:
    """Category by category beside the formula."""
    found, by_formula = report.exact, {}
    for row in report.memory.peak.rows:
        by_formula[row.category] = by_formula.get(row.category, 0) + row.num_bytes
    names = list(found.categories) + [name for name in by_formula if name not in found.categories]
    pairs = [(name, found.categories.get(name, 0), by_formula.get(name, 0)) for name in names]
    pairs.append(("peak", found.allocated_peak_bytes, report.memory.peak.num_bytes))
    rows = [(name, size(real), size(formula), _difference(formula, real)) for name, real, formula in pairs]
    reserved = (
        f"reserved by the caching allocator: {size(found.reserved_peak_bytes)}; with expandable segments "
        f"{size(found.expandable_reserved_bytes)}"
    )
    table = Table(rows, "lrrr", ["", "exact", "estimate", "difference"])
    lines = Lines([f"peak in {found.where}", reserved, *found.notes])
    return Section("exact", "Exact", f"the real model and step, without data, in {found.seconds:.1f} s", [table, lines])


def _difference(formula: int, real: int) -> str:
    if real == 0:
        return "not there" if formula else ""
    share_off = formula / real - 1
    return f"{share_off:+.1%}" if abs(share_off) >= EQUAL else "0"


def work(report: PlanReport) -> Section:
    """FLOPs of all GPUs in both conventions."""
    tokens = report.plan.batch.final * report.plan.shape.seq_length
    rows = [
        (name, flops(per_token * tokens), f"{flops(per_token)} per token")
        for name, per_token in (
            ("half of attention counted (Megatron-LM)", report.flops_causal),
            ("all of attention counted (nanoGPT, PaLM)", report.flops_full),
        )
    ]
    return Section("work", "Work of a step", f"{count(tokens)} tokens, all GPUs", [Table(rows, "lrr")])


def parameters(report: PlanReport) -> Section:
    """By part of the model; parts that it lacks are left out."""
    whole = sum(report.parts.values())
    parts = [(name, number) for name, number in report.parts.items() if number]
    rows = [(name, count(number), percent(share(number, whole))) for name, number in parts]
    table = Table(rows, "lrr", shares=[share(number, whole) for _, number in parts])
    return Section("parameters", "Parameters", f"{count(whole)} ({short_count(whole)})", [table])


def what_if(report: PlanReport) -> Section:
    """One change each: its peak, and on the first GPU whether it fits and how fast it can be."""
    now = report.memory.peak.num_bytes
    outlook = report.outlooks[0] if report.outlooks else None
    rows = [_variant_row(one, now, outlook, report.margin) for one in report.variants]
    head = ["", "peak", "against now", *(["fits", "at best"] if outlook else [])]
    of = outlook.processor.name if outlook else "one change each"
    table = Table(rows, "lrr" + ("lr" if outlook else ""), head)
    return Section("what_if", "What if", of, [table, Lines([f"all layers: {ALL_LAYERS}"], quiet=True)])


def _variant_row(one: Variant, now: int, outlook: Outlook | None, margin: float) -> list[str]:
    row = [_shortened(one.words), size(one.peak_bytes), f"{(one.peak_bytes - now) / GIB:+.2f} GiB"]
    if outlook is None:
        return row
    fits = "yes" if one.peak_bytes <= outlook.room_bytes * (1 - margin) else "no"
    known = one.time is not None and one.time.peak_tflops
    return [*row, fits, f"{milliseconds(one.time.step_ms)} ms" if known else "not known"]


def _shortened(words: str) -> str:
    """Fits into the table; the lines below it have the flags in full."""
    return words.replace(ALL_LAYERS, "--recompute-granularity full (all layers)")


def fit(report: PlanReport) -> Section:
    """Flags to paste, or what is in the way."""
    found = report.fit
    budget = f"{size(found.budget_bytes)} of {found.processor.memory_gib:g} GiB, {percent(found.margin)} left free"
    lines = list(_fit_lines(found))
    return Section("fit", f"Fit into one {found.processor.name}", budget, [Lines(lines)])


def _fit_lines(found: Fit) -> Iterator[str]:
    if found.fits:
        yield f"fits as it is: {size(found.given.peak_bytes)}, {size(found.budget_bytes - found.given.peak_bytes)} to spare"
    if found.found and found.found.words:
        one = found.found
        yield f"{'fastest that fits' if found.fits else 'fits with'}: {one.words}"
        yield f"peak {size(one.peak_bytes)}{_at_best(one)}"
    if found.found is None:
        yield fit_sentence(found)
        yield "more GPUs do not help: each holds the whole model"


def _at_best(one: Variant) -> str:
    return f", at best {milliseconds(one.time.step_ms)} ms per step" if one.time and one.time.peak_tflops else ""


def inference(report: PlanReport, why: bool) -> Section:
    """Weights by number format, the cache, both; tokens/s for each GPU."""
    found = report.inference
    timed = [outlook for outlook in report.outlooks if outlook.inference and outlook.inference.token_rows]
    rows = [
        [_format(row.name), size(row.num_bytes), size(found.num_bytes(row)), count(batch)]
        for row, batch in zip(found.weights, found.batches_beyond_weights)
    ]
    blocks = [Table(rows, "lrrr", ["", "weights", "with cache", "cache is larger from batch"])]
    if timed:
        speeds = [
            [_format(row.name), *(_tokens_per_s(one, at) for one in timed)] for at, row in enumerate(found.weights)
        ]
        blocks.append(
            Table(speeds, "l" + "r" * len(timed), ["tokens/s at best", *(one.processor.name for one in timed)])
        )
    lines = [f"cache of keys and values: {size(found.cache.num_bytes)} = {found.cache.formula}"]
    if why:
        lines += [f"{row.name} = {row.formula}" for row in found.weights]
        lines += [f"{row.name} = {row.formula}" for outlook in timed for row in outlook.inference.token_rows]
    of = f"batch {found.batch}, {count(found.tokens)} tokens each; tensors only"
    return Section("inference", "Inference", of, [*blocks, Lines(lines)])


def _format(name: str) -> str:
    return name.removeprefix("weights in ")


def _tokens_per_s(outlook: Outlook, at: int) -> str:
    found = outlook.inference
    fits = found.num_bytes(found.weights[at]) <= outlook.room_bytes
    return count(found.tokens_per_s(found.token_rows[at])) if fits else "does not fit"


# --- A plan as lines for a terminal: the verdict first, then what it is made of, at last what was assumed


def plan_lines(report: PlanReport, style: Style, why: bool = False) -> list[str]:
    """`why`: the formula behind each line."""
    lines = [heading(report.title, report.facts, style), ""]
    for sentence in verdicts(report):
        lines += [style.warm(line) for line in wrapped(sentence, hanging="    ")]
    for note in report.notes:
        lines += [style.dim(line) for line in wrapped(note, hanging="    ")]
    for section in plan_sections(report, why):
        lines += ["", *section_lines(section, style)]
    return lines
