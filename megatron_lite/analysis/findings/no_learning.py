"""The run computes, and its losses say that it does not learn.

Meaning: the loss of updates is NaN or Inf, or it is as high at the end as at the beginning. The steps may be as fast
    as they like.
Measured: losses in steps.jsonl, skipped steps left out: the mean of the first fifth against that of the last fifth,
    from 20 losses on; losses that are no numbers.
Cost: not time: trust in the run.
Do: not finite: stop, the weights are lost; go back to the last good checkpoint. Not falling: look at the learning
    rate and its warm-up, at labels that do not belong to their inputs, at data that is shuffled noise.
Flags: without --no-check-for-nan-in-loss-and-grad such a run stops; --lr, --lr-warmup-iters, --clip-grad.
False alarm: a benchmark with a learning rate of 0; data that the model knows already. Mock data and continued runs
    are not judged.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.run_settings import argument
from megatron_lite.analysis.run.learning import measure_learning
from megatron_lite.analysis.run_facts import Facts

CODE, TITLE = "no-learning", "losses that show no learning"


def find(facts: Facts) -> Finding | None:
    if facts.run is None:
        return None
    learning = measure_learning(facts.run)
    if learning.not_finite:
        advice = "go back to the last checkpoint before that, lower --lr, and drop --no-check-for-nan-in-loss-and-grad"
    elif learning.falls is not False or argument(facts, "mock_data") or facts.run.iterations[0] > 1:
        return None  # random tokens teach nothing, and a continued run may have learned what it can
    else:
        advice = "compare --lr and its warm-up with a run that learns, and look at the data (megatron-lite inspect)"
    seen = Evidence(learning.losses, "steps.jsonl")
    return Finding(evidence=(seen,), advice=advice, flags=("--lr",), certain=bool(learning.not_finite))
