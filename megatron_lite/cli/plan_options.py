"""The options of `megatron-lite plan`, which stand before the trainer's flags or the launch script."""

import argparse
from collections.abc import Iterator

from megatron_lite.cli.launcher import begins_command, split_at_trainer
from megatron_lite.cli.parser import Parser
from megatron_lite.cli.planned_run import is_script
from megatron_lite.errors import UserError

END = "--"
SHELLS = ("bash", "sh")  # may stand before a script


def plan_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(plan's own options, the rest: flags of the trainer, or a script and its arguments). UserError for a mistake."""
    parser = _parser()
    own, rest = _split(argv, parser)
    options = parser.parse_args(own)
    _check(options, rest)
    return options, rest


def _parser() -> Parser:
    parser = Parser(
        "plan",
        "Says before a run how much memory it needs, whether it fits, and how fast it can be at best; without torch, data or "
        "GPU. Takes the launch command: a script with its arguments (nothing in it is run), torchrun's, or the trainer's flags.",
    )
    parser.usage = "megatron-lite plan [OPTIONS] SCRIPT.sh ARGUMENTS... | torchrun ... pretrain_gpt.py FLAGS | FLAGS"
    add = parser.add_argument
    add(
        "--gpu",
        nargs="+",
        metavar="NAME",
        help="H200, A100-40, 4090 ...: does it fit, and how fast at best; a column for each",
    )
    add("--gpus", type=int, metavar="N", help="GPUs of the whole job [what the script says, else 1]")
    add("--tokens", type=float, metavar="N", help="to train on, such as 300e9 [the flags' own length]")
    add("--why", action="store_true", help="the formula behind each line")
    add("--fit", metavar="NAME", help="flags with which it fits into this GPU")
    add("--margin", type=float, metavar="SHARE", help="of a GPU's memory that stays free [0.08]")
    add("--exact", action="store_true", help="walk the real model and step, without data; needs torch, takes seconds")
    add("--snapshot", metavar="FILE", help="with --exact: keep its snapshot, for pytorch.org/memory_viz")
    add("--inference", action="store_true", help="memory of the trained model when it generates")
    add("--batch", type=int, metavar="N", help="with --inference: sequences at a time [1]")
    add("--context", type=int, metavar="N", help="with --inference: tokens of each [--seq-length]")
    add("--env", action="store_true", help="what in flags and environment variables can cost something")
    add("--all", action="store_true", help="with --exact: all rows of its tables")
    add("--json", metavar="FILE", help="all of it, for programs")
    return parser


def _split(argv: list[str], parser: Parser) -> tuple[list[str], list[str]]:
    """Options up to the first word that is none of ours."""
    actions = {name: action for action in parser._actions for name in action.option_strings}
    at = 0
    while at < len(argv):
        name, equals, _ = argv[at].partition("=")
        if name not in actions:
            break
        at += 1
        if not equals:
            at += _number_of_values(actions[name], argv[at:])
    rest = argv[at:]
    rest = rest[1:] if rest[:1] == [END] else rest
    return argv[:at], rest[1:] if rest[:1] and rest[0] in SHELLS else rest


def _number_of_values(action: argparse.Action, words: list[str]) -> int:
    if action.nargs == 0:
        return 0
    values = list(_until_next(words))
    return len(values) if action.nargs == "+" else min(1, len(values))


def _until_next(words: list[str]) -> Iterator[str]:
    for word in words:
        if word.startswith("--") or is_script(word) or word in SHELLS or begins_command(word):
            return
        yield word


def _check(options: argparse.Namespace, rest: list[str]):
    if not rest:
        raise UserError(
            "megatron-lite plan: no launch command; give SCRIPT.sh with its arguments, or the trainer's flags."
        )
    if not is_script(rest[0]):
        before, flags = split_at_trainer(rest) or ([], rest)
        if not before and flags and not flags[0].startswith("-"):
            raise UserError(f"megatron-lite plan {flags[0]}: no script that ends in .sh, no command with pretrain_gpt.py, no flag of "
                            "the trainer; check it.")  # fmt: skip
        _check_order(flags)
    for name, least in (("gpus", 1), ("tokens", 1), ("batch", 1), ("context", 1)):
        value = getattr(options, name)
        if value is not None and not least <= value < float("inf"):
            raise UserError(f"--{name} {value:g}: must be at least {least}.")
    if options.margin is not None and not 0 <= options.margin < 1:
        raise UserError(f"--margin {options.margin:g}: must be at least 0 and below 1; 0.08 is usual.")
    for name, needed in (("snapshot", "exact"), ("all", "exact"), ("batch", "inference"), ("context", "inference")):
        if getattr(options, name) and not getattr(options, needed):
            raise UserError(f"--{name}: means something with --{needed} only; add that, or leave it out.")


def _check_order(flags: list[str]):
    """Options of ours behind flags of the trainer; the two have no name in common."""
    ours = {name for action in _parser()._actions for name in action.option_strings} - {"-h", "--help"}
    late = next((word for word in flags if word.partition("=")[0] in ours), None)
    if late:
        raise UserError(
            f"megatron-lite plan {late}: stands behind flags of the trainer; put the options of plan before them."
        )
