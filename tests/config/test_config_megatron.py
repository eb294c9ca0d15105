"""Every flag that Megatron-LM's launch scripts use has exactly one answer, and knobs have Megatron's defaults."""

import re

import pytest
from support.command_lines import mistakes, read, read_table
from support.paths import REPO
from support.wording import wording

from megatron_lite.cli.planned_flags import adapt_flags
from megatron_lite.config.args import Args
from megatron_lite.config.flags import (
    ABSENT,
    ABSENT_BEGINS,
    ANSWERS,
    FILE,
    REFUSED,
    RENAMED,
    RESPELLED,
    RETIRED,
    STOPPING,
    dashed,
    find_texts,
    list_flags,
    read_flags,
)

TABLE = dict(
    (line.rstrip("\n").split("\t") + [None])[:2]
    for line in (REPO / "tests/config/megatron_flags.txt").read_text(encoding="utf-8").splitlines()
    if line.startswith("--")
)
KNOBS = {spelling: flag for flag in list_flags(Args) for spelling in flag.spellings}
NAMES = {"knob": set(KNOBS)} | {answer: set(find_texts(answer)) for answer in ANSWERS}
OTHER_DEFAULTS = {  # where a default differs from Megatron's: ours, and why
    "--distributed-backend": (None, "chosen: nccl with GPUs, gloo without"),
    "--eval-interval": (1000, "None crashes Megatron 0.16; 1000 is what it was before"),
    "--num-workers": (None, "chosen: Megatron's 2 with GPUs, 0 without"),
    "--dataloader-type": ("single", "what Megatron itself makes of None"),
}
OF_THIS_TRAINER = """
    --explain-attention --no-exit-on-save-failure --external-dataloader --run-dir --pytorch-profiler-collect-memory
    --pytorch-profiler-collect-flops --profile-modules --memory-history-events --profile-gzip --no-profile-gzip
    --no-profile-on-demand --no-report --no-step-timeline --no-hardware-samples --mlflow-experiment --torch-compile --torch-compile-backend
    --model
"""
VALUES = {
    "--warmup": "0.1",
    "--checkpoint-granularity": "full",
    "--checkpoint-method": "block",
    "--activations-checkpoint-method": "block",
}
SEED = """--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048
--attention-backend auto --micro-batch-size 4 --global-batch-size 16 --train-iters 20000 --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5
--lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 20000
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --split 949,50,1 --log-interval 200
--save-interval 10000 --eval-interval 1000 --save c --load c --eval-iters 10 --tensorboard-dir t --profile
--use-pytorch-profiler --profile-step-start 110 --profile-step-end 112 --profile-ranks 0"""


def our_default(flag):
    """As Megatron's parser would print it."""
    if flag.is_switch:
        return "switch off" if flag.default else "switch"
    if flag.many:
        return str(list(flag.default)) if flag.default else "None"
    return str(int(flag.default)) if flag.field == "initial_loss_scale" else str(flag.default)


def test_every_flag_has_exactly_one_answer_and_megatrons_default():
    assert len(TABLE) == 226
    for name, default in TABLE.items():
        kinds = [kind for kind, names in NAMES.items() if name in names]
        assert len(kinds) == 1 and (kinds == ["knob"]) == (default is not None), name
        if name in OTHER_DEFAULTS:
            assert KNOBS[name].default == OTHER_DEFAULTS[name][0] != default
        elif default is not None:
            assert our_default(KNOBS[name]) == default, name
    assert len(NAMES["knob"] & set(TABLE)) >= 150 and len(NAMES[REFUSED] & set(TABLE)) <= 17


def test_no_name_anywhere_has_two_answers():
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    written = sum(len(line.rpartition("|")[2].split()) for line in lines)
    assert written == len(read_flags()) == sum(map(len, NAMES.values())) - len(KNOBS)
    assert not set(read_flags()) & set(KNOBS)
    assert len(KNOBS) == sum(len(flag.spellings) for flag in list_flags(Args))


def test_a_field_is_its_flag_and_what_is_ours_is_marked_so():
    for flag in list_flags(Args):
        ours = flag.spelling in OF_THIS_TRAINER.split() or flag.field == "tokenizer_type"
        assert ("(ours)" in flag.help) == ours, flag.spelling
        assert flag.spelling == dashed(flag.field) or flag.is_switch and flag.default


def test_every_answer_is_said_in_one_line_and_names_flags_that_exist():
    everything = set().union(*NAMES.values())
    for flag in read_flags().values():
        assert set(re.findall(r"--[\w-]+", flag.text)) <= everything, flag
        if flag.answer in (RESPELLED, RENAMED):
            continue
        line = read([flag.name, "1"])
        said = [text for text in line.notes + line.mistakes if text.startswith(f"{flag.name} ")]
        assert len(said) == 1 and flag.text in said[0] and "\n" not in said[0] and not flag.text.endswith(".")
        assert bool(line.mistakes) == (flag.answer in (*STOPPING, RETIRED))
        if flag.answer == REFUSED:
            assert re.search(r"\b(drop it|use that)\b", flag.text), "a refusal says the remedy"


