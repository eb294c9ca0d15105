"""`megatron-lite preprocess`, `merge` and `inspect` make and check .bin/.idx data sets."""

import argparse
import glob
import os
import re
import sys
import time
from collections.abc import Sequence

from megatron_lite.cli.parser import Parser
from megatron_lite.config.data_paths import TIKTOKEN_SPECIAL, TOKENIZER, TOKENIZERS
from megatron_lite.data.dataset_check import Inspection, inspect
from megatron_lite.data.indexed_writer import merge
from megatron_lite.data.preprocess import MAX_DOCUMENT_MB, ON_ERROR, preprocess
from megatron_lite.data.tokenizers import ByteTokenizer, Tokenizer, build_tokenizer
from megatron_lite.errors import ConfigError, DataError, UserError
from megatron_lite.live_line import LiveLine
from megatron_lite.terminal import print_lines
from megatron_lite.units import count, counted, duration, size

# --- options of Megatron-LM's tools and of tools made from them that are none here: taken with a word, or answered

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
    "--make-vocab-size-divisible-by": "the files hold ids, and the trainer pads the vocabulary",
    "--pad-vocab-size-to": "the files hold ids, and the trainer pads the vocabulary",
    "--tensor-model-parallel-size": "the files hold ids, and the trainer pads the vocabulary",
    "--num-docs": "it was for a line of progress only",
    "--seq-length": "documents are kept whole; the trainer cuts them",
}
PREPROCESS_REFUSED = {
    "--split-sentences": "a GPT reads documents whole; leave it out",
    "--find-optimal-num-workers": "leave it out, try a few values of --workers, and compare documents/s",
    "--ftfy": "texts are taken as they are; repair them first (the package ftfy), and leave it out",
    "--vocab-extra-ids": "no ids are added; add the tokens to the tokenizer, and leave it out",
    "--append-bos": "no token is put before a text; leave it out",
    "--prepend-bos": "no token is put before a text; leave it out",
}
# Older names, and those of Megatron-DeepSpeed, GPT-NeoX and Megatron-LLM: what they are called here.
RENAMED = {
    "--json-key": "--json-keys",
    "--jsonl-keys": "--json-keys",
    "--vocab": "--vocab-file",
    "--merges-file": "--merge-file",
    "--merges": "--merge-file",
    "--tokenizer-name-or-path": "--tokenizer-model",
    "--tokenizer-name": "--tokenizer-model",
    "--num-workers": "--workers",
}
TOKENIZERS_RENAMED = {
    "PretrainedFromHF": "HuggingFaceTokenizer",
    "HFTokenizer": "HuggingFaceTokenizer",
    "HFGPT2Tokenizer": "HuggingFaceTokenizer",
    "AutoTokenizer": "HuggingFaceTokenizer",
    "SPMTokenizer": "SentencePieceTokenizer",
    "_GPT2BPETokenizer": "GPT2BPETokenizer",
    "_NullTokenizer": "NullTokenizer",
}
ONLY = {"--dataset-impl": "mmap"}  # flag: the value that it may have
GLOB_CHARACTERS = "*?["
BEGINS_JSON = re.compile(r'\s*\{\s*"[^"\n]{1,64}"\s*:')
# of --tokenizer-type: those whose files are byte for byte the same with and without Megatron's --legacy-tokenizer
SAME_AS_LEGACY = ("GPT2BPETokenizer", "ByteTokenizer", "NullTokenizer")


class _Answer(argparse.Action):
    """Takes whatever values follow: they mean nothing here. A word on stderr, or an end."""

    def __init__(self, option_strings: Sequence[str], dest: str, answer: str, stops: bool) -> None:
        state = "refused" if stops else "no effect"
        super().__init__(option_strings, argparse.SUPPRESS, nargs="*", help=f"{state}: {answer}", metavar="VALUE")
        self._answer = answer
        self._stops = stops

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[str] | None,
        option_string: str | None = None,
    ) -> None:
        option = option_string or ""
        if self._stops:
            raise UserError(f"{parser.prog} {option}: {self._answer}")
        only = ONLY.get(option)
        words = list(values or ())
        if only and words != [only]:
            given = " ".join((option, *words))
            raise UserError(f"{parser.prog} {given}: {self._answer}; give {only}, or leave it out")
        print_lines([f"  note: {option} has no effect here: {self._answer}."], sys.stderr)


