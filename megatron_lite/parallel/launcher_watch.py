"""A rank that torchrun's agent started ends when the agent is gone.

The agent ends and restarts its ranks. Killed by SIGKILL, it leaves them to themselves, and they would train on unseen.
"""

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

from megatron_lite.config.world import World
from megatron_lite.errors import RanksError
from megatron_lite.parallel.hang_diagnosis import AGAIN, end_record
from megatron_lite.process_state import find_launcher, is_there
from megatron_lite.terminal import print_lines

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_FOR_LAST_WORDS = 5.0  # a terminal or a disk may hang


class LauncherWatch:
    """A thread that ends this process within seconds after torchrun's agent; without an agent it does nothing.

    run_dir: where run.json is, once that is known.
    """

    def __init__(self, world: World):
        self.run_dir: Path | None = None
        self._world, self._agent = world, find_launcher(os.environ)

    def start(self):
        """Look from now on."""
        if self._agent is not None:
            threading.Thread(target=self._watch, name="launcher", daemon=True).start()

    def _watch(self):
        while is_there(self._agent) is not False:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        last_words = threading.Thread(target=self._say, daemon=True)
        last_words.start()
        last_words.join(SECONDS_FOR_LAST_WORDS)
        for child in multiprocessing.active_children():  # a loader's workers
            child.kill()
        os._exit(RanksError.exit_code)

    def _say(self):
        line = (
            f"torchrun's agent (process {self._agent['pid']} on {self._agent['host']}) is gone, so its ranks end: nobody "
            f"would restart or stop them; {AGAIN}"
        )
        with contextlib.suppress(OSError):  # the agent may have been the one to read it
            if self._world.local_rank == 0:
                print_lines([f"error: {line}"], sys.stderr)
        with contextlib.suppress(OSError, ValueError):
            if self._world.is_last and self.run_dir is not None:
                end_record(self.run_dir, line)
