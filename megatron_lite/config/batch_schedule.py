"""How many samples a step takes, as a function of the samples consumed so far."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSchedule:
    """Megatron's batch sizes: constant, or growing in equal steps over the first `ramp_samples`."""

    final: int  # global batch size at the end
    start: int = 0  # 0: no ramp-up
    increment: int = 0
    ramp_samples: int = 0

    def size(self, consumed: int) -> int:
        """Global batch of the step that starts after `consumed` samples."""
        if not self.start or consumed > self.ramp_samples or self.start == self.final:
            return self.final
        samples_per_increment = self.ramp_samples / ((self.final - self.start) // self.increment)
        return min(self.start + int(consumed / samples_per_increment) * self.increment, self.final)

    def iterations(self, samples: int) -> int:
        """Full steps that `samples` are enough for."""
        iterations, consumed = 0, 0
        while self.start and consumed <= self.ramp_samples and consumed + self.size(consumed) <= samples:
            consumed += self.size(consumed)
            iterations += 1
        return iterations + (samples - consumed) // self.final

    def samples(self, iterations: int) -> int:
        """Samples consumed by the first `iterations` steps."""
        if not self.start:
            return iterations * self.final
        consumed = 0
        for _ in range(iterations):
            consumed += self.size(consumed)
        return consumed
