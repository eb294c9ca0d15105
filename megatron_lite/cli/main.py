"""`megatron-lite COMMAND`: training, and what is done before and after it. Imports no torch, so that it answers at
once."""

import importlib
import sys

from megatron_lite.errors import UserError, describe_memory_error, is_memory_error
from megatron_lite.terminal import describe_version, end_quietly_without_reader, print_lines

COMMANDS = {  # name: (module and function, which takes argv and may return an exit code; what it does)
    "train": (
        "__main__:main",
        "train a GPT, as pretrain_gpt.py does; ranks: torchrun ... -m megatron_lite FLAGS",
    ),
    "generate": ("cli.generate:run", "generate text with a trained model"),
    "preprocess": (
        "cli.datasets:preprocess_files",
        "tokenize text or jsonl files into the .bin/.idx of --data-path",
    ),
    "merge": ("cli.datasets:merge_datasets", "merge .bin/.idx data sets"),
    "inspect": ("cli.datasets:inspect_datasets", "check a .bin/.idx data set and describe it"),
    "convert": (
        "cli.convert:run",
        "convert checkpoints to and from Hugging Face folders, and from Megatron-LM's",
    ),
    "make-corpus": (
        "cli.corpus:run",
        "make a data set from Python's own sources, where there is no other data",
    ),
    "watch": (
        "cli.watch:run",
        "run any PyTorch training script: time its steps, profile some, report",
    ),
    "live": (
        "cli.live:run",
        "follow a run in a terminal: progress, loss, times, ranks, memory, warnings",
    ),
    "plan": (
        "cli.plan:run",
        "predict from a launch command: does it fit, how fast can it be, what to change",
    ),
    "fit": (
        "cli.fit:run",
        "walk any PyTorch training script without a GPU: does it fit, what holds memory",
    ),
    "report": (
        "cli.report:run",
        "explain why a run is slow and why memory peaks: from run folders, traces, snapshots",
    ),
    "postmortem": (
        "cli.postmortem:run",
        "say why a job failed or hangs: which rank, which line, what only followed",
    ),
    "explain": ("cli.explain:run", "explain a finding of the report, or a kernel's name"),
    "compare": (
        "cli.report:compare_runs",
        "compare two runs or traces: what changed, and what did not",
    ),
    "tune": (
        "cli.tune:run",
        "try what reports advise, in turns, and keep what is faster at equal losses",
    ),
    "prove": (
        "cli.prove:run",
        "check that a parallel script, or layout, computes what one rank computes",
    ),
    "replay": (
        "cli.replay:run",
        "run a step of a training again: did data, numerics, rate or hardware make it fail",
    ),
    "mcp": (
        "mcp_server.start_server:run",
        "serve report, compare, postmortem, plan, fit and explain to programs that help people",
    ),
    "audit": ("cli.report:audit", "check a profiled run against 19 performance questions"),
}
INTERRUPTED = 130  # 128 + SIGINT, as shells say it


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: its own or 0, or 2 after one line for each mistake of the user."""
    words = sys.argv[1:] if argv is None else argv
    return end_quietly_without_reader(lambda: _answer(words))


def _answer(words: list[str]) -> int:
    try:
        return _run(words)
    except UserError as raised:
        error = raised
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as raised:
        if not is_memory_error(raised):
            raise
        error = UserError(describe_memory_error())
    print_lines([f"error: {line}" for line in error.lines], sys.stderr)
    return error.exit_code


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        lines = [f"  {name:<14}{purpose}" for name, (_, purpose) in COMMANDS.items()]
        print_lines(
            [
                "usage: megatron-lite COMMAND OPTIONS (COMMAND --help shows its options; --version)",
                "",
                *lines,
            ]
        )
        return 0
    if words[0] == "--version":
        print_lines([describe_version()])
        return 0
    name, *rest = words
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        raise UserError(f"megatron-lite {name}: no such command; {hint}")
    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(f"megatron_lite.{module}"), function)(rest) or 0


if __name__ == "__main__":
    sys.exit(main())
