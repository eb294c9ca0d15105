"""`megatron-lite generate` writes text with a trained model."""

import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from megatron_lite.cli.parser import Parser
from megatron_lite.config.data_paths import TOKENIZERS
from megatron_lite.config.shape import ModelShape
from megatron_lite.data.tokenizers import DEFAULTS, Tokenizer, build_tokenizer
from megatron_lite.errors import UserError
from megatron_lite.terminal import print_lines, print_text
from megatron_lite.units import size

UNFINISHED = "\ufffd"  # a letter of which bytes are missing
OF_TOKENIZERS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size")


def run(argv: list[str]) -> None:
    """Print each prompt and its continuation. UserError for a mistake."""
    options = _parse(argv)
    # torch takes seconds to import: not for --help and mistakes
    from megatron_lite.generate import Sampling, choose_device, generate, load_generator

    device = choose_device(options.cpu)
    load = Path(options.load_hf or options.load)
    model, record, flags = load_generator(load, bool(options.load_hf), options.ckpt_step, device, _note)
    if options.load_hf:
        flags = _read_tokenizer_flags(load)
    tokenizer = _open_tokenizer(options, flags)
    vocab_size = min(record.vocab_size or tokenizer.vocab_size, model.shape.padded_vocab_size)
    prompts = _encode_prompts(options.prompt, tokenizer, vocab_size)
    _check_length(prompts, options.max_new_tokens, model.shape)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    printer = _Printer(options.prompt, tokenizer)
    printer.begin()
    found = generate(
        model,
        prompts,
        options.max_new_tokens,
        sampling,
        vocab_size,
        tokenizer.eod,
        printer.print_so_far,
    )
    printer.finish(found.continuations)
    prefill = _describe_rate("prefill", found.prefill_tokens, found.prefill_s)
    decode = _describe_rate("decode", found.decode_tokens, found.decode_s)
    cache = f"KV cache {size(found.cache_bytes)}: {len(prompts)} x {found.cache_tokens:,} tokens"
    _note(f"{prefill}, {decode}, {cache}, on the {device}")


def _read_tokenizer_flags(folder: Path) -> dict[str, object]:
    """Read the flags that name the tokenizer of a Hugging Face folder, with their values."""
    from megatron_lite.convert.tokenizer_files import training_flags

    words = training_flags(folder)
    names = [word.removeprefix("--").replace("-", "_") for word in words[::2]]
    return dict(zip(names, words[1::2]))


