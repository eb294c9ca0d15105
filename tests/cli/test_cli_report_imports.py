"""What megatron-lite report and plan load before they answer: no more than they need, since every import is waited for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import REPO
from support.run_maker import folder, step
from support.trace_maker import gpu_run, write
from support.waiting import LIMIT_S

LOADED = "\nprint(*sorted(sys.modules), sep='\\n')"
COMMAND = "import sys\nfrom megatron_lite.cli.main import main\n"
HEAVY = ("torch", "pandas", "matplotlib", "scipy", "yaml", "sqlite3", "multiprocessing", "importlib.metadata")
OF_OTHER_SOURCES = (
    "megatron_lite.analysis.memory.read", "megatron_lite.analysis.memory.ledger", "megatron_lite.analysis.run.read",
    "megatron_lite.analysis.trace.nsys", "megatron_lite.analysis.compare",
    "megatron_lite.config",
)  # fmt: skip
ALL_OF_IT = (
    "import megatron_lite.cli.report, megatron_lite.analysis.analyze, megatron_lite.report.terminal\n"
    "import megatron_lite.report.html, megatron_lite.report.json_file\n"
)
# With its children's: the bash that reads a script. os.times counts ticks of 10 ms, and missed two thirds of numpy's.
CPU_SECONDS = """
import resource
print(sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
"""
MAX_TIMES_NUMPY = 6.0  # was about 2.3 and 3.1 when this was written; torch alone is 12
TRIES = 3  # the fastest counts: a busy machine only ever adds


def printed(code: str, *argv: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], check=True, capture_output=True, text=True, cwd=REPO, timeout=LIMIT_S,
        env=os.environ | environment,
    )  # fmt: skip
    return done.stdout.splitlines()


def loaded_of(modules: list[str], names: tuple[str, ...]) -> list[str]:
    return [module for module in modules if module in names or module.startswith(tuple(f"{name}." for name in names))]


def measure_cpu_s(folder: Path, code: str) -> float:
    """The least processor time of TRIES, compiled as an installed package is."""
    compiled = {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
    printed(code, **compiled)
    return min(float(printed(code + CPU_SECONDS, **compiled)[-1]) for _ in range(TRIES))


@pytest.mark.parametrize("name", ["report", "live"])
def test_help_needs_nothing_but_the_parser(name):
    modules = printed(f"{COMMAND}try: main(['{name}', '--help'])\nexcept SystemExit: pass{LOADED}")
    assert "argparse" in modules
    assert (
        loaded_of(modules, (*HEAVY, "numpy", "msgspec", "rich", "megatron_lite.analysis", "megatron_lite.report")) == []
    )


def test_a_run_is_followed_without_heavy_packages(tmp_path):
    words = ["live", "--once", str(folder(tmp_path, [step(1), step(2)]))]
    modules = printed(f"{COMMAND}assert main(sys.argv[1:]) == 0{LOADED}", *words)
    assert "rich" in modules and loaded_of(modules, (*HEAVY, *OF_OTHER_SOURCES[:2], "jinja2")) == []


def test_a_traces_report_loads_no_heavy_package_and_nothing_for_other_sources(tmp_path):
    path = write(gpu_run(steps=6).data(), tmp_path / "rank0.pt.trace.json")
    words = ["report", str(path), "--html", f"{tmp_path}/page.html"]
    modules = printed(f"{COMMAND}assert main(sys.argv[1:]) == 0{LOADED}", *words)
    assert "megatron_lite.report.html" in modules and (tmp_path / "page.html").exists()
    light = ("megatron_lite.config", "megatron_lite.machine")  # asked how much memory there is
    assert [module for module in loaded_of(modules, (*HEAVY, *OF_OTHER_SOURCES)) if module not in light] == []


def test_all_imports_together_and_a_plan_cost_a_few_times_numpys(tmp_path):
    script = REPO / "examples/gpt3/train_gpt3_857m_distributed.sh"
    words = ["plan", "--gpu", "H200", str(script), "CKPT", "TB", "no/VOCAB", "no/MERGES", "no/DATA"]
    numpy_s = measure_cpu_s(tmp_path, "import numpy")
    assert measure_cpu_s(tmp_path, ALL_OF_IT) < MAX_TIMES_NUMPY * numpy_s
    assert measure_cpu_s(tmp_path, f"{COMMAND}assert main({words}) == 0") < MAX_TIMES_NUMPY * numpy_s


def test_a_training_loads_nothing_before_its_first_step_that_only_other_runs_use():
    """Without what torch's optimizers import when they are made: the compiler, and with it much of torch.distributed."""
    modules = printed("import sys\nimport megatron_lite.app" + LOADED)
    others = ("torch.distributed.checkpoint", "torch.distributed.tensor", "torch._dynamo", "torch._inductor", "sympy")
    assert "torch" in modules
    assert loaded_of(modules, (*others, "tensorboard", "transformers", "wandb", "mlflow", "yaml")) == []
