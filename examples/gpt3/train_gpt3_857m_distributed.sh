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
#   --nsys  profile iterations 110 and 111 with Nsight Systems instead of torch.profiler; a report per node lands in
#           nsight_profile/. Without a GPU it holds steps and phases only, and needs the package nvtx
#
# TRAINER FLAGS are appended to those below, and the last one of a name wins: -- --train-iters 500 --lr 1e-4
# From the environment: GPUS_PER_NODE (counted), NUM_NODES (1), NODE_RANK (0), MASTER_ADDR (localhost), MASTER_PORT (a
# free one), TP (1: ranks that split each layer), CP (1: ranks that share out each sequence), PP (1: ranks with some of
# the layers each), PYTHON, OMP_NUM_THREADS, NSYS (nsys, where it is not on the PATH); NSYS_BACKTRACES=1 adds stacks of CUDA
# calls to --nsys, which slows training.
# Exits with the trainer's code; 2 for a mistake in the arguments; 3 if training went well but left no report of --nsys.

set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
root=$(cd -- "$here/../.." && pwd -P)
# shellcheck source=examples/environment.sh
source "$root/examples/environment.sh"
# shellcheck source=examples/nsight.sh
source "$root/examples/nsight.sh"

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

# Sets `trainer_flags` without --use-pytorch-profiler: the GPU's counters serve one profiler, and --nsys names it.
leave_out_the_other_profiler() {
    local flag kept=()
    for flag in ${trainer_flags[@]+"${trainer_flags[@]}"}; do
        if [[ $flag == --use-pytorch-profiler ]]; then
            echo "note: --use-pytorch-profiler left out: with --nsys, Nsight Systems is the profiler"
        else
            kept+=("$flag")
        fi
    done
    trainer_flags=(${kept[@]+"${kept[@]}"})
}

# Is a rank of this node among the last --profile-ranks of these words?
node_is_profiled() {
    local word rank ranks=() reading=0 first=$((10#$NODE_RANK * 10#$GPUS_PER_NODE))
    for word in "$@"; do
        if [[ $word == --profile-ranks ]]; then
            ranks=()
            reading=1
        elif ((reading)) && [[ $word =~ ^-?[0-9]+$ ]]; then
            ranks+=("$word")
        else
            reading=0
        fi
    done
    for rank in "${ranks[@]}"; do
        if ((rank == -1 || (rank >= first && rank < first + 10#$GPUS_PER_NODE))); then
            return 0
        fi
    done
    return 1
}

hint_for_cpu() {
    cat <<'END'
note: no GPU here. At full size an iteration takes minutes and memory for 356M parameters; to see it work, make it small:
  -- --num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 \
     --train-iters 20 --lr-decay-iters 20 --log-interval 5 --eval-iters 2 --bf16
END
}

read_arguments "$@"
if ((use_nsys)); then
    shed_secrets "$0" "$@"
fi
if ((${#given[@]})); then
    check_arguments
fi
if ((use_nsys)); then
    find_nsys
    leave_out_the_other_profiler
fi
python=$(find_python) ||
    refuse "${PYTHON:-no Python here}: lacks packages of pyproject.toml; run: cd '$root' && python3 -m venv .venv && .venv/bin/pip install -e ."
find_launcher "$python"

if [[ -n ${GPUS_PER_NODE:-} ]] && has_driver; then
    GPUS=$GPUS_PER_NODE
else
    GPUS=$(count_gpus "$python")
fi
GPUS_PER_NODE=${GPUS_PER_NODE:-$((GPUS ? GPUS : 1))} # one rank on the CPU
NUM_NODES=${NUM_NODES:-1}
NODE_RANK=${NODE_RANK:-0}
TP=${TP:-1}
CP=${CP:-1}
PP=${PP:-1}
require_number GPUS_PER_NODE 1
require_number TP 1
require_number CP 1
require_number PP 1
require_number NUM_NODES 1
require_number NODE_RANK 0
choose_address
if ((use_nsys)); then
    ((GPUS)) || require_nvtx
    choose_nsys_report "$root/nsight_profile" gpt3_857m "$NODE_RANK"
fi
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
    --tensor-model-parallel-size "$TP"
    --context-parallel-size "$CP"
    --pipeline-model-parallel-size "$PP"
)
if ((TP > 1)); then
    MODEL_PARALLEL_ARGS+=(--sequence-parallel)
fi
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
if ((use_nsys)) && ((NUM_NODES > 1)) && ! node_is_profiled "${COMMAND[@]}"; then
    echo "note: no rank of node $NODE_RANK is among --profile-ranks: it trains without nsys, and has no report"
    use_nsys=0
fi
if ((use_nsys)); then
    run_under_nsys "$GPUS" "${COMMAND[@]}"
else
    exec "${COMMAND[@]}"
fi