def _add_tokenizer_flags(parser: Parser, default_type: str | None, vocab_size_help: str) -> None:
    """The flags of the trainer that name a tokenizer; build_tokenizer takes their values."""
    add = parser.add_argument
    default = f" [{default_type}]" if default_type else ""
    models = "SentencePiece .model, TikTokenizer's .json, or for HuggingFaceTokenizer a folder or a hub's name"
    special = ("--tokenizer-special-tokens", "--tiktoken-special-tokens")
    special_help = "names of TikTokenizer's first ids; tokens to add to HuggingFaceTokenizer"
    include_help = "keep what a HuggingFaceTokenizer puts around each text, such as <s>"
    add(
        "--tokenizer-type",
        default=default_type,
        metavar="TYPE",
        help=f"{', '.join(TOKENIZERS)}{default}",
    )
    add("--vocab-file", metavar="FILE", help="GPT-2 style vocab.json")
    add("--merge-file", metavar="FILE", help="GPT-2 style merges.txt")
    add("--tokenizer-model", metavar="FILE", help=models)
    add("--vocab-size", type=int, metavar="N", help=vocab_size_help)
    add("--tiktoken-pattern", choices=("v1", "v2"), help="how TikTokenizer splits text [v2]")
    add(
        "--tiktoken-num-special-tokens",
        type=int,
        default=TIKTOKEN_SPECIAL,
        metavar="N",
        help="TikTokenizer's ids below its first byte [%(default)s]",
    )
    add(*special, nargs="+", metavar="TOKEN", help=special_help)
    add("--tokenizer-hf-include-special-tokens", action="store_true", help=include_help)


# --- preprocess


class PreprocessLine(LiveLine):
    """Called with documents, bytes of text and the share of the input that is done, as data.preprocess reports them.

    Rates and the time left are measured from the first report on: an interrupted run may have done much before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._first: tuple[float, int, int, float] | None = None

    def __call__(self, documents: int, text_bytes: int, share: float) -> None:
        now = (time.monotonic(), documents, text_bytes, share)
        self._first = self._first or now
        seconds, more_documents, more_bytes, more_share = (new - old for new, old in zip(now, self._first))
        text = f"{count(documents)} documents, {size(text_bytes)}, {share:.0%}"
        if seconds > 0 and more_share > 0:
            rates = f"{count(more_documents / seconds)} documents/s, {size(more_bytes / seconds)}/s"
            text += f", {rates}, {duration(seconds * (1 - share) / more_share)} left"
        self.draw(text)


def preprocess_files(argv: list[str]) -> None:
    """Tokenize, or merge, as `argv` says and print what was written. UserError for a mistake."""
    argv = _rename_flags(argv)
    options = _preprocess_parser().parse_args(argv)
    if options.tokenizer_type in TOKENIZERS_RENAMED:
        options.tokenizer_type = _note_name(
            f"--tokenizer-type {options.tokenizer_type}", TOKENIZERS_RENAMED[options.tokenizer_type]
        )
    if options.merge:
        for flag in (word.split("=")[0] for word in argv if word.startswith("--")):
            if flag not in ("--merge", "--output-prefix"):
                raise UserError(f"megatron-lite preprocess {flag}: means nothing beside --merge; leave it out")
        _merge(options.merge, options.output_prefix, "--merge")
        return
    if options.legacy_tokenizer and options.tokenizer_type not in SAME_AS_LEGACY:
        raise UserError(
            f"megatron-lite preprocess --legacy-tokenizer: Megatron's older {options.tokenizer_type} may put other ids "
            "around a text; leave it out for those of its newer one, or tokenize with Megatron-LM"
        )
    inputs = _expand_patterns(options.input)
    tokenizer = build_tokenizer(options)
    started = time.monotonic()
    progress = PreprocessLine()

    def say(line: str) -> None:
        progress.wipe()
        print_lines([line], sys.stderr)

    settings = {name: getattr(options, name) for name in ("append_eod", "workers", "on_error", "max_document_mb")}
    try:
        done = preprocess(inputs, options.output_prefix, tokenizer, json_keys=options.json_keys, **settings,
                          report=progress, say=say)  # fmt: skip
    finally:
        progress.wipe()
    left_out = f", {count(done.empty)} empty ones left out" if done.empty else ""
    skipped = f", {count(done.skipped)} bad lines skipped" if done.skipped else ""
    documents = f"{count(done.documents)} documents ({size(done.text_bytes)}){left_out}{skipped}"
    tokens = f"{count(done.tokens)} tokens in {duration(time.monotonic() - started)}"
    print_lines([f"{documents}: {tokens}; --data-path {' '.join(done.prefixes)}"])


def _rename_flags(argv: Sequence[str]) -> list[str]:
    """Replace older names of flags by today's, with a note, and underscores by dashes."""
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
            name = _note_name(name, RENAMED[name]) if name in RENAMED else name
        words.append(f"{name}{equals}{value}")
    return words


