"""Says which of our steps, ranks and kernels an Nsight Systems report holds: nsight_contents.py REPORT.sqlite

The file is of `nsys export --type sqlite`. One line, or the reason and exit code 1 if no step is in it; a second line
names variables that may be secret, since nsys keeps the environment of every process that it could read.
"""

import re
import sqlite3
import sys
from contextlib import closing

SECRET = re.compile(r"(?!TOKENIZERS_|.*_PKEY$).*(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL)", re.IGNORECASE)


def tables(database: sqlite3.Connection) -> set[str]:
    """nsys writes only the tables that it has rows for."""
    return {name for (name,) in database.execute("SELECT name FROM sqlite_master")}


def nvtx_texts(database: sqlite3.Connection) -> list[str]:
    """Of all ranges and marks, in their order; a registered string stands in a table of its own."""
    if "NVTX_EVENTS" not in tables(database):
        return []
    rows = database.execute("""SELECT coalesce(event.text, string.value) FROM NVTX_EVENTS AS event
        LEFT JOIN StringIds AS string ON string.id = event.textId ORDER BY event.start""")
    return [text for (text,) in rows if text is not None]


def secrets(database: sqlite3.Connection) -> list[str]:
    """Names of variables that may be secret. An environment is one string, with a zero byte between its variables."""
    variables = set()
    for (text,) in database.execute("SELECT value FROM StringIds"):
        if "\0" in str(text):
            variables |= {entry.split("=", 1)[0] for entry in text.split("\0") if re.match(r"\w+=.", entry)}
    return sorted(name for name in variables if SECRET.match(name))


def contents(path: str) -> tuple[str, bool]:
    """What the report holds in words, and whether a step is in it."""
    with closing(sqlite3.connect(f"file:{path.replace('%', '%25').replace('?', '%3f')}?mode=ro", uri=True)) as database:
        texts = nvtx_texts(database)
        kernels = None
        if "CUPTI_ACTIVITY_KIND_KERNEL" in tables(database):
            [(kernels,)] = database.execute("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL")
        may_be_secret = secrets(database)
    steps = sorted({int(match[1]) for text in texts if (match := re.fullmatch(r"step (\d+)", text))})
    if not steps:
        return (
            "no step of ours is in it: was the window reached, and is --profile given without --use-pytorch-profiler?",
            False,
        )
    marks = [text for text in texts if re.match(r"rank \d+ of \d+, window: ", text)]
    marks.sort(key=lambda text: int(text.split()[1]))
    ranges = len(texts) - len(marks)
    held = f"step{'s' if len(steps) > 1 else ''} {_runs(steps)}, {ranges} ranges"
    held += f", {kernels} kernels" if kernels else ", no kernels"
    words = "; ".join([held, *marks])
    if may_be_secret:
        words += (
            f"\nit holds {', '.join(may_be_secret)} from the environment of processes here: look before you share it"
        )
    return words, True


def _runs(numbers: list[int]) -> str:
    """'3-5, 8' for 3, 4, 5, 8."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in spans)


if __name__ == "__main__":
    words, found = contents(sys.argv[1])
    print(words)
    sys.exit(not found)
