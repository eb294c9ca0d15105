"""Answers for the small programs that a launch script asks for words: seq, cut, awk, date, scontrol show hostnames.

The script's own shell runs no program. It asks here, and this process runs the few that cannot write, start or reach
anything with the options that are let through, in an environment of its own; the rest has answers made here, or none.
"""

import os
import re
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megatron_lite.cli.batch_systems import expand_nodes, read_number, read_options
from megatron_lite.cli.script_arithmetic import calculate
from megatron_lite.shared_files import read_bounded

MAX_ANSWER = 32_000  # characters: below the 64 KiB that a pipe holds
MAX_FILE = 1 << 20
MAX_WRITTEN_FILES = 200
MAX_TOOL_SECONDS = 2
FREE_PORT = "29500"
LEFT_OUT = None
# Programs that only read and print, and the options that would change that. Long options may be cut short.
SHORT = r"^-[A-Za-z0-9]*"
LONG = r"^--"
READERS: dict[str, str] = {
    "seq": r"(?!)",
    "expr": r"(?!)",
    "cut": r"(?!)",
    "tr": r"(?!)",
    "rev": r"(?!)",
    "tac": r"(?!)",
    "paste": r"(?!)",
    "nl": r"(?!)",
    "fold": r"(?!)",
    "column": r"(?!)",
    "join": r"(?!)",
    "comm": r"(?!)",
    "numfmt": r"(?!)",
    "factor": r"(?!)",
    "md5sum": r"(?!)",
    "sha1sum": r"(?!)",
    "sha256sum": r"(?!)",
    "base64": r"(?!)",
    "bc": r"(?!)",
    "head": r"(?!)",
    "wc": rf"{LONG}files0",
    "tail": rf"{SHORT}[fF]|{LONG}(f|ret|p)",
    "uniq": r"(?!)",
    "sort": rf"{SHORT}[oTS]|{LONG}(o|te|bu|co|fi|ran)",
    "grep": rf"{SHORT}[rRfdD]|{LONG}(rec|der|fil|dir|dev)",
    "egrep": rf"{SHORT}[rRfdD]|{LONG}(rec|der|fil|dir|dev)",
    "sed": rf"{SHORT}[if]|{LONG}(in|fi|fo)",
    "awk": r"^--|^-[^Fv]",
    "gawk": r"^--|^-[^Fv]",
    "mawk": r"^--|^-[^Fv]",
    "date": rf"(?!-I){SHORT[1:]}[sfr]|{LONG}(s|f|ref)|^[0-9.]+$",
    "jq": rf"{SHORT}[fL]|{LONG}(from|slurpf|argf|rawf)",
}
# Those that read what is piped to them where no file is named.
FILTERS = set(READERS) - {"seq", "expr", "date"}
# What a program for awk may not hold: it could start or write something.
AWK_ACTS = re.compile(r"system|getline|fflush|close|@|/inet|/dev|(?<!\|)\|(?!\|)|print[\s\S]*>")
# Filters whose first word without a dash is a file; that of others is a pattern or a program.
FILES_FIRST = (
    "cut",
    "wc",
    "sort",
    "uniq",
    "rev",
    "tac",
    "nl",
    "column",
    "bc",
    "fold",
    "md5sum",
    "base64",
    "head",
    "tail",
    "paste",
)
# CHECKPOINT_PATH=<Specify path>: bash takes it for two redirections
PLACEHOLDER = re.compile(r"(?m)(?<=[=/_.\s-])(<[A-Za-z](?:[^<>()$`|&;'\"\n]*[^<>()$`|&;'\"\s])?>)(?=\s|$)")
# Programs in front of another one, and their options that take a value.
WRAPPERS = {
    "env": (),
    "timeout": ("-s", "-k"),
    "nice": ("-n",),
    "stdbuf": ("-i", "-o", "-e"),
    "srun": ("-n", "-N", "-w", "-p", "-A", "-c", "-t", "-G", "-J"),
}
WITHOUT_FILES = ("seq", "expr", "tr", "date")
MAX_MEMORY = 1 << 29


@dataclass(frozen=True)
class Answer:
    """The text that a program prints, and its exit code."""

    text: str
    code: int = 0


