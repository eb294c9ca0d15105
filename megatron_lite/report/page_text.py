"""Texts and tables of the page."""

import html

from megatron_lite.report.section import Table
from megatron_lite.report.text import harmless

MOST_ROWS = 200
LONGEST_CELL = 400  # a kernel's template arguments can fill a page


def escaped(text: str) -> str:
    """Any string as text of the page, in an element or in a quoted attribute."""
    return html.escape(harmless(text), quote=True)


def table_html(table: Table) -> str:
    """The table, its longest part left to the terminal and report.json."""
    if not table.rows:
        return ""
    head = "".join(f'<th class="{side}">{escaped(name)}</th>' for name, side in zip(table.head, table.align))
    rows = "".join(_row(table, at) for at in range(min(len(table.rows), MOST_ROWS)))
    rest = table.hidden + max(len(table.rows) - MOST_ROWS, 0)
    more = f'<p class="more">and {rest:,} more in report.json</p>' if rest else ""
    wide = "" if table.shares else ' class="wide"'
    titles = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="rows"><table{wide}>{titles}<tbody>{rows}</tbody></table></div>{more}'


def _row(table: Table, at: int) -> str:
    cells = "".join(
        f'<td class="{side}">{escaped(cell[:LONGEST_CELL])}</td>' for cell, side in zip(table.rows[at], table.align)
    )
    if not table.shares:
        return f"<tr>{cells}</tr>"
    share = table.shares[at]
    if share is None:
        return f'<tr class="total">{cells}<td class="bar"></td></tr>'
    return f'<tr>{cells}<td class="bar"><span style="width:{min(max(share, 0), 1):.2%}"></span></td></tr>'
