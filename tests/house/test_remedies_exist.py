"""What messages tell users to write exists: flags, commands with their options, PyTorch's names and parameters, variables.

All messages of the package are read from its source, so that those of tomorrow are checked without being listed here.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import io
import re
from pathlib import Path

import pytest
import torch
from support.package_files import PACKAGE, list_nodes, parse_files
from torch._logging._internal import log_registry

from megatron_lite.analysis.findings.rules import RULES
from megatron_lite.analysis.torch_words import FILE as TORCH_WORDS
from megatron_lite.analysis.torch_words import remove_other_programs
from megatron_lite.cli.main import COMMANDS, main
from megatron_lite.config.args import Args
from megatron_lite.config.flags import list_flags, read_flags

HOLE = "\N{WHITE SQUARE}"  # what a message fills in
# folders whose messages name flags as remedies; config/ and cli/ also name those of other programs, which they read
ADVISING = ["analysis", "convert", "data", "generate.py", "instruments", "report", "smoke.py", "train", "watch"]
FLAG = re.compile(rf"(?<![\w-])(?<!var\()--[a-z][a-z0-9-]*[a-z0-9](?![\w-])(?!{HOLE})")
COMMAND = re.compile(rf"megatron-lite ([a-z][a-z-]+)((?: (?:--?[\w-]+|[\w./:{HOLE}-]+))*)")
TORCH_NAME = re.compile(r"(?<![\w./\"])torch(?:\.\w+)+(?![\w\"/]|[\w.]*::)")
CALL = re.compile(r"(?<![\w.])((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)\(([^()]*\b\w+=[^()]*(?:\([^()]*\)[^()]*)*)\)")
SETTING = re.compile(r"(?<![\w.(-])([a-z]\w+_\w+|fullgraph)=(?:True|False)")
VARIABLE = re.compile(r"(?<!\w)((?:PYTORCH|TORCH|TORCHINDUCTOR)_[A-Z_]+)(?:=([\w:,]+))?")
# names that messages use without the module that PyTorch has them in
SHORT_NAMES = {
    "AdamW": "torch.optim.AdamW",
    "DataLoader": "torch.utils.data.DataLoader",
    "DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "ShardingStrategy": "torch.distributed.fsdp.ShardingStrategy",
    "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
    "fully_shard": "torch.distributed.fsdp.fully_shard",
    "optimizer.zero_grad": "torch.optim.Optimizer.zero_grad",
    "scaled_dot_product_attention": "torch.nn.functional.scaled_dot_product_attention",
    "schedule": "torch.profiler.schedule",
    "zero_grad": "torch.optim.Optimizer.zero_grad",
}
FULLY_SHARDED = "torch.distributed.fsdp.FullyShardedDataParallel"
# settings that messages name without the call that takes them
OWNERS = {
    "error_if_nonfinite": "clip_grad_norm_",
    "find_unused_parameters": "DistributedDataParallel",
    "fullgraph": "torch.compile",
    "limit_all_gathers": FULLY_SHARDED,
    "reshard_after_forward": "fully_shard",
    "static_graph": "DistributedDataParallel",
}
# of Lightning, Transformers and DeepEP, and Tensor.to, which tells no signature
NO_SIGNATURE = {"async_finish", "ddp_find_unused_parameters", "detect_anomaly", "non_blocking"}
READERS = (
    "lib/libc10.so",
    "include/torch/csrc/distributed/c10d/*.hpp",
    "distributed/**/*.py",
    "_logging/*.py",
    "_inductor/**/*.py",
)


@functools.cache
def read_messages() -> dict[str, str]:
    """{place: text} of what the package may print; what is filled in is a HOLE. Docstrings are none, but for pages of rules."""
    messages = {}
    for path, tree in parse_files().items():
        inside = {part for node in list_nodes(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
        others = inside | {node.body[0].value for node in list_nodes(tree) if is_documented(node)}
        for node in list_nodes(tree):
            text = join(node)
            is_whole = isinstance(node, ast.JoinedStr) or node not in others
            if text and is_whole:
                messages[f"{path.relative_to(PACKAGE)}:{node.lineno}:{node.col_offset}"] = text
    messages |= {f"analysis, page of {code}": " ".join(rule.page.split()) for code, rule in RULES.items()}
    for number, line in enumerate(TORCH_WORDS.read_text(encoding="utf-8").splitlines()):
        if not line.startswith("#"):
            messages |= {f"{TORCH_WORDS.name}:{number}:{at}": text for at, text in enumerate(line.split("\t")[1:])}
    return messages


def is_documented(node: ast.AST) -> bool:
    """Whether a module, class or function begins with a docstring."""
    return isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None


def join(node: ast.AST) -> str:
    """The text of a string or an f-string; '' of other nodes."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
    return ""


