"""Ranks that launchers other than torchrun start, and variables of ranks that cannot be."""

import subprocess
import sys

import pytest
from support.forks import Fork
from support.launch import environment, flags, free_port
from support.paths import REPO
from support.waiting import LIMIT_S

from megatron_lite.config.launchers import (
    FIRST_PORT,
    PORTS,
    USUAL_PORT,
    expand_tasks,
    find_first_host,
    find_launch,
    read_launchers,
    read_ranks,
)
from megatron_lite.config.world import World, read_world
from megatron_lite.errors import ConfigError, UserError
from megatron_lite.rank_errors import describe_failed_meeting

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "12",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3,1",
    "SLURM_NNODES": "4",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-09]-ib,cpu[1,3]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def variables(environ: dict[str, str]) -> dict[str, str]:
    launch = find_launch(environ)
    return {} if launch is None else dict(launch.variables)


def test_slurm_s_step_is_read_as_torchrun_would_set_it():
    assert variables(SLURM) == {
        "RANK": "9",
        "WORLD_SIZE": "12",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu07-ib",
        "MASTER_PORT": str(FIRST_PORT + 4711 % PORTS),
    }


def test_all_ranks_of_a_step_meet_at_one_place_and_steps_at_several():
    ranks = [variables(SLURM | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}) for rank in range(12)]
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in ranks}) == 1
    assert variables(SLURM | {"SLURM_STEP_ID": "1"})["MASTER_PORT"] != ranks[0]["MASTER_PORT"]


@pytest.mark.parametrize(
    ("environ", "rank", "size"),
    [
        (OPEN_MPI, "1", "2"),
        # mpirun starts its ranks by daemons that are tasks of Slurm
        (OPEN_MPI | SLURM, "1", "2"),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}, "3", "4"),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_SIZE": "2"}, "0", "2"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "1", "FLUX_TASK_LOCAL_ID": "0"}, "0", "2"),
        ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_LOCAL_SIZE": "6"}, "0", "6"),
        ({"PALS_RANKID": "2", "PMI_RANK": "2", "PMI_SIZE": "4", "PALS_LOCAL_SIZE": "4"}, "2", "4"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NNODES": "1"}, "0", "2"),
    ],
)
def test_each_launcher_s_names_are_known(environ, rank, size):
    found = variables(environ)
    assert (found["RANK"], found["WORLD_SIZE"]) == (rank, size)
    assert found["MASTER_PORT"].isdigit() and found["MASTER_ADDR"]
    read_ranks(environ | found)


def test_a_job_s_name_makes_its_port():
    assert int(variables(OPEN_MPI)["MASTER_PORT"]) == USUAL_PORT
    named = variables(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-host-1@1"})
    assert FIRST_PORT <= int(named["MASTER_PORT"]) < FIRST_PORT + PORTS


def test_hosts_come_from_a_file_too(tmp_path):
    (tmp_path / "nodes").write_text("first\nfirst\nsecond\n")
    wide = OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4", "PBS_NODEFILE": str(tmp_path / "nodes")}
    assert variables(wide)["MASTER_ADDR"] == "first"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        # torchrun in a step with a task per node
        SLURM | {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "32"},
        # some other launcher, started in a task
        SLURM | {"RANK": "5", "WORLD_SIZE": "96"},
    ],
)
def test_nothing_is_added_where_a_process_is_alone_or_has_its_place(environ):
    assert variables(environ) == {}


