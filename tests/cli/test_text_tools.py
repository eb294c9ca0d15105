"""Small programs that a launch script asks for words are answered where that can do no harm; else their output is missing, and it is said."""

import os
import shutil
import time
from pathlib import Path

import pytest
from support.wording import wording

from megatron_lite.cli.launch_script import read_launch_script
from megatron_lite.cli.planned_run import planned_run
from megatron_lite.cli.text_tools import READERS, Toolbox
from megatron_lite.errors import ConfigError, UserError


@pytest.fixture
def box(tmp_path):
    (tmp_path / "box").mkdir()
    return Toolbox(tmp_path / "box", gpus=4, environment={"SLURM_JOB_NODELIST": "gpu[08-10],login"})


ANSWERS = {  # command, what is piped to it: what it prints
    "seq 3": ("", "1\n2\n3\n"),
    "seq -s , 1 2 5": ("", "1,3,5\n"),
    "expr 3 * 4": ("", "12\n"),
    "cut -d. -f1": ("123.server\n", "123\n"),
    "tr , \\n": ("0,1,2", "0\n1\n2"),
    "wc -l": ("a\nb\n", "2\n"),
    "head -n 1": ("a\nb\n", "a\n"),
    "tail -c 4": ("123456", "3456"),
    "sort -u": ("b\na\nb\n", "a\nb\n"),
    "uniq": ("a\na\n", "a\n"),
    "grep -c x": ("x\ny\n", "1\n"),
    "sed s/x/y/g": ("xx", "yy"),
    "awk {print$2}": ("a b", "b\n"),
    "awk -F| {print$2}": ("a|b", "b\n"),
    "awk NR>1{print$1}": ("a\nb\n", "b\n"),
    "bc -l": ("0.0001 * 2\n", ".0002\n"),
    "scontrol show hostnames gpu[1-2,7]": ("", "gpu1\ngpu2\ngpu7\n"),
    "scontrol show hostname": ("", "gpu08\ngpu09\ngpu10\nlogin\n"),
    "nvidia-smi -L": ("", "".join(f"GPU {i}: NVIDIA GPU (UUID: GPU-{i})\n" for i in range(4))),
    "nvidia-smi --query-gpu=name --format=csv,noheader": ("", "0\n1\n2\n3\n"),
    "xargs": ("a\nb\n", "a b\n"),
    "shuf -i 20000-65000 -n 1": ("", "20000\n"),
    "cat": ("x", "x"),
}


@pytest.mark.parametrize("command", ANSWERS)
def test_programs_that_only_read_and_print(box, tmp_path, command):
    words = command.split()
    if words[0] in READERS and not shutil.which(words[0]):
        pytest.skip(f"{words[0]} is not on this machine")
    piped, printed = ANSWERS[command]
    answer = box.answer(words, str(tmp_path), piped)
    assert (answer.text, answer.code, box.left_out) == (printed, 0, [])
    assert box.wants_input(words, str(tmp_path)) == bool(piped)


PYTHON = {
    "print(1000*3)": "3000\n",
    "x = 2 ** 10\nprint(x // 3, x)": "341 1024\n",
    "import math; print(math.ceil(10 / 4))": "3\n",
    "print(f'{1e-4 * 2:.1e}')": "2.0e-04\n",
    "import socket; s=socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])": "29500\n",
    "import torch; print(torch.cuda.device_count())": "4\n",
    "import sys; print(int(sys.argv[1]) * 2)": "42\n",
    "print(9 ** 9 ** 9)": None,
    "print('x' * 10**9)": None,
    "print(__import__('os').getcwd())": None,
    "open('x', 'w')": None,
    "print(open('/etc/passwd').read())": None,
    "print(().__class__)": None,
    "for i in range(3): print(i)": None,
    "print(": None,
    "print(f'{1:999999999}')": None,
}


@pytest.mark.parametrize("program", PYTHON)
def test_python_is_asked_for_arithmetic_only(box, program):
    answer = box.answer(["python3", "-c", program, "21"], "/", "")
    assert (answer and answer.text) == PYTHON[program]
    assert len(box.left_out) == (PYTHON[program] is None)


ENDLESS = ["seq 1 1000000000000", "seq 1 0 2", "cat /dev/zero", "cat fifo", "head -c 100000000 /dev/zero", "wc -c fifo",
           "grep -r x /", "tail -f file", "awk BEGIN{while(1);}", "grep x fifo", "sort /dev/zero", "date -f fifo"]  # fmt: skip


