#!/usr/bin/env bash
# Trains the GPT-3 style model that Megatron-LM's example calls "857m". By its sizes it has 355,919,872 parameters.
#
#   train_gpt3_857m_distributed.sh CKPT TB VOCAB MERGES DATA [--nsys] [-- TRAINER FLAGS]
#   train_gpt3_857m_distributed.sh [--nsys] [-- TRAINER FLAGS]       trains on Python's own sources, in quickstart/857m
#
#   CKPT    folder of checkpoints; training goes on from the latest in it
#   TB      folder for TensorBoard, run.json, steps.jsonl and torch.profiler's trace
#   VOCAB   GPT-2 style vocab.json
#   MERGES  GPT-2 style merges.txt
#   DATA    prefix of a .bin/.idx pair, as `megatron-lite preprocess` writes it (..._text_document)
#   --nsys  profile iterations 110 and 111 with Nsight Systems instead of torch.profiler; report in nsight_profile/
#
# TRAINER FLAGS are appended to those below, and the last one of a name wins: -- --train-iters 500 --lr 1e-4
# From the environment: GPUS_PER_NODE (counted), NUM_NODES (1), NODE_RANK (0), MASTER_ADDR (localhost), MASTER_PORT (a
# free one), PYTHON, OMP_NUM_THREADS; NSYS_BACKTRACES=1 adds stacks of CUDA calls to --nsys, which slows training.
# Exits with the trainer's code; 2 for a mistake in the arguments.

set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
root=$(cd -- "$here/../.." && pwd -P)
# shellcheck source=examples/environment.sh
source "$root/examples/environment.sh"

POSITIONAL=(CKPT TB VOCAB MERGES DATA)
given=()
trainer_flags=()
use_nsys=0

read_arguments() {
    while (($#)); do
        case $1 in
            --nsys) use_nsys=1 ;;
            -h | --help)
                sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
                exit 0
                ;;
            --)
                shift
                trainer_flags=("$@")
                return
                ;;
            -*) refuse "$1 is not an option of this script; put the trainer's flags behind --: -- $1" ;;
            *) given+=("$1") ;;
        esac
        shift
    done
}

