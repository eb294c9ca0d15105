"""The verdict in one word of a closed set, which stands before the sentence."""

import enum

from megatron_lite.analysis.run_facts import Facts

DECIDES = 0.20  # of a step: what a run loses to one cause is then what it is bound by
MOSTLY = 0.5  # of the communication that nothing hides: then it is the rank that others wait for, not the links


class VerdictWord(str, enum.Enum):
    """What limits the run; docs/explaining.md says what each means."""

    COMPUTE_BOUND = "COMPUTE-BOUND"
    COMMUNICATION_BOUND = "COMMUNICATION-BOUND"
    STRAGGLER = "STRAGGLER"
    INPUT_BOUND = "INPUT-BOUND"
    HOST_BOUND = "HOST-BOUND"
    SYNC_BOUND = "SYNC-BOUND"
    COPY_BOUND = "COPY-BOUND"
    SAVE_BOUND = "SAVE-BOUND"
    MEMORY = "MEMORY"
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
    """The word for what bounds the run.

    Other jobs come first: where the run had no cores, no other figure tells of the run alone. A rank that others wait for comes
    before communication, which its lateness makes long.
    """
    shortage = facts.core_shortage
    one = facts.critical
    is_hidden = bound == "compute" and one is not None and one.time.on_gpu
    if shortage is not None and not is_hidden and (shortage.share is None or shortage.share >= DECIDES):
        return VerdictWord.BUSY_MACHINE
    word = WORDS.get(bound, VerdictWord.INCONCLUSIVE)
    late = facts.ranks.straggler if facts.ranks else None
    if late is None or one is None or word is not VerdictWord.COMMUNICATION_BOUND:
        return word
    exposed_ms = one.time.rows.get("exposed_communication", 0.0)
    if late.caused_wait_ms >= DECIDES * one.time.step_ms and late.caused_wait_ms >= MOSTLY * exposed_ms:
        return VerdictWord.STRAGGLER
    return word


def describe_headline(word: VerdictWord, sentence: str) -> str:
    """The sentence with the word before it; an inconclusive sentence says it itself."""
    says_itself = f"{VerdictWord.INCONCLUSIVE}:" in sentence
    return sentence if word is VerdictWord.INCONCLUSIVE and says_itself else f"{word}: {sentence}"
