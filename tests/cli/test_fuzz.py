"""Every foreign format, damaged in thousands of ways: one line, a known exit code, no traceback, and an end in time."""

import contextlib
import gzip
import io
import json
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support import run_maker, snapshot_maker
from support.data_maker import write_data
from support.fuzzing import EXAMPLES, FEW, bounded, damaged, documents, json_texts
from support.nsys_maker import two_ranks
from support.trace_maker import cpu_run

from megatron_lite.checkpoint import unpickle
from megatron_lite.cli.main import main
from megatron_lite.convert.weights_folder import WEIGHTS_FILE, write_safetensors
from megatron_lite.errors import UserError

pytestmark = pytest.mark.slow
EXIT_CODES = {0, 1, 2, 3}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16,
    "rope_scaling": {"rope_type": "linear", "factor": 2}, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "decoder": None,
    "added_tokens": [{"id": 2, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False,
                      "normalized": False, "special": True}],
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[a-z]+"}, "behavior": "Isolated", "invert": False},
    "post_processor": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
}  # fmt: skip


def check_command(*words):
    """The command ends with a known code and prints nothing that a terminal obeys."""
    out, err = io.StringIO(), io.StringIO()
    with bounded(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(word) for word in words])
        except SystemExit as left:
            code = left.code
    said = out.getvalue() + err.getvalue()
    assert code in EXIT_CODES, (code, said)
    assert "Traceback" not in said
    assert all(letter.isprintable() or letter == "\n" for letter in said), said
    return code


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


LINES = [run_maker.step(number) for number in range(1, 9)] + [run_maker.ranks(1, 8, [10.0, 11.0])]


def check_run(run: Path):
    check_command("report", run, "--no-html", "--baseline", run.parent / "base.json", "--json", run.parent / "r.json")
    check_command("compare", run, run, "--markdown", run.parent / "c.md", "--json", run.parent / "c.json")
    if (run.parent / "c.md").exists():
        text = (run.parent / "c.md").read_text()
        assert all(letter.isprintable() or letter == "\n" for letter in text), text
        (run.parent / "c.md").unlink()
    check_command("audit", run)
    check_command("live", run, "--once")


@FEW
@given(record=json_texts(run_maker.RECORD))
def test_run_json(folder, record):
    run = run_maker.folder(folder / "run", LINES)
    (run / "run.json").write_bytes(record)
    check_run(run)


@FEW
@given(lines=json_texts(LINES[-3:]), ranks=json_texts({"verdict": "rank 1 died"}))
def test_steps_and_ranks(folder, lines, ranks):
    run = run_maker.folder(folder / "steps", LINES)
    (run / "ranks.json").write_bytes(ranks)
    with contextlib.suppress(ValueError, RecursionError):
        lines = b"".join(json.dumps(line).encode() + b"\n" for line in json.loads(lines))
    (run / "steps.jsonl").write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in LINES[:5]) + lines)
    check_run(run)


TRACE = cpu_run(steps=2).data()


@EXAMPLES
@given(text=json_texts(TRACE))
def test_traces(folder, text):
    (folder / "a.pt.trace.json").write_bytes(text)
    check_command("report", folder / "a.pt.trace.json", "--no-html")
    check_command("audit", folder / "a.pt.trace.json")


@EXAMPLES
@given(packed=damaged(gzip.compress(json.dumps(TRACE).encode())))
def test_packed_traces(folder, packed):
    (folder / "b.pt.trace.json.gz").write_bytes(packed)
    check_command("report", folder / "b.pt.trace.json.gz", "--no-html")


@EXAMPLES
@given(data=st.data())
def test_databases_of_nsight_systems(folder, data):
    (folder / "nsys").mkdir(exist_ok=True)
    sound = two_ranks(folder / "nsys").read_bytes()
    (folder / "c.sqlite").write_bytes(data.draw(damaged(sound)))
    check_command("report", folder / "c.sqlite", "--no-html")


SNAPSHOT = snapshot_maker.training(2).data()


@EXAMPLES
@given(data=st.data(), as_json=st.booleans())
def test_snapshots(folder, data, as_json):
    path = folder / "d.pickle"
    if as_json:
        path.write_bytes(data.draw(json_texts(json.loads(json.dumps(SNAPSHOT)))))
    elif data.draw(st.booleans()):
        path.write_bytes(pickle.dumps(data.draw(documents(SNAPSHOT))))
    else:
        path.write_bytes(data.draw(damaged(pickle.dumps(SNAPSHOT, data.draw(st.integers(0, 5))))))
    check_command("report", path, "--no-html")