@dataclass
class Toolbox:
    """The programs of one walk through a script, and the files that the script writes for itself.

    folder: for copies of those files. gpus: of a node, for what counts them. environment: of the script.
    """

    folder: Path
    gpus: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    left_out: list[tuple[str, ...]] = field(default_factory=list)
    placeholders: list[str] = field(default_factory=list)

    def wants_input(self, words: list[str], folder: str) -> bool:
        """Whether the program reads what is piped to it."""
        name, *arguments = words
        files = [word for word in arguments if not word.startswith("-")]
        if name in WRAPPERS:
            inner = _unwrap(name, arguments)
            return bool(inner) and inner[0] in TOOLS and self.wants_input(inner, folder)
        if name in ("python", "python3"):
            return arguments in ([], ["-"])
        if name == "cat":
            return not files
        if name in ("tr", "tee", "xargs", "envsubst"):
            return True
        first_file = 0 if name in FILES_FIRST else 1
        named = [word for word in files[first_file:] if os.path.exists(self.find(word, folder))]
        return name in FILTERS and not named

    def answer(self, words: list[str], folder: str, text: str) -> Answer | None:
        """Answer a program in its place.

        Args:
            words: the program and its arguments.
            folder: where the script stands.
            text: what is piped to it.

        Returns:
            What it would print, and its exit code; None if it is left out.
        """
        name, *arguments = words
        if name in MADE:
            made = MADE[name](self, arguments, folder, text)
        else:
            made = self._run(name, arguments, folder, text)
        if made is None:
            self.leave_out(words)
        return made

    def leave_out(self, words: list[str]) -> None:
        """Keep a command that was not run, for whoever finds a value missing."""
        if len(self.left_out) < MAX_WRITTEN_FILES:
            self.left_out.append(tuple(words))

    def quote_placeholders(self, text: str) -> str:
        """Put a word for each placeholder of a script: <the path> becomes the_path, which may stand in any command."""
        self.placeholders += PLACEHOLDER.findall(text)
        return PLACEHOLDER.sub(lambda found: re.sub(r"\W+", "_", found[1].strip("<>")), text)

    def write(self, path: str, text: str, appends: bool) -> None:
        """Keep a file that the script writes: a copy in the folder stands for it.

        Args:
            path: the file, as the script names it.
            text: what is written.
            appends: whether it is added to what is there.
        """
        if len(self.files) >= MAX_WRITTEN_FILES and path not in self.files:
            return
        if appends:
            text = (self.read(path) or "") + text
        text = text[:MAX_FILE]
        copy = Path(self.files.get(path, path))
        if path not in self.files and not self._is_in_folder(Path(path)):
            copy = self.folder / f"{len(self.files)}_{Path(path).name[-100:]}"
        with suppress(OSError, ValueError):
            copy.write_text(text, encoding="utf-8", errors="replace")
            self.files[path] = str(copy)

    def _is_in_folder(self, path: Path) -> bool:
        """Tell whether a path may be written itself: one within the folder for copies, and no folder."""
        return path.is_relative_to(self.folder) and path.parent.is_dir() and not path.is_dir()

    def has_made(self, path: str, folder: str) -> bool:
        """Whether the script wrote this file, or made this folder."""
        whole = os.path.normpath(os.path.join(folder, path))
        return whole in self.files or whole in self.folders

    def find(self, path: str, folder: str) -> str:
        """Where the content of a path lies: the copy, if the script wrote it."""
        whole = os.path.normpath(os.path.join(folder, path))
        return self.files.get(whole, whole)

    def read(self, path: str, folder: str = "/") -> str | None:
        """The text of a regular file; None if it cannot be read."""
        place = self.find(path, folder)
        if not os.path.isfile(place):
            return None
        try:
            return read_bounded(Path(place), MAX_FILE, follow_link=True)
        except OSError:
            return None

    def _run(self, name: str, arguments: list[str], folder: str, text: str) -> Answer | None:
        """A reader of this machine, with options that are let through, at most MAX_TOOL_SECONDS long."""
        program = shutil.which(name)
        if program is None or any(re.search(READERS[name], word) for word in arguments):
            return None
        if not _is_harmless(name, arguments, text):
            return None
        placed = arguments if name in WITHOUT_FILES else [self._place(word, folder) for word in arguments]
        options = ["--sandbox"] if name == "sed" else []
        with tempfile.TemporaryFile() as given:
            given.write(text.encode("utf-8", "surrogateescape"))
            given.seek(0)
            with subprocess.Popen(
                [program, *options, *placed], stdin=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env={"PATH": os.devnull, "LC_ALL": "C.UTF-8"}, cwd=folder if os.path.isdir(folder) else self.folder,
            ) as process:  # fmt: skip
                return _listen(process)

    def _place(self, word: str, folder: str) -> str:
        """The copy of a file that the script wrote; nothing for a pipe or device, at which a reader could wait."""
        place = self.find(word, folder)
        if place != os.path.normpath(os.path.join(folder, word)):
            return place
        is_odd = os.path.exists(place) and not os.path.isfile(place) and not os.path.isdir(place)
        return os.devnull if is_odd else word


