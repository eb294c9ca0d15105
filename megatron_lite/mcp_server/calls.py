"""The calls that the server answers: a typed record of parameters for each, and the command that it stands for.

A record's fields are the tool's input schema, its docstring is the tool's description.
"""

import shlex
import sys
from typing import Annotated, ClassVar

import msgspec

from megatron_lite.cli.launcher import SCRIPT_ENDINGS
from megatron_lite.errors import UserError
from megatron_lite.mcp_server.folders import NamedFolders
from megatron_lite.mcp_server.run_command import Command

PYTHON = ".py"
MAX_CALL_WORDS = 4096  # of a command line
MAX_SECTION = 500  # characters of a path in the JSON
# Options of `plan` that it takes behind a script, too, and that would write files or start torch.
NOT_SERVED = ("--exact", "--html", "--json", "--page", "--snapshot")

Word = Annotated[str, msgspec.Meta(max_length=2**16)]
Section = Annotated[str, msgspec.Meta(max_length=MAX_SECTION)]
Words = Annotated[tuple[Word, ...], msgspec.Meta(max_length=MAX_CALL_WORDS)]
Name = Annotated[str, msgspec.Meta(max_length=2**8, pattern="^[^-]")]
Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_CALL_WORDS)]
Paths = Annotated[tuple[Word, ...], msgspec.Meta(min_length=1, max_length=MAX_CALL_WORDS)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call of a tool."""

    # Whether a script of the user's is run.
    runs_scripts: ClassVar[bool] = False

    section: Annotated[
        Section,
        msgspec.Meta(
            description="part of the JSON to return, not the whole: findings[0], ranks_seen[0].kernels.rows[20:]; "
            "text[80:] is what the command prints, in lines. An answer's `cut` names such parts."
        ),
    ] = ""

    def build_command(self, folders: NamedFolders) -> Command:
        """Build the command that answers the call; UserError where it names something outside of the folders."""
        raise NotImplementedError

    def choose_finding(self) -> str:
        """Code of the finding that is asked for; '' for none."""
        return ""


class ReportCall(Call, frozen=True, kw_only=True):
    """Explain why a finished or running PyTorch training is slow and why its memory peaks.

    Use it first for questions about a run's speed or memory. Reads run folders, torch.profiler traces, Nsight Systems
    exports (.sqlite) and memory snapshots. Read `verdict` first: its confidence says how far the evidence carries;
    then `gains`: which changes to make first, and what each saves on top of those before it; then `findings`, each with
    cost, evidence and a change to try, and `gaps`: what was not read. Gains of findings do not add up by themselves.
    """

    paths: Annotated[Paths, msgspec.Meta(description="a run folder, or files and folders of one run")]
    finding: Annotated[
        Word, msgspec.Meta(description="code of a finding: return all of its entries instead of the whole report")
    ] = ""

    def build_command(self, folders: NamedFolders) -> Command:
        """Build `report` without its page."""
        if self.finding and self.section:
            raise UserError("finding, section: exclude each other; keep one.")
        return _build_for_paths("report", ("--no-html",), self.paths, folders)

    def choose_finding(self) -> str:
        """Code of the finding that is asked for; '' for none."""
        return self.finding


class CompareCall(Call, frozen=True, kw_only=True):
    """Say what changed from run A to run B, and what did not, each figure against the noise of its steps.

    Use it after a change was tried, or where one run is slower than another. Reads what `report` reads.
    """

    a: Annotated[Word, msgspec.Meta(description="run folder, trace, folder of ranks, snapshot or baseline before")]
    b: Annotated[Word, msgspec.Meta(description="the one after, or the one to hold against it")]
    force: Annotated[bool, msgspec.Meta(description="compare although model or batch differ")] = False
    limits: Annotated[
        Words,
        msgspec.Meta(description='limits for B, such as "step_ms > +5%": exit_code 1 where exceeded, 3 where unclear'),
    ] = ()

    def build_command(self, folders: NamedFolders) -> Command:
        """Build the command `compare`."""
        options = [f"--fail-if={limit}" for limit in self.limits]
        if self.force:
            options.append("--force")
        return _build_for_paths("compare", tuple(options), (self.a, self.b), folders)


class PostmortemCall(Call, frozen=True, kw_only=True):
    """Say why a PyTorch job failed or hangs: which rank, at which collective and line, and what only followed.

    Use it for crashes, hangs and timeouts. Reads flight recorder dumps, torchelastic error files, stacks, console,
    kernel and Slurm logs, and run folders.
    """

    paths: Annotated[Paths, msgspec.Meta(description="folders and files that the job left behind")]

    def build_command(self, folders: NamedFolders) -> Command:
        """Build the command `postmortem`."""
        return _build_for_paths("postmortem", (), self.paths, folders)


class PlanCall(Call, frozen=True, kw_only=True):
    """Predict from a Megatron-LM launch command whether a GPT fits into memory and how fast a step can be at best.

    Use it before a run, and for "which flags fit". Nothing is started: a script is read without running its commands,
    data and checkpoints are not needed. Times are the least that the hardware allows, not forecasts.
    """

    command: Annotated[
        Paths,
        msgspec.Meta(
            description="words of a launch command: SCRIPT.sh with its arguments; torchrun ... pretrain_gpt.py FLAGS; "
            "or the trainer's flags alone"
        ),
    ]
    gpu: Annotated[Names, msgspec.Meta(description="names of GPUs to judge by: H100, A100-40, 4090")] = ()
    gpus: Annotated[Count | None, msgspec.Meta(description="GPUs of the whole job; as the script says if left out")] = (
        None
    )
    fit: Annotated[Word, msgspec.Meta(description="name of a GPU: find flags with which the run fits into it")] = ""
    search: Annotated[bool, msgspec.Meta(description="all layouts on `gpus` GPUs of one `gpu`, fastest first")] = False
    tokens: Annotated[Amount | None, msgspec.Meta(description="tokens to train on")] = None
    network: Annotated[Amount | None, msgspec.Meta(description="Gbit/s between nodes that each GPU has")] = None
    margin: Annotated[Share | None, msgspec.Meta(description="share of a GPU's memory that stays free")] = None
    launch: Annotated[Count, msgspec.Meta(description="which launch, of a script that starts several")] = 1
    drop: Annotated[Names, msgspec.Meta(description="names of flags to leave out, without dashes")] = ()
    add: Annotated[Words, msgspec.Meta(description="flags to add or replace, as words")] = ()
    inference: Annotated[bool, msgspec.Meta(description="memory of the trained model when it generates")] = False
    batch: Annotated[Count | None, msgspec.Meta(description="with inference: sequences at a time")] = None
    context: Annotated[Count | None, msgspec.Meta(description="with inference: tokens of each sequence")] = None

    def build_command(self, folders: NamedFolders) -> Command:
        """Build the command `plan`."""
        for word in (*self.command, *self.add):
            if word.partition("=")[0] in NOT_SERVED:
                raise UserError(f"{word}: this server writes no files and starts no torch; leave it out.")
        words = list(self.command)
        folder = folders.roots[0]
        if not words[0].startswith("-") and words[0].endswith(SCRIPT_ENDINGS):
            script = folders.find(words[0])
            folder = folders.find_root(script)
            words[0] = str(script)
        folders.check_words([*words, *self.add], folder)
        return Command("plan", tuple(self._list_options()), ("--", *words), folder, starts_programs=True)

    def _list_options(self) -> list[str]:
        options = [f"--launch={self.launch}"]
        for name in ("gpus", "fit", "tokens", "network", "margin", "batch", "context"):
            value = getattr(self, name)
            if value not in (None, ""):
                options.append(f"--{name}={value}")
        options += [f"--{name}" for name in ("search", "inference") if getattr(self, name)]
        if self.drop:
            options.append(f"--drop={','.join(self.drop)}")
        if self.add:
            options.append(f"--add={shlex.join(self.add)}")
        if self.gpu:
            options += ["--gpu", *self.gpu]
        return options


class FitCall(Call, frozen=True, kw_only=True):
    """Run a PyTorch training script without a GPU and without data until two steps, to see whether it fits into a GPU.

    Use it for scripts that are not this trainer's. It executes the script with the user's rights: only where the
    server was started with --allow-running-scripts, and only scripts in its folders.
    """

    runs_scripts: ClassVar[bool] = True

    script: Annotated[Word, msgspec.Meta(description="the Python script")]
    arguments: Annotated[Words, msgspec.Meta(description="arguments of the script")] = ()
    gpu: Annotated[Names, msgspec.Meta(description="names of GPUs; the script finds the first one")] = ()
    ranks: Annotated[Count, msgspec.Meta(description="processes that torchrun would start")] = 1
    cpu: Annotated[bool, msgspec.Meta(description="walk it as on the CPU")] = False
    quick: Annotated[bool, msgspec.Meta(description="walk it once: neither other batches nor changes")] = False

    def build_command(self, folders: NamedFolders) -> Command:
        """Build the command `fit`."""
        script = folders.find(self.script)
        if script.suffix != PYTHON or not script.is_file():
            raise UserError(f"{self.script}: is no Python script; name a file that ends in {PYTHON}.")
        options = [f"--gpu={name}" for name in self.gpu]
        options += [f"--{name}" for name in ("cpu", "quick") if getattr(self, name)]
        launcher = [sys.executable] if self.ranks == 1 else ["torchrun", f"--nproc-per-node={self.ranks}"]
        words = ("--", *launcher, str(script), *self.arguments)
        return Command("fit", tuple(options), words, folders.find_root(script), confined=False)


class ExplainCall(Call, frozen=True, kw_only=True):
    """Explain the code of a report's finding: meaning, how it is measured, what to do, when it is a false alarm.

    Use it before advising on a finding. Also takes a GPU kernel's name apart. Without a code it lists all codes.
    """

    what: Annotated[Word, msgspec.Meta(description="a finding's code, such as starved-loader, or a kernel's name")] = ""

    def build_command(self, folders: NamedFolders) -> Command:
        """Build the command `explain`."""
        words = (self.what,) if self.what else ()
        if self.what.startswith("-"):
            raise UserError(f"{self.what}: neither a finding's code nor a kernel's name; check it.")
        return Command("explain", (), words, folders.roots[0], writes_json=False)


CALLS: dict[str, type[Call]] = {
    "report": ReportCall,
    "compare": CompareCall,
    "postmortem": PostmortemCall,
    "plan": PlanCall,
    "fit": FitCall,
    "explain": ExplainCall,
}


def _build_for_paths(name: str, options: tuple[str, ...], paths: tuple[str, ...], folders: NamedFolders) -> Command:
    """Build a command that reads paths.

    Args:
        name: The command.
        options: Its options.
        paths: The paths, as the caller wrote them.
        folders: Where they must lie.
    """
    found = [folders.find(path) for path in paths]
    return Command(name, options, tuple(map(str, found)), folders.find_root(found[0]))
