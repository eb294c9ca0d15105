"""What commands and trainer print, whoever reads it and wherever the text comes from."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.paths import REPO
from support.run_maker import PLAN, RECORD, ranks, step
from support.run_maker import folder as run_folder
from support.snapshot_maker import MadeSnapshot
from support.trace_maker import gpu_run
from support.trace_maker import write as write_trace
from support.waiting import LIMIT_S, Terminal
from support.wording import wording

from megatron_lite.cli.main import COMMANDS, main
from megatron_lite.errors import UserError, is_memory_error
from megatron_lite.live_line import LiveLine, say
from megatron_lite.terminal import _OBEYED, CUT_OFF, escape, print_lines

TRAINER = REPO / "pretrain_gpt.py"
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\x08\u202eevil\u2028\ud800\x7f\nforged line"
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\ud800-\udfff]|^ *forged", re.MULTILINE)

SMALL = (
    "--mock-data --vocab-size 256 --tokenizer-type NullTokenizer --num-layers 2 --hidden-size 64 --num-attention-heads 2 "
    "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 4 --train-iters 2 --lr 1e-3"
)


def start(*words: str, **settings) -> subprocess.CompletedProcess:
    settings = {"cwd": REPO, "stderr": subprocess.PIPE, "text": True, "timeout": LIMIT_S} | settings
    return subprocess.run([sys.executable, *words], check=False, **settings)


@pytest.mark.parametrize("words", [[str(TRAINER), "--help"], ["-m", "megatron_lite.cli.main", "explain"]])
def test_a_reader_that_left_is_no_traceback(words):
    read, write = os.pipe()
    os.close(read)
    done = start(*words, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (CUT_OFF, "")


def test_another_broken_pipe_is_no_reader_that_left(monkeypatch):
    """Of a worker process, say."""

    def fail(words):
        raise BrokenPipeError

    monkeypatch.setattr("megatron_lite.cli.main._run", fail)
    with open(os.devnull, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(BrokenPipeError):
            main(["plan"])


@pytest.mark.parametrize("words", [[], *[[name] for name in COMMANDS]], ids=" ".join)
def test_every_command_says_its_version(words, capsys):
    try:
        assert main([*words, "--version"]) == 0
    except SystemExit as end:
        assert end.code == 0
    assert re.fullmatch(r"megatron_lite \d+\.\d+\.\d+ \(torch \S+, Python \d\S+\)\n", capsys.readouterr().out)


ASKS_WITHOUT_TORCH = """
import runpy, sys
sys.argv = ["pretrain_gpt.py", *sys.argv[1:]]
try:
    runpy.run_path("pretrain_gpt.py", run_name="__main__")
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""


@pytest.mark.parametrize(("flag", "code"), [("--version", 0), ("--num-layer", 2)])
def test_the_trainer_answers_without_importing_torch(flag, code):
    done = start("-c", ASKS_WITHOUT_TORCH, flag, stdout=subprocess.PIPE)
    assert done.stdout.splitlines()[-1] == f"{code} False"
    assert "Traceback" not in done.stderr and (code == 0 or wording("cli/did-you-mean", "--num-layers") in done.stderr)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            "ImportError('libtorch.so: failed to map segment\\nand more')",
            "torch cannot be imported (libtorch.so: failed to map segment); pip install -e . ",
        ),
        ("SystemError('returned a result with an exception set') from MemoryError()", "memory ran out"),
    ],
)
def test_a_torch_that_cannot_be_imported_is_one_line(tmp_path, raised, said):
    (tmp_path / "torch.py").write_text(f"raise {raised}")
    done = start(str(TRAINER), *SMALL.split(), stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and done.stderr.startswith(f"error: {said}") and done.stderr.count("\n") == 1


def raised_by(error: Exception, cause: Exception | None) -> Exception:
    try:
        raise error from cause
    except type(error) as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "cause", "limited", "unlimited"),
    [
        (MemoryError(), None, True, True),
        (SystemError("returned a result with an exception set"), MemoryError(), True, True),
        (OSError(12, "Cannot allocate memory"), None, True, True),
        (RuntimeError("can't start new thread"), None, True, False),
        (RuntimeError("Resource temporarily unavailable"), None, True, False),
        (ValueError("another"), KeyError("mistake"), False, False),
    ],
)
def test_memory_that_runs_out_has_many_names(error, cause, limited, unlimited, monkeypatch):
    for limit, told in ((2**30, limited), (resource.RLIM_INFINITY, unlimited)):
        monkeypatch.setattr("resource.getrlimit", lambda kind, limit=limit: (limit, limit))
        assert is_memory_error(raised_by(error, cause)) is told


