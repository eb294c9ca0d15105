#!/usr/bin/env bash
# From nothing but Python 3.10 or newer to a trained and saved GPT that writes text, in a few minutes on two cores:
#
#   bash examples/gpt3/quickstart.sh
#
# Uses the active environment if it has the packages of pyproject.toml, else makes .venv in the repository. The data are
# the sources of Python's own library; nothing but packages is downloaded. Trains on every GPU, or on 2 ranks on the CPU.
# Each start makes a new folder, quickstart/run-1, run-2, ...; the corpus is built once.
# From the environment: PYTHON (the interpreter), STEPS (iterations; fewer for a first look).

set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
root=$(cd -- "$here/../.." && pwd -P)
# shellcheck source=examples/environment.sh
source "$root/examples/environment.sh"

[[ ${STEPS:-1} =~ ^[1-9][0-9]*$ ]] || refuse "STEPS=$STEPS: needs a whole number, at least 1"
if (($#)); then
    refuse "'$1': the quickstart takes no arguments; STEPS=100 bash $0 makes it shorter"
fi

# Prints the fastest precision of this machine: bf16 on GPUs and on processors that multiply in it, else fp32.
choose_precision() {
    if (($1)) || grep -qwE 'avx512_bf16|amx_bf16|bf16' /proc/cpuinfo 2>/dev/null; then
        echo bf16
    else
        echo fp32
    fi
}

# Prints the first of quickstart/run-1, run-2, ... that does not exist.
new_run_folder() {
    local number=1
    while [[ -e $root/quickstart/run-$number ]]; do
        number=$((number + 1))
    done
    echo "$root/quickstart/run-$number"
}

# Prints the first and the last validation of the log side by side.
compare_validations() {
    awk -F'|' '/validation loss at iteration [0-9]+ \|/ {
        split($1, title, "iteration "); split($2, loss, ": "); split($3, ppl, ": ")
        at[++n] = title[2] + 0; nats[n] = loss[2] + 0; perplexity[n] = ppl[2] + 0
    } END {
        printf "validation loss   %.3f after %d iterations  ->  %.3f after %d\n", nats[1], at[1], nats[n], at[n]
        printf "perplexity        %.1f  ->  %.1f (of %d evaluations)\n", perplexity[1], perplexity[n], n
    }' "$1"
}

cd -- "$root"
if ! python=$(find_python); then
    make_environment "$root/.venv" .
    python=$root/.venv/bin/python
fi
find_launcher "$python"
gpus=$(count_gpus "$python")
ranks=$((gpus ? gpus : 2))
precision=$(choose_precision "$gpus")
if [[ -z ${STEPS:-} ]]; then
    STEPS=$([[ $precision == bf16 ]] && echo 600 || echo 400) # a step in fp32 takes 1.5 times as long, or more
fi
run=$(new_run_folder)
corpus=$root/quickstart/corpus
interval=$((STEPS < 8 ? 1 : STEPS / 8))
window=$((STEPS / 2 + 1)) # first of up to four profiled steps: the report at the end is made of them
last=$((window + 3 < STEPS ? window + 3 : STEPS))

echo "quickstart: $ranks data-parallel ranks on $( ((gpus)) && echo "$gpus GPUs" || echo CPU), $precision, with $python"
"$python" -m megatron_lite.cli.main make-corpus --output-prefix "$corpus/python" --bpe 2048

# shellcheck disable=SC2054 # the commas of --split separate shares
COMMAND=(
    "${launcher[@]}" --nproc_per_node "$ranks" --master_addr localhost --master_port "$(free_port "$python")"
    pretrain_gpt.py
    --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256
    --position-embedding-type rope # learns several times faster than a learned table in so short a run
    --normalization RMSNorm --swiglu --ffn-hidden-size 704 --disable-bias-linear # a small Llama, which other programs load, too
    --attention-dropout 0 --hidden-dropout 0 # one pass over the data: there is nothing to overfit to
    --data-path "$corpus/python_text_document" --vocab-file "$corpus/vocab.json" --merge-file "$corpus/merges.txt"
    --split 949,50,1 --num-workers 0
    --micro-batch-size 4 --global-batch-size $((4 * ranks))
    --train-iters "$STEPS" --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters $((STEPS / 10))
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --log-interval "$interval" --eval-interval "$interval" --eval-iters 8
    --save "$run/checkpoints" --tensorboard-dir "$run/tensorboard" --run-dir "$run"
    --profile --use-pytorch-profiler --pytorch-profiler-collect-shapes --profile-ranks -1
    --profile-step-start "$window" --profile-step-end $((last + 1))
)
if [[ $precision != fp32 ]]; then
    COMMAND+=("--$precision")
fi
if ((gpus)); then
    COMMAND+=(--record-memory-history) # on CPUs it slows such short steps: docs/profiling.md
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(threads_per_rank "$ranks")}
mkdir -p -- "$run"
started=$SECONDS
status=0
"${COMMAND[@]}" | tee "$run/console.log" || status=$?
if ((status)); then
    echo "error: training ended with exit code $status, see above; the console is in $run/console.log" >&2
    exit "$status"
fi

echo
echo "Trained in $((SECONDS - started)) s, starting and saving included."
compare_validations "$run/console.log"
echo
echo "What the model makes of a beginning:"
"$python" -m megatron_lite.cli.main generate --load "$run/checkpoints" --prompt "    def read(self" \
    --max-new-tokens 60 --temperature 0.7 --top-k 40 --seed 1
echo
"$python" -m megatron_lite.cli.main convert --load "$run/checkpoints" --save-hf "$run/hf" \
    --vocab-file "$corpus/vocab.json" --merge-file "$corpus/merges.txt"
echo
echo "Made in quickstart/${run##*/}:"
echo "  run.json      the plan, versions and hardware of the run"
echo "  steps.jsonl   $(grep -c '"iteration":' "$run/steps.jsonl") steps: loss, gradient norm, time by phase"
echo "  checkpoints/  weights and optimizer after iteration $(cat "$run/checkpoints/latest_checkpointed_iteration.txt")"
echo "  hf/           the model as transformers, vLLM and others load it"
echo "  report.html   where its steps go, as above, with charts; report.json: the same for programs"
echo "  tensorboard/  curves, and traces of steps $window to $last for ui.perfetto.dev"
echo "  console.log   what you saw"
echo "Next:"
echo "  $(dirname -- "$python")/megatron-lite generate --load quickstart/${run##*/}/checkpoints --prompt 'class '"
echo "  $(dirname -- "$python")/tensorboard --logdir quickstart"
echo "  less quickstart/${run##*/}/run.json"
echo "  bash examples/gpt3/train_gpt3_857m_distributed.sh --help"
