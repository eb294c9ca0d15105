"""Makes a Plan of the words of a launch command, on a machine that has neither its data nor its GPUs."""

import argparse
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_lite.cli.late_options import take_late_options
from megatron_lite.cli.launcher import (
    GPUS_PER_NODE,
    SCRIPT_ENDINGS,
    SHELLS,
    Launch,
    ProcessCounts,
    begins_command,
    find_launch,
    split_at_trainer,
)
from megatron_lite.cli.left_out import explain_empty_values
from megatron_lite.cli.parser import END, Parser
from megatron_lite.cli.planned_flags import adapt_flags, take_fp8
from megatron_lite.config.args import DataArgs
from megatron_lite.config.check import RULES_WITHOUT_FILES, check
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.data_paths import TOKENIZER
from megatron_lite.config.flags import write_flags
from megatron_lite.config.fp8 import Fp8, describe_fp8, list_fp8_mistakes
from megatron_lite.config.plan import Plan, resolve
from megatron_lite.config.world import World
from megatron_lite.data.tokenizers import build_tokenizer
from megatron_lite.errors import ConfigError, UserError
from megatron_lite.pipeline_schedule import Stage
from megatron_lite.planner.what_if import find_heaviest_stage
from megatron_lite.shared_files import is_pipe, read_foreign

TOKENIZER_SIZES = Path(__file__).with_name("tokenizer_sizes.tsv")
# Of types that name a model: Llama-2's, and what Megatron takes for Tiktoken's where --vocab-size is left out.
SIZES_BY_TYPE = {
    "Llama2Tokenizer": ("Llama-2's", 32_000),
    "TikTokenizer": ("Megatron-LM's default", 2**17),
}
GPT2_WORDS = 50_257  # Radford et al. 2019: 256 bytes, 50,000 merges, end of text


@dataclass(frozen=True)
class PlannedRun:
    """A command as the trainer would take it."""

    plan: Plan
    flags: tuple[str, ...]  # of the trainer
    environment: Mapping[str, str]  # of the trainer
    notes: tuple[str, ...]  # what was assumed
    gpus_assumed: bool = False  # their number stands nowhere


def is_script(word: str) -> bool:
    """A launch script, or a pipe that gives one, rather than a flag?"""
    return not word.startswith("-") and (word.endswith(SCRIPT_ENDINGS) or is_pipe(word))


