"""What pip makes of the repository works by itself, and so does the container image, as far as that is seen without Docker."""

import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.paths import REPO

from megatron_lite.terminal import describe_version

PACKAGE = "megatron_lite"
IMAGE = REPO / "examples" / "gpt3" / "Dockerfile"


def run(*command, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> tuple[Path, Path, Path]:
    """A copy of what is packed, the sdist made of it, and the wheel made of that sdist."""
    folder = tmp_path_factory.mktemp("distributions")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source / name)
    shutil.copytree(REPO / PACKAGE, source / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "build", "--outdir", folder, source, cwd=folder)
    return source, *folder.glob("*.tar.gz"), *folder.glob("*.whl")


def make_clean_environment(folder: Path) -> Path:
    """An environment with the packages that this one has beside the project, which is not installed in it; returns its bin/."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    [packages] = folder.glob("lib/python*/site-packages")
    beside = [path for path in sys.path if path.endswith("site-packages") and path != str(REPO)]
    (packages / "beside.pth").write_text("\n".join(dict.fromkeys([*site.getsitepackages(), *beside])))
    return folder / "bin"


@pytest.mark.slow
def test_sdist_and_wheel_hold_all_that_the_package_needs(distributions):
    source, sdist, wheel = distributions
    files = {str(path.relative_to(source)) for path in (source / PACKAGE).rglob("*") if path.is_file()}
    assert files == {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(f"{PACKAGE}/")}
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames() if not packed.getmember(name).isdir()}
    assert files | {"pyproject.toml", "README.md", "LICENSE"} <= names


@pytest.mark.slow
def test_the_installed_package_trains_generates_and_watches(distributions, tmp_path):
    tools = make_clean_environment(tmp_path / "clean")
    run(tools / "python", "-m", "pip", "install", "--no-deps", "--no-index", distributions[2], cwd=tmp_path)
    place = run(tools / "python", "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)", cwd=tmp_path)
    assert place.startswith(str(tmp_path / "clean"))
    said = describe_version()
    for command in ([tools / "megatron-lite"], [tools / "python", "-m", PACKAGE], [tools / "megatron-lite", "report"]):
        assert run(*command, "--version", cwd=tmp_path).strip() == said
    words = "--mock-data --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --vocab-size 16"
    words += " --tokenizer-type NullTokenizer --micro-batch-size 1 --lr 1e-3 --train-iters 2 --save saved --run-dir run"
    assert "iteration        2/       2" in run(tools / "megatron-lite", "train", *words.split(), cwd=tmp_path)
    prompt = ("--prompt", "1 2 3", "--max-new-tokens", 4)
    assert run(tools / "megatron-lite", "generate", "--load", "saved", *prompt, cwd=tmp_path).startswith("1 2 3")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nlayer = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(layer.parameters())\n"
        "for _ in range(8):\n    layer(torch.ones(2)).sum().backward()\n    optimizer.step()\n"
    )
    options = ("--steps", "3:5", "--run-dir", "watched", "--no-report")
    run(tools / "megatron-lite", "watch", *options, "--", tools / "python", script, cwd=tmp_path)
    written = (tmp_path / "watched" / "steps.jsonl").read_text().splitlines()
    assert sum(line.startswith('{"kind":"step"') for line in written) == 8


def test_the_script_names_its_version_without_torch():
    code = "import runpy, sys\ntry:\n    runpy.run_path('pretrain_gpt.py', run_name='__main__')\nfinally:\n    assert 'torch' not in sys.modules"
    assert run(sys.executable, "-c", code, "--version", cwd=REPO).strip() == describe_version()


def read_image() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile: (word, the rest), comments left out and continued lines joined."""
    lines = [line for line in IMAGE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in joined if line.strip()]


def test_the_image_is_made_of_files_that_are_here_and_lies_where_kubernetes_looks_for_it(tmp_path):
    steps = read_image()
    assert steps[0][0] == "FROM" and {word for word, _ in steps} == {"FROM", "RUN", "COPY", "ENV", "WORKDIR", "CMD"}
    [place] = {text.split()[-1].rstrip("/").partition("/megatron_lite")[0] for word, text in steps if word == "COPY"}
    for word, text in steps:
        if word == "COPY":
            *sources, target = text.split()
            assert all((REPO / source).exists() for source in sources)
            folders = [source for source in sources if (REPO / source).is_dir()]
            # COPY puts what a folder holds into the target
            assert folders == [] or (len(sources) == 1 and target == f"{place}/megatron_lite/{folders[0]}")
        if word == "RUN":
            subprocess.run(["sh", "-n", "-c", text], check=True)
    script = f"{place}/megatron_lite/examples/gpt3/train_gpt3_857m_distributed.sh"
    assert script in (IMAGE.parent / "kubernetes.yaml").read_text(encoding="utf-8")
    assert script in IMAGE.read_text(encoding="utf-8")


def test_the_image_installs_the_packages_of_pyproject(tmp_path):
    """Its one line of Python prints what examples/packages.py reads, too."""
    tomllib = pytest.importorskip("tomllib")
    listed = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    [line] = [text for word, text in read_image() if word == "RUN" and "requirements.txt" in text]
    command = line.partition(">")[0] if "'>" in line else line.partition("' ")[0] + "'"
    command = command.replace("/workspace/megatron_lite", str(REPO)).replace("python ", f"{sys.executable} ", 1)
    assert run("sh", "-c", command, cwd=tmp_path).split("\n")[:-1] == listed
