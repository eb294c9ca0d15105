"""What each part of the package reaches by imports, whatever lies between, late imports within functions included."""

import ast
import sys

import pytest
from support.package_files import FILES, MODULES, PACKAGE, find_module, imported, parse_files, place, reach_modules

TRAINER = (
    "model",
    "cpu_kernels",
    "data",
    "parallel",
    "optim",
    "checkpoint",
    "instruments",
    "train",
    "observers",
    "watch",
)
EXPLAINER = {"analysis", "report"}
COMMANDS = {"cli"}
PLANNER = {"planner"}


def reach(parts: set[str], without: str = "/nothing/") -> tuple[set[str], set[str]]:
    """(places of the package, top names of all else but Python's own) that these places reach.

    Args:
        parts: places to begin from; see test_layers.
        without: files whose path holds this are left out.
    """
    starts = [name for name, path in MODULES.items() if place(path) in parts and without not in path.as_posix()]
    modules, names = reach_modules(starts)
    places = {place(MODULES[module]) for module in modules if module != "megatron_lite"}
    outside = {name.partition(".")[0] for name in names}
    return places - parts, outside - set(sys.stdlib_module_names) - {"megatron_lite"}


def test_formats_reach_nothing():
    assert reach({"formats"}) == (set(), {"msgspec"})


def test_flags_are_read_without_all_that_runs():
    places, outside = reach({"config"})
    assert not places & ({*TRAINER, "formats"} | PLANNER | EXPLAINER | COMMANDS) and outside <= {"yaml"}


@pytest.mark.parametrize("part", TRAINER)
def test_the_trainer_never_reaches_the_explainer(part):
    places, _ = reach({part})
    assert not places & (EXPLAINER | COMMANDS)


@pytest.mark.parametrize("part", TRAINER)
def test_the_trainer_never_reaches_the_planner(part):
    """The entry hands in what a run asks of it."""
    places, _ = reach({part})
    assert not places & PLANNER


def test_the_closed_form_reaches_nothing_that_trains():
    places, outside = reach({"planner"}, without="/planner/walk/")
    assert not places & ({*TRAINER} - {"model", "cpu_kernels"} | EXPLAINER | COMMANDS)
    assert not outside & {"torch", "numpy"}


def test_the_explainer_stands_on_numpy_and_msgspec():
    """It knows runs by the formats of their files, and shares with the trainer only small files that import no folder."""
    places, outside = reach({"analysis"})
    folders = {place(path) for path in FILES if path.parent != PACKAGE}
    assert places & folders == {"formats"}
    assert outside == {"numpy", "msgspec"}


def test_what_lies_between_counts():
    """Late imports and modules in between are followed: the command `report` reaches the analysis, and so numpy."""
    places, outside = reach({"cli"})
    assert {"analysis", "formats", "planner"} <= places and {"numpy", "msgspec"} <= outside


def list_functions(module: str) -> set[str]:
    """Names of a module's functions; classes, which hold results, and constants are none."""
    return {node.name for node in parse_files()[MODULES[module]].body if isinstance(node, ast.FunctionDef)}


def test_renderers_compute_no_analyses():
    """They are given results, whose classes they may name, and call nothing that makes them."""
    called = []
    for path, tree in parse_files().items():
        for name in imported(tree) if place(path) == "report" else ():
            module = find_module(name)
            if module is None or place(MODULES[module]) not in ("analysis", "planner", "config"):
                continue
            if name == module or name.rpartition(".")[2] in list_functions(module):
                called.append(f"{path.name}: {name}")
    assert called == []
