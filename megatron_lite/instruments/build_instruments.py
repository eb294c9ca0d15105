"""Builds the instruments that the flags ask for on this rank."""

import time
from collections import deque
from functools import partial
from pathlib import Path
from statistics import median

from megatron_lite.config.args import ProfileArgs
from megatron_lite.config.plan import Plan
from megatron_lite.config.world import World
from megatron_lite.instruments.base import Instrument, Window
from megatron_lite.instruments.memory_history import CpuRecorder, CudaRecorder, MemoryHistory
from megatron_lite.instruments.memory_oom import OutOfMemory, PredictPeak, list_remedies
from megatron_lite.instruments.nsys_range import NsysRange
from megatron_lite.instruments.on_demand import OnDemand
from megatron_lite.instruments.snapshot_format import make_snapshot_folder, name_snapshot
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.instruments.torch_profiler import TorchProfiler
from megatron_lite.parallel.layers import count_compilations
from megatron_lite.parallel.rank_status import RunPosition, describe_hand_over
from megatron_lite.thresholds import MIN_BEFORE


class WhereaboutsKeeper(Instrument):
    """Keeps this rank's step and phase where the watchdog reports them to other ranks.

    Takes less than a microsecond per phase.
    """

    def __init__(self, where: RunPosition):
        self._where = where

    def resume(self, iteration: int):
        self._where.started_at = iteration

    def begin(self, step: int):
        self._where.step = step

    def wait_for_stage(self, rank, what):
        self._where.hand_over = describe_hand_over(rank, what) if what else None

    def begin_phase(self, name: str):
        self._where.enter(name)

    def end_phase(self, name: str, failed: bool):
        if not failed:  # keep the phase in which the step failed
            self._where.enter(None)


MAX_BEFORE = 50  # steps before the window that are remembered
WARMING_UP = 1  # the first step of a run allocates, compiles and fills caches
STEPS_AFTER, MIN_LINGERING = 20, 1.05  # steps compared after the window; a smaller ratio is noise


class Disturbance(Instrument):
    """Reports how much slower profiled steps were, and a window that was never reached.

    Runs on one rank. Its `end` is called after the timeline's, when a step's time is known.
    """

    def __init__(self, timeline: Timeline, profile: ProfileArgs, world: World, tell):
        self.window, self.timeline, self._tell = timeline.window, timeline, tell
        self._where = f" on rank {world.rank}" if world.size > 1 else ""
        cupti = world.gpus > 0 and not world.under_nsys  # torch.profiler records GPUs with CUPTI
        self._cupti_on_demand, self._cupti_planned = cupti, cupti and profile.use_pytorch_profiler
        self._cupti = False  # CUPTI was used
        self._planned, self._step = timeline.window.steps, 0
        self._before: deque[float] = deque(maxlen=MAX_BEFORE)  # seconds of a step
        self._inside: list[float] = []
        self._after: list[float] = []
        self._usual: float | None = None  # usual seconds before the window; None where steps are not compared with it

    def begin(self, step: int):
        self._step, window = step, self.window
        if step == 1 and self._planned and self._planned.start > window.last_step and window.started_at:
            self._tell(
                f"--profile-step-start {self._planned.start} counts this run's own steps, and there are "
                f"{window.last_step} left of it: nothing will be profiled. Give a smaller one."
            )

    def end(self, step: int):
        seconds = self.timeline.current.training_seconds
        if step in self.window.steps:
            self._inside.append(seconds)
        elif step > WARMING_UP and not self.window.disturbs(step):
            self._before.append(seconds)
            if self._usual is not None:
                self._after.append(seconds)
        if len(self._after) == STEPS_AFTER:
            # CUPTI, once it was used, stays attached and may slow every later step down (pytorch issue 144455)
            ratio, self._usual, self._after = median(self._after) / self._usual, None, []
            if self._cupti and ratio > MIN_LINGERING:
                self._tell(
                    f"steps after the profile{self._where} take {ratio:.2f} x as long as those before it: "
                    "CUPTI may have "
                    "stayed attached, which TEARDOWN_CUPTI=1 in the environment prevents."
                )
        if self.window.closes(step):
            self._compare()

    def close(self, error: BaseException | None):
        if self._inside:
            self._compare()
        if self._planned and self._step < self._planned.start:
            self._tell(
                f"--profile-step-start {self._planned.start} was never reached: the run ended after "
                f"{self._step} of its steps, so there is no profile."
            )

    def _compare(self):
        inside, self._inside = self._inside, []
        self._cupti |= self._cupti_on_demand if self.window.on_demand else self._cupti_planned
        if len(self._before) < MIN_BEFORE:
            self._tell(
                f"profiled steps cannot be compared with those before: {MIN_BEFORE} after the run's first are needed, "
                f"{len(self._before)} could be timed."
            )
            return
        self._usual, self._after = median(self._before), []
        during, before = 1000 * median(inside), 1000 * self._usual
        self._tell(
            f"profiled steps{self._where} took {during / before:.2f} x as long as those before: "
            f"median {during:.1f} ms of "
            f"{len(inside)} against {before:.1f} ms of {len(self._before)}"
        )


