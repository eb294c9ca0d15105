"""Builds the instruments that the flags ask for on this rank."""

import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from megatron_lite.config.args import ProfileArgs
from megatron_lite.config.plan import Plan
from megatron_lite.config.world import World
from megatron_lite.instruments.base import Instrument, Tell, Window
from megatron_lite.instruments.hardware_sampler import HardwareSampler, open_sensors
from megatron_lite.instruments.host_counters import HostCounters
from megatron_lite.instruments.memory_history import CpuRecorder, CudaRecorder, MemoryHistory, MemoryRecorder
from megatron_lite.instruments.memory_oom import OutOfMemoryWatch, PredictPeak, list_remedies
from megatron_lite.instruments.nsys_range import NsysRange
from megatron_lite.instruments.on_demand import OnDemand
from megatron_lite.instruments.snapshot_format import make_snapshot_folder, name_snapshot
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.instruments.torch_profiler import TorchProfiler
from megatron_lite.parallel.layers import count_compilations
from megatron_lite.parallel.rank_status import RunPosition, StageWait
from megatron_lite.thresholds import MAX_BEFORE, MIN_BEFORE

if TYPE_CHECKING:
    from torch._dynamo.callback import CallbackArgs, CompilationCallbackHandler


class WhereaboutsKeeper(Instrument):
    """Keeps this rank's step and phase where the watchdog reports them to other ranks.

    Takes less than a microsecond per phase.
    """

    def __init__(self, where: RunPosition) -> None:
        self._where = where

    def resume(self, iteration: int) -> None:
        self._where.started_at = iteration

    def begin(self, step: int) -> None:
        self._where.step = step

    def wait_for_stage(self, rank: int, what: str) -> None:
        self._where.stage_wait = StageWait(rank, what) if what else None

    def begin_phase(self, name: str) -> None:
        self._where.enter(name)

    def end_phase(self, name: str, failed: bool) -> None:
        if not failed:  # keep the phase in which the step failed
            self._where.enter(None)


WARMING_UP = 1  # the first step of a run allocates, compiles and fills caches
STEPS_AFTER = 20  # steps compared after the window
MIN_LINGERING = 1.05  # a smaller ratio is noise


class Disturbance(Instrument):
    """Reports how much slower profiled steps were, and a window that was never reached.

    Runs on one rank. Its `end` is called after the timeline's, when a step's time is known.

    Args:
        timeline: The one that measures steps.
        profile: The flags of profiling.
        world: The job's processes, one per rank, and this one's place among them.
        tell: Called with each line for the console.
    """

    def __init__(self, timeline: Timeline, profile: ProfileArgs, world: World, tell: Tell) -> None:
        self.window = timeline.window
        self.timeline = timeline
        self._tell = tell
        self._where = f" on rank {world.rank}" if world.size > 1 else ""
        cupti = world.gpus > 0 and not world.under_nsys  # torch.profiler records GPUs with CUPTI
        self._cupti_on_demand = cupti
        self._cupti_planned = cupti and profile.use_pytorch_profiler
        self._cupti = False  # CUPTI was used
        self._planned = timeline.window.steps
        self._step = 0
        self._before: deque[float] = deque(maxlen=MAX_BEFORE)  # seconds of a step
        self._inside: list[float] = []
        self._after: list[float] = []
        self._usual: float | None = None  # usual seconds before the window; None where steps are not compared with it

    def begin(self, step: int) -> None:
        self._step = step
        window = self.window
        if step == 1 and self._planned and self._planned.start > window.last_step and window.started_at:
            self._tell(
                f"--profile-step-start {self._planned.start} counts this run's own steps, and there are "
                f"{window.last_step} left of it: nothing will be profiled. Give a smaller one."
            )

    def end(self, step: int) -> None:
        seconds = self.timeline.current.training_seconds
        if step in self.window.steps:
            self._inside.append(seconds)
        elif step > WARMING_UP and not self.window.disturbs(step):
            self._before.append(seconds)
            if self._usual is not None:
                self._after.append(seconds)
        if self._usual is not None and len(self._after) == STEPS_AFTER:
            self._compare_after(self._usual)
        if self.window.closes(step):
            self._compare()

    def close(self, error: BaseException | None) -> None:
        if self._inside:
            self._compare()
        if self._planned and self._step < self._planned.start:
            self._tell(
                f"--profile-step-start {self._planned.start} was never reached: the run ended after "
                f"{self._step} of its steps, so there is no profile."
            )

    def _compare_after(self, usual: float) -> None:
        """Compare the steps after the window with the usual ones before it.

        CUPTI, once it was used, stays attached and may slow every later step down (pytorch issue 144455).
        """
        ratio = median(self._after) / usual
        self._usual = None
        self._after = []
        if self._cupti and ratio > MIN_LINGERING:
            self._tell(
                f"steps after the profile{self._where} take {ratio:.2f} x as long as those before it: "
                "CUPTI may have "
                "stayed attached, which TEARDOWN_CUPTI=1 in the environment prevents."
            )

    def _compare(self) -> None:
        """Compare the profiled steps with those before them."""
        inside = self._inside
        self._inside = []
        self._cupti |= self._cupti_on_demand if self.window.on_demand else self._cupti_planned
        if len(self._before) < MIN_BEFORE:
            self._tell(
                f"profiled steps cannot be compared with those before: {MIN_BEFORE} after the run's first are needed, "
                f"{len(self._before)} could be timed."
            )
            return
        usual = median(self._before)
        self._usual = usual
        self._after = []
        during_ms = 1000 * median(inside)
        before_ms = 1000 * usual
        self._tell(
            f"profiled steps{self._where} took {during_ms / before_ms:.2f} x as long as those before: "
            f"median {during_ms:.1f} ms of "
            f"{len(inside)} against {before_ms:.1f} ms of {len(self._before)}"
        )


