"""Numbers as people read them."""

import math

KIB = 2**10
MIB = 2**20
GIB = 2**30


def count(value: float) -> str:
    """Write a number with commas and without decimals: 12345 -> "12,345"."""
    return f"{value:,.0f}"


def short_count(value: float) -> str:
    """355919872 -> '356M'; three significant digits with K, M, B, T."""
    for unit in ("", "K", "M", "B"):
        if abs(value) < 999.5:
            return significant(value) + unit
        value /= 1000
    return f"{significant(value)}T"


def significant(value: float, digits: int = 3, signed: bool = False) -> str:
    """Write a number with so many digits at least, never with an exponent: 0.012345 -> "0.0123", 12345.6 -> "12,346".

    Args:
        value: The number.
        digits: Digits from the first one that is not 0.
        signed: Whether a number above 0 has a plus sign.
    """
    if not value or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:{'+' if signed else ''},.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


ENDS_IN_HISS = ("s", "x", "z", "ch", "sh")


def pluralize(what: str) -> str:
    """Make the plural of a word: "wait" -> "waits", "copy" -> "copies", "way" -> "ways"."""
    if what.endswith(ENDS_IN_HISS):
        return f"{what}es"
    if what.endswith("y") and what[-2:-1] not in "aeiou":
        return f"{what[:-1]}ies"
    return f"{what}s"


def counted(number: float, what: str) -> str:
    """Write a number with its noun: "1 wait", "12 waits", "0.5 waits". The number as it is shown decides."""
    told = significant(number)
    return f"{told} {what if told == '1' else pluralize(what)}"


def size(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def duration(seconds: float) -> str:
    """75 -> '1m15s', 7300 -> '2h01m', 0.25 -> '250ms'."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"


def is_number(text: str) -> bool:
    """Whether a text spells a number, as float() reads them."""
    try:
        float(text)
    except ValueError:
        return False
    return True
