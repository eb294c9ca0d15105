"""megatron-lite plan: from a launch command to a verdict, without torch, data or GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_lines import argv
from support.paths import REPO
from support.wording import wording

from megatron_lite.cli.main import main
from megatron_lite.cli.plan import _parser
from megatron_lite.cli.planned_run import planned_run
from megatron_lite.config.args import Args
from megatron_lite.config.flags import list_flags, read_flags
from megatron_lite.config.world import World
from megatron_lite.planner.memory import predict_memory

OUR_SCRIPT = str(REPO / "examples/gpt3/train_gpt3_857m_distributed.sh")
FILES = ["CKPT", "TB", "no/VOCAB", "no/MERGES", "no/DATA"]
FLAGS = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --fp16 "
    "--micro-batch-size 4 --global-batch-size 16 --train-iters 20000 --lr 6e-5 --data-path DATA"
)  # flags of OUR_SCRIPT that matter
SEED = FLAGS.split()
COMMAND = "import sys\nfrom megatron_lite.cli.main import main\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """The user stands in an empty folder, with a plain environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("GPUS_PER_NODE", "NUM_NODES", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)


def printed(capsys, *words: str) -> str:
    assert main(["plan", *words]) == 0
    shown = capsys.readouterr()
    assert shown.err == "" and max(map(len, shown.out.splitlines())) <= 100
    return shown.out


def refused(capsys, *words: str) -> list[str]:
    assert main(["plan", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err.splitlines()


def flat(text: str) -> str:
    """Sentences without their line ends."""
    return " ".join(text.split())


def test_a_script_gets_its_verdict_first(capsys):
    shown = printed(capsys, "--gpu", "H200", OUR_SCRIPT, *FILES)
    title, _, *rest = shown.splitlines()
    assert title.startswith("train_gpt3_857m_distributed.sh") and title.endswith("fp16, 1 GPU, batch 16 = 4 x 1 x 4")
    assert rest[0].startswith(wording("cli/fits-in-one-h", 1)) and " GiB (" in rest[0] and "output layer" in rest[0]
    assert "355,919,872 (356M)" in shown
    assert "79.4 TFLOP  2.42 GFLOP per token" in shown and "89.3 TFLOP  2.72 GFLOP per token" in shown
    assert wording("cli/no-vocab-is-not", "--vocab-file", "50,257") in shown
    assert wording("cli/gpu-that-is-script", 1, "--gpus") in shown
    titles = "Memory at the peak,Memory through a step,Time of a step at best,Work of a step,Parameters,What if"
    assert all(f"\n\n{title}" in shown for title in titles.split(","))
    assert "Environment" not in shown and "Inference" not in shown and "Exact" not in shown


VOCABULARIES = [
    ("--vocab-size 99", "", 128),  # of the NullTokenizer that command_lines.GOOD names
    ("--tokenizer-type ByteTokenizer", "", 384),
    ("--tokenizer-type GPT2BPETokenizer !--vocab-size", "no --vocab-file: GPT-2's vocabulary of 50,257 is assumed.", 50_304),
    ("--tokenizer-type GPT2BPETokenizer !--vocab-size --vocab-file v.json", "", 128),
    ("--tokenizer-type GPT2BPETokenizer --vocab-size 1000", "no --vocab-file: the given vocabulary of 1,000 is assumed.", 1024),
    ("--tokenizer-type GPT2BPETokenizer --vocab-size 9 --padded-vocab-size 640", "the given vocabulary of 9 is assumed.", 640),
    ("--tokenizer-type Llama2Tokenizer --tokenizer-model no.model !--vocab-size --padded-vocab-size 32000",
     "--tokenizer-model no.model is not here: a vocabulary of 32,000 is assumed.", 32_000),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "note", "padded"), VOCABULARIES)
def test_the_vocabulary_comes_from_where_it_can(changes, note, padded, capsys):
    Path("v.json").write_text(json.dumps({"a": 0, "b": 1}))
    shown = flat(printed(capsys, "--json", "p.json", *argv(changes)))
    assert note in shown and ("assumed" in shown) == bool(note)
    assert json.loads(Path("p.json").read_text())["plan"]["shape"]["padded_vocab_size"] == padded


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("--tokenizer-type GPT2BPETokenizer --vocab-file bad.json", "--vocab-file bad.json: cannot be read (not a JSON object of tokens)"),
        ("!--vocab-size --tokenizer-type HuggingFaceTokenizer --tokenizer-model org/none",
         "--tokenizer-model org/none: is not here to be counted; add --padded-vocab-size N."),
        ("--tokenizer-type GPT2BPETokenizer --padded-vocab-size 3 --vocab-size 9",
         "--padded-vocab-size 3 is smaller than the vocabulary of 9; raise or drop it."),
    ],
)  # fmt: skip
def test_a_vocabulary_that_cannot_be_known_is_one_line(changes, said, capsys):
    Path("bad.json").write_text("[")
    (line,) = refused(capsys, *argv(changes))
    assert said in line


