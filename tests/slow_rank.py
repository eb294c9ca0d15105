"""The trainer with a rank whose loader is slow: slow_rank.py MILLISECONDS FLAGS, under a launcher. Rank 1 is the slow one."""

import os
import sys
import time

from megatron_lite.__main__ import train
from megatron_lite.data import loader


def main() -> int:
    seconds, inner = float(sys.argv[1]) / 1000, loader._stack

    def stack(samples):
        time.sleep(seconds)
        return inner(samples)

    if os.environ["RANK"] == "1":
        loader._stack = stack
    return train(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
