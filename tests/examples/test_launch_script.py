"""What a launch script would start is found, and nothing of it is started."""

import os
import tracemalloc
from pathlib import Path

import pytest
from support.paths import REPO
from support.wording import wording

from megatron_lite.cli import watched_shell
from megatron_lite.cli.launch_script import read_launch_script
from megatron_lite.cli.launcher import ProcessCounts
from megatron_lite.errors import UserError

OUR_SCRIPT = str(REPO / "examples/gpt3/train_gpt3_857m_distributed.sh")
IN_MEGATRONS_FORM = r"""#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
PER_NODE=8
NODES=2
WORLD=$(($PER_NODE*$NODES))
SAVE=$1 #<a comment>
DATA=$2 #<a comment>_text_document
LAUNCHER_ARGS=(
    --nproc_per_node $PER_NODE 
    --nnodes $NODES 
)
MODEL=(
    --num-layers 96 
    --seq-length 2048   # of it
)
DATA_ARGS=(
    --data-path $DATA 
    --split 949,50,1
)
torchrun ${LAUNCHER_ARGS[@]} some/folder/pretrain_gpt.py \
    ${MODEL[@]} \
    ${DATA_ARGS[@]} \
    --save $SAVE
"""
OF_SLURM = "#SBATCH --nodes=4\n#SBATCH --gres=gpu:a100:8\n"
# Two forms that many public scripts have.
WITH_EXPORTED_COMMAND = """#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1  # each starts its own
set -x -e
source $nowhere/start
export STARTER="python -u -m torch.distributed.launch \\
  --nproc_per_node 4 --nnodes 16 "
export CMD=" `pwd`/pretrain_gpt.py \\
  --a 1
  --b "
clear
srun --jobid $SLURM_JOBID bash -c '$STARTER --node_rank $SLURM_PROCID $CMD'"""
WITH_EVAL = """DIR=`pwd`
sed s/A/B/ x.json | sed s/C/D/ > y.json
run_cmd="deepspeed ${DIR}/../pretrain_gpt.py --a &> ${DIR}/x.log"
echo ${run_cmd}
eval ${run_cmd}
set +x"""
# Each line would change the folder, end the shell, or leave it.
HARMFUL = r"""
HERE=$PWD
rm -rf keep.txt
echo overwritten > keep.txt
echo more >> keep.txt
: > keep.txt
/bin/touch touched
/bin/rm -f keep.txt
x=$(touch touched; rm keep.txt; echo 1)
y=`/bin/touch touched`
(mkdir touched) & wait
cat > touched <<EOF
hello
EOF
python -c 'open("touched", "w")'
tee touched < keep.txt
printf x > "touched"
exec 5> touched
exec > >(tee touched)
export PATH=/bin:/usr/bin
PATH=/bin touch touched
command touch touched
builtin echo hi > touched
command -p touch touched
env touch touched
history -w touched
eval 'touch touched; echo x > touched'
trap 'touch touched' EXIT
f() { /bin/touch touched; echo hi > touched; }
f > touched
if f &> touched; then :; fi
kill -9 $$
cd /tmp
for i in 1 2; do nohup touch touched; done
while read -r line; do touch touched; done < keep.txt
coproc touch touched
ls "$(/bin/touch touched; touch touched; echo x > touched; echo words)" $(rm keep.txt)
HISTFILE=touched; set -o history; echo remembered
hash -p /bin/touch tt; tt touched
cd "$HERE"
sort -o touched keep.txt; sort --output=touched keep.txt; sort --outp=touched keep.txt; sort -nuo touched keep.txt
uniq keep.txt touched
sed -i s/keep/lost/ keep.txt; sed --in-place s/keep/lost/ keep.txt; sed -n 'w touched' keep.txt; sed '1e touch touched' keep.txt
awk 'BEGIN { system("touch touched") }'; awk 'BEGIN { print 1 > "touched" }'; awk 'BEGIN { print "}" > "touched" }'
awk 'BEGIN { "touch touched" | getline }'; echo "touch touched" | awk '{ print | "sh" }'; awk -f keep.txt; gawk -i inplace 1 keep.txt
gawk -otouched 1; awk -W exec keep.txt; awk --profile=touched 1 keep.txt
tee touched < keep.txt; echo 1 | tee -a touched; touch touched; mktemp touched.XXXX; mktemp -p .
jq -n 1 > touched; cat <<EOF | tee touched
x
EOF
cat > touched < keep.txt; date +%s >> touched; seq 3 > keep.txt; printf x >> keep.txt
date -s 2001-01-01; date 010100002001; hostname changed
python3 -c 'open("touched", "w")'; python -c 'import os; os.mkdir("touched")'; python -c "$(cat keep.txt)"
LD_PRELOAD=./touch seq 1; PATH=. seq 1
bash -c 'echo x > touched; sort -o touched keep.txt'
__ask write "$PWD/touched" "" x; __ask run sort -o touched keep.txt; __ask input x tee touched; __ask run touch touched
echo "touch touched" | bash; bash <<< "touch touched"; sbatch <<EOF
touch touched
EOF
for i in 1; do echo x; done > touched
{ echo x; } >> keep.txt
"""
# What takes the first of three walls down leaves the two behind it.
HARMFUL_WITHOUT_THE_TRAP = r"""
builtin trap - DEBUG
set +r
shopt -u restricted_shell
touch touched; /bin/touch touched; /bin/rm keep.txt
echo a > touched
(builtin exec /bin/touch touched)
PATH=/bin
touch touched
enable -f /lib/x.so x
enable kill
kill -9 $$
HISTFILE=touched
set -o history
builtin kill -9 $$
torchrun pretrain_gpt.py --reached
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes the text into a script of a folder of its own, where the user stands; returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        Path("launch.sh").write_text(text)
        return "launch.sh"

    return write


def said(script: str, *arguments: str) -> str:
    with pytest.raises(UserError) as raised:
        read_launch_script(script, list(arguments))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_our_own_script_is_read_whatever_it_is_given(monkeypatch):
    for name in ("GPUS_PER_NODE", "NUM_NODES", "NODE_RANK", "MASTER_PORT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    files = ["no/CKPT", "no/TB", "no/VOCAB", "no/MERGES", "no/DATA"]
    plain = read_launch_script(OUR_SCRIPT, files)
    assert plain.ranks == ProcessCounts(1, 1) and not plain.under_nsys
    assert plain.flags[:4] == ("--num-layers", "24", "--hidden-size", "1024")
    assert "--use-pytorch-profiler" in plain.flags
    assert plain.flags[plain.flags.index("--data-path") + 1] == "no/DATA"
    assert plain.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    monkeypatch.setenv("GPUS_PER_NODE", "4")
    watched = read_launch_script(OUR_SCRIPT, [*files, "--nsys", "--", "--train-iters", "500"])
    assert watched.ranks.size == 4 and watched.under_nsys
    assert watched.flags[-2:] == ("--train-iters", "500") and "--use-pytorch-profiler" not in watched.flags
    assert wording("examples/vocab-is-missing-give") in said(OUR_SCRIPT, "CKPT", "TB")
    assert wording("examples/is-not-option-of", "--lr") in said(OUR_SCRIPT, "--lr", "1")


def test_a_script_in_megatrons_form(script):
    found = read_launch_script(script(IN_MEGATRONS_FORM), ["my saves", "d"])
    assert (found.ranks, found.ranks.size) == (ProcessCounts(8, 2), 16)
    # unquoted, as there: the blank makes two words of one
    assert found.flags == ("--num-layers", "96", "--seq-length", "2048", "--data-path", "d", "--split", "949,50,1",
                           "--save", "my", "saves")  # fmt: skip
    assert read_launch_script("launch.sh", []).flags[4:6] == ("--data-path", "--split")


@pytest.mark.parametrize("harm", [HARMFUL, HARMFUL_WITHOUT_THE_TRAP])
def test_nothing_on_the_machine_changes(script, harm):
    Path("keep.txt").write_text("keep\n")
    Path("touch").write_text("#!/bin/sh\necho x > touched\n")  # nor is a program of the current folder run
    Path("touch").chmod(0o755)
    name = script(harm + "torchrun --nproc_per_node=8 x/pretrain_gpt.py --a 'b c' &> log_$(date).txt\n")
    before = {path: path.stat().st_mtime_ns for path in Path().iterdir()}
    if harm is HARMFUL:
        assert read_launch_script(name, []).flags == ("--a", "b c")
    else:
        assert read_launch_script(name, []).flags == ("--reached",)
    assert {path: path.stat().st_mtime_ns for path in Path().iterdir()} == before
    assert Path("keep.txt").read_text() == "keep\n"


@pytest.mark.parametrize(
    ("text", "ranks", "flags"),
    [
        ("torchrun --nproc_per_node 8 pretrain_gpt.py --a 1 2>&1 | tee log", ProcessCounts(8), "--a 1"),
        ("torchrun --nproc-per-node=2 --nnodes=1:4 pretrain_gpt.py --a > log 2>&1 &", ProcessCounts(2, 4), "--a"),
        ("python -m torch.distributed.launch --nproc_per_node 4 $PWD/pretrain_gpt.py $@", ProcessCounts(4), "one 2"),
        ("/opt/bin/python -u pretrain_gpt.py --a $((i=3))", ProcessCounts(1), "--a 3"),
        ('A="x y" B=$(nproc) torchrun pretrain_gpt.py --a "$HOME_OF"', ProcessCounts(1), "--a "),
        ('CMD="deepspeed --num_gpus 3 pretrain_gpt.py --x y"; eval $CMD', ProcessCounts(3), "--x y"),
        ('run() { echo "$@"; "$@"; }; run python pretrain_gpt.py "${1:?a size}" --z', ProcessCounts(1), "one --z"),
        ("set -euo pipefail; nsys profile -o x torchrun pretrain_gpt.py --a", ProcessCounts(1), "--a"),
        ("nohup env A=1 torchrun --nproc_per_node gpu pretrain_gpt.py --x > o.log 2> e.log &", ProcessCounts(None), "--x"),
        ('srun -N 2 --ntasks-per-node=4 bash -c "python pretrain_gpt.py --lr 1 && echo done"', ProcessCounts(4, 2), "--lr 1"),
        ("mpirun -np 8 python pretrain_gpt.py --lr 1", ProcessCounts(8), "--lr 1"),
        ("srun python pretrain_gpt.py --a", ProcessCounts(None), "--a"),
        (f"{OF_SLURM}torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE pretrain_gpt.py --q", ProcessCounts(8, 4), "--q"),
        ("#SBATCH -N 2  # of them\n#SBATCH --ntasks-per-node 8\nsrun python pretrain_gpt.py --q", ProcessCounts(8, 2), "--q"),
        ("if [[ -f one.bin && -e $1 ]]; then exit 4; fi; [ -f $1.bin ] && torchrun pretrain_gpt.py --d", ProcessCounts(1), "--d"),
        ("which torchrun && cd sub/../other && torchrun pretrain_gpt.py --at $(basename $(pwd))", ProcessCounts(1), "--at other"),
        ("words=(a b); words+=(c); for w in ${words[@]}; do A+=(--$w); done; exec torchrun pretrain_gpt.py ${A[@]}",
         ProcessCounts(1), "--a --b --c"),
        ("command -v nothing >/dev/null 2>&1 || exit 3; x=$(ls &>/dev/null); torchrun pretrain_gpt.py --x$x", ProcessCounts(1), "--x"),
        (WITH_EXPORTED_COMMAND, ProcessCounts(4, 16), "--a 1 --b"),
        (WITH_EVAL, ProcessCounts(None), "--a"),
        ('srun -l --ntasks-per-node=8 --output=logs/%x.log sh -c "python -u /code/pretrain_gpt.py --b"', ProcessCounts(8), "--b"),
        ("docker run -v $PWD:/w image bash -lc 'cd /w; pip install x; SIZE=3 torchrun --nproc_per_node 8 pretrain_gpt.py --s'",
         ProcessCounts(8), "--s"),
        ("bash -c 'echo $0'; sh -c 'exec torchrun pretrain_gpt.py --a \"$@\"' name 1 2", ProcessCounts(1), "--a 1 2"),
        ("cd sub; LAYERS=5 bash inner.sh --more; torchrun pretrain_gpt.py --not-me", ProcessCounts(2), "--num-layers 5 --more"),
        ("cp x/pretrain_gpt.py . && echo pretrain_gpt.py is here >&3; python pretrain_gpt.py --really", ProcessCounts(1), "--really"),
        ("exec 3>&1 4>log 2>&1; echo x >&3; echo y >&4; torchrun pretrain_gpt.py --a", ProcessCounts(1), "--a"),
        ("set -u; [[ --x=12 =~ ^--x=([0-9]+)$ ]] && ls >/dev/null; N=${BASH_REMATCH[1]}; torchrun pretrain_gpt.py $N", ProcessCounts(1), "12"),
        ("WHERE=${WHERE:-<a place>}; N=${N:-${M:-4 }}; torchrun pretrain_gpt.py --to $WHERE $N", ProcessCounts(1), "--to <a place> 4"),
        ("torchrun pretrain_gpt.py --first; torchrun pretrain_gpt.py --second", ProcessCounts(1), "--first"),
    ],
)  # fmt: skip
def test_launchers_and_shells(script, text, ranks, flags):
    Path("sub").mkdir()
    Path("sub/inner.sh").write_text("torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers $LAYERS $@\n")
    found = read_launch_script(script(text + "\n"), ["one", "2"])
    assert (found.ranks, " ".join(found.flags)) == (ranks, flags)


def test_what_it_sources_belongs_to_it(script):
    Path("lib").mkdir()
    Path("lib/settings.sh").write_text(
        'echo "$0" >/dev/null\nLAYERS=7\nhelper() { echo "--by ${BASH_SOURCE[0]##*/} ${BASH_SOURCE##*/}"; }\n'
    )
    name = script('here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\nsource "$here/lib/settings.sh"; . no/such/file\n'
                  "torchrun pretrain_gpt.py --num-layers $LAYERS $(helper)\n")  # fmt: skip
    assert read_launch_script(name, []).flags == ("--num-layers", "7", "--by", "settings.sh", "settings.sh")


def test_the_environment_is_the_trainers(script, monkeypatch):
    monkeypatch.setenv("OF_THE_USER", "two\nlines")
    name = script("export NCCL_DEBUG=INFO; NOT_EXPORTED=1; OMP_NUM_THREADS=3 torchrun pretrain_gpt.py\n")
    environment = read_launch_script(name, []).environment
    expected = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3", "OF_THE_USER": "two\nlines"}
    assert expected.items() <= environment.items() and "NOT_EXPORTED" not in environment


SYNTAX = "syntax error near unexpected token"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("echo nothing to do", "launch.sh: does not start pretrain_gpt.py; give a script that does"),
        ("echo usage: launch.sh SIZE; exit 1", "launch.sh: usage: launch.sh SIZE (message of the script, exit code 1)"),
        ("exit 3", "launch.sh: ended with exit code 3 before it started pretrain_gpt.py; does it need arguments?"),
        ("set -u; torchrun pretrain_gpt.py $1", "launch.sh: $1: unbound variable (message of the script, exit code"),
        ("((x > 3", "unexpected EOF while looking for matching"),
        ("A=1\n\nexport B=2\n\nSAVE=<a path>\ntorchrun pretrain_gpt.py --save $SAVE (",
         f"launch.sh: bash cannot read line 5: SAVE=<a path> ({SYNTAX} `newline'); put a value there."),
        ("echo hi\ntorchrun pretrain_gpt.py <4>",
         f"line 2: torchrun pretrain_gpt.py <4> ({SYNTAX} `4'); put a value there."),
        ("echo hi (; done\ntorchrun pretrain_gpt.py", f"line 1: echo hi (; done ({SYNTAX} `('); fix the script."),
        ("if true; then\ntorchrun pretrain_gpt.py", "launch.sh: bash cannot read line "),
        ('eval "x=<a> ("', "(message of the script, exit code"),  # its own eval: the file itself can be read
        ('bash -c "torchrun pretrain_gpt.py --a \'b"', "unexpected EOF while looking for matching"),
        ("bash launch.sh", "launch.sh: does not start pretrain_gpt.py"),  # itself, over and over
    ],
)  # fmt: skip
def test_a_script_that_starts_no_training_is_one_line(script, text, answer):
    assert answer in said(script(text + "\n"))


def test_a_script_that_waits_is_left(script, monkeypatch):
    os.mkfifo("fifo")
    monkeypatch.setattr(watched_shell, "MAX_SCRIPT_SECONDS", 0.3)
    assert wording("examples/still-waits-for-something", 0.3) in said(script("read -r x <fifo\n"))


def test_what_cannot_be_read_is_one_line(script, monkeypatch):
    assert said("no/such.sh") == wording("examples/no-such-sh-cannot")
    assert wording("examples/launch-sh-cannot-be") in said(script("torchrun\0pretrain_gpt.py\n"))
    assert wording("examples/launch-sh-cannot-be-read", 1) in said(script("x" * 3_000_000))
    name = script("torchrun pretrain_gpt.py\n")
    monkeypatch.setenv("PATH", "")
    assert said(name) == wording("examples/launch-sh-there-is")


def test_startup_files_of_the_user_are_not_run(script, monkeypatch):
    Path("startup").write_text("echo hi; touch touched; LAYERS=9\n")
    monkeypatch.setenv("BASH_ENV", os.path.abspath("startup"))
    assert read_launch_script(script("torchrun pretrain_gpt.py --n ${LAYERS-none}\n"), []).flags == ("--n", "none")
    assert not Path("touched").exists()


WATCHING = "while true; do nvidia-smi; sleep 60; done"


def of_session_of(folder: Path) -> list[str]:
    """Command lines of processes that stand in the folder, as all that a script starts does."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "cwd")) == folder and int(process.name) != os.getpid():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode()[-80:])
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    "before",
    [
        f"{WATCHING} &",
        f"{WATCHING} > smi.log 2>&1 &",
        f"set -m; ({WATCHING}) >/dev/null & disown",
        "while [ ! -f X ]; do sleep 1; done",
        "until [[ -e X ]]; do echo waiting; usleep 10; done",
        "while sleep 60; do echo x; done & wait",
        "while :; do echo a printing loop; done",
        "f() { for i in 1 2 3; do while true; do /bin/sleep 1; done; done; }; f",
        "set -e; while true; do A=$((A + 1)); done",
    ],
)
def test_loops_that_wait_are_left(script, before, tmp_path):
    found = read_launch_script(script(f"{before}\nN=2\ntorchrun --nproc_per_node $N pretrain_gpt.py --a $N\n"), [])
    assert (found.ranks, found.flags) == (ProcessCounts(2), ("--a", "2"))
    assert of_session_of(tmp_path) == []


