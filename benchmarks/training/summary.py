"""What runs gave, the arithmetic of it (medians, spreads, ratios of rounds, goals), and the tables that show it."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import numpy as np

from benchmarks.training.contestants import NANOGPT, STEP_FILE, Contestant
from benchmarks.training.process import Watched
from benchmarks.training.work import SIZES, VOCABULARIES, Work
from megatron_lite.config.model_size import step_flops
from megatron_lite.units import count, size

FAST, SLOW = 10, 90  # percentiles of a step's time
CLOSE_LOSSES = 0.1  # of their mean: contestants start from different weights and read different windows
CLOSE_TIMES = 0.05
NANOGPT_LINE = re.compile(r"iter \d+: loss (\S+), time (\S+)ms")
# The project's goals: tokens/s over those of the fastest nanoGPT, on 2 CPU cores with 6 layers of 384
ON_CPU = {("byte", "fp32"): 1.05, ("byte", "bf16"): 1.35, ("bpe", "fp32"): 1.25, ("bpe", "bf16"): 1.5}
ON_GPU = {"nanogpt": 1.4, "nanogpt-compiled": 1.05}  # one H200, fp16, the 857m script's model
UNKNOWN = "-"
STEPS_SHOWN = 6


@dataclass(frozen=True)
class Result:
    """A run; lists have an entry per step."""

    contestant: str
    round: int  # from 1
    step_s: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    first_step_s: float | None = None  # from launch until its end was printed
    peak_bytes: int | None = None  # of the GPU's tensors; without a GPU, of the ranks' resident memory
    outside_s: float | None = None  # mean seconds of steps 2 to last, as their console lines say
    seconds: float = 0.0  # from launch to exit
    failure: str | None = None


def collect_result(contestant: Contestant, round_number: int, run: Watched, folder: Path, steps: int) -> Result:
    """From what was watched, and the figures that the run wrote into `folder`."""
    failure, records = None, []
    if run.exit_code is None:
        failure = "ended: the time of --minutes was up"
    elif run.exit_code:
        failure = f"exit code {run.exit_code}: {run.last_words}"
    elif contestant.kind in NANOGPT:
        found = filter(None, map(NANOGPT_LINE.match, run.output))
        records = [{"loss": float(line[1]), "seconds": float(line[2]) / 1000} for line in found]
    elif (folder / STEP_FILE).exists():
        records = [json.loads(line) for line in (folder / STEP_FILE).read_text(encoding="utf-8").splitlines()]
        if contestant.is_ours:  # on a GPU its own time of a step, which the host runs ahead of
            steps_only = [step for step in records if "ms" in step]
            records = [step | {"seconds": step.get("gpu_ms", step["ms"]) / 1000} for step in steps_only]
    if not failure and len(records) != steps:
        failure = f"wrote {len(records)} of {steps} steps"
    peaks = [record["peak_memory_bytes"] for record in records if record.get("peak_memory_bytes")]
    whole = run.seen.get(steps), run.seen.get(1)
    return Result(
        contestant.name,
        round_number,
        step_s=[] if failure else [record["seconds"] for record in records],
        losses=[] if failure else [record["loss"] for record in records],
        first_step_s=run.seen.get(1),
        peak_bytes=max(peaks) if peaks else run.peak_bytes,
        outside_s=(whole[0] - whole[1]) / (steps - 1) if steps > 1 and None not in whole else None,
        seconds=run.seconds,
        failure=failure,
    )


@dataclass(frozen=True)
class Line:
    """One contestant over all rounds; None where nothing was measured. Speeds are of all ranks together."""

    name: str
    ranks: int
    tokens_s: float | None = None  # of the median step
    slow_tokens_s: float | None = None  # 90 % of the steps were faster
    fast_tokens_s: float | None = None  # 10 % were
    step_s: float | None = None  # the median step after the warm-up
    first_step_s: float | None = None  # median over rounds
    peak_bytes: float | None = None  # largest
    tflops_full: float | None = None  # TFLOP/s of the whole job; all of the attention matrix counted
    tflops_causal: float | None = None  # the used half
    mfu_full: float | None = None  # of the GPUs' peak in the table
    mfu_causal: float | None = None
    ceiling_full: float | None = None  # share of what the machine's own matrix products reach
    ceiling_causal: float | None = None
    unexplained: float | None = None  # share of the time seen from outside that is in no step


@dataclass(frozen=True)
class Limits:
    """What a rate is compared with, in TFLOP/s; None: unknown."""

    peak: float | None = None  # of one GPU, from the table of hardware
    ceiling: float | None = None  # measured: of one GPU, or of the whole CPU

    def shares(self, tflops: float, ranks: int, device: str) -> tuple[float | None, float | None]:
        """(of the peak, of the ceiling) that a job with `tflops` on all its ranks reaches."""
        processors = ranks if device == "cuda" else 1
        return tuple(None if limit is None else tflops / processors / limit for limit in (self.peak, self.ceiling))


@dataclass(frozen=True)
class Ratio:
    """tokens/s of `ours` over those of `other`, in each round that both have finished."""

    ours: str
    other: str
    rounds: tuple[float, ...]
    goal: float | None = None

    @property
    def median(self) -> float | None:
        return median(self.rounds) if self.rounds else None


def summarize_runs(
    name: str, ranks: int, results: list[Result], work: Work, warm_up: int, limits: Limits = Limits()
) -> Line:
    """`results`: of all contestants; those of this one that succeeded count. The first `warm_up` steps do not."""
    good = [result for result in results if result.contestant == name and not result.failure]
    if not good:
        return Line(name, ranks)
    times = [seconds for result in good for seconds in result.step_s[warm_up:]]
    fast_s, slow_s = np.percentile(times, (FAST, SLOW)).tolist()
    figures = {}
    for way, causal in (("full", False), ("causal", True)):
        tflops = step_flops(work.shape, work.global_batch, causal) / median(times) / 1e12
        figures[f"tflops_{way}"] = tflops
        figures[f"mfu_{way}"], figures[f"ceiling_{way}"] = limits.shares(tflops, ranks, work.device)
    return Line(
        name,
        ranks,
        tokens_s=work.tokens_per_step / median(times),
        slow_tokens_s=work.tokens_per_step / slow_s,
        fast_tokens_s=work.tokens_per_step / fast_s,
        step_s=median(times),
        first_step_s=_of_known(median, [result.first_step_s for result in good]),
        peak_bytes=_of_known(max, [result.peak_bytes for result in good]),
        unexplained=_of_known(
            median, [1 - mean(result.step_s[1:]) / result.outside_s if result.outside_s else None for result in good]
        ),
        **figures,
    )


def collect_ratios(contestants: list[Contestant], results: list[Result], work: Work, warm_up: int) -> list[Ratio]:
    """Of each of ours with the fastest nanoGPT of each round, with every other yardstick, and with the first of ours."""
    vocabulary = next((name for name, number in VOCABULARIES.items() if number == work.vocabulary), None)
    usual = all(getattr(work, name) == value for name, value in SIZES[work.device].items())
    found = []
    for ours in (one for one in contestants if one.is_ours):
        others = [one for one in contestants if not one.is_ours or (one is contestants[0] and one is not ours)]
        pairs = {(one.name,): None for one in others}
        nanogpts = tuple(one.name for one in others if one.kind in NANOGPT)
        if work.device == "cuda" and usual and (vocabulary, work.precision) == ("bpe", "fp16"):
            pairs = {names: ON_GPU.get(names[0]) for names in pairs}
        elif work.device == "cpu" and nanogpts:
            pairs = {nanogpts: ON_CPU.get((vocabulary, work.precision)) if usual else None} | pairs
        found += [compute_ratio(ours.name, list(names), results, warm_up, goal) for names, goal in pairs.items()]
    return found


def compute_ratio(
    ours: str, others: list[str], results: list[Result], warm_up: int, goal: float | None = None
) -> Ratio:
    """Of several others the fastest one of each round. Rounds in which one of all failed are left out."""
    median_s = {
        (result.round, result.contestant): median(result.step_s[warm_up:]) for result in results if not result.failure
    }
    rounds = sorted({number for number, _ in median_s})
    complete = [number for number in rounds if {(number, name) for name in (ours, *others)} <= median_s.keys()]
    fastest_s = {number: min(median_s[number, other] for other in others) for number in complete}
    name = others[0] if len(others) == 1 else f"the fastest of {', '.join(others)}"
    return Ratio(ours, name, tuple(fastest_s[number] / median_s[number, ours] for number in complete), goal)


def loss_table(results: list[Result]) -> dict[str, list[float | None]]:
    """{contestant: loss of each step, the mean over rounds}."""
    good = {}
    for result in results:
        if not result.failure:
            good.setdefault(result.contestant, []).append(result.losses)
    return {name: [_of_known(mean, step) for step in zip(*runs)] for name, runs in good.items()}


def loss_distance(losses: dict[str, list[float | None]]) -> float | None:
    """How far the contestants' losses are apart over the last half of the steps, as a share of their mean."""
    halves = [[loss for loss in column[len(column) // 2 :] if loss is not None] for column in losses.values()]
    means = [mean(half) for half in halves if half]
    return (max(means) - min(means)) / mean(means) if len(means) > 1 else None


def _of_known(function: Callable, values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return function(known) if known else None


# --- as text


def describe_speeds(lines: list[Line], threads: int, device: str) -> list[str]:
    """A line per contestant. `threads`: of all ranks together."""
    memory = "GPU memory" if device == "cuda" else "ranks' memory"
    with_mfu = any(line.mfu_full is not None for line in lines)
    mfu = ["MFU full, causal"] if with_mfu else []
    rows = [
        ["", "ranks x threads", "tokens/s", "of 80% of steps", "step", "first step", memory, *mfu, "of the ceiling"]
    ]
    for line in lines:
        many = f"{line.ranks} x {max(threads // line.ranks, 1)}"
        row = [line.name, many, *[UNKNOWN] * (len(rows[0]) - 2)]
        if line.tokens_s is not None:
            row[2:5] = [
                count(line.tokens_s),
                f"{count(line.slow_tokens_s)} to {count(line.fast_tokens_s)}",
                f"{1000 * line.step_s:,.0f} ms",
            ]
        if line.first_step_s is not None:
            row[5] = f"{line.first_step_s:.1f} s"
        if line.peak_bytes is not None:
            row[6] = size(line.peak_bytes)
        if line.mfu_full is not None:
            row[7] = f"{line.mfu_full:.1%}, {line.mfu_causal:.1%}"
        if line.ceiling_full is not None:
            row[-1] = f"{line.ceiling_full:.1%}, {line.ceiling_causal:.1%}"
        rows.append(row)
    return _aligned(rows)


def describe_ceiling(tflops: list[float | None], device: str) -> list[str]:
    """What the last column is a share of. `tflops`: measured before and after the contestants ran."""
    where = "one GPU" if device == "cuda" else "this machine"
    found = " and ".join(f"{1000 * one:,.0f}" for one in tflops if one is not None)
    words = (
        f"ceiling: {where} multiplies the model's own matrices at {found} GFLOP/s, before and after; shares are of the "
        "larger, attention counted in full and causally"
    )
    return [words] if found else []


def describe_ratios(found: list[Ratio]) -> list[str]:
    """A line per pair."""
    rows = [["tokens/s of", "over those of", "median", "range", "goal", "rounds"]]
    for ratio in found:
        row = [ratio.ours, ratio.other, UNKNOWN, UNKNOWN, UNKNOWN, str(len(ratio.rounds))]
        if ratio.median is not None:
            row[2:4] = f"{ratio.median:.2f}", f"{min(ratio.rounds):.2f} to {max(ratio.rounds):.2f}"
        if ratio.median is not None and ratio.goal is not None:
            row[4] = f"{ratio.goal:g} {'reached' if ratio.median >= ratio.goal else 'missed'}"
        rows.append(row)
    return _aligned(rows, left=2)


def describe_losses(columns: dict[str, list[float | None]]) -> list[str]:
    """A line per step, of at most STEPS_SHOWN steps; a column per contestant."""
    steps = len(next(iter(columns.values()), []))
    rows = [["loss at step", *columns]]
    for step in sorted({round(1 + k * (steps - 1) / max(STEPS_SHOWN - 1, 1)) for k in range(STEPS_SHOWN) if steps}):
        values = [column[step - 1] for column in columns.values()]
        rows.append([str(step), *(UNKNOWN if value is None else f"{value:.3f}" for value in values)])
    return _aligned(rows)


def describe_doubts(
    lines: list[Line], columns: dict[str, list[float | None]], load_before: float, cores: int
) -> list[str]:
    """What speaks against the figures; nothing if nothing does."""
    found = []
    apart = loss_distance(columns)
    if apart is not None and apart > CLOSE_LOSSES:
        found.append(f"note: the last half's losses are {apart:.0%} apart: the contestants may not do the same work")
    for line in lines:
        if line.unexplained is not None and abs(line.unexplained) > CLOSE_TIMES:
            share = f"{1 - line.unexplained:.0%}"
            found.append(f"note: {line.name}: its steps add up to {share} of the time seen from outside")
    if load_before > 0.25 * cores:
        found.append(
            f"note: this machine was not idle (load {load_before:.1f} on {cores} cores before the start): the "
            "ratios count, not the absolute figures"
        )
    return found


def _aligned(rows: list[list[str]], left: int = 1) -> list[str]:
    """Columns as wide as needed, numbers to the right but the first `left` ones; nothing for a head without rows."""
    if len(rows) == 1:
        return []
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if at < left else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("   ".join(cells).rstrip())
    return lines
