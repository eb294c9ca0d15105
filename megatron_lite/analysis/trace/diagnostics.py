"""Messages that a profiler leaves about its own record."""

import re
from typing import Any

MAX_DIAGNOSTIC = 300  # characters of a message
MAX_DIAGNOSTICS = 20  # messages of a file
_LOSS = re.compile(
    r"not all\b.*\bevents|\blost\b|\bdropp|\bdiscard|\boverflow|\bincomplete|exceeded max|terminating tracing",
    re.IGNORECASE,
)


def tells_of_loss(text: str) -> bool:
    """Whether this message says that events are missing."""
    return bool(_LOSS.search(text))


def read_warnings(header: dict[str, Any]) -> tuple[str, ...]:
    """Read what kineto logged while it recorded, errors first.

    Releases of 2022 to 2025 write it beside the events.
    """
    shown = []
    for level in ("ERROR", "WARNING"):
        texts = header.get(level)
        if not isinstance(texts, list):
            continue
        for text in texts:
            if isinstance(text, str):
                words = text.split()
                shown.append(" ".join(words)[:MAX_DIAGNOSTIC])
    distinct = dict.fromkeys(filter(None, shown))
    return tuple(distinct)[:MAX_DIAGNOSTICS]