def split_options(parser: Parser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the words into a command's own options and the rest: flags of the trainer, or a launch command or script
    with its arguments."""
    actions = {name: action for action in parser._actions for name in action.option_strings}
    end = _find_end_of_options(actions, argv)
    rest = argv[end:]
    if rest[:1] == [END]:
        rest = rest[1:]
    if rest and rest[0] in SHELLS:
        rest = rest[1:]
    late: list[str] = []
    if rest:
        late, rest = take_late_options(rest, actions, is_script(rest[0]))
    return parser.parse_args([*argv[:end], *late]), rest


def _find_end_of_options(actions: Mapping[str, argparse.Action], argv: list[str]) -> int:
    """Find the first word that is neither one of these options nor a value of one."""
    at = 0
    while at < len(argv):
        name, equals, _ = argv[at].partition("=")
        if name not in actions:
            break
        at += 1
        most = 1
        if equals or actions[name].nargs == 0:
            most = 0
        elif actions[name].nargs == "+":
            most = len(argv)
        for word in argv[at : at + most]:
            if word.startswith("--") or is_script(word) or word in SHELLS or begins_command(word):
                break
            at += 1
    return at


def planned_run(
    words: list[str],
    gpus: int | None,
    launch_number: int = 1,
    dropped: Sequence[str] = (),
    added: Sequence[str] = (),
) -> PlannedRun:
    """Plan the run that a launch command would start.

    Args:
        words: SCRIPT.sh ARGUMENTS..., a launch command such as torchrun ... pretrain_gpt.py FLAGS, or the trainer's
            flags.
        gpus: GPUs of the whole job; None for what the words say, else 1.
        launch_number: Number, from 1, of the launch to plan where a script starts several.
        dropped: Names of the trainer's flags that are left out.
        added: Flags of the trainer that stand for those of the same name.

    Raises:
        UserError: The script cannot be read.
        ConfigError: The trainer would refuse the flags; with its own lines.
    """
    launch, gpus_assumed = _read_launch(words, gpus, launch_number)
    if is_script(words[0]) and not launch.flags:
        raise UserError(_explain_no_flags(words[0], launch.text))
    flags, changes = adapt_flags(launch.flags, dropped, added)
    launch = replace(launch, flags=tuple(flags), notes=(*launch.notes, *changes))
    size = gpus or launch.ranks.size
    if size is None:
        raise UserError(f"{words[0]}: the number of GPUs is unknown; give --gpus N before it.")
    per_node = _count_ranks_of_node(size, launch.ranks.nodes)
    # each rank has its own GPU
    world = World(size=size, local_size=per_node, gpus=per_node, under_nsys=launch.under_nsys)
    try:
        fp8, flags = take_fp8(flags)
        planned = _plan_launch(replace(launch, flags=tuple(flags)), world, words[0], gpus, fp8)
        return replace(planned, gpus_assumed=gpus_assumed)
    except ConfigError as error:
        lines = explain_empty_values(error.lines, launch.left_out, launch.text, words[0])
        if is_script(words[0]):
            from megatron_lite.cli.changed_flags import explain_change

            lines += explain_change(words, lines, gpus, dropped, added)
        raise ConfigError(lines) from None


def _count_ranks_of_node(size: int, nodes: int) -> int:
    """Count the ranks of a node. A single node with more ranks than a usual one has stands for several usual ones."""
    if nodes == 1 and size > GPUS_PER_NODE and size % GPUS_PER_NODE == 0:
        return GPUS_PER_NODE
    return size // nodes if size % nodes == 0 else size


def _explain_no_flags(script: str, text: str) -> str:
    """Explain how to plan a script that starts the trainer without any flag: it takes them from variables of its
    caller."""
    behind = re.findall(r"pretrain_gpt\.py\b(.*)", text)
    names = list(dict.fromkeys(re.findall(r"\$\{?([A-Za-z_]\w*)", " ".join(behind))))
    if not names:
        how = f"give flags: megatron-lite plan --add='FLAGS' {script}"
        return f"{script}: starts pretrain_gpt.py without any flag; {how}"
    how = f"{names[0]}='FLAGS' megatron-lite plan {script} ..., or plan the script that starts it"
    return f"{script}: takes the trainer's flags from {', '.join(names)}, without a value here; give it: {how}."


def _read_launch(words: list[str], gpus: int | None, launch_number: int) -> tuple[Launch, bool]:
    """Find the command that starts the trainer, and whether its GPUs are those of usual nodes, since a script does
    not count them."""
    if split_at_trainer(words) and not is_script(words[0]):
        return find_launch(words, os.environ), False
    if not is_script(words[0]):
        return Launch(tuple(words), ProcessCounts(1), os.environ, under_nsys=False), False
    from megatron_lite.cli.launch_script import read_launch_script

    arguments = words[1:]
    per_node = min(gpus, GPUS_PER_NODE) if gpus else None
    launch = read_launch_script(words[0], arguments, launch_number, per_node)
    if gpus or launch.ranks.size is not None:
        return launch, False
    launch = read_launch_script(words[0], arguments, launch_number, GPUS_PER_NODE)
    if launch.ranks.size is None:
        launch = replace(launch, ranks=_assume_ranks(launch))
    ranks = launch.ranks
    nodes = "a node" if ranks.nodes == 1 else f"each of {ranks.nodes} nodes"
    assumed = f"{ranks.per_node} of {nodes} are assumed; --gpus N for another number."
    note = f"the script does not say how many GPUs there are: {assumed}"
    return replace(launch, notes=(*launch.notes, note)), True


def _assume_ranks(launch: Launch) -> ProcessCounts:
    """A usual node, or as many as one replica of the model needs; fewer where the batch has not a sample for each."""
    flags, _ = adapt_flags(launch.flags, (), ())
    args = read_command_line(flags).args
    parallel = args.parallel
    replica = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    replica *= parallel.context_parallel_size
    if replica > GPUS_PER_NODE:
        return ProcessCounts(GPUS_PER_NODE, math.ceil(replica / GPUS_PER_NODE))
    samples = (args.training.global_batch_size or 0) // (args.training.micro_batch_size or 1)
    replicas = GPUS_PER_NODE // replica
    while samples and samples % replicas:
        replicas -= 1
    return ProcessCounts(replica * replicas, launch.ranks.nodes)


def _plan_launch(launch: Launch, world: World, script: str, gpus: int | None, fp8: Fp8 | None) -> PlannedRun:
    """Make the plan of a launch.

    Args:
        launch: the command that starts the trainer.
        world: the ranks.
        script: the first word of the command.
        gpus: of the whole job, where they were given.
        fp8: of linear layers, which the command's flags no longer name; None: there is none.

    Raises:
        ConfigError: the trainer would refuse the flags; with its own lines.
    """
    line = read_command_line(list(launch.flags))
    of_checkpoint: list[str] = []
    if line.args.checkpoint.use_checkpoint_args:
        from megatron_lite.checkpoint.checkpoint_args import take_checkpoint_args

        line = take_checkpoint_args(line, of_checkpoint.append)
        launch = replace(launch, flags=tuple(write_flags(line.args)))
    if line.args.model.model is not None:
        unknown = "memory and speed of a model of your own are not known before it runs"
        raise UserError(f"--model {line.args.model.model}: {unknown}; drop it to see those of a GPT with these flags.")
    assumed_args = replace(line.args, data=_assume_data(line.args.data))
    check(replace(line, args=assumed_args), world, RULES_WITHOUT_FILES)
    vocab_size, assumed = planned_vocabulary(line.args.data, line.args.model.padded_vocab_size)
    notes = [*launch.notes, *line.notes, *map(str.strip, of_checkpoint), *assumed]
    if world.size == 1 and not gpus and is_script(script):
        notes.append("1 GPU: that is the script's value when its commands are not run; --gpus N for more.")
    plan = resolve(line.args, world, vocab_size)
    if fp8 is not None:
        if mistakes := list_fp8_mistakes(fp8, line.args):
            raise ConfigError(mistakes)
        plan = replace(plan, fp8=fp8)
        notes += describe_fp8(fp8, plan.shape.num_layers)
    if plan.layout.pipeline > 1:
        plan = find_heaviest_stage(plan)
        notes.append(_describe_stage(plan.stage))
    return PlannedRun(plan, launch.flags, launch.environment, tuple(notes))


def _assume_data(data: DataArgs) -> DataArgs:
    """The data's flags as if all files were there: those that are not here, or not named yet, decide neither memory
    nor speed."""
    here = replace(
        data,
        data_args_path=_drop_missing(data.data_args_path),
        per_split_data_args_path=_drop_missing(data.per_split_data_args_path),
    )
    sources = (
        "data_path",
        "data_args_path",
        "per_split_data_args_path",
        "train_data_path",
        "valid_data_path",
        "test_data_path",
        "external_dataloader",
    )
    has_source = any(getattr(here, name) for name in sources)
    return replace(
        here,
        mock_data=data.mock_data or not has_source,
        fim_data=data.fim_data and has_source,
        vocab_file=data.vocab_file or "to be named",
        merge_file=data.merge_file or "to be named",
    )


def _drop_missing(path: str | None) -> str | None:
    return path if path is not None and Path(path).exists() else None


def _describe_stage(stage: Stage) -> str:
    """Describe whose memory a plan of a pipeline is."""
    layers = stage.describe_layers(" to ")
    return f"memory is that of stage {stage.number + 1} of {stage.stages}, layers {layers}, which holds most."


def planned_vocabulary(data: DataArgs, padded: int | None) -> tuple[int, list[str]]:
    """Find the vocabulary's entries before padding.

    Args:
        data: the flags that name the tokenizer.
        padded: --padded-vocab-size.

    Returns:
        The number of entries, and lines on what was assumed for it.

    Raises:
        UserError: a file cannot be read.
        ConfigError: neither flags nor files nor a well-known name tell the number.
    """
    kind = data.tokenizer_type or TOKENIZER
    known = data.vocab_size or padded
    if kind == "GPT2BPETokenizer":
        return _count_gpt2_vocabulary(data.vocab_file, known)
    has_model = _drop_missing(data.tokenizer_model) is not None
    if kind in ("NullTokenizer", "ByteTokenizer") or has_model:
        return build_tokenizer(data).vocab_size, []
    model = f"--tokenizer-model {data.tokenizer_model}"
    if known is not None:
        return known, [f"{model} is not here: a vocabulary of {known:,} is assumed."]
    likely = _find_known_size(kind, data.tokenizer_model or "")
    if likely is None:
        raise ConfigError([f"{model}: is not here to be counted; add --padded-vocab-size N."])
    words, vocab_size = likely
    return vocab_size, [f"{model} is not here: {words} is assumed; --padded-vocab-size N for another."]


def _count_gpt2_vocabulary(file: str | None, known: int | None) -> tuple[int, list[str]]:
    """Count the entries of a vocabulary file of GPT-2's form; without the file, the known number or GPT-2's own."""
    if file is None or not Path(file).is_file():
        missing = f"--vocab-file {file} is not here" if file else "no --vocab-file"
        known = known or GPT2_WORDS
        whose = "GPT-2's" if known == GPT2_WORDS else "the given"
        return known, [f"{missing}: {whose} vocabulary of {known:,} is assumed."]
    try:
        return len(json.loads(read_foreign(file))), []
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "not a JSON object of tokens"
        raise UserError(f"--vocab-file {file}: cannot be read ({reason}); check the path.") from None


def _find_known_size(kind: str, model: str) -> tuple[str, int] | None:
    """Find the words for a tokenizer and its size, by its name, else by its type; None for one that nobody knows."""
    for pattern, name, rows, counts, _ in _list_known_sizes():
        if not re.search(pattern, model.lower()):
            continue
        words = f"{name}'s table of the published model, of {int(rows):,} rows"
        if counts == "tokens":
            words = f"{name}'s vocabulary of {int(rows):,}"
        return words, int(rows)
    if kind in SIZES_BY_TYPE:
        whose, size = SIZES_BY_TYPE[kind]
        return f"{whose} vocabulary of {size:,}", size
    return None


def _list_known_sizes() -> list[list[str]]:
    lines = TOKENIZER_SIZES.read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")][1:]
