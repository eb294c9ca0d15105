"""Which instruments watch this rank: the only place that asks what is to be profiled."""

from pathlib import Path

from megatron_lite.config.plan import Plan
from megatron_lite.estimate.loss import rows_at_once
from megatron_lite.instruments.base import Instrument
from megatron_lite.instruments.compiling import Compiling
from megatron_lite.instruments.disturbance import Disturbance
from megatron_lite.instruments.memory_history import memory_instruments
from megatron_lite.instruments.nsys_range import nsys_range
from megatron_lite.instruments.on_demand import OnDemand
from megatron_lite.instruments.small_blocks import RoomForNames
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.instruments.torch_profiler import Details, TorchProfiler
from megatron_lite.instruments.window import Window
from megatron_lite.parallel.compiled import expected_compilations


def choose(plan: Plan, run_dir: Path, timeline: Timeline, tell) -> list[Instrument]:
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
    if nsys := nsys_range(plan, window, tell):
        members.append(nsys)
    members += memory_instruments(plan, window, tell)
    if profiled and (plan.args.profile.use_pytorch_profiler or on_demand and not _torch_is_blind(plan)):
        if plan.device == "cpu":
            members.append(_room_for_names(plan, window))
        members.append(_torch_profiler(plan, window, run_dir, tell))
    return [*members, timeline]  # innermost: what the others do between steps is not the step's time


def _room_for_names(plan: Plan, window: Window) -> RoomForNames:
    tokens = plan.args.training.micro_batch_size * plan.shape.seq_length
    chunks = -(-tokens // rows_at_once(plan.shape.padded_vocab_size, plan.world.threads))
    return RoomForNames(
        window,
        plan.shape.num_layers,
        plan.micro_batches(plan.train_samples),
        chunks,
        plan.args.profile.pytorch_profiler_collect_shapes,
    )


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
