"""The recipes for clusters, as far as they go without one: Slurm's commands are stood in for, and Kubernetes' file is read."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.example_runs import OURS, SLURM, TINY, read_tracker
from support.paths import REPO
from support.waiting import LIMIT_S
from support.wording import wording

from megatron_lite.config.command_line import read_command_line

LONG = [*TINY, "--train-iters", 10_000, "--lr-decay-iters", 10_000, "--log-interval", 1, "--eval-iters", 0]
STAND_INS = {  # of Slurm's commands; `scancel` reaches what `srun` started, as Slurm's does
    "srun": 'while [[ $1 == --* ]]; do shift; done\nSLURM_NODEID=0 exec "$@"',
    "scontrol": 'if [[ $1 == show ]]; then echo localhost; else echo "$@" >>"$QUEUE"; fi',
    "scancel": (
        "for process in /proc/[0-9]*; do\n"
        '  if grep -qz "^SLURM_NODEID=0" "$process/environ" 2>/dev/null && grep -qz "^QUEUE=$QUEUE" "$process/environ"; then\n'
        '    kill "-${1#--signal=}" "${process#/proc/}" || true\n'
        "  fi\n"
        "done"
    ),
}


@pytest.fixture
def slurm(tmp_path) -> dict[str, str]:
    """Environment of a job on one node."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in OURS}
    return kept | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "",
        "SLURM_SUBMIT_DIR": str(REPO), "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here", "SLURM_JOB_ID": str(os.getpid()),
        "QUEUE": str(tmp_path / "queue"),
    }  # fmt: skip


def start(environment: dict[str, str], *words) -> subprocess.Popen:
    return subprocess.Popen(
        ["bash", str(SLURM), *map(str, words)], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )  # fmt: skip


@pytest.mark.slow
def test_a_slurm_job_whose_time_is_over_is_queued_again_and_ends(slurm, places):
    job, steps = start(slurm, *places, "--", *LONG), 0
    try:
        for line in job.stdout:
            steps += "iteration" in line and "lm loss" in line
            if steps == 2:
                job.send_signal(signal.SIGUSR1)
                break
        out, _ = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
    assert job.returncode == 0 and wording("examples/exiting-program-after-receiving") in out, out
    queue = Path(slurm["QUEUE"])
    assert queue.read_text() == f"requeue {os.getpid()}\n"
    done = read_tracker(places[0])
    assert done >= 2
    queue.unlink()
    job = start(slurm, *places, "--", *LONG, "--exit-interval", done + 1)
    out, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0 and not queue.exists(), out
    assert read_tracker(places[0]) == done + 1


def test_a_slurm_job_that_fails_is_not_queued_again(slurm, tmp_path):
    job = start(slurm, "CKPT")
    out, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 2 and "TB is missing" in out and not Path(slurm["QUEUE"]).exists()
    job = start(slurm | {"SLURM_SUBMIT_DIR": str(tmp_path)})
    out, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 2 and out.startswith("error: ") and out.count("\n") == 1


def test_kubernetes_starts_the_script_on_every_node():
    made = yaml.safe_load((REPO / "examples/gpt3/kubernetes.yaml").read_text())
    assert (made["apiVersion"], made["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    [jobs] = made["spec"]["replicatedJobs"]
    job, pod = jobs["template"]["spec"], jobs["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert set(values) <= {*OURS} and values["NODE_RANK"] is None
    assert job["completions"] == job["parallelism"] == int(values["NUM_NODES"]) > 1
    # JobSet's name of a pod: of the set, of the job, its number, and the pod's; in a domain of the set's name
    assert values["MASTER_ADDR"] == f"{made['metadata']['name']}-{jobs['name']}-0-0.{made['metadata']['name']}"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(values["GPUS_PER_NODE"])
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    script, flags = container["command"][1], container["args"][container["args"].index("--") + 1 :]
    assert (REPO / re.sub(".*/examples/", "examples/", script)).is_file() and container["args"].index("--") == 5
    line = read_command_line(
        ["--num-layers", "2", "--hidden-size", "8", "--num-attention-heads", "2", "--mock-data", *flags]
    )
    assert line.args.training.exit_signal_handler
