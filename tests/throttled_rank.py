"""The trainer with a rank whose GPU is hot, on CPUs: throttled_rank.py SCRIPT FLAGS, under a launcher.

SCRIPT is what support/fake_nvml tells of GPU-0, GPU-1 ..., one for each rank. Rank 1 is the hot one: its steps take longer.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support" / "fake_nvml"))

from megatron_lite.__main__ import train
from megatron_lite.instruments import build_instruments, hardware_sampler
from megatron_lite.instruments.gpu_sensors import open_gpu
from megatron_lite.model import mlp

SLOWER_S = 0.03  # per layer
PERIOD_S = 0.05  # between samples


def main() -> int:
    os.environ["FAKE_NVML"] = sys.argv[1]
    rank = os.environ["RANK"]
    build_instruments.open_sensors = lambda gpu: open_gpu([f"GPU-{rank}"], "")
    hardware_sampler.MAX_SHARE = 1
    build_instruments.HardwareSampler = partial(hardware_sampler.HardwareSampler, period_s=PERIOD_S)
    if rank == "1":
        inner = mlp.MLP.forward

        def forward(self, *arguments):
            time.sleep(SLOWER_S)
            return inner(self, *arguments)

        mlp.MLP.forward = forward
    return train(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
