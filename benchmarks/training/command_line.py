"""The benchmark's own flags."""

import argparse
from pathlib import Path

from benchmarks.training import bars
from benchmarks.training.contestants import YARDSTICKS, Contestant, contestants_of, missing_packages
from benchmarks.training.work import SIZES, VOCABULARIES, Work, check
from megatron_lite.errors import UserError

CONTESTANTS = {"cpu": ["ours", "ours@2", "plain", "plain@2", "hf"], "cuda": ["ours", "plain", "plain-compiled", "hf"]}
STEPS = {"cpu": (12, 3), "cuda": (40, 10)}  # and how many of them warm up


def parser(description: str) -> argparse.ArgumentParser:
    """All flags; what is None depends on the device."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--work", choices=sorted(VOCABULARIES), help="vocabulary of 256 bytes, or of 50,304 [byte; on a GPU bpe]")
    add("--precision", choices=("fp32", "bf16", "fp16"), help="[bf16; on a GPU fp16]")
    add("--device", choices=("cpu", "cuda"), help="[cuda where nvidia-smi shows a GPU]")
    add(
        "--contestants",
        nargs="*",
        metavar="KIND[@RANKS]",
        help=f"of ours, {', '.join(YARDSTICKS)} "
        f"[{' '.join(CONTESTANTS['cpu'])}; on a GPU {' '.join(CONTESTANTS['cuda'])}]",
    )
    add(
        "--ours",
        action="append",
        default=[],
        metavar='"NAME[@RANKS]: FLAGS"',
        help="one more of ours, with these flags of the trainer; may be repeated",
    )
    add(
        "--bars",
        action="store_true",
        help="also print ours over the faster of plain and plain-compiled, and over hf (on a GPU "
        "over each of plain and plain-compiled), beside the project's goals; these are then the contestants by default",
    )
    add("--rounds", type=int, default=3, help="runs of each contestant [%(default)s]")
    add("--steps", type=int, help="of each run [12; on a GPU 40]")
    add("--warm-up", type=int, help="steps at a run's start that do not count [3; on a GPU 10]")
    add("--minutes", type=float, default=30, help="start nothing that would end later [%(default)s]")
    add("--threads", type=int, help="of all ranks of a contestant together [cores]")
    add("--text", type=Path, metavar="FILE", help="what to train on [Python's own sources]")
    add("--vocab-file", type=Path, metavar="FILE", help="GPT-2's vocab.json, for --work bpe")
    add("--merge-file", type=Path, metavar="FILE", help="and its merges.txt")
    add("--out", type=Path, metavar="FILE", help="everything as JSON")
    add("--scratch", type=Path, metavar="FOLDER", help="where runs write for the time being")
    for name, kind in (*((name, type(value)) for name, value in SIZES["cpu"].items()), ("vocabulary", int)):
        add(f"--{name.replace('_', '-')}", type=kind, help=f"of the model or batch [{_defaults(name)}]")
    return made


def work_of(args: argparse.Namespace, device: str) -> tuple[Work, int]:
    """(what to train, steps that warm up). UserError for flags that do not go together."""
    kind = args.work or ("byte" if device == "cpu" else "bpe")
    given = {name: getattr(args, name) for name in SIZES[device] if getattr(args, name) is not None}
    steps, warm_up = (
        own if given_one is None else given_one for own, given_one in zip(STEPS[device], (args.steps, args.warm_up))
    )
    work = Work(
        device=device,
        precision=args.precision or ("bf16" if device == "cpu" else "fp16"),
        steps=steps,
        vocabulary=args.vocabulary or VOCABULARIES[kind],
        **{**SIZES[device], **given},
    )
    check(work)
    if bool(args.vocab_file) != bool(args.merge_file):
        raise UserError("--vocab-file and --merge-file belong together; give both or none")
    if args.vocab_file and kind == "byte":
        raise UserError("--vocab-file goes with --work bpe; give that, or leave it out")
    if args.rounds < 1:
        raise UserError(f"--rounds {args.rounds}: must be at least 1")
    if args.out and not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: there is no folder {args.out.parent}; make it first")
    if not 1 <= warm_up < steps:
        raise UserError(f"--warm-up {warm_up}: must be at least 1 and below --steps {steps}")
    return work, warm_up


def chosen(args: argparse.Namespace, work: Work, say) -> list[Contestant]:
    """Who competes. Without --contestants, one whose packages are missing is left out, with a word to `say`."""
    usual = bars.CONTESTANTS if args.bars else CONTESTANTS
    words = usual[work.device] if args.contestants is None else args.contestants
    found = []
    for one in contestants_of(words, args.ours):
        work.accumulation_of(one.ranks)
        if missing := missing_packages(one):
            text = f"{one.name} needs {' and '.join(missing)}: pip install {' '.join(missing)}"
            if args.contestants is not None:
                raise UserError(f"--contestants {text}, or leave it out")
            say(f"{text}; left out")
        else:
            found.append(one)
    if not found:
        raise UserError("--contestants: nobody is left to compete; name one, such as ours")
    return found


def _defaults(name: str) -> str:
    return "of --work" if name == "vocabulary" else f"{SIZES['cpu'][name]}; on a GPU {SIZES['cuda'][name]}"
