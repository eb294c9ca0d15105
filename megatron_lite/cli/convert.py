"""`megatron-lite convert` turns checkpoints of this trainer and of Megatron-LM into Hugging Face folders, and back."""

import argparse
import shlex
import time
from pathlib import Path

from megatron_lite.cli.parser import Parser
from megatron_lite.config.flags import dashed
from megatron_lite.config.model_size import count_parameters
from megatron_lite.config.shape import ModelShape
from megatron_lite.errors import UserError
from megatron_lite.live_line import LiveLine, say
from megatron_lite.run_folder import RELEASE
from megatron_lite.terminal import print_lines
from megatron_lite.units import duration, short_count

PRECISIONS = ("fp32", "fp16", "bf16")
DIVISIBLE_BY = 128  # Megatron's default
MEANING = {  # flags that concern one direction only: (what must be given, too, and what they are about)
    "ckpt_step": ("load", "which checkpoint to read"),
    "vocab_file": ("save_hf", "the tokenizer's files"),
    "merge_file": ("save_hf", "the tokenizer's files"),
    "tokenizer_model": ("save_hf", "the tokenizer's files"),
    "true_vocab_size": ("save_hf", "the ids that are kept"),
    "make_vocab_size_divisible_by": ("load_hf", "the padding of its vocabulary"),
}


def run(argv: list[str]) -> None:
    """Convert as `argv` says and print what was written. UserError for a mistake."""
    options = _parser().parse_args(argv)
    _check(options)
    started = time.monotonic()
    if options.save_hf:
        lines = _to_hugging_face(options)
    elif options.load_hf:
        lines = _from_hugging_face(options)
    else:
        from megatron_lite.convert.folders import to_own_format

        record, folder = to_own_format(Path(options.load), options.ckpt_step, Path(options.save), say)
        held = f"with the state of {record.optimizer}" if record.optimizer else "without an optimizer (--no-load-optim)"
        weights = f"{_parameters(record.model_shape)} in {record.precision}"
        lines = [f"iteration {record.iteration} of {options.load}, {weights}, {held}: {folder}"]
    lines[0] += f" in {duration(time.monotonic() - started)}"
    print_lines(lines)


