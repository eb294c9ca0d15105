"""Time of ordinary steps: what a profile or compilation slowed down is left out of averages."""


class IntervalTimer:
    """One interval's seconds, by whether the step they passed in was disturbed."""

    def __init__(self, timeline):
        self._timeline = timeline
        self.start()

    def start(self):
        """Begin a new interval."""
        self._mark = self._timeline.training_seconds()
        self._clean_seconds = self._disturbed_seconds = 0.0
        self.left_out: list[int] = []  # iterations
        self._compiling = 0  # of them
        self._steps = 0

    def step(self, iteration: int):
        """The step of this iteration has run."""
        self.lap()
        self._steps += 1
        if self._timeline.current.disturbed:
            self.left_out.append(iteration)
            self._compiling += self._timeline.current.compiling

    def lap(self):
        """Time up to now goes to the running step."""
        now = self._timeline.training_seconds()
        if self._timeline.current.disturbed:
            self._disturbed_seconds += now - self._mark
        else:
            self._clean_seconds += now - self._mark
        self._mark = now

    @property
    def nothing_clean(self) -> bool:
        """Every step of the interval was disturbed: averages are theirs, for want of others."""
        return len(self.left_out) == self._steps

    @property
    def seconds(self) -> float:
        """Of the steps that averages are made of."""
        return self._disturbed_seconds if self.nothing_clean else self._clean_seconds

    def averaged(self, iterations: list[int]) -> set[int]:
        """Those of the interval's iterations that averages are made of."""
        return set(iterations) if self.nothing_clean else set(iterations) - set(self.left_out)

    def words(self) -> str | None:
        """What averages leave out, for the console; None if nothing."""
        if not self.left_out:
            return None
        kinds = {"profiled": len(self.left_out) - self._compiling, "compiling": self._compiling}
        number = " and ".join(f"{n} {kind}" for kind, n in kinds.items() if n)
        number += " step" if len(self.left_out) == 1 else " steps"
        if self.nothing_clean:
            return f"   time and throughput are of {number}: there was no other since the last line"
        return f"   time and throughput leave out {number}"
