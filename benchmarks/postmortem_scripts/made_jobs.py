"""What jobs on GPUs leave behind, made in the documented form: dumps of NCCL's flight recorder, and logs.

Used where no process on a CPU fails in this way. The texts of logs are those of torch 2.9, NCCL 2.27, CUDA, the NVIDIA
driver and Slurm.
"""

import pickle
import time

AGO_NS = 620_000_000_000
MS = 1_000_000
TRAINER = "/workspace/train.py"
WORLD = "0"


class MadeRank:
    """The flight recorder of one rank, filled call by call."""

    def __init__(self, rank, ranks, groups=None):
        self.rank = rank
        self.groups = {WORLD: ("default_pg", list(range(ranks))), **(groups or {})}
        self.entries = []
        self.numbers = {}
        self.messages = {}
        self.completed = {}
        self.now = time.time_ns() - AGO_NS

    def call(
        self, name, shape, state="completed", group=WORLD, dtype="Float", line=88, function="train_step", peer=None
    ):
        self.now += 20 * MS
        counts = self.numbers if peer is None else self.messages
        counts[group] = counts.get(group, 0) + 1
        if state == "completed":
            self.completed[group] = counts[group]
        is_started = state in ("started", "completed")
        self.entries.append(
            {
                "frames": [
                    {
                        "name": name.split(" ")[0],
                        "filename": "/opt/conda/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py",
                        "line": 2937,
                    },
                    {"name": function, "filename": TRAINER, "line": line},
                    {"name": "<module>", "filename": TRAINER, "line": 201},
                ],
                "record_id": len(self.entries),
                "pg_id": int(group),
                "process_group": (group, self.groups[group][0]),
                "collective_seq_id": self.numbers.get(group, 0),
                "p2p_seq_id": self.messages.get(group, 0),
                "op_id": self.numbers.get(group, 0) + self.messages.get(group, 0),
                "profiling_name": f"nccl:{name}",
                "time_created_ns": self.now,
                "input_sizes": [shape],
                "input_dtypes": [dtype],
                "output_sizes": [shape],
                "output_dtypes": [dtype],
                "state": state,
                "time_discovered_started_ns": self.now + MS if is_started else None,
                "time_discovered_completed_ns": self.now + 3 * MS if state == "completed" else None,
                "retired": state == "completed",
                "timeout_ms": 600_000,
                "is_p2p": peer is not None,
            }
        )

    def write(self, folder):
        status = {
            int(group): {
                "last_enqueued_collective": number,
                "last_started_collective": number,
                "last_completed_collective": self.completed.get(group, 0),
            }
            for group, number in self.numbers.items()
        }
        config = {
            group: {"name": group, "desc": description, "ranks": str(members)}
            for group, (description, members) in self.groups.items()
        }
        dump = {
            "version": "2.10",
            "pg_config": config,
            "pg_status": status,
            "entries": self.entries,
            "comm_lib_version": "2.27.5",
            "nccl_comm_state": {},
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"nccl_trace_rank_{self.rank}").write_bytes(pickle.dumps(dump))


def make_ranks(ranks, steps=20):
    made = [MadeRank(rank, ranks) for rank in range(ranks)]
    for rank in made:
        for _ in range(steps):
            rank.call("all_reduce", [4_194_304])
            rank.call("all_reduce", [1], line=93, function="log_loss")
    return made


def write_all(made, folder):
    for rank in made:
        rank.write(folder / "dumps")


def write_log(folder, *lines, name="slurm-9113.out"):
    folder.mkdir(parents=True, exist_ok=True)
    steps = [f"[rank0]: step {step} loss {4 - step / 50:.3f} 412 ms" for step in range(36, 41)]
    (folder / name).write_text("\n".join([*steps, *lines]) + "\n")


def watchdog(rank, number, operation, numel, last_enqueued, last_completed):
    stamp = f"[rank{rank}]:[E1128 03:12:5{rank}.{rank}12345678"
    work = f"WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000)"
    return [
        (
            f"{stamp} ProcessGroupNCCL.cpp:683] [Rank {rank}] Watchdog caught collective operation timeout: {work} ran for "
            f"60002{rank} milliseconds before timing out."
        ),
        (
            f"{stamp} ProcessGroupNCCL.cpp:2241] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure detected by watchdog at "
            f"work sequence id: {number} PG status: last enqueued work: {last_enqueued}, last completed work: {last_completed}"
        ),
        (
            f"{stamp} ProcessGroupNCCL.cpp:744] [Rank {rank}] Some NCCL operations have failed or timed out. Due to the "
            "asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data."
        ),
        (
            f"{stamp} ProcessGroupNCCL.cpp:758] [Rank {rank}] To avoid data inconsistency, we are taking the entire process "
            "down."
        ),
    ]


def make_stuck_kernel(folder):
    made = make_ranks(4)
    for rank in made:
        rank.call("all_reduce", [4_194_304], "started")
    write_all(made, folder)
    write_log(folder, *(line for rank in range(4) for line in watchdog(rank, 41, "ALLREDUCE", 4_194_304, 41, 40)))


def make_stuck_gather(folder):
    made = make_ranks(8, steps=10)
    for rank in made:
        rank.call("_all_gather_base", [16_777_216], "started", dtype="BFloat16", line=61, function="forward")
        rank.call("_all_gather_base", [16_777_216], "scheduled", dtype="BFloat16", line=61, function="forward")
    write_all(made, folder)


