"""What the training scripts of this folder share: their options, the process group, and ways to fail.

A fault strikes the ranks of --rank in step --step. The place in the script where it is asked for decides what fails.
"""

import argparse
import contextlib
import ctypes
import datetime
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

# an endless call of the C library; PyDLL keeps the interpreter, CDLL lets other threads run
WITH_INTERPRETER = ctypes.PyDLL(None)
WITHOUT_INTERPRETER = ctypes.CDLL(None)


class Job:
    """One rank of a job."""

    def __init__(self, **defaults):
        parser = argparse.ArgumentParser()
        parser.add_argument("--plant", default="", help="the fault; '': none")
        parser.add_argument("--rank", default="1", help="ranks that it strikes, with commas")
        parser.add_argument("--step", type=int, default=6, help="in which it strikes")
        parser.add_argument("--steps", type=int, default=12)
        parser.add_argument("--workers", type=int, default=0)
        parser.add_argument("--timeout", type=float, default=10, help="of collectives, in seconds")
        parser.set_defaults(**defaults)
        self.options = parser.parse_args()
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.struck = [int(rank) for rank in self.options.rank.split(",")]
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=self.options.timeout))
        torch.manual_seed(1234 + self.rank)
        if os.environ.get("DEBUG_DUMPS"):
            self._start_debug_server()
        if os.environ.get("FR_DUMP_REQUEST"):
            threading.Thread(target=self._dump_on_request, daemon=True).start()

    def has(self, plant, step=None):
        """Whether the fault strikes this rank here."""
        is_step = step is None or step == self.options.step
        strikes = plant == self.options.plant and self.rank in self.struck and is_step
        if strikes and os.environ.get("PLANTED_MARKER"):
            with open(os.environ["PLANTED_MARKER"], "a") as file:
                file.write(f"{self.rank} {os.getpid()}\n")
        return strikes

    def log(self, text):
        print(f"[rank{self.rank}] {text}", flush=True)

    def close(self):
        dist.destroy_process_group()

    def _start_debug_server(self):
        from torch.distributed.debug import start_debug_server

        port = int(os.environ["DEBUG_PORT"])
        start_debug_server(port=port, dump_dir=os.environ["DEBUG_DUMPS"], dump_interval=2.0)

    def _dump_on_request(self):
        # as the monitor of NCCL's process group: a file asks for the flight recorder
        while not Path(os.environ["FR_DUMP_REQUEST"]).exists():
            time.sleep(0.1)
        trace = torch._C._distributed_c10d._dump_fr_trace(True, True, False)
        Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{self.rank}").write_bytes(trace)


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def crash():
    ctypes.string_at(0)


def stop_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


def normalize_spaces(text):
    # backtracks for ever, with the interpreter held
    return re.match(r"(\s*\w*)*$", text)


def allocate_until_it_fails(limit_bytes=512 * 2**20):
    import resource

    held = Path("/proc/self/statm").read_text().split()[0]
    resource.setrlimit(resource.RLIMIT_AS, (int(held) * resource.getpagesize() + limit_bytes, resource.RLIM_INFINITY))
    return [bytearray(64 * 2**20) for _ in range(64)]


def break_connections():
    """Shut down the TCP connections between ranks in this process, as a failed adapter or switch does."""
    store = int(os.environ["MASTER_PORT"])
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and store not in (
                    one.getpeername()[1],
                    one.getsockname()[1],
                ):
                    one.shutdown(socket.SHUT_RDWR)


def raise_out_of_memory(gib):
    """Raise what CUDA's allocator raises, as no GPU is here."""
    raise torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {gib:.2f} GiB. GPU 0 has a total capacity of 79.11 GiB of which "
        f"{gib / 3:.2f} GiB is free. Including non-PyTorch memory, this process has 77.30 GiB memory in use. Of the "
        "allocated memory 74.08 GiB is allocated by PyTorch, and 1.21 GiB is reserved by PyTorch but unallocated. If "
        "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.  See documentation for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def end_quietly(code):
    sys.stdout.flush()
    os._exit(code)
