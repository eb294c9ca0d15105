"""Who competes, and the command line of each."""

import importlib.util
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.training.work import Work
from megatron_lite.errors import UserError
from megatron_lite.process_state import GROW_BY_BYTES, KEEP_BYTES

REPO = Path(__file__).resolve().parents[2]
OURS = "ours"
# steps, linear from 0: at a constant rate AdamW's first steps now and then make the loss of this model jump
LR_WARM_UP = 100
STEP_FILE = "steps.jsonl"  # of a yardstick
PLAIN = "benchmarks.yardsticks.plain_loop"
# what process_state.keep_freed_memory sets by itself, in the variables of glibc's mallopt(3)
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(KEEP_BYTES),
    "MALLOC_TOP_PAD_": str(GROW_BY_BYTES),
}


@dataclass(frozen=True)
class Yardstick:
    """A module to start, with flags and variables of its own."""

    module: str
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


YARDSTICKS = {
    "plain": Yardstick(PLAIN),
    "plain-compiled": Yardstick(PLAIN, ("--compile",)),
    "plain-erf": Yardstick(PLAIN, ("--gelu", "none")),
    "plain-malloc": Yardstick(PLAIN, environment=KEEP_FREED_MEMORY),
    "plain-compiled-malloc": Yardstick(PLAIN, ("--compile",), KEEP_FREED_MEMORY),
    "hf": Yardstick("benchmarks.yardsticks.hugging_face_trainer"),
}
NEEDED = {"hf": ("transformers", "accelerate")}


@dataclass(frozen=True)
class Contestant:
    """One way to train. `kind`: ours, or a yardstick's name."""

    kind: str
    ranks: int
    name: str
    flags: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        return self.kind == OURS

    @property
    def environment(self) -> dict[str, str]:
        """Variables that it needs besides everyone's."""
        return {} if self.is_ours else YARDSTICKS[self.kind].environment


def contestants_of(words: list[str], variants: list[str]) -> list[Contestant]:
    """From --contestants (KIND or KIND@RANKS) and --ours ("NAME: FLAGS" or "NAME@RANKS: FLAGS"), ours first."""
    kinds = [OURS, *YARDSTICKS]
    found = []
    for word in words:
        kind, ranks = _name_and_ranks(word, "--contestants")
        if kind not in kinds:
            raise UserError(f"--contestants {word}: no such contestant; there are {', '.join(kinds)}, each with @RANKS")
        found.append(Contestant(kind, ranks, word))
    for variant in variants:
        name, colon, flags = variant.partition(":")
        if not colon or not name.strip():
            raise UserError(f"--ours {variant!r}: needs a name before the flags, such as 'compiled: --torch-compile'")
        _, ranks = _name_and_ranks(name.strip(), "--ours")
        found.append(Contestant(OURS, ranks, name.strip(), tuple(shlex.split(flags))))
    names = [one.name for one in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"two contestants are called {min(twice)}; give each variant of --ours a name of its own")
    return sorted(found, key=lambda one: not one.is_ours)


def missing_packages(contestant: Contestant) -> list[str]:
    """Those that it needs and this Python has not."""
    return [name for name in NEEDED.get(contestant.kind, ()) if importlib.util.find_spec(name) is None]


def command(contestant: Contestant, work: Work, tokens: Path, folder: Path) -> list[str]:
    """What to start in the repository; it writes its figures into `folder`."""
    if contestant.is_ours:
        return [*_launcher(contestant.ranks), "pretrain_gpt.py", *_our_flags(work, tokens, folder), *contestant.flags]
    yardstick = YARDSTICKS[contestant.kind]
    task = _yardstick_flags(work, contestant.ranks, tokens, folder)
    return [*_launcher(contestant.ranks), "-m", yardstick.module, *task, *yardstick.flags]


def _name_and_ranks(word: str, flag: str) -> tuple[str, int]:
    name, at, ranks = word.partition("@")
    if at and not (ranks.isdecimal() and int(ranks)):
        raise UserError(f"{flag} {word}: @{ranks} is no number of ranks; such as {name}@2")
    return name, int(ranks or 1)


def _launcher(ranks: int) -> list[str]:
    # Alone without torchrun, all alike: it would add seconds to the first step.
    return (
        [sys.executable]
        if ranks == 1
        else [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    )


def _our_flags(work: Work, tokens: Path, folder: Path) -> list[str]:
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
    flags = [str(word) for pair in values.items() for word in pair]
    return flags if work.precision == "fp32" else [*flags, f"--{work.precision}"]


def _yardstick_flags(work: Work, ranks: int, tokens: Path, folder: Path) -> list[str]:
    values = {
        "--layers": work.layers,
        "--hidden": work.hidden,
        "--heads": work.heads,
        "--sequence": work.sequence,
        "--vocabulary": work.vocabulary,
        "--micro-batch": work.micro_batch,
        "--accumulation": work.accumulation_of(ranks),
        "--steps": work.steps,
        "--lr": work.lr,
        "--lr-warm-up": LR_WARM_UP,
        "--precision": work.precision,
        "--tokens": f"{tokens}.bin",
        "--token-type": work.token_type,
        "--step-file": folder / STEP_FILE,
        "--device": work.device,
    }
    return [str(word) for pair in values.items() for word in pair]
