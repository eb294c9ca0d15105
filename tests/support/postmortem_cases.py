"""Made evidence of failed jobs: for each class of failure cases with their answer, and near misses."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_lite.postmortem.evidence import EventKind, JobEvidence, RankProgress
from megatron_lite.postmortem.postmortem_results import FailureKind as Kind
from support.evidence_maker import LOADER, STEP, TORCH, WAIT, MadeJob, frame

LOST = "[pair.cc:553] Connection closed by peer [127.0.0.1]:18593"
TIMED_OUT = "[unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete"
SLEEP = (frame(33, "prepare"), frame(12, "main"))


@dataclass(frozen=True)
class Expected:
    kind: Kind
    ranks: tuple[int, ...] = ()
    # the confidence, or the highest that is allowed where it begins with "at most"
    confidence: str = ""
    call_site: str | None = None


CASES: dict[str, tuple[Callable[[], JobEvidence], Expected]] = {}


def case(expected: Expected) -> Callable[[Callable[[], JobEvidence]], Callable[[], JobEvidence]]:
    def add(make: Callable[[], JobEvidence]) -> Callable[[], JobEvidence]:
        CASES[make.__name__] = (make, expected)
        return make

    return add


def steps(world_size: int, number: int = 5, backend: str = "gloo") -> MadeJob:
    job = MadeJob(world_size, backend)
    for _ in range(number):
        job.call()
    return job


def follow(job: MadeJob, ranks: list[int], message: str = LOST) -> None:
    for rank in ranks:
        job.end(rank, exit_code=1, error="RuntimeError", message=message, after_s=2.0)


# --- never entered


@case(Expected(Kind.NEVER_ENTERED, (2,), "high", "train.py:33 in prepare"))
def a_rank_sleeps() -> JobEvidence:
    job = steps(4)
    job.call(ranks=[0, 1, 3], ended=False)
    job.stack(2, *SLEEP)
    job.state(2, "running")
    for rank in (0, 1, 3):
        job.stack(rank, WAIT, frame(*STEP))
    return job.evidence()


@case(Expected(Kind.NEVER_ENTERED, (2,), "at most medium", "train.py:33 in prepare"))
def a_rank_sleeps_or_is_stopped() -> JobEvidence:
    job = steps(4)
    job.call(ranks=[0, 1, 3], ended=False)
    job.stack(2, *SLEEP)
    return job.evidence()


@case(Expected(Kind.NEVER_ENTERED, (2,), "at most medium"))
def a_rank_sleeps_without_its_stack() -> JobEvidence:
    job = steps(4)
    job.call(ranks=[0, 1, 3], ended=False)
    return job.evidence()


@case(Expected(Kind.NEVER_ENTERED, (1,), "at most medium", "train.py:33 in prepare"))
def only_stacks_tell() -> JobEvidence:
    job = MadeJob(2)
    job.stack(0, WAIT, frame(*STEP))
    job.stack(1, *SLEEP)
    return job.evidence()


@case(Expected(Kind.NEVER_ENTERED, (3,), "at most low"))
def one_recording_is_missing() -> JobEvidence:
    job = steps(4)
    job.call(ranks=[0, 1, 2], ended=False)
    return job.evidence(without=[3])


@case(Expected(Kind.NEVER_ENTERED, (1,)))
def a_rank_leaves_its_loop_early() -> JobEvidence:
    job = steps(2)
    job.call(ranks=[0])
    job.end(1, exit_code=0)
    follow(job, [0])
    return job.evidence()


@case(Expected(Kind.NEVER_ENTERED, (3,), "high"))
def a_chain_over_groups() -> JobEvidence:
    job = MadeJob(4)
    job.group("1", [0, 1])
    job.group("2", [2, 3])
    for _ in range(3):
        job.call(ranks=[0, 1], group="1")
        job.call(ranks=[2, 3], group="2")
        job.call()
    job.call(ranks=[2], group="2", ended=False)
    job.call(ranks=[0, 1], ended=False)
    job.stack(3, *SLEEP)
    job.state(3, "running")
    return job.evidence()


@case(Expected(Kind.NEVER_ENTERED, (2,), "at most medium"))
def a_chain_of_messages() -> JobEvidence:
    job = MadeJob(3, "nccl")
    job.message(0, 0, 1, ended=True)
    job.message(1, 0, 1, ended=True)
    job.message(2, 1, 2, ended=True)
    job.message(1, 1, 2, ended=True)
    job.message(0, 1, 0)
    job.message(1, 2, 1)
    return job.evidence()


@case(Expected(Kind.NEVER_ENTERED, (1,), "at most low"))
def only_logs_tell() -> JobEvidence:
    job = MadeJob(2)
    follow(job, [0], TIMED_OUT)
    job.end(1, exit_code=-15, is_consequence=True)
    return job.evidence()


@case(Expected(Kind.NEVER_ENTERED, (1,), "medium"))
def a_monitored_barrier_names_a_rank() -> JobEvidence:
    job = MadeJob(3)
    job.event(EventKind.RANK_BEHIND, rank=1)
    follow(job, [0, 2], TIMED_OUT)
    return job.evidence()


@case(Expected(Kind.NEVER_ENTERED, (1,), "medium"))
def a_report_of_a_desync_outweighs_a_guess() -> JobEvidence:
    job = steps(3, backend="nccl")
    job.call(ranks=[0], ended=False)
    job.event(EventKind.RANK_BEHIND, rank=1, number=6)
    return job.evidence(without=[1, 2])


# --- other arguments, other order


@case(Expected(Kind.OTHER_ARGUMENTS, (1,), "high", "train.py:88 in step"))
def other_shapes() -> JobEvidence:
    job = steps(4)
    job.call(shapes={1: (12,)}, ended=False)
    return job.evidence()


@case(Expected(Kind.OTHER_ARGUMENTS, (1,), "high"))
def other_shapes_of_two_against_habit() -> JobEvidence:
    job = steps(2)
    job.call(shapes={1: (12,)}, ended=False)
    return job.evidence()


@case(Expected(Kind.OTHER_ARGUMENTS, (0, 1), "at most medium"))
def other_shapes_of_two_at_once() -> JobEvidence:
    job = MadeJob(2)
    job.call(shapes={1: (12,)}, ended=False)
    return job.evidence()


@case(Expected(Kind.OTHER_ARGUMENTS, (3,), "high"))
def other_types() -> JobEvidence:
    job = steps(4)
    job.call(types={3: "BFloat16"}, ended=False)
    return job.evidence()


@case(Expected(Kind.OTHER_ARGUMENTS, (1,), "high"))
def other_shapes_and_an_abort() -> JobEvidence:
    job = steps(3)
    job.call(shapes={1: (12,)})
    job.end(0, exit_code=-6)
    follow(job, [1, 2])
    return job.evidence()


@case(Expected(Kind.NONE, (), "high"))
def all_to_all_of_other_amounts() -> JobEvidence:
    job = steps(2)
    job.call("all_to_all", shapes={1: (12,)})
    job.end(0, exit_code=0)
    job.end(1, exit_code=0)
    return job.evidence()


@case(Expected(Kind.OTHER_ORDER, (1,), "high"))
def two_calls_swapped() -> JobEvidence:
    job = MadeJob(3)
    for _ in range(3):
        job.call("all_reduce", site=(10, "step"))
        job.call("broadcast", site=(11, "step"))
    job.call(names={1: "broadcast"}, sites={1: (11, "step")}, site=(10, "step"), ended=False)
    return job.evidence()


@case(Expected(Kind.OTHER_ORDER, (1,), "high"))
def two_calls_swapped_of_two_ranks() -> JobEvidence:
    job = MadeJob(2)
    for _ in range(3):
        job.call("all_reduce", site=(10, "step"))
        job.call("broadcast", site=(11, "step"))
    job.call(names={1: "broadcast"}, sites={1: (11, "step")}, site=(10, "step"), ended=False)
    return job.evidence()


@case(Expected(Kind.OTHER_ORDER, (0, 1), "high"))
def two_groups_in_another_order() -> JobEvidence:
    job = MadeJob(2, "nccl")
    job.group("1", [0, 1])
    job.group("2", [0, 1])
    job.call(group="1")
    job.call(group="2")
    job.call(ranks=[0], group="1", ended=False)
    job.call(ranks=[1], group="2", ended=False)
    return job.evidence()


@case(Expected(Kind.OTHER_ORDER, (2,), "medium"))
def one_rank_goes_on_where_the_others_log() -> JobEvidence:
    """Rank 2 leaves out what all log, and waits for rank 3 in its next layer."""
    job = MadeJob(4)
    job.group("1", [0, 1])
    job.group("2", [2, 3])
    for _ in range(3):
        job.call(group="1", site=(10, "layer"))
        job.call(group="2", site=(10, "layer"))
    job.call(ranks=[0, 1, 3], site=(40, "log"), ended=False)
    job.call(ranks=[2], group="2", site=(10, "layer"), ended=False)
    job.event(EventKind.COLLECTIVE_TIMEOUT, "gave up", 1800.0, rank=0)
    return job.evidence()


@case(Expected(Kind.OTHER_ORDER, (2, 3), "medium"))
def a_circle_beside_ranks_without_recordings() -> JobEvidence:
    """Rank 3 logs by itself, and rank 2 waits for it in their layer; what 0 and 1 do would tell which of them departs."""
    job = MadeJob(4)
    job.group("2", [2, 3])
    job.call(site=(40, "log"))
    job.call(group="2", site=(10, "layer"))
    job.call(ranks=[3], site=(40, "log"), ended=False)
    job.call(ranks=[2], group="2", site=(10, "layer"), ended=False)
    job.event(EventKind.COLLECTIVE_TIMEOUT, "gave up", 1800.0, rank=0)
    return job.evidence(without=[0, 1])


@case(Expected(Kind.OTHER_ORDER, (0, 1), "at most medium"))
def two_untold_groups_in_another_order() -> JobEvidence:
    job = MadeJob(2)
    job.group("1", [], told=False)
    job.group("2", [], told=False)
    job.call(ranks=[0], group="1", ended=False)
    job.call(ranks=[1], group="2", ended=False)
    return job.evidence()


@case(Expected(Kind.OTHER_ARGUMENTS, (0, 1), "at most medium"))
def a_library_tells_of_a_mismatch() -> JobEvidence:
    job = MadeJob(2)
    said = (
        "Detected mismatch between collectives on ranks. Rank 0 is running ALLREDUCE, but Rank 1 is running ALLREDUCE"
    )
    differs = ". Collectives differ in the following aspects: Tensor Tensor shapes: 10 vs 12"
    job.end(0, exit_code=1, error="RuntimeError", message=said + differs)
    follow(job, [1])
    return job.evidence()


# --- stuck, network, slow


@case(Expected(Kind.STUCK_IN_KERNEL, (), "at most medium"))
def all_started_and_none_ended() -> JobEvidence:
    job = steps(2, backend="nccl")
    job.call(ended=False, started=[0, 1])
    job.event(EventKind.COLLECTIVE_TIMEOUT, "Watchdog caught collective operation timeout", 600.0, rank=0)
    return job.evidence()


@case(Expected(Kind.STUCK_IN_KERNEL, (1,), "at most medium"))
def one_has_not_started() -> JobEvidence:
    job = steps(2, backend="nccl")
    job.call(ended=False, started=[0])
    return job.evidence()


@case(Expected(Kind.STUCK_IN_KERNEL, (), "at most medium"))
def others_wait_for_ranks_that_are_stuck() -> JobEvidence:
    job = MadeJob(4, "nccl")
    job.group("2", [2, 3])
    for _ in range(3):
        job.call()
    job.call(ranks=[2, 3], group="2", ended=False, started=[2, 3])
    job.call(ranks=[0, 1], ended=False, started=[0, 1])
    job.event(EventKind.COLLECTIVE_TIMEOUT, "Watchdog caught collective operation timeout", 600.0, rank=0)
    return job.evidence()


@case(Expected(Kind.OTHER_ORDER, (0, 1), "at most medium"))
def everybody_sends() -> JobEvidence:
    job = MadeJob(2)
    sends = replace(WAIT, function="send")
    for rank in (0, 1):
        job.end(rank, exit_code=1, error="RuntimeError", message=TIMED_OUT, frames=(sends, frame(50, "hand_over")))
    return job.evidence()


@case(Expected(Kind.NETWORK, (), "at most low"))
def all_entered_without_a_device() -> JobEvidence:
    job = steps(2)
    job.call(ended=False)
    return job.evidence()


@case(Expected(Kind.NETWORK, (1,), "at most medium"))
def an_adapter_fails() -> JobEvidence:
    job = steps(2, backend="nccl")
    job.call(ended=False, started=[0, 1])
    job.event(EventKind.NETWORK_ERROR, "NET/IB : Got completion with error 12", rank=1)
    return job.evidence()


@case(Expected(Kind.SLOW, (1,), "high"))
def a_rank_enters_after_the_others_gave_up() -> JobEvidence:
    job = steps(2)
    job.call(late={1: 9.0}, timeout_s=6.0)
    follow(job, [0], TIMED_OUT)
    follow(job, [1])
    return job.evidence()


@case(Expected(Kind.SLOW, (1,)))
def a_rank_is_seen_at_two_lines() -> JobEvidence:
    job = steps(2)
    job.call(ranks=[0], ended=False)
    job.stack(1, frame(33, "prepare"), after_s=10.0)
    job.stack(1, frame(41, "prepare"), after_s=40.0)
    return job.evidence()


# --- processes


@case(Expected(Kind.DIED, (1,), "high"))
def a_rank_is_killed() -> JobEvidence:
    job = steps(2)
    job.call(ranks=[0])
    job.end(1, exit_code=-11)
    follow(job, [0])
    return job.evidence()


@case(Expected(Kind.DIED, (1,)))
def a_rank_is_known_to_be_dead() -> JobEvidence:
    job = steps(2)
    job.call(ranks=[0], ended=False)
    job.state(1, "dead")
    return job.evidence()


@case(Expected(Kind.HOST_MEMORY, (1,), "high"))
def the_batch_system_names_its_machine_and_the_launcher_none() -> JobEvidence:
    """Slurm numbers the launchers of its machines; torchrun's table says localhost."""
    job = steps(2)
    job.call(ranks=[0], ended=False)
    job.event(EventKind.HOST_OUT_OF_MEMORY, "srun: error: node07: task 0: Out Of Memory", None, rank=0, host="node07")
    job.event(EventKind.LAUNCHER_SAW_FAILURE, "failed (exitcode: -9)", rank=1)
    job.end(1, exit_code=-9, host="localhost")
    job.end(0, exit_code=-15, is_consequence=True, host="localhost")
    return job.evidence()


