"""megatron-lite plan: will it fit, how fast can it be, what to change; from the launch command alone."""

import argparse
import dataclasses
import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

from megatron_lite.cli.launcher import split_at_trainer
from megatron_lite.cli.parser import Parser, write_json, write_text
from megatron_lite.cli.planned_run import PlannedRun, is_script, planned_run, split_options
from megatron_lite.config.environment import hints
from megatron_lite.config.machine import read_machine
from megatron_lite.config.plan import Plan, list_stage_kinds, plan_stages
from megatron_lite.errors import ConfigError, UserError
from megatron_lite.live_line import LiveLine
from megatron_lite.planner.hardware import Processor, cublas_workspace_bytes, find_processor, find_processors
from megatron_lite.planner.inference import CACHE_BYTES, InferencePrediction, predict_inference
from megatron_lite.planner.memory import predict_memory
from megatron_lite.planner.model_size import count_parameter_parts, step_flops
from megatron_lite.planner.plan_results import Exact, Outlook, PlanReport, StageOutlook
from megatron_lite.planner.search import Search, search
from megatron_lite.planner.step_time import compute_duration, predict_stage_time, predict_time
from megatron_lite.planner.what_if import MARGIN, fit, what_if
from megatron_lite.report.plan_terminal import plan_lines, verdicts
from megatron_lite.report.text import get_style
from megatron_lite.terminal import print_lines
from megatron_lite.units import GIB, size

MODULE = "megatron_lite.planner.walk.rehearse"
MAX_UNASKED_S = 10  # of a walk that nobody asked for
WALKS_AT_ONCE = 2
SNAPSHOT = "stage_{}/predicted.pickle"
DRIVER = Path("/proc/driver/nvidia/version")


def run(argv: list[str]):
    """Print what the launch command behind plan's options would need. UserError for mistakes."""
    options, words = _read_options(argv)
    found = planned_run(words, options.gpus, options.launch, _list_dropped(options), shlex.split(options.add or ""))
    style = get_style(sys.stdout)
    more: list[str] = []
    if options.exact:
        from megatron_lite.analysis.analyze import analyze
        from megatron_lite.report.section import section_lines
        from megatron_lite.report.sections.memory import memory_section

        if options.snapshot:  # before seconds are spent
            path = Path(options.snapshot)
            existed = path.exists()
            try:
                path.open("ab").close()
            except OSError as error:
                why = f"cannot be written ({error.strerror}); name another file."
                raise UserError(f"--snapshot {path}: {why}") from None
            if not existed:
                path.unlink()
        with tempfile.TemporaryDirectory() as folder:
            processors = _list_processors(options)
            walked = walk_stages(found, Path(folder), processors[0] if processors else None)
            report = _report(options, words, found, walked)
            path = Path(folder) / SNAPSHOT.format(_find_highest(walked))
            if options.snapshot:
                path = Path(shutil.move(path, options.snapshot))
            # the memory section of the report on it: modules, source lines, layers, fragmentation
            section = memory_section(analyze([path]), options.all)
            more = ["", *section_lines(section, style)] if section else []
            more += ["", f"written: {path}"] if options.snapshot else []
    else:
        report = _report(options, words, found)
    if options.json:
        from megatron_lite.report.plan_files import as_json

        more = [*more, *write_json(options.json, as_json(report))]
    if options.page:
        from megatron_lite.report.plan_files import plan_page

        more = [*more, "", write_text("--page", options.page, plan_page(report))]
    print_lines([*plan_lines(report, style, options.why), *more])
    if not (options.exact or options.inference or options.search) and can_walk_unasked(sys.stdout):
        # the answer stands: where somebody looks on, the walk of the real step follows, if it takes seconds
        print_lines(check_lines(found, report))


# --- its options


