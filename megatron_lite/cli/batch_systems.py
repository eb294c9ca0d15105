"""Variables that a batch system gives to the jobs that it starts, as far as the lines at the top of their scripts
decide them.

Values that only the cluster knows, such as the number of a job and the names of its nodes, have a stand-in: a script
that is gone through on a laptop needs a value there, and no plan depends on which.
"""

import getpass
import math
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

JOB_ID = "123456"
JOB_NAME = "job"
NODE = "node"
NODE_FILE = "nodes"
DAY_S = 86_400
START_TIME = 1_700_000_000
OPTION_WITH_NUMBER = re.compile(r"(-[NncG])=?(\d+)$")
GPU_RESOURCE = re.compile(r"(?:^|,)(?:gres/)?gpu(?:[:=][A-Za-z][^:,=]*)?(?:[:=](\d+))?(?=,|$|\()")


@dataclass(frozen=True)
class Job:
    """A script's request to the batch system; None where it does not say. environment: the variables that the job
    would see."""

    nodes: int | None = None
    tasks: int | None = None
    tasks_per_node: int | None = None
    gpus_per_node: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def read_job(script: str, name: str, folder: Path, options: list[str] | None = None) -> Job:
    """The job of a script's text; without lines of a batch system, one that says nothing.

    Args:
        script: its text.
        name: of its file.
        folder: for the list of nodes, which is written there if the batch system hands it on as a file.
        options: of sbatch or its like, which override those of the script; None where it was not submitted.
    """
    for marker, submitters, read in SYSTEMS:
        words = _read_header(script, marker)
        if words or (options is not None and options[0] in submitters):
            return read([*words, *(options or [])[1:]], Path(name).name, folder)
    return Job()


def find_submitter(word: str) -> bool:
    """Whether the program submits jobs."""
    return any(word.rpartition("/")[2] in submitters for _, submitters, _ in SYSTEMS)


def _read_header(script: str, marker: str) -> list[str]:
    """The words of a batch system's lines, which stand above the first command."""
    words: list[str] = []
    for line in script.splitlines():
        if line.startswith(marker) and line[len(marker) :][:1].isspace():
            words += split_words(line[len(marker) :])
        elif line.strip() and not line.startswith("#"):
            break
    return words


def split_words(line: str) -> list[str]:
    """The words of a line as a shell would see them, without a comment."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.partition(" #")[0].split()


def read_options(words: list[str]) -> dict[str, str]:
    """Read `--name value`, `--name=value` and `-N4` into values by option; names keep their dashes."""
    options = {}
    for word, following in zip(words, [*words[1:], ""]):
        glued = OPTION_WITH_NUMBER.match(word)
        if glued:
            options[glued[1]] = glued[2]
            continue
        name, equals, value = word.partition("=")
        if name.startswith("-"):
            options[name.replace("_", "-")] = value if equals else following
    return options


def read_number(options: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """Read the first of `names` that is a number: 8, gpu:8, gpu:a100:8,nvme:1.

    Of torchrun's range 1:4 that is the most, of Slurm's 2-4 the least.
    """
    for name in names:
        value = options.get(name, "")
        gpus = GPU_RESOURCE.search(value)
        if value == "gpu" and name != "--gres":
            # torchrun's word for all that it finds
            continue
        text = value.rpartition(":")[2].partition("-")[0]
        if gpus:
            text = gpus[1] or "1"
        if text.isdigit() and int(text) > 0:
            return int(text)
    return None


def _name_nodes(number: int) -> list[str]:
    return [f"{NODE}{at}" for at in range(1, number + 1)]


def expand_nodes(names: str) -> list[str]:
    """Expand a list of nodes: node[1-3,7],other -> node1, node2, node3, node7, other."""
    found = []
    for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", names):
        before, bracket, rest = name.partition("[")
        inside, _, after = rest.partition("]")
        parts = inside.split(",") if bracket else [""]
        for part in parts:
            found += [f"{before}{number}{after}" for number in _expand_range(part)]
    return found


def _expand_range(part: str) -> list[str]:
    """Expand 08-10 into 08, 09, 10; what is no range stands for itself."""
    first, dash, last = part.partition("-")
    if not (dash and first.isdigit() and last.isdigit()):
        return [part]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _write_nodes(folder: Path, nodes: int, times: int) -> str:
    """Write the names of a job's nodes, each as often as it has processes. Returns the path of the file."""
    path = folder / NODE_FILE
    lines = [f"{name}\n" * times for name in _name_nodes(nodes)]
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def _as_variables(values: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None}


