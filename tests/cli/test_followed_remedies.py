"""What a message advises works: each test makes a mistake, does what the message says, and the command goes on."""

import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import convert
from support.command_lines import argv, mistakes
from support.finding_cases import CASES, MORE_TRIGGERS
from support.paths import REPO
from support.snapshot_maker import training
from support.training_maker import gpu
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.findings import communication_rules
from megatron_lite.analysis.findings.product_rules import _keep_flags, suggest_size
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.cli.main import main
from megatron_lite.config.args import Args
from megatron_lite.config.flags import list_flags
from megatron_lite.config.world import World
from megatron_lite.formats.hardware import PROCESSORS
from megatron_lite.formats.run_record import PlanRecord, Settings, Shape, ShardingRecord
from megatron_lite.planner.find_processors import find_processors

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

README_SCRIPT = REPO / "examples" / "gpt3" / "train_gpt3_857m_distributed.sh"
WORDS = ["CKPT", "TB", "VOCAB", "MERGES", "DATA"]
FINDINGS = [*((code, case[0]) for code, case in CASES.items()), *MORE_TRIGGERS]
END = re.compile(r"\.$| (?:runs|follows|shows|reads|writes|explains?) .*")  # of a command that a sentence names


def fail(capfd, *words: object) -> str:
    """What the command says when it refuses."""
    assert main([str(word) for word in words]) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: ") and "Traceback" not in said
    return said


def follow(said: str) -> list[str]:
    """The command that a message names last, as a shell would take it."""
    named = said.strip().splitlines()[-1].rpartition("megatron-lite ")[2]
    assert named, said
    return shlex.split(END.sub("", named))


def succeed(capfd, *words: object) -> str:
    code = main([str(word) for word in words])
    printed = capfd.readouterr()
    assert code == 0, printed.err
    return printed.out


# --- plan


@pytest.mark.parametrize("words", [[*WORDS, "--gpu", "H100"], ["--gpu", "H100", *WORDS], [*WORDS, "--", "--gpu=H100"]])
def test_options_of_plan_work_behind_a_script(capfd, words):
    first = succeed(capfd, "plan", "--gpu", "H100", README_SCRIPT, *WORDS)
    assert succeed(capfd, "plan", README_SCRIPT, *words) == first and wording("cli/fits-in-one-h-3") in first


def test_options_of_plan_work_behind_flags_of_the_trainer(capfd):
    first = succeed(capfd, "plan", "--gpu", "H200", "T4", "--", *argv())
    assert succeed(capfd, "plan", *argv(), "--gpu", "H200", "T4") == first


def test_an_option_that_the_script_has_itself_is_the_script_s(capfd):
    flags = shlex.join(argv())
    Path("own.sh").write_text(f'test "$1" = --gpus && torchrun --nproc_per_node "$2" pretrain_gpt.py {flags}\n')
    assert "2 GPUs" in succeed(capfd, "plan", "own.sh", "--gpus", "2")


def test_a_batch_that_does_not_divide_is_changed_as_the_message_says(capfd):
    said = fail(capfd, "plan", "--gpus", "8", README_SCRIPT, *WORDS)
    assert "try 32" in said
    assert "8 GPUs, batch 32 = " in succeed(capfd, *follow(said))


@pytest.mark.parametrize(
    ("passes_on", "advised"), [('"$@"', "mine.sh --global-batch-size 32"), ("", "'--add=--global-batch-size 32'")]
)
def test_a_script_of_ones_own_is_changed_in_the_way_that_it_allows(capfd, passes_on, advised):
    flags = shlex.join(argv("--micro-batch-size 4 --global-batch-size 16"))
    Path("mine.sh").write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags} {passes_on}\n")
    said = fail(capfd, "plan", "mine.sh")
    assert advised in said
    assert "batch 32 = 4 x 8 x 1" in succeed(capfd, *follow(said))


