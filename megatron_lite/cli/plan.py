"""megatron-lite plan: will it fit, how fast can it be, what to change; from the launch command alone."""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_lite.cli.launcher import begins_command, split_at_trainer
from megatron_lite.cli.parser import Parser
from megatron_lite.cli.planned_run import PlannedRun, is_script, planned_run
from megatron_lite.config.environment import hints
from megatron_lite.config.flops import step_flops
from megatron_lite.config.machine import read_machine
from megatron_lite.config.plan import Plan
from megatron_lite.errors import UserError
from megatron_lite.estimate.hardware import Processor, processor_called
from megatron_lite.estimate.inference import InferencePrediction, predict_inference
from megatron_lite.estimate.memory import predict_memory
from megatron_lite.estimate.params import parameter_parts
from megatron_lite.estimate.step_time import duration_of, predict_time
from megatron_lite.estimate.what_if import MARGIN, fit, what_if
from megatron_lite.report.plan_figures import Exact, Outlook, PlanReport
from megatron_lite.report.plan_terminal import plan_lines
from megatron_lite.report.text import get_style
from megatron_lite.terminal import print_lines
from megatron_lite.units import GIB

# --- the options of `megatron-lite plan`, which stand before the trainer's flags or the launch script

END = "--"
SHELLS = ("bash", "sh")  # may stand before a script


def plan_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(plan's own options, the rest: flags of the trainer, or a script and its arguments). UserError for a mistake."""
    parser = _parser()
    own, rest = _split(argv, parser)
    options = parser.parse_args(own)
    _check(options, rest)
    return options, rest


def _parser() -> Parser:
    parser = Parser(
        "plan",
        "Says before a run how much memory it needs, whether it fits, and how fast it can be at best; without torch, data or "
        "GPU. Takes the launch command: a script with its arguments (nothing in it is run), torchrun's, or the trainer's flags.",
    )
    parser.usage = "megatron-lite plan [OPTIONS] SCRIPT.sh ARGUMENTS... | torchrun ... pretrain_gpt.py FLAGS | FLAGS"
    add = parser.add_argument
    add(
        "--gpu",
        nargs="+",
        metavar="NAME",
        help="H200, A100-40, 4090 ...: does it fit, and how fast at best; a column for each",
    )
    add("--gpus", type=int, metavar="N", help="GPUs of the whole job [what the script says, else 1]")
    add("--tokens", type=float, metavar="N", help="to train on, such as 300e9 [the flags' own length]")
    add("--why", action="store_true", help="the formula behind each line")
    add("--fit", metavar="NAME", help="flags with which it fits into this GPU")
    add("--margin", type=float, metavar="SHARE", help="of a GPU's memory that stays free [0.08]")
    add("--exact", action="store_true", help="walk the real model and step, without data; needs torch, takes seconds")
    add("--snapshot", metavar="FILE", help="with --exact: keep its snapshot, for pytorch.org/memory_viz")
    add("--inference", action="store_true", help="memory of the trained model when it generates")
    add("--batch", type=int, metavar="N", help="with --inference: sequences at a time [1]")
    add("--context", type=int, metavar="N", help="with --inference: tokens of each [--seq-length]")
    add("--env", action="store_true", help="what in flags and environment variables can cost something")
    add("--all", action="store_true", help="with --exact: all rows of its tables")
    add("--json", metavar="FILE", help="all of it, for programs")
    return parser


def _split(argv: list[str], parser: Parser) -> tuple[list[str], list[str]]:
    """Options up to the first word that is none of ours."""
    actions = {name: action for action in parser._actions for name in action.option_strings}
    at = 0
    while at < len(argv):
        name, equals, _ = argv[at].partition("=")
        if name not in actions:
            break
        at += 1
        if not equals:
            at += _number_of_values(actions[name], argv[at:])
    rest = argv[at:]
    rest = rest[1:] if rest[:1] == [END] else rest
    return argv[:at], rest[1:] if rest[:1] and rest[0] in SHELLS else rest


def _number_of_values(action: argparse.Action, words: list[str]) -> int:
    if action.nargs == 0:
        return 0
    values = list(_until_next(words))
    return len(values) if action.nargs == "+" else min(1, len(values))


def _until_next(words: list[str]) -> Iterator[str]:
    for word in words:
        if word.startswith("--") or is_script(word) or word in SHELLS or begins_command(word):
            return
        yield word


def _check(options: argparse.Namespace, rest: list[str]):
    if not rest:
        raise UserError(
            "megatron-lite plan: no launch command; give SCRIPT.sh with its arguments, or the trainer's flags."
        )
    if not is_script(rest[0]):
        before, flags = split_at_trainer(rest) or ([], rest)
        if not before and flags and not flags[0].startswith("-"):
            raise UserError(f"megatron-lite plan {flags[0]}: no script that ends in .sh, no command with pretrain_gpt.py, no flag of "
                            "the trainer; check it.")  # fmt: skip
        _check_order(flags)
    for name, least in (("gpus", 1), ("tokens", 1), ("batch", 1), ("context", 1)):
        value = getattr(options, name)
        if value is not None and not least <= value < float("inf"):
            raise UserError(f"--{name} {value:g}: must be at least {least}.")
    if options.margin is not None and not 0 <= options.margin < 1:
        raise UserError(f"--margin {options.margin:g}: must be at least 0 and below 1; 0.08 is usual.")
    for name, needed in (("snapshot", "exact"), ("all", "exact"), ("batch", "inference"), ("context", "inference")):
        if getattr(options, name) and not getattr(options, needed):
            raise UserError(f"--{name}: means something with --{needed} only; add that, or leave it out.")


def _check_order(flags: list[str]):
    """Options of ours behind flags of the trainer; the two have no name in common."""
    ours = {name for action in _parser()._actions for name in action.option_strings} - {"-h", "--help"}
    late = next((word for word in flags if word.partition("=")[0] in ours), None)
    if late:
        raise UserError(
            f"megatron-lite plan {late}: stands behind flags of the trainer; put the options of plan before them."
        )


# --- megatron-lite plan: will it fit, how fast can it be, what to change; from the launch command alone

DRIVER = Path("/proc/driver/nvidia/version")


def run(argv: list[str]):
    """Print what the launch command behind plan's options would need. UserError for mistakes."""
    options, words = plan_options(argv)
    found = planned_run(words, options.gpus)
    style = get_style(sys.stdout)
    if options.exact:
        report, more = _with_exact(options, words, found, style)
    else:
        report, more = _report(options, words, found), []
    written = _write(Path(options.json), report) if options.json else []
    print_lines([*plan_lines(report, style, options.why), *more, *(["", *written] if written else [])])
    if not (options.exact or options.inference):
        _check_estimate(found, report)


def _check_estimate(found: PlannedRun, report: PlanReport):
    """The answer stands: where somebody looks on, the walk of the real step follows, if it takes seconds."""
    from megatron_lite.cli.exact_plan import can_walk_unasked, check_lines

    if can_walk_unasked(sys.stdout):
        print_lines(check_lines(found, report))


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