@case(Expected(Kind.HOST_MEMORY, (1,), "high"))
def the_kernel_kills_a_rank() -> JobEvidence:
    job = steps(2)
    job.call(ranks=[0])
    job.event(EventKind.HOST_OUT_OF_MEMORY, "Out of memory: Killed process 101 (python)", None)
    job.end(1, exit_code=-9)
    follow(job, [0])
    return job.evidence()


@case(Expected(Kind.HOST_MEMORY, (0,)))
def the_kernel_kills_a_loaders_worker() -> JobEvidence:
    job = steps(2)
    job.event(EventKind.HOST_OUT_OF_MEMORY, "oom-kill: task=pt_data_worker", 0.5)
    job.event(EventKind.LOADER_FAILED, "DataLoader worker (pid 7) is killed by signal: Killed", 1.0, rank=0)
    job.end(0, exit_code=1, error="RuntimeError", message="DataLoader worker (pid(s) 7) exited unexpectedly")
    follow(job, [1])
    return job.evidence()


@case(Expected(Kind.USER_EXCEPTION, (1,), "high", "train.py:40 in step"))
def an_exception() -> JobEvidence:
    job = steps(2)
    job.call(ranks=[0])
    job.end(1, exit_code=1, error="ValueError", message="no such shard", frames=(frame(40, "step"),))
    follow(job, [0])
    return job.evidence()