REFUSED = {  # flags in a script: what the advice then brings
    "several that are not here": ("--fp4-format e2m1 --decoupled-lr 1e-4 --of-a-fork 7", "left out by --drop"),
    "a layout that needs more GPUs": ("--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2", "4 GPUs"),
    "a choice spelled in another way": ("--optimizer Adam", "given by --add: --optimizer adam"),
    "both": ("--of-a-fork 7 --optimizer Adam", "given by --add: --optimizer adam"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_script_is_planned_without_editing_as_the_message_says(capfd, kind):
    more, answer = REFUSED[kind]
    Path("mine.sh").write_text(f"torchrun --nproc_per_node 2 pretrain_gpt.py {shlex.join(argv())} {more}\n")
    said = fail(capfd, "plan", "mine.sh")
    if kind == "both":
        said = fail(capfd, *follow(said))
    assert answer in succeed(capfd, *follow(said))


def test_a_flag_of_another_model_is_refused_without_a_command(capfd):
    flags = shlex.join(argv("--linear-attention-type gdn --of-a-fork"))
    Path("mine.sh").write_text(f"torchrun --nproc_per_node 2 pretrain_gpt.py {flags}\n")
    said = fail(capfd, "plan", "mine.sh")
    assert wording("cli/train-that-model-with") in said and "megatron-lite plan" not in said


def test_every_gpu_that_the_message_lists_is_taken(capfd):
    said = fail(capfd, "plan", "--gpu", "NOPE", *argv())
    names = said.strip().removesuffix(".").partition("take one of ")[2].split(", ")
    assert len(names) > 20
    for name in names:
        [found] = find_processors(name.split())
        assert found.name.startswith(name)
    assert [one.name for one in find_processors(["H100", "SXM", "80", "GB", "T4", "A100", "PCIe", "40", "GB", "H200"])] == [
        "H100 SXM 80 GB", "T4", "A100 PCIe 40 GB", "H200",
    ]  # fmt: skip


def test_the_beginning_of_a_model_s_name_is_enough():
    models = {word for one in PROCESSORS if one.memory_gib for word in one.name.split()[:1]}
    assert "MI300X" in models
    assert [one.name for one in find_processors(["MI300", "h100", "A100"])] == [
        "MI300X",
        "H100 SXM 80 GB",
        "A100 SXM 80 GB",
    ]


# --- watch


def test_watch_takes_a_command_without_dashes(capfd):
    Path("x.py").write_text("import sys; print('ran with', *sys.argv[1:])\n")
    python = sys.executable
    for words in ([python, "x.py", "--memory", "--", "y"], ["--", python, "x.py", "--memory", "--", "y"]):
        assert main(["watch", "--no-report", *words]) == 0
        assert "ran with --memory -- y" in capfd.readouterr().out


def test_a_script_that_is_no_command_is_run_as_the_message_says(capfd):
    Path("x.py").write_text("print('it ran')\n")
    said = fail(capfd, "watch", "x.py")
    assert "it ran" in succeed(capfd, *follow(said))
    assert wording("cli/check-its-path") in fail(capfd, "watch", "--", "y.py")


# --- live


def test_live_of_a_folder_that_is_no_run_names_one_that_is(capfd):
    for name in ("older", "newer"):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "run.json").write_text(json.dumps({"schema": 1, "status": "finished"}))
    for words in ("runs", "runs/none", "runs/newer/run.json"):
        assert wording("cli/run-has-ended") in succeed(capfd, *follow(fail(capfd, "live", words)))


def test_live_of_nothing_says_what_to_do(capfd):
    Path("empty").mkdir()
    assert "without --once" in fail(capfd, "live", "--once", "empty")
    assert main(["live", "--silence", "0.1", "empty"]) == 3
    assert "run.json" in fail(capfd, "live", "nowhere")


@pytest.mark.parametrize("name", ["t.pt.trace.json", "snapshot.pickle"])
def test_live_of_recordings_without_a_run_names_the_command_that_reads_them(capfd, name):
    Path("recorded").mkdir()
    if name.endswith(".json"):
        gpu(Path("recorded"))
    else:
        training().write(Path("recorded"))
    [file] = Path("recorded").iterdir()
    for path in ("recorded", file):
        for words in (["live", path], ["live", "--once", path]):
            said = fail(capfd, *words)
            assert len(said.splitlines()) == 1
            assert "megatron-lite report " in said
            assert succeed(capfd, *follow(said), "--no-html")


def test_live_of_a_file_of_no_run_names_no_folder_without_one(capfd):
    Path("notes.txt").write_text("nothing\n")
    said = fail(capfd, "live", "notes.txt")
    assert "megatron-lite live ." not in said and "run.json" in said


# --- preprocess, inspect, explain


def test_remedies_of_preprocess_and_inspect_work(capfd):
    Path("a.jsonl").write_text('{"content": "some words"}\n')
    words = ["preprocess", "--input", "a.jsonl", "--output-prefix", "o"]
    [tokenizer] = re.findall(r"use (--tokenizer-type \w+)", fail(capfd, *words))
    words += tokenizer.split()
    [key] = re.findall(r"it has (\w+) \(--json-keys\)", fail(capfd, *words))
    succeed(capfd, *words, "--json-keys", key)
    [prefix] = re.findall(r"did you mean (\w+)\?", fail(capfd, "inspect", "o"))
    succeed(capfd, "inspect", prefix)


def test_names_that_messages_guess_are_right(capfd):
    [code] = re.findall(r"did you mean ([a-z-]+)\?", fail(capfd, "explain", "sync-in-ste"))
    assert succeed(capfd, "explain", code).startswith(f"{code}: ")
    [command] = re.findall(r"did you mean ([a-z-]+)\?", fail(capfd, "exlain"))
    assert succeed(capfd, command, code).startswith(f"{code}: ")


# --- findings: the trainer takes each flag that one names, on the command line of such a run

RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# of a finding: what the run was started with beside the flags of command_lines.py, and its number of ranks
STARTED_WITH = {
    "all-reduce-tail": ("--bf16", 2),
    "gathered-parameters": ("--use-distributed-optimizer", 2),
    "needless-recompute": (RECOMPUTED, 1),
    "needless-sharding": ("--use-torch-fsdp2", 2),
    "overflow-storm": ("--fp16", 1),
    "parameter-gather": ("--use-torch-fsdp2", 2),
    "pipeline-bubble": ("--pipeline-model-parallel-size 2", 2),
    "scale-collapse": ("--fp16", 1),
    "sequence-parallel-off": ("--tensor-model-parallel-size 2", 2),
    "slow-16-bit-products": ("--fp16", 1),
    "state-kept-whole": ("", 2),
    "tensor-across-nodes": ("--tensor-model-parallel-size 2", 2),
    "unbalanced-stages": ("--num-layers 18 --pipeline-model-parallel-size 4", 4),
}
WITHOUT = re.compile(
    r"(?:instead of|leave out|drop|run without) ((?:(?:, | and | )?--[a-z][a-z0-9-]*(?: [a-z0-9]+(?=,|$| --))?)+)"
)
TOGETHER = {"tensor-across-nodes", "unbalanced-stages"}  # whose flags need each other


def change_command(started_with: str, advice: str, flag: str) -> str:
    """The flags after the advice was followed: without those that it takes out, and with `flag`."""
    kept = f" {started_with}"
    for gone in WITHOUT.findall(advice):
        for name in re.findall(r"--[a-z][a-z0-9-]*", gone):
            kept = re.sub(rf" {name}(?![\w-])(?: (?!--)\S+)*", "", kept)
    return f"{kept} {flag}"


@pytest.mark.parametrize(("code", "write_case"), FINDINGS, ids=[code for code, _ in FINDINGS])
def test_the_trainer_takes_what_a_finding_names(tmp_path, code, write_case):
    write_case(tmp_path)
    flags_of_trainer = {spelling: flag for flag in list_flags(Args) for spelling in flag.spellings}
    for found in analyze([tmp_path]).findings:
        started_with, ranks = STARTED_WITH.get(found.code, ("", 2))
        started_with = f"--global-batch-size 64 {started_with}"
        for flag in [" ".join(found.flags)] if found.code in TOGETHER else found.flags:
            words = flag.split()
            has_value = len(words) > 1 or not flag.startswith("--") or flags_of_trainer[words[0]].is_switch
            if flag.startswith("--") and has_value and {"N", "M"}.isdisjoint(words):
                changed = change_command(started_with, found.advice, flag)
                assert mistakes(changed, World(size=ranks)) == [], (found.code, changed)


@pytest.mark.parametrize(
    ("run", "size", "wanted", "changed"),
    [
        ({"hidden_size": 1000, "num_attention_heads": 10}, 1000, 1024, "--hidden-size 1024 --num-attention-heads 8"),
        ({"hidden_size": 1000, "num_attention_heads": 10, "kv_channels": 100}, 1000, 1024, "--hidden-size 1024"),
        ({"hidden_size": 1000, "num_attention_heads": 8}, 1000, 1024, "--hidden-size 1024"),
        (
            {"seq_length": 1000, "max_position_embeddings": 1000},
            1000,
            1024,
            "--seq-length 1024 --max-position-embeddings 1024",
        ),
    ],
)
def test_a_size_is_named_with_the_flag_without_which_it_is_refused(run, size, wanted, changed):
    facts = SimpleNamespace(shape=convert(run, Shape), settings=convert(run, Settings))
    said = suggest_size(facts, size, wanted)
    assert said.partition(" (")[0] == changed
    heads, kv = run.get("num_attention_heads", 4), run.get("kv_channels")
    has = f"--num-attention-heads {heads}" + (f" --kv-channels {kv}" if kv else "")
    assert mistakes(f"{has} {changed}") == []


@pytest.mark.parametrize(("now", "smaller"), [(1, None), (2, 1), (3, 1), (4, 2), (5, 1), (6, 3), (9, 3), (16, 8)])
def test_a_smaller_micro_batch_divides_every_batch_that_the_larger_one_divides(now, smaller):
    facts = SimpleNamespace(settings=Settings(micro_batch_size=now))
    assert Facts.smaller_micro_batch.fget(facts) == smaller


def test_ranks_that_shard_state_are_not_sent_to_buckets():
    for gathers_twice, flag in ((True, "--use-distributed-optimizer"), (False, "--global-batch-size")):
        facts = SimpleNamespace(sharding=ShardingRecord(gathers_twice=gathers_twice), has_plan=True)
        remedy = communication_rules._advise_shards(facts)
        assert remedy.flags == (flag,) and "bucket" not in remedy.advice
    plan = PlanRecord(sharding=ShardingRecord(ranks=2), precision="fp32")
    sharded = SimpleNamespace(plan=plan, has_plan=True, settings=Settings())
    assert communication_rules._advise_on_tail(sharded).flags == ("--global-batch-size",)


def test_sizes_that_follow_from_a_flag_s_are_not_advised_beside_it():
    assert _keep_flags(["--hidden-size 128 (now 96)", "pad 288 to 320"]) == ["--hidden-size 128 (now 96)"]
    assert _keep_flags(["pad 288 to 320"]) == ["pad 288 to 320"]
