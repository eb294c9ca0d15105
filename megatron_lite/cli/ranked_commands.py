"""Reads launch commands of scripts of others: which script, on how many ranks, with which variables."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_lite.cli.batch_systems import Job, read_number, read_options
from megatron_lite.cli.launcher import count_ranks
from megatron_lite.errors import UserError

TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
ACCELERATE = ("accelerate", "accelerate-launch", "accelerate.commands.launch")
# options of Accelerate's launcher: the variable by which each reaches the script, and whether it has no value
ACCELERATE_VARIABLES = {
    "--cpu": ("ACCELERATE_USE_CPU", True),
    "--use-cpu": ("ACCELERATE_USE_CPU", True),
    "--mixed-precision": ("ACCELERATE_MIXED_PRECISION", False),
}
# others that only say where ranks run
ACCELERATE_PLACES = ("--num-processes", "--multi-gpu", "--main-process-port", "--num-cpu-threads-per-process")
PROGRAM_OF_PROOFS = "megatron-lite prove"


@dataclass(frozen=True)
class RankedCommand:
    """A script and how many ranks run it.

    Attributes:
        script: The words behind the interpreter: the script, or -m and a module, and its arguments.
        ranks: How many processes.
        environment: Variables of theirs.
    """

    script: tuple[str, ...]
    ranks: int
    environment: Mapping[str, str]

    def on(self, ranks: int) -> "RankedCommand":
        """The same script on another number of ranks.

        Args:
            ranks: How many.
        """
        return replace(self, ranks=ranks)

    def __str__(self) -> str:
        return f"{' '.join(self.script)} on {self.ranks} {'rank' if self.ranks == 1 else 'ranks'}"


def read_command(
    words: list[str], ranks: int | None, environment: Mapping[str, str], program: str = PROGRAM_OF_PROOFS
) -> RankedCommand:
    """Read the words of a launch command.

    Args:
        words: torchrun or python, with a script and its arguments.
        ranks: How many; None: as many as torchrun's options say.
        environment: Variables that the ranks get.
        program: The command of this package that is to run it, for messages.

    Raises:
        UserError: They do not say which script, or how many ranks, run.
    """
    begin = find_script(words)
    if begin is None:
        raise UserError(f"{program}: {' '.join(words)} names no script; give torchrun ... train.py.")
    before = words[:begin]
    if any(Path(word).name in ACCELERATE for word in before):
        return _read_accelerate(before, tuple(words[begin:]), ranks, environment, program)
    starts_one = not any(Path(word).name in TORCHRUN for word in before)
    counted = 1 if starts_one and ranks is None else ranks
    if counted is None:
        counted = count_ranks(before, Job()).size
    if counted is None:
        raise UserError(f"{program}: torchrun does not say how many ranks run; give --nproc-per-node N.")
    if counted < 1:
        raise UserError(f"--ranks {counted}: must be at least 1.")
    return RankedCommand(tuple(words[begin:]), counted, environment)


def _read_accelerate(
    before: list[str], script: tuple[str, ...], ranks: int | None, environment: Mapping[str, str], program: str
) -> RankedCommand:
    """Read the words of Accelerate's launcher, which gives its options to the script by variables."""
    options = read_options(before)
    counted = ranks or read_number(options, ("--num-processes",))
    known = (*ACCELERATE_VARIABLES, *ACCELERATE_PLACES)
    unknown = [name for name in options if name not in known and name != "-m"]
    if unknown or counted is None:
        said = "without --num_processes"
        if unknown:
            said = next(word for word in before if word.replace("_", "-").startswith(unknown[0]))
        number = counted or "N"
        raise UserError(
            f"{program}: accelerate launch {said} is not read; "
            f"give torchrun --nproc-per-node {number} {' '.join(script)}."
        )
    variables = dict(environment)
    for name in options:
        if name in ACCELERATE_VARIABLES:
            variable, is_switch = ACCELERATE_VARIABLES[name]
            variables[variable] = "true" if is_switch else options[name]
    words = ("-m", *script[1:]) if script[0] == "--module" else script
    return RankedCommand(words, counted, variables)


def find_script(words: list[str]) -> int | None:
    """Find where the script, or -m and its module, stands among the words of a command; None where it does not.

    Args:
        words: The command. The first word is the script itself, an interpreter or a launcher.
    """
    for at, word in enumerate(words):
        is_module = word in ("-m", "--module") and at + 1 < len(words)
        if is_module and words[at + 1] not in (*TORCHRUN, *ACCELERATE):
            return at
        if word.endswith(".py"):
            return at
    return None
