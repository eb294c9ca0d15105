"""What a user types wrong, and reads."""

import ast
import re

import pytest
from support.command_lines import ALONE, argv, mistakes, read, read_table
from support.wording import wording

from megatron_lite.config.args import Args
from megatron_lite.config.check import check, remarks
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.dependent_flags import DEPENDENCIES
from megatron_lite.config.flags import ABSENT_BEGINS, ACCEPTED, STOPPING, find_texts, list_flags
from megatron_lite.config.world import World
from megatron_lite.errors import ConfigError

MISSING = """
    --num-layers --hidden-size --num-attention-heads --seq-length --micro-batch-size --max-position-embeddings --train-iters
    --lr --data-path --vocab-file --merge-file
"""
VALUES = {"exit_signal": "SIGINT", "profile_step_end": "13", "initial_loss_scale": "8"}
FIVE_MISTAKES = {
    "--num-layer 2 --hidden-size 1O24 --fp16 --bf16 --lr-decay-style cosin --micro-batch-size": [
        "--num-layer is not a flag; did you mean --num-layers?",
        "--hidden-size 1O24: needs a whole number.",
        "--lr-decay-style cosin: choose from constant, linear, cosine, inverse-square-root, WSD; did you mean cosine?",
        "--micro-batch-size takes one value, got none.",
        "--fp16 and --bf16 exclude each other; keep one.",
    ],
    "--global-batch-size 9 --min-lr 1 --seq-length 64 --num-experts 8 --save-interval -1": [
        "--save-interval -1: must be at least 0; 0 switches it off.",
        "--max-position-embeddings 32 is smaller than --seq-length 64; raise it to at least that.",
        "--num-experts 8: experts have no biases; add --disable-bias-linear.",
        "--global-batch-size 9 is not divisible by --micro-batch-size 2 times data parallel size 1 = 2; try 8.",
        "--min-lr 1: must be at least 0 and at most --lr 0.001.",
    ],
    "!--mock-data --data-path /no/such --fp16 true --train_iters 10 --distributed-backend nccl --split 1,2,3,4": [
        "--fp16 is a switch and takes no value, got 'true'; drop the value, or the flag to switch it off.",
        "--train_iters is not a flag; did you mean --train-iters?",
        "--distributed-backend nccl needs a GPU and this machine shows none; drop it, or give gloo for CPUs.",
        "--split 1,2,3,4: needs one to three numbers, none negative, not all 0; for example 969,30,1.",
        "--data-path /no/such: there is no /no/such.bin; check the prefix, or make it with megatron-lite preprocess.",
    ],
}


@pytest.mark.parametrize(("changes", "answers"), FIVE_MISTAKES.items(), ids=["typos", "numbers", "places"])
def test_five_mistakes_are_five_lines(changes, answers):
    assert mistakes(changes) == answers


ONE_MISTAKE = read_table("""
--learning-rat 1 | config/is-not-flag-lists | --learning-rat | --help
--lerning-rate-decay-style x | config/is-not-flag-did | --lerning-rate-decay-style | --lr-decay-style
--profile_ranks 0 | config/is-not-flag-did | --profile_ranks | --profile-ranks
-seed 3 | config/is-not-flag-did | -seed | --seed
--Adam-Beta1 0.9 | config/is-not-flag-did | --Adam-Beta1 | --adam-beta1
--world-size 2 | config/is-set-by-launcher | --world-size
--rank 0 | config/is-set-by-launcher-rank | --rank
--dist_url tcp://x:1 | config/is-set-by-launcher-master | --dist_url
--nproc_per_node 8 | config/is-option-of-torchrun | --nproc_per_node
--use-zloss-fusion | config/is-not-flag-lists | --use-zloss-fusion | --help
--ema-decay 0.9 | config/is-not-flag-lists | --ema-decay | --help
--adam-beta 0.9 | config/is-not-flag-did-you | --adam-beta | --adam-beta1 | --adam-beta2
--init-method 0.1 | config/is-not-flag-did | --init-method | --init-method-std
--lr-warmup 0.1 | config/is-not-flag-did-you-mean | --lr-warmup | --lr-warmup-fraction | --lr-warmup-iters | --lr-warmup-samples
--moe-router-topkk 1 | config/is-not-flag-did | --moe-router-topkk | --moe-router-topk
--num-expert 8 | config/is-not-flag-did | --num-expert | --num-experts
--fp4_format e2m1 | config/is-not-flag-and | --fp4_format | --fp4-format
--recompute-m x | config/is-not-flag-did | --recompute-m | --recompute-method
--qk-clip-alpha 0.5 | config/layers-attend-with-plain | --qk-clip-alpha | ABSENT
--fp4-format e2m1 | config/and-use-or | --fp4-format | ABSENT | --bf16 | --fp16
--dump-param-to-param-group-map a b | config/is-absent | --dump-param-to-param-group-map | ABSENT
--x 1 --x 2 | config/is-not-flag-lists | --x | --help
-- | config/is-not-flag-lists-them | --help
--l 1 | config/is-not-flag-did | --l | --lr
--seed 3 4 | config/takes-one-value-got-2 | --seed | 2 | 3 | 4
--seed | config/takes-one-value-got-none | --seed
--seed= | config/is-no-usable-value-give-one | --seed | ''
--seed 3.0 | config/needs-whole-number | --seed | 3.0
--clip-grad off | config/needs-number | --clip-grad | off
--clip-grad nan | config/needs-finite-number | --clip-grad | nan
--clip-grad -inf | config/needs-finite-number | --clip-grad | -inf
--profile-ranks | config/takes-one-value-or | --profile-ranks
--profile-ranks 0 a | config/needs-whole-number | --profile-ranks | a
--data-path | config/takes-one-value-or | --data-path
--bf16=1 | config/is-switch-and-takes | --bf16 | 1
--normalization rmsnorm | config/choose-from-layernorm-rmsnorm | --normalization | rmsnorm
--optimizer rprop_x | config/choose-from-adam-sgd | --optimizer | rprop_x
--timing-log-level 3 | config/choose-from | --timing-log-level | 3 | 0 | 1 | 2
--yaml-cfg | config/takes-one-file-got | --yaml-cfg | 0
--yaml-cfg a b | config/takes-one-file-got | --yaml-cfg | 2
--seq-length 32 --encoder-seq-length 64 | config/and-are-one-setting | --seq-length | 32 | --encoder-seq-length | 64
""")