def _name_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "user"


def _read_array(text: str) -> list[int]:
    """0-9, 1,3,5, 0-9:3, 0-9%2 -> the numbers of its tasks."""
    found: list[int] = []
    for part in text.partition("%")[0].split(","):
        numbers = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part.strip())
        if numbers:
            first = int(numbers[1])
            last = int(numbers[2] or first)
            step = int(numbers[3] or 1)
            # a step of 0 is none
            found += range(first, last + 1, step or 1)
    return found


def _size_slurm_job(options: Mapping[str, str]) -> Job:
    """Nodes, tasks and GPUs, as far as one follows from the others."""
    tasks = read_number(options, ("-n", "--ntasks"))
    per_node = read_number(options, ("--ntasks-per-node", "--tasks-per-node"))
    all_gpus = read_number(options, ("-G", "--gpus"))
    gpus = read_number(options, ("--gpus-per-node", "--gres"))
    nodes = read_number(options, ("-N", "--nodes"))
    if nodes is None and tasks and per_node:
        nodes = math.ceil(tasks / per_node)
    if nodes is None and all_gpus and gpus:
        nodes = math.ceil(all_gpus / gpus)
    count = nodes or 1
    if tasks is None and per_node:
        tasks = count * per_node
    task_gpus = read_number(options, ("--gpus-per-task",))
    if gpus is None and all_gpus:
        gpus = max(1, all_gpus // count)
    if gpus is None and task_gpus and tasks:
        gpus = task_gpus * max(1, tasks // count)
    return Job(nodes, tasks, per_node, gpus)


def _read_slurm(words: list[str], name: str, folder: Path) -> Job:
    """Read Slurm's options into a job, as the output variables on sbatch's manual page of Slurm 24.05 describe it."""
    options = read_options(words)
    job = _size_slurm_job(options)
    variables = {
        **_name_slurm_sizes(job, options),
        **_name_slurm_stand_ins(job, options, name, folder),
    }
    return replace(job, environment=_as_variables(variables))


def _name_slurm_sizes(job: Job, options: Mapping[str, str]) -> dict[str, object]:
    count = job.nodes or 1
    tasks_here = max(1, (job.tasks or count) // count)
    devices = ",".join(map(str, range(job.gpus_per_node))) if job.gpus_per_node else None
    cpus = read_number(options, ("-c", "--cpus-per-task"))
    cpus_here = (cpus or 1) * tasks_here
    return {
        "SLURM_NNODES": count,
        "SLURM_JOB_NUM_NODES": count,
        "SLURM_NTASKS": job.tasks,
        "SLURM_NPROCS": job.tasks,
        "SLURM_NTASKS_PER_NODE": job.tasks_per_node,
        "SLURM_TASKS_PER_NODE": f"{tasks_here}(x{count})" if count > 1 else tasks_here,
        "SLURM_GPUS_ON_NODE": job.gpus_per_node,
        "SLURM_GPUS_PER_NODE": job.gpus_per_node,
        "SLURM_GPUS": read_number(options, ("-G", "--gpus")),
        "SLURM_GPUS_PER_TASK": read_number(options, ("--gpus-per-task",)),
        "SLURM_JOB_GPUS": devices,
        "CUDA_VISIBLE_DEVICES": devices,
        "SLURM_CPUS_PER_TASK": cpus,
        "SLURM_CPUS_ON_NODE": cpus_here,
        "SLURM_JOB_CPUS_PER_NODE": cpus_here,
        "SLURM_MEM_PER_NODE": read_number(options, ("--mem",)),
    }


def _name_slurm_stand_ins(job: Job, options: Mapping[str, str], name: str, folder: Path) -> dict[str, object]:
    count = job.nodes or 1
    nodelist = f"{NODE}1" if count == 1 else f"{NODE}[1-{count}]"
    variables: dict[str, object] = {
        "SLURM_JOB_ID": JOB_ID,
        "SLURM_JOBID": JOB_ID,
        "SLURM_JOB_NAME": options.get("--job-name", options.get("-J", name)),
        "SLURM_JOB_NODELIST": nodelist,
        "SLURM_NODELIST": nodelist,
        "SLURM_STEP_NODELIST": nodelist,
        "SLURMD_NODENAME": f"{NODE}1",
        "SLURM_TOPOLOGY_ADDR": f"{NODE}1",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
        "SLURM_SUBMIT_DIR": options.get("--chdir", options.get("-D", os.getcwd())),
        "SLURM_SUBMIT_HOST": "login",
        "SLURM_CLUSTER_NAME": "cluster",
        "SLURM_JOB_PARTITION": options.get("--partition", options.get("-p", "partition")),
        "SLURM_JOB_ACCOUNT": options.get("--account", options.get("-A", "account")),
        "SLURM_JOB_USER": _name_user(),
        "SLURM_PROCID": 0,
        "SLURM_NODEID": 0,
        "SLURM_LOCALID": 0,
        "SLURM_STEP_ID": 0,
        "SLURM_RESTART_COUNT": 0,
        "SLURM_JOB_START_TIME": START_TIME,
        "SLURM_JOB_END_TIME": START_TIME + DAY_S,
        "SLURM_TMPDIR": str(folder),
    }
    array = _read_array(options.get("--array", options.get("-a", "")))
    if array:
        variables |= {
            "SLURM_ARRAY_JOB_ID": JOB_ID,
            "SLURM_ARRAY_TASK_ID": array[0],
            "SLURM_ARRAY_TASK_COUNT": len(array),
            "SLURM_ARRAY_TASK_MIN": min(array),
            "SLURM_ARRAY_TASK_MAX": max(array),
        }
    return variables


def _read_pbs(words: list[str], name: str, folder: Path) -> Job:
    """PBS Professional's (select=2:ncpus=64:ngpus=4:mpiprocs=4) and Torque's (nodes=2:ppn=8:gpus=4) resources."""
    options = read_options(words)
    nodes, each = _read_pbs_resources(words)
    processes = read_number(each, ("mpiprocs", "ppn"))
    per_node = processes or 1
    array = _read_array(options.get("-J", options.get("-t", "")))
    task = array[0] if array else None
    variables = {
        "PBS_JOBID": f"{JOB_ID}.server",
        "PBS_JOBNAME": options.get("-N", name),
        "PBS_O_WORKDIR": os.getcwd(),
        "PBS_NODEFILE": _write_nodes(folder, nodes, per_node),
        "PBS_NUM_NODES": nodes,
        "PBS_NUM_PPN": per_node,
        "PBS_NP": nodes * per_node,
        "PBS_NODENUM": 0,
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_QUEUE": options.get("-q", "queue"),
        "PBS_O_HOST": "login",
        "PBS_O_HOME": str(Path.home()),
        "PBS_JOBDIR": os.getcwd(),
        "NCPUS": each.get("ncpus"),
        "PBS_ARRAY_INDEX": task,
        "PBS_ARRAYID": task,
    }
    return Job(
        nodes=nodes,
        tasks=nodes * processes if processes else None,
        tasks_per_node=processes,
        gpus_per_node=read_number(each, ("ngpus", "gpus")),
        environment=_as_variables(variables),
    )


def _read_pbs_resources(words: list[str]) -> tuple[int, dict[str, str]]:
    """Read the number of nodes, and what each of them has, from the resources behind -l."""
    asked = [value for option, value in pairwise(words) if option == "-l"]
    chunks = re.search(r"\b(?:select|nodes)=(\d+)?([^,\s]*)", ",".join(asked))
    if chunks is None:
        return 1, {}
    return int(chunks[1] or 1), dict(re.findall(r":(\w+)=(\d+)", chunks[2]))


def _read_lsf(words: list[str], name: str, folder: Path) -> Job:
    options = read_options(words)
    tasks = read_number(options, ("-n",))
    tile = re.search(r"ptile=(\d+)", " ".join(words))
    per_node = int(tile[1]) if tile else None
    nodes = read_number(options, ("-nnodes",))
    if nodes is None and tasks and per_node:
        nodes = math.ceil(tasks / per_node)
    gpus = re.search(r"\bnum=(\d+)", options.get("-gpu", ""))
    count = nodes or 1
    slots = per_node or max(1, (tasks or 1) // count)
    hosts = _name_nodes(count)
    slots_of_hosts = [f"{host} {slots}" for host in hosts]
    variables = {
        "LSB_JOBID": JOB_ID,
        "LSB_JOBNAME": options.get("-J", name),
        "LSB_HOSTS": " ".join(hosts * slots),
        "LSB_MCPU_HOSTS": " ".join(slots_of_hosts),
        "LSB_DJOB_NUMPROC": count * slots,
        "LSB_DJOB_HOSTFILE": _write_nodes(folder, count, slots),
        "LSB_SUBCWD": os.getcwd(),
        "LS_SUBCWD": os.getcwd(),
        "LSB_QUEUE": options.get("-q", "queue"),
        "LSB_JOBINDEX": 1,
    }
    return Job(nodes, tasks, per_node, int(gpus[1]) if gpus else None, _as_variables(variables))


def _read_grid_engine(words: list[str], name: str, folder: Path) -> Job:
    options = read_options(words)
    asked = re.search(r"\b(rt_[A-Z]+)\w*=(\d+)", " ".join(words))
    slots = re.search(r"-pe \S+ (\d+)", " ".join(words))
    nodes = int(asked[2]) if asked else 1
    variables = {
        "SGE_RESOURCE_TYPE": asked[1] if asked else None,
        "JOB_ID": JOB_ID,
        "JOB_NAME": options.get("-N", name),
        "NHOSTS": nodes,
        "NSLOTS": int(slots[1]) if slots else nodes,
        "SGE_JOB_HOSTLIST": _write_nodes(folder, nodes, 1),
        "PE_HOSTFILE": str(folder / NODE_FILE),
        "SGE_TASK_ID": 1,
        "SGE_O_WORKDIR": os.getcwd(),
        "SGE_LOCALDIR": str(folder),
    }
    return Job(nodes, int(slots[1]) if slots else None, None, None, _as_variables(variables))


def _read_fujitsu(words: list[str], name: str, folder: Path) -> Job:
    asked = ",".join(words)
    node = re.search(r"\bnode=(\d+)", asked)
    process = re.search(r"\bproc=(\d+)", asked)
    nodes = int(node[1]) if node else 1
    tasks = int(process[1]) if process else None
    variables = {
        "PJM_JOBID": JOB_ID,
        "PJM_JOBNAME": name,
        "PJM_NODE": nodes,
        "PJM_MPI_PROC": tasks or nodes,
        "PJM_O_NODEINF": _write_nodes(folder, nodes, 1),
        "PJM_O_WORKDIR": os.getcwd(),
    }
    return Job(nodes, tasks, tasks // nodes if tasks else None, None, _as_variables(variables))


# The lines of a script, what submits it, what reads them.
SYSTEMS: tuple[tuple[str, tuple[str, ...], Callable[[list[str], str, Path], Job]], ...] = (
    ("#SBATCH", ("sbatch",), _read_slurm),
    ("#PBS", (), _read_pbs),
    ("#BSUB", ("bsub",), _read_lsf),
    ("#PJM", ("pjsub",), _read_fujitsu),
    ("#$", ("qsub",), _read_grid_engine),
)
