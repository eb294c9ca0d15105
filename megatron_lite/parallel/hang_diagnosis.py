"""Asks all ranks where they are after a collective has failed, and decides who is to blame. One rank does so for all."""

import dataclasses
import time
from pathlib import Path

from megatron_lite.config.world import World
from megatron_lite.errors import RanksError
from megatron_lite.parallel.failure_cause import TERMINATED, Case, Verdict, answered, verdict
from megatron_lite.parallel.failure_report import end_record, write_posts
from megatron_lite.parallel.flight_recorder import Operation
from megatron_lite.parallel.heartbeat import Post
from megatron_lite.parallel.rank_store import Board
from megatron_lite.process_state import memory_kills, process_state
from megatron_lite.run_folder import RANKS_FILE

ANSWER_SECONDS = 5.0  # ranks look at the board every second
VERDICT_SECONDS = ANSWER_SECONDS + 5.0  # until the speaker has told the others
SECONDS_BETWEEN_LOOKS = 0.1


class Inquiry:
    """Of one rank, in the thread that owns the board."""

    def __init__(self, world: World, board: Board, limit_s: float, ends_record: bool):
        self.world, self.board, self.limit_s = world, board, limit_s
        self.ends_record = ends_record  # the process ends here: run.json's own writer will not come to it
        self.run_dir: Path | None = None
        self._kills = memory_kills()

    def into(
        self, reason: str, mine: Post, operation: Operation | None, detail: str | None = None
    ) -> RanksError | None:
        """The error to raise on this rank; None if no rank is to blame. Takes seconds. `detail`: of a lost connection."""
        if not self.board.claim():
            line = self.board.published(VERDICT_SECONDS)
            return RanksError(line, told=True) if line else None
        case = dataclasses.replace(self._case(reason, mine, operation), detail=detail)
        found = verdict(case, heard=False)
        end = time.monotonic() + ANSWER_SECONDS
        while found is None and reason != TERMINATED:
            heard = answered(case) or time.monotonic() >= end
            found = verdict(case, heard=heard)
            if heard:
                break
            time.sleep(SECONDS_BETWEEN_LOOKS)
            case = self._look_again(case)
        return self._conclude(case, found)

    def dead_neighbour(self, mine: Post, operation: Operation | None) -> bool:
        """Has a rank of this machine died or failed? Takes milliseconds, and disturbs nobody."""
        first = self.world.rank - self.world.local_rank
        case = self._case(TERMINATED, mine, operation, range(first, first + self.world.local_size))
        return verdict(case, heard=False) is not None

    def _case(self, reason: str, mine: Post, operation: Operation | None, ranks=None) -> Case:
        posts = self.board.posts(range(self.world.size) if ranks is None else ranks)
        kills = memory_kills()
        case = Case(
            rank=self.world.rank,
            size=self.world.size,
            reason=reason,
            limit_s=self.limit_s,
            now=time.time(),
            posts={**posts, self.world.rank: dataclasses.replace(mine, answers=True)},
            operation=operation,
            memory_kills=kills - self._kills if kills is not None and self._kills is not None else 0,
            report=str(self.run_dir / RANKS_FILE) if self.run_dir else None,
        )
        return dataclasses.replace(case, states=_states(case))

    def _look_again(self, case: Case) -> Case:
        open_ranks = [rank for rank in range(case.size) if rank not in case.posts or not case.posts[rank].answers]
        posts = case.posts | self.board.posts(open_ranks)
        newer = dataclasses.replace(case, posts=posts, now=time.time())
        return dataclasses.replace(newer, states=_states(newer))

    def _conclude(self, case: Case, found: Verdict | None) -> RanksError | None:
        self.board.publish(found.line if found else "")
        if found is None:
            return None
        if self.run_dir is not None:
            self._leave_words(case, found)
        return RanksError(found.line, ended=found.ended)

    def _leave_words(self, case: Case, found: Verdict):
        last = self.world.size - 1
        gone = last in found.ranks and case.posts[last].left in (None, "SIGTERM")
        try:
            write_posts(self.run_dir, found.line, case.posts)
            if gone or self.ends_record or case.reason == TERMINATED:
                end_record(self.run_dir, found.line)
        except (OSError, ValueError):
            return  # a full disk must not hide the verdict


def _states(case: Case) -> dict[int, str | None]:
    """Of the processes on this machine, ended ranks left out: another process may have their number by now."""
    return {
        rank: process_state(post.pid)
        for rank, post in case.posts.items()
        if rank != case.rank and (post.host, post.pids) == (case.asking.host, case.asking.pids) and post.left is None
    }