def _read_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(plan's own options, the rest: flags of the trainer, or a script and its arguments). UserError for a mistake."""
    parser = _parser()
    options, rest = split_options(parser, argv)
    _check(options, rest)
    return options, rest


def _parser() -> Parser:
    parser = Parser(
        "plan",
        "Predicts how much memory a run needs, whether it fits, and how fast it can be at best; without torch, data or "
        "GPU. Takes the launch command: a script with its arguments (nothing in it is run), torchrun's, or the trainer's flags.",
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
    add("--tokens", type=float, metavar="N", help="to train on, such as 300e9 [the flags' own length]")
    add("--why", action="store_true", help="the formula behind each line")
    add("--fit", metavar="NAME", help="flags with which it fits into this GPU")
    add("--search", action="store_true", help="all layouts on --gpus N GPUs: those that fit, fastest first, with flags")
    add("--margin", type=float, metavar="SHARE", help="of a GPU's memory that stays free [0.08]")
    add("--launch", type=int, default=1, metavar="N", help="which one, of a script that starts several [%(default)s]")
    add("--drop", metavar="A,B", help="flags of the trainer in it that are left out, such as --drop=fp8-format,spec")
    add("--add", metavar="FLAGS", help="flags of the trainer that it has not, or with other values: --add='--lr 1e-4'")
    add("--exact", action="store_true", help="walk the real model and step, without data; needs torch, takes seconds")
    add("--snapshot", metavar="FILE", help="with --exact: keep its snapshot, for pytorch.org/memory_viz")
    add("--inference", action="store_true", help="memory of the trained model when it generates")
    add("--batch", type=int, metavar="N", help="with --inference: sequences at a time [1]")
    add("--context", type=int, metavar="N", help="with --inference: tokens of each [--seq-length]")
    add("--env", action="store_true", help="flags and environment variables that can cost speed or memory")
    add("--all", action="store_true", help="all rows of tables that are cut off")
    add("--page", metavar="FILE", help="all of it as a page with charts")
    add("--json", metavar="FILE", help="all of it, for programs")
    return parser


def _list_dropped(options: argparse.Namespace) -> list[str]:
    """The names behind --drop."""
    names = [name.strip() for name in (options.drop or "").split(",")]
    return [name for name in names if name]


def _check(options: argparse.Namespace, rest: list[str]):
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
    if options.search and (
        len(find_processors(options.gpu or [])) != 1 or options.exact or options.inference or options.fit
    ):
        raise UserError("--search: needs one --gpu NAME, and neither --exact, --fit nor --inference; change that.")
    for name, needed in (("snapshot", "exact"), ("batch", "inference"), ("context", "inference")):
        if getattr(options, name) and not getattr(options, needed):
            raise UserError(f"--{name}: needs --{needed}; add that, or leave it out.")


# --- what is found out


def _list_processors(options: argparse.Namespace) -> list[Processor]:
    """Those named; the one to fit into counts as named."""
    named = [*find_processors(options.gpu or []), *([find_processor(options.fit)] if options.fit else [])]
    found = list({one.name: one for one in named}.values())
    if options.network:
        found = [dataclasses.replace(one, network_gb_s=options.network / 8) for one in found]
    return found


def _report(
    options: argparse.Namespace, words: list[str], found: PlannedRun, walked: Mapping[int, Exact] = MappingProxyType({})
) -> PlanReport:
    """walked: by the first stage of those that are alike."""
    exact = walked[_find_highest(walked)] if walked else None
    plan, shape, ranks = found.plan, found.plan.shape, found.plan.world.size
    processors, margin = _list_processors(options), MARGIN if options.margin is None else options.margin
    tokens = plan.train_samples * shape.seq_length if options.tokens is None else int(options.tokens)

    def infer(processor: Processor | None = None) -> InferencePrediction | None:
        if not options.inference:
            return None
        return predict_inference(shape, options.batch or 1, options.context, processor, CACHE_BYTES[plan.precision])

    outlooks = []
    for one in processors:
        seen, memory = predict_time(plan, one), predict_memory(plan, one)
        duration = compute_duration(shape, tokens, plan.world.size, seen.tokens_per_s) if seen.peak_tflops else None
        peak_bytes = exact.allocated_peak_bytes if exact else memory.peak.num_bytes
        fits = peak_bytes <= one.memory_gib * GIB * (1 - margin)
        outlooks.append(Outlook(one, memory, seen, duration, None if fits else fit(plan, one, margin), infer(one)))
    first = processors[0] if processors else None
    facts = f"GPT {shape.num_layers} x {shape.hidden_size}, sequence {shape.seq_length}, {plan.precision}"
    if not options.inference:
        batch, passes = plan.batch.final, plan.batch.final // plan.samples_per_pass
        assumed = " assumed" if found.gpus_assumed else ""
        facts += f", {ranks} GPU{'s' if ranks > 1 else ''}{assumed}, batch {batch} = {plan.args.training.micro_batch_size} x {plan.layout.data} x {passes}"
    # of this machine only if it may be the one that trains
    machine = read_machine() if DRIVER.exists() else None
    return PlanReport(
        title=Path(words[0]).name if is_script(words[0]) else "plan",
        facts=facts,
        plan=plan,
        parts=count_parameter_parts(shape),
        flops_causal=step_flops(shape, 1, causal=True) // shape.seq_length,
        flops_full=step_flops(shape, 1, causal=False) // shape.seq_length,
        memory=predict_memory(plan, first),
        margin=margin,
        outlooks=outlooks,
        variants=what_if(plan, first),
        fit=fit(plan, find_processor(options.fit), margin) if options.fit else None,
        search=_search(plan, first, margin) if options.search and first else None,
        inference=infer(),
        exact=exact,
        stages=_list_stages(plan, first, walked) if plan.layout.pipeline > 1 and not options.inference else (),
        hints=hints(plan, found.environment, machine) if options.env else None,
        notes=found.notes,
        everything=options.all,
    )


def _search(plan: Plan, processor: Processor, margin: float) -> Search:
    line = LiveLine()
    try:
        return search(plan, processor, margin, lambda done, of: line.draw(f"layouts: {done} of {of}"))
    finally:
        line.wipe()


def _list_stages(plan: Plan, processor: Processor | None, walked: Mapping[int, Exact]) -> list[StageOutlook]:
    return [
        StageOutlook(
            one,
            predict_memory(one, processor),
            predict_stage_time(one, processor) if processor else None,
            walked.get(one.stage.number),
        )
        for one in plan_stages(plan)
    ]


# --- --exact, and the check of an estimate: a process that has torch walks the real model and step without data


def walk_step(
    run: PlannedRun, snapshot: Path, processor: Processor | None = None, limit_s: float | None = None
) -> Exact:
    """Figures of the walk, whose snapshot is then at `snapshot`.

    Raises UserError where torch is missing, the flags do not work, or the walk takes longer than `limit_s`.
    """
    deterministic = run.plan.args.training.deterministic_mode
    request = {
        "flags": list(run.flags), "world": dataclasses.asdict(run.plan.world), "vocab_size": run.plan.vocab_size,
        "snapshot": str(snapshot), "workspace": cublas_workspace_bytes(processor, deterministic),
    }  # fmt: skip
    started, line, command = time.monotonic(), LiveLine(), [sys.executable, "-m", MODULE]
    line.draw("walking the real model and step, without data")
    try:
        asked = json.dumps(request)
        walk = subprocess.run(command, input=asked, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise UserError(f"the walk of the real step takes more than {limit_s:g} s; --exact waits for it.") from None
    finally:
        line.wipe()
    lines = walk.stderr.strip().splitlines()
    if walk.returncode == UserError.exit_code and lines:
        raise ConfigError(lines)
    if walk.returncode:
        why = lines[-1] if lines else f"exit code {walk.returncode}"
        raise UserError(f"--exact: the walk failed ({why}); leave it out.")
    figures = json.loads(walk.stdout.splitlines()[-1])
    known = {field.name: figures[field.name] for field in dataclasses.fields(Exact) if field.name in figures}
    return Exact(seconds=time.monotonic() - started, **known)


def walk_stages(run: PlannedRun, folder: Path, processor: Processor | None) -> dict[int, Exact]:
    """Of one rank of each kind of stage, by the stage's number, which the snapshot in `folder` bears, too."""
    plans = [plan for plan, _ in list_stage_kinds(run.plan)] if run.plan.layout.pipeline > 1 else [run.plan]

    def walk(plan: Plan) -> Exact:
        path = folder / SNAPSHOT.format(plan.stage.number)
        path.parent.mkdir()
        return walk_step(dataclasses.replace(run, plan=plan), path, processor)

    if len(plans) == 1:
        return {plans[0].stage.number: walk(plans[0])}
    with ThreadPoolExecutor(WALKS_AT_ONCE) as pool:
        return {plan.stage.number: exact for plan, exact in zip(plans, pool.map(walk, plans))}


def _find_highest(walked: Mapping[int, Exact]) -> int:
    return max(walked, key=lambda number: walked[number].allocated_peak_bytes)


def can_walk_unasked(stream) -> bool:
    """Whether somebody looks on, and torch is installed. Nothing is imported."""
    return stream.isatty() and importlib.util.find_spec("torch") is not None


def check_lines(run: PlannedRun, report: PlanReport) -> list[str]:
    """What the walk of the real step says of an estimate that was printed already: its peak, and verdicts that change with it."""
    processor = report.outlooks[0].processor if report.outlooks else None
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = walk_step(run, Path(folder) / "predicted.pickle", processor, MAX_UNASKED_S)
        except UserError as error:
            return ["", *(f"  not checked: {line}" for line in error.lines)]
    off = report.memory.peak.num_bytes / found.allocated_peak_bytes - 1
    walked = dataclasses.replace(report, exact=found)
    pairs = zip(verdicts(report), verdicts(walked))
    changed = [new for old, new in pairs if old.partition(":")[0] != new.partition(":")[0]]  # 'fits in one H200'
    peak = f"exact peak {size(found.allocated_peak_bytes)} in {found.phase}, the estimate is {off:+.1%} off"
    how = f"the real model and step, walked without data in {found.seconds:.1f} s; --exact shows it"
    return ["", f"  {peak}", f"    ({how})", *(f"  {line}" for line in changed)]
