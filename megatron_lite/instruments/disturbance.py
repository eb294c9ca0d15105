"""What is said of a window: that it cannot or did not come, and how much it slowed its steps, and later ones, down."""

from collections import deque
from statistics import median

from megatron_lite.instruments.base import Instrument
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.instruments.window import Window
from megatron_lite.notable import FEWEST_BEFORE

REMEMBERED = 50  # steps before the window
WARMING_UP = 1  # the first step of a run allocates, compiles and fills caches
STEPS_AFTER, LINGERS = 20, 1.05  # ratio; smaller ones are noise


class Disturbance(Instrument):
    """On one rank only. Outside of the timeline, so that a step's time is complete when `end` is called."""

    def __init__(
        self,
        window: Window,
        timeline: Timeline,
        last_step,
        tell,
        cupti_planned: bool = False,
        cupti_on_demand: bool = False,
        rank: int | None = None,
    ):
        """`cupti_...`: in such a window torch.profiler records a GPU. `rank`: this one, where there are several."""
        self.window, self.timeline, self._last_step, self._tell = window, timeline, last_step, tell
        self._asked = range(window.first, window.last + 1)
        self._before: deque[float] = deque(maxlen=REMEMBERED)
        self._inside: list[float] = []
        self._cupti_in, self._cupti = {False: cupti_planned, True: cupti_on_demand}, False
        self._usual, self._after = None, []  # seconds of a step before the window; those after it
        self._steps, self._reached = 0, False
        self._where = "" if rank is None else f" on rank {rank}"

    def begin(self, step: int):
        if step == 1 and self._asked and self._asked.start > self._last_step() and self.window.started_at:
            self._tell(
                f"--profile-step-start {self._asked.start} counts this run's own steps, and there are "
                f"{self._last_step()} left of it: nothing will be profiled. Give a smaller one."
            )
        self._steps = step
        self._reached = self._reached or step in self._asked

    def end(self, step: int):
        seconds = self.timeline.current.training_seconds
        if step in self.window:
            self._inside.append(seconds)
        elif step > WARMING_UP and not self.window.disturbs(step):
            self._before.append(seconds)
            self._compare_after(seconds)
        if self.window.closes(step):
            self._say()

    def close(self, error: BaseException | None):
        if self._inside:
            self._say()
        if self._asked and not self._reached:
            self._tell(
                f"--profile-step-start {self._asked.start} was never reached: the run ended after "
                f"{self._steps} of its steps, so there is no profile."
            )

    def _compare_after(self, seconds: float):
        """CUPTI, once it was used, stays attached and may slow every later step down (pytorch issue 144455)."""
        if self._usual is None:
            return
        self._after.append(seconds)
        if len(self._after) < STEPS_AFTER:
            return
        ratio, self._usual = median(self._after) / self._usual, None
        if self._cupti and ratio > LINGERS:
            self._tell(
                f"steps after the profile{self._where} take {ratio:.2f} x as long as those before it: CUPTI may have stayed "
                "attached, which TEARDOWN_CUPTI=1 in the environment prevents."
            )

    def _say(self):
        inside, self._inside = self._inside, []
        self._cupti = self._cupti or self._cupti_in[self.window.on_demand]
        if len(self._before) < FEWEST_BEFORE:
            self._tell(
                f"profiled steps cannot be compared with those before: {FEWEST_BEFORE} after the run's first are needed, "
                f"{len(self._before)} could be timed."
            )
            return
        self._usual, self._after = median(self._before), []
        during, before = 1000 * median(inside), 1000 * self._usual
        self._tell(
            f"profiled steps{self._where} took {during / before:.2f} x as long as those before: median {during:.1f} ms of "
            f"{len(inside)} against {before:.1f} ms of {len(self._before)}"
        )
