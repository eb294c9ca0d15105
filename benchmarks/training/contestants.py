"""Who competes, the command line of each, and the benchmark's own flags."""

import argparse
import importlib.util
import pickle
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.training.work import SIZES, VOCABULARIES, Work
from megatron_lite.errors import UserError
from megatron_lite.process_state import GROW_BY_BYTES, KEEP_BYTES

REPO = Path(__file__).resolve().parents[2]
OURS, HUGGING_FACE = "ours", "hf"
# steps, linear from 0: at a constant rate AdamW's first steps now and then make the loss of this model jump
LR_WARM_UP = 100
STEP_FILE = "steps.jsonl"  # of ours and of Hugging Face's
# what process_state.keep_freed_memory sets by itself, in the variables of glibc's mallopt(3)
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(KEEP_BYTES),
    "MALLOC_TOP_PAD_": str(GROW_BY_BYTES),
}
NANOGPT = {"nanogpt": {}, "nanogpt-compiled": {}, "nanogpt-malloc": KEEP_FREED_MEMORY}  # and their variables
CONTESTANTS = {"cpu": ["ours", "ours@2", *NANOGPT, "hf"], "cuda": ["ours", "nanogpt", "nanogpt-compiled", "hf"]}
STEPS = {"cpu": (12, 3), "cuda": (40, 10)}  # and how many of them warm up
NEEDED = {HUGGING_FACE: ("transformers", "accelerate")}


@dataclass(frozen=True)
class Contestant:
    """One way to train. `kind`: ours, hf, or one of NANOGPT."""

    kind: str
    ranks: int
    name: str
    flags: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        return self.kind == OURS


def parse_contestants(words: list[str], variants: list[str]) -> list[Contestant]:
    """From --contestants (KIND or KIND@RANKS) and --ours ("NAME: FLAGS" or "NAME@RANKS: FLAGS"), ours first."""

    def split_ranks(word: str, flag: str) -> tuple[str, int]:
        name, at, ranks = word.partition("@")
        if at and not (ranks.isdecimal() and int(ranks)):
            raise UserError(f"{flag} {word}: @{ranks} is no number of ranks; such as {name}@2")
        return name, int(ranks or 1)

    kinds, found = [OURS, *NANOGPT, HUGGING_FACE], []
    for word in words:
        kind, ranks = split_ranks(word, "--contestants")
        if kind not in kinds:
            raise UserError(f"--contestants {word}: no such contestant; there are {', '.join(kinds)}, each with @RANKS")
        found.append(Contestant(kind, ranks, word))
    for variant in variants:
        name, colon, flags = variant.partition(":")
        if not colon or not name.strip():
            raise UserError(f"--ours {variant!r}: needs a name before the flags, such as 'compiled: --torch-compile'")
        _, ranks = split_ranks(name.strip(), "--ours")
        found.append(Contestant(OURS, ranks, name.strip(), tuple(shlex.split(flags))))
    names = [one.name for one in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"two contestants are called {min(twice)}; give each variant of --ours a name of its own")
    return sorted(found, key=lambda one: not one.is_ours)


def build_command(
    contestant: Contestant, work: Work, tokens: Path, folder: Path, nanogpt: Path | None
) -> tuple[list[str], Path]:
    """What to start, and in which folder; it writes its figures into `folder`, or nanoGPT to the console."""
    ranks = contestant.ranks
    # alone without torchrun, all alike: it would add seconds to the first step
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    start = [sys.executable, *torchrun]
    if contestant.kind in NANOGPT:
        write_nanogpt_folder(contestant, work, tokens, folder, nanogpt)
        return [*start, str(nanogpt / "train.py"), "config.py"], folder
    if contestant.is_ours:
        values, module = _our_flags(work, tokens, folder), ["pretrain_gpt.py"]
        last = [*([] if work.precision == "fp32" else [f"--{work.precision}"]), *contestant.flags]
    else:
        values, module = (
            _hugging_face_flags(work, ranks, tokens, folder),
            ["-m", "benchmarks.yardsticks.hugging_face_trainer"],
        )
        last = []
    return [*start, *module, *(str(word) for pair in values.items() for word in pair), *last], REPO


