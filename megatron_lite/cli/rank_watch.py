"""Looks at the ranks of a watched command from outside: they cannot tell that they hang, are stopped or were killed."""

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from megatron_lite.cli.stack_dumps import dump_stacks
from megatron_lite.formats.failure_record import NO_ERROR, RankAtFailure
from megatron_lite.last_words import (
    LOOK_AGAIN_FACTOR,
    PYSPY_STACKS,
    is_late,
    read_words,
    stacks_path,
    stands_still,
    words_path,
    write_words,
)
from megatron_lite.process_state import pid_space, process_state, read_exit_code

LOOKS_APART_S = 1.0
# a rank that writes nothing for so long runs no Python: C code holds the interpreter, or the process is stopped
SILENT_RANK_S = 10.0
# ranks that stand for so long are told of
MIN_STANDSTILL_S = 30.0


class RankWatch:
    """A thread that follows the last words of all ranks of this machine until it is closed.

    It notes which processes are stopped, and how and when they ended; takes their stacks where a step is late or a rank
    is silent; and tells once where all stand still.
    """

    def __init__(
        self,
        folder: Path,
        tell: Callable[[dict[str, RankAtFailure]], None],
        standstill_s: float = MIN_STANDSTILL_S,
    ):
        """
        Args:
            folder: Folder of the recording.
            tell: Called in this thread when all ranks stand still, once for each time, with their last words by name.
            standstill_s: Seconds for which ranks that stand are told of, at least.
        """
        # the ranks stand still now, or did when they ended
        self.stands = False
        # and for how long, in seconds
        self.stands_s = 0.0
        self._folder = folder
        self._tell = tell
        self._standstill_s = standstill_s
        # by name of a rank: its process, and what the kernel tells of its end through
        self._ends: dict[str, tuple[int, int]] = {}
        self._look_at_s = 0.0
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def __enter__(self) -> "RankWatch":  # noqa: PYI034 - Self came with Python 3.11
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        os.write(self._wake_write, b"\0")
        self._thread.join()
        for _, end in self._ends.values():
            os.close(end)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def read_ranks(self) -> dict[str, RankAtFailure]:
        """Read the last words of ranks, by name, but of none that other machines write into the same folder."""
        here = socket.gethostname()
        pids = pid_space()
        found = dict(read_words(self._folder))
        return {name: words for name, words in found.items() if (words.host, words.pids) == (here, pids)}

    def end_all(self) -> None:
        """Kill the ranks that are still there: their launcher is gone."""
        for name, words in self.read_ranks().items():
            if words.left is None and self._is_followed(name, words) and words.pid is not None:
                with contextlib.suppress(OSError):
                    os.kill(words.pid, signal.SIGKILL)

    def _run(self) -> None:
        while True:
            watched = [self._wake_read, *(end for _, end in self._ends.values())]
            ready, _, _ = select.select(watched, [], [], LOOKS_APART_S)
            # whatever fails here, the command goes on
            with contextlib.suppress(OSError, ValueError):
                self._note_ends(ready)
                self._look()
            if self._wake_read in ready:
                return

    def _look(self) -> None:
        """Look at all ranks once."""
        ranks = self.read_ranks()
        for name, words in ranks.items():
            self._follow(name, words)
        there = {name: words for name, words in ranks.items() if self._is_followed(name, words)}
        now = time.time()
        silent_s = {name: now - (words.wall_time or now) for name, words in there.items() if words.left is None}
        for name, seconds in silent_s.items():
            if seconds >= SILENT_RANK_S:
                there[name] = self._note_state(name, there[name], seconds)
        self._take_stacks(there)
        self._tell_standstill({name: there[name] for name in silent_s})

    def _follow(self, name: str, words: RankAtFailure) -> None:
        """Have the kernel tell of the end of a rank's process, from the first time that the rank is seen."""
        if words.pid is None or words.left is not None:
            return
        known = self._ends.get(name)
        if known is not None and known[0] == words.pid:
            return
        if known is not None:
            # its launcher has started it anew
            os.close(self._ends.pop(name)[1])
        with contextlib.suppress(OSError, AttributeError):
            # AttributeError: not on this system
            self._ends[name] = (words.pid, os.pidfd_open(words.pid))

    def _is_followed(self, name: str, words: RankAtFailure) -> bool:
        """Whether a rank's process is still there. name, words: of the rank."""
        known = self._ends.get(name)
        return known is not None and known[0] == words.pid and process_state(known[0]) != "dead"

    def _note_ends(self, ready: list[int]) -> None:
        """Add to last words what only others can know: that the process is gone, when, and with which exit code.

        Args:
            ready: What the kernel tells of ended processes through.
        """
        ended = {name: pid for name, (pid, end) in self._ends.items() if end in ready}
        codes = {name: read_exit_code(pid) for name, pid in ended.items()}
        words_of = dict(read_words(self._folder))
        for name, pid in ended.items():
            words = words_of.get(name)
            os.close(self._ends.pop(name)[1])
            if words is None or words.pid != pid:
                continue
            code = codes[name]
            if code == 0 and words.left != NO_ERROR:
                # what the kernel says where it says nothing
                code = None
            known = words.exit_code if code is None else code
            ended_at = words.ended_at or time.time()
            # who hung, and was killed for it or with others, did not fail by that
            has_hung = self.stands and known is not None and known < 0
            gone = msgspec.structs.replace(
                words,
                exit_code=known,
                ended_at=ended_at,
                process_state="stopped" if words.process_state == "stopped" and has_hung else "dead",
                blameless=words.blameless or has_hung,
            )
            write_words(words_path(self._folder, name), gone)

    def _note_state(self, name: str, words: RankAtFailure, silent_s: float) -> RankAtFailure:
        """Note of a rank that writes nothing whether it is stopped, and return its last words with that.

        Args:
            name: Name of the rank.
            words: Last words of the rank.
            silent_s: Seconds since it wrote them.
        """
        state = process_state(words.pid) if words.pid is not None else None
        if state != words.process_state and state in ("stopped", "running"):
            noted = msgspec.structs.replace(words, process_state="stopped" if state == "stopped" else "running")
            write_words(words_path(self._folder, name), noted)
        else:
            noted = words
        return msgspec.structs.replace(noted, still_s=words.still_s + silent_s, step_s=words.step_s + silent_s)

    def _take_stacks(self, ranks: dict[str, RankAtFailure]) -> None:
        """Take stacks of all ranks where one is late, and forget them where it goes on. ranks: those that are there."""
        late = [words for words in ranks.values() if is_late(words)]
        lasted_s = max((max(words.step_s, words.still_s) for words in late), default=0.0)
        if late and lasted_s >= self._look_at_s:
            self._look_at_s = LOOK_AGAIN_FACTOR * lasted_s
            dump_stacks(self._folder, {name: words.pid for name, words in ranks.items() if words.pid is not None})
        elif not late and self._look_at_s and ranks:
            self._look_at_s = 0.0
            for name in ranks:
                stacks_path(self._folder, name, PYSPY_STACKS).unlink(missing_ok=True)

    def _tell_standstill(self, ranks: dict[str, RankAtFailure]) -> None:
        """Tell where all ranks stand still. ranks: those that are there and have not ended."""
        if not ranks:
            # as they ended, so it stays
            return
        was_told = self.stands
        self.stands = all(stands_still(words, self._standstill_s) for words in ranks.values())
        self.stands_s = min(words.still_s for words in ranks.values()) if self.stands else 0.0
        if self.stands and not was_told:
            self._tell(ranks)