check_arguments() {
    local number=${#given[@]} name path
    if ((number > 5)); then
        refuse "'${given[5]}' is one argument too many; there are ${POSITIONAL[*]}, and the trainer's flags behind --"
    fi
    if ((number < 5)); then
        refuse "${POSITIONAL[number]} is missing; give all of ${POSITIONAL[*]}, or none to train on Python's own sources"
    fi
    for name in VOCAB MERGES; do
        path=${given[2]}
        [[ $name == VOCAB ]] || path=${given[3]}
        [[ -f $path ]] || refuse "$name $path: there is no such file; give GPT-2's vocab.json and merges.txt in this order"
    done
    path=${given[4]}
    [[ $path != *.bin && $path != *.idx ]] || refuse "DATA $path: give the prefix without its ending: ${path%.*}"
    for name in bin idx; do
        [[ -f $path.$name ]] || refuse "DATA $path: there is no $path.$name; make it with megatron-lite preprocess"
    done
}

use_default_corpus() {
    local folder=$root/quickstart/857m
    echo "no arguments: training on the sources of Python's library; everything is in $folder"
    PYTHONPATH=$root "$python" -m megatron_lite.cli.main make-corpus --output-prefix "$folder/corpus/python" --bpe 8192
    given=("$folder/checkpoints" "$folder/tensorboard" "$folder/corpus/vocab.json" "$folder/corpus/merges.txt"
        "$folder/corpus/python_text_document")
}

choose_address() {
    MASTER_ADDR=${MASTER_ADDR:-}
    if ((NUM_NODES > 1)); then
        [[ -n $MASTER_ADDR ]] || refuse "NUM_NODES=$NUM_NODES needs MASTER_ADDR, the address of the node with NODE_RANK=0"
        MASTER_PORT=${MASTER_PORT:-6000}
        return
    fi
    MASTER_ADDR=${MASTER_ADDR:-localhost}
    if [[ -z ${MASTER_PORT:-} ]]; then
        MASTER_PORT=$(free_port "$python")
        return
    fi
    require_number MASTER_PORT 1
    if ! port_is_free "$python" "$MASTER_PORT"; then
        refuse "MASTER_PORT=$MASTER_PORT is taken on this machine; set another, or none to have a free one chosen"
    fi
}

# require_number NAME SMALLEST: the variable must hold a whole number.
require_number() {
    if ! [[ ${!1} =~ ^[0-9]+$ ]] || ((10#${!1} < $2)); then
        refuse "$1=${!1}: needs a whole number, at least $2"
    fi
}

# Sets `nsys_options`: those of the options we would like that this version of nsys has.
choose_nsys_options() {
    local help wanted option missing=()
    help=$(nsys profile --help 2>&1) || true
    nsys_options=(-t "nvtx,cuda" -o "$report" --force-overwrite true)
    # Collection ends with the window and training goes on; nsys's own default may end the training as well.
    wanted=(--capture-range=cudaProfilerApi --capture-range-end=stop --kill=none --cuda-graph-trace=node)
    if [[ ${NSYS_BACKTRACES:-0} == 1 ]]; then
        # Stacks of CUDA calls need CPU sampling: with -s none nsys would drop them.
        nsys_options+=(-s process-tree)
        wanted+=(--cudabacktrace=all --python-backtrace=cuda)
    else
        nsys_options+=(-s none)
        wanted+=(--cpuctxsw=none)
    fi
    for option in "${wanted[@]}"; do
        if [[ $help == *"${option%%=*}"* ]]; then
            nsys_options+=("$option")
        else
            missing+=("$option")
        fi
    done
    if ((${#missing[@]})); then
        echo "note: this nsys does not know ${missing[*]}; left out"
    fi
}

# Trains under nsys, then says where the report is, or why there is none.
run_under_nsys() {
    local report=$root/nsight_profile/gpt3_857m nsys_options started status=0 found
    mkdir -p -- "$root/nsight_profile" # nsys makes no folders, and would lose the report
    choose_nsys_options
    started=$(mktemp)
    nsys profile "${nsys_options[@]}" "$@" || status=$?
    found=$(find "$root/nsight_profile" -name 'gpt3_857m*' -newer "$started")
    rm -f -- "$started"
    if [[ -n $found ]]; then
        echo "Nsight Systems report: $found"
        if [[ $found == *.qdstrm ]]; then
            echo "note: this nsys came without its importer; QdstrmImporter -i FILE makes the .nsys-rep of it"
        fi
    elif ((GPUS == 0)); then
        echo "no Nsight Systems report: its range is opened through CUDA, and there is no GPU here" >&2
    elif ((status != 0)); then
        echo "no Nsight Systems report: the run failed (exit code $status), see above" >&2
    else
        echo "no Nsight Systems report: did training reach iteration 110 (--profile-step-start)?" >&2
    fi
    return "$status"
}

hint_for_cpu() {
    cat <<'END'
note: no GPU here. At full size an iteration takes minutes and memory for 356M parameters; to see it work, make it small:
  -- --num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 \
     --train-iters 20 --lr-decay-iters 20 --log-interval 5 --eval-iters 2 --bf16
END
}

read_arguments "$@"
if ((${#given[@]})); then
    check_arguments
fi
if ((use_nsys)) && ! command -v nsys >/dev/null 2>&1; then
    refuse "--nsys: there is no nsys on the PATH; install Nsight Systems, or leave --nsys out to use torch.profiler"
fi
python=$(find_python) ||
    refuse "${PYTHON:-no Python here}: lacks one of ${PACKAGES[*]}; run: cd '$root' && python3 -m venv .venv && .venv/bin/pip install -e ."
find_launcher "$python"

if [[ -n ${GPUS_PER_NODE:-} ]] && has_driver; then
    GPUS=$GPUS_PER_NODE
else
    GPUS=$(count_gpus "$python")
fi
GPUS_PER_NODE=${GPUS_PER_NODE:-$((GPUS ? GPUS : 1))} # one rank on the CPU
NUM_NODES=${NUM_NODES:-1}
NODE_RANK=${NODE_RANK:-0}
require_number GPUS_PER_NODE 1
require_number NUM_NODES 1
require_number NODE_RANK 0
choose_address
if ((${#given[@]} == 0)); then
    use_default_corpus
fi
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(threads_per_rank "$GPUS_PER_NODE")}

DISTRIBUTED_ARGS=(
    --nproc_per_node "$GPUS_PER_NODE"
    --nnodes "$NUM_NODES"
    --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR"
    --master_port "$MASTER_PORT"
)
GPT_MODEL_ARGS=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # or flash, fused, unfused, local
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 16
    --train-iters 20000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-fraction .001
    --lr-decay-iters 20000
)
if [[ " ${trainer_flags[*]-} " != *" --bf16 "* ]]; then
    TRAINING_ARGS+=(--fp16) # the two exclude each other, and what the user adds wins
fi
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
)
# shellcheck disable=SC2054 # the commas of --split separate shares
DATA_ARGS=(
    --data-path "${given[4]}"
    --vocab-file "${given[2]}"
    --merge-file "${given[3]}"
    --split 949,50,1
)
EVAL_AND_LOGGING_ARGS=(
    --log-interval 200
    --save-interval 10000
    --eval-interval 1000
    --save "${given[0]}"
    --load "${given[0]}"
    --eval-iters 10
    --tensorboard-dir "${given[1]}"
)
PROFILER_ARGS=(
    --profile
    --profile-step-start 110
    --profile-step-end 112
    --profile-ranks 0
)
if ((!use_nsys)); then
    PROFILER_ARGS+=(--use-pytorch-profiler)
fi

COMMAND=(
    "${launcher[@]}" "${DISTRIBUTED_ARGS[@]}" "$root/pretrain_gpt.py"
    "${GPT_MODEL_ARGS[@]}"
    "${TRAINING_ARGS[@]}"
    "${MODEL_PARALLEL_ARGS[@]}"
    "${DATA_ARGS[@]}"
    "${EVAL_AND_LOGGING_ARGS[@]}"
    "${PROFILER_ARGS[@]}"
    ${trainer_flags[@]+"${trainer_flags[@]}"}
)
if ((GPUS == 0)); then
    hint_for_cpu
fi
if ((use_nsys)); then
    run_under_nsys "${COMMAND[@]}"
else
    exec "${COMMAND[@]}"
fi
