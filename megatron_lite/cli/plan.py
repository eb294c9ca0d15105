"""megatron-lite plan: will it fit, how fast can it be, what to change; from the launch command alone."""

import argparse
import sys
import tempfile
from pathlib import Path

from megatron_lite.cli.plan_options import plan_options
from megatron_lite.cli.planned_run import PlannedRun, is_script, planned_run
from megatron_lite.config.environment import hints
from megatron_lite.config.machine import read_machine
from megatron_lite.config.plan import Plan
from megatron_lite.errors import UserError
from megatron_lite.estimate.duration import duration_of
from megatron_lite.estimate.fit import MARGIN, fit, what_if
from megatron_lite.estimate.flops import step_flops
from megatron_lite.estimate.hardware import Processor, processor_called
from megatron_lite.estimate.inference import InferencePrediction, predict_inference
from megatron_lite.estimate.params import parameter_parts
from megatron_lite.estimate.peak import predict_memory
from megatron_lite.estimate.step_time import predict_time
from megatron_lite.report.plan_figures import Exact, Outlook, PlanReport
from megatron_lite.report.plan_terminal import plan_lines
from megatron_lite.report.text import style_of
from megatron_lite.terminal import print_lines
from megatron_lite.units import GIB

DRIVER = Path("/proc/driver/nvidia/version")


def run(argv: list[str]):
    """Print what the launch command behind plan's options would need. UserError for mistakes."""
    options, words = plan_options(argv)
    found = planned_run(words, options.gpus)
    style = style_of(sys.stdout)
    if options.exact:
        report, more = _with_exact(options, words, found, style)
    else:
        report, more = _report(options, words, found), []
    written = _write(Path(options.json), report) if options.json else []
    print_lines([*plan_lines(report, style, options.why), *more, *(["", *written] if written else [])])


def _report(options: argparse.Namespace, words: list[str], found: PlannedRun, exact: Exact | None = None) -> PlanReport:
    plan, shape = found.plan, found.plan.shape
    processors = _processors(options)
    margin = MARGIN if options.margin is None else options.margin
    memory = predict_memory(plan, processors[0] if processors else None)
    return PlanReport(
        title=Path(words[0]).name if is_script(words[0]) else "plan",
        facts=_facts(found, options.inference),
        plan=plan,
        parts=parameter_parts(shape),
        flops_causal=step_flops(shape, 1, causal=True) // shape.seq_length,
        flops_full=step_flops(shape, 1, causal=False) // shape.seq_length,
        memory=memory,
        margin=margin,
        outlooks=[_outlook(options, plan, processor, exact, margin) for processor in processors],
        variants=what_if(plan, processors[0] if processors else None),
        fit=fit(plan, processor_called(options.fit), margin) if options.fit else None,
        inference=_inference(options, plan),
        exact=exact,
        hints=_hints(found) if options.env else None,
        notes=found.notes,
    )


def _processors(options: argparse.Namespace) -> list[Processor]:
    """Those named; the one to fit into counts as named."""
    names = [*(options.gpu or []), *([options.fit] if options.fit else [])]
    return list({one.name: one for one in map(processor_called, names)}.values())


def _outlook(
    options: argparse.Namespace, plan: Plan, processor: Processor, exact: Exact | None, margin: float
) -> Outlook:
    time = predict_time(plan, processor)
    tokens = None if options.tokens is None else int(options.tokens)
    memory = predict_memory(plan, processor)
    peak_bytes = exact.allocated_peak_bytes if exact else memory.peak.num_bytes
    fits = peak_bytes <= processor.memory_gib * GIB * (1 - margin)
    return Outlook(
        processor=processor,
        memory=memory,
        time=time,
        duration=duration_of(plan, time.tokens_per_s, tokens) if time.peak_tflops else None,
        fit=None if fits else fit(plan, processor, margin),
        inference=_inference(options, plan, processor),
    )


def _inference(
    options: argparse.Namespace, plan: Plan, processor: Processor | None = None
) -> InferencePrediction | None:
    return predict_inference(plan.shape, options.batch or 1, options.context, processor) if options.inference else None


def _facts(found: PlannedRun, inference: bool) -> str:
    plan, shape = found.plan, found.plan.shape
    model = f"GPT {shape.num_layers} x {shape.hidden_size}, sequence {shape.seq_length}, {plan.precision}"
    if inference:
        return model
    gpus = f"{plan.world.size} GPU{'s' if plan.world.size > 1 else ''}"
    micro_batch = plan.args.training.micro_batch_size
    passes = plan.batch.final // plan.samples_per_pass
    batch = f"batch {plan.batch.final} = {micro_batch} x {plan.world.size} x {passes}"
    return f"{model}, {gpus}, {batch}"


def _hints(found: PlannedRun) -> list[str]:
    """Of this machine only if it may be the one that trains."""
    return hints(found.plan, found.environment, read_machine() if DRIVER.exists() else None)


def _with_exact(
    options: argparse.Namespace, words: list[str], found: PlannedRun, style
) -> tuple[PlanReport, list[str]]:
    """(the report, the snapshot's own section)."""
    from megatron_lite.cli.exact_plan import exact, snapshot_lines

    if options.snapshot:
        _require_writable(Path(options.snapshot))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(options.snapshot or Path(folder) / "predicted.pickle")
        report = _report(options, words, found, exact(found, path, next(iter(_processors(options)), None)))
        kept = ["", f"written: {path}"] if options.snapshot else []
        return report, [*snapshot_lines(path, style, options.all), *kept]


def _require_writable(path: Path):
    """Before seconds are spent. UserError if not."""
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise UserError(f"--snapshot {path}: cannot be written ({error.strerror}); name another file.") from None
    if not existed:
        path.unlink()


def _write(path: Path, report: PlanReport) -> list[str]:
    """The line that names the file."""
    from megatron_lite.report.plan_json import plan_json

    try:
        path.write_text(plan_json(report), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path}: cannot be written ({error.strerror or error}); name another file.") from error
    return [f"written: {path}"]
