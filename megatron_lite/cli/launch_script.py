"""Finds the launches of a script without starting anything: bash reads the script, and every command is left out."""

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_lite.cli import watched_shell
from megatron_lite.cli.batch_systems import Job, find_submitter, read_job, read_options
from megatron_lite.cli.launcher import (
    ASSIGNMENT,
    MAX_SCRIPT_BYTES,
    SCRIPT_ENDINGS,
    SHELLS,
    Launch,
    ProcessCounts,
    find_launch,
    split_at_trainer,
)
from megatron_lite.cli.text_tools import Toolbox
from megatron_lite.cli.watched_shell import CAN_GO_THROUGH, NOWHERE, Script, Walk, go_through
from megatron_lite.errors import UserError
from megatron_lite.shared_files import is_pipe, read_foreign, read_pipe

LONGEST_SAID = 200
MAX_NESTED_SCRIPTS = 4  # scripts that start scripts
MAX_INNER = 64  # scripts that are gone through
STARTS_NONE = "does not start pretrain_gpt.py"
HERE = "<<"  # in a record: the script that a shell is given by its input follows
SECONDS_FOR_PIPE = 5  # until the first byte of a script, and between two
DEVICES = "CUDA_VISIBLE_DEVICES"
JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PJM_JOBID")
# The variables of srun's first task.
FIRST_TASK = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "node1",
}
UNBOUND = re.compile(r"(\w+): unbound variable")
MAX_UNSET = 16  # variables that count as empty
MAX_NAMED_PLACEHOLDERS = 3  # placeholders that a note names


@dataclass(frozen=True)
class _Found:
    """A command that starts the trainer."""

    words: list[str]
    environment: dict[str, str]
    job: Job


class _Search:
    """A search through a script and those that it hands on to."""

    def __init__(self, bash: str, folder: Path, all_given: bool):
        self.toolbox = Toolbox(folder)
        self.waits = False
        self.unset = ""
        self.texts: list[str] = []
        self._bash = bash
        self._all_given = all_given
        self._walks = 0

    def look(self, script: Script, job: Job, depth: int) -> tuple[list[_Found], str]:
        """Find the launches of a script.

        Args:
            script: the script.
            job: what it asks of the batch system.
            depth: how many scripts handed on to each other before it.

        Returns:
            The launches, in the order in which they would come, and the reason if there is none.
        """
        self._walks += 1
        self.texts.append(script.text)
        self.toolbox.gpus = job.gpus_per_node
        self.toolbox.environment = script.environment
        walk = go_through(self._bash, script, self.toolbox, self._all_given)
        if not walk.commands and (quoted := self.toolbox.quote_placeholders(script.text)) != script.text:
            walk = go_through(self._bash, replace(script, text=quoted), self.toolbox, self._all_given)
        self.waits |= walk.code is None
        self.unset = self.unset or _find_unset(walk)
        why_not = _explain_nothing(self._bash, script, walk)
        found: list[_Found] = []
        for words, environment in walk.commands:
            if split_at_trainer(words):
                found.append(_Found([*script.before, *words], environment, job))
                continue
            inner = self._find_inner(script.before, words, environment, job)
            if inner is None or depth < 2 or self._walks >= MAX_INNER:
                continue
            more, inner_why_not = self.look(*inner, depth - 1)
            found += more
            why_not = inner_why_not if STARTS_NONE in why_not else why_not
        return found, why_not

    def _find_inner(
        self, before: list[str], words: list[str], environment: dict[str, str], job: Job
    ) -> tuple[Script, Job] | None:
        """The script, or the text, that a command hands on to another shell or to the batch system; its job."""
        for at, text, name, arguments in self._list_handed_on(words, environment.get("PWD", "")):
            around = words[:at]
            own = environment | _read_assignments(around)
            submitters = [number for number, word in enumerate(around) if find_submitter(word)]
            if submitters:
                options = around[submitters[0] :]
                asked = read_job(text, name, self.toolbox.folder, options)
                job = asked if asked.gpus_per_node else replace(asked, gpus_per_node=job.gpus_per_node)
                own |= {**job.environment, **_read_exports(options)}
                around = []
            elif any(word.rpartition("/")[2] == "srun" for word in around):
                own |= _read_exports(around)
                own = FIRST_TASK | own
            return Script(name, text, arguments, own, [*before, *around]), job
        return None

    def _list_handed_on(self, words: list[str], folder: str) -> Iterator[tuple[int, str, str, list[str]]]:
        """List (where it stands, the text, its name, its arguments) of each word that could be a script."""
        if len(words) > 1 and words[-2] == HERE:
            yield len(words) - 2, words[-1], "bash", []
            return
        for at, word in enumerate(words):
            programs = [other.rpartition("/")[2] for other in words[:at]]
            following = words[at + 1 :]
            if re.fullmatch("-[a-z]*c", word) and set(programs) & set(SHELLS):
                text, name = [*following, "", ""][:2]
                yield at, text, name or "bash", following[2:]
            elif word.startswith("--wrap") and "sbatch" in programs:
                glued = word.partition("=")[2]
                yield at, glued or "".join(following[:1]), "wrap", []
            elif word.endswith(SCRIPT_ENDINGS) or _is_handed_script(word, programs):
                text_of_file = self._read_small(word, folder)
                if text_of_file is not None:
                    yield at, text_of_file, str(Path(folder, word)), following
            elif at and re.search(r"\s", word) and "pretrain_gpt.py" in word:
                yield at, word, "bash", []

    def _read_small(self, name: str, folder: str) -> str | None:
        """Read a script; None for what is no file, or too large for a script."""
        path = Path(self.toolbox.find(name, folder))
        if not path.is_file() or path.stat().st_size > MAX_SCRIPT_BYTES:
            return None
        return read_foreign(path, MAX_SCRIPT_BYTES).decode("utf-8", "replace")


