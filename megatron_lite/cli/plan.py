"""`megatron-lite plan` predicts from the launch command alone: will it fit, how fast can it be, what to change."""

import argparse
import dataclasses
import importlib.util
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from megatron_lite.cli.launcher import split_at_trainer
from megatron_lite.cli.parser import Parser, write_json, write_text
from megatron_lite.cli.planned_run import PlannedRun, is_script, planned_run, split_options
from megatron_lite.config.environment import hints
from megatron_lite.config.flags import write_flags
from megatron_lite.config.plan import Plan
from megatron_lite.errors import UserError
from megatron_lite.formats.hardware import Processor
from megatron_lite.live_line import LiveLine
from megatron_lite.machine import read_machine
from megatron_lite.planner.expert_load import describe_expert_load
from megatron_lite.planner.find_processors import find_processor, find_processors
from megatron_lite.planner.plan_results import Exact, PlanReport, Subject
from megatron_lite.planner.predict_plan import NOT_WALKED, find_highest, predict_generating, predict_training
from megatron_lite.planner.run_walk import SNAPSHOT, walk_stages, walk_step
from megatron_lite.planner.search import Search, search
from megatron_lite.planner.what_if import MARGIN, find_heaviest_stage
from megatron_lite.report.plan_terminal import judge_plan, plan_lines
from megatron_lite.report.text import Style, get_style
from megatron_lite.terminal import print_lines
from megatron_lite.units import size

MAX_UNASKED_S = 10  # of a walk that nobody asked for
DRIVER = Path("/proc/driver/nvidia/version")


def run(argv: list[str]) -> None:
    """Print what the launch command behind plan's options would need. UserError for mistakes."""
    options, words = _read_options(argv)
    found = planned_run(words, options.gpus, options.launch, _list_dropped(options), shlex.split(options.add or ""))
    if options.exact and found.plan.fp8 is not None:
        raise UserError("--exact: the walk takes the real step, which has no FP8; leave it out, or --drop=fp8-format.")
    style = get_style(sys.stdout)
    processors = _list_processors(options)
    memory_lines: list[str] = []
    if options.exact and not options.search:
        report, memory_lines = _walk(options, words, found, processors, style)
    else:
        report = _predict(options, words, found, processors)
    if options.exact and report.search and report.search.fitting:
        fastest = _walk_fastest(report.search, None)
        memory_lines = _judge_fastest(report.search, fastest)
        report = dataclasses.replace(report, fastest=fastest)
    written = _write_files(options, report)
    print_lines([*plan_lines(report, style, options.why), *memory_lines, *written])
    if _is_checked_unasked(options, report) and can_walk_unasked(sys.stdout):
        # the answer stands: where somebody looks on, the walk of the real step follows, if it takes seconds
        print_lines(check_lines(found, report))


def _is_checked_unasked(options: argparse.Namespace, report: PlanReport) -> bool:
    """Whether there is an estimate for the walk to check."""
    if options.exact or options.inference or report.subject.plan.fp8 is not None:
        return False
    return report.search is None or len(report.search.fitting) > 0


def _walk(
    options: argparse.Namespace,
    words: list[str],
    found: PlannedRun,
    processors: list[Processor],
    style: Style,
) -> tuple[PlanReport, list[str]]:
    """Walk the real step. Returns the report with the walk's figures, and lines on its snapshot: modules, source
    lines, layers, fragmentation."""
    from megatron_lite.analysis.analyze import analyze
    from megatron_lite.report.section import section_lines
    from megatron_lite.report.sections.memory import memory_section

    if options.snapshot:
        _check_writable(Path(options.snapshot))
    with tempfile.TemporaryDirectory() as folder:
        walked = walk_stages(found.plan, found.flags, Path(folder), processors[0] if processors else None)
        report = _predict(options, words, found, processors, walked)
        path = Path(folder) / SNAPSHOT.format(find_highest(walked))
        if options.snapshot:
            path = Path(shutil.move(path, options.snapshot))
        section = memory_section(analyze([path]), options.all)
    lines = ["", *section_lines(section, style)] if section else []
    if options.snapshot:
        lines += ["", f"written: {path}"]
    return report, lines


