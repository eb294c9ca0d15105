"""--torch-compile auto | layers | none: what a command line comes to, and where it is read."""

import pytest
from support.command_lines import mistakes, plan, read
from support.training_maker import ordinary_steps, run
from support.wording import wording

from megatron_lite import machine
from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.findings.check_case import CheckCase
from megatron_lite.analysis.findings.run_checks import look_at_compilation
from megatron_lite.config.check import remarks
from megatron_lite.config.help import help_text
from megatron_lite.config.plan import Compilation, choose_compilation
from megatron_lite.config.world import World
from megatron_lite.machine import find_missing_compiler

CPU, GPU = World(), World(gpus=1)
NO_GCC = World(gpus=1, no_compiler="there is no C compiler (gcc or clang) on the PATH; install one")


CHOICES = [
    ("", CPU, "none", "on a CPU its start takes longer than a short run gains; --torch-compile layers compiles"),
    ("--torch-compile auto", CPU, "none", "on a CPU its start"),
    ("", GPU, "layers", "automatic on a GPU; --torch-compile none trains without"),
    ("", NO_GCC, "none", "there is no C compiler (gcc or clang) on the PATH; install one; layers would be faster"),
    ("--torch-compile-backend aot_eager", NO_GCC, "layers", "automatic on a GPU"),
    ("--deterministic-mode", GPU, "none", "--deterministic-mode is given, and compiled kernels may be picked"),
    ("--torch-compile none", GPU, "none", ""),
    ("--torch-compile-backend aot_eager --torch-compile", GPU, "layers", ""),
    ("--torch-compile layers", CPU, "layers", ""),
    ("--torch-compile --lr 1e-3", CPU, "layers", ""),
]


@pytest.mark.parametrize(("changes", "world", "target", "why"), CHOICES)
def test_the_choice_and_its_reason(changes, world, target, why):
    found = plan(changes, world)
    assert found.compilation.target == target and found.compilation.layers is (target == "layers")
    assert found.compilation.why.startswith(why) and bool(found.compilation.why) is bool(why)


def test_what_may_be_typed_and_what_is_told(tmp_path):
    wrong = "--torch-compile layer: choose from auto, layers, none; did you mean layers?"
    assert mistakes("--torch-compile layer") == [wrong]
    assert mistakes("--torch-compile layers none") == [wording("config/takes-one-value-got", "--torch-compile", 2)]
    assert "--torch-compile [{auto,layers,none}]" in help_text()
    path = tmp_path / "run.yaml"
    for value, taken in (("true", "layers"), ("false", "none"), ("none", "none"), ("auto", "auto")):
        path.write_text(f"torch_compile: {value}\n")
        assert read(f"--yaml-cfg {path}").args.training.torch_compile == taken
        assert mistakes(f"--yaml-cfg {path}") == []
    vain = "--torch-compile-backend has no effect without --torch-compile."
    for world, changes, told in (
        (CPU, "", True), (GPU, "", False), (GPU, "--torch-compile none", True), (CPU, "--torch-compile", False),
    ):  # fmt: skip
        assert (vain in remarks(read(f"--torch-compile-backend aot_eager {changes}"), world)) is told
    assert choose_compilation(read("--torch-compile layers").args, NO_GCC) == Compilation(True, loss=True)


def test_what_a_gpu_lacks(monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    assert find_missing_compiler(True, {}) == wording("config/triton-is-not-installed")
    [told] = mistakes("--torch-compile", GPU)
    assert told == f"--torch-compile: {find_missing_compiler(True, {})}, or take --torch-compile none."
    assert mistakes("", GPU) == []
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    monkeypatch.setattr(machine.shutil, "which", {"clang": "/bin/clang"}.get)
    assert find_missing_compiler(True, {}) == ""
    lacks = "there is no C compiler (icc) on the PATH; install one, or name one in the variable CC"
    assert find_missing_compiler(True, {"CC": "icc"}) == lacks


@pytest.mark.parametrize("world", [CPU, GPU])
def test_python_without_headers_compiles_nothing(world, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(machine.sys, "platform", "linux")
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name, scheme: str(tmp_path / "none"))
    said = find_missing_compiler(bool(world.gpus), {})
    assert said.startswith(wording("config/python-headers-are-missing", tmp_path))
    assert mistakes("--torch-compile", world) == [f"--torch-compile: {said}, or take --torch-compile none."]
    (tmp_path / "Python.h").touch()
    assert find_missing_compiler(bool(world.gpus), {"CPATH": f"/nowhere:{tmp_path}"}) == ""
    monkeypatch.setattr(machine.sys, "platform", "darwin")  # headers come with every Python there
    assert find_missing_compiler(bool(world.gpus), {}) == ""


def test_a_run_says_what_it_decided(tmp_path):
    assert analyze([run(tmp_path / "a", compiled=True)]).facts.compiles is True
    assert analyze([run(tmp_path / "b")]).facts.compiles is False


def test_reports_say_how_much_of_the_first_step_was_compiling(tmp_path):
    steps = ordinary_steps(ms=lambda index: 10.0 if index else 30_000.0, compiling=lambda index: index == 0)
    steps[0]["compile_ms"] = 18_000.0
    report = analyze([run(tmp_path, compiled=True, steps=steps)])
    [found] = [one for one in report.findings if one.code == "first-step"]
    assert found.evidence[0].text.endswith(wording("config/of-steps-ms-of", 99, 40, "18,000.0"))
    assert found.flags == ("--torch-compile none", "TORCHINDUCTOR_CACHE_DIR") and "--torch-compile none" in found.advice
    [evidence] = look_at_compilation(CheckCase(report.facts)).evidence
    assert wording("config/first-step-ms-ms", "30,000.0", "18,000.0") in evidence.text
