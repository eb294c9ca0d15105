"""Signals that another thread hears, even while the main thread waits inside of C code, where no handler runs."""

import contextlib
import ctypes
import os
import select
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType

WAKE = b"\xff"  # no signal has this number
MAX_BYTES_OF_A_READ = 4096
MS_PER_S = 1000


class SignalPipe:
    """Bytes of signals, and a way to wake who waits for them. Made and opened in the main thread.

    Only signals that have a handler in Python are heard. SIGTERM gets one here, unless the program has one; what the
    program handles later is left to it, and heard as well.
    """

    def __init__(self, terminate: Callable[[], None]):
        """
        Args:
            terminate: Runs in the main thread on SIGTERM, where no handler of the program does.
        """
        self._terminate = terminate
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        # several may wait, and one of them reads what all were woken for
        os.set_blocking(self._read, False)
        self._old_wakeup = -1
        self._old_handler: object = None
        self._pid = os.getpid()
        self._is_paused = False
        # of threads that fork, by their number: the signals that they block otherwise
        self._blocked: dict[int, set[int | signal.Signals]] = {}
        own = weakref.ref(self)

        def call(method: Callable[[SignalPipe], None]) -> None:
            pipe = own()
            if pipe is not None:
                method(pipe)

        os.register_at_fork(
            before=lambda: call(SignalPipe._pause),
            after_in_parent=lambda: call(SignalPipe._resume),
            after_in_child=lambda: call(SignalPipe._forget_in_child),
        )

    def open(self) -> None:
        """Begin to hear signals. ValueError in another thread than the main one."""
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old_handler = signal.getsignal(signal.SIGTERM)
        if self._old_handler is signal.SIG_DFL or _is_of_a_pipe(self._old_handler):
            signal.signal(signal.SIGTERM, self._handle_termination)

    @property
    def handles_termination(self) -> bool:
        """Whether SIGTERM is still left to this object: no handler of the program's has come."""
        return signal.getsignal(signal.SIGTERM) == self._handle_termination

    def wait(self, seconds: float) -> bytes:
        """Wait for signals or for `wake`. Returns what came, a byte for each signal; b"" where nothing did."""
        # not select(), which refuses numbers of files from 1024 on
        poller = select.poll()
        poller.register(self._read, select.POLLIN)
        woken = poller.poll(MS_PER_S * seconds)
        said = b""
        if woken:
            with contextlib.suppress(BlockingIOError):
                said = os.read(self._read, MAX_BYTES_OF_A_READ)
        signals = said.replace(WAKE, b"")
        if signals and self._old_wakeup >= 0:
            with contextlib.suppress(OSError):
                # to who listened before
                os.write(self._old_wakeup, signals)
        return said

    def wake(self) -> None:
        """End the other thread's `wait` at once."""
        with contextlib.suppress(BlockingIOError):
            # full: there is enough to wake it
            os.write(self._write, WAKE)

    def release_signals(self) -> None:
        """Let others hear signals, as before `open`. Called in the main thread."""
        heard = signal.set_wakeup_fd(self._old_wakeup)
        if heard not in (self._write, -1):
            # the program listens itself by now
            signal.set_wakeup_fd(heard)
        if self.handles_termination:
            signal.signal(signal.SIGTERM, self._old_handler)  # type: ignore[arg-type]

    def close(self) -> None:
        """Close both ends. Called when nobody waits any more."""
        os.close(self._read)
        os.close(self._write)

    def _handle_termination(self, number: int, frame: FrameType | None) -> None:
        if not self.handles_termination:
            # called by a handler of the program's, as the one before it, which did nothing
            return
        if os.getpid() != self._pid:
            die_of(number)
        with contextlib.suppress(BlockingIOError):
            # for who did not hear it: the pipe was paused, or the program listens itself by now
            os.write(self._write, bytes([number]))
        self._terminate()

    def _pause(self) -> None:
        """Hear nothing while this process forks: signals of its child would be taken for its own, and Python forgets
        those that come before the child has begun."""
        self._blocked[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        with contextlib.suppress(ValueError):
            # ValueError: forked from another thread
            self._is_paused = self._stop_hearing()

    def _stop_hearing(self) -> bool:
        """Hear nothing from now on, and return whether this object heard until now. ValueError in another thread."""
        heard = signal.set_wakeup_fd(-1)
        if heard == self._write:
            return True
        # nobody's, or the program's own
        signal.set_wakeup_fd(heard)
        return False

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._unblock()

    def _unblock(self) -> None:
        """Block what this thread blocked before it forked."""
        blocked = self._blocked.pop(threading.get_ident(), None)
        if blocked is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _forget_in_child(self) -> None:
        """Leave SIGTERM of a forked process to it, and its signals unheard."""
        with contextlib.suppress(ValueError):
            # forked from another thread, it was not paused
            self._stop_hearing()
            if self.handles_termination:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._unblock()


def _is_of_a_pipe(handler: object) -> bool:
    return isinstance(getattr(handler, "__self__", None), SignalPipe)


def die_of(number: int) -> None:
    """End this process by a signal of this number, as if nobody handled it. number: such as signal.SIGTERM."""
    # Python's own way is open to the main thread only
    ctypes.CDLL(None).signal(number, None)
    os.kill(os.getpid(), number)
