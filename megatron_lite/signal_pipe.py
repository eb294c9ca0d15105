"""Signals that another thread hears, even while the main thread waits inside of C code, where no handler runs."""

import contextlib
import ctypes
import os
import select
import signal
import weakref
from collections.abc import Callable
from types import FrameType

WAKE = b"\xff"  # no signal has this number
MAX_BYTES_OF_A_READ = 4096


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
        self._old_wakeup = -1
        self._old_handler: object = None
        own = weakref.ref(self)

        def forget() -> None:
            pipe = own()
            if pipe is not None:
                pipe._forget_in_child()

        os.register_at_fork(after_in_child=forget)

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
        woken, _, _ = select.select([self._read], [], [], seconds)
        said = os.read(self._read, MAX_BYTES_OF_A_READ) if woken else b""
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
        # a handler of the program's may call the one before it, which did nothing
        if self.handles_termination:
            self._terminate()

    def _forget_in_child(self) -> None:
        """Leave signals of a forked process to it: they would be heard in its parent."""
        with contextlib.suppress(ValueError):
            # ValueError: forked from another thread
            heard = signal.set_wakeup_fd(-1)
            if heard != self._write:
                # the program listens itself by now
                signal.set_wakeup_fd(heard)
            if self.handles_termination:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_of_a_pipe(handler: object) -> bool:
    return isinstance(getattr(handler, "__self__", None), SignalPipe)


def die_of(number: int) -> None:
    """End this process by a signal of this number, as if nobody handled it. number: such as signal.SIGTERM."""
    # Python's own way is open to the main thread only
    ctypes.CDLL(None).signal(number, None)
    os.kill(os.getpid(), number)