def make_model(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    write_safetensors(folder / WEIGHTS_FILE, {"model.norm.weight": (8,)}, torch.float32, [torch.ones(8)])
    return folder


def check_convert(model: Path):
    assert check_command("convert", "--load-hf", model, "--save", model.parent / "made") == 2


@EXAMPLES
@given(config=json_texts(LLAMA))
def test_configs(folder, config):
    model = make_model(folder / "model")
    (model / "config.json").write_bytes(config)
    check_convert(model)


@EXAMPLES
@given(data=st.data())
def test_safetensors_and_their_index(folder, data):
    model = make_model(folder / "weights")
    sound = (model / WEIGHTS_FILE).read_bytes()
    (model / WEIGHTS_FILE).write_bytes(data.draw(damaged(sound)))
    check_convert(model)
    (model / WEIGHTS_FILE).unlink()
    index = {"metadata": {"total_size": 32}, "weight_map": {"model.norm.weight": "a.safetensors"}}
    (model / "model.safetensors.index.json").write_bytes(data.draw(json_texts(index)))
    check_convert(model)
    (model / "model.safetensors.index.json").unlink()


def check_tokenizer(folder: Path, text: bytes) -> int:
    model = folder / "tokenizer"
    model.mkdir(exist_ok=True)
    (model / "tokenizer.json").write_bytes(text)
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "text.txt").write_text("abba\n")
    for made in folder.glob("tokens*"):
        made.unlink()
    return check_command(
        "preprocess", "--input", folder / "text.txt", "--output-prefix", folder / "tokens",
        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", model, "--workers", 1,
    )  # fmt: skip


@EXAMPLES
@given(text=json_texts(TOKENIZER))
def test_tokenizers(folder, text):
    check_tokenizer(folder, text)


def test_what_is_damaged_was_sound(folder):
    assert check_tokenizer(folder, json.dumps(TOKENIZER).encode()) == 0
    (folder / "sound.yaml").write_text(yaml.safe_dump(FLAGS))
    assert check_command("plan", "--yaml-cfg", folder / "sound.yaml") == 0
    assert check_command("inspect", write_data(folder / "sound", [[1, 2, 3], [4, 5]])) == 0


@EXAMPLES
@given(data=st.data())
def test_indexed_data_sets(folder, data):
    prefix = write_data(folder / "data", [[1, 2, 3], [4, 5]])
    index = Path(prefix + ".idx")
    index.write_bytes(data.draw(damaged(index.read_bytes())))
    check_command("inspect", prefix)


def check_reading(read, *refusals):
    with bounded(), contextlib.suppress(*refusals):
        read()


@EXAMPLES
@given(data=st.data())
def test_checkpoints_of_torch(folder, data):
    import torch.distributed.checkpoint as dcp

    if not (folder / "saved").exists():
        dcp.save({"a": torch.ones(3), "b": torch.ones(2, 2)}, checkpoint_id=folder / "saved", no_dist=True)
        torch.save({"a": torch.ones(3), "b": (1, (2, 3))}, folder / "sound.pt")
    (folder / ".metadata").write_bytes(data.draw(damaged((folder / "saved" / ".metadata").read_bytes())))
    check_reading(lambda: unpickle.read_metadata(folder / ".metadata"), OSError, ValueError)
    (folder / "e.pt").write_bytes(data.draw(damaged((folder / "sound.pt").read_bytes())))
    check_reading(lambda: unpickle.load(folder / "e.pt"), UserError)


FLAGS = {
    "num-layers": 2, "hidden-size": 64, "model": {"num-attention-heads": 2, "swiglu": True, "seq-length": [16]},
    "max-position-embeddings": 16, "micro-batch-size": 1, "train-iters": 10, "lr": 1e-3, "mock-data": True,
    "padded-vocab-size": 128, "ffn-hidden-size": 64,
}  # fmt: skip


@EXAMPLES
@given(data=st.data())
def test_yaml(folder, data):
    if data.draw(st.booleans()):
        text = yaml.safe_dump(data.draw(documents(FLAGS)), allow_unicode=False).encode("utf-8", "surrogatepass")
    else:
        text = data.draw(damaged(yaml.safe_dump(FLAGS).encode()))
    (folder / "flags.yaml").write_bytes(text)
    check_command("plan", "--yaml-cfg", folder / "flags.yaml")


PLAN = {
    "num-layers": "2", "hidden-size": "64", "num-attention-heads": "4", "seq-length": "32", "micro-batch-size": "2",
    "max-position-embeddings": "32", "global-batch-size": "4", "padded-vocab-size": "128", "train-iters": "10",
    "lr": "1e-3", "tensor-model-parallel-size": "1", "ffn-hidden-size": "128", "kv-channels": "16", "seed": "1",
    "attention-dropout": "0.1", "init-method-std": "0.02", "rotary-base": "10000", "clip-grad": "1.0",
}  # fmt: skip
VALUES = [
    "0", "-1", "1", "2147483648", "9223372036854775808", "9" * 400, "9" * 5000, "1e308", "1e400", "nan", "inf", "-inf",
    "0.5", "", "x", "[1]", "null", "True", "\x1b[2J", "1_000", "٣",
]  # fmt: skip


@EXAMPLES
@given(changes=st.dictionaries(st.sampled_from(sorted(PLAN)), st.sampled_from(VALUES), min_size=1, max_size=2))
def test_flags_of_plan(changes):
    words = [word for name, value in {**PLAN, **changes}.items() for word in (f"--{name}", value)]
    check_command("plan", *words, "--mock-data", "--position-embedding-type", "rope")