def test_the_shell_of_a_batch_script_is_no_task_of_it():
    batch = {name: value for name, value in SLURM.items() if "STEP" not in name} | {"SLURM_PROCID": "0"}
    launch = find_launch(batch)
    assert launch is not None and not launch.variables and "SLURM_NTASKS=12" in launch.remark
    # srun --preserve-env of an interactive step keeps the job's number of tasks
    assert find_launch({**batch, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_what_a_script_sets_counts_and_the_rest_is_added():
    script = {"RANK": "9", "WORLD_SIZE": "12", "MASTER_ADDR": "chosen", "MASTER_PORT": "1234"}
    assert variables(SLURM | script) == {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    assert "MASTER_ADDR" not in variables(SLURM | {"MASTER_ADDR": "chosen"})


@pytest.mark.parametrize(
    "environ",
    [
        {name: value for name, value in SLURM.items() if "NODELIST" not in name},
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"},
        {"PMIX_RANK": "1"},
    ],
)
def test_a_launcher_that_does_not_say_enough_is_refused(environ):
    with pytest.raises(UserError) as refused:
        find_launch(environ)
    assert len(str(refused.value).splitlines()) == 1


def test_slurm_s_lists_are_read():
    assert expand_tasks("4(x2),3") == [4, 4, 3] and expand_tasks("8") == [8] and expand_tasks("x") == []
    assert find_first_host("a") == "a" and find_first_host("r[0-1]n[3,5],b") == "r0n3" and find_first_host("") is None


def test_the_table_s_rows_are_complete():
    assert len({launcher.name for launcher in read_launchers()}) == len(read_launchers()) > 5
    assert all(launcher.variables["rank"] for launcher in read_launchers())


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": ""}, ["RANK"]),
        ({"RANK": "a", "WORLD_SIZE": "b"}, ["WORLD_SIZE", "RANK"]),
        ({"RANK": "1.0"}, ["RANK"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK"]),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK"]),
        ({"RANK": "1"}, ["RANK"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE"]),
        ({"LOCAL_RANK": ""}, ["LOCAL_RANK"]),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "2", "WORLD_SIZE": "4"}, ["LOCAL_RANK"]),
        ({"LOCAL_WORLD_SIZE": "0"}, ["LOCAL_WORLD_SIZE"]),
        ({"LOCAL_WORLD_SIZE": "9", "RANK": "0", "WORLD_SIZE": "2"}, ["LOCAL_WORLD_SIZE"]),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "abc", "RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_PORT"]),
        ({"MASTER_PORT": "70000", "RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_PORT"]),
    ],
)
def test_variables_that_cannot_be_are_told_in_a_line_each(environ, named):
    with pytest.raises(ConfigError) as refused:
        read_world(0, 1, environ)
    assert [line.partition("=")[0] for line in refused.value.lines] == named


def test_a_rank_that_sees_its_own_gpu_only_shares_it_with_nobody():
    place = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    assert read_world(1, 1, place).local_size == 1
    assert read_world(1, 1, place | {"TORCHELASTIC_RUN_ID": "x"}).local_size == read_world(8, 1, place).local_size == 8


@pytest.mark.parametrize(
    ("failure", "rank", "size", "says"),
    [
        (
            "Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
            0,
            2,
            ["rank 1 did not come", "1 of 2"],
        ),
        ("Timed out after 61 seconds waiting for clients. 5/8 clients joined.", 0, 8, ["3 of 8 ranks", "5 of 8"]),
        ("The client socket has timed out after 60000ms", 3, 8, ["rank 0 cannot be reached"]),
        ("The server socket has failed to listen ... EADDRINUSE", 0, 2, ["MASTER_PORT 29500 is in use"]),
        ("The hostname of the address cannot be resolved", 0, 2, ["host:29500"]),
    ],
)
def test_who_did_not_come_is_told(failure, rank, size, says):
    line = describe_failed_meeting(failure, World(rank, size), "host:29500", 60)
    assert all(words in line for words in says), line


def test_mistakes_of_the_environment_end_with_one_line():
    words = [sys.executable, "-m", "megatron_lite", *flags()]
    ended = subprocess.run(
        words, env=environment() | {"RANK": "a"}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1 and "RANK='a'" in ended.stderr


def test_tasks_of_srun_are_the_ranks_of_one_run(tmp_path):
    script = str(REPO / "pretrain_gpt.py")
    port, processes = str(free_port()), []
    for task in range(2):
        step = {"MASTER_PORT": port, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
        step |= {"SLURM_NNODES": "1", "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}
        with open(tmp_path / f"out{task}", "w") as out:
            words = [script, *flags("--train-iters 2 --save save")]
            processes.append(Fork(words, env=environment() | step, cwd=tmp_path, stdout=out, stderr=out))
    assert [process.wait(timeout=LIMIT_S) for process in processes] == [0, 0]
    first = (tmp_path / "out0").read_text()
    assert "2 ranks on" in first and "Slurm" in first
    assert len(list((tmp_path / "save").glob("iter_*"))) == 1
