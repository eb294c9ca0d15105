"""What some parts of a half reach by imports, whatever lies between; test_halves.py holds the halves themselves."""

import ast
import sys

from support.halves import HALVES
from support.package_files import MODULES, find_module, imported, parse_files, place, reach_modules


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


def test_the_closed_form_reaches_nothing_that_trains():
    places, outside = reach({"planner"}, without="/planner/walk/")
    assert places & HALVES["trainer"] == {"model", "cpu_kernels"}
    assert not outside & {"torch", "numpy"}


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