@case(Expected(Kind.USER_EXCEPTION, (0, 1), "high"))
def the_same_exception_everywhere() -> JobEvidence:
    job = steps(2)
    for rank in (0, 1):
        job.end(rank, exit_code=1, error="ValueError", message=f"rank {rank}", frames=(frame(40, "step"),))
    return job.evidence()


@case(Expected(Kind.USER_EXCEPTION, (1,), "at most low"))
def an_exit_code_without_words() -> JobEvidence:
    job = steps(2)
    job.call(ranks=[0])
    job.end(1, exit_code=1)
    return job.evidence(read="error files")


@case(Expected(Kind.DATA_LOADER, (1,), "high"))
def an_exception_of_a_dataset() -> JobEvidence:
    job = steps(2)
    stack = (frame(9, "__getitem__", "/home/u/data.py"), LOADER, frame(*STEP))
    job.end(1, exit_code=1, error="KeyError", message="'text'", frames=stack)
    follow(job, [0])
    return job.evidence()


@case(Expected(Kind.NEVER_ENTERED, (1,)))
def a_rank_hangs_after_an_exception_that_it_caught() -> JobEvidence:
    job = steps(2)
    job.end(1, error="ValueError", message="no such shard", frames=(frame(40, "step"),))
    job.now += 100.0
    job.call(ranks=[0], ended=False)
    job.stack(1, *SLEEP)
    return job.evidence()


