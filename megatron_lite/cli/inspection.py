"""megatron-lite inspect: is a .bin/.idx data set sound, and what is in it?"""

from megatron_lite.cli.parser import Parser
from megatron_lite.cli.tokenizer_flags import add_tokenizer_flags
from megatron_lite.data.dataset_check import Inspection, inspect
from megatron_lite.data.tokenizers import Tokenizer, build_tokenizer
from megatron_lite.errors import ConfigError, DataError, UserError
from megatron_lite.live_line import LiveLine
from megatron_lite.terminal import print_lines
from megatron_lite.units import count, size


def run(argv: list[str]):
    """Print what each data set holds. ConfigError with one line for each that is not sound; the others are shown."""
    options = _parser().parse_args(argv)
    tokenizer = None
    if options.tokenizer_type or options.vocab_file or options.merge_file or options.tokenizer_model:
        tokenizer = build_tokenizer(options)
    elif options.vocab_size is not None and options.vocab_size < 1:
        raise UserError(f"--vocab-size {options.vocab_size}: must be 1 or more; give the number of ids")
    vocab_size, eod = (tokenizer.vocab_size, tokenizer.eod) if tokenizer else (options.vocab_size, None)
    mistakes, line = [], LiveLine()
    for prefix in options.prefixes:
        try:
            found = inspect(prefix, vocab_size, eod, report=lambda what, share: line.draw(f"{what}: {share:.0%}"))
        except DataError as error:
            mistakes.append(str(error))
            continue
        finally:
            line.wipe()
        print_lines(_lines(found, vocab_size, tokenizer))
    if mistakes:
        raise ConfigError(mistakes)


def _parser() -> Parser:
    parser = Parser("inspect", "Checks data sets and says what they hold; exit code 2 if one is damaged.")
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="data sets, without .bin or .idx")
    add_tokenizer_flags(parser, None, "check that all ids are below N; or for NullTokenizer and TikTokenizer")
    return parser


def _lines(found: Inspection, vocab_size: int | None, tokenizer: Tokenizer | None) -> list[str]:
    checked = "" if vocab_size is None else f", all below the vocabulary of {count(vocab_size)}"
    lines = [
        f"{found.prefix}: sound",
        f"  documents          {count(found.documents)} ({count(found.sequences)} sequences)",
        f"  tokens             {count(found.tokens)} as {found.dtype}, {size(found.file_bytes)} in both files",
        f"  ids                {found.smallest_id} to {found.largest_id}{checked}",
        (
            f"  document lengths   {count(found.shortest)} to {count(found.longest)} tokens, "
            f"median {found.median:,.1f}, mean {found.mean:,.1f}; {count(found.empty)} empty"
        ),
        f"  duplicates         {_duplicates(found)}",
        f"  end of document    {_end(found)}",
    ]
    if tokenizer:
        # repr: a text may hold control characters, which a terminal would obey.
        lines.append(f"  begins             {tokenizer.decode(found.sample)!r}")
    return lines


def _duplicates(found: Inspection) -> str:
    if not found.duplicates:
        return "none"
    first, second = found.duplicate_pair
    return (
        f"{count(found.duplicates)} documents ({found.duplicates / found.documents:.1%}) equal an earlier one, "
        f"as {count(second)} equals {count(first)} (counted from 0)"
    )


def _end(found: Inspection) -> str:
    inside = f", and it stands {count(found.end_id_inside)} times elsewhere" if found.end_id_inside else ""
    return (
        f"{count(found.ending_so)} of {count(found.documents - found.empty)} documents end with {found.end_id}{inside}"
    )