class Compiling(Instrument):
    """Marks the steps in which torch.compile compiled, and reports each.

    A GPU's kernels are timed and chosen when they first run; torch does not report that, so the seconds leave it out.

    Args:
        expected: Graphs of a run as it should be. More of them are reported when the run ends.
    """

    def __init__(self, timeline: Timeline, expected: int, tell):
        self._timeline, self._expected, self._tell = timeline, expected, tell
        self.compilations, self.seconds = 0, 0.0
        self._since: float | None = None

    def open(self):
        from torch._dynamo.callback import callback_handler  # takes a second, and only runs that compile have this
        from torch._dynamo.utils import counters

        self._handler, self._counters = callback_handler, counters
        self._told = (0, 0.0, self._count_cache_hits())
        self._handler.register_start_callback(self._begins)
        self._handler.register_end_callback(self._ends)

    def end(self, step: int):
        now = (self.compilations, self.seconds, self._count_cache_hits())
        graphs, seconds, cached = (value - before for value, before in zip(now, self._told))
        self._told = now
        if graphs:
            plural = "s" if graphs > 1 else ""
            self._tell(f"   compiled {graphs} graph{plural} in {seconds:.1f} s (from the cache: {cached})")

    def close(self, error: BaseException | None):
        self._handler.remove_start_callback(self._begins)
        self._handler.remove_end_callback(self._ends)
        self.end(0)
        if self.compilations > self._expected:
            self._tell(
                f"--torch-compile compiled {self.compilations} graphs, where {self._expected} were expected: something "
                "about the inputs of layers changes; start with TORCH_LOGS=recompiles to see what"
            )

    def _begins(self, happening):
        self._since = time.perf_counter()
        self._timeline.current.compiling = True
        self.compilations += happening.callback_trigger.name == "DYNAMO"  # others: backward, kernels of the same graph

    def _ends(self, happening):
        if self._since is None:  # compilation began before this instrument was opened
            return
        seconds, self._since = time.perf_counter() - self._since, None
        self.seconds += seconds
        self._timeline.current.compile_seconds += seconds

    def _count_cache_hits(self) -> int:
        """Number of graphs that the compile cache held, from an earlier run or from another rank."""
        return self._counters["aot_autograd"]["autograd_cache_hit"]


def build_instruments(
    plan: Plan, run_dir: Path, timeline: Timeline, tell, predict_peak: PredictPeak | None = None
) -> list[Instrument]:
    """Build the instruments that this rank needs, outermost first.

    Args:
        plan: The run's, on this rank.
        run_dir: Where they write.
        timeline: The one that measures steps.
        tell: Called with each line for the console.
        predict_peak: What remedies for too little memory are foretold by; None: without.
    """
    p, world, on_gpu = plan.args.profile, plan.world, plan.device == "cuda"
    # beside the window, a GPU's profiler gets ready, and other ranks wait for those that write
    window = Window(plan.profile_window, margin=int(on_gpu or world.size > 1), train_iters=plan.train_iters)
    timeline.window = window
    timeline.set_up(detailed=plan.args.watch.step_timeline, cuda=on_gpu)
    leads, profiled = world.rank == min(plan.profile_ranks, default=-1), world.rank in plan.profile_ranks
    torch_is_blind = world.under_nsys and on_gpu  # nsys holds the GPU's counters, also where nothing asked it to record
    members: list[Instrument] = []
    if plan.compilation.layers:
        expected = count_compilations(plan.shape, plan.compilation)
        members.append(Compiling(timeline, expected, tell if world.rank == 0 else lambda text: None))
    # the rank that leads says when nothing can be recorded; the last one must not average those steps
    records = not torch_is_blind or p.record_memory_history
    if p.profile_on_demand and (leads or (profiled or world.is_last) and records):
        members.append(OnDemand(window, plan, run_dir, tell))
    if leads and (p.profile_on_demand or window.steps):
        members.append(Disturbance(timeline, p, world, tell))
    for_nsys = p.profile and not p.use_pytorch_profiler and profiled
    if (for_nsys or p.nvtx_ranges) and (on_gpu or world.under_nsys):  # some tool may record it
        members.append(NsysRange(window if for_nsys else Window(), p, world, tell))
    members += build_memory_instruments(plan, window, tell, predict_peak)
    if profiled and (p.use_pytorch_profiler or p.profile_on_demand and not torch_is_blind):
        folder = Path(plan.args.watch.tensorboard_dir or run_dir)
        members.append(TorchProfiler(window, p, world.rank, on_gpu, folder, tell))
    return [*members, timeline]  # innermost: a step's time leaves out what the others do between steps


def build_memory_instruments(
    plan: Plan, window: Window, tell, predict_peak: PredictPeak | None = None
) -> list[Instrument]:
    """The instruments that watch this rank's memory, outermost first. Raises UserError if snapshots cannot be written.

    On a GPU every rank explains an out-of-memory error; the profiled ranks also record allocations.
    """
    p, world = plan.args.profile, plan.world
    recording = p.record_memory_history and world.rank in plan.profile_ranks
    if plan.device == "cpu" and not recording:
        return []
    path = name_snapshot(p.memory_snapshot_path, world.rank, len(plan.profile_ranks))
    if p.record_memory_history:
        make_snapshot_folder(path, p.memory_snapshot_path)
    recorder = (CudaRecorder if plan.device == "cuda" else CpuRecorder)(p.memory_history_events)
    # a shortage is explained before recording is switched off; steps begin and end inside of what is recorded
    histories = [MemoryHistory(window, path, recorder, tell)] if recording else []
    shared = Path(p.memory_snapshot_path) if p.record_memory_history else None
    shortage = OutOfMemory(world.rank, shared, recorder, partial(list_remedies, plan, predict_peak), tell)
    return [shortage, *histories, recorder.place]