def _parser() -> Parser:
    """Build the command's parser."""
    parser = Parser(
        "convert",
        "Converts checkpoints to Hugging Face folders and back, and Megatron-LM's torch files to "
        "this trainer's format.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--load", metavar="FOLDER", help="what --save of this trainer, or of Megatron-LM, wrote to")
    source.add_argument(
        "--load-hf",
        metavar="FOLDER",
        help="a GPT-2, Llama, Mistral, Mixtral, Qwen or DeepSeek for causal language modelling",
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--save", metavar="FOLDER", help="a new folder that --load of this trainer takes")
    target.add_argument("--save-hf", metavar="FOLDER", help="a new folder that from_pretrained takes")
    add = parser.add_argument
    dtype_help = "of the written weights; other than the run's: made of its fp32 masters [that of the source]"
    vocab_help = "ids without padding, for --save-hf [the checkpoint's, else the tokenizer's, else all rows]"
    divisor_help = f"pad the vocabulary to a multiple of N, for --load-hf [{DIVISIBLE_BY}]"
    add("--ckpt-step", type=int, metavar="N", help="the checkpoint of iteration N [the newest]")
    add("--dtype", choices=PRECISIONS, help=dtype_help)
    add("--vocab-file", metavar="FILE", help="GPT-2 style vocab.json, for --save-hf")
    add("--merge-file", metavar="FILE", help="GPT-2 style merges.txt, for --save-hf")
    add(
        "--tokenizer-model",
        metavar="FOLDER",
        help="a tokenizer in Hugging Face's form, for --save-hf",
    )
    add("--true-vocab-size", type=int, metavar="N", help=vocab_help)
    add("--make-vocab-size-divisible-by", type=int, metavar="N", help=divisor_help)
    return parser


def _check(options: argparse.Namespace) -> None:
    """UserError for flags that exclude each other, or that concern another direction."""
    if options.load_hf and options.save_hf:
        raise UserError(f"--save-hf {options.save_hf}: --load-hf is a Hugging Face folder already; give --save.")
    for name, (needed, what) in MEANING.items():
        value = getattr(options, name)
        flag = dashed(name)
        if value is not None and getattr(options, needed) is None:
            raise UserError(f"{flag} {value}: concerns {what}, with {dashed(needed)} only; leave it out.")
        if name in ("make_vocab_size_divisible_by", "true_vocab_size") and value is not None and value < 1:
            raise UserError(f"{flag} {value}: must be at least 1; give that, or leave it out.")
    if options.dtype and options.load and options.save:
        raise UserError(f"--dtype {options.dtype}: a checkpoint keeps the precision of its run; leave it out.")
    if options.tokenizer_model and (options.vocab_file or options.merge_file):
        model = f"--tokenizer-model {options.tokenizer_model}"
        raise UserError(f"{model}: excludes --vocab-file and --merge-file; keep one.")


def _to_hugging_face(options: argparse.Namespace) -> list[str]:
    """Write --load as --save-hf. Returns lines that say what was written."""
    from megatron_lite.checkpoint.find import open_newest
    from megatron_lite.convert import tokenizer_files
    from megatron_lite.convert.folders import Export, require_new, to_hugging_face

    if options.tokenizer_model:
        tokenizer = tokenizer_files.describe_copied_tokenizer(options.tokenizer_model)
    elif options.vocab_file or options.merge_file:
        tokenizer = tokenizer_files.describe_gpt2_tokenizer(options.vocab_file, options.merge_file)
    else:
        tokenizer = tokenizer_files.describe_no_tokenizer()
        say("  no tokenizer: --vocab-file and --merge-file, or --tokenizer-model, would put it into the folder")
    load = Path(options.load)
    save_hf = Path(options.save_hf)
    line = LiveLine()
    require_new("--save-hf", save_hf)
    stored = open_newest(load, options.ckpt_step, say)
    precision = options.dtype or stored.record.precision

    def show_progress(done: int, total: int) -> None:
        line.draw(f"{done} of {total} tensors")

    try:
        export = Export(load, stored, precision, tokenizer, options.true_vocab_size, say, show_progress)
        to_hugging_face(export, save_hf)
    finally:
        line.wipe()
    held = f"{_parameters(stored.record.model_shape)} in {precision}"
    return [f"iteration {stored.record.iteration} of {options.load}, {held}: {options.save_hf}"]


def _from_hugging_face(options: argparse.Namespace) -> list[str]:
    """Write --load-hf as --save. Returns lines that say what was written, and the flags that train it on."""
    from megatron_lite.convert.families import model_flags
    from megatron_lite.convert.folders import from_hugging_face
    from megatron_lite.convert.tokenizer_files import training_flags

    source = Path(options.load_hf)
    save = Path(options.save)
    divisor = options.make_vocab_size_divisible_by
    if divisor is None:
        divisor = DIVISIBLE_BY
    record = from_hugging_face(source, save, divisor, options.dtype)
    shape = record.model_shape
    precision = [] if record.precision == "fp32" else [f"--{record.precision}"]
    words = [
        *model_flags(shape),
        *precision,
        *training_flags(source),
        "--load",
        options.save,
        "--finetune",
    ]
    held = f"{_parameters(shape)} in {record.precision}, {record.vocab_size} ids"
    return [
        f"{options.load_hf}, {held}: {save / RELEASE}",
        "to train on: fresh moments (--finetune), and --seq-length may be smaller",
        shlex.join(words),
    ]


def _parameters(shape: ModelShape) -> str:
    """The number of a model's parameters, in short."""
    return f"{short_count(count_parameters(shape))} parameters"
