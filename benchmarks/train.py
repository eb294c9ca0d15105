"""Our trainer beside what people would use instead: the same work, the same tokens, in turn, each in a fresh process.

    python -m benchmarks.train --nanogpt FOLDER --work byte --precision bf16        # about 6 minutes on two idle cores
    python -m benchmarks.train --contestants ours hf --ours "compiled: --torch-compile" --rounds 5 --out FILE.json

nanogpt: the unchanged train.py of a clone of https://github.com/karpathy/nanoGPT; nanogpt-compiled: with its compile=True;
nanogpt-malloc: with variables by which glibc keeps freed memory, as ours does by itself. hf: transformers.Trainer. nanoGPT has
the exact GELU, less work on a CPU than the tanh form of GPT-2, Megatron and the others here, and its losses are those of a
step's last micro-batch. KIND@2 is on two ranks, which share out threads and micro-batches. To be run in the repository.
"""

import argparse
import dataclasses
import itertools
import json
import math
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.training import summary
from benchmarks.training.contestants import (
    NANOGPT,
    Contestant,
    build_command,
    build_parser,
    choose_contestants,
    choose_work,
)
from benchmarks.training.process import ceiling_tflops, clocks, cores, environment_of, gpus, load, machine, watch
from benchmarks.training.work import Work, write_tokens
from megatron_lite.errors import UserError
from megatron_lite.formats.hardware import peak_tflops

LINES_KEPT = 200  # of a failed run's output, in --out


def main() -> int:
    """Returns the exit code: 2 for a mistake in the flags, 1 unless every contestant finished a run."""
    args = build_parser(__doc__).parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: ends the run that is going on
    try:
        device = args.device or ("cuda" if gpus() else "cpu")
        work, warm_up = choose_work(args, device)
        contestants = choose_contestants(args, work, _tell)
        with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
            return _compare(args, work, warm_up, contestants, Path(folder))
    except UserError as error:
        print("\n".join(f"error: {line}" for line in error.lines), file=sys.stderr)
        return error.exit_code


def _compare(args: argparse.Namespace, work: Work, warm_up: int, contestants: list[Contestant], folder: Path) -> int:
    text = write_tokens(folder / "tokens", work.vocabulary, args.text, args.vocab_file, args.merge_file)
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    around = {"started": started, "machine": machine(), "text": text, "load_before": load()}
    threads = args.threads or cores()
    around["ceiling_tflops"] = [ceiling_tflops(work, threads)]
    records = _run_all(args, work, warm_up, contestants, folder, threads)
    around["ceiling_tflops"].append(ceiling_tflops(work, threads))
    around["load_after"] = load()
    results = [record["result"] for record in records]
    found, device = around["machine"], work.device
    processor = found["gpus"][0]["name"] if device == "cuda" and found["gpus"] else found["cpu"]
    peak = peak_tflops(processor, work.precision) if device == "cuda" else None
    limits = summary.Limits(peak, max((one for one in around["ceiling_tflops"] if one is not None), default=None))
    lines = [summary.summarize_runs(one.name, one.ranks, results, work, warm_up, limits) for one in contestants]
    finished = [one for one in contestants if any(r.contestant == one.name and not r.failure for r in results)]
    ratios = summary.collect_ratios(finished, results, work, warm_up)
    units = ", ".join(found["matrix_units"]) or "matrix units unknown"
    print(f"{work.words()}; --steps {work.steps} --rounds {args.rounds}\n{text}")
    print(f"{processor} ({units}), {found['cores']} cores, torch {found['versions']['torch']}")
    print(f"load {around['load_before']} before, {around['load_after']} after")
    columns = summary.loss_table(results)
    for part in (
        summary.describe_speeds(lines, threads, device),
        summary.describe_ceiling(around["ceiling_tflops"], device),
        summary.describe_ratios(ratios),
        summary.describe_losses(columns),
        summary.describe_doubts(lines, columns, around["load_before"], found["cores"]),
    ):
        if part:
            print("\n" + "\n".join(part))
    for result in results:
        if result.failure:
            print(f"failed: {result.contestant}, round {result.round}: {result.failure}")
    if args.chart:
        args.chart.write_text(_draw_losses(columns, work.words()), encoding="utf-8")
    if args.out:
        everything = {
            "command": sys.argv,
            **around,
            "work": dataclasses.asdict(work),
            "warm_up_steps": warm_up,
            "threads": threads,
            "runs": [{**record, "result": dataclasses.asdict(record["result"])} for record in records],
            "summary": [dataclasses.asdict(line) for line in lines],
            "ratios": [{**dataclasses.asdict(ratio), "median": ratio.median} for ratio in ratios],
            "limits": dataclasses.asdict(limits),
        }
        args.out.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    return 0 if finished == contestants else 1


