"""Every rank tells the others where it is, and when ranks fail, one line says which and why.

A thread beside the trainer writes a short post to the store every second and looks whether somebody asks. It runs no
collective and never makes the device wait. It is the only one that uses its connection to the store, so that the
trainer's thread can give up on a store that hangs.
"""

import contextlib
import multiprocessing
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from msgspec.structs import replace
from torch._C._distributed_c10d import Store  # mypy does not find it as dist.Store

from megatron_lite.config.layout import Layout
from megatron_lite.config.world import World
from megatron_lite.errors import RanksError, first_line
from megatron_lite.formats.failure_record import NO_ERROR, RankAtFailure
from megatron_lite.parallel.hang_diagnosis import (
    AGAIN,
    ANSWER_SECONDS,
    CLOSED,
    LATE_RANK,
    TERMINATED,
    VERDICT_SECONDS,
    HangDiagnosis,
    end_record,
)
from megatron_lite.parallel.rank_status import (
    FlightRecorder,
    RankStore,
    RunPosition,
    describe_rank,
    read_stack,
    sum_counts,
)
from megatron_lite.process_state import ProcessIdentity, find_launcher, is_there
from megatron_lite.rank_errors import tell_error
from megatron_lite.signal_pipe import SignalPipe, die_of
from megatron_lite.terminal import print_lines

