"""How long training to a number of tokens takes, and how much arithmetic that is."""

from dataclasses import dataclass

from megatron_lite.config.flops import step_flops
from megatron_lite.config.plan import Plan
from megatron_lite.estimate.params import parameter_count

SECONDS_PER_HOUR, HOURS_PER_DAY = 3600, 24


@dataclass(frozen=True)
class Duration:
    """Of a whole training without pauses: no evaluation, no checkpoints, no restarts."""

    tokens: int
    gpus: int
    tokens_per_s: float  # of all ranks: a prediction's bound, or what was measured
    flops_causal: int  # of all ranks; conventions as in flops.step_flops
    flops_full: int
    flops_6nd: int  # 6 x parameters x tokens, all parameters counted (Hoffmann et al. 2022, Chinchilla, appendix F)

    @property
    def seconds(self) -> float:
        """Wall time."""
        return self.tokens / self.tokens_per_s

    @property
    def days(self) -> float:
        """Wall time."""
        return self.seconds / SECONDS_PER_HOUR / HOURS_PER_DAY

    @property
    def gpu_hours(self) -> float:
        """Wall time times GPUs: what clouds ask money for."""
        return self.gpus * self.seconds / SECONDS_PER_HOUR


def duration_of(plan: Plan, tokens_per_s: float, tokens: int | None = None) -> Duration:
    """To `tokens`, or to the end of the plan (--train-iters, --train-samples), at `tokens_per_s` of all ranks."""
    tokens = plan.train_samples * plan.shape.seq_length if tokens is None else tokens
    return Duration(
        tokens=tokens,
        gpus=plan.world.size,
        tokens_per_s=tokens_per_s,
        flops_causal=tokens * step_flops(plan.shape, 1, causal=True) // plan.shape.seq_length,
        flops_full=tokens * step_flops(plan.shape, 1, causal=False) // plan.shape.seq_length,
        flops_6nd=6 * parameter_count(plan.shape) * tokens,
    )
