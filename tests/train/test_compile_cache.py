"""Compiled kernels are kept between runs, and compiling is told of."""

import os
import re
import sys
from pathlib import Path
from subprocess import CalledProcessError
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support.launch import flags, pretrain, steps
from support.wording import wording

from megatron_lite.config.world import World
from megatron_lite.instruments.build_instruments import Compiling
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.parallel import layers
from megatron_lite.parallel.layers import PLACE, keep_compiled, no_compiler


def test_the_folder_is_below_the_users_cache(tmp_path):
    named, home = {"XDG_CACHE_HOME": str(tmp_path / "named"), "HOME": str(tmp_path)}, {"HOME": str(tmp_path)}
    folder = keep_compiled(named)
    assert folder.parent == tmp_path / "named/megatron_lite/compiled" and folder.is_dir()
    assert named[PLACE] == str(folder)
    assert folder.name.startswith(f"torch-{torch.__version__}-")
    assert keep_compiled(home).parent == tmp_path / ".cache/megatron_lite/compiled"
    relative = {"XDG_CACHE_HOME": "here", "HOME": str(tmp_path)}
    assert keep_compiled(relative) == keep_compiled({"HOME": str(tmp_path)})


def test_a_named_folder_stays_and_an_unwritable_home_leaves_torchs_own(tmp_path, monkeypatch):
    environ = {PLACE: "mine", "HOME": str(tmp_path)}
    assert keep_compiled(environ) is None and environ[PLACE] == "mine" and list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    environ = {"HOME": str(tmp_path / "file")}
    assert keep_compiled(environ) is None and PLACE not in environ
    monkeypatch.setattr(layers.os, "access", lambda path, mode: False)
    environ = {"HOME": str(tmp_path)}
    assert keep_compiled(environ) is None and PLACE not in environ


def test_each_kind_of_processor_has_its_own(tmp_path, pretend):
    cpuinfo, names = tmp_path / "cpuinfo", set()
    for text in ("model name\t: A\nflags\t\t: avx2\ncpu MHz\t\t: 1\n", "model name\t: A\nflags\t\t: avx512\n"):
        cpuinfo.write_text(text)
        pretend(cpuinfo)
        names.add(keep_compiled({"HOME": str(tmp_path)}).name)
    cpuinfo.write_text("model name\t: A\nflags\t\t: avx2\ncpu MHz\t\t: 2\n")
    pretend(cpuinfo)
    assert len(names) == 2 and keep_compiled({"HOME": str(tmp_path)}).name in names
    pretend(tmp_path / "none")
    assert keep_compiled({"HOME": str(tmp_path)}).name not in names


def test_an_old_gpu_is_seen_before_a_missing_compiler(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (6, index))
    assert no_compiler(World()) == ""
    said = "Triton compiles for GPUs of compute capability 7.0 and later, and this one has 6.1"
    assert no_compiler(World(local_rank=1, gpus=2)) == said
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr("megatron_lite.machine.find_spec", lambda name: None)
    assert no_compiler(World(gpus=1)).startswith(wording("train/triton-is-not-installed"))


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (None, ""),
        (AssertionError("libcuda.so cannot found!\nPlease run ldconfig"), "libcuda.so cannot found!"),
        (CalledProcessError(1, ["gcc", "main.c"]), "gcc failed to build what launches its kernels, see above"),
        (ImportError("failed to map segment from shared object"), "failed to map segment from shared object"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_triton_is_asked_whether_it_starts(failure, told, monkeypatch):
    class Driver:
        @property
        def active(self):
            if failure is not None:
                raise failure

    for name in ("triton", "triton.runtime"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "triton.runtime.driver", SimpleNamespace(driver=Driver()))
    monkeypatch.setattr("megatron_lite.parallel.layers.find_missing_compiler", lambda on_gpu, environ: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert no_compiler(World(gpus=1)) == (told and wording("train/triton-does-not-start", told))


class Happening:
    def __init__(self, name):
        self.callback_trigger = type("Trigger", (), {"name": name})


def test_graphs_seconds_and_hits_are_told_after_the_step(monkeypatch):
    said, timeline = [], Timeline()
    watching = Compiling(timeline, 2, said.append)
    watching.open()
    hits, now = watching._counters["aot_autograd"], iter([1.0, 3.5, 10.0, 10.25, 20.0, 21.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    before = hits["autograd_cache_hit"]
    watching._ends(Happening("DYNAMO"))  # of something that began before
    for name in ("DYNAMO", "LAZY_BACKWARD"):  # a backward belongs to its graph
        watching._begins(Happening(name))
        watching._ends(Happening(name))
    hits["autograd_cache_hit"] += 1
    watching.end(1)
    watching.end(2)
    assert said == [wording("train/compiled-graph-in-s", 1, 2.8, 1)]
    assert timeline.current.compiling and timeline.current.compile_seconds == 2.75
    watching.compilations += 2
    watching._begins(Happening("DYNAMO"))
    watching._ends(Happening("DYNAMO"))
    monkeypatch.undo()
    watching.close(None)
    hits["autograd_cache_hit"] = before
    # after the last step, such as for its evaluation
    assert said[1] == wording("train/compiled-graphs-in-s", 3, 1.0, 0)
    assert "compiled 4 graphs, where 2 were expected" in said[2]


@pytest.mark.slow
def test_the_second_run_compiles_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(PLACE, raising=False)
    argv = flags("--train-iters 3 --log-interval 1 --eval-interval 2 --eval-iters 1 --torch-compile")
    told = {}
    for name in ("cold", "warm"):
        ended = pretrain([*argv, "--run-dir", str(tmp_path / name)])
        assert ended.code == 0, ended.err
        told[name] = re.findall(r"compiled (\d+) graphs? in ([\d.]+) s \(from the cache: (\d+)\)", ended.out)
    assert [(graphs, hits) for graphs, _, hits in told["cold"]] == [("1", "0"), ("1", "0")]
    assert [(graphs, hits) for graphs, _, hits in told["warm"]] == [("1", "1"), ("1", "1")]
    assert sum(float(s) for _, s, _ in told["warm"]) < sum(float(s) for _, s, _ in told["cold"]) / 2
    assert [Path(folder).name for folder in os.listdir(tmp_path / "cache/megatron_lite")] == ["compiled"]
    first, second, _ = steps(tmp_path / "cold")
    assert 0 < first["compile_ms"] < first["ms"] and first["compiling"]
    assert 0 < second["compile_ms"] < second["ms"]  # its evaluation
