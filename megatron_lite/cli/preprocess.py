"""megatron-lite preprocess: text and jsonl files to PREFIX_KEY_document.{bin,idx}."""

import time

from megatron_lite.cli.parser import Parser
from megatron_lite.cli.progress import DocumentProgress
from megatron_lite.data.preprocess import Summary, preprocess
from megatron_lite.data.tokenizers import TYPES, make_tokenizer
from megatron_lite.units import count, duration, size


def run(argv: list[str]):
    """Tokenize as `argv` says and print what was written. UserError for a mistake."""
    options = _parser().parse_args(argv)
    tokenizer = make_tokenizer(
        options.tokenizer_type, vocab_file=options.vocab_file, merge_file=options.merge_file,
        vocab_size=options.vocab_size,
    )
    started, progress = time.monotonic(), DocumentProgress()
    try:
        summary = preprocess(
            options.input, options.output_prefix, tokenizer, json_keys=options.json_keys,
            append_eod=options.append_eod, report=progress,
        )
    finally:
        progress.wipe()
    print(_sentence(summary, time.monotonic() - started))


def _parser() -> Parser:
    parser = Parser("preprocess", "Tokenizes documents into the files that --data-path names.")
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help=".jsonl: one object a line; others: one document each")
    add("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX_KEY_document.bin and .idx")
    add("--tokenizer-type", default="GPT2BPETokenizer", metavar="TYPE", help=f"{', '.join(TYPES)} [%(default)s]")
    add("--vocab-file", metavar="FILE", help="GPT-2 style vocab.json")
    add("--merge-file", metavar="FILE", help="GPT-2 style merges.txt")
    add("--vocab-size", type=int, metavar="N", help="number of ids, for NullTokenizer")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="fields of a jsonl object [text]")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    return parser


def _sentence(summary: Summary, seconds: float) -> str:
    left_out = f", {count(summary.empty)} empty ones left out" if summary.empty else ""
    return (f"{count(summary.documents)} documents ({size(summary.text_bytes)}){left_out}: {count(summary.tokens)} tokens "
            f"in {duration(seconds)}; --data-path {' '.join(summary.prefixes)}")
