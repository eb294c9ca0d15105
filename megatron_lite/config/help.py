"""--help: every knob by group, and what becomes of Megatron-LM's other flags."""

import textwrap
from itertools import groupby

from megatron_lite.config.args import Args
from megatron_lite.config.flags import Flag, flags_of
from megatron_lite.config.megatron import ACCEPTED, REFUSED, RESPELLED, RETIRED

HEAD = """\
usage: pretrain_gpt.py [--yaml-cfg FILE] FLAGS
       torchrun --nproc_per_node N pretrain_gpt.py FLAGS

Trains a GPT with Megatron-LM's flags. --yaml-cfg FILE holds the same names (with - or _), in groups or not;
the command line wins over it. Smallest run:
  pretrain_gpt.py --mock-data --vocab-size 256 --tokenizer-type NullTokenizer --num-layers 2 --hidden-size 64
    --num-attention-heads 2 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 4 --train-iters 20
    --lr 1e-3 --log-interval 5
"""


def help_text(width: int = 110) -> str:
    """The whole help page."""
    parts = [HEAD]
    for title, flags in groupby(flags_of(Args), key=lambda flag: flag.group):
        parts.append(f"\n{title}\n" + "\n".join(_entry(flag, width) for flag in flags))
    for title, families in (("Accepted without effect", (*ACCEPTED, *RETIRED)), ("Refused", REFUSED)):
        lines = (f"{', '.join(family.flags)}: {family.answer}." for family in families)
        parts.append(f"\n\n{title}\n" + "\n".join(_wrapped("  ", line, width) for line in lines))
    parts.append("\n\nOld spellings\n" + "\n".join(f"  {old} -> {' '.join(new)}" for old, new in RESPELLED.items()))
    return "".join(parts) + "\n"


def _entry(flag: Flag, width: int) -> str:
    head = f"  {', '.join(flag.spellings)}{_value_name(flag)}"
    tail = f"{flag.help}{_default(flag)}"
    if len(head) < 36:
        return _wrapped(f"{head:<38}", tail, width)
    return head + "\n" + _wrapped(" " * 38, tail, width)


def _value_name(flag: Flag) -> str:
    if flag.is_switch:
        return ""
    if flag.choices:
        return " {" + ",".join(flag.choices) + "}"
    name = {int: "N", float: "X", str: "TEXT"}[flag.kind]
    return f" {name} ..." if flag.many else f" {name}"


def _default(flag: Flag) -> str:
    if flag.is_switch or flag.default is None or flag.default == ():
        return ""
    shown = " ".join(map(str, flag.default)) if flag.many else flag.default
    return f" [{shown}]"


def _wrapped(first: str, text: str, width: int) -> str:
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=" " * (len(first) if len(first) > 4 else 6))
