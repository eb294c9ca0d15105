"""megatron-lite convert, from folders that the trainer wrote to folders that it reads."""

import json
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from support.launch import checkpoint, flags, losses, quietly, same
from support.paths import REPO
from support.wording import wording

from megatron_lite.checkpoint.find import open_newest
from megatron_lite.cli.main import main
from megatron_lite.convert import folders
from megatron_lite.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("process_group")

LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --ffn-hidden-size 48"
)
LATENT = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --norm-epsilon 1e-6 "
    "--untie-embeddings-and-output-weights --multi-latent-attention --qk-layernorm --rope-type rope --q-lora-rank 20 "
    "--kv-lora-rank 12 --qk-head-dim 10 --qk-pos-emb-head-dim 6 --v-head-dim 8 --num-experts 8 --moe-router-topk 4 "
    "--moe-layer-freq [0,1] --moe-ffn-hidden-size 24 --moe-router-score-function sigmoid --moe-router-num-groups 4 "
    "--moe-router-group-topk 2 --moe-router-enable-expert-bias --moe-router-dtype fp32 "
    "--moe-shared-expert-intermediate-size 24 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01"
)
RUNS = {
    "gpt2": "--no-bias-gelu-fusion",
    "llama": f"{LLAMA} --untie-embeddings-and-output-weights --bf16",
    "torch": f"{LLAMA} --bf16 --ckpt-format torch --apply-layernorm-1p",
    "squared": "--squared-relu",
    "mixtral": f"{LLAMA} --untie-embeddings-and-output-weights --bf16 --num-experts 4 --moe-aux-loss-coeff 0.01",
    "deepseek": LATENT,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: a folder with checkpoints of iterations 1 and 2}; not to be changed."""
    parent = tmp_path_factory.mktemp("runs")
    for name, words in RUNS.items():
        words = f"{words} --train-iters 2 --save-interval 1 --padded-vocab-size 160"
        quietly(flags(words, "--save", parent / name), parent / f"{name} run")
    return {name: parent / name for name in RUNS}


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "deepseek"])
def test_there_and_back_training_goes_on_alike(name, runs, tmp_path, capsys):
    """With the flags that the command prints, from the rows that are no padding: no other has a gradient of weight."""
    assert main(["convert", "--load", str(runs[name]), "--save-hf", str(tmp_path / "hf")]) == 0
    back = ["--save", str(tmp_path / "back"), "--make-vocab-size-divisible-by", "160"]
    assert main(["convert", "--load-hf", str(tmp_path / "hf"), *back]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(
        wording("convert/no-tokenizer-and-or", "--vocab-file", "--merge-file", "--tokenizer-model")
    )
    assert wording("convert/rows-of-padding-are", 128) in said[1]
    assert f"iteration 2 of {runs[name]}, " in said[-4] and f": {tmp_path}/hf in " in said[-4]
    assert f"{tmp_path}/back/release" in said[-3]
    before, after = open_newest(runs[name]), open_newest(tmp_path / "back")
    assert after.record.shape == before.record.shape | {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    assert (after.record.iteration, after.record.precision, after.record.vocab_size) == (
        0,
        before.record.precision,
        128,
    )
    for key in after.names():
        mine, other = (torch.empty(s.size_of(key), dtype=s.dtype_of(key)) for s in (before, after))
        before.read_into({key: mine})
        after.read_into({key: other})
        rows = 128 if len(mine) == 160 else len(mine)
        assert mine.dtype == other.dtype and torch.equal(mine[:rows], other[:rows]), key
    printed = [word.replace(str(tmp_path / "back"), "{}") for word in shlex.split(said[-1])]
    for place in (runs[name], tmp_path / "back"):
        words = " ".join(printed).format(place)
        quietly(flags(words, "--train-iters 3"), tmp_path / f"{place.name} run")
    here, there = losses(tmp_path / f"{name} run"), losses(tmp_path / "back run")
    assert there == pytest.approx(here, rel=2e-2) and len(here) == 3


def test_every_tensor_of_megatrons_file_comes_over(runs, tmp_path, capsys):
    assert main(["convert", "--load", str(runs["torch"]), "--save", str(tmp_path / "ours")]) == 0
    assert wording("convert/in-bf-with-state") in capsys.readouterr().out
    assert (tmp_path / "ours" / "iter_0000002" / ".metadata").exists()
    mine, theirs = checkpoint(runs["torch"], 2), checkpoint(tmp_path / "ours", 2)
    assert same(mine, theirs) and any(name.endswith(".exp_avg") for name in mine)


def test_a_release_stays_one(runs, tmp_path, capsys):
    """Under an iteration's name it would be asked for its optimizer."""
    shutil.copytree(runs["torch"] / "iter_0000002", tmp_path / "meg" / "release")
    (tmp_path / "meg" / "latest_checkpointed_iteration.txt").write_text("release")
    assert main(["convert", "--load", str(tmp_path / "meg"), "--save", str(tmp_path / "ours")]) == 0
    assert f": {tmp_path}/ours/release in " in capsys.readouterr().out
    assert (tmp_path / "ours" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert open_newest(tmp_path / "ours").names() == open_newest(runs["torch"]).names()


def test_another_trainers_random_states_stay_behind(runs, tmp_path, monkeypatch):
    """A file of Megatron-LM's own knows no vocabulary before padding either: all rows are kept."""
    path = tmp_path / "meg" / "iter_0000002" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    state = torch.load(runs["torch"] / "iter_0000002" / "mp_rank_00" / path.name, weights_only=False)
    assert state.pop("megatron_lite") and state["rng_state"]
    torch.save(state, path)
    (tmp_path / "meg" / "latest_checkpointed_iteration.txt").write_text("2")
    assert main(["convert", "--load", str(tmp_path / "meg"), "--save", str(tmp_path / "ours")]) == 0
    found = checkpoint(tmp_path / "ours", 2)
    assert found["record"].ranks == 0 and found["record"].trainer == "megatron_lite"
    assert not any(name.startswith("random.") for name in found)
    assert any(name.endswith(".exp_avg") for name in found)
    for name, options, ids in (("meg", [], 160), ("meg", ["--true-vocab-size", "128"], 128), ("ours", [], 160)):
        target = tmp_path / f"{name} {ids}"
        assert main(["convert", "--load", str(tmp_path / name), "--save-hf", str(target), *options]) == 0
        assert json.loads((target / "config.json").read_text())["vocab_size"] == ids
    weights = [(tmp_path / f"{name} 160" / "model.safetensors").read_bytes() for name in ("meg", "ours")]
    assert weights[0] == weights[1]


def test_the_checkpoint_and_the_precision_can_be_chosen(runs, tmp_path, capsys):
    files = []
    for number, options in enumerate(([], ["--ckpt-step", "2"], ["--ckpt-step", "1"], ["--dtype", "fp32"])):
        target = tmp_path / str(number)
        assert main(["convert", "--load", str(runs["llama"]), "--save-hf", str(target), *options]) == 0
        files.append((target / "model.safetensors").read_bytes())
    newest, second, first, exact = files
    assert newest == second != first and len(first) == len(second) and len(exact) > 1.8 * len(newest)
    assert f"iteration 1 of {runs['llama']}, " in capsys.readouterr().out
    assert json.loads((tmp_path / "3" / "config.json").read_text())["torch_dtype"] == "float32"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--load {load}", "megatron-lite convert: one of the arguments --save --save-hf is required; --help shows"),
        ("--save x", "one of the arguments --load --load-hf is required"),
        ("--load a --load-hf b --save x", "argument --load-hf: not allowed with argument --load"),
        ("--load-hf a --save-hf b", "--save-hf b: --load-hf is a Hugging Face folder already; give --save."),
        ("--load a --save b --dtype bf16", "--dtype bf16: a checkpoint keeps the precision of its run; leave it out."),
        ("--load a --save-hf b --dtype fp8", "argument --dtype: invalid choice: 'fp8'"),
        ("--load-hf a --save b --ckpt-step 3", "--ckpt-step 3: concerns which checkpoint to read, with --load only; l"),
        ("--load-hf a --save b --vocab-file v", "--vocab-file v: concerns the tokenizer's files, with --save-hf only;"),
        ("--load-hf a --save b --merge-file v", "--merge-file v: concerns the tokenizer's files, with --save-hf only;"),
        ("--load-hf a --save b --tokenizer-model v", "--tokenizer-model v: concerns the tokenizer's files, with --sav"),
        ("--load a --save b --true-vocab-size 9", "--true-vocab-size 9: concerns the ids that are kept, with --save-h"),
        ("--load a --save-hf b --make-vocab-size-divisible-by 8", "--make-vocab-size-divisible-by 8: concerns the pad"),
        ("--load-hf a --save b --make-vocab-size-divisible-by 0", "--make-vocab-size-divisible-by 0: must be at least"),
        ("--load a --save-hf b --true-vocab-size 0", "--true-vocab-size 0: must be at least 1"),
        ("--load a --save-hf b --tokenizer-model t --vocab-file v", "--tokenizer-model t: excludes --vocab-file and -"),
        ("--load {load} --save-hf {full}", "--save-hf {full}: exists already, and nothing is overwritten; name a new"),
        ("--load {load} --save {full}", "--save {full}: exists already, and nothing is overwritten; name a new folder"),
        ("--load-hf {full} --save {full}", "--save {full}: exists already, and nothing is overwritten; name a new fol"),
        ("--load {load} --save-hf {full}/file", "--save-hf {full}/file: exists already, and nothing is overwritten; "),
        ("--load {load} --save-hf {full}/file/x", "--save-hf {full}/file/x: cannot be written (Not a directory); make"),
        ("--load {full} --save-hf {new}", "--load {full}: holds no latest_checkpointed_iteration.txt; "),
        ("--load {load} --ckpt-step 7 --save-hf {new}", "--ckpt-step 7: there is no {load}/iter_0000007; "),
        ("--load {squared} --save-hf {new}", "--squared-relu: Hugging Face's GPT-2 have GELU; "),
        ("--load-hf {full} --save {new}", "--load-hf {full}/config.json: cannot be read (No such file or directory); "),
        ("--load {load} --save-hf {new} --tokenizer-model {full}", "--tokenizer-model {full}: is no folder with one o"),
        ("--load {load} --save-hf {new} --vocab-file v", "--vocab-file v: cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(argv, said, runs, tmp_path, capsys):
    places = {"full": tmp_path / "full", "new": tmp_path / "new", "load": runs["gpt2"], "squared": runs["squared"]}
    places["full"].mkdir()
    (places["full"] / "file").write_text("")
    assert main(["convert", *argv.format(**places).split(" ")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said.format(**places) in error
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full"]


def test_an_empty_folder_is_as_good_as_none(runs, tmp_path):
    (tmp_path / "hf").mkdir()
    assert main(["convert", "--load", str(runs["gpt2"]), "--save-hf", f"{tmp_path}/hf/"]) == 0
    assert (tmp_path / "hf" / "config.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_conversion_that_fails_half_way_leaves_nothing(runs, tmp_path, monkeypatch, capsys):
    writes = folders.Export.write

    def full_disk(self, folder):
        writes(self, folder)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.Export, "write", full_disk)
    assert main(["convert", "--load", str(runs["gpt2"]), "--save-hf", str(tmp_path / "hf")]) == 2
    assert capsys.readouterr().err == wording("convert/error-hf-cannot-be", "--save-hf", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_not_converted(runs, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("iter_0000002", "latest_checkpointed_iteration.txt"):
        subprocess.run(["cp", "-r", str(runs["gpt2"] / name), str(source)], check=True)
    data = source / "iter_0000002" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged"):
        folders.to_own_format(source, None, tmp_path / "ours", print)
    assert not (tmp_path / "ours").exists()


def test_help_and_mistakes_need_no_torch():
    code = (
        "import sys\nfrom megatron_lite.cli.main import main\nassert main(['convert', '--load', 'x']) == 2\n"
        "try:\n    main(['convert', '--help'])\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO, capture_output=True)
