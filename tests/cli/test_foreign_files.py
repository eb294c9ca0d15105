"""Files of any origin: whatever lies where one is expected, a command answers at once, in one line each."""

import ast
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from support import run_maker
from support.paths import PACKAGE

from megatron_lite.cli.main import main
from megatron_lite.convert.weights_folder import WEIGHTS_FILE, write_safetensors
from megatron_lite.shared_files import read_foreign

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 32, "n_embd": 8, "n_head": 2, "n_layer": 1}
EXTREMES = (
    0, -1, 1, 3, 2**31, 2**63, 2**64, 10**400, 1.5, 1e308, -1e308, float("nan"), float("inf"), True, False, None,
    "", "8", "\ud800", [], [8], {}, {"a": 1},
)  # fmt: skip
GENEROUS_S = 120


@pytest.fixture(autouse=True)
def bounded():
    """Ends a test that waits for ever: by a signal, since the waiting is inside of C code."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for ever"))
    signal.alarm(GENEROUS_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def lay_pipe(path: Path):
    os.mkfifo(path)


def lay_device(path: Path):
    path.symlink_to("/dev/zero")


def lay_folder(path: Path):
    path.mkdir()


def lay_dangling(path: Path):
    path.symlink_to("/nowhere/at/all")


LAID = (lay_pipe, lay_device, lay_folder, lay_dangling)


def make_model(folder: Path, config=LLAMA) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / WEIGHTS_FILE, {"a": (2,)}, torch.float32, [torch.ones(2)])
    return folder


def answer(capsys, *words) -> tuple[int, list[str]]:
    """(exit code, lines of standard error) of a command."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr()
    return code, said.err.splitlines()


def convert(folder: Path) -> tuple:
    return ("convert", "--load-hf", folder, "--save", folder.parent / "made")


@pytest.mark.parametrize("lay", LAID)
@pytest.mark.parametrize("name", ["config.json", WEIGHTS_FILE, "model.safetensors.index.json", "pytorch_model.bin"])
def test_model_folders(lay, name, tmp_path, capsys):
    folder = make_model(tmp_path / "model")
    if name != "config.json":
        (folder / WEIGHTS_FILE).unlink()
    (folder / name).unlink(missing_ok=True)
    lay(folder / name)
    code, lines = answer(capsys, *convert(folder))
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: --load-hf"), lines