def _encode_prompts(texts: list[str], tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """Token ids of each prompt; an empty one begins with the end-of-text token. UserError where the model lacks an
    id."""
    prompts = []
    for text in texts:
        ids = tokenizer.encode(text)
        if not ids:
            ids = [_get_first_token(tokenizer)]
        prompts.append(ids)
    if max(max(ids) for ids in prompts) >= vocab_size:
        raise UserError(
            f"--prompt: has ids of {vocab_size} and above, which the model does not know; check the tokenizer."
        )
    return prompts


def _get_first_token(tokenizer: Tokenizer) -> int:
    """The end-of-text token, with which an empty prompt begins. UserError where the tokenizer has none."""
    if tokenizer.eod is None:
        raise UserError("--prompt: is empty, and the tokenizer has no end-of-text token to begin with; give a prompt.")
    return tokenizer.eod


def _check_length(prompts: list[list[int]], max_new_tokens: int, shape: ModelShape) -> None:
    """UserError where learned position embeddings end before the longest text does."""
    if shape.position_embedding != "learned_absolute":
        return
    longest = max(map(len, prompts))
    room = shape.max_position_embeddings - longest
    if max_new_tokens > room:
        why = f"with the prompt more than the model's {shape.max_position_embeddings} positions"
        raise UserError(f"--max-new-tokens {max_new_tokens}: {why}; give at most {max(room, 0)}.")


class _Printer:
    """Prints one continuation while it grows, and several, one after the other, when all are there."""

    def __init__(self, texts: list[str], tokenizer: Tokenizer):
        self._texts = texts
        self._tokenizer = tokenizer
        self._is_alone = len(texts) == 1
        self._shown = ""

    def begin(self) -> None:
        """Print a single prompt."""
        if self._is_alone:
            print_text(self._texts[0])

    def print_so_far(self, row: int, ids: list[int]) -> None:
        """Print what is new of a single continuation, but for a letter of which bytes are missing."""
        if not self._is_alone:
            return
        text = self._tokenizer.decode(ids)
        if not text.endswith(UNFINISHED):
            print_text(text[len(self._shown) :])
            self._shown = text

    def finish(self, continuations: list[list[int]]) -> None:
        """Print the rest of a single continuation, or all prompts with their continuations."""
        if self._is_alone:
            whole = self._tokenizer.decode(continuations[0])
            print_text(whole[len(self._shown) :] + "\n")
            return
        for text, ids in zip(self._texts, continuations):
            print_text(f"{text}{self._tokenizer.decode(ids)}\n\n")


def _describe_rate(what: str, tokens: int, seconds: float) -> str:
    return f"{what} {tokens:,} tokens at {tokens / max(seconds, 1e-9):,.0f} tokens/s"


def _parse(argv: list[str]) -> Namespace:
    parser = Parser("generate", "Continues prompts with a trained model, as text that appears token by token.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--load", metavar="FOLDER", help="what --save of this trainer, or of Megatron-LM, wrote to")
    models = "a GPT-2, Llama, Mistral, Mixtral, Qwen or DeepSeek of Hugging Face"
    source.add_argument("--load-hf", metavar="FOLDER", help=models)
    add = parser.add_argument
    add("--ckpt-step", type=int, metavar="N", help="the checkpoint of iteration N [the newest]")
    add(
        "--prompt",
        nargs="+",
        required=True,
        metavar="TEXT",
        help="what to go on with; several are continued together",
    )
    add("--max-new-tokens", type=int, default=100, metavar="N", help="of each continuation [100]")
    add(
        "--temperature",
        type=float,
        default=1.0,
        metavar="X",
        help="0: always the most probable token [1]",
    )
    add(
        "--top-k",
        type=int,
        default=0,
        metavar="N",
        help="draw of the N most probable only [0: of all]",
    )
    add(
        "--top-p",
        type=float,
        default=0.0,
        metavar="X",
        help="draw of the fewest whose probabilities reach X [0: of all]",
    )
    add(
        "--seed",
        type=int,
        default=1234,
        metavar="N",
        help="of the first prompt's draws; each further one has the next [1234]",
    )
    add("--cpu", action="store_true", help="compute on the CPU, whatever GPUs there are")
    add("--tokenizer-type", choices=TOKENIZERS, metavar="NAME", help="[that of the training]")
    add("--tokenizer-model", metavar="FILE", help="its file or folder, if not where it was")
    add("--vocab-file", metavar="FILE", help="the same of vocab.json")
    add("--merge-file", metavar="FILE", help="the same of merges.txt")
    add("--vocab-size", type=int, metavar="N", help="of NullTokenizer")
    options = parser.parse_args(argv)
    for name, least, most in (
        ("max_new_tokens", 1, 2**31), ("temperature", 0, 1e6), ("top_k", 0, 2**31), ("top_p", 0, 1)
    ):  # fmt: skip
        value = getattr(options, name)
        if not least <= value <= most:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least {least} and at most {most:,g}.")
    return options


def _open_tokenizer(options: Namespace, flags: Mapping[str, object]) -> Tokenizer:
    """Open the tokenizer that the command's own flags name, else the one that the model was trained with."""
    known = {name: flags[name] for name in DEFAULTS.keys() | {"tokenizer_type"} if flags.get(name) is not None}
    given = {name: value for name in OF_TOKENIZERS if (value := getattr(options, name)) is not None}
    if not known and not given:
        raise UserError("--tokenizer-type: missing, since the checkpoint does not name its tokenizer; give it.")
    return build_tokenizer(Namespace(**DEFAULTS | {"tokenizer_type": None} | known | given))


def _note(text: str) -> None:
    print_lines([text], sys.stderr)
