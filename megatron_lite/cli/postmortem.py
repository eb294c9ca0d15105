"""`megatron-lite postmortem` says why a job failed or hangs, from what it left behind."""

import gc
import sys
from pathlib import Path

import msgspec

from megatron_lite.cli.parser import Parser, write_json
from megatron_lite.errors import UserError
from megatron_lite.postmortem.collect import collect_evidence
from megatron_lite.postmortem.conclude import conclude
from megatron_lite.postmortem.evidence import JobEvidence
from megatron_lite.report.postmortem_terminal import count_read, postmortem_lines
from megatron_lite.report.text import get_style
from megatron_lite.terminal import print_lines

POSTMORTEM_SCHEMA = 1  # of the JSON; raised when a reader of the old form would be wrong
MAX_UNREAD_NAMED = 3


def run(argv: list[str]) -> None:
    """Print the conclusion on a job, and write the file that `argv` asks for.

    Raises:
        UserError: Nothing under the paths tells of a job.
    """
    parser = Parser(
        "postmortem",
        "Says why a job failed or hangs: which rank, at which collective and line, and what only followed. "
        "Reads flight recorder dumps, torch.distributed.debug dumps, torchelastic error files, py-spy and faulthandler "
        "stacks, console logs, kernel and Slurm logs, and run folders, of any PyTorch job.",
    )
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="folders and files that the job left behind")
    add("--json", metavar="FILE", help="the conclusion, for programs")
    add("--all", action="store_true", help="all facts, and all ranks")
    options = parser.parse_args(argv)
    evidence = collect_evidence([_find_path(path) for path in options.paths])
    # what was read stays: collections need not walk it
    gc.freeze()
    if not evidence.read:
        raise UserError(_describe_nothing(options.paths, evidence))
    found = conclude(evidence)
    content = {"schema": POSTMORTEM_SCHEMA, "read": dict(evidence.read), **msgspec.to_builtins(found)}
    written = write_json(options.json, content)
    style = get_style(sys.stdout)
    folder = options.paths[0] if len(options.paths) == 1 else ""
    lines = postmortem_lines(found, style, options.all, folder)
    print_lines([*lines, "", style.dim(f"read: {count_read(evidence.read)}"), *written])


def _find_path(text: str) -> Path:
    path = Path(text)
    if not path.exists():
        raise UserError(f"{text}: there is no such file or folder; name what the job left behind.")
    return path


def _describe_nothing(paths: list[str], evidence: JobEvidence) -> str:
    """Say that nothing was found, and the first files that could not be read."""
    named = ", ".join(paths)
    if evidence.unread:
        reasons = "; ".join(evidence.unread[:MAX_UNREAD_NAMED])
        return f"{named}: nothing in it could be read ({reasons})"
    return (
        f"{named}: holds no flight recording, stack, error file or log of a job; "
        "`megatron-lite watch -- COMMAND` records them."
    )
