"""Which instruments watch this rank: the only place that asks what is to be profiled."""

import time
from collections import deque
from pathlib import Path
from statistics import median

from megatron_lite.config.plan import Plan
from megatron_lite.instruments.base import Instrument, Window
from megatron_lite.instruments.memory_history import CpuRecorder, CudaRecorder, MemoryHistory
from megatron_lite.instruments.memory_oom import OutOfMemory
from megatron_lite.instruments.nsys_range import NsysRange
from megatron_lite.instruments.on_demand import OnDemand
from megatron_lite.instruments.snapshot_format import SnapshotFiles
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.instruments.torch_profiler import Details, TorchProfiler
from megatron_lite.parallel.layers import expected_compilations
from megatron_lite.parallel.rank_store import RunPosition
from megatron_lite.thresholds import MIN_BEFORE


class _Stay:
    """Around one phase; the same object each time, since phases of a kind do not nest."""

    def __init__(self, where: RunPosition, name: str):
        self._where, self._name = where, name

    def __enter__(self):
        self._where.enter(self._name)

    def __exit__(self, *exception):
        if exception[0] is None:  # else the phase is where it failed
            self._where.enter(None)


class WhereaboutsKeeper(Instrument):
    """Step and phase, for the other ranks' eyes. Costs less than a microsecond per phase."""

    same_contexts = True

    def __init__(self, where: RunPosition):
        self._where, self._stays = where, {}

    def resume(self, iteration: int):
        self._where.started_at = iteration

    def begin(self, step: int):
        self._where.step = step

    def phase(self, name):
        return self._stays.setdefault(name, _Stay(self._where, str(name)))


MAX_BEFORE = 50  # steps before the window that are remembered
WARMING_UP = 1  # the first step of a run allocates, compiles and fills caches
STEPS_AFTER, MIN_LINGERING = 20, 1.05  # ratio; smaller ones are noise


class Disturbance(Instrument):
    """Tells how much slower profiled steps were, and that a window cannot or did not come. On one rank, outside of the timeline,
    so that a step's time is complete when `end` is called.

    last_step: gives this run's last step. cupti_...: in such a window torch.profiler records a GPU. rank: this one, where
    there are several.
    """

    def __init__(
        self,
        window: Window,
        timeline: Timeline,
        last_step,
        tell,
        *,
        cupti_planned=False,
        cupti_on_demand=False,
        rank=None,
    ):
        self.window, self.timeline, self._last_step, self._tell = window, timeline, last_step, tell
        self._asked = range(window.first, window.last + 1)
        self._before: deque[float] = deque(maxlen=MAX_BEFORE)  # seconds of a step
        self._inside: list[float] = []
        self._after: list[float] = []
        self._usual: float | None = None  # before the window, while steps after it are compared with that
        self._cupti_in, self._cupti = {False: cupti_planned, True: cupti_on_demand}, False
        self._step = 0
        self._where = "" if rank is None else f" on rank {rank}"

    def begin(self, step: int):
        self._step = step
        if step == 1 and self._asked and self._asked.start > self._last_step() and self.window.started_at:
            self._tell(
                f"--profile-step-start {self._asked.start} counts this run's own steps, and there are "
                f"{self._last_step()} left of it: nothing will be profiled. Give a smaller one."
            )

    def end(self, step: int):
        seconds = self.timeline.current.training_seconds
        if step in self.window:
            self._inside.append(seconds)
        elif step > WARMING_UP and not self.window.disturbs(step):
            self._before.append(seconds)
            if self._usual is not None:
                self._compare_after(seconds)
        if self.window.closes(step):
            self._compare_inside()

    def close(self, error: BaseException | None):
        if self._inside:
            self._compare_inside()
        if self._asked and self._step < self._asked.start:
            self._tell(
                f"--profile-step-start {self._asked.start} was never reached: the run ended after "
                f"{self._step} of its steps, so there is no profile."
            )

    def _compare_inside(self):
        inside, self._inside = self._inside, []
        self._cupti = self._cupti or self._cupti_in[self.window.on_demand]
        if len(self._before) < MIN_BEFORE:
            self._tell(
                f"profiled steps cannot be compared with those before: {MIN_BEFORE} after the run's first are needed, "
                f"{len(self._before)} could be timed."
            )
            return
        self._usual, self._after = median(self._before), []
        during, before = 1000 * median(inside), 1000 * self._usual
        self._tell(
            f"profiled steps{self._where} took {during / before:.2f} x as long as those before: median {during:.1f} ms of "
            f"{len(inside)} against {before:.1f} ms of {len(self._before)}"
        )

    def _compare_after(self, seconds: float):
        """CUPTI, once it was used, stays attached and may slow every later step down (pytorch issue 144455)."""
        self._after.append(seconds)
        if len(self._after) < STEPS_AFTER:
            return
        ratio, self._usual = median(self._after) / self._usual, None
        if self._cupti and ratio > MIN_LINGERING:
            self._tell(
                f"steps after the profile{self._where} take {ratio:.2f} x as long as those before it: CUPTI may have stayed "
                "attached, which TEARDOWN_CUPTI=1 in the environment prevents."
            )


