"""--help: every knob by group, and what becomes of Megatron-LM's other flags."""

import textwrap
from itertools import groupby

from megatron_lite.config.args import Args
from megatron_lite.config.flags import ABSENT, ACCEPTED, REFUSED, RESPELLED, RETIRED, Flag, find_texts, list_flags

HEAD = """\
usage: pretrain_gpt.py [--yaml-cfg FILE] FLAGS
       torchrun --nproc_per_node N pretrain_gpt.py FLAGS

Trains a GPT with Megatron-LM's flags. --yaml-cfg FILE holds the same names (with - or _), in groups or not;
the command line wins over it. Smallest run:
  pretrain_gpt.py --mock-data --vocab-size 256 --tokenizer-type NullTokenizer --num-layers 2 --hidden-size 64
    --num-attention-heads 2 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 4 --train-iters 20
    --lr 1e-3 --log-interval 5
Defaults stand in [brackets]; flags without a value are switches, off unless given. "(ours)" marks what
Megatron-LM does not have. Of a flag given twice the last one counts. All mistakes are reported together.
"""


def help_text(width: int = 110) -> str:
    """The whole help page."""
    parts = [HEAD]
    for title, flags in groupby(list_flags(Args), key=lambda flag: flag.group):
        parts.append(f"\n{title}\n" + "".join(_entry(flag, width) + "\n" for flag in flags))
    for title, answer in (
        ("Accepted without effect, said once at the start", ACCEPTED),
        ("Retired by Megatron-LM, accepted without effect", RETIRED),
        ("Refused", REFUSED),
    ):
        of_one_text = groupby(find_texts(answer).items(), key=lambda item: item[1])
        lines = (f"{', '.join(name for name, _ in flags)}: {text}." for text, flags in of_one_text)
        parts.append(f"\n{title}\n" + "".join(_wrapped("  ", line, width) + "\n" for line in lines))
    absent = f"And {len(find_texts(ABSENT))} more flags of Megatron-LM, each of which is answered by name."
    parts.append(_wrapped("  ", absent, width) + "\n")
    lines = (f"{old} = {new}" for old, new in find_texts(RESPELLED).items())
    parts.append("\nOld spellings\n" + "".join(_wrapped("  ", line, width) + "\n" for line in lines))
    return "".join(parts).rstrip("\n")


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
        values = "{" + ",".join(flag.choices) + "}"
        return f" [{values}]" if flag.as_switch else f" {values}"
    return " " + (flag.value or {int: "N", float: "X", str: "TEXT"}[flag.kind])


def _default(flag: Flag) -> str:
    if flag.is_switch or flag.default is None or flag.default == ():
        return ""
    shown = flag.default if flag.many else (flag.default,)
    return f" [{' '.join(str(int(x)) if isinstance(x, float) and x > 1 else str(x) for x in shown)}]"


def _wrapped(first: str, text: str, width: int) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * (len(first) if len(first) > 4 else 6),
        break_long_words=False,
        break_on_hyphens=False,
    )
