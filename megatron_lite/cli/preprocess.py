"""megatron-lite preprocess: text and jsonl files to PREFIX_KEY_document.{bin,idx}."""

import argparse
import sys
import time

from megatron_lite.cli.megatron_tools import PREPROCESS_ACCEPTED, PREPROCESS_REFUSED, add_answers
from megatron_lite.cli.merge import merge_and_say
from megatron_lite.cli.parser import Parser
from megatron_lite.cli.tokenizer_flags import add_tokenizer_flags
from megatron_lite.config.data_paths import TOKENIZER
from megatron_lite.data.preprocess import MAX_DOCUMENT_MB, ON_ERROR, Summary, preprocess
from megatron_lite.data.tokenizers import build_tokenizer
from megatron_lite.errors import UserError
from megatron_lite.live_line import LiveLine
from megatron_lite.terminal import print_lines
from megatron_lite.units import count, duration, size

# --- the line that shows how far a preprocessing is


class PreprocessLine(LiveLine):
    """Called with documents, bytes of text and the share of the input that is done, as data.preprocess reports them.

    Rates and the time left are measured from the first report on: an interrupted run may have done much before.
    """

    def __init__(self):
        super().__init__()
        self._first = None

    def __call__(self, documents: int, text_bytes: int, share: float):
        now = (time.monotonic(), documents, text_bytes, share)
        self._first = self._first or now
        seconds, more_documents, more_bytes, more_share = (new - old for new, old in zip(now, self._first))
        text = f"{count(documents)} documents, {size(text_bytes)}, {share:.0%}"
        if seconds > 0 and more_share > 0:
            left = seconds * (1 - share) / more_share
            text += (
                f", {count(more_documents / seconds)} documents/s, {size(more_bytes / seconds)}/s, "
                f"{duration(left)} left"
            )
        self.draw(text)


# --- megatron-lite preprocess: text and jsonl files to PREFIX_KEY_document.{bin,idx}

# of --tokenizer-type: those whose files are byte for byte the same with and without Megatron's --legacy-tokenizer
SAME_AS_LEGACY = ("GPT2BPETokenizer", "ByteTokenizer", "NullTokenizer")


def run(argv: list[str]):
    """Tokenize, or merge, as `argv` says and print what was written. UserError for a mistake."""
    options = _parser().parse_args(argv)
    if options.merge:
        _refuse_beside_merge(argv)
        merge_and_say(options.merge, options.output_prefix, "--merge")
    else:
        _preprocess(options)


def _preprocess(options: argparse.Namespace):
    if options.legacy_tokenizer and options.tokenizer_type not in SAME_AS_LEGACY:
        raise UserError(
            f"megatron-lite preprocess --legacy-tokenizer: Megatron's older {options.tokenizer_type} may put other ids "
            "around a text; leave it out for those of its newer one, or tokenize with Megatron-LM"
        )
    tokenizer = build_tokenizer(options)
    started, progress = time.monotonic(), PreprocessLine()

    def say(line: str):
        progress.wipe()
        print_lines([line], sys.stderr)

    try:
        summary = preprocess(
            options.input,
            options.output_prefix,
            tokenizer,
            json_keys=options.json_keys,
            append_eod=options.append_eod,
            workers=options.workers,
            on_error=options.on_error,
            max_document_mb=options.max_document_mb,
            report=progress,
            say=say,
        )
    finally:
        progress.wipe()
    print_lines([_sentence(summary, time.monotonic() - started)])


def _parser() -> Parser:
    parser = Parser("preprocess", "Tokenizes documents into the files that --data-path names, or merges such files.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--input",
        nargs="+",
        metavar="FILE",
        help=".jsonl, .json: one object a line; others: one document each; .gz and .zst are unpacked",
    )
    source.add_argument("--merge", nargs="+", metavar="PREFIX", help="data sets to join instead, without .bin or .idx")
    add = parser.add_argument
    add("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX_KEY_document.bin and .idx")
    add_tokenizer_flags(parser, TOKENIZER, "number of ids, for NullTokenizer and TikTokenizer")
    add(
        "--legacy-tokenizer",
        action="store_true",
        help=f"no effect: ids are the same; only for {', '.join(SAME_AS_LEGACY)}",
    )
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="fields of a jsonl object [text]")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add("--workers", type=int, default=1, metavar="N", help="processes that tokenize [%(default)s]")
    add(
        "--on-error",
        choices=ON_ERROR,
        default="stop",
        help="what a bad line does: stop, or be named and left out [stop]",
    )
    add(
        "--max-document-mb",
        type=int,
        default=MAX_DOCUMENT_MB,
        metavar="N",
        help="a line, or a text file, of more than N MiB is a bad line; one takes six times as much memory [%(default)s]",
    )
    add_answers(parser, PREPROCESS_ACCEPTED, PREPROCESS_REFUSED)
    return parser


def _refuse_beside_merge(argv: list[str]):
    flags = [word.split("=")[0] for word in argv if word.startswith("--")]
    for flag in flags:
        if flag not in ("--merge", "--output-prefix"):
            raise UserError(f"megatron-lite preprocess {flag}: means nothing beside --merge; leave it out")


def _sentence(summary: Summary, seconds: float) -> str:
    left_out = f", {count(summary.empty)} empty ones left out" if summary.empty else ""
    skipped = f", {count(summary.skipped)} bad lines skipped" if summary.skipped else ""
    return (
        f"{count(summary.documents)} documents ({size(summary.text_bytes)}){left_out}{skipped}: "
        f"{count(summary.tokens)} tokens in {duration(seconds)}; --data-path {' '.join(summary.prefixes)}"
    )
