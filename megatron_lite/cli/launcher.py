"""Reads the words of a launch command: torchrun, torch.distributed.launch, srun, mpirun, deepspeed, nsys in front."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lite.cli.batch_systems import Job, read_number, read_options

PROGRAM = "pretrain_gpt.py"
MODULE = "megatron_lite"
SHELLS = ("bash", "sh", "zsh")
SCRIPT_ENDINGS = (".sh", ".bash", ".slurm", ".sbatch", ".pbs", ".job", ".lsf", ".qsub")
MAX_SCRIPT_BYTES = 1 << 20
GPUS_PER_NODE = 8  # of a usual node, where nothing says it
# Option: what it counts. Dashes and underscores are the same to torchrun.
PER_NODE = (
    "--nproc-per-node",
    "--ntasks-per-node",
    "--num-gpus",
    "--gpus-per-node",
    "--npernode",
    "-npernode",
    "--ppn",
    "-ppn",
)
NODES = ("--nnodes", "--nodes", "-N", "--num-nodes")
TASKS = ("-n", "--ntasks", "-np", "--np")
# What starts ranks by itself, and how many where nothing is said; deepspeed takes all GPUs that it finds.
ALONE = {
    "torchrun": 1,
    "torch.distributed.run": 1,
    "torch.distributed.launch": 1,
    "deepspeed": None,
}
# What starts programs on nodes, other launchers among them.
PLACERS = {"srun", "mpirun", "mpiexec", "orterun", "jsrun", "aprun", "ibrun", "prun", "flux"}
OF_MPI = {"mpirun", "mpiexec", "orterun", "prun"}  # whose -N counts ranks of a node
BEGINNINGS = {
    "torchrun",
    "deepspeed",
    *PLACERS,
    "nsys",
    "env",
    "nohup",
    "python",
    "python3",
    PROGRAM,
}
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class ProcessCounts:
    """Processes of a job; None where the launcher does not say a number."""

    per_node: int | None = None
    nodes: int = 1

    @property
    def size(self) -> int | None:
        """Ranks of the whole job."""
        return None if self.per_node is None else self.per_node * self.nodes


@dataclass(frozen=True)
class Launch:
    """The command that starts the trainer."""

    flags: tuple[str, ...]  # of the trainer
    ranks: ProcessCounts
    environment: Mapping[str, str]  # of the trainer
    under_nsys: bool
    notes: tuple[str, ...] = ()  # what was assumed
    left_out: tuple[tuple[str, ...], ...] = ()  # commands that were not run, whose output the script may want
    text: str = ""  # of the script and of those that it starts


def find_launch(words: list[str], environment: Mapping[str, str], job: Job | None = None) -> Launch:
    """Read a launch from the words of a command.

    Args:
        words: the command, with pretrain_gpt.py among its words.
        environment: the variables that the command would see.
        job: what the script asks of the batch system.
    """
    parts = split_at_trainer(words)
    assert parts is not None  # as Args says
    before, flags = parts
    own = dict(word.split("=", 1) for word in before if ASSIGNMENT.match(word))
    under_nsys = any(_name_program(word) == "nsys" for word in before)
    return Launch(tuple(flags), count_ranks(before, job or Job()), {**environment, **own}, under_nsys)


def begins_command(word: str) -> bool:
    """May a launch command begin with this word, which is no option?"""
    return _name_program(word) in BEGINNINGS or ASSIGNMENT.match(word) is not None


def split_at_trainer(words: list[str]) -> tuple[list[str], list[str]] | None:
    """Split a command into the words before pretrain_gpt.py (or `-m megatron_lite`) and those behind it; None where
    it is not among them."""
    for at, word in enumerate(words):
        is_module = at > 0 and words[at - 1 : at + 1] == ["-m", MODULE]
        if is_module or _name_program(word) == PROGRAM:
            return words[:at], words[at + 1 :]
    return None


def _name_program(word: str) -> str:
    """Name the program of a path: /usr/bin/srun -> srun."""
    return word.rpartition("/")[2]


def _count_included(text: str) -> ProcessCounts:
    """Count the GPUs of deepspeed's `--include host-1:0,1@host-2:0,1`; a host without numbers has as many as the
    others."""
    hosts = text.split("@")
    numbers = [host.partition(":")[2] for host in hosts]
    return ProcessCounts(max(len(number.split(",")) for number in numbers), len(hosts))


def count_ranks(words: list[str], job: Job) -> ProcessCounts:
    """Count nodes and ranks by the launcher's words and the job that the script asks for. Plain python is one
    process."""
    options = read_options(words)
    programs = set(map(_name_program, words))
    if any(options.get(name, "1")[:1] in ("", "-") for name in (*PER_NODE, *NODES, *TASKS)):
        # a variable without a value: nobody knows how many
        return ProcessCounts(None)
    own = set(ALONE) & programs
    placers = PLACERS & programs
    if "deepspeed" in own:
        included = options.get("--include", options.get("-i", ""))
        if re.search(r":\d", included):
            return _count_included(included)
    of_mpi = bool(placers & OF_MPI)
    nodes = read_number(options, tuple(name for name in NODES if name != "-N" or not of_mpi))
    if own:
        usual = ALONE[own.pop()]
        is_given = any(name in options for name in PER_NODE)
        return ProcessCounts(read_number(options, PER_NODE) if is_given else usual, nodes or job.nodes or 1)
    if not placers:
        return ProcessCounts(1)
    return _count_placed(options, of_mpi, nodes, job)


def _count_placed(options: Mapping[str, str], of_mpi: bool, nodes: int | None, job: Job) -> ProcessCounts:
    """Count the ranks that a program such as srun or mpirun places.

    Args:
        options: its options.
        of_mpi: whether it is one of MPI's, whose -N counts ranks of a node.
        nodes: the number of nodes, where its options say it.
        job: what the script asks of the batch system.
    """
    tasks = read_number(options, TASKS)
    mapped = re.search(r"ppr:(\d+):node", options.get("--map-by", options.get("-map-by", "")))
    if mapped:
        per_node: int | None = int(mapped[1])
    else:
        per_node = read_number(options, (*PER_NODE, "-N") if of_mpi else PER_NODE)
    if nodes is None and tasks and per_node:
        nodes = math.ceil(tasks / per_node)
    nodes = nodes or job.nodes or 1
    if not per_node:
        if tasks:
            return ProcessCounts(max(1, tasks // nodes), nodes)
        per_node = job.tasks_per_node
    if not per_node and job.tasks:
        per_node = max(1, job.tasks // nodes)
    return ProcessCounts(per_node or None, nodes)
