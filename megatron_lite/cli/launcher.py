"""What the words of a launch command say: torchrun, torch.distributed.launch, srun, mpirun, deepspeed, nsys in front."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

PROGRAM, MODULE = "pretrain_gpt.py", "megatron_lite"
# Option: what it counts. Dashes and underscores are the same to torchrun.
PER_NODE = ("--nproc-per-node", "--ntasks-per-node", "--num-gpus", "--gpus-per-node", "--npernode")
NODES = ("--nnodes", "--nodes", "-N", "--num-nodes")
TASKS = ("-n", "--ntasks", "-np", "--np")
# Variables that Slurm sets in a job, by the options of #SBATCH lines.
SLURM = {
    "SLURM_NNODES": NODES, "SLURM_JOB_NUM_NODES": NODES, "SLURM_NTASKS_PER_NODE": ("--ntasks-per-node",),
    "SLURM_NTASKS": ("-n", "--ntasks"), "SLURM_GPUS_ON_NODE": ("--gpus-per-node", "--gres"),
    "SLURM_GPUS_PER_NODE": ("--gpus-per-node", "--gres"),
}  # fmt: skip
# What starts ranks by itself, and how many where nothing is said; deepspeed takes all GPUs that it finds.
ALONE = {"torchrun": 1, "torch.distributed.run": 1, "torch.distributed.launch": 1, "deepspeed": None}

PLACERS = {"srun", "mpirun", "mpiexec", "orterun"}  # start what other launchers may be among
BEGINNINGS = {"torchrun", "deepspeed", *PLACERS, "nsys", "env", "nohup", "python", "python3", PROGRAM}
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Ranks:
    """Processes of a job; None where the launcher does not say a number."""

    per_node: int | None = None
    nodes: int = 1

    @property
    def size(self) -> int | None:
        """Of the whole job."""
        return None if self.per_node is None else self.per_node * self.nodes


@dataclass(frozen=True)
class Launch:
    """The command that starts the trainer."""

    flags: tuple[str, ...]  # of the trainer
    ranks: Ranks
    environment: Mapping[str, str]  # of the trainer
    under_nsys: bool


def find_launch(words: list[str], environment: Mapping[str, str], header: Mapping[str, str] | None = None) -> Launch:
    """words: with pretrain_gpt.py among them. header: Slurm's variables of the job that a script asks for."""
    before, flags = split_at_trainer(words)
    own = dict(word.split("=", 1) for word in before if ASSIGNMENT.match(word))
    under_nsys = any(_name_program(word) == "nsys" for word in before)
    return Launch(tuple(flags), _count_ranks(before, header or {}), {**environment, **own}, under_nsys)


def begins_command(word: str) -> bool:
    """May a launch command begin with this word, which is no option?"""
    return _name_program(word) in BEGINNINGS or ASSIGNMENT.match(word) is not None


def split_at_trainer(words: list[str]) -> tuple[list[str], list[str]] | None:
    """(the words before pretrain_gpt.py, those behind it; `-m megatron_lite` is the same); None where it is not among them."""
    pairs = zip(["", *words], words)
    at = next(
        (at for at, pair in enumerate(pairs) if _name_program(pair[1]) == PROGRAM or pair == ("-m", MODULE)), None
    )
    return None if at is None else (words[:at], words[at + 1 :])


def _name_program(word: str) -> str:
    """/usr/bin/srun -> srun."""
    return word.rpartition("/")[2]


def _count_ranks(words: list[str], header: Mapping[str, str]) -> Ranks:
    """Of the launcher's words; header: variables of the job that the script asks for. Plain python is one process."""
    options, programs = _read_options(words), set(map(_name_program, words))
    nodes = _read_number(options, NODES) or _read_number(header, ("SLURM_NNODES",)) or 1
    own = set(ALONE) & programs
    if own:
        given = any(name in options for name in PER_NODE)
        return Ranks(_read_number(options, PER_NODE) if given else ALONE[own.pop()], nodes)
    if not PLACERS & programs:
        return Ranks(1)
    tasks = _read_number(options, TASKS) or _read_number(header, ("SLURM_NTASKS",))
    per_node = _read_number(options, PER_NODE) or _read_number(header, ("SLURM_NTASKS_PER_NODE",))
    return Ranks(per_node or (tasks // nodes if tasks else None), nodes)


def header_environment(script: str) -> dict[str, str]:
    """Slurm's variables for the #SBATCH lines at the top of a script."""
    lines = re.findall(r"^#SBATCH\s+(.*)$", script, re.MULTILINE)
    options = _read_options([word for line in lines for word in line.split("#")[0].split()])
    numbers = {name: _read_number(options, wanted) for name, wanted in SLURM.items()}
    return {name: str(number) for name, number in numbers.items() if number is not None}


def _read_options(words: list[str]) -> dict[str, str]:
    """{option: value} of `--name value` and `--name=value`; names with dashes."""
    options = {}
    for word, following in zip(words, [*words[1:], ""]):
        name, equals, value = word.partition("=")
        if name.startswith("-"):
            options[name.replace("_", "-")] = value if equals else following
    return options


def _read_number(options: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The first of `names` that is a number: 8, gpu:8, gpu:a100:8; of a range 1:4 the most."""
    values = (options[name].rpartition(":")[2] for name in names if name in options)
    return next((int(value) for value in values if value.isdigit() and int(value) > 0), None)
