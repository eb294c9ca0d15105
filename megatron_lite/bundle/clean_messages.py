"""Cleans what exceptions, logs and statuses say: sentences of known form stay, anything else may be a text of data."""

import re
from functools import lru_cache

from megatron_lite.bundle.names import Substitutes
from megatron_lite.postmortem.causes.mismatches import FINGERPRINT
from megatron_lite.postmortem.causes.process_errors import DEVICE, DEVICE_MEMORY, DIVERGENCE, HOST_MEMORY, LOADER
from megatron_lite.postmortem.log_patterns import read_patterns
from megatron_lite.postmortem.rank_ends import (
    DISAGREEMENT,
    FATAL,
    LOST_OTHERS,
    OF_ITSELF,
    RANK_AT_FRONT,
    SIGNALS_OF_WORDS,
    SOURCE_FILE,
    WITHOUT_WORDS,
)

MAX_LETTERS_OF_MESSAGE = 8000
# of this package: how a run or a rank ended
_ENDINGS = (
    r"\A(?:running, or killed|running|finished|interrupted|no error|killed or lost: its process is gone)\Z",
    r"\A(?:failed: )?(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Interrupt|Exit|Warning)\b(?=:|\Z)",
)
# of torch, Python and systems
_SENTENCES = (
    r"Timed out waiting \d+ms for (?:recv|send) operation to complete",
    r"Tried to allocate [\d.]+ [KMGT]?i?B",
    r"[Ss]ignal \d+(?: \(\w+\))?(?: received by PID \d+)?",
    r"\[Errno \d+\]|Cannot allocate memory|Connection timed out|No such file or directory|Permission denied",
    r"No space left on device|Disk quota exceeded|Input/output error|Stale file handle|Read-only file system",
    r"Too many open files",
    r"exited unexpectedly|device-side assert|uncorrectable ECC|out of memory|Xid|is NaN or Inf",
    r"Detected mismatch between collectives on ranks|failed \(exitcode: -?\d+\)",
    r"\b[Rr]ank \d{1,6}\b(?: is running \w+)?",
    r"differ in the following aspects:? ?(?:Op type|Sequence number|Tensor[\w ]*)?",
    r"collective #\d+|SequenceNumber=\d+|SeqNum=\d+|OpType=\w+|TensorShape=\[[\d, ]*\]|TensorDtypes=\w+",
)


@lru_cache(maxsize=1)
def _read_sentences() -> tuple[re.Pattern[str], ...]:
    """What postmortems look for, and a few sentences beside it."""
    known = (DEVICE, DEVICE_MEMORY, DIVERGENCE, HOST_MEMORY, LOADER, DISAGREEMENT, LOST_OTHERS, OF_ITSELF, FINGERPRINT)
    at_front = (RANK_AT_FRONT, SOURCE_FILE, WITHOUT_WORDS)
    words = "|".join((FATAL, *SIGNALS_OF_WORDS))
    return (
        *known,
        *(re.compile(rf"\A(?:{pattern.pattern})", pattern.flags) for pattern in at_front),
        *(row.pattern for row in read_patterns()),
        *map(re.compile, (*_ENDINGS, *_SENTENCES, words)),
    )


def clean_message(names: Substitutes, text: str) -> str:
    """A message, of which known sentences and the class of an exception stay.

    Args:
        names: What stands in the place of names.
        text: What an exception, a log's line or a status says.
    """
    text = text[:MAX_LETTERS_OF_MESSAGE]
    spans = [found.span() for pattern in _read_sentences() for found in pattern.finditer(text)]
    pieces = []
    at = 0
    for first, end in sorted(spans):
        if end <= at:
            continue
        if first > at:
            pieces.append(_replace_gap(names, text[at:first]))
        pieces.append(names.clean_name(text[max(first, at) : end]))
        at = end
    if at < len(text):
        pieces.append(_replace_gap(names, text[at:]))
    return "".join(pieces)


def _replace_gap(names: Substitutes, text: str) -> str:
    """A text for what stands between known sentences; punctuation stays."""
    told = text.strip(" \t\n.,:;()[]'\"-")
    return text.replace(told, names.clean_text(told)) if told else text