@pytest.mark.parametrize("lay", LAID)
@pytest.mark.parametrize("name", ["run.json", "steps.jsonl", "ranks.json"])
def test_run_folders(lay, name, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text('{"schema": 1, "plan": {}}')
    (folder / "steps.jsonl").write_text("")
    (folder / name).unlink(missing_ok=True)
    lay(folder / name)
    for words in (("report", folder), ("compare", folder, folder), ("audit", folder)):
        code, lines = answer(capsys, *words)
        assert code in (0, 1, 2) and not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("lay", LAID)
def test_single_files(lay, tmp_path, capsys):
    path = tmp_path / "given"
    lay(path)
    for words in (
        ("report", path),
        ("compare", path, path),
        ("audit", path),
        ("plan", path),
        ("plan", "--yaml-cfg", path),
        ("plan", "--data-args-path", path),
        ("inspect", path),
        ("preprocess", "--input", path, "--output-prefix", tmp_path / "out", "--tokenizer-type", "ByteTokenizer"),
        ("preprocess", "--input", __file__, "--output-prefix", tmp_path / "out", "--tokenizer-type",
         "GPT2BPETokenizer", "--vocab-file", path, "--merge-file", path),
    ):  # fmt: skip
        code, lines = answer(capsys, *words)
        assert code in (1, 2) and lines and not any("Traceback" in line for line in lines), (words, code, lines)


def test_a_file_larger_than_its_bound_is_refused(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(b"x" * 11)
    assert read_foreign(path, 11) == b"x" * 11
    with pytest.raises(OSError, match="more than"):
        read_foreign(path, 10)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_each_value_of_a_config_may_be_anything(config, tmp_path, capsys):
    keys = [*config, "head_dim", "rope_theta", "rope_scaling", "rms_norm_eps", "attention_dropout", "n_inner",
            "tie_word_embeddings", "layer_types", "hidden_act", "activation_function", "initializer_range"]  # fmt: skip
    folder = make_model(tmp_path / "model")
    for key in keys:
        for value in EXTREMES:
            (folder / "config.json").write_text(json.dumps({**config, key: value}))
            code, lines = answer(capsys, *convert(folder))
            assert code == 2 and len(lines) == 1, (key, value, lines)


def test_names_in_an_index_may_be_anything(tmp_path, capsys):
    folder = make_model(tmp_path / "model")
    (folder / WEIGHTS_FILE).unlink()
    for name in ("\ud800", "a\0b", "a\x1b[2Jb", "", "..", "x" * 10_000, "a/b", 3, None):
        for entry in ({"a": name}, {"model.norm.weight": name}, {"\ud800": "a.safetensors"}):
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": entry}))
            code, lines = answer(capsys, *convert(folder))
            assert code == 2 and len(lines) == 1, (entry, lines)


YAML_BOMBS = {
    "aliases": "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)),
    "groups": "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{b: *a{n - 1}, c: *a{n - 1}}}\n" for n in range(1, 60)),
    "merges": "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 60)),
    "depth": "[" * 100_000,
    "an integer": f"num_layers: {'9' * 100_000}",
}


@pytest.mark.parametrize("text", YAML_BOMBS.values(), ids=list(YAML_BOMBS))
def test_yaml_that_repeats_itself(text, tmp_path, capsys):
    path = tmp_path / "flags.yaml"
    path.write_text(text)
    code, lines = answer(capsys, "plan", "--yaml-cfg", path)
    assert code == 2 and not any("Traceback" in line for line in lines)


# --- all files go through the one opener

OWN = {  # of this package, this machine's kernel, or what the process itself is writing
    "app.py", "terminal.py", "process_state.py", "machine.py", "config/flags.py", "formats/hardware.py",
    "analysis/torch_words.py", "report/html.py", "instruments/memory_oom.py", "instruments/torch_profiler.py", "config/launchers.py",
    "data/compression.py", "cli/planned_run.py", "cli/planned_flags.py", "cli/watched_shell.py", "cli/corpus.py", "convert/folders.py",
    "analysis/trace/accelerators.py", "analysis/trace/foreign.py", "analysis/trace/launches.py",
    "analysis/kernels/kernel_families.py", "analysis/kernels/kernel_words.py", "analysis/memory/stacks.py",
    "analysis/time/host_names.py", "phase_names.py", "data/indexed_writer.py", "train/trackers.py",
    "script_walk/driverless_cuda.py", "instruments/host_counters.py", "planner/script_walks.py", "script_walk/in_code.py",
    "analysis/equality/proved_run.py", "cli/recorded_runs.py", "script_record/this_process.py",
    "cli/replay.py", "replay/rank_process.py", "postmortem/log_patterns.py", "bundle/known_words.py",
    "mcp_server/confined_command.py", "mcp_server/run_command.py", "tune/knobs.py",
}  # fmt: skip


def find_readers(path: Path) -> list[int]:
    """Lines that open a file for reading in a way of their own."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("read_text", "read_bytes", "fromfile", "memmap"):
            found.append(node.lineno)
        elif isinstance(node.func, ast.Name) and node.func.id == "open":
            mode = node.args[1] if len(node.args) > 1 else None
            writes = isinstance(mode, ast.Constant) and not str(mode.value).startswith("r")
            if not writes and not any(keyword.arg == "opener" for keyword in node.keywords):
                found.append(node.lineno)
    return found


def test_no_file_is_opened_in_another_way():
    others = {str(path.relative_to(PACKAGE)): find_readers(path) for path in PACKAGE.rglob("*.py")}
    assert {name: lines for name, lines in others.items() if lines and name not in OWN} == {}


# --- what a run says of itself


@pytest.mark.parametrize("value", ["NaN", "1e400", "-Infinity", "9" * 400, "[" * 300 + "]" * 300])
@pytest.mark.parametrize("place", ["schema", "plan", "args", "device"])
def test_a_run_may_say_anything(place, value, tmp_path, capsys):
    record = json.dumps(run_maker.RECORD | {"title": "\x1b[2J\u202e"})
    sound = run_maker.RECORD["plan"]["args"]
    texts = {
        "schema": record.replace('"schema": 1', f'"schema": {value}'),
        "plan": record.replace('"plan": {', f'"plan": {{"train_iters": {value}, "lr": [{value}], '),
        "args": record.replace(json.dumps(sound), value),
        "device": record.replace('"X"', value),
    }
    run = run_maker.folder(tmp_path / "run", [run_maker.step(number) for number in range(1, 9)], texts[place])
    for words in (
        ("report", run, "--no-html", "--baseline", tmp_path / "base.json", "--json", tmp_path / "report.json"),
        ("compare", run, run, "--json", tmp_path / "c.json"),
        ("audit", run),
        ("live", run, "--once"),
    ):
        code, lines = answer(capsys, *words)
        assert code in (0, 1, 2) and not any("Traceback" in line for line in lines)


def test_a_comparison_in_markdown_holds_nothing_that_a_terminal_obeys(tmp_path, capsys):
    lines = [
        run_maker.step(number, phases_ms={"forward\x1b[2J\x9b31m\u202e": 5.0}) for number in range(1, 9)
    ]  # fmt: skip
    runs = [run_maker.folder(tmp_path / name, lines) for name in ("a", "b\x1b[31m\u202e")]
    code, _ = answer(capsys, "compare", *runs, "--markdown", tmp_path / "c.md")
    assert code == 0
    text = (tmp_path / "c.md").read_text()
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert "x1b" in text