@case(Expected(Kind.USER_EXCEPTION, (1,), "low"))
def an_exception_of_a_rank_that_ended_well() -> JobEvidence:
    job = steps(2)
    job.end(1, error="ValueError", message="no such shard", frames=(frame(40, "step"),))
    for rank in (0, 1):
        job.end(rank, exit_code=0, after_s=100.0)
    return job.evidence()


@case(Expected(Kind.HOST_MEMORY, (1,), "high"))
def no_memory_for_a_tensor_on_the_host() -> JobEvidence:
    job = steps(2)
    said = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
    job.end(1, exit_code=1, error="RuntimeError", message=said, frames=(frame(*STEP),))
    follow(job, [0])
    return job.evidence()


@case(Expected(Kind.USER_EXCEPTION, (1,), "high"))
def no_room_for_a_checkpoint() -> JobEvidence:
    job = steps(2)
    said = "[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"
    job.end(1, exit_code=1, error="RuntimeError", message=said, frames=(frame(60, "save"),))
    follow(job, [0])
    return job.evidence()


@case(Expected(Kind.USER_EXCEPTION, (1,), "high", "train.py:70 in fetch"))
def storage_times_out() -> JobEvidence:
    job = steps(2)
    stack = (frame(720, "recv_into", "/usr/lib/python3.11/socket.py"), frame(70, "fetch"))
    job.end(1, exit_code=1, error="TimeoutError", message="timed out", frames=stack)
    follow(job, [0])
    return job.evidence()