@pytest.mark.skipif(torch.version.cuda is not None, reason="importing a CUDA build takes more address space")
def test_memory_that_runs_out_is_one_line():
    """Enough to import torch, too little to go on. Not so much that a process group is begun: gloo waits for threads that cannot start."""
    limit = 670_000 * 1024
    done = start(
        str(TRAINER), *SMALL.split(), stdout=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == wording("cli/error-memory-ran-out", 654, 670000)


def test_what_a_terminal_obeys_is_escaped_and_the_rest_is_kept():
    assert not OBEYED.search(escape(HOSTILE))
    assert escape("\x1b[1m", keep_style=False) == r"\x1b[1m"
    kept = "Grüße, 日本語 ▋ \u3000 \u200d 👩\u200d💻"
    assert escape(kept) == kept
    assert escape("\x1b[36mcyan\x1b[0m\x1b[2J", keep_style=True) == "\x1b[36mcyan\x1b[0m\\x1b[2J"


def test_every_letter_that_is_obeyed_is_escaped_beside_others_and_alone():
    obeyed = _OBEYED.findall("".join(map(chr, range(sys.maxunicode + 1))))
    assert len(obeyed) > 2000 and all(escape(one) == escape(f"\0{one}")[4:] != one for one in obeyed)


def test_every_way_of_printing_escapes(monkeypatch):
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)

    def refuse(words):
        raise UserError(HOSTILE)

    monkeypatch.setattr("megatron_lite.cli.main._run", refuse)
    print_lines([HOSTILE])
    say(HOSTILE.replace("\n", ""))  # what the trainer says may have several lines
    assert main(["plan"]) == 2
    LiveLine().draw(HOSTILE)
    assert not OBEYED.search(out.getvalue()) and out.getvalue().count("evil") == 2
    shown = err.getvalue().replace("\r\x1b[K", "")  # the live line's own
    assert not OBEYED.search(shown) and shown.count("evil") == 2


def write_hostile_files(folder: Path, text: str) -> dict[str, str]:
    """A run folder, a trace, a snapshot and a launch script with `text` wherever a text may stand, their names too."""
    name = text.encode(errors="ignore").decode()
    folder = folder / name
    folder.mkdir()
    plan = PLAN | {"args": {"training": {"micro_batch_size": 2, "exit_signal": text}, text: {text: text}}}
    plan |= dict.fromkeys(("precision", "device", "backend"), text)
    record = RECORD | {"plan": plan, "status": text, "started": text, "hardware": {"device": text, text: text}}
    parts = ("versions", "environment", "process", "artefacts", "git")
    record |= {part: {"python": text, text: text} for part in parts}
    run_folder(folder / "run", [step(number, phases_ms={text: 5.0}) for number in range(1, 9)], record)
    trace = gpu_run()
    trace.device, trace.header = text, {"hostName": text, "deviceProperties": [{"id": 0, "name": text}]}
    for event in trace.events:
        event["name"] = event["name"] + text
    write_trace(trace.data(), folder / f"{name}.pt.trace.json")
    snapshot = MadeSnapshot()
    snapshot.alloc(2**20, text, [{"filename": text, "line": 3, "name": text}])
    snapshot.write(folder / f"{name}.pickle")
    (folder / f"{name}.sh").write_text(f"export A='{name}'; echo \"no $A\"; exit 3\n", encoding="utf-8")
    (folder / f"{name}.json").write_text("{}")
    return {"RUN": str(folder / "run"), "TRACE": str(folder / f"{name}.pt.trace.json"), "ALL": str(folder),
            "SNAPSHOT": str(folder / f"{name}.pickle"), "SCRIPT": str(folder / f"{name}.sh"), "NOTHING": str(folder / f"{name}.json")}  # fmt: skip


@pytest.fixture(scope="module")
def hostile_words(tmp_path_factory) -> dict[str, str]:
    """What the words of HOSTILE_COMMANDS stand for; the files of the OTHER differ in each of the hostile texts."""
    folder = tmp_path_factory.mktemp("hostile")
    other = write_hostile_files(folder, f"{HOSTILE} other")
    typed = {"HOSTILE": HOSTILE, "--HOSTILE": f"--{HOSTILE}", "FLAGS": f"--lr={HOSTILE}", "FILE": f"{folder}/written"}
    return write_hostile_files(folder, HOSTILE) | {f"OTHER_{word}": path for word, path in other.items()} | typed


