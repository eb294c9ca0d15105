"""Print how hard the package is to read, folder by folder: python tests/measure_house.py [CHECKOUT ...]

What is counted, and how, stands in tests/support/code_measures.py; what is allowed, in tests/house/test_layers.py.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from support.code_measures import HUGE_NODES, LARGE_NODES, MAX_COLUMNS, Measures, measure_folders

PACKAGE = "megatron_lite"
COLUMNS: dict[str, Callable[[Measures], str]] = {
    "files": lambda measures: f"{measures.files}",
    "code lines": lambda measures: f"{measures.code_lines:,}",
    "nodes": lambda measures: f"{measures.nodes:,}",
    "nodes per code line": lambda measures: f"{measures.nodes_per_code_line:.2f}",
    "functions": lambda measures: f"{measures.functions:,}",
    f"over {LARGE_NODES} nodes": lambda measures: f"{len(measures.large_functions)}",
    f"over {HUGE_NODES} nodes": lambda measures: f"{len(measures.huge_functions)}",
    f"lines over {MAX_COLUMNS} columns": lambda measures: f"{measures.long_lines}",
    "nested conditions": lambda measures: f"{measures.nested_conditions}",
    "assignments of several values": lambda measures: f"{measures.several_values}",
    "arithmetic with booleans": lambda measures: f"{measures.boolean_arithmetic}",
    "comment lines": lambda measures: f"{measures.comment_share:.1%}",
}
HEAD_WIDTH = 11  # of a column's name, which is broken between words


def break_name(name: str) -> list[str]:
    """Lines of a column's name."""
    lines = [""]
    for word in name.split():
        longer = f"{lines[-1]} {word}".strip()
        if len(longer) <= HEAD_WIDTH:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def render_table(rows: dict[str, Measures]) -> list[str]:
    """One line per folder under the names of what was counted."""
    heads = [break_name(name) for name in COLUMNS]
    height = max(map(len, heads))
    texts = [["", *(([""] * (height - len(head)) + head)[line] for head in heads)] for line in range(height)]
    texts += [[name, *(column(measures) for column in COLUMNS.values())] for name, measures in rows.items()]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = []
    for first, *others in texts:
        cells = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return lines


def render(checkout: Path) -> list[str]:
    """The table of a checkout, and the functions that are large."""
    folders = measure_folders(checkout / PACKAGE)
    total = Measures()
    for measures in folders.values():
        total.add(measures)
    large = sorted(total.large_functions, reverse=True)
    share = len(large) / max(total.functions, 1)
    return [
        *render_table({**folders, "all": total}),
        "",
        f"Functions over {LARGE_NODES} nodes: {len(large)} of {total.functions:,} ({share:.2%})",
        *(f"  {nodes}  {name}" for nodes, name in large),
    ]


if __name__ == "__main__":
    for checkout in sys.argv[1:] or [Path(__file__).parent.parent]:
        print("\n".join(render(Path(checkout).resolve())))
