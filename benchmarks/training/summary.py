"""What runs gave, and the arithmetic of the table: medians, spreads, ratios of rounds, goals."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import numpy as np

from benchmarks.training.contestants import STEP_FILE, Contestant
from benchmarks.training.process import Watched
from benchmarks.training.work import SIZES, VOCABULARIES, Work
from megatron_lite.analysis.run.step_lines import read_step_lines
from megatron_lite.config.flops import step_flops
from megatron_lite.run_folder import STEPS_FILE

FAST, SLOW = 10, 90  # percentiles of a step's time
CLOSE_LOSSES = 0.1  # of their mean: contestants start from different weights and read different windows
CLOSE_TIMES = 0.05
# The project's goals: tokens/s over those of the faster of plain and plain-compiled, and over Hugging Face's; 2 CPU cores,
# 6 layers of 384
ON_CPU = {
    ("byte", "fp32"): (1.15, 1.4),
    ("byte", "bf16"): (1.35, 1.8),
    ("bpe", "fp32"): (1.5, 1.5),
    ("bpe", "bf16"): (2.7, 2.7),
}
ON_GPU = {"plain": 1.4, "plain-compiled": 1.05}  # one H200, fp16, the 857m script's model


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


def result_of(contestant: Contestant, round_number: int, run: Watched, folder: Path, steps: int) -> Result:
    """From what was watched, and the figures that the run wrote into `folder`."""
    failure, records = None, []
    if run.exit_code is None:
        failure = "ended: the time of --minutes was up"
    elif run.exit_code:
        failure = f"exit code {run.exit_code}: {run.last_words}"
    elif contestant.is_ours and (folder / STEPS_FILE).exists():
        # on a GPU its own time of a step, which the host runs ahead of
        for step in read_step_lines(folder / STEPS_FILE).steps:
            records.append(step | {"seconds": step.get("gpu_ms", step["ms"]) / 1000})
    elif not contestant.is_ours and (folder / STEP_FILE).exists():
        records = [json.loads(line) for line in (folder / STEP_FILE).read_text(encoding="utf-8").splitlines()]
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

    @property
    def median(self) -> float | None:
        return median(self.rounds) if self.rounds else None


def line_of(name: str, ranks: int, results: list[Result], work: Work, warm_up: int, limits: Limits = Limits()) -> Line:
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


def ratio_of(ours: str, others: str | list[str], results: list[Result], warm_up: int) -> Ratio:
    """Of several others the faster one of each round. Rounds in which one of all failed are left out."""
    others = [others] if isinstance(others, str) else others
    median_s = {
        (result.round, result.contestant): median(result.step_s[warm_up:]) for result in results if not result.failure
    }
    rounds = sorted({number for number, _ in median_s})
    complete = [number for number in rounds if {(number, name) for name in (ours, *others)} <= median_s.keys()]
    fastest_s = {number: min(median_s[number, other] for other in others) for number in complete}
    name = others[0] if len(others) == 1 else f"the faster of {' and '.join(others)}"
    return Ratio(ours, name, tuple(fastest_s[number] / median_s[number, ours] for number in complete))


def bars_of(
    contestants: list[Contestant], results: list[Result], work: Work, warm_up: int
) -> list[tuple[Ratio, float | None]]:
    """(ratio, goal) of each of ours with each yardstick that took part; None: there is no goal for such work."""
    vocabulary = next((name for name, number in VOCABULARIES.items() if number == work.vocabulary), None)
    kind = (vocabulary, work.precision)
    usual = all(getattr(work, name) == value for name, value in SIZES[work.device].items())
    if work.device == "cuda":
        judged = usual and kind == ("bpe", "fp16")
        goals = [([name], goal if judged else None) for name, goal in ON_GPU.items()]
    else:
        plain, hugging_face = ON_CPU.get(kind, (None, None)) if usual else (None, None)
        goals = [(["plain", "plain-compiled"], plain), (["hf"], hugging_face)]
    here = {one.name for one in contestants}
    return [
        (ratio_of(one.name, others, results, warm_up), goal)
        for one in contestants
        if one.is_ours
        for others, goal in goals
        if set(others) <= here
    ]


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
