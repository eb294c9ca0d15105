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

# --- what this rank tells the others of itself


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


# --- what is said of a window: that it cannot or did not come, and how much it slowed its steps, and later ones, down

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


# --- which steps torch.compile slowed down and for how long, and whether it compiled more often than it should


class Compiling(Instrument):
    """Marks steps in the timeline, and tells of each that compiled. `expected`: compilations that need no word at the end.

    A GPU's kernels are tried out and chosen when they first run, which torch does not report: that is not in the seconds.
    """

    def __init__(self, timeline: Timeline, expected: int, tell):
        self._timeline, self._expected, self._tell = timeline, expected, tell
        self.compilations, self.seconds = 0, 0.0
        self._told = (0, 0.0, 0)  # compilations, seconds, cache hits
        self._since: float | None = None

    def open(self):
        from torch._dynamo.callback import callback_handler  # takes a second, and only runs that compile have this
        from torch._dynamo.utils import counters

        self._handler, self._counters = callback_handler, counters
        self._told = (0, 0.0, self._cache_hits())
        self._handler.register_start_callback(self._begins)
        self._handler.register_end_callback(self._ends)

    def end(self, step: int):
        self._tell_of_new()

    def close(self, error: BaseException | None):
        self._handler.remove_start_callback(self._begins)
        self._handler.remove_end_callback(self._ends)
        self._tell_of_new()
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

    def _tell_of_new(self):
        now = (self.compilations, self.seconds, self._cache_hits())
        graphs, seconds, cached = (value - before for value, before in zip(now, self._told))
        self._told = now
        if graphs:
            self._tell(
                f"   compiled {graphs} graph{'s' if graphs > 1 else ''} in {seconds:.1f} s (from the cache: {cached})"
            )

    def _cache_hits(self) -> int:
        """Graphs whose forward and backward were there from an earlier run, or from another rank."""
        return self._counters["aot_autograd"]["autograd_cache_hit"]


def build_instruments(plan: Plan, run_dir: Path, timeline: Timeline, tell) -> list[Instrument]:
    """The instruments of this rank, outermost first. One that does not concern it is not made."""
    rank = plan.world.rank
    # beside the window, a GPU's profiler gets ready, and other ranks wait for those that write
    window = Window(plan.profile_window, margin=int(plan.device == "cuda" or plan.world.size > 1))
    timeline.window = window
    timeline.set_up(detailed=plan.args.watch.step_timeline, cuda=plan.device == "cuda")
    leads, profiled = rank == min(plan.profile_ranks, default=-1), rank in plan.profile_ranks
    members: list[Instrument] = []
    if plan.compiles_layers:
        members.append(Compiling(timeline, expected_compilations(plan), tell if rank == 0 else lambda text: None))
    on_demand = plan.args.profile.profile_on_demand
    nobody = not _records_on_demand(plan)  # then the rank that leads says so, and nobody follows
    if on_demand and (leads or (profiled or plan.world.is_last) and not nobody):  # the last rank must not average them
        members.append(_on_demand(plan, window, run_dir, leads, tell))
    if leads and (on_demand or window):
        members.append(
            Disturbance(
                window,
                timeline,
                lambda: plan.train_iters - window.started_at,
                tell,
                cupti_on_demand=_uses_cupti(plan),
                cupti_planned=_uses_cupti(plan) and plan.args.profile.use_pytorch_profiler,
                rank=rank if plan.world.size > 1 else None,
            )
        )
    if nsys := build_nsys_range(plan, window, tell):
        members.append(nsys)
    members += build_memory_instruments(plan, window, tell)
    if profiled and (plan.args.profile.use_pytorch_profiler or on_demand and not _torch_is_blind(plan)):
        members.append(_torch_profiler(plan, window, run_dir, tell))
    return [*members, timeline]  # innermost: what the others do between steps is not the step's time


def _torch_profiler(plan: Plan, window: Window, run_dir: Path, tell) -> TorchProfiler:
    p = plan.args.profile
    details = Details(
        cuda=plan.device == "cuda",
        shapes=p.pytorch_profiler_collect_shapes,
        stacks=p.pytorch_profiler_collect_callstack,
        memory=p.pytorch_profiler_collect_memory,
        flops=p.pytorch_profiler_collect_flops,
        chakra=p.pytorch_profiler_collect_chakra,
        modules=p.profile_modules,
        compress=True if p.profile_gzip else False if p.no_profile_gzip else None,
    )
    folder = Path(plan.args.watch.tensorboard_dir or run_dir)
    return TorchProfiler(window, folder, plan.world.rank, details, tell, only_on_demand=not p.use_pytorch_profiler)


def _on_demand(plan: Plan, window: Window, run_dir: Path, leads: bool, tell) -> OnDemand:
    p = plan.args.profile
    followers = plan.profile_ranks | {plan.world.size - 1}
    length = max(p.profile_step_end - max(p.profile_step_start, 1), 1)
    return OnDemand(
        window,
        run_dir,
        length,
        leads,
        alone=len(followers) == 1,
        last_step=lambda: plan.train_iters - window.started_at,
        records=_records_on_demand(plan),
        tell=tell,
    )


def _records_on_demand(plan: Plan) -> str:
    """What a window on demand does, for the line that announces it; empty: nothing could record it.

    nsys does not: it was told before the run when to collect, and that is over or taken after one window.
    """
    if not _torch_is_blind(plan):
        return "profiling"
    return (
        "nsys holds the GPU's counters, so only memory is recorded in"
        if plan.args.profile.record_memory_history
        else ""
    )


def _uses_cupti(plan: Plan) -> bool:
    """Whether torch.profiler does, where it records."""
    return plan.device == "cuda" and not _torch_is_blind(plan)


def _torch_is_blind(plan: Plan) -> bool:
    """nsys holds the GPU's counters, also where nothing asked it to record."""
    return plan.world.under_nsys and plan.device == "cuda"


def build_nsys_range(plan: Plan, window: Window, tell) -> NsysRange | None:
    """This rank's instrument for Nsight Systems, if the plan wants one and a tool can be there to see it."""
    p, world = plan.args.profile, plan.world
    profiled = p.profile and not p.use_pytorch_profiler and world.rank in plan.profile_ranks
    if not (profiled or p.nvtx_ranges) or not (plan.device == "cuda" or world.under_nsys):
        return None
    first = world.rank - world.local_rank
    node = range(first, first + world.local_size)
    return NsysRange(
        window if profiled else Window(range(0)),
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