def _check_writable(path: Path) -> None:
    """UserError where --snapshot cannot be written: before seconds are spent."""
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise UserError(f"--snapshot {path}: cannot be written ({error.strerror}); name another file.") from None
    if not existed:
        path.unlink()


def _write_files(options: argparse.Namespace, report: PlanReport) -> list[str]:
    """Lines on what was written."""
    lines: list[str] = []
    if options.json:
        from megatron_lite.report.plan_files import as_json

        lines += write_json(options.json, as_json(report))
    if options.page:
        from megatron_lite.report.plan_files import plan_page

        lines += ["", write_text("--page", options.page, plan_page(report))]
    return lines


# --- its options


def _read_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the words into plan's own options and the rest: flags of the trainer, or a script and its arguments.
    UserError for a mistake."""
    parser = _parser()
    options, rest = split_options(parser, argv)
    _check(options, rest)
    return options, rest


def _parser() -> Parser:
    parser = Parser(
        "plan",
        "Predicts how much memory a run needs, whether it fits, and how fast it can be at best; without torch, data or "
        "GPU. Takes the launch command: a script with its arguments (nothing in it is run), torchrun's, or the "
        "trainer's flags.",
    )
    parser.usage = "megatron-lite plan [OPTIONS] SCRIPT.sh ARGUMENTS... | torchrun ... pretrain_gpt.py FLAGS | FLAGS"
    add = parser.add_argument
    gpu_help = "H200, A100-40, 4090 ...: check whether it fits and how fast it can be; a column for each"
    add("--gpu", nargs="+", metavar="NAME", help=gpu_help)
    add(
        "--gpus",
        type=int,
        metavar="N",
        help="GPUs of the whole job [those of the script, else 1; 8 a node are assumed where it does not say]",
    )
    network = "Gbit/s of the network between nodes that each GPU has [that of NVIDIA's DGX with this GPU]"
    add("--network", type=float, metavar="N", help=network)
    add(
        "--tokens",
        type=float,
        metavar="N",
        help="to train on, such as 300e9 [the flags' own length]",
    )
    add("--why", action="store_true", help="the formula behind each line")
    add("--fit", metavar="NAME", help="flags with which it fits into this GPU")
    add(
        "--search",
        action="store_true",
        help="all layouts on --gpus N GPUs: those that fit, fastest first, with flags",
    )
    add("--margin", type=float, metavar="SHARE", help="of a GPU's memory that stays free [0.08]")
    add(
        "--launch",
        type=int,
        default=1,
        metavar="N",
        help="which one, of a script that starts several [%(default)s]",
    )
    add(
        "--drop",
        metavar="A,B",
        help="flags of the trainer in it that are left out, such as --drop=spec,fp4-format",
    )
    add(
        "--add",
        metavar="FLAGS",
        help="flags of the trainer that it has not, or with other values: --add='--lr 1e-4'",
    )
    add(
        "--exact",
        action="store_true",
        help="walk the real model and step, without data; needs torch, takes seconds",
    )
    add(
        "--snapshot",
        metavar="FILE",
        help="with --exact: keep its snapshot, for pytorch.org/memory_viz",
    )
    add("--inference", action="store_true", help="memory of the trained model when it generates")
    add("--batch", type=int, metavar="N", help="with --inference: sequences at a time [1]")
    add("--context", type=int, metavar="N", help="with --inference: tokens of each [--seq-length]")
    add(
        "--env",
        action="store_true",
        help="flags and environment variables that can cost speed or memory",
    )
    add("--all", action="store_true", help="all rows of tables that are cut off")
    add("--page", metavar="FILE", help="all of it as a page with charts")
    add("--json", metavar="FILE", help="all of it, for programs")
    return parser


def _list_dropped(options: argparse.Namespace) -> list[str]:
    """The names behind --drop."""
    names = [name.strip() for name in (options.drop or "").split(",")]
    return [name for name in names if name]


def _check(options: argparse.Namespace, rest: list[str]) -> None:
    if not rest:
        nothing = "no launch command; give SCRIPT.sh with its arguments, or the trainer's flags."
        raise UserError(f"megatron-lite plan: {nothing}")
    if not is_script(rest[0]):
        before, flags = split_at_trainer(rest) or ([], rest)
        if not before and flags and not flags[0].startswith("-"):
            none = "no script that ends in .sh, no command with pretrain_gpt.py, no flag of the trainer"
            raise UserError(f"megatron-lite plan {flags[0]}: {none}; check it.")
    for name in ("gpus", "network", "tokens", "batch", "context"):
        value = getattr(options, name)
        if value is not None and not 1 <= value < float("inf"):
            raise UserError(f"--{name} {value:g}: must be at least 1.")
    if options.margin is not None and not 0 <= options.margin < 1:
        raise UserError(f"--margin {options.margin:g}: must be at least 0 and below 1; 0.08 is usual.")
    if options.search and (len(find_processors(options.gpu or [])) != 1 or options.inference or options.fit):
        raise UserError("--search: needs one --gpu NAME, and neither --fit nor --inference; change that.")
    if options.search and options.snapshot:
        raise UserError("--snapshot: --search keeps none; give it with --exact and the flags of one layout.")
    for name, needed in (("snapshot", "exact"), ("batch", "inference"), ("context", "inference")):
        if getattr(options, name) and not getattr(options, needed):
            raise UserError(f"--{name}: needs --{needed}; add that, or leave it out.")


# --- what is found out


def _list_processors(options: argparse.Namespace) -> list[Processor]:
    """List the processors that are named; the one to fit into counts as named."""
    named = [
        *find_processors(options.gpu or []),
        *([find_processor(options.fit)] if options.fit else []),
    ]
    found = list({one.name: one for one in named}.values())
    if options.network:
        found = [dataclasses.replace(one, network_gb_s=options.network / 8) for one in found]
    return found


def _predict(
    options: argparse.Namespace,
    words: list[str],
    found: PlannedRun,
    processors: list[Processor],
    walked: Mapping[int, Exact] = NOT_WALKED,
) -> PlanReport:
    """Predict what was asked for, and nothing else. walked: figures of walks, by the first stage of those that are
    alike."""
    plan = found.plan
    margin = MARGIN if options.margin is None else options.margin
    training = None
    generating = None
    layouts = None
    # the JSON holds what a training needs whatever was asked
    if options.json or options.fit or not (options.inference or options.search):
        tokens = plan.train_samples * plan.shape.seq_length if options.tokens is None else int(options.tokens)
        fit_into = find_processor(options.fit) if options.fit else None
        training = predict_training(plan, processors, margin, tokens, fit_into, walked)
    if options.inference:
        generating = predict_generating(plan, processors, options.batch or 1, options.context)
    if options.search:
        layouts = _search(plan, processors[0], margin)
    return PlanReport(_describe_subject(options, words, found, margin), training, generating, layouts)


def _describe_subject(options: argparse.Namespace, words: list[str], found: PlannedRun, margin: float) -> Subject:
    found_hints = None
    if options.env:
        # of this machine only if it may be the one that trains
        machine = read_machine() if DRIVER.exists() else None
        found_hints = hints(found.plan, found.environment, machine)
    return Subject(
        title=Path(words[0]).name if is_script(words[0]) else "plan",
        facts=_describe_facts(found, options.inference),
        plan=found.plan,
        margin=margin,
        hints=found_hints,
        notes=(*found.notes, *describe_expert_load(found.plan)),
        everything=options.all,
    )


def _describe_facts(found: PlannedRun, generates: bool) -> str:
    """Describe a plan, 'GPT 24 x 1024, sequence 2048, fp16, 1 GPU, batch 16 = 4 x 1 x 4'; without GPUs and batch
    where it generates."""
    plan = found.plan
    shape = plan.shape
    precision = plan.precision if plan.fp8 is None else f"{plan.precision} and fp8"
    facts = f"GPT {shape.num_layers} x {shape.hidden_size}, sequence {shape.seq_length}, {precision}"
    if generates:
        return facts
    ranks = plan.world.size
    gpus = f"{ranks} GPU{'s' if ranks > 1 else ''}{' assumed' if found.gpus_assumed else ''}"
    passes = plan.final_micro_batches
    batch = f"{plan.batch.final} = {plan.args.training.micro_batch_size} x {plan.layout.data} x {passes}"
    return f"{facts}, {gpus}, batch {batch}"


def _search(plan: Plan, processor: Processor, margin: float) -> Search:
    line = LiveLine()
    try:
        return search(plan, processor, margin, lambda done, of: line.draw(f"layouts: {done} of {of}"))
    finally:
        line.wipe()


# --- the check of an estimate


def can_walk_unasked(stream: TextIO) -> bool:
    """Whether somebody looks on, and torch is installed. Nothing is imported."""
    return stream.isatty() and importlib.util.find_spec("torch") is not None


def check_lines(run: PlannedRun, report: PlanReport) -> list[str]:
    """Walk the real step, and say what it changes of an estimate that was printed already: its peak, and verdicts."""
    try:
        if report.search:
            return _judge_fastest(report.search, _walk_fastest(report.search, MAX_UNASKED_S))
        return _check_training(run, report)
    except UserError as error:
        return ["", *(f"  not checked: {line}" for line in error.lines)]


def _check_training(run: PlannedRun, report: PlanReport) -> list[str]:
    training = report.training
    assert training is not None  # nothing else was asked
    processor = training.outlooks[0].processor if training.outlooks else None
    with tempfile.TemporaryDirectory() as folder:
        exact = walk_step(run.plan, run.flags, Path(folder) / "predicted.pickle", processor, MAX_UNASKED_S)
    walked = dataclasses.replace(report, training=dataclasses.replace(training, exact=exact))
    pairs = zip(judge_plan(report), judge_plan(walked))
    changed = [new for old, new in pairs if old.partition(":")[0] != new.partition(":")[0]]  # 'fits in one H200'
    lines = _describe_check(training.memory.peak.num_bytes, exact, "; --exact shows it")
    return ["", *lines, *(f"  {line}" for line in changed)]


def _describe_check(estimate_bytes: int, exact: Exact, more: str = "") -> list[str]:
    off = estimate_bytes / exact.allocated_peak_bytes - 1
    return [
        f"  exact peak {size(exact.allocated_peak_bytes)} in {exact.phase}, the estimate is {off:+.1%} off",
        f"    (the real model and step, walked without data in {exact.seconds:.1f} s{more})",
    ]


def _walk_fastest(found: Search, limit_s: float | None) -> Exact:
    """Walk what a search prints first, on the stage that holds most. UserError where it takes more than the limit."""
    plan = find_heaviest_stage(found.fitting[0].plan, found.processor)
    with tempfile.TemporaryDirectory() as folder:
        return walk_step(
            plan,
            write_flags(plan.args),
            Path(folder) / "predicted.pickle",
            found.processor,
            limit_s,
        )


def _judge_fastest(found: Search, exact: Exact) -> list[str]:
    """Lines on the walk of what a search prints first."""
    lines = ["", "  the fastest that fits:", *_describe_check(found.fitting[0].peak_bytes, exact)]
    if exact.allocated_peak_bytes > found.budget_bytes:
        over = size(exact.allocated_peak_bytes - found.budget_bytes)
        lines.append(
            f"  it does not fit: {over} more than there is with its margin; take a larger --margin, or another layout"
        )
    return lines
