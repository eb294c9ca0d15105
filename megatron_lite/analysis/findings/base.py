"""What a finding is. One rule is one file: its docstring is the page that `megatron-lite explain CODE` prints.

A rule's module has CODE (unique, "sync-in-step"), TITLE (a few words), and find(facts) -> Finding | None: pure, and None
wherever it cannot know. apply_rules() writes code and title into the finding.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Evidence:
    """One thing that was seen, where, and how it was measured."""

    text: str  # one line, numbers with units
    where: str = ""  # "rank 0, step 12, stream 7 at 1,204.3 ms", a source line, a file


@dataclass(frozen=True)
class Finding:
    """One cause of lost time or memory."""

    code: str = ""
    title: str = ""
    cost_ms: float | None = None  # per step; None for what costs memory or trust rather than time
    cost_bytes: int | None = None  # at the peak; None if it is about time
    evidence: tuple[Evidence, ...] = ()  # never empty, what counts most first
    advice: str = ""  # never empty: one line, the flag to try first
    flags: tuple[str, ...] = ()  # ("--num-workers 4",)
    gain_ms: float | None = None  # upper bound per step; ceilings of several findings do not add
    gain_bytes: int | None = None
    certain: bool = True  # False: likely, and the text says what would settle it
    rank: int | None = None  # if it is one rank's
