"""The text of --help: every knob by group, and what becomes of Megatron-LM's other flags."""

import textwrap
from itertools import groupby

from megatron_lite.config.args import Args
from megatron_lite.config.flags import (
    ABSENT,
    ACCEPTED,
    REFUSED,
    RENAMED,
    RESPELLED,
    RETIRED,
    Flag,
    find_texts,
    list_flags,
)

HEAD = """\
usage: pretrain_gpt.py [--yaml-cfg FILE] FLAGS
       torchrun --nproc_per_node N pretrain_gpt.py FLAGS

Trains a GPT with Megatron-LM's flags. --yaml-cfg FILE holds the same names (with - or _), in groups or not;
the command line takes precedence. Smallest run:
  pretrain_gpt.py --mock-data --vocab-size 256 --tokenizer-type NullTokenizer --num-layers 2 --hidden-size 64
    --num-attention-heads 2 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 4 --train-iters 20
    --lr 1e-3 --log-interval 5
Defaults are in [brackets]; flags without a value are switches, off unless given. "(ours)" marks what
Megatron-LM does not have. Of a flag given twice the last one counts. All mistakes are reported together.
"""
TITLES = {
    ACCEPTED: "Accepted without effect, with one note at the start",
    RETIRED: "Retired by Megatron-LM, which takes them no more",
    REFUSED: "Refused",
}


def help_text(width: int = 110) -> str:
    """The whole help page."""
    lines = [HEAD]
    for title, flags in groupby(list_flags(Args), key=lambda flag: flag.group):
        lines += [title, *(_describe(flag, width) for flag in flags), ""]
    for answer, title in TITLES.items():
        of_one_text = groupby(find_texts(answer).items(), key=lambda item: item[1])
        texts = [f"{', '.join(name for name, _ in flags)}: {text}." for text, flags in of_one_text]
        lines += [title, *(_wrap("  ", text, width) for text in texts), ""]
    absent = f"And {len(find_texts(ABSENT))} more flags of Megatron-LM, each of which is answered by name."
    lines[-1:] = [_wrap("  ", absent, width), "", "Old spellings"]
    lines += [_wrap("  ", f"{old} = {new}", width) for old, new in find_texts(RESPELLED).items()]
    lines += ["", "Renamed by Megatron-LM, which takes the old name no more"]
    lines += [_wrap("  ", f"{old}: {new}", width) for old, new in find_texts(RENAMED).items()]
    return "\n".join(lines)


def describe_value(flag: Flag) -> str:
    """Name the value of a flag as help shows it; "" for a switch."""
    if flag.choices:
        values = "{" + ",".join(flag.choices) + "}"
        return f"[{values}]" if flag.as_switch else values
    return "" if flag.is_switch else flag.value or {int: "N", float: "X", str: "TEXT"}[flag.kind]


def describe_default(flag: Flag) -> str:
    """Spell the default of a flag as a command line has it; "" for a switch and where nothing is set."""
    if flag.is_switch or flag.default in (None, (), ""):
        return ""
    values = flag.default if flag.many else (flag.default,)
    shown = []
    for value in values:
        is_large = isinstance(value, float) and value > 1
        shown.append(str(int(value) if is_large else value))
    return " ".join(shown)


def _describe(flag: Flag, width: int) -> str:
    head = f"  {', '.join(flag.spellings)} {describe_value(flag)}".rstrip()
    default = describe_default(flag)
    text = flag.help + (f" [{default}]" if default else "")
    if len(head) < 36:
        return _wrap(f"{head:<38}", text, width)
    return head + "\n" + _wrap(" " * 38, text, width)


def _wrap(first: str, text: str, width: int) -> str:
    indent = " " * (len(first) if len(first) > 4 else 6)
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
