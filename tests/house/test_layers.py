"""The layers of the house, read from its imports; test_halves.py holds which half reaches which."""

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import pytest
from support.code_measures import Measures, find_folded, measure_file
from support.halves import WITHOUT_TORCH
from support.package_files import (
    FILES,
    PACKAGE,
    find_place,
    imported,
    list_nodes,
    parse_file,
    parse_files,
    place,
    read_core_files,
    stands_in,
)
from support.paths import REPO, TESTS
from support.waiting import LIMIT_S

LEVELS = [  # bottom up: what stands together does not know each other
    {"terminal", "formats"},
    {
        "errors",
        "marks",
        "mesh_axes",
        "units",
        "xid_errors",
        "phases",
        "thresholds",
        "live_line",
        "machine",
        "variables",
        "process_state",
        "script_process",
        "signal_pipe",
        "local_ranks",
        "phase_names",
        "pipeline_schedule",
        "shared_files",
        "pickle_bounds",
        "tensor_holders",
        "step_failure",
    },
    {"plain_pickles"},
    {"config", "user_functions", "caching_allocator", "postmortem"},
    {"run_folder", "rank_errors", "last_words", "model", "smoke"},
    {"cpu_kernels"},
    {"planner", "process_folder"},
    {"data", "parallel", "optim", "checkpoint"},
    {"instruments"},
    {"train", "analysis", "convert"},
    {"report", "bundle", "walk", "observers", "replay", "generate", "watch", "script_record", "tune"},
    {"app", "cli", "run_planner", "notebook", "rehearsal"},
    {"__main__", "script_walk", "mcp_server"},
]
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}
MIN_NUMPY = (2, 4)  # types of older ones, which Python 3.10 has, know less of shapes
MAX_CORE_FILES = 40
# Nodes of the syntax tree, which compression does not lower as it lowers lines; docs/decisions/040-size.md. These limits
# are what the package has today: lower them with each function that is unfolded.
MAX_NODES_OF_A_FUNCTION = 600
MAX_FUNCTIONS_OVER_600_NODES = 0
MAX_FUNCTIONS_OVER_400_NODES = 0
MAX_NODES_PER_CODE_LINE = 9.9
# Nodes per code line of folders that are unfolded, and have one idea per statement. Lower and add, never raise.
UNFOLDED = {
    ".": 9.6,
    "config": 9.2,
    "cpu_kernels": 9.7,
    "planner": 9.8,
    "cli": 9.5,
    "mcp_server": 9.9,
    "report": 9.8,
    "instruments": 9.3,
    "watch": 9.2,
    "checkpoint": 9.6,
    "convert": 9.6,
    "walk": 9.1,
    "script_walk": 8.6,
    "script_record": 9.6,
    "replay": 9.8,
    "tune": 9.8,
    "postmortem": 9.7,
    "data": 9.9,
    "model": 9.9,
    "optim": 9.8,
    "parallel": 9.9,
    "train": 9.8,
    "analysis/memory": 10.1,
    "analysis/time": 10.1,
    "analysis/trace": 10.0,
    "analysis/kernels": 9.5,
    "analysis/run": 9.8,
    "analysis/compare": 10.0,
    "analysis/ranks": 9.9,
    "analysis/findings": 9.9,
    "analysis/equality": 9.9,
    "analysis/graph": 10.0,
    "analysis/timeline": 10.0,
    "analysis/replay": 9.9,
    "analysis/.": 10.0,
}
# Folders whose docstrings stand alone, as those of the files in no folder do. The list only grows.
DOCUMENTED = (
    "cli",
    "config",
    "cpu_kernels",
    "mcp_server",
    "report",
    "watch",
    "postmortem",
    "replay",
    "tune",
    "instruments",
    "checkpoint",
    "convert",
    "planner",
    "walk",
    "data",
    "model",
    "optim",
    "parallel",
    "train",
    "analysis/findings",
    "analysis/memory",
    "analysis/ranks",
    "analysis/time",
    "analysis/trace",
    "analysis/compare",
    "analysis/equality",
    "analysis/graph",
    "analysis/timeline",
    "analysis/replay",
    "analysis/kernels",
    "analysis/run",
    "analysis/.",
)
MIN_WORDS = 4  # of a docstring: fewer say less than the name
FRAGMENT = re.compile(  # a docstring that continues the name before it instead of being a sentence or a noun of its own
    r"(?:Of|With|For|By|In|On|At|To|From|Against|Under|Over|After|Before|Beside|Between|Without|Until|Till|As|And|Or|But|"
    r"It|They|Its|Their|None|That|Those|This|These|Which|Who|Whose|What|One|Some|Any|Same|Is|Are|Does|Has)\b|[^A-Z`\"\d]"
)