def write_nanogpt_folder(contestant: Contestant, work: Work, tokens: Path, folder: Path, nanogpt: Path):
    """What nanoGPT's train.py, unchanged, looks for in the folder where it is started: its configurator, data, a config."""
    (folder / "configurator.py").symlink_to(nanogpt / "configurator.py")
    data = folder / "data" / "tokens"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        (data / f"{split}.bin").symlink_to(f"{tokens}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": work.vocabulary}))
    values = {
        "dataset": "tokens",
        "n_layer": work.layers,
        "n_embd": work.hidden,
        "n_head": work.heads,
        "block_size": work.sequence,
        "bias": True,
        "batch_size": work.micro_batch,
        "gradient_accumulation_steps": work.accumulation,  # of all ranks
        "max_iters": work.steps - 1,  # it counts from 0
        "learning_rate": work.lr,
        "min_lr": work.lr,
        "warmup_iters": LR_WARM_UP,
        "eval_interval": work.steps,
        "eval_iters": 1,  # before the first step, which it always does
        "always_save_checkpoint": False,
        "device": work.device,
        "dtype": {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[work.precision],
        "compile": contestant.kind == "nanogpt-compiled",
    }
    lines = [f"{name} = {value!r}" for name, value in values.items()]
    if work.device == "cpu" and work.precision == "bf16":  # train.py takes this context on CPUs, whatever dtype says
        lines.append("nullcontext = lambda: torch.autocast('cpu', torch.bfloat16)")
    (folder / "config.py").write_text("\n".join(lines) + "\n")


def _our_flags(work: Work, tokens: Path, folder: Path) -> dict[str, object]:
    """The task in Megatron's flags; all else stays at the trainer's defaults."""
    values = {
        "--num-layers": work.layers,
        "--hidden-size": work.hidden,
        "--num-attention-heads": work.heads,
        "--seq-length": work.sequence,
        "--max-position-embeddings": work.sequence,
        "--hidden-dropout": 0,
        "--attention-dropout": 0,
        "--micro-batch-size": work.micro_batch,
        "--global-batch-size": work.global_batch,
        "--train-iters": work.steps,
        "--lr": work.lr,
        "--lr-decay-style": "constant",
        "--lr-warmup-iters": LR_WARM_UP,
        "--lr-decay-iters": work.steps + LR_WARM_UP,
        "--weight-decay": 0.1,
        "--adam-beta1": 0.9,
        "--adam-beta2": 0.95,
        "--clip-grad": 1.0,
        "--data-path": tokens,
        "--split": "1,0,0",
        "--eval-iters": 0,
        # NullTokenizer adds one id of its own, the end of a document
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": work.vocabulary - 1,
        "--run-dir": folder,
    }
    if work.precision == "fp16":
        values["--initial-loss-scale"] = 2**16  # GradScaler's; Megatron's 2**32 would skip 16 steps
    return values


def _hugging_face_flags(work: Work, ranks: int, tokens: Path, folder: Path) -> dict[str, object]:
    alike = ("layers", "hidden", "heads", "sequence", "vocabulary", "micro_batch", "steps", "lr", "precision", "device")
    return {f"--{name.replace('_', '-')}": getattr(work, name) for name in alike} | {
        "--accumulation": work.accumulation_of(ranks),
        "--lr-warm-up": LR_WARM_UP,
        "--tokens": f"{tokens}.bin",
        "--token-type": "uint16" if work.vocabulary < 65_500 else "int32",  # of token files of this vocabulary
        "--step-file": folder / STEP_FILE,
    }


# --- the benchmark's own flags


def build_parser(description: str) -> argparse.ArgumentParser:
    """All flags; what is None depends on the device."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--work", choices=sorted(VOCABULARIES), help="vocabulary of 256 bytes, or of 50,304 [byte; on a GPU bpe]")
    add("--precision", choices=("fp32", "bf16", "fp16"), help="[bf16; on a GPU fp16]")
    add("--device", choices=("cpu", "cuda"), help="[cuda where nvidia-smi shows a GPU]")
    usual = f"{' '.join(CONTESTANTS['cpu'])}; on a GPU {' '.join(CONTESTANTS['cuda'])}"
    add(
        "--contestants",
        nargs="*",
        metavar="KIND[@RANKS]",
        help=f"of ours, {', '.join(NANOGPT)}, {HUGGING_FACE} [{usual}]",
    )
    more = "one more of ours, with these flags of the trainer; may be repeated"
    add("--ours", action="append", default=[], metavar='"NAME[@RANKS]: FLAGS"', help=more)
    add("--rounds", type=int, default=3, help="runs of each contestant [%(default)s]")
    add("--steps", type=int, help="of each run [12; on a GPU 40]")
    add("--warm-up", type=int, help="steps at a run's start that do not count [3; on a GPU 10]")
    add("--minutes", type=float, default=30, help="start nothing that would end later [%(default)s]")
    add("--threads", type=int, help="of all ranks of a contestant together [cores]")
    add("--text", type=Path, metavar="FILE", help="what to train on [Python's own sources]")
    add("--vocab-file", type=Path, metavar="FILE", help="GPT-2's vocab.json, for --work bpe")
    add("--merge-file", type=Path, metavar="FILE", help="and its merges.txt")
    add("--nanogpt", type=Path, metavar="FOLDER", help="a clone of https://github.com/karpathy/nanoGPT")
    chart = "the loss of each step of every contestant, as a page"
    add("--chart", type=Path, metavar="FILE.html", help=chart)
    add("--out", type=Path, metavar="FILE", help="everything as JSON")
    add("--scratch", type=Path, metavar="FOLDER", help="where runs write for the time being")
    for name, value in SIZES["cpu"].items():
        usual = f"{value}; on a GPU {SIZES['cuda'][name]}"
        add(f"--{name.replace('_', '-')}", type=type(value), help=f"of the model or batch [{usual}]")
    add("--vocabulary", type=int, help="of the model or batch [of --work]")
    return made


def choose_work(args: argparse.Namespace, device: str) -> tuple[Work, int]:
    """(what to train, steps that warm up). UserError for flags that do not go together."""
    kind = args.work or ("byte" if device == "cpu" else "bpe")
    given = {name: getattr(args, name) for name in SIZES[device] if getattr(args, name) is not None}
    steps = STEPS[device][0] if args.steps is None else args.steps
    warm_up = STEPS[device][1] if args.warm_up is None else args.warm_up
    work = Work(
        device=device,
        precision=args.precision or ("bf16" if device == "cpu" else "fp16"),
        steps=steps,
        vocabulary=args.vocabulary or VOCABULARIES[kind],
        **{**SIZES[device], **given},
    )
    if bool(args.vocab_file) != bool(args.merge_file):
        raise UserError("--vocab-file and --merge-file belong together; give both or none")
    if args.vocab_file and kind == "byte":
        raise UserError("--vocab-file goes with --work bpe; give that, or leave it out")
    if args.rounds < 1:
        raise UserError(f"--rounds {args.rounds}: must be at least 1")
    for flag, file in (("--out", args.out), ("--chart", args.chart)):
        if file and not file.parent.is_dir():
            raise UserError(f"{flag} {file}: there is no folder {file.parent}; make it first")
    if args.nanogpt and not (args.nanogpt / "train.py").is_file():
        raise UserError(f"--nanogpt {args.nanogpt}: has no train.py; git clone https://github.com/karpathy/nanoGPT")
    if not 1 <= warm_up < steps:
        raise UserError(f"--warm-up {warm_up}: must be at least 1 and below --steps {steps}")
    return work, warm_up


def choose_contestants(args: argparse.Namespace, work: Work, say: Callable[[str], None]) -> list[Contestant]:
    """Who competes. Without --contestants, one that lacks a package or nanoGPT is left out, with a word to `say`."""
    found = []
    for one in parse_contestants(CONTESTANTS[work.device] if args.contestants is None else args.contestants, args.ours):
        work.accumulation_of(one.ranks)
        if one.kind in NANOGPT and one.ranks > 1 and work.device == "cpu":
            raise UserError(f"--contestants {one.name}: nanoGPT's train.py has ranks on GPUs only; take {one.kind}")
        missing = [name for name in NEEDED.get(one.kind, ()) if importlib.util.find_spec(name) is None]
        if missing:
            text = f"{one.name} needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        elif one.kind in NANOGPT and args.nanogpt is None:
            text = f"{one.name} needs --nanogpt FOLDER: git clone https://github.com/karpathy/nanoGPT"
        else:
            found.append(one)
            continue
        if args.contestants is not None:
            raise UserError(f"--contestants {text}, or leave it out")
        say(f"{text}; left out")
    if not found:
        raise UserError("--contestants: nobody is left to compete; name one, such as ours")
    return found
