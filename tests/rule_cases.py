"""Command lines (changes to command_lines.GOOD) that break one rule about flags each, and what answers them."""

from command_lines import read_table

from megatron_lite.config.world import World

SAMPLES = "!--train-iters --train-samples 800"
NOT_MADE = "there is no tests/nothing.bin; check the prefix, or make it with megatron-lite preprocess."
FOUR_RANKS = World(size=4, local_size=4)
ONE_GPU = World(gpus=1)


BROKEN = read_table(
    """
# model
--hidden-size 1073741824 | --hidden-size 1073741824 needs a tensor of 1073741824 x 8589934592 numbers, by --ffn-hidden-size, which
--micro-batch-size 1073741824 --global-batch-size 1073741824 --ffn-hidden-size 2147483647 | --micro-batch-size 1073741824 times --seq-length 32 needs
--num-attention-heads 5 | --hidden-size 64 is not divisible by --num-attention-heads 5; change one
--group-query-attention --num-query-groups 3 | --num-query-groups 3 does not divide --num-attention-heads 4
--group-query-attention --num-query-groups 0 | --num-query-groups 0 does not divide --num-attention-heads 4
!--max-position-embeddings | --max-position-embeddings is missing; give it --seq-length's value.
--max-position-embeddings 31 | --max-position-embeddings 31 is smaller than --seq-length 32; raise it
--position-embedding-type rope --kv-channels 15 | --rotary-percent 1 rotates 15 of a head's 15 channels
--position-embedding-type rope --rotary-percent 0.1 | --rotary-percent 0.1 rotates 1 of a head's 16 channels
--swiglu --squared-relu | --swiglu and --squared-relu exclude each other; keep one.
--swiglu --hidden-size 20 | --swiglu with --hidden-size 20 gives an MLP of width 0
--attention-backend flash | --attention-backend flash has no dropout on a CPU; add --attention-dropout 0, or use
--attention-backend fused --attention-dropout 0 | --attention-backend fused is cuDNN's, which needs a GPU and this
--recompute-granularity full | --recompute-granularity full needs --recompute-method uniform or block.
--recompute-granularity full --recompute-method block --recompute-num-layers 0 | --recompute-num-layers 0: must
--recompute-method uniform | --recompute-method uniform works with --recompute-granularity full only; add that
--recompute-granularity selective --recompute-method block | --recompute-method block works with
--recompute-activations --recompute-num-layers 1 | --recompute-num-layers 1 does not go with --recompute-gran
# training
--train-iters 9007199254740992 | --train-iters 9007199254740992: makes 72057594037927936 samples in all; at most 2^53
--eval-iters 9007199254740992 | --eval-iters 9007199254740992: makes 72057594037927936 samples in all; at most 2^53
--train-samples 800 | --train-iters 100 and --train-samples 800 exclude each other; keep one.
!--train-iters | --train-iters is missing; say how long to train, or give --train-samples.
--global-batch-size 9 | --global-batch-size 9 is not divisible by --micro-batch-size 2 times data parallel size 1 = 2; try 8.
--global-batch-size -8 | --global-batch-size -8 is not divisible by --micro-batch-size 2
--global-batch-size 1 | data parallel size 1 = 2; try 2.
SAMPLES --rampup-batch-size 2 2 | --rampup-batch-size 2 2: needs three positive numbers: START INCREMENT
SAMPLES --rampup-batch-size 2 0 100 | --rampup-batch-size 2 0 100: needs three positive numbers
--rampup-batch-size 2 2 100 | --rampup-batch-size 2 2 100 counts samples; give --train-samples instead of
SAMPLES !--global-batch-size --rampup-batch-size 2 2 100 | 2 2 100 needs --global-batch-size, the size to grow
SAMPLES --rampup-batch-size 2 4 100 | 2 4 100: steps of 4 from 2 do not reach --global-batch-size 8; choose
SAMPLES --rampup-batch-size 10 2 100 | 10 2 100: steps of 2 from 10 do not reach --global-batch-size 8
SAMPLES --rampup-batch-size 1 1 100 | 1 1 100: start and increment must be divisible by --micro-batch-size 2
--exit-signal SIGNAL | --exit-signal SIGNAL: not a signal that a program can catch; SIGTERM
--exit-signal SIGKILL | --exit-signal SIGKILL: not a signal that a program can catch
--exit-signal SIG_DFL | --exit-signal SIG_DFL: not a signal that a program can catch
--fp16 --bf16 | --fp16 and --bf16 exclude each other; keep one.
--grad-reduce-in-bf16 | --grad-reduce-in-bf16 needs --bf16; add it, or drop this.
--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32 | --grad-reduce-in-bf16 and --accumulate-allred
--fp16 --initial-loss-scale 2 --min-loss-scale 4 | --min-loss-scale 4 exceeds --initial-loss-scale 2; lower it.
--fp16 --loss-scale-window 1.5 | --loss-scale-window 1.5: must be a whole number.
# optimizer
!--lr | --lr is missing; give the peak learning rate, such as 6e-5.
--min-lr 0.01 | --min-lr 0.01: must be at least 0 and at most --lr 0.001.
--min-lr -1 | --min-lr -1: must be at least 0 and at most --lr 0.001.
--lr-warmup-init 0.01 | --lr-warmup-init 0.01: must be at least 0 and at most --lr 0.001.
--lr-decay-samples 80 | --lr-decay-samples 80 does not go with --train-iters; use --lr-decay-iters.
--lr-warmup-samples 80 | --lr-warmup-samples 80 does not go with --train-iters; use --lr-warmup-iters.
--lr-wsd-decay-samples 80 | --lr-wsd-decay-samples 80 does not go with --train-iters; use --lr-wsd-decay-iters.
SAMPLES --lr-decay-iters 80 | --lr-decay-iters 80 does not go with --train-samples; use --lr-decay-samples.
SAMPLES --lr-warmup-iters 8 | --lr-warmup-iters 8 does not go with --train-samples; use --lr-warmup-samples.
--lr-warmup-fraction 0.1 --lr-warmup-iters 5 | --lr-warmup-fraction and --lr-warmup-iters 5 exclude each other
--lr-warmup-iters 100 | --lr-warmup-iters 100 leaves nothing of the 100 iters of decay; lower it, or raise
SAMPLES --lr-warmup-samples 900 | --lr-warmup-samples 900 leaves nothing of the 800 samples of decay
--lr-decay-style WSD | --lr-decay-style WSD needs --lr-wsd-decay-iters, the length of its last phase; add it.
SAMPLES --lr-decay-style WSD | --lr-decay-style WSD needs --lr-wsd-decay-samples
--lr-decay-style WSD --lr-wsd-decay-iters 101 | --lr-wsd-decay-iters 101 is longer than the 100 iters of decay
--start-weight-decay 0.1 | --start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or
--weight-decay-incr-style linear | --weight-decay-incr-style linear needs --start-weight-decay and --end-weight
--weight-decay-incr-style cosine --start-weight-decay 0.2 --end-weight-decay 0.1 | --start-weight-decay 0.2: must
--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler | scheduler exclude each other; keep one.
# run
--tensor-model-parallel-size 2 | --tensor-model-parallel-size 2 is refused: ranks are data parallel only; give 1.
--pipeline-model-parallel-size 4 | --pipeline-model-parallel-size 4 is refused: ranks are data parallel only
--context-parallel-size 2 | --context-parallel-size 2 is refused: ranks are data parallel only; give 1.
--expert-model-parallel-size 8 | --expert-model-parallel-size 8 is refused: ranks are data parallel only; give 1.
--distributed-backend nccl | --distributed-backend nccl needs a GPU and this machine shows none; drop it, or give
!--mock-data | --data-path is missing; give the prefix of a .bin/.idx pair, or --mock-data.
!--mock-data --data-args-path tests/none | --data-args-path tests/none: cannot be read (No such file or directory)
--data-args-path THIS | --data-args-path and --mock-data exclude each other; keep one.
!--mock-data --per-split-data-args-path THIS | --per-split-data-args-path THIS: not JSON of the form {"train": [...], "valid": [...], "test"
!--mock-data --train-data-path tests/nothing --per-split-data-args-path THIS | --train-data-path and --per-split-data-args-path exclude each other; keep one.
!--mock-data --dataloader-type external | --external-dataloader is missing; --dataloader-type external takes FILE
!--mock-data --external-dataloader a.py:f | --external-dataloader a.py:f: needs --dataloader-type external; add
--dataloader-type external --external-dataloader a.py:f | --mock-data and --external-dataloader exclude each other; keep one.
!--mock-data --valid-data-path tests/nothing | --train-data-path is missing beside --valid-data-path; give it too.
--split 1,2,3,4 | --split 1,2,3,4: needs one to three numbers, none negative, not all 0; for example 969,30,1.
--split 9,x | --split 9,x: needs one to three numbers
--split=-1,2 | --split -1,2: needs one to three numbers
--split 0,0,0 | --split 0,0,0: needs one to three numbers
--split 0,1,1 | --split 0,1,1: no share is left for training; give one, such as 969,30,1.
--tokenizer-type SFTTokenizer | --tokenizer-type SFTTokenizer is refused: there are GPT2BPETokenizer, 
--tokenizer-type Llama2Tokenizer | --tokenizer-model is missing; --tokenizer-type Llama2Tokenizer reads it.
--tokenizer-special-tokens <s> | --tokenizer-special-tokens <s>: --tokenizer-type NullTokenizer has those of its
!--vocab-size | --vocab-size is missing; --tokenizer-type NullTokenizer needs it.
--log-memory-interval 150 | --log-memory-interval 150: must be a multiple of --log-interval 100.
--log-memory-interval 0 | --log-memory-interval 0: must be a multiple of --log-interval 100.
--save-interval 10 --save-retain-interval 25 | --save-retain-interval 25: must be a multiple of --save-interval 10,
--ckpt-step 10 | --ckpt-step 10: names an iteration, at least 0, of the folder that --load gives; add it.
--load . --ckpt-step -1 | --ckpt-step -1: names an iteration, at least 0, of the folder that --load gives
--exit-on-missing-checkpoint | --exit-on-missing-checkpoint needs --load, the folder to read; add it, or drop
--finetune | --finetune needs --load or --pretrained-checkpoint, the weights to start from.
--profile-gzip --no-profile-gzip | --profile-gzip and --no-profile-gzip exclude each other; keep one
--profile --profile-step-start -1 | --profile-step-start -1: must be at least 0.
--profile --profile-step-start 12 | --profile-step-end 12: must be greater than --profile-step-start 12 and than
--use-pytorch-profiler --profile-step-start 0 --profile-step-end 1 | --profile-step-end 1: must be greater than
--record-memory-history --memory-history-events 0 | --memory-history-events 0: must be at least 1; 1000000 when left out.
--record-memory-history --profile-ranks 1 | --profile-ranks 1: there are ranks 0 to 0; -1 means all.
--profile --profile-ranks 0 -2 | --profile-ranks -2: there are ranks 0 to 0; -1 means all.
""",
    SAMPLES=SAMPLES,
    THIS=__file__,
)
TWO_LINES = [
    (
        "!--tokenizer-type",
        [
            "--vocab-file is missing; --tokenizer-type GPT2BPETokenizer reads it.",
            "--merge-file is missing; --tokenizer-type GPT2BPETokenizer reads it.",
        ],
    ),
    (
        "--data-path tests/nothing",
        ["--data-path and --mock-data exclude each other; keep one.", "--data-path tests/nothing: " + NOT_MADE],
    ),
    (
        "--train-data-path tests/nothing --split 9,1",
        [
            "--train-data-path and --mock-data exclude each other; keep one.",
            "--split 9,1 does not go with --train-data-path; drop one.",
            "--train-data-path tests/nothing: " + NOT_MADE,
        ],
    ),
]
BY_WORLD = [
    (
        "--attention-backend flash",
        ONE_GPU,
        "--attention-backend flash needs --bf16 or --fp16 on a GPU; add one, or use",
    ),
    (
        "--attention-backend fused",
        ONE_GPU,
        "--attention-backend fused needs --bf16 or --fp16 on a GPU; add one, or use",
    ),
    (
        "--attention-backend flash --bf16 --reset-attention-mask",
        ONE_GPU,
        "--attention-backend flash has no masks on a GPU, which",
    ),
    (
        "--global-batch-size 12",
        FOUR_RANKS,
        "--global-batch-size 12 is not divisible by --micro-batch-size 2 times data parallel size 4 = 8; try 8.",
    ),
    ("--profile --profile-ranks 4", FOUR_RANKS, "--profile-ranks 4: there are ranks 0 to 3; -1 means all."),
    (
        "",
        World(size=4, local_size=4, gpus=2),
        "torchrun --nproc_per_node 4: more ranks than GPUs here, which are 2; give 2",
    ),
    ("--use-pytorch-profiler", World(gpus=1, under_nsys=True), "--use-pytorch-profiler does not work under nsys"),
]
FINE = [
    # the smallest values that mean something
    "--num-layers 1 --hidden-size 1 --num-attention-heads 1 --seq-length 1 --max-position-embeddings 1",
    "--ffn-hidden-size 1 --kv-channels 1 --padded-vocab-size 1 --vocab-size 1 --make-vocab-size-divisible-by 1",
    "--group-query-attention --num-query-groups 1 --rotary-base 1 --rotary-seq-len-interpolation-factor 1",
    "--position-embedding-type rope --kv-channels 2",
    "--swiglu --hidden-size 24",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "--hidden-dropout 0 --attention-dropout 0 --rotary-percent 1",
    "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr-decay-iters 1 --seed 0 --num-workers 0",
    "--exit-interval 1 --exit-duration-in-mins 1 --manual-gc --manual-gc-interval 0",
    "--fp16 --loss-scale 0",
    "--fp16 --hysteresis 1 --loss-scale-window 1 --initial-loss-scale 1 --min-loss-scale 1",
    "--lr-warmup-fraction 0 --lr-warmup-iters 0 --lr-warmup-init 1e-3 --weight-decay 0",
    "--adam-beta1 0 --adam-beta2 0 --lr-decay-style WSD --lr-wsd-decay-iters 0",
    "--lr-warmup-iters 99",
    "--ddp-bucket-size 1 --distributed-timeout-minutes 1 --eval-interval 1 --save-interval 1",
    "--log-interval 1 --log-memory-interval 1 --tensorboard-log-interval 1 --tensorboard-queue-size 1",
    "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0",
    "!--train-iters --train-samples 1 --rampup-batch-size 2 2 1",
    # the largest
    "--seed 4294967295 --group-query-attention --num-query-groups 4",
    # what goes together
    "",
    "--attention-backend flash --attention-dropout 0 --reset-attention-mask",
    "--attention-backend unfused",
    "--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm --position-embedding-type rope",
    "!--max-position-embeddings --position-embedding-type none",
    "!--max-position-embeddings --no-position-embedding",
    "--num-attention-heads 5 --kv-channels 7",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-activations",
    "--checkpoint-activations",
    SAMPLES + " --rampup-batch-size 2 2 100 --lr-decay-samples 700 --lr-warmup-samples 70",
    "--bf16 --grad-reduce-in-bf16",
    "--fp16 --accumulate-allreduce-grads-in-fp32 --loss-scale 128",
    "!--lr --skip-train",
    "--lr 0",
    "--min-lr 1e-3",
    "--optimizer sgd --sgd-momentum 0",
    "--clip-grad 0",
    "--lr-decay-style WSD --lr-wsd-decay-iters 100",
    "--weight-decay-incr-style cosine --start-weight-decay 0.1 --end-weight-decay 0.1",
    "--split 1",
    "--split 949/50/1",
    "--split 0,0,1 --skip-train",
    "--eval-iters 0",
    "--log-memory-interval 200",
    "--save-interval 10",
    "--save-interval 10 --save-retain-interval 100",
    "--load . --ckpt-step 0",
    "--profile-step-start 50",
    "--profile-ranks 7",
    "--profile --profile-ranks -1",
    "--use-pytorch-profiler --profile-step-start 1 --profile-step-end 2",
    "--exit-signal-handler --exit-signal SIGUSR1",
]