def objection(mine: str, name: str) -> str | None:
    """What is wrong with a module of the place `mine` importing `name`."""
    if name.startswith("."):
        return "relative imports hide what is imported"
    top, _, rest = name.partition(".")
    if top == "torch" and mine in WITHOUT_TORCH:
        return f"{mine} must work without torch"
    if top != "megatron_lite":
        return None
    other = find_place(rest)
    if other == mine:
        return None
    if other not in LEVEL or mine not in LEVEL:
        return f"{other if other not in LEVEL else mine} has no place in LEVELS"
    if LEVEL[other] == LEVEL[mine]:
        return f"{mine} and {other} stand side by side"
    if LEVEL[other] > LEVEL[mine]:
        return f"{other} stands above {mine}"
    return None


def test_imports_point_down():
    wrong = [
        f"{path.relative_to(REPO)}: {name}: {why}"
        for path, tree in parse_files().items()
        if path != PACKAGE / "__init__.py"
        for name in sorted(imported(tree))
        if (why := objection(place(path), name))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("mine", "name", "why"),
    [
        ("config", "megatron_lite.planner.model_size.count_parameters", "planner stands above config"),
        ("data", "megatron_lite.optim.optimizer.Optimizer", "data and optim stand side by side"),
        ("config", "torch.nn", "config must work without torch"),
        ("planner", "megatron_lite.planner.walk.walk_steps", "walk stands above planner"),
        ("cli", "megatron_lite.rehearsal", "cli and rehearsal stand side by side"),
        ("train", "megatron_lite.utils.helper", "utils has no place in LEVELS"),
        ("train", ".loop.train", "relative imports hide what is imported"),
        ("train", "megatron_lite.train.loop", None),
        ("train", "torch.nn", None),
        ("cli", "megatron_lite.data.build", None),
        ("report", "megatron_lite.optim.optimizer", None),  # a layer may; test_halves.py says that a half may not
        ("config", "torchvision", None),
    ],
)
def test_each_kind_of_wrong_import_would_be_seen(mine, name, why):
    assert objection(mine, name) == why


def test_imports_are_found_wherever_they_stand():
    code = "import a.b\ndef f():\n    from c.d import e, g\n    from . import h\n"
    assert imported(ast.parse(code)) == {"a.b", "c.d.e", "c.d.g", "..h"}


def test_the_model_knows_no_processor():
    """What suits one stands in cpu_kernels, which is put on from outside."""
    words = re.compile(r"mkl|onednn|avx|amx|\bamd\b|intel|cpu_kernels\.", re.IGNORECASE)
    texts = {path.name: path.read_text(encoding="utf-8") for path in (PACKAGE / "model").glob("*.py")}
    assert {name: words.findall(text) for name, text in texts.items() if words.search(text)} == {}


def test_parallelism_is_given_its_kernels():
    """Like the model, it multiplies by what it is handed, whatever the device."""
    wrong = [
        f"{path.relative_to(REPO)}: {name}"
        for path, tree in parse_files().items()
        if place(path) in ("model", "parallel", "optim")
        for name in imported(tree)
        if name.startswith("megatron_lite.cpu_kernels")
    ]
    assert wrong == []


def test_nothing_is_patched_for_a_while():
    """What has two forms is an argument, as a Backend is: a patched name means something else than its line says."""
    wrong = [
        f"{path.relative_to(REPO)}: {name}"
        for path, tree in parse_files().items()
        for name in imported(tree)
        if name.startswith("unittest")
    ]
    assert wrong == []


