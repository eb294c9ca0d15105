"""What all tests share."""

import gc
import os
import signal

import pytest

# Before torch is imported. Tests' models are tiny: a second thread gains nothing, and where cores are taken by others,
# threads that wait for each other turn steps of 10 ms into steps of a second.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# A shell's background jobs, such as `bash tests/run &`, ignore Ctrl-C, and so would every run that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Files with slow tests first: where files are dealt out to processes, the long ones come early."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="module", autouse=True)
def little_garbage():
    """Every training collects garbage; it must not walk each time through all that pytest and big packages hold."""
    gc.collect()
    gc.freeze()  # for good: the next collection walks what has come since


@pytest.fixture
def pretend():
    """A function that has kernels chosen for the processor of a file like /proc/cpuinfo."""
    from megatron_lite.config import machine

    with pytest.MonkeyPatch.context() as patch:

        def take(cpuinfo):
            patch.setattr(machine, "PROCESSORS", cpuinfo)
            machine.read_processor.cache_clear()

        yield take
    machine.read_processor.cache_clear()
