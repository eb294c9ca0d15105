"""What all tests share."""

import contextlib
import gc
import logging
import os
import signal
import types
from pathlib import Path

import pytest
from support.wording import find_new_wording, write_wording

# Before torch is imported. Tests' models are tiny: a second thread gains nothing, and where cores are taken by others,
# threads that wait for each other turn steps of 10 ms into steps of a second.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# A shell's background jobs, such as `bash tests/run &`, ignore Ctrl-C, and so would every run that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


# What --write-wording found: the new sentences of tests/wording.json, by key.
new_wording = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser):
    parser.addoption(
        "--write-wording",
        action="store_true",
        help="Write the sentences that differ from tests/wording.json into it (figures must agree). A test stops at "
        "its first difference: run until nothing is written.",
    )


def pytest_configure(config):
    config.stash[new_wording] = {}


def pytest_assertrepr_compare(config, op, left, right):
    """A comparison that failed: its new sentences are noted. pytest explains the failure as ever."""
    if config.getoption("--write-wording"):
        config.stash[new_wording].update(find_new_wording(op, left, right))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """A process of pytest-xdist has ended, and hands over what it noted."""
    node.config.stash[new_wording].update(getattr(node, "workeroutput", {}).get("wording", {}))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    found = session.config.stash[new_wording]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["wording"] = found


def pytest_terminal_summary(terminalreporter, config):
    found = config.stash[new_wording]
    if found:
        write_wording(found)
        terminalreporter.write_line(f"tests/wording.json: {len(found)} sentences written: {', '.join(sorted(found))}")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect tests without looking for garbage: of modules and tests there is none, and each look walks all of them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items):
    """Long files first: where files are dealt out to processes, one that comes last keeps a single process busy.

    Those with slow tests, then folders from the last on: train, parallel and planner before analysis, whose files are short.
    """
    items.sort(key=lambda item: item.path.parent, reverse=True)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="module", autouse=True)
def little_garbage():
    """Every training collects garbage; it must not walk each time through all that pytest and big packages hold."""
    gc.collect()
    gc.freeze()  # for good: the next collection walks what has come since


class Logged(logging.Handler):
    """Keeps what the package logs; pytest's own plugin, which is off, takes a millisecond per test."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    @property
    def text(self) -> str:
        return "\n".join(self.messages)


@pytest.fixture
def logged():
    """What the package logs during a test, from INFO on."""
    logger = logging.getLogger("megatron_lite")
    level_before = logger.level
    handler = Logged()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(level_before)
    logger.removeHandler(handler)


@pytest.fixture(scope="module")
def process_group():
    """A process group of this process only, for all tests of a file."""
    from support.launch import alone

    with alone():
        yield


@pytest.fixture(scope="module")
def without_tables():
    """Profiles of this process have no table of operators: torch averages them for longer than such a run trains."""
    from megatron_lite.instruments.torch_profiler import TorchProfiler

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchProfiler, "_write_table", lambda self, profiler: "no table")
        yield


@pytest.fixture
def in_an_empty_folder(tmp_path, monkeypatch):
    """The current folder is the test's own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pretend():
    """A function that has kernels chosen for the processor of a file like /proc/cpuinfo."""
    from megatron_lite import machine

    with pytest.MonkeyPatch.context() as patch:

        def take(cpuinfo):
            patch.setattr(machine, "PROCESSORS", cpuinfo)
            machine.read_processor.cache_clear()

        yield take
    machine.read_processor.cache_clear()


@pytest.fixture(scope="module")
def megatron_on_cpu():
    """One gloo rank; the places where Megatron's local spec reaches for CUDA (a scratch buffer, dropout's random state, masks)."""
    import torch
    import torch.distributed as dist

    tensor_parallel = pytest.importorskip("megatron.core.tensor_parallel")
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    tracker = types.SimpleNamespace(fork=contextlib.nullcontext)
    patch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    utilities = pytest.importorskip("megatron.core.transformer.utils")
    ones = lambda *sizes, device, **options: torch.ones(*sizes, **options)
    patch.setattr(utilities, "torch", types.SimpleNamespace(**vars(torch) | {"ones": ones}))
    # its router asks for Transformer Engine's product, whose name is there only with that
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    # its latent attention takes the shell of Transformer Engine's extension for that
    latent_attention = pytest.importorskip("megatron.core.transformer.multi_latent_attention")
    patch.setattr(latent_attention, "HAVE_TE", False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    patch.undo()


@pytest.fixture
def optimizers_on_cpu(megatron_on_cpu, monkeypatch):
    """Megatron's optimizers, which ask for CUDA, work on the CPU."""
    from support.megatron_core import pretend_cuda

    pretend_cuda(monkeypatch)


@pytest.fixture(scope="module")
def ended_managers():
    """Megatron-Core's writer starts a manager's process, which it keeps for all of its writing and leaves."""
    import multiprocessing

    writer = pytest.importorskip("megatron.core.dist_checkpointing.strategies.filesystem_async")
    before = multiprocessing.active_children()
    yield
    writer._results_queue = None  # the next one gets a manager of its own
    for child in set(multiprocessing.active_children()) - set(before):
        child.terminate()
        child.join()


@pytest.fixture
def writer_on_cpu(optimizers_on_cpu, monkeypatch):
    """Megatron's writer waits for a GPU, and measures its memory with a package that is not needed."""
    import torch

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *given: None)
    monkeypatch.setattr("megatron.core.dist_checkpointing.strategies.filesystem_async._process_memory", lambda: 0)


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> list[Path]:
    """CKPT TB VOCAB MERGES DATA of the example scripts, in a folder with a space in its name."""
    from megatron_lite.cli.main import main

    folder = tmp_path_factory.mktemp("a place")
    assert main(["make-corpus", "--output-prefix", f"{folder}/in put/python", "--bpe", "300", "--max-mb", "1"]) == 0
    outputs, inputs = ("check points", "tensor board"), ("vocab.json", "merges.txt", "python_text_document")
    return [*(folder / name for name in outputs), *(folder / "in put" / name for name in inputs)]
