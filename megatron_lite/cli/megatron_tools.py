"""Options of Megatron-LM's tools for data that are none here: taken with a word, or answered with the remedy."""

import argparse
import sys

from megatron_lite.cli.parser import Parser
from megatron_lite.errors import UserError
from megatron_lite.terminal import print_lines

PREPROCESS_ACCEPTED = {
    "--log-interval": "on a terminal a line shows the progress all the time",
    "--partitions": "the input is read once, and --workers shares the work",
    "--chunk-size": "workers are handed blocks of bytes",
    "--keep-sequential-samples": "documents keep their order with any number of workers",
    "--dataset-impl": "all data sets are memory-mapped ones",
    "--lang": "it matters only with --split-sentences",
    "--keep-newlines": "it matters only with --split-sentences",
    "--workers-to-check": "it matters only with --find-optimal-num-workers",
    "--max-documents": "it matters only with --find-optimal-num-workers",
    "--performance-dir": "it matters only with --find-optimal-num-workers",
}
PREPROCESS_REFUSED = {
    "--split-sentences": "a GPT reads documents whole; leave it out",
    "--find-optimal-num-workers": "leave it out, try a few values of --workers, and compare documents/s",
}
MERGE_REFUSED = {"--multimodal": "only data sets of text are merged; leave it out"}
ONLY = {"--dataset-impl": "mmap"}  # flag: the value that it may have


def add_answers(parser: Parser, accepted: dict[str, str], refused: dict[str, str]):
    """Let `parser` take the flags of `accepted`, each with a word on stderr, and stop at those of `refused`."""
    for answers, stops in ((accepted, False), (refused, True)):
        for flag, answer in answers.items():
            parser.add_argument(flag, action=_Answer, answer=answer, stops=stops)


class _Answer(argparse.Action):
    """Takes whatever values follow: they mean nothing here."""

    def __init__(self, option_strings, dest, answer: str, stops: bool):
        state = "refused" if stops else "no effect"
        super().__init__(option_strings, argparse.SUPPRESS, nargs="*", help=f"{state}: {answer}", metavar="VALUE")
        self._answer, self._stops = answer, stops

    def __call__(self, parser, namespace, values, option_string=None):
        if self._stops:
            raise UserError(f"{parser.prog} {option_string}: {self._answer}")
        only = ONLY.get(option_string)
        if only and values != [only]:
            given = " ".join((option_string, *values))
            raise UserError(f"{parser.prog} {given}: {self._answer}; give {only}, or leave it out")
        print_lines([f"  note: {option_string} has no effect here: {self._answer}."], sys.stderr)