@case(Expected(Kind.NETWORK, (), "at most medium"))
def meetings_time_out() -> JobEvidence:
    job = MadeJob(2)
    stack = (frame(258, "_create_c10d_store", f"{TORCH}distributed/rendezvous.py"), frame(3, "main"))
    for rank in (0, 1):
        said = "Broken pipe: the client socket has timed out"
        job.end(rank, exit_code=1, error="TimeoutError", message=said, frames=stack)
    return job.evidence()


@case(Expected(Kind.DATA_LOADER, (1,), "high"))
def a_loader_times_out() -> JobEvidence:
    job = steps(2)
    stack = (LOADER, frame(*STEP))
    job.end(1, exit_code=1, error="RuntimeError", message="DataLoader timed out after 5 seconds", frames=stack)
    follow(job, [0])
    return job.evidence()


@case(Expected(Kind.DATA_LOADER, (1,), "high"))
def a_loader_hangs() -> JobEvidence:
    job = steps(2)
    job.call(ranks=[0], ended=False)
    job.stack(1, frame(1, "wait", "/usr/lib/python3.11/threading.py"), LOADER, frame(*STEP))
    return job.evidence()


@case(Expected(Kind.DEVICE_MEMORY, (1,), "high"))
def no_memory_on_a_device() -> JobEvidence:
    job = steps(2)
    job.call(ranks=[0])
    job.end(1, exit_code=1, error="torch.OutOfMemoryError", message="CUDA out of memory. Tried to allocate 2 GiB")
    follow(job, [0])
    return job.evidence()