@pytest.mark.parametrize("after", ["&", "& wait", "2>&1 | tee log"])
def test_training_in_a_loop_or_in_the_background_is_found(script, after):
    text = f"for n in 1 2; do sleep 5; done; {{ torchrun pretrain_gpt.py --b; }} {after}\n"
    assert read_launch_script(script(text), []).flags == ("--b",)


@pytest.mark.parametrize(
    "job",
    ["read -r x <fifo", "(while :; do read -r x <fifo; done) >/dev/null 2>&1", "set -m; (read -r x <fifo) >/dev/null"],
)
def test_every_process_is_ended(script, job, tmp_path, monkeypatch):
    """Whether plan finds the training, refuses the script, or is interrupted."""
    monkeypatch.setattr(watched_shell, "SECONDS_FOR_JOBS", 0.2)
    os.mkfifo("fifo")
    name = script(f"{job} &\ntorchrun pretrain_gpt.py --a\n")
    assert read_launch_script(name, []).flags == ("--a",)
    assert of_session_of(tmp_path) == []
    assert wording("examples/message-of-script-exit", 3) in said(script(f"{job} &\necho no; exit 3\n"))
    assert of_session_of(tmp_path) == []

    def interrupt(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(watched_shell, "_listen", interrupt)
    with pytest.raises(KeyboardInterrupt):
        read_launch_script(name, [])
    assert of_session_of(tmp_path) == []


def test_what_a_script_prints_is_kept_up_to_a_limit(script, monkeypatch):
    """Of 40 MB in one command only the end, as a refusal stands there."""
    tracemalloc.start()
    name = script("printf '%040000000d\\n' 1; echo the end; exit 1\n")
    assert wording("examples/end-message-of-script", 1) in said(name)
    assert tracemalloc.get_traced_memory()[1] < 4e6
    tracemalloc.stop()


def test_a_script_that_takes_memory_is_ended(script, monkeypatch):
    monkeypatch.setattr(watched_shell, "MAX_MEMORY_KIB", 2**16)
    answer = said(script("printf -v A '%0100000000d' 1; torchrun pretrain_gpt.py\n"))
    assert answer.startswith("launch.sh: ") and "cannot allocate" in answer