def _note_name(old: str, new: str) -> str:
    print_lines([f"  note: {old} is taken as {new}, its name here."], sys.stderr)
    return new


def _expand_patterns(inputs: Sequence[str]) -> list[str]:
    """The inputs; a pattern that no shell expanded stands for the files that it fits, as in Megatron's own tool."""
    files = []
    for path in inputs:
        if os.path.exists(path) or not any(character in path for character in GLOB_CHARACTERS):
            files.append(path)
            continue
        found = sorted(glob.glob(path))
        if not found:
            raise DataError(f"--input {path}: no file fits this pattern; check the folder and the ending")
        files_found = counted(len(found), "file") + (", in the order of their names" if len(found) > 1 else "")
        print_lines([f"  note: --input {path}: {files_found}."], sys.stderr)
        files += found
    return files


def _preprocess_parser() -> Parser:
    parser = Parser(
        "preprocess",
        "Tokenizes documents into the files that --data-path names, or merges such files.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    add = parser.add_argument
    inputs = (
        "JSON objects, one a line; others: one document each, by their content; .gz, .bz2, .xz, .zip, .zst are unpacked"
    )
    legacy = f"no effect: ids are the same; only for {', '.join(SAME_AS_LEGACY)}"
    errors = "what a bad line does: stop, or be named and left out [stop]"
    largest = (
        "a line, or a text file, of more than N MiB is a bad line; one takes six times as much memory [%(default)s]"
    )
    source.add_argument("--input", nargs="+", metavar="FILE", help=inputs)
    source.add_argument(
        "--merge",
        nargs="+",
        metavar="PREFIX",
        help="data sets to join instead, without .bin or .idx",
    )
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX_KEY_document.bin and .idx",
    )
    _add_tokenizer_flags(parser, TOKENIZER, "number of ids, for NullTokenizer and TikTokenizer")
    add("--legacy-tokenizer", action="store_true", help=legacy)
    add(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="fields of a jsonl object [text]",
    )
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add("--workers", type=int, default=1, metavar="N", help="processes that tokenize [%(default)s]")
    add("--on-error", choices=ON_ERROR, default="stop", help=errors)
    add("--max-document-mb", type=int, default=MAX_DOCUMENT_MB, metavar="N", help=largest)
    for flag, answer in {**PREPROCESS_ACCEPTED, **PREPROCESS_REFUSED}.items():
        parser.add_argument(flag, action=_Answer, answer=answer, stops=flag in PREPROCESS_REFUSED)
    return parser


# --- merge


def merge_datasets(argv: list[str]) -> None:
    """Merge as `argv` says and print what was written. UserError for a mistake."""
    parser = Parser("merge", "Joins data sets to one, in the order in which they are named.")
    inputs = parser.add_mutually_exclusive_group(required=True)
    inputs.add_argument("--inputs", nargs="+", metavar="PREFIX", help="data sets, without .bin or .idx")
    inputs.add_argument("--input", metavar="FOLDER", help="all data sets of a folder, in the order of their names")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    multimodal = "only data sets of text are merged; leave it out"
    parser.add_argument("--multimodal", action=_Answer, answer=multimodal, stops=True)
    options = parser.parse_args(argv)
    if options.input is None:
        _merge(options.inputs, options.output_prefix, "--inputs")
        return
    given = f"megatron-lite merge --input {options.input}"
    try:
        names = [name for name in os.listdir(options.input) if name.endswith((".bin", ".idx"))]
    except OSError as error:
        why = f"cannot be read ({error.strerror}); give a folder, or name data sets by --inputs"
        raise UserError(f"{given}: {why}") from None
    if not names:
        raise UserError(f"{given}: holds no .bin and .idx files; give another folder, or name data sets by --inputs")
    # sorted as Megatron's tool does; one without its other half is refused later
    prefixes = sorted({os.path.join(options.input, name[:-4]) for name in names})
    _merge(prefixes, options.output_prefix, "--input")