def _is_handed_script(word: str, programs: list[str]) -> bool:
    """Tell whether a word may be a script by any name: the first one behind a shell or what submits jobs."""
    if not programs or word[:1] in ("-", ""):
        return False
    return programs[-1] in SHELLS or find_submitter(programs[-1])


def _read_assignments(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words if ASSIGNMENT.match(word))


def _read_exports(options: list[str]) -> dict[str, str]:
    """The variables that `--export=ALL,A=1,B=2` of sbatch or `-v A=1,B=2` of qsub hands on."""
    given = read_options(options)
    return _read_assignments([*given.get("--export", "").split(","), *given.get("-v", "").split(",")])


def _drop_equal(found: list[_Found]) -> list[_Found]:
    """Launches that differ in the trainer's flags or in their ranks: those on each node, and repetitions, are one."""
    different: dict[tuple[tuple[str, ...], ProcessCounts], _Found] = {}
    for one in found:
        launch = find_launch(one.words, one.environment, one.job)
        different.setdefault((launch.flags, launch.ranks), one)
    return list(different.values())


def _choose_environment(job: Job) -> dict[str, str]:
    """Choose the variables that the script sees: the user's, but those of the job it asks for where the user is inside
    another one."""
    ours = {name: value for name, value in job.environment.items() if name == DEVICES}
    if any(name in os.environ for name in JOB_IDS):
        ours = dict(job.environment)
    return {**job.environment, **os.environ, **ours}


def read_launch_script(script: str, arguments: list[str], wanted: int = 1, gpus_per_node: int | None = None) -> Launch:
    """Find the command that starts pretrain_gpt.py in a script, or in what it hands on to.

    Args:
        script: the script.
        arguments: its arguments.
        wanted: which one, of a script that starts several, from 1.
        gpus_per_node: GPUs of a node, for scripts that count them where no line of a batch system says how many.

    Raises:
        UserError: there is no such command, or no bash.
    """
    bash = shutil.which("bash") if CAN_GO_THROUGH else None
    if bash is None:
        raise UserError(f"{script}: there is no bash here to read it; give the trainer's flags themselves.")
    outcome = _search_patiently(bash, script, _read_script(script), arguments, gpus_per_node)
    different = _drop_equal(outcome.found)
    if not 1 <= wanted <= len(different):
        few = f"has {len(different)} launches, and no number {wanted}; give --launch 1 to {len(different)}"
        raise UserError(f"{script}: {few}.")
    notes = list(outcome.notes)
    if len(different) > 1:
        notes.append(f"launch {wanted} of {len(different)} that {script} starts; --launch N for another one.")
    chosen = different[wanted - 1]
    launch = find_launch(chosen.words, chosen.environment, chosen.job)
    standing_in = chosen.job.environment
    environment = {name: value for name, value in launch.environment.items() if standing_in.get(name) != value}
    return replace(
        launch,
        environment=environment,
        notes=tuple(notes),
        left_out=tuple(outcome.search.toolbox.left_out),
        text="\n".join(outcome.search.texts),
    )


def _read_script(script: str) -> str:
    """The text of a file, or of what comes out of a pipe: `plan <(generate_script)`."""
    try:
        content = read_pipe_once(script) if is_pipe(script) else read_foreign(script, MAX_SCRIPT_BYTES)
    except OSError as error:
        raise UserError(f"{script}: cannot be read ({error.strerror}); check the path.") from None
    return content.decode("utf-8", "replace")


@functools.cache
def read_pipe_once(script: str) -> bytes:
    """Read a pipe, which gives its text only once. OSError where nothing comes."""
    return read_pipe(script, MAX_SCRIPT_BYTES, SECONDS_FOR_PIPE)


@dataclass(frozen=True)
class _Outcome:
    """The launches of a script, and what was assumed to find them; without any, the reason."""

    found: list[_Found]
    search: _Search
    notes: tuple[str, ...] = ()
    reason: str = ""
    unset: str = ""  # the variable without a value that ended it