class Compiling(Instrument):
    """Marks the steps in which torch.compile compiled, and reports each.

    A GPU's kernels are timed and chosen when they first run; torch does not report that, so the seconds leave it out.

    Args:
        timeline: The one that measures steps.
        expected: Graphs of a run as it should be. More of them are reported when the run ends.
        tell: Called with each line for the console.
    """

    _handler: "CompilationCallbackHandler"
    _counters: Mapping[str, Mapping[str, int]]

    def __init__(self, timeline: Timeline, expected: int, tell: Tell) -> None:
        self._timeline = timeline
        self._expected = expected
        self._tell = tell
        self.compilations = 0
        self.seconds = 0.0
        self._since: float | None = None
        # what was reported so far
        self._told_compilations = 0
        self._told_seconds = 0.0
        self._told_hits = 0

    def open(self) -> None:
        from torch._dynamo.callback import callback_handler  # takes a second, and only runs that compile have this
        from torch._dynamo.utils import counters

        self._handler = callback_handler
        self._counters = counters
        self._told_hits = self._count_cache_hits()
        self._handler.register_start_callback(self._begins)
        self._handler.register_end_callback(self._ends)

    def end(self, step: int) -> None:
        hits = self._count_cache_hits()
        graphs = self.compilations - self._told_compilations
        seconds = self.seconds - self._told_seconds
        cached = hits - self._told_hits
        self._told_compilations = self.compilations
        self._told_seconds = self.seconds
        self._told_hits = hits
        if graphs:
            plural = "s" if graphs > 1 else ""
            self._tell(f"   compiled {graphs} graph{plural} in {seconds:.1f} s (from the cache: {cached})")

    def close(self, error: BaseException | None) -> None:
        self._handler.remove_start_callback(self._begins)
        self._handler.remove_end_callback(self._ends)
        self.end(0)
        if self.compilations > self._expected:
            self._tell(
                f"--torch-compile compiled {self.compilations} graphs, where {self._expected} were expected: something "
                "about the inputs of layers changes; start with TORCH_LOGS=recompiles to see what"
            )

    def _begins(self, happening: "CallbackArgs") -> None:
        self._since = time.perf_counter()
        self._timeline.current.compiling = True
        if happening.callback_trigger.name == "DYNAMO":  # others: backward, kernels of the same graph
            self.compilations += 1

    def _ends(self, happening: "CallbackArgs") -> None:
        if self._since is None:  # compilation began before this instrument was opened
            return
        seconds = time.perf_counter() - self._since
        self._since = None
        self.seconds += seconds
        self._timeline.current.compile_seconds += seconds

    def _count_cache_hits(self) -> int:
        """Count the graphs that the compile cache held, from an earlier run or from another rank."""
        return self._counters["aot_autograd"]["autograd_cache_hit"]


def build_sampler(plan: Plan) -> HardwareSampler | None:
    """Build what samples this rank's hardware beside its steps; None where that is switched off.

    Without lines of ranks there is no place for what it finds.
    """
    watch = plan.args.watch
    if not watch.hardware_samples or not watch.step_timeline:
        return None
    sensors = open_sensors(plan.world.gpu if plan.device == "cuda" else None)
    return HardwareSampler(sensors, HostCounters())


