"""Copies on a stream of their own: right values while the GPU is busy, beside its computing, without a wait of the host."""

import time

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from megatron_lite.data.batch import ToDevice

DEVICE = torch.device("cuda", 0)
BUSY_CYCLES = 200_000_000  # about a tenth of a second


def test_values_are_right_however_far_the_host_runs_ahead():
    """Copies are issued long before the kernels that read them run, and their sources are forgotten at once.

    Memory that was given back too early would be filled by a later copy before it is read.
    """
    to_device = ToDevice(DEVICE)
    for _ in range(5):
        torch.cuda._sleep(BUSY_CYCLES)
        sums = []
        for number in range(400):
            copied = to_device(torch.full((4, 2049), number).pin_memory())
            torch.cuda._sleep(20_000)
            sums.append((copied == number).all())
            del copied
        assert torch.stack(sums).all().item()


def test_a_copy_runs_while_the_gpu_computes():
    to_device, source = ToDevice(DEVICE), torch.arange(1 << 20).pin_memory()
    to_device(source)
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    computed = torch.cuda.Event()
    computed.record()
    copied = to_device(source)
    done = to_device._copying.record_event()
    done.synchronize()
    assert not computed.query()  # on the computing stream the copy would have waited for this
    assert torch.equal(copied.cpu(), source)


def test_computing_waits_for_the_copy():
    """A copy that is slow, behind other work on its stream, is still there before it is read."""
    to_device, source = ToDevice(DEVICE), torch.arange(1 << 20).pin_memory()
    with torch.cuda.stream(to_device._copying):
        torch.cuda._sleep(BUSY_CYCLES)
    assert torch.equal((to_device(source) + 1).cpu(), source + 1)


def test_the_host_does_not_wait():
    to_device, source = ToDevice(DEVICE), torch.arange(8196).pin_memory()
    to_device(source)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(10 * BUSY_CYCLES)
        started = time.perf_counter()
        for _ in range(100):
            to_device(source)
        seconds = time.perf_counter() - started
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seconds < 0.3 and not torch.cuda.current_stream().query()


def test_what_lies_there_already_is_not_copied():
    tensor = torch.arange(4, device=DEVICE)
    assert ToDevice(DEVICE)(tensor) is tensor