def run_in_process(words: list[str], monkeypatch) -> str:
    """All that a command shows on a terminal, without the styles and the live line that are its own."""
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    assert main(words) in (0, 2)
    return re.sub(r"\x1b\[([0-2]|3[36])m", "", out.getvalue()) + err.getvalue().replace("\r\x1b[K", "")


HOSTILE_COMMANDS = [
    "report RUN --no-html --all", "report TRACE --no-html --all", "report SNAPSHOT --no-html --all", "report ALL NOTHING --no-html", "report NOTHING",
    "audit RUN --against OTHER_RUN --all", "audit ALL", "compare RUN OTHER_RUN --all", "compare TRACE OTHER_TRACE --all --force",
    "compare SNAPSHOT OTHER_SNAPSHOT", "compare ALL OTHER_ALL --force", "compare NOTHING RUN", "plan SCRIPT", "plan FLAGS", "explain HOSTILE",
    "inspect HOSTILE", "merge --inputs HOSTILE --output-prefix HOSTILE", "preprocess --input HOSTILE --output-prefix x --tokenizer-type ByteTokenizer", "HOSTILE", "report --HOSTILE",
]  # fmt: skip


@pytest.mark.parametrize("command", HOSTILE_COMMANDS)
def test_no_command_passes_on_what_a_terminal_obeys(command, hostile_words, monkeypatch):
    words = [hostile_words.get(word, word) for word in command.split()]
    shown = run_in_process(words, monkeypatch)
    assert "evil" in shown and not OBEYED.search(shown)
    monkeypatch.setattr("megatron_lite.terminal._OBEYED", re.compile("(?!)"))
    assert OBEYED.search(run_in_process(words, monkeypatch)), "no hostile text is shown: it proves nothing"


def test_a_comparison_shows_both_sides_of_each_setting_escaped(hostile_words, monkeypatch):
    words = ["compare", hostile_words["RUN"], hostile_words["OTHER_RUN"], "--all"]
    shown = run_in_process(words, monkeypatch)
    for setting in ("--exit-signal", "precision", "device", "backend", "python"):
        assert re.search(rf"^  {setting} .*x1b.* .*x1b.*", shown, re.MULTILINE), setting


@pytest.mark.parametrize(
    "command", ["report ALL --html FILE", "report RUN --html FILE", "report TRACE --html FILE", "report SNAPSHOT --html FILE",
                "report ALL --no-html --json FILE", "compare RUN OTHER_RUN --json FILE", "audit ALL --json FILE"],
)  # fmt: skip
def test_no_file_holds_what_a_terminal_or_browser_obeys(command, hostile_words, monkeypatch):
    path = Path(hostile_words["FILE"])
    path.unlink(missing_ok=True)
    run_in_process([hostile_words.get(word, word) for word in command.split()], monkeypatch)
    written = path.read_text(encoding="utf-8")
    assert "evil" in written and not OBEYED.search(written)


def vary(value):
    """Copies of JSON in which one text or number after the other is hostile, each with the way to it."""
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if isinstance(item, (dict, list)) and item:
            for way, copy in vary(item):
                yield (key, *way), replaced(value, key, copy)
        else:
            yield (key,), replaced(value, key, HOSTILE)


def replaced(value, key, item):
    copy = value.copy()
    copy[key] = item
    return copy


def test_no_single_field_of_a_runs_files_reaches_the_terminal_raw(tmp_path, monkeypatch):
    """Each in its turn: with all of them hostile most of a report is missing."""
    parts = ("versions", "environment", "process", "artefacts", "prediction")
    record = RECORD | {part: {"name": "x"} for part in parts}
    lines = [step(number) for number in range(1, 9)] + [{"kind": "ranks", **ranks(1, 8, [10.0, 12.0])}]
    plain = str(run_folder(tmp_path / "plain", lines, record))
    changed = [(hostile, lines) for _, hostile in vary(record)]
    changed += [(record, hostile) for way, hostile in vary(lines) if way[0] in (3, 8)]
    for hostile_record, hostile_lines in changed:
        hostile = str(run_folder(tmp_path / "hostile", hostile_lines, hostile_record))
        for command in ("compare PLAIN HOSTILE --force --all", "report HOSTILE --no-html --all", "audit HOSTILE"):
            words = command.replace("PLAIN", plain).replace("HOSTILE", hostile).split()
            assert not OBEYED.search(run_in_process(words, monkeypatch))
