"""Records, beside a training that it does not know, what tells afterwards why it died or hangs.

A thread writes every second what this rank does, and dumps torch's flight recorder and all stacks where a step takes
far longer than those before, where a signal comes, and where the process ends with an error. It runs no collective,
and the loop never waits for it.
"""

import contextlib
import faulthandler
import io
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import weakref
from multiprocessing.util import Finalize
from pathlib import Path

import msgspec
import torch.distributed as dist

from megatron_lite import signal_pipe
from megatron_lite.formats.failure_record import NO_ERROR, RankAtFailure
from megatron_lite.last_words import (
    BEATS_APART_S,
    FAULT_STACKS,
    LOOK_AGAIN_FACTOR,
    flight_path,
    is_late,
    name_rank,
    stacks_path,
    words_path,
    write_words,
)
from megatron_lite.parallel.rank_status import read_stack, sum_counts
from megatron_lite.postmortem.evidence import ALL_RANKS_GROUP
from megatron_lite.process_state import pid_space
from megatron_lite.signal_pipe import SignalPipe, die_of
from megatron_lite.variables import WATCHED_RANK
from megatron_lite.watch.ended_children import find_exit_codes, is_of_launcher, note_exit_codes
from megatron_lite.watch.error_text import describe_error, describe_error_stack, name_error
from megatron_lite.watch.flight_dump import FlightDump, remove_flight
from megatron_lite.watch.profiler import Profiler

# what a dump may take before SIGTERM ends the process anyway; launchers wait for half a minute
MAX_LAST_DUMP_S = 10.0
# a thread that is silent for so long cannot run: C code holds the interpreter
SILENT_S = 30.0
ARMS_APART_S = 10.0
OWN_FILES = (__file__, signal_pipe.__file__)
HEARD_SIGNALS = (signal.SIGTERM, signal.SIGINT)
ARM = faulthandler.dump_traceback_later  # before scripts are listened to that use it


