"""What some parts of a half reach by imports, whatever lies between; test_halves.py holds the halves themselves."""

import ast
import sys

from support.package_files import FILES, MODULES, PACKAGE, find_module, imported, parse_files, place, reach_modules


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
    assert "formats" not in places and outside <= {"yaml"}


def list_folders(places: set[str]) -> set[str]:
    """Places that are folders: the others are small files beside them, which all halves share."""
    return places & {place(path) for path in FILES if path.parent != PACKAGE}


def test_the_closed_form_stands_on_formats_and_the_flags():
    places, _ = reach({"planner"}, without="/planner/walk/")
    assert list_folders(places) == {"formats", "config"}


def test_the_walk_reaches_what_the_closed_form_and_a_training_step_reach():
    """It builds and steps the real model, and leaves its snapshot to whoever reads snapshots."""
    places, outside = reach({"walk"})
    closed_form, _ = reach({"planner"}, without="/planner/walk/")
    training, outside_of_training = reach({"train"})
    assert {"train", "model", "optim", "parallel"} <= places
    assert list_folders(places) <= list_folders(closed_form | training) | {"planner", "train"}
    assert outside <= outside_of_training


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