def _listen(process: subprocess.Popen[bytes]) -> Answer | None:
    """Read what the process prints, and its exit code; None for one that takes long, prints much or fails."""
    printed = b""
    assert process.stdout is not None
    output = process.stdout.fileno()
    deadline = time.monotonic() + MAX_TOOL_SECONDS
    with suppress(ImportError, OSError, AttributeError):
        import resource

        resource.prlimit(process.pid, resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    try:
        while (left := deadline - time.monotonic()) > 0 and len(printed) <= MAX_ANSWER:
            if not select.select([output], [], [], left)[0]:
                return None
            new = os.read(output, MAX_ANSWER)
            printed += new
            if not new:
                code = process.wait(max(left, 0))
                return Answer(printed.decode("utf-8", "surrogateescape"), code) if code in (0, 1) else None
    except subprocess.TimeoutExpired:
        # it has closed its output and goes on: nobody knows how it would have ended
        return None
    finally:
        process.kill()
    return None


def _is_harmless(name: str, arguments: list[str], text: str) -> bool:
    operands = [word for word in arguments if not word.startswith("-")]
    if name.endswith("awk"):
        # -F and -v take values, which are no program.
        program = re.compile(r"-[Fv]$")
        checked = [word for before, word in zip(["", *arguments], arguments) if not program.match(before)]
        return not any(AWK_ACTS.search(word) for word in checked if not word.startswith("-F"))
    if name == "bc":
        return re.search(r"!(?!=)", text) is None
    if name == "uniq":
        return len(operands) < 2
    if name == "seq":
        return _counts_few(operands)
    return True


def _counts_few(operands: list[str]) -> bool:
    try:
        numbers = [float(word) for word in operands if re.fullmatch(r"-?[\d.]+", word)]
    except ValueError:
        return False
    step = abs(numbers[1]) if len(numbers) == 3 else 1
    first = numbers[0] if len(numbers) > 1 else 1
    return bool(numbers) and step > 0 and abs(numbers[-1] - first) / step <= MAX_ANSWER


# --- answers made here


def _cat(box: Toolbox, arguments: list[str], folder: str, text: str) -> Answer | None:
    files = [word for word in arguments if not word.startswith("-") or word == "-"] or ["-"]
    parts = [text if word == "-" else box.read(word, folder) for word in files]
    known = [part for part in parts if part is not None]
    whole = "".join(known)
    if not known or len(whole) > MAX_ANSWER:
        return LEFT_OUT
    return Answer(whole, int(len(known) < len(parts)))


def _tee(box: Toolbox, arguments: list[str], folder: str, text: str) -> Answer:
    for word in arguments:
        if not word.startswith("-"):
            box.write(os.path.normpath(os.path.join(folder, word)), text, "-a" in arguments)
    return Answer(text[:MAX_ANSWER])


def _touch(box: Toolbox, arguments: list[str], folder: str, text: str) -> Answer:
    for word in arguments:
        if not word.startswith("-") and not os.path.exists(os.path.join(folder, word)):
            box.write(os.path.normpath(os.path.join(folder, word)), "", appends=True)
    return Answer("")


def _scontrol(box: Toolbox, arguments: list[str], folder: str, text: str) -> Answer | None:
    if arguments[:1] != ["show"] or not re.fullmatch("hostname?s?", "".join(arguments[1:2])):
        return LEFT_OUT
    names = arguments[2] if len(arguments) > 2 else box.environment.get("SLURM_JOB_NODELIST", "")
    return Answer("".join(f"{name}\n" for name in expand_nodes(names)))


def _hostname(box: Toolbox, arguments: list[str], folder: str, text: str) -> Answer:
    if any(word in ("-i", "-I", "--ip-address", "--all-ip-addresses") for word in arguments):
        return Answer("10.0.0.1\n")
    return Answer("node1\n")


def _count_gpus(box: Toolbox, arguments: list[str], folder: str, text: str) -> Answer | None:
    """A line for each GPU of a node, if the script's header says how many."""
    if not box.gpus:
        return LEFT_OUT
    asked = " ".join(arguments)
    if "-L" in arguments or "--list-gpus" in arguments:
        return Answer("".join(f"GPU {number}: NVIDIA GPU (UUID: GPU-{number})\n" for number in range(box.gpus)))
    if re.search(r"--query-gpu[= ]count", asked):
        return Answer(f"{box.gpus}\n" * box.gpus)
    if re.search(r"--query-gpu[= ](name|index|uuid|gpu_name)\b", asked):
        header = "" if "noheader" in asked else "name\n"
        return Answer(header + "".join(f"{number}\n" for number in range(box.gpus)))
    return LEFT_OUT


def _mktemp(box: Toolbox, arguments: list[str], folder: str, text: str) -> Answer:
    path = box.folder / f"tmp.{len(box.files)}"
    if any(re.match(r"-\w*d|--dir", word) for word in arguments):
        path.mkdir(exist_ok=True)
        box.files[str(path)] = str(path)
    else:
        box.write(str(path), "", appends=False)
    return Answer(f"{path}\n")


def _xargs(box: Toolbox, arguments: list[str], folder: str, text: str) -> Answer | None:
    """The words on one line, or N on each."""
    asked = " ".join(arguments)
    by = re.fullmatch(r"(?:-[nL] ?(\d+) ?)?(?:echo)?", asked)
    if by is None:
        return LEFT_OUT
    words = text.split()
    size = int(by[1] or 0)
    lines = [words]
    if size:
        lines = [words[at : at + size] for at in range(0, len(words), size)]
    return Answer("".join(f"{' '.join(line)}\n" for line in lines))


def _unwrap(name: str, arguments: list[str]) -> list[str]:
    """The command that stands behind a program that runs another one."""
    rest = list(arguments)
    while rest and (rest[0].startswith("-") or "=" in rest[0]):
        option = rest.pop(0)
        if option in WRAPPERS[name] and rest:
            rest.pop(0)
    return rest[1:] if name == "timeout" else rest


def _wrap(box: Toolbox, arguments: list[str], folder: str, text: str, name: str) -> Answer | None:
    inner = _unwrap(name, arguments)
    if not inner or inner[0] not in TOOLS:
        return LEFT_OUT
    if name == "srun" and inner[0] == "hostname" and len(inner) == 1:
        return _name_hosts(box, arguments)
    return box.answer(inner, folder, text)


def _name_hosts(box: Toolbox, arguments: list[str]) -> Answer:
    """The node of each task that srun starts; one task per node where nothing else is said."""
    options = read_options(arguments)
    nodelist = box.environment.get("SLURM_JOB_NODELIST", "node1")
    nodes = expand_nodes(options.get("-w", options.get("--nodelist", nodelist)))
    nodes = nodes[: read_number(options, ("-N", "--nodes")) or len(nodes)]
    tasks = read_number(options, ("-n", "--ntasks")) or read_number(box.environment, ("SLURM_NTASKS",))
    tasks = tasks or len(nodes)
    per_node = read_number(options, ("--ntasks-per-node",)) or max(1, tasks // max(1, len(nodes)))
    names = [name for name in nodes for _ in range(min(per_node, MAX_WRITTEN_FILES))]
    return Answer("".join(f"{name}\n" for name in names[:tasks] or names)[:MAX_ANSWER])


def _mkdir(box: Toolbox, arguments: list[str], folder: str, text: str) -> Answer:
    for word in arguments:
        if not word.startswith("-"):
            box.folders.add(os.path.normpath(os.path.join(folder, word)))
    return Answer("")


def _nodeset(box: Toolbox, arguments: list[str], folder: str, text: str) -> Answer | None:
    if len(arguments) != 2 or arguments[0] not in ("-e", "-c"):
        return LEFT_OUT
    names = expand_nodes(arguments[1])
    return Answer(f"{' '.join(names) if arguments[0] == '-e' else len(names)}\n")


def _getent(box: Toolbox, arguments: list[str], folder: str, text: str) -> Answer | None:
    if arguments[:1] not in (["hosts"], ["ahosts"], ["ahostsv4"]) or len(arguments) < 2:
        return LEFT_OUT
    return Answer(f"10.0.0.1 {arguments[1]}\n")


def _shuf(box: Toolbox, arguments: list[str], folder: str, text: str) -> Answer | None:
    """The first number of a range stands for one by chance: it is mostly a port."""
    asked = re.search(r"(?:-i|--input-range[= ])\s*(\d+)-\d+", " ".join(arguments))
    return Answer(f"{asked[1]}\n") if asked else LEFT_OUT


def _id(box: Toolbox, arguments: list[str], folder: str, text: str) -> Answer | None:
    return Answer("1000\n") if arguments in (["-u"], ["-g"]) else Answer("user\n")


def _uname(box: Toolbox, arguments: list[str], folder: str, text: str) -> Answer:
    parts = {"-m": "x86_64", "-n": "node1", "-p": "x86_64"}
    return Answer(f"{parts.get(''.join(arguments), 'Linux')}\n")


def _envsubst(box: Toolbox, arguments: list[str], folder: str, text: str) -> Answer:
    values = box.environment
    replaced = re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: values.get(found[1] or found[2], ""), text)
    return Answer(replaced[:MAX_ANSWER])


def _python(box: Toolbox, arguments: list[str], folder: str, text: str) -> Answer | None:
    """Answer print(ARITHMETIC), and the search for a free port. No other program is run, or understood."""
    if arguments in ([], ["-"]) and text:
        program = text
    elif len(arguments) > 1 and arguments[0] == "-c":
        program = arguments[1]
    else:
        return LEFT_OUT
    if "socket" in program and "getsockname" in program:
        return Answer(f"{FREE_PORT}\n")
    if re.search(r"\bdevice_count\(\)", program):
        return Answer(f"{box.gpus}\n") if box.gpus else LEFT_OUT
    try:
        return Answer(calculate(program, arguments[2:]))
    except (
        ValueError,
        SyntaxError,
        ArithmeticError,
        TypeError,
        KeyError,
        RecursionError,
        MemoryError,
    ):
        return LEFT_OUT


# (box, arguments, folder, standard input) -> what the program would print
Tool = Callable[[Toolbox, list[str], str, str], Answer | None]
WRAPPED: dict[str, Tool] = {name: partial(_wrap, name=name) for name in WRAPPERS}
MADE: dict[str, Tool] = {
    "cat": _cat, "tee": _tee, "touch": _touch, "scontrol": _scontrol, "hostname": _hostname, "nvidia-smi": _count_gpus,
    "rocm-smi": lambda *given: LEFT_OUT, "nproc": lambda *given: LEFT_OUT, "mktemp": _mktemp, "python": _python,
    "python3": _python, "mkdir": _mkdir, "nodeset": _nodeset, "xargs": _xargs, "getent": _getent, "shuf": _shuf,
    "whoami": lambda *given: Answer("user\n"), "id": _id, "uname": _uname, "envsubst": _envsubst,
    "uuidgen": lambda *given: Answer("00000000-0000-0000-0000-000000000000\n"),
    **WRAPPED,
}  # fmt: skip
# What is answered at all: by a reader of this machine, or here.
TOOLS = tuple(sorted([*READERS, *MADE]))