def test_old_spellings_mean_their_new_ones():
    for old, text in find_texts(RESPELLED).items():
        new = text.split()
        is_whole = KNOBS[new[0]].is_switch or len(new) > 1  # needs no value
        value = [VALUES.get(old, "1")] if not is_whole else []
        line = read([old, *value])
        assert line.values == read([*new, *value]).values
        assert line.values != read().values or old == "--use-flash-attn"
        assert line.notes == [wording("config/is-old-spelling-of", old, text)] and line.mistakes == []


# Flags that Megatron-LM 0.16.1 and its main branch of August 2026 end at, whatever their value: what is said.
OUTDATED_FLAGS = read_table("""
--batch-size 2 | --batch-size is a flag that Megatron-LM no longer takes; write --micro-batch-size instead.
--model-parallel-size 1 | --model-parallel-size is a flag that Megatron-LM no longer takes; write --tensor-model-parallel-size instead.
--warmup 1 | --warmup is a flag that Megatron-LM no longer takes; write --lr-warmup-fraction instead.
--checkpoint-activations | --checkpoint-activations is a flag that Megatron-LM no longer takes; write --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 instead.
--activations-checkpoint-method uniform | --activations-checkpoint-method is a flag that Megatron-LM no longer takes; write --recompute-granularity full --recompute-method instead.
--layernorm-epsilon 1e-5 | --layernorm-epsilon is a flag that Megatron-LM no longer takes; write --norm-epsilon instead.
--override-lr-scheduler | --override-lr-scheduler is a flag that Megatron-LM no longer takes; write --override-opt-param-scheduler instead.
--data-impl mmap | --data-impl is a flag that Megatron-LM no longer takes: all data is memory-mapped .bin/.idx; drop it.
--DDP-impl torch | --DDP-impl is a flag that Megatron-LM no longer takes: data parallel is torch's DistributedDataParallel; drop it.
--fused-layer-norm | --fused-layer-norm is a flag that Megatron-LM no longer takes: fusion is chosen by itself; drop it.
""")


def test_flags_that_megatron_takes_no_more_stop_a_run_with_the_remedy():
    for words, said in OUTDATED_FLAGS:
        assert mistakes(words.split()) == [said]
    # the flag of today is not called missing as well
    assert len(mistakes("!--micro-batch-size --batch-size 2")) == 1


def test_what_the_remedy_of_an_outdated_flag_names_works():
    for old, text in find_texts(RENAMED).items():
        new = text.split()
        needs_value = new[-1] in KNOBS and not KNOBS[new[-1]].is_switch
        value = [VALUES.get(old, "1")] if needs_value else []
        assert read([*new, *value]).mistakes == []
        assert adapt_flags([old, *value], (), ())[0] == [*new, *value]
    for old in find_texts(RETIRED):
        assert adapt_flags([old, "--lr", "1"], (), ())[0] == ["--lr", "1"]


# Flags that Megatron-LM takes and that lead to nothing else there: a run of 0.16.1 starts with each of them.
TAKEN = """
--use-rotary-position-embeddings --use-flash-attn --recompute-activations --no-persist-layer-norm --no-initialization
--no-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad --no-tp-comm-overlap-ag --no-tp-comm-overlap-rs --no-tp-comm-split-ag
--no-tp-comm-split-rs --disable-fp8-wgrad --disable-clone-scatter-output-in-embedding --disable-ckpt-fully-parallel-save
--disable-use-tokenizer-model-from-checkpoint-args --disable-strict-fsdp-dtensor-load --no-rl-use-sequence-packing
--no-rl-partial-rollouts --no-rl-skip-bos-token
"""


@pytest.mark.parametrize("flag", TAKEN.split())
def test_switches_that_megatron_takes_in_two_spellings_pass_in_both(flag):
    assert mistakes([flag]) == []


def test_values_that_ask_for_nothing_pass():
    passing = {flag.name: flag.passing for flag in read_flags().values() if flag.passing is not None}
    assert len(passing) == 7
    for name, values in passing.items():
        assert mistakes([name, *values]) == [] and name in find_texts(*STOPPING)
        assert read([name, *values]).notes == [wording("config/has-no-effect-here", " ".join((name, *values)))]
        assert len(mistakes([name, *values, "7"])) == 1


def test_what_is_not_here_is_said_in_one_line_whatever_follows_it():
    for name, text in find_texts(ABSENT).items():
        assert re.fullmatch(r"--[a-z0-9-]+", name)
        for words in ([name], [f"{name}=7"], [name, "a", "1,-2", "-1,0", "-3", "[1]*3"]):
            assert len(said := mistakes(words)) == 1, said
            assert said[0].startswith(f"{name} {ABSENT_BEGINS}") and said[0].endswith(".") and ".." not in said[0]
            assert text in said[0]


def test_usual_launch_scripts_pass_without_a_note(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert mistakes(SEED.split()) == [] and read(SEED.split()).notes == []