def make_stuck_group(folder):
    groups = (
        {"1": ("mesh_tp", [0, 1])},
        {"1": ("mesh_tp", [0, 1])},
        {"2": ("mesh_tp", [2, 3])},
        {"2": ("mesh_tp", [2, 3])},
    )
    made = [MadeRank(rank, 4, groups[rank]) for rank in range(4)]
    for rank in made:
        group = "1" if rank.rank < 2 else "2"
        for _ in range(12):
            rank.call("all_reduce", [8, 4096], group=group, line=140, function="row_parallel")
            rank.call("all_reduce", [4_194_304])
        is_stuck = group == "2"
        rank.call(
            "all_reduce", [8, 4096], "started" if is_stuck else "completed", group, line=140, function="row_parallel"
        )
        if not is_stuck:
            rank.call("all_reduce", [4_194_304], "scheduled")
    write_all(made, folder)


def make_never_entered(folder):
    made = make_ranks(8)
    for rank in made:
        if rank.rank != 5:
            rank.call("all_reduce", [4_194_304], "started")
    write_all(made, folder)
    write_log(folder, *(line for rank in (0, 3) for line in watchdog(rank, 41, "ALLREDUCE", 4_194_304, 41, 40)))


def make_other_arguments(folder):
    made = make_ranks(4)
    for rank in made:
        rank.call("_all_gather_base", [4096 if rank.rank != 2 else 4032], "started", dtype="BFloat16", line=61)
    write_all(made, folder)


def make_other_order(folder):
    made = make_ranks(4)
    for rank in made:
        if rank.rank == 3:
            rank.call("all_reduce", [1], "started", line=93, function="log_loss")
            rank.call("all_reduce", [4_194_304], "scheduled")
        else:
            rank.call("all_reduce", [4_194_304], "started")
            rank.call("all_reduce", [1], "scheduled", line=93, function="log_loss")
    write_all(made, folder)


def make_infiniband(folder):
    write_log(
        folder,
        "node12:48112:48391 [3] NCCL WARN NET/IB: Got completion from peer 10.16.4.21<38221> with status=12 opcode=0 "
        "len=0 vendor err 129 (Send) localGid fe80::9c63:c003:88:1b2e remoteGids fe80::9c63:c003:88:1c32",
        "node12:48112:48391 [3] NCCL INFO transport/net.cc:1298 -> 6",
        "[rank3]:[E1128 03:12:53.312345678 ProcessGroupNCCL.cpp:2068] [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group "
        "watchdog thread terminated with exception: NCCL error: remote process exited or there was a network error, NCCL "
        "version 2.27.5",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "Last error:",
        "NET/IB: Got completion from peer 10.16.4.21<38221> with status=12 opcode=0 len=0 vendor err 129 (Send)",
        "srun: error: node12: task 3: Aborted (core dumped)",
    )


def make_link_flap(folder):
    made = make_ranks(2)
    for rank in made:
        rank.call("all_reduce", [4_194_304], "started")
    write_all(made, folder)
    write_log(
        folder,
        "node07:2210:2377 [0] transport/net_ib.cc:94 NCCL WARN NET/IB : mlx5_2:1 Got async event : port error",
        "node07:2210:2377 [0] transport/net_ib.cc:94 NCCL WARN NET/IB : mlx5_2:1 Got async event : client reregistration",
        *watchdog(1, 41, "ALLREDUCE", 4_194_304, 41, 40),
    )


def make_fallen_off_the_bus(folder):
    write_log(
        folder,
        "Nov 28 03:02:17 node31 kernel: NVRM: Xid (PCI:0000:ab:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off "
        "the bus.",
        "Nov 28 03:02:17 node31 kernel: NVRM: GPU 0000:ab:00.0: GPU has fallen off the bus.",
        name="kern.log",
    )
    write_log(folder, *watchdog(2, 41, "ALLREDUCE", 4_194_304, 41, 40))


def make_uncorrectable_memory(folder):
    write_log(
        folder,
        "[rank6]: Traceback (most recent call last):",
        '[rank6]:   File "/workspace/train.py", line 88, in train_step',
        "[rank6]:     loss.backward()",
        "[rank6]: torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        "[rank6]: CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might "
        "be incorrect.",
        *watchdog(0, 41, "ALLREDUCE", 4_194_304, 41, 40),
    )


def make_illegal_address(folder):
    write_log(
        folder,
        "[rank1]:[E1128 03:12:51.112345678 ProcessGroupNCCL.cpp:2068] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group "
        "watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered",
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
        "incorrect.",
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        "Nov 28 03:12:50 node02 kernel: NVRM: Xid (PCI:0000:1a:00): 31, pid=48113, name=python, Ch 00000008, intr 00000000. "
        "MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f12_34000000. Fault is of type FAULT_PDE ACCESS_TYPE_READ",
    )


def make_healthy_dumps(folder):
    made = make_ranks(4)
    write_all(made, folder)


MADE = {
    "stuck-kernel": make_stuck_kernel,
    "stuck-gather": make_stuck_gather,
    "stuck-group": make_stuck_group,
    "never-entered": make_never_entered,
    "other-arguments": make_other_arguments,
    "other-order": make_other_order,
    "infiniband": make_infiniband,
    "link-flap": make_link_flap,
    "fallen-off-the-bus": make_fallen_off_the_bus,
    "uncorrectable-memory": make_uncorrectable_memory,
    "illegal-address": make_illegal_address,
    "healthy-dumps": make_healthy_dumps,
}