def find_object(name: str) -> object:
    """What a name of PyTorch stands for. Raises AttributeError."""
    first, dot, rest = name.partition(".")
    parts = (SHORT_NAMES.get(name) or f"{SHORT_NAMES.get(first, first)}{dot}{rest}").split(".")
    for number in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:number]))
        except ImportError:
            continue
        return functools.reduce(getattr, parts[number:], found)
    raise AttributeError(name)


@functools.cache
def list_options(command: str) -> set[str]:
    """The options of a command, as its help names them."""
    printed = io.StringIO()
    with pytest.raises(SystemExit), contextlib.redirect_stdout(printed):
        main([command, "--help"])
    return set(FLAG.findall(printed.getvalue()))


def list_known_flags() -> set[str]:
    """The flags of this trainer that have an effect, and the options of the commands."""
    options = set().union(*(list_options(command) for command in COMMANDS if command != "train"))
    return options | {spelling for flag in list_flags(Args) for spelling in flag.spellings}


def find_unknown_flags(text: str, known: set[str]) -> list[str]:
    """Flags in `text` that are not among the known ones, and are not said to be another program's."""
    return [flag for flag in FLAG.findall(remove_other_programs(text)) if flag not in known]


def find_wrong_options(text: str) -> list[str]:
    """What a message puts behind `megatron-lite` that is no command, or an option that the command does not have."""
    wrong = []
    for command, words in COMMAND.findall(text):
        given = [word for word in words.split() if word.startswith("--") and len(word) > 2]
        if command not in COMMANDS:
            wrong.append(command)
        elif command != "train":
            wrong += [f"{command} {option}" for option in given if option not in list_options(command)]
    return wrong


def find_unknown_names(text: str) -> list[str]:
    """Names of PyTorch in `text` that it does not have."""
    wrong = []
    members = re.findall(rf"(?<![\w.])(?:{'|'.join(SHORT_NAMES)})\.\w+", text)
    for name in [*TORCH_NAME.findall(text), *members]:
        try:
            find_object(name)
        except AttributeError:
            wrong.append(name)
    return wrong


def find_wrong_calls(text: str) -> list[str]:
    """Calls in `text` that PyTorch would not take. Functions get all that they need, or "..."; classes are abbreviated."""
    wrong = []
    calls = [(name, given) for name, given in CALL.findall(text) if name in SHORT_NAMES or name.startswith("torch.")]
    settings = [
        (OWNERS.get(name, name), f"..., {name}=x")
        for name in SETTING.findall(CALL.sub("", text))
        if name not in NO_SIGNATURE
    ]
    for name, given in [*calls, *settings]:
        words = [word.strip() for word in re.sub(r"\([^()]*\)|\[[^\]]*\]", "", given).split(",")]
        named = [word.partition("=")[0] for word in words if "=" in word]
        positions = [word for word in words if "=" not in word and word != "..."]
        try:
            found = find_object(name)
            signature = read_signature(found)
            is_short = "..." in given or inspect.isclass(found) or "self" in signature.parameters
            bind = signature.bind_partial if is_short else signature.bind
            bind(*positions, **dict.fromkeys(named))
        except (AttributeError, TypeError) as error:
            wrong.append(f"{name}({given}): {error}")
    return wrong


