"""One of the processes that launch.on_ranks starts."""

import sys

from support.launch import run_rank

if __name__ == "__main__":
    run_rank(*sys.argv[1:])