def _draw_losses(columns: dict[str, list[float]], title: str) -> str:
    """A page with a curve of losses for each contestant."""
    from megatron_lite.report import palette
    from megatron_lite.report.figure import Axis, Curve, CurveChart, Look
    from megatron_lite.report.html import render_page
    from megatron_lite.report.section import Section

    hues = (palette.BLUE, palette.ORANGE, palette.GREEN, palette.VERMILION, palette.SKY, palette.PURPLE)
    curves = []
    for (name, column), hue in zip(columns.items(), itertools.cycle(hues)):
        points = [(step, loss) for step, loss in enumerate(column, 1) if math.isfinite(loss)]
        if points:
            steps, losses = zip(*points)
            curves.append(Curve(name, steps, losses, hue, Look.LINE))
    chart = CurveChart("The loss of every step", curves, Axis("step"), Axis("loss (nats)"), 400)
    section = Section("losses", "Losses", title, [])
    texts = {
        "title": title,
        "command": "benchmark",
        "sentences": [title],
        "of_gaps": "",
        "gaps": [],
        "numbers": "--out FILE",
    }
    return render_page([section], {"losses": chart if curves else None}, **texts)


def _run_all(
    args: argparse.Namespace, work: Work, warm_up: int, contestants: list[Contestant], folder: Path, threads: int
) -> list[dict]:
    """Round after round; who failed is not asked again."""
    deadline = time.monotonic() + 60 * args.minutes
    records, took = [], {}
    for number in range(1, args.rounds + 1):
        for one in contestants:
            left_s = deadline - time.monotonic()
            if left_s < took.get(one.name, 0):
                _tell(f"--minutes {args.minutes:g} are up before round {number} of {one.name}")
                return records
            if any(record["result"].contestant == one.name and record["result"].failure for record in records):
                continue
            try:
                record = _run(one, number, args, work, folder, threads, left_s)
            except KeyboardInterrupt:
                _tell(f"interrupted in round {number} of {one.name}; what was measured before:")
                return records
            records.append(record)
            result = record["result"]
            took[one.name], words = result.seconds, f"failed: {result.failure}"
            if not result.failure:
                rate = work.tokens_per_step / median(result.step_s[warm_up:])
                words = f"{rate:,.0f} tokens/s, {result.seconds:.0f} s in all"
            _tell(f"round {number} of {args.rounds}: {one.name}: {words}")
    return records


def _run(
    one: Contestant, number: int, args: argparse.Namespace, work: Work, folder: Path, threads: int, limit_s: float
) -> dict:
    mine = folder / f"{number}-{one.name}".replace("/", "-").replace(" ", "-")
    mine.mkdir()
    words, cwd = build_command(one, work, folder / "tokens", mine, args.nanogpt and args.nanogpt.resolve())
    variables = NANOGPT.get(one.kind, {})
    environment = environment_of(work.device, max(threads // one.ranks, 1)) | variables
    before = load()
    run = watch(words, environment, one.ranks, limit_s, clocks, cwd)
    result = summary.collect_result(one, number, run, mine, work.steps)
    return {
        "command": words,
        "omp_num_threads": environment["OMP_NUM_THREADS"],
        "environment": variables,
        "load_before": before,
        "load_after": load(),
        "during": run.samples,
        "result": result,
        "output": run.output[-LINES_KEPT:] if result.failure else [],
    }


def _tell(text: str):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
