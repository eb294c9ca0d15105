"""Every rank tells the others where it is, and when ranks fail, one line says which and why.

A thread beside the trainer writes a short post to the store every second and looks whether somebody asks. It runs no
collective and never makes the device wait. It is the only one that uses its connection to the store, so that the
trainer's thread can give up on a store that hangs.
"""

import contextlib
import ctypes
import multiprocessing
import os
import queue
import re
import select
import signal
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from megatron_lite.config.layout import Layout
from megatron_lite.config.world import World
from megatron_lite.errors import RanksError, first_line
from megatron_lite.parallel.hang_diagnosis import (
    AGAIN,
    ANSWER_SECONDS,
    CLOSED,
    LATE,
    TERMINATED,
    VERDICT_SECONDS,
    HangDiagnosis,
    end_record,
)
from megatron_lite.parallel.rank_status import (
    FlightRecorder,
    Operation,
    RankStatus,
    RankStore,
    RunPosition,
    describe_rank,
    read_stack,
)
from megatron_lite.process_state import find_launcher, is_there
from megatron_lite.rank_errors import tell_error
from megatron_lite.terminal import print_lines

BEAT_SECONDS = 1.0
FAREWELL_SECONDS = 10.0  # a busy machine may take seconds to hand it over
LOOK_CLOSER = 0.1  # of the limit: a step that takes so long bears a look at the whole recorder
GRACE_SECONDS = 30.0  # what a rank has to end by itself once the verdict is out
SECONDS_BETWEEN_LOOKS = 1.0  # at the launcher
SECONDS_FOR_LAST_WORDS = 5.0  # a terminal or a disk may hang
WAKE = b"\xff"  # no signal has this number
STORE_ERRORS = (dist.DistError, RuntimeError)
# what gloo says of lost connections; its errors are plain RuntimeErrors
LOST = ("gloo/transport", "pair closure", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


def describe_lost_store() -> RanksError:
    """What to say where nobody can be asked."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    holder = "torchrun's agent" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
    line = (
        f"MASTER_ADDR:MASTER_PORT {where}: the store there does not answer, so {holder}, which holds it, died, "
        "is stopped or "
        f"cut off; {AGAIN}"
    )
    return RanksError(line, ended=True)


def lost_connection(error: BaseException) -> str | None:
    """What gloo says of a connection that broke or kept waiting; None for other errors, wrong sizes among them."""
    text = first_line(error)
    lost = type(error) is RuntimeError and any(sign in text for sign in LOST) and "enforce fail" not in text
    return text.rpartition("] ")[2].partition(". ")[0] if lost else None


class NoWatchdog:
    """The watchdog of a rank that has no others: nothing to explain, nobody to tell."""

    def __init__(self):
        self.where = RunPosition()
        self.explain_failures = contextlib.nullcontext
        self.report_to = self.leave = lambda *_: None


class Watchdog:
    """One rank's, from before the process group is made until it is left.

    Where the backend's failures do not reach Python (nccl), `backstop` makes this thread end the process at the limit.
    """

    def __init__(
        self,
        world: World,
        store: dist.Store,
        recorder: FlightRecorder,
        limit_s: float,
        *,
        backstop: bool,
        layout: Layout | None = None,
    ):
        self.where = RunPosition()
        self._world, self._recorder, self._limit_s, self._backstop = world, recorder, limit_s, backstop
        self._store = RankStore(store, world.rank, world.size)
        self._diagnosis = HangDiagnosis(world, self._store, limit_s, ends_record=backstop, layout=layout)
        self._main = threading.get_ident()
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._stuck: tuple[int, float] | None = None  # (collectives finished, since when no further one)
        self._waiting: Operation | None = None  # the one that does not finish
        self._failed_since: float | None = None
        self._over = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    # --- the trainer's thread

    def start(self):
        """Begin to tell, and to listen for SIGTERM even while the trainer waits inside a collective."""
        self._old_wakeup = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._old_handler = signal.getsignal(signal.SIGTERM)
        if self._old_handler is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._wait_for_the_end)
        self._thread.start()

    def stop(self):
        """After `leave`."""
        self._over = True
        os.write(self._wake_write, WAKE)
        self._thread.join(FAREWELL_SECONDS)
        signal.set_wakeup_fd(self._old_wakeup)
        if signal.getsignal(signal.SIGTERM) == self._wait_for_the_end:
            signal.signal(signal.SIGTERM, self._old_handler)
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def report_to(self, run_dir: Path):
        """Where what all ranks told is written when they fail."""
        self._diagnosis.run_dir = run_dir

    @contextlib.contextmanager
    def explain_failures(self):
        """Turns a collective's failure inside it into a RanksError that says which rank is to blame."""
        try:
            yield
        except Exception as error:
            detail = lost_connection(error)
            if detail is None and not isinstance(error, dist.DistError):
                raise
            reason = LATE if re.search("timed out|timeout", str(error).lower()) else CLOSED
            # when one fails, gloo lets others fail with it: which one waited was noted before
            operation = self._waiting or self._find_unfinished() or self._recorder.newest()
            # a launcher that saw a rank die ends the others at once: this one does so by itself, after it has told why
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            mine = self._post()
            box = self._call(
                lambda: self._diagnosis.diagnose(reason, mine, operation, detail), ANSWER_SECONDS + VERDICT_SECONDS
            )
            if box and box[0] is None:
                raise
            raise (box[0] if box else describe_lost_store()) from error

    def leave(self, error: BaseException | None):
        """Say goodbye, before the connections to the others are closed; `error` is what this rank ends with."""
        blameless = error is None or isinstance(error, (RanksError, KeyboardInterrupt))
        said = "no error" if error is None else (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
        self._call(lambda: self._store.set_status(self._post(left=said, blameless=blameless)), FAREWELL_SECONDS)

    def _call(self, function, within_s: float) -> list:
        """[result] of a function that the other thread runs; [] where the store fails or hangs."""
        box, ready = [], threading.Event()
        self._calls.put((function, box, ready))
        os.write(self._wake_write, WAKE)
        ready.wait(within_s)
        return box

    def _wait_for_the_end(self, number, frame):
        # The other thread ends the process long before, unless the machine is too busy for it or another rank speaks; a
        # launcher waits for half a minute.
        time.sleep(ANSWER_SECONDS + VERDICT_SECONDS)
        _die_of(number)

    # --- the other thread

    def _watch(self):
        next_beat = time.monotonic()  # the first at once: a rank that dies early has said that it was there
        while not self._over:
            woken = select.select([self._wake_read], [], [], max(next_beat - time.monotonic(), 0))[0]
            said = os.read(self._wake_read, 4096) if woken else b""
            with contextlib.suppress(*STORE_ERRORS):  # whoever needs the store finds out
                if signal.SIGTERM in said:
                    self._terminated()
                if time.monotonic() >= next_beat:  # whatever woke this thread: signals may come all the time
                    next_beat = time.monotonic() + BEAT_SECONDS
                    self._beat()
            while not self._calls.empty():
                function, box, ready = self._calls.get()
                with contextlib.suppress(*STORE_ERRORS):
                    box.append(function())
                ready.set()

    def _beat(self):
        now, counts = time.monotonic(), self._recorder.counts().values()
        begun, finished = (sum(numbers) for numbers in zip(*counts)) if counts else (0, 0)
        if begun <= finished:
            self._stuck = self._waiting = None
        elif self._stuck is None or self._stuck[0] != finished:
            self._stuck, self._waiting = (finished, now), None
        elif self._waiting is None and now - self._stuck[1] >= LOOK_CLOSER * self._limit_s:
            self._waiting = self._recorder.unfinished()
        answers = self._store.has_failed()
        self._store.set_status(self._post(answers=answers))
        if answers:  # a rank that hangs for good must not outlive the others, whatever it hangs in
            self._failed_since = self._failed_since or time.monotonic()
            if time.monotonic() - self._failed_since > GRACE_SECONDS and self._store.wait_for_cause(0):
                os._exit(RanksError.exit_code)
        elif self._backstop and self._stuck and time.monotonic() - self._stuck[1] >= self._limit_s:
            waiting, self._stuck = self._recorder.unfinished(), None
            if waiting is not None and self._tell(LATE, self._post(), waiting):
                os._exit(RanksError.exit_code)

    def _tell(self, reason: str, mine: RankStatus, operation: Operation | None) -> bool:
        """Find the cause and print it. False: there is none, or another rank says it."""
        found = self._diagnosis.diagnose(reason, mine, operation)
        if found is None or found.told:
            return False
        tell_error(found, self._world)
        return True

    def _post(self, answers: bool = False, **more) -> RankStatus:
        if answers:
            operation = self._find_unfinished()
            more |= {"stack": read_stack(self._main), "waiting": operation and operation.awaited}
        return describe_rank(self.where, self._recorder.counts(), answers=answers, **more)

    def _find_unfinished(self) -> Operation | None:
        return self.where.hand_over or self._recorder.unfinished()

    def _terminated(self):
        """SIGTERM. A launcher sends it when a rank has died: the last moment to say which."""
        ends = signal.getsignal(signal.SIGTERM) == self._wait_for_the_end  # else --exit-signal-handler wants to save
        mine, operation = self._post(), self._find_unfinished()
        with contextlib.suppress(*STORE_ERRORS):
            if ends:
                self._store.set_status(self._post(left="SIGTERM", blameless=True))
            if self._diagnosis.has_dead_neighbor(mine, operation):
                ends = True
                self._tell(TERMINATED, mine, operation)
        if ends:
            _die_of(signal.SIGTERM)


def _die_of(number: int):
    ctypes.CDLL(None).signal(number, None)  # Python's own way is open to the main thread only
    os.kill(os.getpid(), number)


class LauncherWatch:
    """A thread that ends this process within seconds after torchrun's agent is gone; without an agent it does nothing.

    The agent ends and restarts its ranks. Killed by SIGKILL, it leaves them to themselves, and they would train on
    unseen. run_dir: where run.json is, once that is known.
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
            f"torchrun's agent (process {self._agent['pid']} on {self._agent['host']}) is gone, "
            "so its ranks end: nothing "
            f"would restart or stop them; {AGAIN}"
        )
        with contextlib.suppress(OSError):  # the agent may have been the one to read it
            if self._world.local_rank == 0:
                print_lines([f"error: {line}"], sys.stderr)
        with contextlib.suppress(OSError, ValueError):
            if self._world.is_last and self.run_dir is not None:
                end_record(self.run_dir, line)
