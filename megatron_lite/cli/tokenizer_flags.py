"""The flags that name a tokenizer: the trainer's, for the commands that read or write text."""

from megatron_lite.cli.parser import Parser
from megatron_lite.config.data_paths import TIKTOKEN_SPECIAL, TOKENIZERS


def add_tokenizer_flags(parser: Parser, default_type: str | None, vocab_size_help: str):
    """Their values are what data.tokenizers.build_tokenizer takes."""
    add = parser.add_argument
    default = f" [{default_type}]" if default_type else ""
    add("--tokenizer-type", default=default_type, metavar="TYPE", help=f"{', '.join(TOKENIZERS)}{default}")
    add("--vocab-file", metavar="FILE", help="GPT-2 style vocab.json")
    add("--merge-file", metavar="FILE", help="GPT-2 style merges.txt")
    add(
        "--tokenizer-model",
        metavar="FILE",
        help="SentencePiece .model, TikTokenizer's .json, or for HuggingFaceTokenizer a folder or a hub's name",
    )
    add("--vocab-size", type=int, metavar="N", help=vocab_size_help)
    add("--tiktoken-pattern", choices=("v1", "v2"), help="how TikTokenizer cuts words [v2]")
    add(
        "--tiktoken-num-special-tokens",
        type=int,
        default=TIKTOKEN_SPECIAL,
        metavar="N",
        help="TikTokenizer's ids below its first byte [%(default)s]",
    )
    add(
        "--tokenizer-special-tokens",
        "--tiktoken-special-tokens",
        nargs="+",
        metavar="TOKEN",
        help="names of TikTokenizer's first ids; tokens to add to HuggingFaceTokenizer",
    )
    add(
        "--tokenizer-hf-include-special-tokens",
        action="store_true",
        help="keep what a HuggingFaceTokenizer puts around each text, such as <s>",
    )
