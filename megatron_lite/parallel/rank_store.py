"""A notice board for all ranks: the store where they met, on a connection of its own.

The store lives in torchrun's agent, or without one in rank 0, and outlives every other rank. Not for several threads:
whoever waits in it blocks the others.
"""

import time

import torch.distributed as dist

from megatron_lite.parallel.heartbeat import Post

FAILED, VERDICT, SPEAKER = "ranks_failed", "ranks_verdict", "ranks_speaker"
SECONDS_BETWEEN_LOOKS = 0.05


class Board:
    """Reads and writes take a round trip to the store each. Errors are dist.DistError or RuntimeError."""

    def __init__(self, store: dist.Store, rank: int, size: int):
        self._store, self.rank, self.size = store, rank, size

    def pin(self, post: Post):
        """Replace this rank's post."""
        self._store.set(f"rank_{self.rank}", post.dumps())

    def posts(self, ranks) -> dict[int, Post]:
        """The newest of those that have written one."""
        return {rank: Post.loads(self._store.get(key)) for rank in ranks if self._store.check([key := f"rank_{rank}"])}

    def claim(self) -> bool:
        """May this rank speak for all? Only the first that asks; the question asks all ranks to answer."""
        first = self._store.add(SPEAKER, 1) == 1
        if first:
            self._store.set(FAILED, "")
        return first

    def failed(self) -> bool:
        """Did some rank give up? Then every rank should answer."""
        return self._store.check([FAILED])

    def publish(self, line: str):
        """What the speaker has found out; empty for nothing."""
        self._store.set(VERDICT, line)

    def published(self, within_s: float) -> str | None:
        """The speaker's line, when it comes in time."""
        end = time.monotonic() + within_s
        while not self._store.check([VERDICT]):
            if time.monotonic() >= end:
                return None
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return self._store.get(VERDICT).decode()
