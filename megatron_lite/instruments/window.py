"""The profiled steps of a run, on every path the same."""


class Window:
    """Steps `first` to `last`, both inside, counted from 1 at this run's start: range(A, B) leaves B out.

    `started_at` is the iteration that a resumed run starts from. Instruments open before the checkpoint is loaded,
    so it is told them when training starts. `margin`: steps before and after the window whose time is no
    ordinary one either, since profilers get ready in them and other ranks wait for the ranks that write.
    """

    def __init__(self, steps: range = range(0), started_at: int = 0, margin: int = 0):
        self.started_at, self.margin, self.on_demand = started_at, margin, False
        self.traced_on_demand = False  # a window that was asked for has left a trace
        self.move_to(steps)

    def move_to(self, steps: range, on_demand: bool = False):
        """Another window, for what is asked of a run while it goes on. Everyone who holds this object follows."""
        self.first, self.last, self.on_demand = steps.start, steps.stop - 1, on_demand

    def __bool__(self):
        return self.last >= self.first

    def __len__(self):
        return max(self.last - self.first + 1, 0)

    def __contains__(self, step: int):
        return self.first <= step <= self.last

    def disturbs(self, step: int) -> bool:
        """Whether averages of time leave this step out: it is in the window, or beside it."""
        return bool(self) and self.first - self.margin <= step <= self.last + self.margin

    def opens(self, step: int) -> bool:
        """Whether the window begins before this step."""
        return bool(self) and step == self.first

    def closes(self, step: int) -> bool:
        """Whether the window is over after this step."""
        return bool(self) and step == self.last

    def words(self, done_to: int | None = None) -> str:
        """'steps 110-111 of this run = iterations 210-211'; up to the step `done_to` if the run ended inside."""
        last = self.last if done_to is None else min(done_to, self.last)
        text = f"{_span('step', self.first, last)} of this run"
        if not self.started_at:
            return text
        return f"{text} = {_span('iteration', self.first + self.started_at, last + self.started_at)}"


def _span(unit: str, first: int, last: int) -> str:
    return f"{unit}s {first}-{last}" if last > first else f"{unit} {first}"