@pytest.mark.parametrize("data", ["--data-path 0.3 no/a 0.7 no/b", "--data-args-path no/words", "--per-split-data-args-path no/x",
                                  "--train-data-path a --valid-data-path b", ""])  # fmt: skip
def test_data_need_not_be_there(data, capsys):
    shown = printed(capsys, *argv(f"!--mock-data {data}"))
    assert "--micro-batch-size 4" in shown[shown.index("What if") :]


def test_help_shows_the_options_whose_names_no_flag_has(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: megatron-lite plan [OPTIONS] SCRIPT.sh ARGUMENTS...") and "--exact" in shown
    ours = {name for action in _parser()._actions for name in action.option_strings} - {"-h", "--help"}
    assert not ours & ({spelling for flag in list_flags(Args) for spelling in flag.spellings} | set(read_flags()))


@pytest.mark.parametrize(
    ("before", "gpus"),
    [
        ("torchrun --nproc_per_node 4 pretrain_gpt.py", 4),
        ("CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node=2 --nnodes 2 /x/pretrain_gpt.py", 4),
        ("python -u pretrain_gpt.py", 1),
        ("torchrun --nproc_per_node 2 -m megatron_lite", 2),
        ("pretrain_gpt.py", 1),
        ("srun -n 2 python pretrain_gpt.py", 2),
    ],
)
def test_a_launch_command_can_be_pasted(before, gpus, capsys):
    shown = printed(capsys, "--env", "--gpu", "H200", "T4", *before.split(), *argv())
    assert f"{gpus} GPU" in shown.splitlines()[0] and " in one T4: " in shown
    assert ("CUDA_DEVICE_MAX_CONNECTIONS=1" in shown) == before.startswith("CUDA")
    assert refused(capsys, "deepspeed", "pretrain_gpt.py", *argv()) == [
        wording("cli/error-deepspeed-number-of", "--gpus")
    ]


def test_words_before_a_script_change_nothing_and_without_a_gpu_it_says_how_to_learn_more(capsys):
    shown = printed(capsys, "--gpu", "H200", OUR_SCRIPT, *FILES)
    assert printed(capsys, "--gpu", "H200", "bash", OUR_SCRIPT, *FILES) == shown
    assert printed(capsys, *argv()) == printed(capsys, "--", *argv())
    shown = printed(capsys, *argv())
    assert shown.startswith("plan ") and wording("cli/name-shows-whether-it", "--gpu") in flat(shown)
    assert wording("cli/time-of-step") not in shown and "at best" not in shown


def test_several_gpus_are_columns_and_tokens_set_the_length(capsys):
    shown = printed(capsys, "--gpu", "H200", "a100-40", "4090", "--gpus", "4", *SEED)
    assert sum(" in one " in line for line in shown.splitlines()) == 3
    head = next(line for line in shown.splitlines() if line.split()[:1] == ["H200"])
    assert " ".join(head.split()) == "H200 A100 SXM 40 GB RTX 4090"
    assert "all-reduce, not overlapped" in shown and "batch 16 = 4 x 4 x 1" in shown
    shown = flat(printed(capsys, "--gpu", "H200", "--tokens", "300e9", *SEED))
    assert "days for 300B tokens" in shown
    assert "for 655M tokens" in flat(printed(capsys, "--gpu", "H200", *SEED))  # 20,000 x 16 x 2,048


def test_what_does_not_fit_gets_the_flags_that_do(capsys):
    shown = flat(printed(capsys, "--gpu", "T4", *SEED, "--micro-batch-size", "8"))
    assert (
        wording("cli/does-not-fit-in", 19.8) in shown and wording("cli/it-fits-with", "--micro-batch-size", 4) in shown
    )
    wide = flat(printed(capsys, "--fit", "T4", *SEED, "--hidden-size", "4096"))
    assert wording("cli/no-micro-batch-and") in wide
    assert wording("cli/it-needs-smaller-model", 102.2) in wide
    assert "--num-layers" not in wide, "another model is no advice"
    assert wording("cli/more-gpus-help-only") in wide
    hopeless = flat(printed(capsys, "--gpu", "T4", *SEED, "--hidden-size", "16384"))
    assert wording("cli/nor-does-shorter-sequence") in hopeless


def test_fit_names_flags_to_paste_and_what_hardly_fits_is_called_so(capsys):
    shown = flat(printed(capsys, "--gpu", "H200", "--margin", "0.95", *SEED))
    assert wording("cli/may-fit-in-one") in shown
    assert wording("cli/less-than-is-left", 95) in shown
    shown = printed(capsys, "--fit", "4090", *SEED)
    assert wording("cli/fit-into-one-rtx", 4090) in shown and wording("cli/fits-as-it-is") in shown
    shown = printed(capsys, "--fit", "T4", *SEED, "--micro-batch-size", "8")
    assert "\n  fits with: --micro-batch-size 4\n" in shown


def test_why_prints_the_formula_behind_each_line(capsys):
    shown = flat(printed(capsys, "--why", "--gpu", "H200", *SEED))
    assert "fp32 masters = 4 bytes x 355,919,872 parameters" in shown
    assert "matrix products = 6 x 32,768 tokens x" in shown
    shown = flat(printed(capsys, "--why", "--inference", "--gpu", "H200", *SEED))
    assert "weights in fp16/bf16 = 2 bytes x 355,919,872 parameters" in shown


def test_inference(capsys):
    shown = printed(capsys, "--inference", "--batch", "32", "--context", "1024", "--gpu", "H200", "T4", *SEED)
    assert "batch 32, 1,024 tokens each; tensors only" in shown
    cache = "KV cache: 3.00 GiB = 2 x 24 layers x 16 heads x 64 x 1,024 tokens x 32 sequences"
    assert cache in flat(shown)
    assert "tokens/s at best" in shown
    large = printed(capsys, "--inference", "--batch", "4096", "--gpu", "T4", *SEED)
    assert wording("cli/does-not-fit") in large[large.index("tokens/s at best") :]


def test_inference_answers_for_generating_not_for_training(capsys):
    wide = [*SEED, "--hidden-size", "4096"]
    shown = flat(printed(capsys, "--inference", "--gpu", "4090", "T4", *wide))
    fits = "generating fits in one RTX 4090: 10.2 of 23.5 GiB (43%) with weights in fp16/bf16 and a cache for 1 x 2,048 tokens; at best 93 tokens/s"
    assert shown.startswith(f"plan GPT 24 x 4096, sequence 2048, fp16 {fits}")
    assert "peak" not in shown and wording("cli/memory-at-peak") not in shown and "What if" not in shown
    assert wording("cli/does-not-fit") in flat(printed(capsys, "--gpu", "T4", *wide)), (
        "training, of which nothing is said above"
    )
    many = flat(printed(capsys, "--inference", "--batch", "64", "--gpu", "T4", *wide))
    assert wording("cli/generating-does-not-fit", 57.4, 14.5) in many and "with --batch 5 (13.15 GiB)" in many
    tight = flat(printed(capsys, "--inference", "--gpu", "T4", *SEED, "--hidden-size", "8192"))
    assert wording("cli/it-fits-with-weights") in tight
    assert wording("cli/name-shows-whether-it-fits", "--gpu") in flat(printed(capsys, "--inference", *wide))


def test_env_says_what_can_cost_something(capsys):
    words = [OUR_SCRIPT, *FILES]  # which sets the variable
    alone = printed(capsys, "--env", *words)  # a single rank has nothing to wait for
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" not in alone
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in printed(capsys, "--env", "--gpus", "4", *words)
    assert wording("cli/no-flag-or-variable") in flat(printed(capsys, "--env", *argv()))


def test_json_holds_all_of_it(capsys):
    options = f"--json plan.json --gpu H200 T4 --fit T4 --inference --env {FLAGS} --micro-batch-size 8"
    shown = printed(capsys, *options.split())
    assert shown.endswith("\nwritten: plan.json\n")
    text = Path("plan.json").read_text()
    assert text.isascii()
    found = json.loads(text)
    assert found["schema"] == 1 and len(found["verdicts"]) == 2 and found["title"] == "plan"
    assert sum(found["parameters"].values()) == 355_919_872
    memory = found["memory"]
    assert memory["peak_bytes"] == max(moment["num_bytes"] for moment in memory["moments"])
    assert all(sum(row["num_bytes"] for row in moment["rows"]) == moment["num_bytes"] for moment in memory["moments"])
    h200, t4 = found["gpus"]
    assert h200["time"]["step_ms"] == pytest.approx(sum(row["ms"] for row in h200["time"]["rows"]))
    assert h200["fit"] is None and t4["fit"]["found"]["add"] == ["--micro-batch-size 4"] and found["fit"] == t4["fit"]
    assert h200["duration"]["days"] > 0 and found["inference"]["batch"] == 1
    assert found["hints"] == [] and found["exact"] is None
    assert found["plan"]["world"] == vars(World(gpus=1)) and found["what_if"][0]["step_ms"] > 0


def test_bad_flags_get_the_trainers_own_lines(capsys):
    lines = refused(capsys, *argv("!--lr --nun-layers 3 --micro-batch-size 3"))
    assert lines == [
        wording("cli/error-is-not-flag", "--nun-layers", "--num-layers"),
        wording("cli/error-is-not-divisible", "--global-batch-size", 8, "--micro-batch-size", 3, 1, 3, 6),
        wording("cli/error-is-missing-give", "--lr"),
    ]
    two = "error: --data-path and --mock-data exclude each other; keep one."
    assert refused(capsys, *argv("--data-path a")) == [two]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "megatron-lite plan: no launch command; give SCRIPT.sh with its arguments, or the trainer's flags."),
        (["--gpu", "H200"], "megatron-lite plan: no launch command; give SCRIPT.sh with its arguments, or the trainer's flags."),
        (["run.py"], "megatron-lite plan run.py: no script that ends in .sh, no command with pretrain_gpt.py, no flag of the trainer; check it."),
        (["no/such.sh"], "no/such.sh: cannot be read (No such file or directory); check the path."),
        (["--gpus", "0", *argv()], "--gpus 0: must be at least 1."),
        (["--gpus", "two", *argv()], "megatron-lite plan: argument --gpus: invalid int value: 'two'; --help shows its options"),
        (["--tokens", "inf", *argv()], "--tokens inf: must be at least 1."),
        (["--margin", "1", *argv()], "--margin 1: must be at least 0 and below 1; 0.08 is usual."),
        (["--snapshot", "x", *argv()], "--snapshot: needs --exact; add that, or leave it out."),
        (["--batch", "2", *argv()], "--batch: needs --inference; add that, or leave it out."),
        (["--exact", "--snapshot", "no/x", *argv()],
         "--snapshot no/x: cannot be written (No such file or directory); name another file."),
        (["--json", "no/x", *argv()], "--json no/x: cannot be written (No such file or directory); name another file."),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(words, line, capsys):
    assert refused(capsys, *words) == [f"error: {line}"]
    for option in ("--gpu", "--fit"):
        (line,) = refused(capsys, option, "H9000", *argv())
        assert line.startswith(wording("cli/error-gpu-h-not")) and "H200" in line


