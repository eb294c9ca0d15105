"""What a run whose ranks failed leaves in its folder: ranks.json, and an end for run.json where its writer has none."""

import dataclasses
import json
import time
from pathlib import Path

from megatron_lite.parallel.heartbeat import Post
from megatron_lite.run_folder import RANKS_FILE, RUN_FILE, write_atomically
from megatron_lite.shared_files import read_bounded

MAX_RECORD_BYTES = 2**24


def write_posts(folder: Path, line: str, posts: dict[int, Post]):
    """RUN/ranks.json: the verdict and every rank's last post, with stacks of those that answered."""
    record = {"verdict": line, "ranks": {rank: dataclasses.asdict(post) for rank, post in sorted(posts.items())}}
    write_atomically(folder / RANKS_FILE, json.dumps(record, indent=1) + "\n")


def end_record(folder: Path, line: str):
    """RUN/run.json says how the run ended, if nobody has said so yet."""
    path = folder / RUN_FILE
    record = json.loads(read_bounded(path, MAX_RECORD_BYTES))
    if record.get("status") == "running":
        ended = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        record |= {"status": f"failed: RanksError: {line}", "ended": ended}
        write_atomically(path, json.dumps(record, indent=1) + "\n")