def _merge(inputs: Sequence[str], output_prefix: str, flag: str) -> None:
    """Merge, with a line that shows how far it is and one for the result. `flag` is the one that named the inputs."""
    started = time.monotonic()
    line = LiveLine()
    try:
        written = merge(inputs, output_prefix, flag, lambda tokens: line.draw(f"{count(tokens)} tokens"))
    finally:
        line.wipe()
    documents = f"{counted(written.documents, 'document')} of {counted(len(inputs), 'data set')}"
    tokens = f"{count(written.tokens)} tokens in {duration(time.monotonic() - started)}"
    print_lines([f"{documents}: {tokens}; --data-path {output_prefix}"])


# --- inspect


def inspect_datasets(argv: list[str]) -> None:
    """Print what each data set holds. ConfigError with one line for each that is not sound; the others are shown."""
    parser = Parser("inspect", "Checks data sets and describes them; exit code 2 if one is damaged.")
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="data sets, without .bin or .idx")
    _add_tokenizer_flags(parser, None, "check that all ids are below N; or for NullTokenizer and TikTokenizer")
    options = parser.parse_args(argv)
    tokenizer = None
    if options.tokenizer_type or options.vocab_file or options.merge_file or options.tokenizer_model:
        tokenizer = build_tokenizer(options)
    elif options.vocab_size is not None and options.vocab_size < 1:
        raise UserError(f"--vocab-size {options.vocab_size}: must be 1 or more; give the number of ids")
    vocab_size = tokenizer.vocab_size if tokenizer else options.vocab_size
    eod = tokenizer.eod if tokenizer else None
    mistakes = []
    line = LiveLine()
    for prefix in options.prefixes:
        try:
            found = inspect(
                prefix,
                vocab_size,
                eod,
                report=lambda what, share: line.draw(f"{what}: {share:.0%}"),
            )
        except DataError as error:
            mistakes.append(str(error))
            continue
        finally:
            line.wipe()
        print_lines(_describe_dataset(found, vocab_size, tokenizer))
    if mistakes:
        raise ConfigError(mistakes)


def _describe_dataset(found: Inspection, vocab_size: int | None, tokenizer: Tokenizer | None) -> list[str]:
    checked = "" if vocab_size is None else f", all below the vocabulary of {count(vocab_size)}"
    lengths = f"{count(found.shortest)} to {count(found.longest)} tokens, median {found.median:,.1f}"
    duplicates = "none"
    if found.duplicate_pair is not None:
        first, second = found.duplicate_pair
        equal = f"{count(found.duplicates)} documents ({found.duplicates / found.documents:.1%}) equal an earlier one"
        duplicates = f"{equal}, as {count(second)} equals {count(first)} (counted from 0)"
    ending = f"{count(found.ending_so)} of {count(found.documents - found.empty)} documents end with {found.end_id}"
    json_text = _find_json_text(found, tokenizer)
    inside = f", and it occurs {counted(found.end_id_inside, 'time')} elsewhere" if found.end_id_inside else ""
    lines = [
        f"{found.prefix}: {'sound' if json_text is None else 'sound, but its documents are JSON'}",
        f"  documents          {count(found.documents)} ({counted(found.sequences, 'sequence')})",
        f"  tokens             {count(found.tokens)} as {found.dtype}, {size(found.file_bytes)} in both files",
        f"  ids                {found.smallest_id} to {found.largest_id}{checked}",
        f"  document lengths   {lengths}, mean {found.mean:,.1f}; {count(found.empty)} empty",
        f"  duplicates         {duplicates}",
        f"  end of document    {ending}{inside}",
    ]
    if tokenizer:
        # repr: a text may hold control characters, which a terminal would obey
        lines.append(f"  begins             {tokenizer.decode(found.samples[0])!r}")
    if json_text is not None:
        remedy = "JSON lines were taken for plain text; preprocess them again, and each line becomes a document"
        lines.append(f"  warning: documents begin with JSON, as {json_text!r}: {remedy}.")
    return lines


def _find_json_text(found: Inspection, tokenizer: Tokenizer | None) -> str | None:
    """The beginning of a document, if most of those sampled begin as a JSON object; None without a tokenizer."""
    if tokenizer is None and found.largest_id > ByteTokenizer.eod:
        return None
    decode = (tokenizer or ByteTokenizer()).decode
    texts = [decode(sample) for sample in found.samples]
    objects = [text for text in texts if BEGINS_JSON.match(text)]
    return objects[0] if 2 * len(objects) > len(texts) else None