def test_gpus_that_a_script_does_not_say_are_called_assumed(capsys):
    Path("launch.sh").write_text(f"torchrun --nproc_per_node gpu pretrain_gpt.py {' '.join(argv())}\n")
    shown = printed(capsys, "launch.sh")
    # a batch of 8, two at a time, has a sample for 4 of them
    assert "4 GPUs assumed, batch 8" in shown and wording("cli/n-for-another", "--gpus") in shown
    assert "2 GPUs, batch 8 = 2 x 2 x 2" in printed(capsys, "--gpus", "2", "launch.sh")


def test_profiling_with_nsys_is_judged_as_it_will_be(capsys):
    flags = " ".join(argv("--profile --use-pytorch-profiler"))
    Path("launch.sh").write_text(f"nsys profile torchrun pretrain_gpt.py {flags}\n")
    assert wording("cli/does-not-work-under") in refused(capsys, "launch.sh")[0]


def test_the_whole_command_imports_neither_torch_nor_numpy():
    code = f"{COMMAND}assert main(sys.argv[1:]) == 0\nassert not {{'torch', 'numpy', 'tiktoken'}} & set(sys.modules)"
    words = ["plan", "--gpu", "H200", "T4", "--fit", "T4", "--inference", "--env", "--why", OUR_SCRIPT, *FILES]
    subprocess.run([sys.executable, "-c", code, *words], check=True, cwd=REPO, stdout=subprocess.DEVNULL)


def test_latent_attention_is_predicted_by_its_own_widths():
    narrow, wide = (planned_run(argv(f"--multi-latent-attention --v-head-dim {width}"), 1).plan for width in (64, 128))
    assert narrow.shape.latent is not None and narrow.shape.attention_width * 2 == wide.shape.attention_width
    assert predict_memory(narrow).peak.num_bytes < predict_memory(wide).peak.num_bytes
