"""ranks.json: which rank died, hung or failed, and what each rank said of itself last.

The rank that finds out writes it, into the folder of the run. Any field may be absent, since files are damaged.

Under `megatron-lite watch`, each rank keeps the record of itself in a file of its own, last_words-RANK.json.
"""

import json
from typing import Literal

import msgspec

from megatron_lite.formats.step_records import Count, Number

# how a rank left that ended well
NO_ERROR = "no error"


class RankAtFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The last status of one rank."""

    # its coordinates in the layout: pp 1, tp 0; empty where all ranks hold the same
    place: str = ""
    # name of the machine
    host: str | None = None
    # names the kernel's PID namespace; null where the system has none
    pids: str | None = None
    # the process' id
    pid: int | None = None
    # when the status was written, in seconds since 1970
    wall_time: Number | None = None
    # number of the step in this start of the run, from 1; 0 before the first one
    step: Count = 0
    # the iteration that this start of the run went on from; null before that was known
    started_at: Count | None = None
    # the part of the step that it was in; null between them
    phase: str | None = None
    # time in this part of the step so far, in seconds
    phase_s: Number = 0.0
    # number of the collective of all ranks that it joined last, from 1
    begun: Count = 0
    # number of the collective of all ranks that it finished last
    finished: Count = 0
    # by name of a group of some ranks, number of the collective that it joined last there
    groups: dict[str, Count] = {}
    # the tensor that another stage of the pipeline owes it: "the forward of micro-batch 3 from rank 2"
    waits_for: str = ""
    # the status was written when another rank asked, not of its own accord
    answers: bool = False
    # how the rank ended; null where it could not say so
    left: str | None = None
    # it left because another rank had, because it was told to, or at the end of the run
    blameless: bool = False
    # calls of its main thread, the innermost first: "function (file.py:12)"
    stack: tuple[str, ...] = ()
    # its number among all ranks; null where it has none, or the name of the record says it
    rank: Count | None = None
    # its number among the ranks of its machine
    local_rank: Count | None = None
    # all ranks; null where it does not know
    world_size: Count | None = None
    # how often its launcher had started it anew
    restart: Count = 0
    # time in this step so far, in seconds; between steps and before the first one since the last of them, or the start
    step_s: Number = 0.0
    # median duration of its last steps, in seconds; null before there were some
    usual_step_s: Number | None = None
    # time in seconds for which no step, phase or collective of it has begun or ended
    still_s: Number = 0.0
    # number of the last signal that it handled or that ended it, SIGTERM and SIGINT only
    signal: Count | None = None
    # when that signal came, in seconds since 1970
    signal_at: Number | None = None
    # class of the exception that ended it: "RuntimeError", "torch.OutOfMemoryError"
    error: str = ""
    # what the exception says; of a long one the middle is left out
    message: str = ""
    # calls of the exception's traceback, the innermost first: "function (file.py:12)"
    error_stack: tuple[str, ...] = ()
    # of the process, negative for a signal
    exit_code: int | None = None
    # when it ended, in seconds since 1970
    ended_at: Number | None = None
    # the process as its machine saw it last; null where nobody looked
    process_state: Literal["running", "stopped", "dead"] | None = None


class FailureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One failure of a run of several ranks."""

    # the line that says which rank is to blame, and the remedy
    verdict: str = ""
    # the last status of each rank that has written one, by its number
    ranks: dict[str, RankAtFailure] = {}


def encode_failure(record: FailureRecord) -> str:
    """The text of ranks.json."""
    # not msgspec's encoder, which refuses half a character, as paths may hold
    return json.dumps(msgspec.to_builtins(record), indent=1) + "\n"


def encode_last_words(record: RankAtFailure) -> str:
    """The text of last_words-RANK.json."""
    return json.dumps(msgspec.to_builtins(record)) + "\n"
