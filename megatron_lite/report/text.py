"""Numbers and wrapped words as reports write them."""

import math
import os
from dataclasses import dataclass
from typing import TextIO

from megatron_lite.terminal import escape
from megatron_lite.units import significant

# --- numbers as a report writes them: '' for what is not known


LEAST_MS = 1e-6  # a nanosecond is the clock's tick: less is a rounding error
SHORTEST_MS = 0.001


def milliseconds(value: float | None, largest: float | None = None) -> str:
    """Write a time with as many decimals as make sense beside the largest of its table; nothing but zero is written
    as 0."""
    if value is None or not math.isfinite(value):
        return ""
    scale = abs(value if largest is None else largest)
    decimals = 3
    if scale >= 100:
        decimals = 1
    elif scale >= 10:
        decimals = 2
    if abs(value) < LEAST_MS:
        return f"{0:.{decimals}f}"
    if abs(value) >= 0.5 * 10**-decimals:
        return f"{value:,.{decimals}f}"
    return significant(value, 1) if abs(value) >= SHORTEST_MS else f"<{SHORTEST_MS}"


def percent(share: float | None) -> str:
    """Write a share in percent: 0.123 as '12%', 0.004 as '<1%'; '' for what is not known."""
    if share is None or not math.isfinite(share):
        return ""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def share(part: float, whole: float) -> float | None:
    """Divide a part by its whole; None where the whole is nothing."""
    return part / whole if whole else None


def calls(per_step: float) -> str:
    """Write how often something ran per step: 0.5, 3, 96, 1,234."""
    return significant(per_step) if per_step < 10 else f"{per_step:,.0f}"


def flops(value: float) -> str:
    """Write an amount of arithmetic: 3.1e13 as '31 TFLOP'."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{significant(value)} {unit}FLOP"
        value /= 1000
    return f"{significant(value)} PFLOP"


# --- words for a terminal of 100 columns

WIDTH = 100
BAR_WIDTH = 28
EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class Style:
    """How a terminal may be written to."""

    colour: bool = False
    unicode: bool = False

    def bold(self, text: str) -> str:
        return self._in("1", text)

    def dim(self, text: str) -> str:
        return self._in("2", text)

    def accent(self, text: str) -> str:
        return self._in("36", text)

    def warm(self, text: str) -> str:
        return self._in("33", text)

    def bar(self, share: float, width: int = BAR_WIDTH) -> str:
        """Draw a bar of `share` of `width` columns; what is more than nothing has at least the thinnest one."""
        share = min(max(share, 0.0), 1.0)
        thinnest = 1 if share > 0 else 0
        if not self.unicode:
            columns = max(round(share * width), thinnest)
            return "#" * columns
        eighths = max(round(share * width * 8), thinnest)
        columns, further = divmod(eighths, 8)
        return "█" * columns + EIGHTHS[further].strip()

    def _in(self, code: str, text: str) -> str:
        if not self.colour or not text:
            return text
        return f"\033[{code}m{text}\033[0m"


def get_style(stream: TextIO) -> Style:
    """Find out what `stream` can show: color on a terminal only (and not with NO_COLOR), blocks where it takes
    UTF-8."""
    encoding = getattr(stream, "encoding", None) or "ascii"
    encoding = encoding.lower().replace("-", "")
    is_wanted = not os.environ.get("NO_COLOR")
    colour = stream.isatty() and is_wanted and os.environ.get("TERM") != "dumb"
    return Style(colour=colour, unicode=encoding == "utf8")


ONLY_RANK = "rank 0"


def write_evidence(text: str, where: str, has_one_rank: bool) -> str:
    """Write what was seen and where, without the rank in a job with one rank.

    Args:
        text: what was seen.
        where: "rank 0, step 12", a source line, a file; "" for not known.
        has_one_rank: whether the job has one rank, which then is not named.
    """
    if has_one_rank and (where == ONLY_RANK or where.startswith(f"{ONLY_RANK}, ")):
        where = where.removeprefix(ONLY_RANK).removeprefix(", ")
    return f"{text} ({where})" if where else text


def fit(text: str, width: int) -> str:
    """Shorten a text to `width` columns, its middle left out: both ends of a kernel's name say something."""
    text = escape(text)
    if len(text) <= width:
        return text
    kept = max(width - 2, 0)
    tail = kept // 3
    begin = text[: kept - tail]
    end = text[-tail:] if tail else ""
    return f"{begin}..{end}"[:width]


CLAUSE_ENDS = ("; ", ", ", " (")


def shorten(text: str, width: int) -> str:
    """Shorten a sentence to `width` columns: to its first clauses, or where these are short to its first words."""
    text = escape(text)
    if len(text) <= width:
        return text
    end = max(text.rfind(mark, 0, width + 1) for mark in CLAUSE_ENDS)
    # no bracket is left open
    opened = text.rfind(" (", 0, max(end, 0))
    if opened >= 0 and ")" not in text[opened:end]:
        end = opened
    if end >= width // 2:
        return text[:end]
    end = text.rfind(" ", 0, width - 2)
    if end > 0:
        return f"{text[:end]} .."
    return fit(text, width)


def wrapped(text: str, indent: str = "  ", hanging: str | None = None) -> list[str]:
    """Break a text into lines of at most WIDTH columns; a word longer than a line is cut.

    Args:
        text: the text.
        indent: what the first line begins with.
        hanging: what the other lines begin with; the same when left out.
    """
    hanging = indent if hanging is None else hanging
    room = WIDTH - max(len(indent), len(hanging))
    lines: list[str] = []
    line = ""
    for word in escape(text).split(" "):
        word = fit(word, room)
        if not line:
            start = hanging if lines else indent
            line = start + word
        elif len(line) + 1 + len(word) > WIDTH:
            lines.append(line)
            line = hanging + word
        else:
            line = f"{line} {word}"
    if line.strip():
        lines.append(line)
    return lines


def heading(text: str, right: str, style: Style) -> str:
    """Write a section's title, and at the right what its numbers are of.

    Args:
        text: the title.
        right: what is at the right; '' for nothing.
        style: how the terminal may be written to.
    """
    text = fit(text, WIDTH)
    right = fit(right, max(WIDTH - len(text) - 2, 0))
    title = style.bold(text)
    if not right:
        return title
    gap = " " * max(WIDTH - len(text) - len(right), 2)
    return title + gap + style.dim(right)