@case(Expected(Kind.DEVICE_FAULT, (1,), "high"))
def a_gpu_falls_off_the_bus() -> JobEvidence:
    job = steps(2, backend="nccl")
    job.event(EventKind.XID, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", 0.2, code=79, rank=1)
    job.end(1, exit_code=1, error="RuntimeError", message="CUDA error: unspecified launch failure")
    follow(job, [0])
    return job.evidence()


@case(Expected(Kind.USER_EXCEPTION, (1,), "high"))
def a_gpu_failed_days_before() -> JobEvidence:
    job = steps(2, backend="nccl")
    job.event(EventKind.XID, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", -200_000.0, code=79)
    job.end(1, exit_code=1, error="ValueError", message="no such shard")
    follow(job, [0])
    return job.evidence()


@case(Expected(Kind.NEVER_ENTERED, (1,)))
def machines_failed_days_before_a_hang() -> JobEvidence:
    job = steps(2)
    job.call(ranks=[0], ended=False)
    job.stack(1, *SLEEP)
    job.event(EventKind.XID, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", -200_000.0, code=79)
    job.event(EventKind.HOST_OUT_OF_MEMORY, "Out of memory: Killed process 77 (chrome)", -200_500.0)
    return job.evidence()


@case(Expected(Kind.USER_EXCEPTION, (1,), "high"))
def an_exception_after_an_xid_that_was_contained() -> JobEvidence:
    job = steps(2)
    job.event(EventKind.XID, "NVRM: Xid (PCI:0000:3b:00): 94, Contained", -3600.0, code=94, host="n1")
    job.end(1, exit_code=1, error="ValueError", message="no such shard", frames=(frame(40, "step"),))
    follow(job, [0])
    return job.evidence()


@case(Expected(Kind.HOST_MEMORY, (1,), "medium"))
def the_kernel_kills_another_process() -> JobEvidence:
    job = steps(2)
    job.event(EventKind.HOST_OUT_OF_MEMORY, "Out of memory: Killed process 77 (chrome)", 0.5, pid=77)
    job.end(1, exit_code=-9, pid=500)
    follow(job, [0])
    return job.evidence()


@case(Expected(Kind.DIED, (1,), "at most high"))
def the_kernel_of_another_machine_kills_a_process() -> JobEvidence:
    job = steps(2)
    job.event(EventKind.HOST_OUT_OF_MEMORY, "Out of memory: Killed process 77 (chrome)", -600.0, host="n1", pid=77)
    job.event(EventKind.LAUNCHER_SAW_FAILURE, rank=1)
    job.end(1, exit_code=-9, host="n2")
    follow(job, [0])
    return job.evidence()


@case(Expected(Kind.USER_EXCEPTION, (1,), "at most low"))
def an_exit_code_beside_a_log_of_the_kernel() -> JobEvidence:
    job = steps(2)
    job.end(1, exit_code=1)
    return job.evidence(read="kernel logs")


@case(Expected(Kind.USER_EXCEPTION, (1,), "at most medium"))
def an_exception_beside_ranks_of_which_nothing_was_read() -> JobEvidence:
    job = MadeJob(8)
    job.end(1, exit_code=1, error="ValueError", message="no such shard")
    return job.evidence()


@case(Expected(Kind.NONE, (), "high"))
def ranks_differ_in_their_last_call_and_end_well() -> JobEvidence:
    job = steps(3)
    job.call(shapes={1: (12,)})
    for rank in range(3):
        job.end(rank, exit_code=0)
    return job.evidence()


@case(Expected(Kind.STOPPED, (1,), "high"))
def a_rank_is_stopped() -> JobEvidence:
    job = steps(2)
    job.call(ranks=[0], ended=False)
    job.state(1, "stopped")
    job.stack(1, *SLEEP)
    return job.evidence()


@case(Expected(Kind.STOPPED, (1,), "high"))
def a_stopped_rank_is_killed_at_last() -> JobEvidence:
    job = steps(2)
    job.call(ranks=[0], ended=False)
    job.state(1, "stopped")
    job.end(0, exit_code=-15, is_consequence=True, after_s=31.0)
    job.end(1, exit_code=-9, after_s=61.0)
    return job.evidence()


# --- from outside


@case(Expected(Kind.PREEMPTED, (), "high"))
def the_batch_system_preempts() -> JobEvidence:
    job = steps(2)
    job.call(ranks=[0], ended=False)
    job.event(EventKind.JOB_PREEMPTED, "JOB 7 CANCELLED DUE TO PREEMPTION", 0.2)
    for rank in (0, 1):
        job.end(rank, exit_code=-15, is_consequence=True)
    return job.evidence()


@case(Expected(Kind.NEVER_ENTERED, (1,)))
def a_hang_until_the_time_limit() -> JobEvidence:
    job = steps(2)
    job.call(ranks=[0], ended=False)
    job.event(EventKind.JOB_TIME_LIMIT, "JOB 7 CANCELLED DUE TO TIME LIMIT", 3600.0)
    return job.evidence()


@case(Expected(Kind.PREEMPTED, (), "at most medium"))
def the_launcher_is_asked_to_end() -> JobEvidence:
    job = steps(2)
    job.event(EventKind.SIGNAL, "Received 15 death signal, shutting down workers", 0.2, code=15)
    for rank in (0, 1):
        job.end(rank, exit_code=-15, is_consequence=True)
    return job.evidence()


@case(Expected(Kind.USER_EXCEPTION, (0,), "high"))
def an_exception_and_the_launcher_ends_the_other() -> JobEvidence:
    job = steps(2)
    job.end(0, exit_code=1, error="AssertionError", message="odd")
    job.event(EventKind.LAUNCHER_ENDED_OTHERS, "Sending process 11 closing signal SIGTERM", 1.5)
    job.end(1, exit_code=-15, is_consequence=True, after_s=2.0)
    return job.evidence()


@case(Expected(Kind.DIVERGED, (), "high"))
def a_loss_that_is_not_finite() -> JobEvidence:
    job = steps(2)
    job.event(EventKind.NOT_FINITE, "step 12: loss is nan")
    for rank in (0, 1):
        job.end(rank, exit_code=0)
    return job.evidence()


@case(Expected(Kind.USER_EXCEPTION, (1,)))
def an_exception_long_after_a_nan() -> JobEvidence:
    job = steps(2)
    job.event(EventKind.NOT_FINITE, "step 12: loss is nan", 0.1)
    job.end(1, exit_code=1, error="ValueError", message="no such shard", after_s=900.0)
    follow(job, [0])
    return job.evidence()


# --- no failure, and what nothing tells


@case(Expected(Kind.NONE, (), "high"))
def all_ended_well() -> JobEvidence:
    job = steps(2)
    for rank in (0, 1):
        job.end(rank, exit_code=0)
    return job.evidence()


@case(Expected(Kind.NONE, (), "at most medium"))
def one_ended_well_and_the_other_is_unknown() -> JobEvidence:
    job = MadeJob(2)
    job.end(0, exit_code=0)
    return job.evidence()


@case(Expected(Kind.NONE, (), "low"))
def logs_without_a_word_of_failure() -> JobEvidence:
    return MadeJob(4).evidence(read="logs")


@case(Expected(Kind.OTHER_ARGUMENTS, (1,), "at most medium"))
def torch_checks_each_call() -> JobEvidence:
    job = MadeJob(4)
    for rank in range(4):
        other = 0 if rank == 1 else 1
        calls = []
        for one in (rank, other):
            of_one = f"SequenceNumber=6, OpType=ALLREDUCE, TensorShape=[{9 if one == 1 else 10}], TensorDtypes=Float"
            calls.append(f"Rank {one} is running collective: CollectiveFingerPrint({of_one}, TensorDeviceTypes=(cpu))")
        said = f"Detected mismatch between collectives on ranks. {calls[0]}, but {calls[1]}."
        said += "Collectives differ in the following aspects: \t Tensor Tensor shapes: 10vs 9"
        job.end(rank, exit_code=1, error="RuntimeError", message=said)
    return job.evidence()


@case(Expected(Kind.NEVER_ENTERED, (1,)))
def a_stopped_rank_is_killed_by_the_launcher() -> JobEvidence:
    job = steps(2)
    job.call(ranks=[0], ended=False)
    job.stack(1, *SLEEP)
    follow(job, [0], TIMED_OUT)
    job.event(EventKind.LAUNCHER_SAW_FAILURE, "failed (exitcode: 1)", 2.0, rank=0)
    job.event(EventKind.LAUNCHER_ENDED_OTHERS, "closing signal SIGTERM", 2.0)
    job.end(1, exit_code=-9, after_s=32.0)
    return job.evidence()


@case(Expected(Kind.DIED, (1,), "high"))
def a_rank_dies_in_a_library_after_words_on_others() -> JobEvidence:
    job = steps(2)
    job.call(ranks=[0])
    job.end(1, error="Fatal Python error", message="Segmentation fault")
    job.end(1, error="RanksError", message="rank 1 died (process 7 on vm is gone)")
    follow(job, [0])
    return job.evidence()


@case(Expected(Kind.UNKNOWN, (), "at most low"))
def nothing_tells() -> JobEvidence:
    return MadeJob(4).evidence(read="error files")


@case(Expected(Kind.NETWORK, (), "at most low"))
def connections_break_and_one_rank_is_unknown() -> JobEvidence:
    job = MadeJob(3)
    follow(job, [0, 1])
    job.event(EventKind.CONNECTION_LOST, LOST, rank=0)
    return job.evidence()


@case(Expected(Kind.NETWORK, (), "medium"))
def connections_of_all_ranks_break() -> JobEvidence:
    job = steps(2)
    job.call()
    follow(job, [0, 1])
    return job.evidence()


@case(Expected(Kind.NETWORK, (), "at most medium"))
def a_library_aborts_after_an_adapter_failed() -> JobEvidence:
    job = steps(2, backend="nccl")
    job.event(EventKind.NETWORK_ERROR, "NET/IB: Got completion with status 12", 0.1)
    job.end(1, exit_code=-6)
    return job.evidence()


@case(Expected(Kind.NEVER_ENTERED, (2,)))
def libraries_abort_who_waited_too_long() -> JobEvidence:
    job = steps(3, backend="nccl")
    job.call(ranks=[0, 1], ended=False)
    job.stack(2, *SLEEP)
    for rank in (0, 1):
        job.end(rank, exit_code=-6, after_s=600.0)
    return job.evidence()


@case(Expected(Kind.OTHER_ORDER, (0, 1), "low"))
def ranks_that_call_ahead_are_looked_at_once() -> JobEvidence:
    job = MadeJob(2)
    for _ in range(5):
        for group in ("1", "2"):
            job.group(group, (0, 1))
            job.call(group=group)
    job.call(ranks=[0], group="1", ended=False)
    job.call(ranks=[1], group="2", ended=False)
    return job.evidence()


@case(Expected(Kind.NEVER_ENTERED, (1,), "low"))
def nccl_is_asked_for_recordings() -> JobEvidence:
    job = steps(2, backend="nccl")
    job.call(ranks=[0], ended=False)
    return replace(job.evidence(), written_at={"flight recordings": job.now + 0.05})


@case(Expected(Kind.STUCK_IN_KERNEL, (), "low"))
def nccl_is_asked_while_all_are_inside() -> JobEvidence:
    job = steps(2, backend="nccl")
    job.call(started=[0, 1], ended=False)
    return replace(job.evidence(), written_at={"flight recordings": job.now + 0.05})


@case(Expected(Kind.OTHER_ARGUMENTS, (1,), "low"))
def a_broadcast_is_looked_at_once() -> JobEvidence:
    job = steps(2)
    job.call("broadcast", ranks=[1], ended=False)
    job.call("broadcast", ranks=[0])
    job.call(ranks=[0], ended=False)
    return job.evidence()


@case(Expected(Kind.NONE, (), "low"))
def logs_go_on_after_the_recordings() -> JobEvidence:
    job = steps(2)
    job.call(ranks=[0], ended=False)
    job.stack(1, frame(30, "evaluate"))
    evidence = job.evidence()
    written_at = {
        "flight recordings": job.now + 60.0,
        "dumps of stacks": job.now + 60.0,
        "console logs": job.now + 90.0,
    }
    return replace(evidence, written_at=written_at)


@case(Expected(Kind.NEVER_ENTERED, (1,)))
def a_hung_rank_is_killed_in_the_end() -> JobEvidence:
    job = steps(2)
    job.call(ranks=[0], ended=False)
    job.stack(1, *SLEEP, after_s=20.0)
    job.end(1, exit_code=-9, after_s=31.0)
    return job.evidence()


@case(Expected(Kind.DIED, (1,), "at most low"))
def a_process_is_gone_and_nothing_tells_of_the_others() -> JobEvidence:
    job = MadeJob(2)
    job.state(1, "dead")
    job.progress.append(RankProgress("steps.jsonl", 0, step=4))
    return job.evidence(read="records of runs")


@case(Expected(Kind.SLOW, (1,), "at most medium"))
def own_work_of_a_rank_takes_long() -> JobEvidence:
    job = MadeJob(3)
    for rank in range(3):
        job.state(rank, "running", own_step_s=3.0 if rank == 1 else 0.1)
    return job.evidence(read="records of steps")


@case(Expected(Kind.UNKNOWN, (), "at most low"))
def own_work_of_ranks_differs_little() -> JobEvidence:
    job = MadeJob(3)
    for rank in range(3):
        job.state(rank, "running", own_step_s=0.13 if rank == 1 else 0.1)
    return job.evidence(read="records of steps")


@case(Expected(Kind.SLOW, (1,), "at most medium"))
def a_rank_is_slow_in_every_step() -> JobEvidence:
    job = MadeJob(2, "nccl", step_s=0.5)
    for _ in range(12):
        job.call(late={1: 0.4})
    job.call(ranks=[0], ended=False)
    return job.evidence()


@case(Expected(Kind.NONE, (), "at most medium"))
def a_job_goes_on() -> JobEvidence:
    job = MadeJob(2, "nccl", step_s=0.5)
    for step in range(12):
        job.call(late={step % 2: 0.05})
    job.call(ranks=[0], ended=False)
    job.stack(1, frame(30, "forward"), after_s=0.2)
    return job.evidence()


@case(Expected(Kind.OTHER_ARGUMENTS, (1,), "medium"))
def another_root() -> JobEvidence:
    job = MadeJob(3)
    job.call("broadcast", ranks=[0, 2])
    job.call("broadcast", ranks=[1], ended=False)
    job.call("broadcast", ranks=[0, 2], ended=False)
    job.event(EventKind.COLLECTIVE_TIMEOUT, "gave up", 1800.0, rank=0)
    return job.evidence()
