"""`megatron-lite explain` describes what a finding means, or what a kernel's name says."""

import difflib
import re

from megatron_lite.analysis.kernels.kernel_names import in_words
from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.kernels.kernel_words import get_kernel_role
from megatron_lite.cli.parser import Parser
from megatron_lite.errors import UserError
from megatron_lite.terminal import print_lines


def run(argv: list[str]) -> None:
    """Print the page of a finding's code, or the name of a kernel taken apart; without words all codes."""
    parser = Parser("explain", "Explains a code of the report's findings, or the name of a kernel (in quotes).")
    parser.add_argument("what", nargs="*", metavar="CODE|KERNEL", help="a finding's code or a kernel's name")
    # A name without quotes may hold "->": only what begins with a dash is an option.
    named = bool(argv) and not argv[0].startswith("-")
    words = " ".join(argv if named else parser.parse_args(argv).what).strip()
    from megatron_lite.analysis.findings.rules import RULES, get_page  # every rule: not for --help

    near = difflib.get_close_matches(words, RULES, n=1)
    if not words:
        lines = [
            "megatron-lite explain CODE explains a finding; with a kernel's name, its parts. Codes:",
            "",
        ]
        width = max(map(len, RULES), default=0)
        lines += [f"  {code:<{width}}  {rule.title}" for code, rule in sorted(RULES.items())]
    elif page := get_page(words):
        lines = [f"{words}: {RULES[words].title}", "", *page.split("\n")]
    # Kernels have no hyphens in their names, and codes nothing else.
    elif near and (re.fullmatch("[a-z0-9]+(-[a-z0-9]+)+", words) or get_kernel_role(words) is Role.OTHER):
        raise UserError(f"megatron-lite explain {words}: no such code; did you mean {near[0]}?")
    else:
        lines = in_words(words)
    print_lines(lines)