def _search_patiently(bash: str, script: str, text: str, arguments: list[str], gpus_per_node: int | None) -> _Outcome:
    """The launches of a script, which may need that variables count as empty.

    UserError with the reason of the first search if none finds one.
    """
    unset: dict[str, str] = {}
    assumed: list[str] = []
    outcome = _search_twice(bash, script, text, arguments, gpus_per_node, unset)
    reason = outcome.reason
    while not outcome.found and outcome.unset and len(unset) < MAX_UNSET:
        unset[outcome.unset] = ""
        outcome = _search_twice(bash, script, text, arguments, gpus_per_node, unset)
    counted = [find_launch(one.words, one.environment, one.job).ranks.size for one in outcome.found]
    if not counted or (unset and None in counted):
        # where the number of ranks would come from such a variable, too
        raise UserError(reason)
    placeholders = list(dict.fromkeys(outcome.search.toolbox.placeholders))
    if placeholders:
        assumed.append(f"{script}: placeholders count as values: {', '.join(placeholders[:MAX_NAMED_PLACEHOLDERS])}.")
    if unset:
        verb = "is" if len(unset) == 1 else "are"
        assumed.append(f"{script}: {', '.join(unset)} {verb} not set here and empty.")
    return replace(outcome, notes=(*assumed, *outcome.notes))


def _search_twice(
    bash: str,
    script: str,
    text: str,
    arguments: list[str],
    gpus_per_node: int | None,
    unset: dict[str, str],
) -> _Outcome:
    """The launches, searched a second time with every file counting as being there if the first search finds none.

    Args:
        bash: The program.
        script: Name of the script.
        text: Content of the script.
        arguments: Arguments of the script.
        gpus_per_node: Where no line of a batch system says it.
        unset: Variables that count as empty where nothing sets them.
    """
    reason = ""
    ended_by = ""
    for all_given in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            job = read_job(text, script, Path(folder))
            search = _Search(bash, Path(folder), all_given)
            job = job if job.gpus_per_node else replace(job, gpus_per_node=gpus_per_node)
            environment = {**unset, **_choose_environment(job)}
            found, why_not = search.look(Script(script, text, arguments, environment, []), job, MAX_NESTED_SCRIPTS)
        reason = reason or why_not
        ended_by = ended_by or search.unset
        if found or search.waits:
            break
    notes = (f"{script}: files and folders that it looks for are assumed to exist.",) if all_given else ()
    return _Outcome(found, search, notes, reason, ended_by)


def _find_unset(walk: Walk) -> str:
    """Find the variable without a value that ended a script with `set -u`; '' for an argument of it, and for none."""
    lines = _list_messages(walk)
    if not walk.code or not lines:
        return ""
    unbound = UNBOUND.search(lines[-1])
    if unbound is None or unbound[1].isdigit():
        return ""
    return unbound[1]


def _list_messages(walk: Walk) -> list[str]:
    """List the lines that a script printed, without those with + in front: `set -x` shows commands so."""
    return [line.strip() for line in walk.said.splitlines() if line.strip() and not line.startswith("+")]


def _explain_nothing(bash: str, script: Script, walk: Walk) -> str:
    """Why a script that started no training did not: the line that bash stumbled over, or what the script says."""
    name = script.name
    # the line that eval names is counted from elsewhere
    unreadable = _find_unreadable(bash, script) if f"{name}: eval: " in walk.said else ""
    if unreadable:
        return unreadable
    if walk.code is None:
        waits = (
            f"still waits for something after {watched_shell.MAX_SCRIPT_SECONDS} s, since none of its commands is run"
        )
        return f"{name}: {waits}; give the trainer's flags themselves."
    variable = _find_unset(walk)
    if variable:
        return f"{name}: {variable} is not set here; give it: {variable}=VALUE megatron-lite plan {name} ..."
    messages = _list_messages(walk)
    if walk.code and messages:
        return f"{name}: {_shorten(messages[-1], name)} (message of the script, exit code {walk.code})"
    if walk.code:
        ended = f"ended with exit code {walk.code} before it started pretrain_gpt.py"
        return f"{name}: {ended}; does it need arguments?"
    return f"{name}: {STARTS_NONE}; give a script that does, or the trainer's flags themselves."


def _find_unreadable(bash: str, script: Script) -> str:
    """Say which line of a script bash cannot read, and why; '' where it can read all of them."""
    # -n: reads, runs nothing
    parsed = subprocess.run(
        [bash, "--noprofile", "--norc", "-O", "extglob", "-n", "-c", script.text, script.name],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={"PATH": NOWHERE, "LC_ALL": "C"},
        text=True,
        errors="replace",
    )
    found = re.search(r"line (\d+): (.+)", parsed.stderr)
    if found is None:
        return ""
    number = int(found[1])
    line = "".join(script.text.splitlines()[number - 1 : number]).strip()
    quoted = f": {_shorten(line, script.name)}" if line else ""
    remedy = "put a value there" if re.search("<[^<>()]+>", line) else "fix the script"
    return f"{script.name}: bash cannot read line {number}{quoted} ({found[2]}); {remedy}."


def _shorten(line: str, script: str) -> str:
    line = line.removeprefix(f"{script}: ").removeprefix("error: ")
    line = re.sub(r"^((eval|environment): )?line \d+: ", "", line)
    if len(line) <= LONGEST_SAID:
        return line
    return f"{line[:LONGEST_SAID]}..."
