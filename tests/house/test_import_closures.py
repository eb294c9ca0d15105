"""What each part of the package reaches by imports, whatever lies between, late imports within functions included."""

import sys

import pytest
from support.package_files import FILES, PACKAGE, imported, parse_files, place

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
NAMES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES
}


def find_module(name: str) -> str | None:
    """The module of the package that `name`, a module or something in one, is or stands in."""
    if name in NAMES:
        return name
    module = name.rpartition(".")[0]
    return module if module in NAMES else None


def reach(parts: set[str], without: str = "/nothing/") -> tuple[set[str], set[str]]:
    """(places of the package, top names of all else but Python's own) that these places reach.

    Args:
        parts: places to begin from; see test_layers.
        without: files whose path holds this are left out.
    """
    todo = [name for name, path in NAMES.items() if place(path) in parts and without not in path.as_posix()]
    seen: set[str] = set()
    outside: set[str] = set()
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        for name in imported(parse_files()[NAMES[module]]):
            found = find_module(name)
            if found is not None:
                todo.append(found)
            else:
                outside.add(name.partition(".")[0])
    places = {place(NAMES[module]) for module in seen if module != "megatron_lite"}
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
    """It knows runs by the formats of their files, and of the trainer only how a schedule of stages is laid out."""
    places, outside = reach({"analysis"})
    folders = {place(path) for path in FILES if path.parent != PACKAGE}
    assert places & folders == {"formats", "config"}
    assert outside == {"numpy", "msgspec"}


def test_what_lies_between_counts():
    """Late imports and modules in between are followed: the command `report` reaches the analysis, and so numpy."""
    places, outside = reach({"cli"})
    assert {"analysis", "formats", "planner"} <= places and {"numpy", "msgspec"} <= outside