def read_signature(found: object) -> inspect.Signature:
    """The parameters of a function of Python, or those that the documentation of one in C++ begins with."""
    try:
        return inspect.signature(found)
    except ValueError:
        names = re.findall(r"[(,]\s*(\w+)", found.__doc__.partition(")")[0])
        return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])


def find_unread_variables(text: str, sources: str) -> list[str]:
    """PyTorch's environment variables in `text` that no source reads, and what TORCH_LOGS does not take."""
    wrong = []
    for name, value in VARIABLE.findall(text):
        if name not in sources:
            wrong.append(name)
        elif name == "TORCH_LOGS" and value not in log_registry.artifact_names:
            wrong.append(f"{name}={value}")
    return wrong


def gather(find, *folders: str) -> list[tuple[str, str]]:
    """(place, fault) of all messages; those of some folders only, where these are given."""
    chosen = (
        {place: text for place, text in read_messages().items() if place.startswith(tuple(folders))}
        if folders
        else read_messages()
    )
    return [(place, fault) for place, text in chosen.items() for fault in find(text)]


def test_flags_exist_and_have_an_effect():
    known = list_known_flags()
    # what Megatron-LM wrote is named with its flags
    in_checkpoints = known | set(read_flags())
    assert gather(lambda text: find_unknown_flags(text, known), *ADVISING) == []
    assert gather(lambda text: find_unknown_flags(text, in_checkpoints), "checkpoint") == []


def test_commands_take_the_options_that_messages_give_them():
    assert gather(find_wrong_options) == []


def test_names_of_torch_exist():
    assert gather(find_unknown_names) == []


def test_calls_have_parameters_that_exist():
    assert gather(find_wrong_calls, *ADVISING, TORCH_WORDS.name) == []


def test_variables_are_read_by_torch():
    root = Path(torch.__file__).parent
    files = [file for pattern in READERS for file in root.glob(pattern)]
    sources = "\n".join(file.read_bytes().decode("latin-1") for file in files)
    advising = [folder for folder in ADVISING if folder != "analysis"] + [
        "analysis/findings",
        "analysis, page",
    ]
    assert gather(lambda text: find_unread_variables(text, sources), *advising) == []


@pytest.mark.parametrize(
    ("find", "good", "bad"),
    [
        (
            lambda text: find_unknown_flags(text, list_known_flags()),
            "--bf16; in Megatron-LM --tp-comm-overlap",
            "--no-such",
        ),
        (find_wrong_options, f"megatron-lite plan {HOLE} --why", "megatron-lite plan --memory"),
        (find_wrong_options, "megatron-lite watch -- COMMAND", "megatron-lite look FOLDER"),
        (find_unknown_names, "torch.optim.AdamW", "torch.optim.AdamV"),
        (find_unknown_names, "ShardingStrategy.HYBRID_SHARD", "ShardingStrategy.HYBRID"),
        (find_wrong_calls, "DataLoader(num_workers=4)", "DataLoader(workers=4)"),
        (find_wrong_calls, "schedule(wait=1, warmup=1, active=3)", "schedule(wait=1)"),
        (find_wrong_calls, "leave find_unused_parameters=True out", "set find_unused_parameter=True"),
        (lambda text: find_unread_variables(text, "TORCH_LOGS"), "TORCH_LOGS=recompiles", "TORCH_LOGS=recompile"),
        (lambda text: find_unread_variables(text, ""), "OMP_NUM_THREADS=1", "PYTORCH_ALLOC=x"),
    ],
)
def test_what_does_not_exist_is_seen(find, good, bad):
    assert find(good) == []
    assert len(find(bad)) == 1


def test_messages_are_found_wherever_they_are():
    messages = read_messages().values()
    assert any(f"--micro-batch-size {HOLE}" in text for text in messages)
    assert any("torch.profiler.schedule" in text for text in messages)
    assert sum("--" in text for text in messages) > 500
