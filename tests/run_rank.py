"""One of the processes that launch.on_ranks starts."""

import faulthandler
import sys

from support.launch import run_rank

if __name__ == "__main__":
    # of a rank that C++ aborts, what stands beside its last words is all that tells where
    faulthandler.enable()
    run_rank(*sys.argv[1:])