class RankRecorder:
    """The recorder of this process. It writes nothing before `start`, and nothing in processes forked from this one."""

    def __init__(self, folder: Path, profiler: Profiler):
        """
        Args:
            folder: Folder of the recording.
            profiler: Knows step and phase.
        """
        self._folder = folder
        self._profiler = profiler
        # whether the clock of faulthandler, of which there is one, is left to us
        self._arms = True
        # whether faulthandler writes crashes where we say, here or in the process that this one was forked from
        self._takes_crashes = False
        self._set_to_start()
        own = weakref.ref(self)

        def begin_anew() -> None:
            recorder = own()
            if recorder is not None:
                recorder._set_to_start()

        os.register_at_fork(after_in_child=begin_anew)

    def _set_to_start(self) -> None:
        """Know nothing of this process yet; one that was forked from it may be a rank of its own."""
        self._pid = os.getpid()
        self._name = name_rank(None, self._pid)
        self._flight = FlightDump()
        self._pipe: SignalPipe | None = None
        self._stacks: io.FileIO | None = None
        self._thread: threading.Thread | None = None
        # one writes at a time
        self._lock = threading.RLock()
        self._has_ended = False
        # what no beat can find out: the error, the exit code, a signal
        self._end = RankAtFailure()
        # with what it was about to exit, where somebody said so
        self._exit: RankAtFailure | None = None
        self._started_at = time.perf_counter()
        # where the main thread was when it was late, or heard a signal
        self._stack: tuple[str, ...] = ()
        # of all groups, and since when they are
        self._counts = (0, 0)
        self._counted_at = self._started_at
        # how long a late step has to last to be looked at next; 0: it is not late
        self._look_at_s = 0.0
        self._armed_at = time.monotonic() - ARMS_APART_S

    # --- the threads of the script

    @property
    def has_started(self) -> bool:
        """Whether this process is known to be one that trains."""
        return self._thread is not None

    def start(self) -> None:
        """Record from now on, once: this process is one of those that train."""
        if self.has_started or self._has_ended:
            return
        self._thread = threading.Thread(target=self._run, name="megatron-lite watch", daemon=True)
        self._started_at = time.perf_counter()
        os.environ[WATCHED_RANK] = str(self._pid)
        with contextlib.suppress(OSError):
            flight_path(self._folder, self._name).parent.mkdir(parents=True, exist_ok=True)
            self._take_name()
            self._open_stacks()
        with contextlib.suppress(ValueError):
            # ValueError: another thread than the main one
            pipe = SignalPipe(self._wait_for_the_end)
            pipe.open()
            self._pipe = pipe
            self._listen_in_c()
        if multiprocessing.parent_process() is not None:
            # such a process ends without asking atexit
            Finalize(None, self._end_child, exitpriority=0)
        self._thread.start()

    def note_error(self, error: BaseException) -> None:
        """Record the exception that ends this process, at once: not every process that met one lives to its end."""
        self._end = self._add_error(self._end, error)
        with contextlib.suppress(OSError):
            note_exit_codes(self._folder, find_exit_codes(error))
        if self.has_started and not self._has_ended:
            with self._lock:
                self._write(self._end)
                self._dump_flight()

    def note_exit(self, code: object, handled: BaseException | None) -> None:
        """Note that this process is about to exit; what called for it may think better of it.

        Args:
            code: What sys.exit takes.
            handled: The exception that is being handled, if there is one.
        """
        number = _find_exit_code(code)
        words = msgspec.structs.replace(self._end, exit_code=number)
        if number and handled is not None:
            words = self._add_error(words, handled)
        elif number:
            words = msgspec.structs.replace(words, left=f"exit code {number}")
        self._exit = words

    def _add_error(self, words: RankAtFailure, error: BaseException) -> RankAtFailure:
        """Add an exception that ends this process. words, error: what is known of the end, and the exception."""
        return msgspec.structs.replace(
            words,
            left=describe_error(error),
            error=name_error(error),
            message=describe_error(error, whole=True),
            error_stack=describe_error_stack(error),
            exit_code=words.exit_code or 1,
            blameless=isinstance(error, KeyboardInterrupt) or is_of_launcher(error),
        )

    def end(self) -> None:
        """Write the last words. What was an error is dumped, too. Nothing more is written then."""
        with contextlib.suppress(OSError):
            # a handler may have ended the script before the other thread heard
            self._note_signal(self._pipe.wait(0.0) if self._pipe is not None else b"")
        words = self._end
        if self._exit is not None and words.left is None:
            words = msgspec.structs.replace(self._exit, signal=words.signal, signal_at=words.signal_at)
        # of a process that did not train, only what went wrong is of interest, and a worker tells its parent
        is_heard = self.has_started or (words.left is not None and multiprocessing.parent_process() is None)
        if self._has_ended or not is_heard:
            return
        self._has_ended = True
        self._release_signals()
        with self._lock:
            self._take_name()
            self._write(msgspec.structs.replace(words, left=words.left or NO_ERROR, ended_at=time.time()))
            # also where it ends well: others may wait for what it never entered
            self._dump_flight()
        self._close_stacks(is_bad=words.left is not None)

    def _release_signals(self) -> None:
        """Let SIGTERM end this process at once again, and the other thread come to its end."""
        if self._pipe is None:
            return
        if self._pipe.handles_termination:
            faulthandler.unregister(signal.SIGTERM)
        with contextlib.suppress(ValueError):
            # ValueError: another thread than the main one
            self._pipe.release_signals()
        self._pipe.wake()

    def _end_child(self) -> None:
        """End in a process of multiprocessing, with the error that ends it."""
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            # where it says so, it was raised for another one
            self.note_exit(error.code, error.__cause__ or error.__context__)
        elif error is not None:
            self.note_error(error)
        self.end()

    # --- the other thread

    def _run(self) -> None:
        next_beat = time.monotonic()
        while not self._has_ended:
            until_beat_s = max(next_beat - time.monotonic(), 0.0)
            said = b""
            if self._pipe is not None:
                said = self._pipe.wait(until_beat_s)
            else:
                time.sleep(until_beat_s)
            with self._lock:
                if self._has_ended:
                    return
                is_due = time.monotonic() >= next_beat
                if is_due:
                    next_beat = time.monotonic() + BEATS_APART_S
                # whatever fails here, the script goes on
                with contextlib.suppress(Exception):
                    self._hear(said)
                    if is_due:
                        self._beat()

    def _beat(self) -> None:
        """Write what this rank does, and look closer where its step is late."""
        self._take_name()
        status = self._write(self._end)
        now = time.monotonic()
        if self._arms and self._stacks is not None and now - self._armed_at >= ARMS_APART_S:
            self._armed_at = now
            ARM(SILENT_S, file=self._stacks)
        if is_late(status):
            lasted_s = max(status.step_s, status.still_s)
            if lasted_s >= self._look_at_s:
                self._look_at_s = LOOK_AGAIN_FACTOR * lasted_s
                self._take_evidence()
        elif self._look_at_s:
            # it goes on: what was taken is old, and would be taken for the end
            self._look_at_s = 0.0
            remove_flight(self._folder, self._name)
            self._empty_stacks()

    def _hear(self, said: bytes) -> None:
        """Take evidence where a signal came that ends processes."""
        number = self._note_signal(said)
        if number is None:
            return
        ends = number == signal.SIGTERM and self._pipe is not None and self._pipe.handles_termination
        words = self._end
        if ends:
            killer = threading.Timer(MAX_LAST_DUMP_S, die_of, (signal.SIGTERM,))
            killer.daemon = True
            killer.start()
            words = msgspec.structs.replace(
                words, left="SIGTERM", exit_code=-number, ended_at=time.time(), blameless=True
            )
        try:
            self._write(words, with_stack=True)
            # faulthandler has written stacks before Python heard of a signal that ends the process, and of one that
            # hung there are stacks: it leaves that place now
            self._take_evidence(with_stacks=not ends and not self._look_at_s)
        finally:
            if ends:
                die_of(signal.SIGTERM)

    def _note_signal(self, said: bytes) -> int | None:
        """Note a signal that ends processes, and return its number; None where none came. said: what the pipe said."""
        number = next((int(one) for one in HEARD_SIGNALS if one in said), None)
        if number is not None:
            self._end = msgspec.structs.replace(self._end, signal=number, signal_at=time.time())
        return number

    def _take_evidence(self, with_stacks: bool = True) -> None:
        """Dump what was recorded of collectives. with_stacks: and the stacks of all threads."""
        self._dump_flight()
        if with_stacks and self._stacks is not None:
            self._empty_stacks()
            faulthandler.dump_traceback(self._stacks, all_threads=True)

    def _dump_flight(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._flight.write(self._folder, self._name)

    def _write(self, known: RankAtFailure, with_stack: bool = False) -> RankAtFailure:
        """Write what this rank does now, and return it.

        Args:
            known: What only its end or a signal can tell.
            with_stack: Add where the main thread is, as also for a step that is late.
        """
        status = self._describe(known)
        if is_late(status) or (with_stack and not self._look_at_s):
            self._stack = _read_main_stack()
        elif not self._look_at_s:
            self._stack = ()
        # one that was late and ends tells where it was
        status = msgspec.structs.replace(status, stack=self._stack)
        with contextlib.suppress(OSError):
            write_words(words_path(self._folder, self._name), status)
        return status

    def _describe(self, known: RankAtFailure) -> RankAtFailure:
        """Describe this process. known: as of `_write`."""
        position = self._profiler.position
        now = time.perf_counter()
        counts = self._flight.read_counts()
        if sum_counts(counts) != self._counts:
            self._counts = sum_counts(counts)
            self._counted_at = now
        begun, finished = counts.get(ALL_RANKS_GROUP, (0, 0))
        seen_at = max(position.moved_at, self._counted_at, self._started_at)
        return msgspec.structs.replace(
            known,
            host=socket.gethostname(),
            pids=pid_space(),
            pid=self._pid,
            wall_time=time.time(),
            rank=self._find_rank(),
            local_rank=_read_number("LOCAL_RANK"),
            world_size=self._find_size(),
            restart=_read_number("TORCHELASTIC_RESTART_COUNT") or 0,
            step=position.step,
            step_s=now - (position.step_since or self._started_at),
            usual_step_s=position.usual_step_s,
            phase=position.phase,
            phase_s=now - (position.phase_since or self._started_at),
            still_s=now - seen_at,
            begun=begun,
            finished=finished,
            groups={group: last for group, (last, _) in counts.items() if group != ALL_RANKS_GROUP},
        )

    # --- who this is

    def _find_rank(self) -> int | None:
        """Find the number of this process among all ranks; None where it has none."""
        if os.environ.get(WATCHED_RANK, str(self._pid)) != str(self._pid):
            # started by a rank, whose variables and groups it has
            return None
        if dist.is_initialized():
            return dist.get_rank()
        if multiprocessing.parent_process() is None and (rank := _read_number("RANK")) is not None:
            return rank
        # of processes that train without a rank, the first has the folder for itself
        is_first = self._profiler.is_recording and self._profiler.folder == self._folder
        return 0 if is_first else None

    def _find_size(self) -> int | None:
        if dist.is_initialized():
            return dist.get_world_size()
        if (size := _read_number("WORLD_SIZE")) is not None:
            return size
        return 1 if self._find_rank() == 0 else None

    def _take_name(self) -> None:
        """Write under the rank's number as soon as it is known, and over what another process wrote there before."""
        name = name_rank(self._find_rank(), self._pid)
        if name == self._name:
            return
        before = self._name
        self._name = name
        remove_flight(self._folder, name)
        words_path(self._folder, before).unlink(missing_ok=True)
        if self._stacks is not None:
            os.replace(stacks_path(self._folder, before, FAULT_STACKS), stacks_path(self._folder, name, FAULT_STACKS))

    # --- stacks that C code writes, also while the interpreter is held

    def _open_stacks(self) -> None:
        path = stacks_path(self._folder, self._name, FAULT_STACKS)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stacks = io.FileIO(path, "w")
        if self._takes_crashes or not faulthandler.is_enabled():
            self._takes_crashes = True
            faulthandler.enable(self._stacks)

    def _listen_in_c(self) -> None:
        """Have SIGTERM write stacks before anything else: nothing in Python may run any more."""
        if self._stacks is not None and self._pipe is not None and self._pipe.handles_termination:
            faulthandler.register(signal.SIGTERM, self._stacks, all_threads=True, chain=True)

    def leave_clock(self) -> None:
        """Leave faulthandler's clock, of which a process has one, to the script."""
        self._arms = False

    def _empty_stacks(self) -> None:
        if self._stacks is not None:
            self._stacks.truncate(0)
            self._stacks.seek(0)

    def _close_stacks(self, is_bad: bool) -> None:
        """Leave no clock behind, and no file without a word. is_bad: whether the process ends with an error."""
        if self._stacks is None:
            return
        if self._arms:
            faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):
            path = stacks_path(self._folder, self._name, FAULT_STACKS)
            if not path.stat().st_size and not is_bad:
                path.unlink()

    def _wait_for_the_end(self) -> None:
        """Wait for the other thread to end the process. Runs in the main thread on SIGTERM, unless the script has a
        handler."""
        if not self._has_ended:
            time.sleep(MAX_LAST_DUMP_S)
        die_of(signal.SIGTERM)


def _read_number(name: str) -> int | None:
    """The number in an environment variable; None where there is none."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None


def _read_main_stack() -> tuple[str, ...]:
    """Where the main thread is in its script, innermost first: without our own handler on top of it."""
    calls = read_stack(threading.main_thread().ident or 0)
    own = [number for number, call in enumerate(calls) if any(f"({file}:" in call for file in OWN_FILES)]
    return calls[own[-1] + 1 :] if own else calls


def _find_exit_code(code: object) -> int:
    """The exit code of a process that calls sys.exit with `code`."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def has_own_rank() -> bool:
    """Whether the launcher gave this process a rank of its own, and not to the one that started it."""
    # a loader's worker, or one of the compiler's, has its parent's variables
    process = multiprocessing.current_process()
    is_worker = multiprocessing.parent_process() is not None or getattr(process, "_inheriting", False)
    return not is_worker and _read_number("RANK") is not None and WATCHED_RANK not in os.environ