BEAT_SECONDS = 1.0
FAREWELL_SECONDS = 10.0  # a busy machine may take seconds to hand it over
GRACE_SECONDS = 30.0  # what a rank has to end by itself once the verdict is out
SECONDS_BETWEEN_LAUNCHER_LOOKS = 1.0  # at the launcher
SECONDS_FOR_LAST_WORDS = 5.0  # a terminal or a disk may hang
STORE_ERRORS = (dist.DistError, RuntimeError)
# what gloo says of lost connections; its errors are plain RuntimeErrors
LOST = ("gloo/transport", "pair closure", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
Answer = TypeVar("Answer")


def describe_lost_store() -> RanksError:
    """The error of a rank that can ask nobody, since the store does not answer."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    holder = "torchrun's agent" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
    fate = f"{holder}, which holds it, died, is stopped or cut off"
    line = f"MASTER_ADDR:MASTER_PORT {where}: the store there does not answer, so {fate}; {AGAIN}"
    return RanksError(line, ended=True)


def lost_connection(error: BaseException) -> str | None:
    """Find gloo's words for a connection that broke or kept waiting; None for other errors, wrong sizes among them."""
    text = first_line(error)
    is_lost = any(sign in text for sign in LOST) and "enforce fail" not in text
    if type(error) is not RuntimeError or not is_lost:
        return None
    _, _, message = text.rpartition("] ")
    return message.partition(". ")[0]


class NoWatchdog:
    """The watchdog of a rank that has no others: nothing to explain, nobody to tell."""

    def __init__(self) -> None:
        self.where = RunPosition()

    def explain_failures(self) -> AbstractContextManager[None]:
        """Leave failures as they are."""
        return contextlib.nullcontext()

    def report_to(self, run_dir: Path) -> None:
        """Write nothing, as no other rank tells anything."""

    def leave(self, error: BaseException | None) -> None:
        """Tell nobody of the end."""


class Watchdog:
    """The watchdog of a rank among others, from before the process group is made until it is left.

    Where the backend's failures do not reach Python (nccl), `backstop` makes this thread end the process at the limit.
    """

    def __init__(
        self,
        world: World,
        store: Store,
        recorder: FlightRecorder,
        limit_s: float,
        *,
        backstop: bool,
        layout: Layout | None = None,
    ):
        """
        Args:
            world: This rank's place in the launch.
            store: A connection to where the ranks met, for this object alone.
            recorder: Tells which collectives this process has begun and finished.
            limit_s: How long a collective may take, in seconds.
            backstop: Whether this thread ends the process at the limit.
            layout: This rank's place among the others; None where all hold the same.
        """
        self.where = RunPosition()
        self._world = world
        self._recorder = recorder
        self._limit_s = limit_s
        self._backstop = backstop
        self._store = RankStore(store, world.rank, world.size)
        self._diagnosis = HangDiagnosis(world, self._store, limit_s, ends_record=backstop, layout=layout)
        self._main = threading.get_ident()
        # what the other thread is to run, and what tells that it did
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._signals = SignalPipe(self._wait_for_the_end)
        # number of collectives finished, and the time.monotonic() since when no further one is
        self._stuck: tuple[int, float] | None = None
        self._failed_since: float | None = None
        self._over = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    # --- the trainer's thread

    def start(self) -> None:
        """Begin to tell, and to listen for SIGTERM even while the trainer waits inside a collective."""
        self._signals.open()
        self._thread.start()

    def stop(self) -> None:
        """End the other thread and give signals back. Called after `leave`."""
        self._over = True
        self._signals.wake()
        self._thread.join(FAREWELL_SECONDS)
        self._signals.release_signals()
        if not self._thread.is_alive():
            self._signals.close()

    def report_to(self, run_dir: Path) -> None:
        """Have what all ranks told written into this folder when they fail."""
        self._diagnosis.run_dir = run_dir

    @contextlib.contextmanager
    def explain_failures(self) -> Iterator[None]:
        """Turns a collective's failure inside it into a RanksError that says which rank is to blame."""
        try:
            yield
        except Exception as error:
            detail = lost_connection(error)
            if detail is None and not isinstance(error, dist.DistError):
                raise
            reason = LATE_RANK if re.search("timed out|timeout", str(error).lower()) else CLOSED
            # a launcher that saw a rank die ends the others at once: this one does so by itself, after it has told why
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            mine = self._post()
            excerpt = self._excerpt()
            answers = self._call(
                lambda: self._diagnosis.diagnose(reason, mine, excerpt, detail), ANSWER_SECONDS + VERDICT_SECONDS
            )
            if not answers:
                raise describe_lost_store() from error
            found = answers[0]
            if found is None:
                raise
            raise found from error

    def leave(self, error: BaseException | None) -> None:
        """Say goodbye, before the connections to the others are closed. error: what this rank ends with, if any."""
        blameless = error is None or isinstance(error, (RanksError, KeyboardInterrupt))
        said = NO_ERROR
        if error is not None:
            lines = f"{type(error).__name__}: {error}".splitlines()
            said = lines[0] if lines else ""

        def say_goodbye() -> None:
            self._store.set_status(self._post(left=said, blameless=blameless))

        self._call(say_goodbye, FAREWELL_SECONDS)

    def _call(self, function: Callable[[], Answer], within_s: float) -> list[Answer]:
        """Have the other thread run a function. Returns its only result; an empty list where the store fails or
        hangs."""
        answers: list[Answer] = []
        ready = threading.Event()
        self._calls.put((lambda: answers.append(function()), ready))
        self._signals.wake()
        ready.wait(within_s)
        return answers

    def _wait_for_the_end(self) -> None:
        """Runs in the trainer's thread on SIGTERM, where no handler of the trainer does."""
        # The other thread ends the process long before, unless the machine is too busy for it or another rank speaks; a
        # launcher waits for half a minute.
        time.sleep(ANSWER_SECONDS + VERDICT_SECONDS)
        die_of(signal.SIGTERM)

    # --- the other thread

    def _watch(self) -> None:
        # the first at once: a rank that dies early has said that it was there
        next_beat = time.monotonic()
        while not self._over:
            until_beat_s = max(next_beat - time.monotonic(), 0)
            said = self._signals.wait(until_beat_s)
            with contextlib.suppress(*STORE_ERRORS):  # whoever needs the store finds out
                if signal.SIGTERM in said:
                    self._terminated()
                # whatever woke this thread: signals may come all the time
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + BEAT_SECONDS
                    self._beat()
            while not self._calls.empty():
                run, ready = self._calls.get()
                with contextlib.suppress(*STORE_ERRORS):
                    run()
                ready.set()

    def _beat(self) -> None:
        """Post this rank's status, and look whether it is stuck and whether somebody asks."""
        now = time.monotonic()
        begun, finished = sum_counts(self._recorder.counts())
        if begun <= finished:
            self._stuck = None
        elif self._stuck is None or self._stuck[0] != finished:
            self._stuck = (finished, now)
        answers = self._store.has_failed()
        if answers:
            # before the answer: who reads that looks for this
            self._store.set_recording(self._excerpt())
        self._store.set_status(self._post(answers=answers))
        if answers:
            # a rank that hangs for good must not outlive the others, whatever it hangs in
            self._failed_since = self._failed_since or time.monotonic()
            if time.monotonic() - self._failed_since > GRACE_SECONDS and self._store.wait_for_cause(0):
                os._exit(RanksError.exit_code)
        elif self._backstop and self._stuck and time.monotonic() - self._stuck[1] >= self._limit_s:
            self._stuck = None
            if self._recorder.has_unfinished() and self._tell(LATE_RANK, self._post()):
                os._exit(RanksError.exit_code)

    def _tell(self, reason: str, mine: RankAtFailure) -> bool:
        """Find the cause and print it. Returns False where there is none, or another rank says it."""
        found = self._diagnosis.diagnose(reason, mine, self._excerpt())
        if found is None or found.told:
            return False
        tell_error(found, self._world)
        return True

    def _post(self, answers: bool = False, left: str | None = None, blameless: bool = False) -> RankAtFailure:
        """Describe this rank; where it answers, with its stack. The arguments are those of RankAtFailure."""
        status = replace(describe_rank(self.where, self._recorder.counts()), left=left, blameless=blameless)
        if not answers:
            return status
        return replace(status, answers=True, stack=read_stack(self._main))

    def _excerpt(self) -> str:
        return self._recorder.excerpt(self.where.stage_wait)

    def _terminated(self) -> None:
        """Handle SIGTERM. A launcher sends it when a rank has died: the last moment to say which."""
        # else --exit-signal-handler wants to save
        ends = self._signals.handles_termination
        mine = self._post()
        with contextlib.suppress(*STORE_ERRORS):
            if ends:
                self._store.set_status(self._post(left="SIGTERM", blameless=True))
            if self._diagnosis.has_dead_neighbor(mine):
                ends = True
                self._tell(TERMINATED, mine)
        if ends:
            die_of(signal.SIGTERM)


class LauncherWatch:
    """A thread that ends this process within seconds after torchrun's agent is gone; without an agent it does nothing.

    The agent ends and restarts its ranks. Killed by SIGKILL, it leaves them to themselves, and they would train on
    unseen. run_dir: where run.json is, once that is known.
    """

    def __init__(self, world: World):
        self.run_dir: Path | None = None
        self._world = world
        self._agent = find_launcher(os.environ)

    def start(self) -> None:
        """Look at the agent from now on."""
        if self._agent is not None:
            threading.Thread(target=self._watch, args=(self._agent,), name="launcher", daemon=True).start()

    def _watch(self, agent: ProcessIdentity) -> None:
        while is_there(agent) is not False:
            time.sleep(SECONDS_BETWEEN_LAUNCHER_LOOKS)
        last_words = threading.Thread(target=self._say, args=(agent,), daemon=True)
        last_words.start()
        last_words.join(SECONDS_FOR_LAST_WORDS)
        # a loader's workers
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(RanksError.exit_code)

    def _say(self, agent: ProcessIdentity) -> None:
        """Say that the agent is gone, on the terminal and in run.json."""
        gone = f"torchrun's agent (process {agent['pid']} on {agent['host']}) is gone"
        line = f"{gone}, so its ranks end: nothing would restart or stop them; {AGAIN}"
        with contextlib.suppress(OSError):  # the agent may have been the one to read it
            if self._world.local_rank == 0:
                print_lines([f"error: {line}"], sys.stderr)
        with contextlib.suppress(OSError, ValueError):
            # whichever of them dies first: the end of one can end the other before it has looked at the agent
            writes = self._world.local_rank == 0 or self._world.is_last
            if writes and self.run_dir is not None:
                end_record(self.run_dir, line)