class Compiling(Instrument):
    """Marks steps that torch.compile slowed down, and tells of each. `expected`: compilations that need no word at the end.

    A GPU's kernels are tried out and chosen when they first run, which torch does not report: that is not in the seconds.
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
        if self._since is None:  # it began before this was opened
            return
        seconds, self._since = time.perf_counter() - self._since, None
        self.seconds += seconds
        self._timeline.current.compile_seconds += seconds

    def _count_cache_hits(self) -> int:
        """Graphs whose forward and backward were there from an earlier run, or from another rank."""
        return self._counters["aot_autograd"]["autograd_cache_hit"]


def build_instruments(plan: Plan, run_dir: Path, timeline: Timeline, tell) -> list[Instrument]:
    """The instruments of this rank, outermost first. One that does not concern it is not made."""
    p, world, on_gpu = plan.args.profile, plan.world, plan.device == "cuda"
    # beside the window, a GPU's profiler gets ready, and other ranks wait for those that write
    window = Window(plan.profile_window, margin=int(on_gpu or world.size > 1))
    timeline.window = window
    timeline.set_up(detailed=plan.args.watch.step_timeline, cuda=on_gpu)
    leads, profiled = world.rank == min(plan.profile_ranks, default=-1), world.rank in plan.profile_ranks
    torch_is_blind = world.under_nsys and on_gpu  # nsys holds the GPU's counters, also where nothing asked it to record
    # What a window on demand does. nsys does not record it: it was told before the run when to collect, and that is over
    # or taken after one window.
    records = "" if torch_is_blind else "profiling"
    if torch_is_blind and p.record_memory_history:
        records = "nsys holds the GPU's counters, so only memory is recorded in"

    def last_step() -> int:
        return plan.train_iters - window.started_at

    members: list[Instrument] = []
    if plan.compiles_layers:
        members.append(Compiling(timeline, expected_compilations(plan), tell if world.rank == 0 else lambda text: None))
    # the rank that leads says when nothing can be recorded; the last one must not average those steps
    if p.profile_on_demand and (leads or (profiled or world.is_last) and records):
        length = max(p.profile_step_end - max(p.profile_step_start, 1), 1)
        alone = plan.profile_ranks | {world.size - 1} == {world.rank}
        members.append(OnDemand(window, run_dir, length, leads, alone, last_step, tell, records))
    if leads and (p.profile_on_demand or window):
        cupti = on_gpu and not torch_is_blind
        several = world.rank if world.size > 1 else None
        cupti_planned = cupti and p.use_pytorch_profiler
        members.append(
            Disturbance(
                window, timeline, last_step, tell, cupti_planned=cupti_planned, cupti_on_demand=cupti, rank=several
            )
        )
    if nsys := build_nsys_range(plan, window, tell):
        members.append(nsys)
    members += build_memory_instruments(plan, window, tell)
    if profiled and (p.use_pytorch_profiler or p.profile_on_demand and not torch_is_blind):
        details = Details(
            cuda=on_gpu,
            shapes=p.pytorch_profiler_collect_shapes,
            stacks=p.pytorch_profiler_collect_callstack,
            memory=p.pytorch_profiler_collect_memory,
            flops=p.pytorch_profiler_collect_flops,
            chakra=p.pytorch_profiler_collect_chakra,
            modules=p.profile_modules,
            compress=True if p.profile_gzip else False if p.no_profile_gzip else None,
        )
        folder = Path(plan.args.watch.tensorboard_dir or run_dir)
        members.append(TorchProfiler(window, folder, world.rank, details, tell, not p.use_pytorch_profiler))
    return [*members, timeline]  # innermost: what the others do between steps is not the step's time


def build_nsys_range(plan: Plan, window: Window, tell) -> NsysRange | None:
    """This rank's instrument for Nsight Systems, if the plan wants one and a tool can be there to see it."""
    p, world = plan.args.profile, plan.world
    profiled = p.profile and not p.use_pytorch_profiler and world.rank in plan.profile_ranks
    if not (profiled or p.nvtx_ranges) or not (plan.device == "cuda" or world.under_nsys):
        return None
    first = world.rank - world.local_rank
    node = range(first, first + world.local_size)
    return NsysRange(
        window if profiled else Window(),
        plan.device,
        tell,
        rank=world.rank,
        size=world.size,
        neighbours=[rank for rank in node if rank in plan.profile_ranks and rank != world.rank],
        all_steps=p.nvtx_ranges,
        operators=p.record_shapes,
        under_nsys=world.under_nsys,
    )


def build_memory_instruments(plan: Plan, window: Window, tell) -> list[Instrument]:
    """What watches this rank's memory, outermost first. Raises UserError where snapshots could not be written.

    On a GPU every rank waits for memory to run out; the profiled ones record.
    """
    p, world = plan.args.profile, plan.world
    recording = p.record_memory_history and world.rank in plan.profile_ranks
    if plan.device == "cpu" and not recording:
        return []
    files = SnapshotFiles(p.memory_snapshot_path, world.rank, alone=len(plan.profile_ranks) == 1)
    if p.record_memory_history:
        files.prepare()
    recorder = (CudaRecorder if plan.device == "cuda" else CpuRecorder)(p.memory_history_events)
    dump = files.out_of_memory if p.record_memory_history else None
    watching = OutOfMemory(plan, recorder.place, dump, recorder, tell)
    history = MemoryHistory(window, files, recorder, lambda: plan.train_iters - window.started_at, tell)
    # a shortage is explained before recording is switched off; steps begin and end inside of what is recorded
    return [watching, *([history] if recording else []), recorder.place]
