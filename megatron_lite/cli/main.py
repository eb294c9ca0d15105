"""megatron-lite COMMAND: what is done before and after training. Imports no torch, so that it answers at once."""

import difflib
import importlib
import sys

from megatron_lite.errors import UserError, describe_memory_error
from megatron_lite.terminal import describe_version, end_quietly_without_reader, print_lines

COMMANDS = {  # name: (module with run(argv), which may return an exit code, and what it does)
    "preprocess": ("megatron_lite.cli.preprocess", "tokenize text or jsonl files into the .bin/.idx of --data-path"),
    "merge": ("megatron_lite.cli.merge", "join .bin/.idx data sets to one"),
    "inspect": ("megatron_lite.cli.inspection", "check a .bin/.idx data set and say what it holds"),
    "convert": ("megatron_lite.cli.convert", "checkpoints to and from Hugging Face folders, and from Megatron-LM's"),
    "make-corpus": ("megatron_lite.cli.corpus", "a data set from Python's own sources, for machines without any data"),
    "plan": ("megatron_lite.cli.plan", "will a run fit, how fast can it be, what to change: from its launch command"),
    "report": (
        "megatron_lite.cli.report",
        "why a run is slow and why memory peaks: from run folders, traces, snapshots",
    ),
    "explain": ("megatron_lite.cli.explain", "what a finding of the report means, or what a kernel's name says"),
    "compare": ("megatron_lite.cli.compare", "what changed from one run or trace to another, and what did not"),
    "audit": ("megatron_lite.cli.audit", "18 questions to a profiled run: pass, fail or not seen, and why"),
}
INTERRUPTED = 130  # 128 + SIGINT, as shells say it


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: its own or 0, or 2 after one line for each mistake of the user."""
    words = sys.argv[1:] if argv is None else argv
    return end_quietly_without_reader(lambda: _answer(words))


def _answer(words: list[str]) -> int:
    try:
        return _run(words)
    except MemoryError:
        error = UserError(describe_memory_error())
    except UserError as raised:
        error = raised
    except KeyboardInterrupt:
        return INTERRUPTED
    print_lines([f"error: {line}" for line in error.lines], sys.stderr)
    return error.exit_code


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print_lines(_overview())
        return 0
    if words[0] == "--version":
        print_lines([describe_version()])
        return 0
    name, *rest = words
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        raise UserError(f"megatron-lite {name}: no such command; {hint}")
    return importlib.import_module(COMMANDS[name][0]).run(rest) or 0


def _overview() -> list[str]:
    lines = [f"  {name:<14}{purpose}" for name, (_, purpose) in COMMANDS.items()]
    return ["usage: megatron-lite COMMAND OPTIONS (COMMAND --help shows its options; --version)", "", *lines]


if __name__ == "__main__":
    sys.exit(main())
