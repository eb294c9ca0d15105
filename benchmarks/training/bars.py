"""The project's goals for speed beside others, and who has to take part to judge them."""

from benchmarks.training.contestants import Contestant
from benchmarks.training.result import Result
from benchmarks.training.summary import Ratio, ratio_of
from benchmarks.training.work import SIZES, VOCABULARIES, Work

PLAIN, COMPILED, HUGGING_FACE = "plain", "plain-compiled", "hf"
CONTESTANTS = {"cpu": ["ours", "ours@2", PLAIN, COMPILED, HUGGING_FACE], "cuda": ["ours", PLAIN, COMPILED]}
# tokens/s over those of the faster of plain and plain-compiled, and over Hugging Face's: 2 CPU cores, 6 layers of 384
ON_CPU = {
    ("byte", "fp32"): (1.15, 1.4),
    ("byte", "bf16"): (1.35, 1.8),
    ("bpe", "fp32"): (1.5, 1.5),
    ("bpe", "bf16"): (2.7, 2.7),
}
ON_GPU = {PLAIN: 1.4, COMPILED: 1.05}  # one H200, fp16, the 857m script's model


def bars_of(
    contestants: list[Contestant], results: list[Result], work: Work, warm_up: int
) -> list[tuple[Ratio, float | None]]:
    """(ratio, goal) of each of ours with each yardstick that took part; None: there is no goal for such work."""
    here = [one.name for one in contestants]
    pairs = [(others, goal) for others, goal in _goals(work) if set(others) <= set(here)]
    return [
        (ratio_of(one.name, others, results, warm_up), goal)
        for one in contestants
        if one.is_ours
        for others, goal in pairs
    ]


def _goals(work: Work) -> list[tuple[list[str], float | None]]:
    vocabulary = next((name for name, number in VOCABULARIES.items() if number == work.vocabulary), None)
    usual = all(getattr(work, name) == value for name, value in SIZES[work.device].items())
    if work.device == "cuda":
        judged = usual and (vocabulary, work.precision) == ("bpe", "fp16")
        return [([name], goal if judged else None) for name, goal in ON_GPU.items()]
    plain, hugging_face = ON_CPU.get((vocabulary, work.precision), (None, None)) if usual else (None, None)
    return [([PLAIN, COMPILED], plain), ([HUGGING_FACE], hugging_face)]