@pytest.mark.parametrize("command", ENDLESS)
def test_what_would_not_end_or_fill_memory_is_left_out(box, tmp_path, command):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("x")
    started = time.process_time()
    answer = box.answer(command.split(), str(tmp_path), "")
    assert answer is None or len(answer.text) < 100
    assert time.process_time() - started < 1


def test_files_of_the_script_are_copies(box, tmp_path):
    path = str(tmp_path / "hosts")
    box.write(path, "a\n", appends=False)
    box.write(path, "b\n", appends=True)
    assert not Path(path).exists()
    for words in (
        ["cat", "hosts"],
        ["cat", path],
        ["cat", "./sub/../hosts"],
        ["sort", "hosts"],
        ["head", "-n", "2", "hosts"],
    ):
        assert box.answer(words, str(tmp_path), "").text == "a\nb\n"
    assert box.answer(["wc", "-l", "nothing"], str(tmp_path), "").code == 1
    made = box.answer(["mktemp"], str(tmp_path), "").text.strip()
    box.write(made, "x", appends=False)
    assert Path(made).parent == box.folder and box.answer(["cat", made], "/", "").text == "x"


MODEL = ("--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
         "--mock-data --tokenizer-type ByteTokenizer")  # fmt: skip
EMPTY = {
    "directly": ("--lr $(find_lr a.json) --train-iters 3", "", "--lr is empty: `find_lr a.json` was not run"),
    "by a variable": (
        "--lr $LR --train-iters 3",
        "LR=`find_lr`",
        "--lr is empty: `find_lr` was not run; write LR=VALUE",
    ),
    "by two": (
        "--train-iters $N --lr 1",
        'M="$(ask_db x)"\nN=${M}',
        "--train-iters is empty: `ask_db x` was not run; write M=VALUE",
    ),
    "in arithmetic": (
        "--train-iters $N --lr 1",
        "N=$(( $(ask_db x) * 2 ))",
        "--train-iters is empty: `ask_db x` was not run; write N",
    ),
    "a number": (
        "--global-batch-size $N --lr 1 --train-iters 3",
        "N=$((0$(ask_db x) * 2))",
        "--global-batch-size: `ask_db x`, from which it comes, was not run",
    ),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_an_empty_value_names_the_command_that_was_not_run(tmp_path, kind):
    flags, before, message = EMPTY[kind]
    path = tmp_path / "x.sh"
    path.write_text(f"{before}\ntorchrun --nproc_per_node 2 pretrain_gpt.py {MODEL} {flags}\n")
    with pytest.raises(ConfigError) as raised:
        planned_run([str(path)], None)
    assert any(line.startswith(message) for line in raised.value.lines)


WITHOUT_VALUE = {  # the script before the launch, the value of --lr: what is said
    "a variable of the cluster": (
        "X=$(find_lr)",
        "$Y",
        "--lr is empty: Y has no value here; give it: Y=VALUE megatron-lite plan",
    ),
    "an argument": ("", "$2", "--lr is empty: it is argument 2 of"),
    "an argument by a variable": ("LR=${3}", "$LR", "--lr is empty: it is argument 3 of"),
    "a default that nobody took": (
        '[ "$N" = 4 ] && : ${LR:=3}',
        "$LR",
        "--lr is empty: LR has no value here; give it: LR=VALUE",
    ),
    "set to nothing": ("LR=", "$LR", "--lr takes one value, got none."),
}


@pytest.mark.parametrize("kind", WITHOUT_VALUE)
def test_an_empty_value_names_what_has_none(tmp_path, kind):
    before, value, message = WITHOUT_VALUE[kind]
    path = tmp_path / "x.sh"
    path.write_text(f"{before}\ntorchrun --nproc_per_node 2 pretrain_gpt.py {MODEL} --train-iters 3 --lr {value}\n")
    with pytest.raises(ConfigError) as raised:
        planned_run([str(path)], None)
    line = raised.value.lines[0]
    assert line.startswith(message)


KNOWN = {  # --tokenizer-type and --tokenizer-model: its size
    "HuggingFaceTokenizer gpt2": 50_257,
    "HuggingFaceTokenizer meta-llama/Llama-2-7b-hf": 32_000,
    "HuggingFaceTokenizer meta-llama/Llama-3.1-8B": 128_256,
    "HuggingFaceTokenizer /scratch/models/Meta-Llama-3-70B": 128_256,
    "HuggingFaceTokenizer mistralai/Mistral-7B-v0.1": 32_000,
    "HuggingFaceTokenizer mistralai/Mistral-7B-v0.3": 32_768,
    "HuggingFaceTokenizer mistralai/Mistral-Nemo-Base-2407": 131_072,
    "HuggingFaceTokenizer mistralai/Mixtral-8x7B-v0.1": 32_000,
    "HuggingFaceTokenizer Qwen/Qwen2.5-7B": 151_665,
    "HuggingFaceTokenizer Qwen/Qwen3-8B": 151_669,
    "HuggingFaceTokenizer google/gemma-2-9b": 256_000,
    "HuggingFaceTokenizer deepseek-ai/DeepSeek-V3": 129_280,
    "HuggingFaceTokenizer deepseek-ai/deepseek-llm-7b-base": 102_400,
    "HuggingFaceTokenizer EleutherAI/pythia-1b": 50_277,
    "HuggingFaceTokenizer facebook/opt-125m": 50_265,
    "HuggingFaceTokenizer microsoft/phi-2": 50_295,
    "Llama2Tokenizer /x/tokenizer.model": 32_000,
    "TikTokenizer /x/multiMixV8.vocab.json": 131_072,
}


@pytest.mark.parametrize("named", KNOWN)
def test_the_size_of_a_known_tokenizer_is_assumed_and_said(named):
    kind, model = named.split()
    words = f"{MODEL} --lr 1 --train-iters 3 --tokenizer-type {kind} --tokenizer-model {model}".split()
    found = planned_run(words, 1)
    assert found.plan.vocab_size == KNOWN[named]
    assert any(f"{KNOWN[named]:,}" in note and "is assumed" in note for note in found.notes)


def test_an_unknown_tokenizer_is_asked_for():
    words = f"{MODEL} --lr 1 --train-iters 3 --tokenizer-type HuggingFaceTokenizer --tokenizer-model my/own".split()
    with pytest.raises(
        UserError, match="--tokenizer-model my/own: is not here to be counted; add --padded-vocab-size N"
    ):
        planned_run(words, 1)
    assert planned_run([*words, "--padded-vocab-size", "1024"], 1).plan.vocab_size == 1024


def test_a_restart_loop_is_one_launch(tmp_path):
    path = tmp_path / "x.sh"
    path.write_text("for try in 1 2 3; do torchrun pretrain_gpt.py --a && break; sleep 10; done\n")
    assert read_launch_script(str(path), []).notes == ()
    path.write_text("for n in 1 2 3; do torchrun pretrain_gpt.py --a $n; done\n")
    assert read_launch_script(str(path), [], 3).flags == ("--a", "3")
    with pytest.raises(UserError, match="3 launches"):
        read_launch_script(str(path), [], 4)


def test_a_variable_that_only_the_cluster_knows_is_asked_for(tmp_path, monkeypatch):
    path = tmp_path / "x.sh"
    path.write_text("set -u\ntorchrun --nnodes $MY_NODES --nproc_per_node 8 pretrain_gpt.py --a\n")
    with pytest.raises(UserError, match="MY_NODES is not set here; give it: MY_NODES=VALUE megatron-lite plan"):
        read_launch_script(str(path), [])
    monkeypatch.setenv("MY_NODES", "2")
    assert read_launch_script(str(path), []).ranks.size == 16


def test_stand_ins_do_not_pass_as_the_environment_of_a_run(tmp_path):
    path = tmp_path / "x.sh"
    path.write_text(
        "#!/bin/bash\n#SBATCH -N 2 --ntasks-per-node 4 --gres=gpu:4\nexport A=1\nsrun python pretrain_gpt.py\n"
    )
    found = read_launch_script(str(path), [])
    assert found.ranks.size == 8 and found.environment["A"] == "1"
    assert not {"CUDA_VISIBLE_DEVICES", "SLURM_PROCID", "SLURM_NTASKS"} & (set(found.environment) - set(os.environ))


def test_the_header_of_a_script_outweighs_a_job_that_the_user_is_in(tmp_path, monkeypatch):
    path = tmp_path / "x.sh"
    path.write_text(
        "#!/bin/bash\n#SBATCH -N 4 --gres=gpu:8\n"
        "torchrun --nnodes $SLURM_NNODES --nproc_per_node $(echo $CUDA_VISIBLE_DEVICES | tr , '\\n' | wc -l) pretrain_gpt.py\n"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("SLURM_NNODES", "2")
    # Given by hand for this plan.
    assert read_launch_script(str(path), []).ranks.size == 16
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert read_launch_script(str(path), []).ranks.size == 32


def test_gpus_that_a_script_counts_are_those_given_to_plan(tmp_path):
    path = tmp_path / "x.sh"
    path.write_text(
        "N=$(nvidia-smi --list-gpus | wc -l)\n"
        f"torchrun --nproc_per_node $N pretrain_gpt.py {MODEL} --lr 1 --train-iters 3 --global-batch-size $((N * 2))\n"
    )
    assert planned_run([str(path)], 4).plan.batch.final == 8
    found = planned_run([str(path)], None)
    assert found.plan.batch.final == 16 and found.gpus_assumed
    assert any(wording("cli/of-node-are-assumed", 8, "--gpus") in note for note in found.notes)


def test_programs_named_by_a_path_and_each_nodes_command_are_known(tmp_path):
    path = tmp_path / "x.sh"
    path.write_text(
        "for host in `/bin/hostname -s` node2; do\n"
        "  ssh $host torchrun --nnodes 2 --node_rank $((R++)) --nproc_per_node 8 pretrain_gpt.py --seed $(/usr/bin/expr 3 + 4)\ndone\n"
    )
    found = read_launch_script(str(path), [])
    assert (found.ranks.size, found.flags, found.notes) == (16, ("--seed", "7"), ())


def test_what_set_x_shows_is_no_reason(tmp_path):
    path = tmp_path / "x.sh"
    path.write_text("set -x\necho give a size\nexit 1\n")
    with pytest.raises(UserError, match=": give a size .message of the script, exit code 1"):
        read_launch_script(str(path), [])


def test_srun_exports_variables(tmp_path):
    path = tmp_path / "x.sh"
    path.write_text("srun -n 4 --export=ALL,LR=3 bash -c 'python pretrain_gpt.py --lr $LR --rank $SLURM_PROCID'\n")
    assert read_launch_script(str(path), []).flags == ("--lr", "3", "--rank", "0")


HEADER = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:a100:4
#SBATCH --cpus-per-task=8
set -euo pipefail
"""
IDIOMS = {  # what sets X: X
    "mapfile -t nodes < <(scontrol show hostnames $SLURM_JOB_NODELIST); X=${#nodes[@]}": "2",
    "X=$(scontrol show hostnames | paste -sd, -)": "node1,node2",
    "X=$(srun --nodes=1 --ntasks=1 -w node1 hostname --ip-address)": "10.0.0.1",
    "X=$(srun hostname | sort | uniq | wc -l)": "2",
    "X=$(srun -N 1 -n 1 hostname)": "node1",
    "IFS=, read -ra a <<< 1,2,3; X=${a[2]}": "3",
    'X=$(awk "BEGIN {print 6e-4*0.5}")': "0.0003",
    "X=$(python3 - <<EOF\nprint(2*$SLURM_NNODES)\nEOF\n)": "4",
    "X=$(bc <<< '2^10')": "1024",
    "X=$(seq -w 8 10 | tr '\\n' ' ')": "08 09 10",
    "X=`expr $SLURM_JOB_NUM_NODES \\* 4`": "8",
    "X=${SLURM_TASKS_PER_NODE%%(*}": "4",
    "X=$((SLURM_CPUS_PER_TASK*2))": "16",
    "X=$(echo $CUDA_VISIBLE_DEVICES | awk -F',' '{print NF}')": "4",
    "X=$(nvidia-smi -L | grep -c GPU)": "4",
    "A=$(cat <<EOF\nn=$SLURM_NNODES\nEOF\n); X=$A": "n=2",
    "echo a > n.txt; echo b >> n.txt; X=$(wc -l < n.txt)": "2",
    "cat > env.sh <<EOF\nexport X=9\nEOF\nsource env.sh": "9",
    "T=$(mktemp -d); echo 'X=4' > $T/a.sh; . $T/a.sh": "4",
    "echo a > flag; mkdir -p out; if [ -f flag ] && [ -d out ]; then X=1; else X=0; fi": "1",
    "if [ ! -f none ]; then X=new; else X=old; fi": "new",
    "echo hi | tee log.txt >/dev/null; X=$(cat log.txt)": "hi",
    "X=$(seq 3 | xargs -n1 echo | tail -1)": "3",
    "X=$(timeout 5 seq 2 | tail -n1)": "2",
    "X=$(nodeset -e $SLURM_JOB_NODELIST)": "node1 node2",
    "for i in 1 2 3; do echo $i; done > list; X=none; { echo 4; } >> list": "none",
    "exec > >(tee log) 2>&1; X=1": "1",
}


@pytest.mark.parametrize("text", IDIOMS)
def test_what_scripts_of_clusters_compute(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.sh").write_text(f'{HEADER}{text}\nsrun python pretrain_gpt.py --x "$X"\n')
    found = read_launch_script("x.sh", [])
    assert found.flags[1].strip() == IDIOMS[text] and found.ranks.size == 8
    assert [path.name for path in tmp_path.iterdir()] == ["x.sh"]