@pytest.mark.parametrize("row", ONE_MISTAKE, ids=lambda row: row[0])
def test_one_mistake(row):
    changes, key, *figures = row
    said = [text for text in mistakes(changes) if not text.startswith("--max-position-embeddings 32 is")]
    assert said == [wording(key, *(figure.replace("ABSENT", ABSENT_BEGINS) for figure in figures))]


def test_no_guess_is_itself_refused():
    lacking = find_texts(*STOPPING)
    for number, name in enumerate([*lacking, *find_texts(ACCEPTED)]):  # one of five kinds of typos each
        typos = (name[:-1], name[:-2] + name[-1], name + "s", name.replace("-", "_")[2:], name[: len(name) // 2])
        for line in read_command_line([f"--{typos[number % len(typos)].lstrip('-')}", "1"]).mistakes:
            guesses = re.findall(r"--[\w-]+", line.partition("; did you mean ")[2])
            assert not lacking.keys() & set(guesses), line


def test_words_before_flags_and_empty_values_of_shell_variables():
    stands = "'train' stands before any flag; put a flag in front of it, or drop it."
    assert read_command_line(["train", "--seed", "1"]).mistakes == [stands]
    assert mistakes(["--save", "", "--tensorboard-dir", " "]) == [
        wording("config/is-no-usable-value", "--save"),
        wording("config/is-no-usable-value-give", "--tensorboard-dir"),
    ]


READ = read_table("""
--seed=7 | seed | 7
--seed 7 --seed 8 | seed | 8
--profile-ranks -1 | profile_ranks | (-1,)
--profile-ranks 3 1 2 | profile_ranks | (3, 1, 2)
--profile-ranks 3 --profile-ranks 1 | profile_ranks | (1,)
--lr .5 | lr | 0.5
--lr -1e-3 | lr | -1e-3
--save=a=b | save | "a=b"
--save=--odd | save | "--odd"
--fp16 --fp16 | fp16 | True
--disable-bias-linear | add_bias_linear | False
--seq-length 64 --encoder-seq-length 64 | seq_length | 64
--persistent-save-interval 5 | save_interval | 5
--data-path 0.5 a 0.5 b | data_path | ("0.5", "a", "0.5", "b")
--rampup-batch-size 16 16 5859375 | rampup_batch_size | (16, 16, 5859375)
""")


@pytest.mark.parametrize(("words", "field", "value"), READ)
def test_values(words, field, value):
    line = read_command_line(words.split())
    assert line.mistakes == [] and line.values == {field: ast.literal_eval(value)} and set(line.spelled) == {field}


def test_a_value_that_could_not_be_read_breaks_no_further_rule():
    """Its default stands in for it, and nothing may be said about a value that the user did not give."""
    required = "--hidden-size --num-attention-heads --seq-length --max-position-embeddings --micro-batch-size"
    for flag in f"{required} --train-iters --lr --vocab-size --min-lr".split():
        assert len(mistakes(f"{flag} 1k")) == 1, flag
    # nor is a misspelt flag called missing too
    assert mistakes("!--lr --lr-rate 1") == [
        wording("config/is-not-flag-lists", "--lr-rate", "--help"),
        wording("config/is-missing-give-peak", "--lr"),
    ]
    assert mistakes("!--lr --Lr 1") == [wording("config/is-not-flag-did", "--Lr", "--lr")]
    assert mistakes("!--train-iters --trian-iters 10") == [
        wording("config/is-not-flag-did", "--trian-iters", "--train-iters")
    ]


def notes(changes, world=ALONE):
    line = read(changes)
    check(line, world)
    return remarks(line, world)


NOTES = read_table("""
--sequence-parallel | --sequence-parallel has no effect without --tensor-model-parallel-size above 1.
--no-persist-layer-norm | --no-persist-layer-norm has no effect here: kernels of norms are chosen by themselves.
--use-flash-attn | --use-flash-attn is an old spelling of --attention-backend auto.
--cpu-offloading-num-layers 0 | --cpu-offloading-num-layers 0 has no effect here: it is so anyway.
--recompute-granularity selective --recompute-modules mlp | --recompute-modules has no effect here: selective recomputation is of core_attn: other modules keep
--fine-grained-activation-offloading | --fine-grained-activation-offloading has no effect here: activations stay on the training device
--te-rng-tracker | --te-rng-tracker has no effect here: random numbers are torch's own.
--no-one-logger | --no-one-logger has no effect here: there is no such logger here
--pipeline-schedule ZeroBubble | --pipeline-schedule has no effect without --pipeline-model-parallel-size above 1.
--use-tp-pp-dp-mapping | --use-tp-pp-dp-mapping has no effect without --pipeline-model-parallel-size above 1.
--decoder-first-pipeline-num-layers 1 | --decoder-first-pipeline-num-layers has no effect without --pipeline-model-parallel-size above 1.
--batch-p2p-comm | --batch-p2p-comm has no effect here: stages of a pipeline always exchange
--sharp-enabled-group dp | --sharp-enabled-group has no effect here: it changes how ranks are connected
--bf16 --initial-loss-scale 8 | --initial-loss-scale has no effect without --fp16.
--no-step-timeline --timing-log-level 2 | --timing-log-level has no effect without the step timeline (drop --no-step-timeline).
--torch-compile-backend aot_eager | --torch-compile-backend has no effect without --torch-compile.
--save a | --save without --save-interval: a checkpoint is written when the run ends, none before.
--use-pytorch-profiler | --use-pytorch-profiler without --profile: profiling all the same.
--profile --use-pytorch-profiler --skip-train | --skip-train: there are no steps to profile.
--profile --use-pytorch-profiler --profile-step-start 101 --profile-step-end 103 | --profile-step-start 101 lies
--profile --use-pytorch-profiler --profile-step-start 99 --profile-step-end 102 | --profile-step-end 102 lies
--fp16 | --fp16 is 4 to 20 times slower than fp32 on CPUs
""")


def test_what_is_worth_a_word_is_told_once():
    for changes, note in NOTES:
        told = notes(changes)
        assert len(told) == 1 and told[0].startswith(note), told


def test_what_cannot_matter_is_said():
    """Each flag that depends on another one, given alone."""
    flags = {flag.field: flag for flag in list_flags(Args)}
    for dependency in DEPENDENCIES:
        needed = dependency.needed
        for flag in (flags[name] for name in dependency.fields):
            value = [] if flag.is_switch else [flag.choices[-1] if flag.choices else VALUES.get(flag.field, "3")]
            external = ["!--mock-data", "--dataloader-type", "external", "--external-dataloader", "a.py:f"]
            context = external if flag.field == "num_workers" else []
            context = ["--no-step-timeline"] if "timeline" in needed else context
            context = ["--model", "a.py:f"] if "--model" in needed else context
            told = remarks(read([*context, flag.spelling, *value]), ALONE)
            assert wording("config/has-no-effect-without", flag.spelling, needed) in told and len(told) <= 2, told


def test_what_works_needs_no_word():
    window = "--profile --use-pytorch-profiler --profile-step-end 101 --profile-step-start"
    saved = "--save a --save-interval 5 --log-progress"
    for changes in ("", "--bf16 --loss-scale 8", saved, f"{window} 99", f"{window} 100", "--record-memory-history"):
        assert notes(changes) == []
    assert notes("--fp16 --profile --record-memory-history", World(gpus=1, under_nsys=True)) == []


def test_nothing_given_asks_for_everything():
    with pytest.raises(ConfigError) as caught:
        check(read_command_line([]), World())
    missing = [text.split(" is missing")[0] for text in caught.value.lines]
    assert missing == MISSING.split()
    assert read_command_line(argv()).mistakes == mistakes() == []


def test_several_numbers_may_be_one_word():
    words = [
        "--context-parallel-size",
        "4",
        "--cp-comm-type",
        "a2a+p2p",
        "--hierarchical-context-parallel-sizes",
        "2 2",
    ]
    assert read(words).args.parallel.hierarchical_context_parallel_sizes == (2, 2)
    assert read(["--profile-ranks", "0 x"]).mistakes == [wording("config/x-needs-whole-number", "--profile-ranks")]
