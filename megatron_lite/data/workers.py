"""Work spread over processes: results in the order of the tasks, a bounded number of them at a time."""

import contextlib
import multiprocessing
import pickle
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait

from megatron_lite.errors import UserError

AHEAD = 2  # tasks under way or waiting for an earlier one, per worker


class WorkerDied(UserError):
    """A worker process ended before its work did."""

    exit_code = 1


def in_order(function: Callable, tasks: Iterable, workers: int) -> Iterator[tuple]:
    """(task, function(task)) for each task, in their order; one worker is this process itself.

    function and tasks are pickled. A worker is spawned: forking copies locks that other threads hold. To be closed
    when it is not read to its end. WorkerDied if one is killed or fails.
    """
    if workers == 1:
        for task in tasks:
            yield task, function(task)
        return
    crew = [_Worker() for _ in range(workers)]
    try:
        # All of them are starting up by now, and do so at the same time.
        pickled = pickle.dumps(function)
        for worker in crew:
            worker.send(pickled)
        yield from _spread(crew, enumerate(tasks))
    finally:
        for worker in crew:
            worker.stop()


def _spread(crew: list, numbered: Iterator[tuple]) -> Iterator[tuple]:
    idle, busy, done = list(crew), {}, {}  # busy: connection -> worker, number, task; done: number -> task, result
    next_number, exhausted = 0, False
    while True:
        # Only an idle worker is sent anything: it is listening, so neither side can block the other.
        while idle and not exhausted and len(busy) + len(done) < AHEAD * len(crew):
            number, task = next(numbered, (None, None))
            exhausted = number is None
            if not exhausted:
                worker = idle.pop()
                worker.send(pickle.dumps(task))
                busy[worker.connection] = (worker, number, task)
        while next_number in done:
            yield done.pop(next_number)
            next_number += 1
        if not busy and exhausted:
            return
        for connection in wait(list(busy)) if busy else ():
            worker, number, task = busy.pop(connection)
            done[number] = (task, worker.receive())
            idle.append(worker)


class _Worker:
    """A process and the connection to it, whose end is seen at both sides."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.connection, its_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(its_end,), daemon=True)
        self._process.start()
        its_end.close()

    def send(self, pickled: bytes):
        try:
            self.connection.send_bytes(pickled)
        except OSError:
            raise self._died() from None

    def receive(self):
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            raise self._died() from None

    def stop(self):
        self.connection.close()
        self._process.terminate()
        self._process.join()

    def _died(self) -> WorkerDied:
        self._process.join(10)
        code = self._process.exitcode
        if code is not None and code < 0:
            how, way_out = signal.Signals(-code).name, "mostly for lack of memory; choose a smaller number"
        else:
            how, way_out = f"exit code {code}", "its own message stands above; --workers 1 does without processes"
        return WorkerDied(f"--workers: a worker process died ({how}), {way_out}")


def _serve(connection):
    # Ctrl-C reaches the whole process group; the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    function = _received(connection)
    while (task := _received(connection)) is not None:
        result = function(task)
        with contextlib.suppress(OSError):
            connection.send(result)


def _received(connection):
    """What the parent sent, or None if it is gone."""
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return None
