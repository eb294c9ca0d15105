"""The verdict in one word of a closed set, which stands before the sentence."""

import enum

from megatron_lite.analysis.run.cores import measure_recording_ms
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.time.time_results import RankTime

DECIDES = 0.20  # of a step: what a run loses to one cause is then what it is bound by
MIN_LATE = 0.10  # of a step that others wait for a late rank: then no other cause may be the word, unless it costs more
# of what is lost to communication, data, the host: then it is the rank that others wait for, not that cause in general
MIN_LOST_SHARE = 0.5

LOSSES = {  # row of RankTime: (what bounds the run, preposition, of what)
    "exposed_communication": ("communication", "waiting for", "communication"),
    "exposed_copy": ("copy", "waiting for", "copies"),
    "data_wait": ("data", "waiting for", "the data loader"),
    "sync": ("sync", "on", "synchronizations by the host"),
    "host": ("host", "waiting for", "the host"),
    "allocator": ("host", "on", "the memory allocator"),
    "garbage_collector": ("host", "on", "Python's garbage collector"),
    "cpu_optimizer": ("host", "waiting for", "an optimizer on the CPU"),
    "clip_grad": ("host", "on", "clipping gradients on the host"),
    "log": ("host", "on", "logging on the host"),
    "compile": ("host", "on", "compiling and autotuning"),
    "startup": ("host", "on", "starting up CUDA and libraries"),
    "graph_capture": ("host", "on", "capturing graphs"),
    "profiler": ("host", "on", "the profiler's own work"),
    "process_wait": ("host", "waiting for", "other processes"),
    "launch": ("host", "on", "launch latency"),
    "dependency": ("sync", "waiting for", "other streams"),
    "save": ("save", "on", "saving and evaluating"),
    "unexplained": ("inconclusive", "", "unexplained"),
}


class VerdictWord(str, enum.Enum):
    """Words for what limits a run; docs/explaining.md says what each means."""

    COMPUTE_BOUND = "COMPUTE-BOUND"
    COMMUNICATION_BOUND = "COMMUNICATION-BOUND"
    STRAGGLER = "STRAGGLER"
    INPUT_BOUND = "INPUT-BOUND"
    HOST_BOUND = "HOST-BOUND"
    SYNC_BOUND = "SYNC-BOUND"
    COPY_BOUND = "COPY-BOUND"
    SAVE_BOUND = "SAVE-BOUND"
    MEMORY = "MEMORY"
    FAILED = "FAILED"
    BUSY_MACHINE = "BUSY-MACHINE"
    INCONCLUSIVE = "INCONCLUSIVE"

    def __str__(self) -> str:
        return self.value


WORDS = {
    "compute": VerdictWord.COMPUTE_BOUND,
    "communication": VerdictWord.COMMUNICATION_BOUND,
    "data": VerdictWord.INPUT_BOUND,
    "host": VerdictWord.HOST_BOUND,
    "sync": VerdictWord.SYNC_BOUND,
    "copy": VerdictWord.COPY_BOUND,
    "save": VerdictWord.SAVE_BOUND,
    "memory": VerdictWord.MEMORY,
}


def choose_word(facts: Facts, bound: str) -> VerdictWord:
    """Choose the word for what bounds the run.

    Other jobs come first: where the run had no cores, no other figure tells of the run alone. A rank that others wait
    for comes before what it is late by, and before communication, which its lateness makes long on the others.
    """
    shortage = facts.core_shortage
    one = facts.critical
    is_hidden = bound == "compute" and one is not None and one.time.on_gpu
    if shortage is not None and not is_hidden and (shortage.share is None or shortage.share >= DECIDES):
        return VerdictWord.BUSY_MACHINE
    word = WORDS.get(bound, VerdictWord.INCONCLUSIVE)
    if one is None or word in (VerdictWord.INCONCLUSIVE, VerdictWord.MEMORY):
        return word
    lost_ms = _measure_lateness_ms(facts)
    loss_ms = 0.0 if bound == "compute" else measure_bounds(facts, one.time).get(bound, 0.0)
    is_late = lost_ms >= MIN_LATE * one.time.step_ms and lost_ms >= MIN_LOST_SHARE * loss_ms
    return VerdictWord.STRAGGLER if is_late else word


def _measure_lateness_ms(facts: Facts) -> float:
    """Measure what ranks lose per step because one comes late: always the same, one in some steps, or each in turn."""
    if facts.ranks is None:
        return 0.0
    lost_ms = 0.0
    if facts.ranks.straggler:
        lost_ms = facts.ranks.straggler.caused_wait_ms
    if facts.ranks.imbalance:
        lost_ms = max(lost_ms, facts.ranks.imbalance.lost_ms)
    return lost_ms


def measure_bounds(facts: Facts, time: RankTime) -> dict[str, float]:
    """Measure milliseconds of a step that are lost to each of the things that may bound a run.

    Time that is lost to none of them is computing.
    """
    found: dict[str, float] = {}
    for row, lost_ms in measure_losses(facts, time).items():
        bound, _, _ = LOSSES[row]
        found[bound] = found.get(bound, 0.0) + lost_ms
    return found


def measure_losses(facts: Facts, time: RankTime) -> dict[str, float]:
    """Measure milliseconds of a step in each row of LOSSES.

    The host's are without what recording may have added to a profiled step.
    """
    losses = {row: time.rows.get(row, 0.0) for row in LOSSES}
    recording_ms = measure_recording_ms(facts.run, time)
    losses["host"] = max(0.0, losses["host"] - recording_ms)
    return losses


def describe_headline(word: VerdictWord, sentence: str) -> str:
    """Write the sentence with the word before it; an inconclusive sentence says it itself."""
    if word is VerdictWord.INCONCLUSIVE and f"{word}:" in sentence:
        return sentence
    return f"{word}: {sentence}"
