"""Which half of the package reaches which by imports, whatever lies between, late imports within functions included."""

import sys

import pytest
from support.halves import HALF_OF_PLACE, HALVES, REACHES, WITH_TORCH, WITHOUT_TORCH
from support.package_files import (
    MODULES,
    PACKAGE,
    find_module,
    imported,
    parse_files,
    place,
    reach_modules,
    read_core_files,
)
from support.paths import REPO

FEW_PACKAGES = {
    "shared": {"msgspec", "numpy", "yaml"},
    "explainer": {"msgspec", "numpy"},
    "planner": {"msgspec", "yaml"},
}


def reach_half(half: str) -> tuple[set[str], set[str]]:
    """Follow the imports of a half.

    Returns:
        the other halves, and the names of the packages besides Python's own, that they lead to.
    """
    starts = [module for module, path in MODULES.items() if place(path) in HALVES[half]]
    modules, names = reach_modules(starts)
    halves = {HALF_OF_PLACE[place(MODULES[module])] for module in modules if module != "megatron_lite"}
    packages = {name.partition(".")[0] for name in names}
    return halves - {half}, packages - set(sys.stdlib_module_names) - {"megatron_lite"}


@pytest.mark.parametrize("half", HALVES)
def test_a_half_reaches_what_it_may(half):
    """Equal rather than within, so that no permission stays that nothing needs."""
    halves, _ = reach_half(half)
    assert halves == REACHES[half]


@pytest.mark.parametrize("half", sorted(HALVES.keys() - WITH_TORCH - {"commands"}))  # in one order on all workers
def test_torch_is_out_of_reach_for_the_rest(half):
    _, packages = reach_half(half)
    assert "torch" not in packages


@pytest.mark.parametrize("half", FEW_PACKAGES)
def test_some_halves_stand_on_few_packages(half):
    _, packages = reach_half(half)
    assert packages == FEW_PACKAGES[half]


def test_the_core_knows_nothing_of_what_watches_and_explains_it():
    """What one batch passes from the entry on imports directly nothing but the trainer and what all halves share."""
    allowed = HALVES["trainer"] | HALVES["shared"]
    wrong = []
    for path in read_core_files():
        if PACKAGE not in path.parents or place(path) in HALVES["entry"]:
            continue
        for name in imported(parse_files()[path]):
            module = find_module(name)
            if module not in (None, "megatron_lite") and place(MODULES[module]) not in allowed:
                wrong.append(f"{path.relative_to(REPO)}: {name}")
    assert wrong == []


def test_what_lies_between_counts():
    """Late imports and modules in between are followed: the command `generate` leads to the model, and so to torch."""
    halves, packages = reach_half("commands")
    assert "trainer" in halves and "torch" in packages
    assert {"cli", "analysis", "report", "planner", "config"} <= WITHOUT_TORCH
