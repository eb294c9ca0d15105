"""Traces open in the tools that people use: HolisticTraceAnalysis and TensorBoard's profiler plugin.

They need versions of pandas and setuptools that this project's own environment may not have: TRACE_TOOLS_PYTHON names
the interpreter of one that has them (pip install HolisticTraceAnalysis torch_tb_profiler tensorboard 'pandas<2.3'
'setuptools<80').
"""

import json
import os
import subprocess
import sys

import pytest
from support.launch import flags, pretrain
from support.waiting import LIMIT_S

PYTHON = os.environ.get("TRACE_TOOLS_PYTHON", sys.executable)

HOLISTIC = """
import json, logging, sys
logging.disable(logging.WARNING)
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1])
names = analysis.get_gpu_user_annotation_breakdown(use_gpu_annotation=False, visualize=False)
print(json.dumps({"ranks": sorted(analysis.t.get_all_traces()), "steps": list(map(int, analysis.get_profiler_steps())),
                  "names": sorted(set(names["name"]))}))
"""

TENSORBOARD = """
import json, logging, sys
logging.disable(logging.ERROR)
from torch_tb_profiler.io.cache import Cache
from torch_tb_profiler.profiler.loader import RunLoader
run = RunLoader("run", sys.argv[1], Cache()).load()
profiles = [profile for profile in run.profiles.values() if profile.worker != "All"]
views = {view.display_name for profile in run.profiles.values() for view in profile.views}
rows = [len(profile.operation_table_by_name["data"]) for profile in profiles]
print(json.dumps({"workers": run.workers, "views": sorted(views), "operators": min(rows)}))
"""


def ask(script: str, folder) -> dict:
    command, environ = [PYTHON, "-c", script, str(folder)], os.environ | {"HTA_DISABLE_NS_ROUNDING": "1"}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S, env=environ)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout.splitlines()[-1])


def need(package: str):
    if subprocess.run([PYTHON, "-c", f"import {package}"], check=False, capture_output=True).returncode:
        pytest.skip(f"{PYTHON} has no {package}; TRACE_TOOLS_PYTHON names an interpreter that has")


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    window = "--train-iters 7 --profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 6"
    details = "--profile-ranks -1 --profile-modules --profile-gzip --pytorch-profiler-collect-shapes"
    folders = f"--tensorboard-dir {folder}/tb --run-dir {folder}/run"
    ended = pretrain(flags(window, details, folders), ranks=2)
    assert ended.code == 0, ended.err
    return folder / "tb"


@pytest.mark.slow
def test_holistic_trace_analysis_reads_ranks_steps_and_phases(traces):
    need("hta")
    read = ask(HOLISTIC, traces)
    assert read["ranks"] == [0, 1] and read["steps"] == [3, 4]  # it leaves the last of several steps out, always
    assert {"forward", "backward", "optimizer_step", "layers.0 forward", "layers.1.mlp backward"} <= set(read["names"])


@pytest.mark.slow
def test_tensorboards_plugin_reads_workers_and_operators(traces):
    need("torch_tb_profiler")
    read = ask(TENSORBOARD, traces)
    assert [worker.rpartition("_")[2] for worker in read["workers"]] == ["All", "rank0", "rank1"]
    assert {"Overview", "Operator", "Trace", "Distributed"} <= set(read["views"]) and read["operators"] > 20