def test_one_file_builds_the_model_that_trains():
    """A second description of it, as for a walk, would have to follow each change."""
    builders = [
        path.relative_to(PACKAGE).as_posix()
        for path, tree in parse_files().items()
        for node in list_nodes(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "GPT"
    ]
    # the first two read names and shapes of parameters, from a model without memory
    assert sorted(builders) == ["model/gpt.py", "train/build_replica.py"]


def test_the_core_has_few_files():
    assert len(read_core_files()) <= MAX_CORE_FILES


def test_every_folder_and_file_has_its_place():
    assert {place(path) for path in FILES} - {"__init__"} <= set(LEVEL)


def test_init_files_are_empty():
    """But for the package's own, which names what users import; tests/house/test_api.py holds that it imports nothing."""
    inits = [path for path in FILES if path.name == "__init__.py"]
    assert [path for path in inits if path.read_text(encoding="utf-8").strip()] == [PACKAGE / "__init__.py"]


@functools.cache
def measure_files() -> dict[Path, Measures]:
    """Counts of each file of the package."""
    return {path: measure_file(path, path.relative_to(PACKAGE).as_posix()) for path in FILES}


def measure_folder(folder: str) -> Measures:
    """Counts of a place, or of a folder within one."""
    return add_up(measures for path, measures in measure_files().items() if stands_in(path, folder))


def add_up(several: Iterable[Measures]) -> Measures:
    total = Measures()
    for measures in several:
        total.add(measures)
    return total


def test_functions_can_be_reviewed():
    total = add_up(measure_files().values())
    assert [name for nodes, name in total.large_functions if nodes > MAX_NODES_OF_A_FUNCTION] == []
    assert len(total.huge_functions) <= MAX_FUNCTIONS_OVER_600_NODES, total.huge_functions
    assert len(total.large_functions) <= MAX_FUNCTIONS_OVER_400_NODES


def find_docstrings(tree: ast.Module) -> list[tuple[int, str]]:
    """(line, text) of every docstring of a file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in list_nodes(tree) if isinstance(node, kinds) and ast.get_docstring(node)]
    return [(getattr(node, "lineno", 1), ast.get_docstring(node)) for node in nodes]


def is_fragment(docstring: str) -> bool:
    return FRAGMENT.match(docstring) is not None or len(docstring.split()) < MIN_WORDS


def test_docstrings_stand_alone():
    wrong = [
        f"{path.relative_to(REPO)}:{line}: {text.partition(chr(10))[0]}"
        for path, tree in parse_files().items()
        if path.parent == PACKAGE or any(stands_in(path, folder) for folder in DOCUMENTED)
        for line, text in find_docstrings(tree)
        if is_fragment(text)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("docstring", "wrong"),
    [
        ("Of one GPU.", True),
        ("With those that are waited for.", True),
        ("None: as far as the values go.", True),
        ("'TP 2, PP 4, DP 8' of a layout.", True),
        ("One line.", True),
        ("Memory of one GPU, in bytes.", False),
        ("`megatron-lite live` follows a run.", False),
        ("Write the steps that are complete.", False),
    ],
)
def test_each_kind_of_fragment_would_be_seen(docstring, wrong):
    assert is_fragment(docstring) is wrong


def test_lines_do_not_get_denser():
    assert add_up(measure_files().values()).nodes_per_code_line <= MAX_NODES_PER_CODE_LINE


@pytest.mark.parametrize("folder", UNFOLDED)
def test_unfolded_folders_stay_so(folder):
    assert measure_folder(folder).nodes_per_code_line <= UNFOLDED[folder]


def test_unfolded_folders_have_one_idea_per_statement():
    wrong = {
        f"{path.relative_to(REPO)}": folded
        for path, tree in parse_files().items()
        if any(stands_in(path, folder) for folder in UNFOLDED)
        if (folded := find_folded(tree))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("a if b else c if d else e", True),
        ("a, b = c, 1", True),
        ("a * (b > c)", True),
        ("a if b else c", False),
        ("a, b = c", False),
        ("a * (b or 1)", False),
    ],
)
def test_each_kind_of_folding_would_be_seen(code, wrong):
    assert bool(find_folded(ast.parse(code))) is wrong


def test_formats_stand_on_nothing_but_msgspec():
    names = {name for path, tree in parse_files().items() if place(path) == "formats" for name in imported(tree)}
    own = {name for name in names if name.startswith("megatron_lite.formats.")}
    assert {name.partition(".")[0] for name in names - own} <= {*sys.stdlib_module_names, "msgspec"}


def test_the_lower_layers_come_up_without_torch():
    names = [
        ".".join(path.relative_to(REPO).with_suffix("").parts)
        for path in FILES
        if path.name != "__init__.py" and place(path) in WITHOUT_TORCH
    ]
    code = f"import sys, {', '.join(names)}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S, cwd=REPO)


@pytest.mark.parametrize("words", [["format", "--check"], ["check"]], ids=" ".join)
def test_layout_is_the_formatters_and_the_linter_has_nothing_to_say(words):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *words, "--no-cache", "."], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_types_are_sound_where_they_are_checked():
    """The whole package, strictly."""
    if tuple(map(int, version("numpy").split(".")[:2])) < MIN_NUMPY:
        pytest.skip("the types of this numpy know too little of shapes")
    # with mypy's cache, which knows what has changed: seconds for each run but the first
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_that_a_run_wrote_stands_at_the_top():
    listed = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=False)
    if listed.returncode or not listed.stdout:
        pytest.skip("no git, or no checkout of it")
    files = {line for line in listed.stdout.splitlines() if "/" not in line and not line.startswith(".")}
    assert files == {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "pretrain_gpt.py", "pyproject.toml"}


def test_no_test_imports_from_another():
    """What several tests use stands in tests/support/, so that each file can be read, moved and run alone."""
    tests = {path.stem: path for path in TESTS.rglob("test_*.py")}
    importing = {}
    for path in tests.values():
        names = imported(parse_file(path))
        others = {name.partition(".")[0] for name in names} & set(tests)
        if others:
            importing[path.name] = others
    assert not importing


def test_a_fixture_of_several_files_stands_in_a_conftest():
    """Those with the same body are one. A file's own, such as the run that its tests look at, stay with it."""
    files_of = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        for node in parse_file(path).body:
            if isinstance(node, ast.FunctionDef) and any("fixture" in ast.unparse(d) for d in node.decorator_list):
                body = "\n".join(map(ast.unparse, node.body))
                files_of[body].add(f"{path.name}: {node.name}")
    assert [sorted(files) for files in files_of.values() if len(files) > 1] == []


def test_tests_lie_in_the_folders_of_what_they_test():
    others = {"benchmarks", "examples", "gpu", "house", "support"}
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    assert folders <= packages | others