def build_instruments(
    plan: Plan, run_dir: Path, timeline: Timeline, tell: Tell, predict_peak: PredictPeak | None = None
) -> list[Instrument]:
    """Build the instruments that this rank needs, outermost first.

    Args:
        plan: The run's, on this rank.
        run_dir: Folder that they write into.
        timeline: The one that measures steps.
        tell: Called with each line for the console.
        predict_peak: What remedies for too little memory are foretold by; None: without.
    """
    profile = plan.args.profile
    world = plan.world
    on_gpu = plan.device == "cuda"
    # beside the window, a GPU's profiler gets ready, and other ranks wait for those that write
    is_followed = on_gpu or world.size > 1
    window = Window(plan.profile_window, margin=1 if is_followed else 0, train_iters=plan.train_iters)
    timeline.window = window
    timeline.set_up(detailed=plan.args.watch.step_timeline, cuda=on_gpu)
    profiled = world.rank in plan.profile_ranks
    torch_is_blind = world.under_nsys and on_gpu  # nsys holds the GPU's counters, also where nothing asked it to record
    members: list[Instrument] = []
    if plan.compilation.layers:
        expected = count_compilations(plan)
        members.append(Compiling(timeline, expected, tell if world.rank == 0 else _drop_line))
    members += _build_window_watchers(plan, run_dir, timeline, tell)
    for_nsys = profile.profile and not profile.use_pytorch_profiler and profiled
    if (for_nsys or profile.nvtx_ranges) and (on_gpu or world.under_nsys):  # some tool may record it
        members.append(NsysRange(window if for_nsys else Window(), profile, world, tell))
    members += build_memory_instruments(plan, window, tell, predict_peak)
    on_demand = profile.profile_on_demand and not torch_is_blind
    if profiled and (profile.use_pytorch_profiler or on_demand):
        folder = Path(plan.args.watch.tensorboard_dir or run_dir)
        members.append(TorchProfiler(window, profile, world.rank, on_gpu, folder, tell))
    return [*members, timeline]  # innermost: a step's time leaves out what the others do between steps


def _build_window_watchers(plan: Plan, run_dir: Path, timeline: Timeline, tell: Tell) -> list[Instrument]:
    """Build what moves the window on demand, and what compares the steps inside with those outside."""
    profile = plan.args.profile
    world = plan.world
    window = timeline.window
    leads = world.rank == min(plan.profile_ranks, default=-1)
    profiled = world.rank in plan.profile_ranks
    torch_is_blind = world.under_nsys and plan.device == "cuda"
    watchers: list[Instrument] = []
    # the rank that leads says when nothing can be recorded; the last one must not average those steps
    records = not torch_is_blind or profile.record_memory_history
    follows = (profiled or world.is_last) and records
    if profile.profile_on_demand and (leads or follows):
        watchers.append(OnDemand(window, plan, run_dir, tell))
    if leads and (profile.profile_on_demand or window.steps):
        watchers.append(Disturbance(timeline, profile, world, tell))
    return watchers


def _drop_line(text: str) -> None:
    """Report nothing: the ranks beside the first one compile the same graphs."""


def build_memory_instruments(
    plan: Plan, window: Window, tell: Tell, predict_peak: PredictPeak | None = None
) -> list[Instrument]:
    """Build the instruments that watch this rank's memory, outermost first.

    On a GPU every rank explains an out-of-memory error; the profiled ranks also record allocations.

    Args:
        plan: The run's, on this rank.
        window: The profiled steps.
        tell: Called with each line for the console.
        predict_peak: What remedies for too little memory are foretold by; None: without.

    Raises UserError if snapshots cannot be written.
    """
    profile = plan.args.profile
    world = plan.world
    recording = profile.record_memory_history and world.rank in plan.profile_ranks
    if plan.device == "cpu" and not recording:
        return []
    path = name_snapshot(profile.memory_snapshot_path, world.rank, len(plan.profile_ranks))
    if profile.record_memory_history:
        make_snapshot_folder(path, profile.memory_snapshot_path)
    recorder: MemoryRecorder
    if plan.device == "cuda":
        recorder = CudaRecorder(profile.memory_history_events)
    else:
        recorder = CpuRecorder(profile.memory_history_events)
    # a shortage is explained before recording is switched off; steps begin and end inside of what is recorded
    histories = [MemoryHistory(window, path, recorder, tell)] if recording else []
    shared = Path(profile.memory_snapshot_path) if profile.record_memory_history else None
    shortage = OutOfMemoryWatch(world.rank, shared, recorder, partial(list_remedies, plan, predict_peak), tell)
    return [shortage, *histories, recorder.place]
