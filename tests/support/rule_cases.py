"""Command lines (changes to command_lines.GOOD) that break one rule about flags each, or none."""

from megatron_lite.config.world import World
from support.command_lines import split_cases

SAMPLES = "!--train-iters --train-samples 800"
NOT_MADE = "there is no tests/nothing.bin; check the prefix, or make it with megatron-lite preprocess."
FOUR_RANKS, ONE_GPU = World(size=4, local_size=4), World(gpus=1)

BROKEN = split_cases("""
--hidden-size 1073741824 ; --micro-batch-size 1073741824 --global-batch-size 1073741824 --ffn-hidden-size 2147483647
--model a.py:f --use-torch-fsdp2 ; --num-attention-heads 5 ; --group-query-attention --num-query-groups 3 ; --group-query-attention --num-query-groups 0
!--max-position-embeddings ; --max-position-embeddings 31 ; --position-embedding-type rope --kv-channels 15
--position-embedding-type rope --rotary-percent 0.1 ; --swiglu --squared-relu ; --swiglu --hidden-size 20
--attention-backend flash ; --attention-backend fused --attention-dropout 0 ; --recompute-granularity full
--recompute-granularity full --recompute-method block --recompute-num-layers 0
--recompute-granularity selective --recompute-method block ; --recompute-activations --recompute-num-layers 1
--train-iters 9007199254740992 ; --eval-iters 9007199254740992 ; --train-samples 800 ; !--train-iters
--global-batch-size 9 ; --global-batch-size -8 ; --global-batch-size 1 ; SAMPLES --rampup-batch-size 2 2
SAMPLES --rampup-batch-size 2 0 100 ; --rampup-batch-size 2 2 100
!--global-batch-size --step-batch-size-schedule 0:8 ; SAMPLES --step-batch-size-schedule 0:8
SAMPLES !--global-batch-size --step-batch-size-schedule 0:8,64:9 ; SAMPLES !--global-batch-size --step-batch-size-schedule 64:8
SAMPLES !--global-batch-size --step-batch-size-schedule 0:8,31:4 ; SAMPLES !--global-batch-size --step-batch-size-schedule 8
--eval-global-batch-size 3 ; --mtp-num-layers 1 --window-size 4,0
--fim-data --tokenizer-type ByteTokenizer ; !--mock-data --fim-data --data-path nothing
!--mock-data --fim-data --data-path nothing --tokenizer-type ByteTokenizer --fim-split-sample x
!--mock-data --fim-data --data-path nothing --tokenizer-type ByteTokenizer --dataloader-inter-document-masking
!--mock-data --dataloader-type external --external-dataloader a.py:b --dataloader-inter-document-masking
--use-megatron-fsdp --use-torch-fsdp2 ; --use-megatron-fsdp --bf16 --megatron-fsdp-main-grads-dtype fp32 --grad-reduce-in-bf16
--hierarchical-context-parallel-sizes 2 2 ; --cp-comm-type a2a+p2p
--optimizer muon --fp16 ; --optimizer muon --use-torch-fsdp2
--optimizer muon --ckpt-format torch --save x
--window-size 3,1 ; --window-size 3,0 --window-attn-skip-freq [1] ; --mup-base-hidden-size 0 ; --use-mup --num-experts 4 --disable-bias-linear ; --eval-micro-batch-size 3 ; --position-embedding-type yarn --rotary-interleaved
SAMPLES !--global-batch-size --rampup-batch-size 2 2 100 ; SAMPLES --rampup-batch-size 2 4 100
SAMPLES --rampup-batch-size 10 2 100 ; SAMPLES --rampup-batch-size 1 1 100 ; --exit-signal SIGNAL
--exit-signal SIGKILL ; --exit-signal SIG_DFL ; --fp16 --bf16
--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32 ; --fp16 --initial-loss-scale 2 --min-loss-scale 4
--fp16 --loss-scale-window 1.5 ; !--lr ; --min-lr 0.01 ; --min-lr -1 ; --lr-warmup-init 0.01 ; --lr-decay-samples 80
--lr-warmup-samples 80 ; --lr-wsd-decay-samples 80 ; SAMPLES --lr-decay-iters 80 ; SAMPLES --lr-warmup-iters 8
--lr-warmup-fraction 0.1 --lr-warmup-iters 5 ; --lr-warmup-iters 100 ; SAMPLES --lr-warmup-samples 900
--lr-decay-style WSD ; SAMPLES --lr-decay-style WSD ; --lr-decay-style WSD --lr-wsd-decay-iters 101
--start-weight-decay 0.1 ; --weight-decay-incr-style linear
--weight-decay-incr-style cosine --start-weight-decay 0.2 --end-weight-decay 0.1
--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler ; --tensor-model-parallel-size 2
--pipeline-model-parallel-size 4 ; --context-parallel-size 2 ; --expert-model-parallel-size 8
--distributed-backend nccl ; !--mock-data ; !--mock-data --data-args-path tests/none ; --data-args-path THIS
!--mock-data --per-split-data-args-path THIS
!--mock-data --train-data-path tests/nothing --per-split-data-args-path THIS ; !--mock-data --dataloader-type external
!--mock-data --external-dataloader a.py:f ; --dataloader-type external --external-dataloader a.py:f
!--mock-data --valid-data-path tests/nothing ; --split 1,2,3,4 ; --split 9,x ; --split=-1,2 ; --split 0,0,0
--split 0,1,1 ; --tokenizer-type SFTTokenizer ; --tokenizer-type Llama2Tokenizer ; --tokenizer-special-tokens <s>
!--vocab-size ; --log-memory-interval 150 ; --log-memory-interval 0 ; --save-interval 10 --save-retain-interval 25
--load . --ckpt-step -1 ; --load . --load-main-params-from-ckpt
--load . --load-main-params-from-ckpt --no-load-optim --bf16 ; --num-layers-per-virtual-pipeline-stage 1
--num-virtual-stages-per-pipeline-rank 2 ; --position-embedding-type learned_absolute --no-position-embedding
--profile-gzip --no-profile-gzip ; --profile --profile-step-start -1 ; --profile --profile-step-start 12
--use-pytorch-profiler --profile-step-start 0 --profile-step-end 1 ; --record-memory-history --memory-history-events 0
--record-memory-history --profile-ranks 1 ; --profile --profile-ranks 0 -2
--num-experts 8 ; --num-experts 8 --disable-bias-linear --moe-layer-freq [1]*3
EXPERTS --moe-layer-freq 0 ; EXPERTS --moe-layer-freq [2,1] ; EXPERTS --moe-layer-freq x ; EXPERTS --moe-layer-freq [0]*1000000
EXPERTS --moe-layer-freq (1 ; EXPERTS --model a.py:f ; EXPERTS --torch-compile layers ; EXPERTS --moe-shared-expert-gate
EXPERTS --moe-router-topk 9 ; EXPERTS --moe-router-topk 1 ; EXPERTS --moe-router-enable-expert-bias
EXPERTS --moe-apply-probs-on-input ; EXPERTS --moe-router-num-groups 4 ; EXPERTS --moe-router-group-topk 2
EXPERTS --moe-router-num-groups 3 --moe-router-group-topk 1 ; EXPERTS --moe-router-num-groups 2 --moe-router-group-topk 3
EXPERTS --moe-router-topk 3 --moe-router-num-groups 4 --moe-router-group-topk 1
EXPERTS --moe-router-load-balancing-type loss ; EXPERTS --moe-aux-loss-coeff 1 2 ; EXPERTS --moe-aux-loss-coeff -1
EXPERTS --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 1
EXPERTS --moe-router-load-balancing-type sinkhorn --moe-expert-capacity-factor 1
EXPERTS --moe-router-load-balancing-type global_aux_loss --recompute-granularity full --recompute-method uniform
EXPERTS --expert-model-parallel-size 3 ; EXPERTS --expert-model-parallel-size 2
EXPERTS --moe-ffn-hidden-size 6 --expert-tensor-parallel-size 4 ; EXPERTS --ckpt-format torch
--window-size 4,0 LATENT ; --rope-type yarn ; --group-query-attention LATENT ; --position-embedding-type yarn LATENT ; --use-mup LATENT
--rotary-interleaved LATENT ; --rotary-percent 0.5 LATENT ; LATENT --qk-pos-emb-head-dim 7
""", SAMPLES=SAMPLES, THIS=__file__, LATENT="--multi-latent-attention",
    EXPERTS="--num-experts 8 --disable-bias-linear")  # fmt: skip
SAID_OF_ANOTHER = {  # the flag with which the answer begins, where it is none of those given
    "--num-attention-heads 5": "--hidden-size", "--position-embedding-type rope --kv-channels 15": "--rotary-percent",
    "--train-samples 800": "--train-iters", "!--mock-data": "--data-path",
    "!--mock-data --dataloader-type external": "--external-dataloader",
    "--dataloader-type external --external-dataloader a.py:f": "--mock-data",
    "!--mock-data --valid-data-path tests/nothing": "--train-data-path",
    "--tokenizer-type Llama2Tokenizer": "--tokenizer-model", "--profile --profile-step-start 12": "--profile-step-end",
    "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler": "--override-opt-param-scheduler",
}  # fmt: skip
TWO_LINES = {
    "!--tokenizer-type": [
        "--vocab-file is missing; --tokenizer-type GPT2BPETokenizer reads it.",
        "--merge-file is missing; --tokenizer-type GPT2BPETokenizer reads it.",
    ],
    "--train-data-path tests/nothing --split 9,1": [
        "--train-data-path and --mock-data exclude each other; keep one.",
        "--split 9,1 does not go with --train-data-path; drop one.",
        "--train-data-path tests/nothing: " + NOT_MADE,
    ],
}
PP2 = "--pipeline-model-parallel-size 2 --global-batch-size 8"
GROUPS_OF_3 = (
    f"{PP2} --num-layers 8 --num-virtual-stages-per-pipeline-rank 2 "
    "--microbatch-group-size-per-virtual-pipeline-stage 3"
)
EXPERTS = "--num-experts 8 --disable-bias-linear --global-batch-size 8 --ffn-hidden-size 64"
TWO_GROUPS = "--num-attention-heads 4 --group-query-attention --num-query-groups 2 --global-batch-size 8"
BY_WORLD = [  # changes, world, the flag with which the answer begins
    (
        f"{EXPERTS} --tensor-model-parallel-size 2",
        FOUR_RANKS,
        "with --tensor-model-parallel-size 2 needs --sequence-parallel, as in Megatron-LM",
    ),
    (
        f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel --moe-shared-expert-intermediate-size 3",
        FOUR_RANKS,
        "does not divide --moe-shared-expert-intermediate-size 3",
    ),
    (
        f"{EXPERTS} --pipeline-model-parallel-size 2 --expert-model-parallel-size 4",
        FOUR_RANKS,
        "size 4 times --expert-tensor-parallel-size 1: does not divide the 2 ranks of a stage",
    ),
    (
        f"{EXPERTS} --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --use-tp-pp-dp-mapping",
        FOUR_RANKS,
        "must equal --tensor-model-parallel-size times --context-parallel-size, 1",
    ),
    (
        f"{EXPERTS} --expert-model-parallel-size 4 --use-torch-fsdp2 --num-distributed-optimizer-instances 2",
        FOUR_RANKS,
        "instances 2: does not divide the 1 ranks that hold the same experts",
    ),
    (
        f"{EXPERTS} --pipeline-model-parallel-size 2 --pipeline-schedule ZeroBubble",
        FOUR_RANKS,
        "--pipeline-schedule ZeroBubble and --num-experts exclude each other",
    ),
    ("--context-parallel-size 3", FOUR_RANKS, "does not divide the number of ranks, 4; start a multiple of 3"),
    ("--context-parallel-size 4 --seq-length 20", FOUR_RANKS, "--seq-length 20 is not divisible by 8, its pieces"),
    (
        "--tensor-model-parallel-size 3",
        FOUR_RANKS,
        "size 3: does not divide the number of ranks, 4; start a multiple of 3",
    ),
    (
        "--tensor-model-parallel-size 4 --num-attention-heads 6 --hidden-size 96 --group-query-attention --num-query-groups 6 --global-batch-size 8",
        FOUR_RANKS,
        "size 4: does not divide --num-query-groups 6; change",
    ),
    (
        "--tensor-model-parallel-size 4 --num-attention-heads 6 --hidden-size 96 --group-query-attention --num-query-groups 2 --global-batch-size 8",
        FOUR_RANKS,
        "size 4: does not divide --num-attention-heads 6; change",
    ),
    (
        "--tensor-model-parallel-size 4 --kv-channels 1 --group-query-attention --num-query-groups 1 --global-batch-size 8",
        FOUR_RANKS,
        "size 4: 4 ranks cannot share a query group of heads of 1 channels; change",
    ),
    (
        "--tensor-model-parallel-size 4 --sequence-parallel --seq-length 6 --global-batch-size 8",
        FOUR_RANKS,
        "size 4: does not divide --seq-length 6; change one",
    ),
    (
        "--tensor-model-parallel-size 2 --use-torch-fsdp2 --num-distributed-optimizer-instances 4 --global-batch-size 8",
        FOUR_RANKS,
        "instances 4: must divide the number of data and context parallel ranks, 2",
    ),
    ("--attention-backend flash", ONE_GPU, "--attention-backend flash needs --bf16 or --fp16 on a GPU"),
    ("--attention-backend fused", ONE_GPU, "--attention-backend fused needs --bf16 or --fp16 on a GPU"),
    (
        "--attention-backend fused --bf16 --softmax-type learnable",
        ONE_GPU,
        "--attention-backend fused has no offsets of --softmax-type learnable",
    ),
    ("--global-batch-size 12", FOUR_RANKS, "--global-batch-size 12 is not divisible by --micro-batch-size 2 times"),
    (
        "--use-distributed-optimizer --use-torch-fsdp2",
        FOUR_RANKS,
        "--use-distributed-optimizer and --use-torch-fsdp2 exclude",
    ),
    (
        "--use-torch-fsdp2 --num-distributed-optimizer-instances 3",
        FOUR_RANKS,
        "instances 3: must divide the number of data and context parallel ranks, 4",
    ),
    (
        "--pipeline-model-parallel-size 3 --global-batch-size 8",
        FOUR_RANKS,
        "size 3: does not divide the number of ranks, 4; start a multiple of 3",
    ),
    (
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 4 --global-batch-size 8",
        FOUR_RANKS,
        "size 2: times tensor and context parallel sizes: does not divide the number of ranks, 4; start a multiple of 8",
    ),
    (
        "--pipeline-model-parallel-size 4 --num-layers 6 --global-batch-size 8",
        FOUR_RANKS,
        "size 4: --num-layers 6 cannot be split evenly; change",
    ),
    (
        "--pipeline-model-parallel-size 4 --num-layers 6 --global-batch-size 8 --decoder-first-pipeline-num-layers 1",
        FOUR_RANKS,
        "size 4: --num-layers 6 without the 1 of --decoder-first-pipeline-num-layers cannot be split evenly; change",
    ),
    (
        f"{PP2} --num-layers 8 --pipeline-schedule ZeroBubble --use-distributed-optimizer",
        FOUR_RANKS,
        "ZeroBubble and --use-distributed-optimizer exclude each other",
    ),
    (
        f"{PP2} --num-layers 8 --pipeline-schedule ZeroBubble --num-layers-per-virtual-pipeline-stage 2",
        FOUR_RANKS,
        "ZeroBubble and --num-layers-per-virtual-pipeline-stage exclude each other",
    ),
    (
        f"{PP2} --num-layers 8 --pipeline-schedule ZeroBubble --torch-compile layers",
        FOUR_RANKS,
        "ZeroBubble and --torch-compile layers exclude each other",
    ),
    (
        f"{PP2} --num-layers 8 --num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 2",
        FOUR_RANKS,
        "stage 2 and --num-virtual-stages-per-pipeline-rank 2 say the same; drop one",
    ),
    (
        f"{PP2} --num-layers 8 --num-layers-per-virtual-pipeline-stage 2 --decoder-first-pipeline-num-layers 2",
        FOUR_RANKS,
        "stage 2 and --decoder-first-pipeline-num-layers exclude each other; give --num-virtual-stages",
    ),
    (
        f"{PP2} --num-layers 8 --num-layers-per-virtual-pipeline-stage 3",
        FOUR_RANKS,
        "stage 3: does not divide the 4 layers of each stage; change",
    ),
    (
        f"{PP2} --num-layers 8 --num-virtual-stages-per-pipeline-rank 2 --decoder-first-pipeline-num-layers 3",
        FOUR_RANKS,
        "rank 2: does not divide the 3 and 5 layers of the stages; change",
    ),
    (
        f"{PP2} --num-layers 8 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 12",
        FOUR_RANKS,
        "size 12: stages of several chunks take as many micro-batches at once as there are stages; give a multiple of 8.",
    ),
    (
        f"{PP2} --num-layers 8 --global-batch-size 8 --pipeline-model-parallel-layout Ett|ttL",
        FOUR_RANKS,
        "has 4 layers t, not those of --num-layers 8",
    ),
    (
        f"{PP2} --num-layers 8 --global-batch-size 8 --pipeline-model-parallel-layout Et*4|t*4",
        FOUR_RANKS,
        "begins with the one E and ends with the one L",
    ),
    (
        f"{PP2} --num-layers 8 --global-batch-size 8 --pipeline-model-parallel-layout E|t*8|L",
        FOUR_RANKS,
        "3 pieces are no multiple of --pipeline-model-parallel-size 2",
    ),
    (
        f"{PP2} --num-layers 8 --global-batch-size 8 --pipeline-model-parallel-layout Et*8|mL",
        FOUR_RANKS,
        "has 1 layers m, but --mtp-num-layers is missing",
    ),
    (
        f"{PP2} --num-layers 8 --global-batch-size 8 --mtp-num-layers 1 --pipeline-model-parallel-layout Et*4m|t*4L",
        FOUR_RANKS,
        "the layers m stand in the last piece",
    ),
    (
        f"{PP2} --num-layers 8 --global-batch-size 8 --pipeline-model-parallel-layout Ex|t*8L",
        FOUR_RANKS,
        "x is no letter of a layout",
    ),
    (
        f"{PP2} --num-layers 8 --global-batch-size 8 --pipeline-model-parallel-layout E(t*9999999)*99|L",
        FOUR_RANKS,
        "repeats more layers than any model has",
    ),
    (
        f"{PP2} --num-layers 8 --global-batch-size 8 --pipeline-model-parallel-layout Et*8L|",
        FOUR_RANKS,
        "begins with",
    ),
    (
        "--pipeline-model-parallel-size 4 --num-layers 2 --global-batch-size 8 --pipeline-model-parallel-layout Et||t|L",
        FOUR_RANKS,
        "stage 2 of 4 has nothing; give it a layer",
    ),
    (
        f"{PP2} --num-layers 8 --pipeline-model-parallel-layout Et*4|t*4L --account-for-loss-in-pipeline-split",
        FOUR_RANKS,
        "t*4L and --account-for-loss-in-pipeline-split exclude each other; drop one",
    ),
    (
        f"{PP2} --num-layers 8 --account-for-loss-in-pipeline-split --decoder-first-pipeline-num-layers 4",
        FOUR_RANKS,
        "--decoder-first-pipeline-num-layers and --account-for-loss-in-pipeline-split exclude each other; drop one",
    ),
    (
        "--optimizer muon --tensor-model-parallel-size 2",
        FOUR_RANKS,
        "--optimizer muon: --tensor-model-parallel-size 2 splits the matrices; give --muon-tp-mode blockwise",
    ),
    (
        "--context-parallel-size 2 --cp-comm-type p2p a2a p2p",
        FOUR_RANKS,
        "--cp-comm-type p2p a2a p2p: needs one type, or one for each of --num-layers 2",
    ),
    (
        "--context-parallel-size 4 --cp-comm-type a2a --num-attention-heads 2 --seq-length 32",
        FOUR_RANKS,
        "--cp-comm-type a2a: 4 ranks cannot share out the 2 of each tensor parallel rank, of --num-attention-heads 2",
    ),
    (
        f"--context-parallel-size 2 --cp-comm-type a2a p2p {TWO_GROUPS} --tensor-model-parallel-size 2",
        FOUR_RANKS,
        "--cp-comm-type a2a: 2 ranks cannot share out the 1 of each tensor parallel rank, of --num-query-groups 2",
    ),
    (
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 1 2",
        FOUR_RANKS,
        "--hierarchical-context-parallel-sizes 2 1 2: --cp-comm-type a2a+p2p needs two sizes",
    ),
    (
        f"{PP2} --num-layers 8 --account-for-loss-in-pipeline-split",
        FOUR_RANKS,
        "--num-layers 8 with one more for --account-for-loss-in-pipeline-split each cannot be split evenly",
    ),
    (
        f"{PP2} --num-layers 8 --pipeline-model-parallel-layout Et*4|t|t|t*2L --pipeline-schedule ZeroBubble",
        FOUR_RANKS,
        "t*2L of 2 chunks exclude each other",
    ),
    (
        f"{PP2} --num-layers 8 --num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 1",
        FOUR_RANKS,
        "stage 1: must be at least --pipeline-model-parallel-size 2",
    ),
    (
        f"{GROUPS_OF_3} --global-batch-size 8",
        FOUR_RANKS,
        "stage 3: is more than the 2 micro-batches of --global-batch-size 8",
    ),
    (
        f"{GROUPS_OF_3} --global-batch-size 16",
        FOUR_RANKS,
        "stage 3 says, and at the end no fewer than there are stages; give a multiple of 12",
    ),
    (
        "--pipeline-model-parallel-layout EttL",
        FOUR_RANKS,
        "--pipeline-model-parallel-layout EttL needs --pipeline-model-parallel-size above 1",
    ),
    (
        "--pipeline-model-parallel-size 2 --use-torch-fsdp2 --global-batch-size 8",
        FOUR_RANKS,
        "size 2 and --use-torch-fsdp2 exclude each other",
    ),
    ("--profile --profile-ranks 4", FOUR_RANKS, "--profile-ranks 4: there are ranks 0 to 3; -1 means all."),
    ("", World(size=4, local_size=4, gpus=2), "torchrun --nproc_per_node 4: more ranks than GPUs here, which are 2"),
    ("--use-pytorch-profiler", World(gpus=1, under_nsys=True), "--use-pytorch-profiler does not work under nsys"),
]
FINE = split_cases("""
--num-layers 1 --hidden-size 1 --num-attention-heads 1 --seq-length 1 --max-position-embeddings 1
--ffn-hidden-size 1 --kv-channels 1 --padded-vocab-size 1 --vocab-size 1 --make-vocab-size-divisible-by 1
--group-query-attention --num-query-groups 1 --rotary-base 1 --rotary-seq-len-interpolation-factor 1
--position-embedding-type rope --kv-channels 2 ; --swiglu --hidden-size 24
--recompute-granularity full --recompute-method block --recompute-num-layers 1
--hidden-dropout 0 --attention-dropout 0 --rotary-percent 1
--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr-decay-iters 1 --seed 0 --num-workers 0
--exit-interval 1 --exit-duration-in-mins 1 --manual-gc --manual-gc-interval 0 ; --fp16 --loss-scale 0
--fp16 --hysteresis 1 --loss-scale-window 1 --initial-loss-scale 1 --min-loss-scale 1
--lr-warmup-fraction 0 --lr-warmup-iters 0 --lr-warmup-init 1e-3 --weight-decay 0
--adam-beta1 0 --adam-beta2 0 --lr-decay-style WSD --lr-wsd-decay-iters 0 ; --lr-warmup-iters 99
--ddp-bucket-size 1 --distributed-timeout-minutes 1 --eval-interval 1 --save-interval 1
--log-interval 1 --log-memory-interval 1 --tensorboard-log-interval 1 --tensorboard-queue-size 1
--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0
!--train-iters --train-samples 1 --rampup-batch-size 2 2 1
--seed 4294967295 --group-query-attention --num-query-groups 4
--attention-backend flash --attention-dropout 0 --reset-attention-mask ; --attention-backend unfused
--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm --position-embedding-type rope
!--max-position-embeddings --position-embedding-type none 
--num-attention-heads 5 --kv-channels 7
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 ; --recompute-activations
SAMPLES --rampup-batch-size 2 2 100 --lr-decay-samples 700 --lr-warmup-samples 70
--bf16 --grad-reduce-in-bf16 ; --fp16 --accumulate-allreduce-grads-in-fp32 --loss-scale 128 ; !--lr --skip-train
--lr 0 ; --min-lr 1e-3 ; --optimizer sgd --sgd-momentum 0 ; --clip-grad 0
--lr-decay-style WSD --lr-wsd-decay-iters 100
--weight-decay-incr-style cosine --start-weight-decay 0.1 --end-weight-decay 0.1 ; --split 1 ; --split 949/50/1
--split 0,0,1 --skip-train ; --eval-iters 0 ; --log-memory-interval 200 ; --save-interval 10
--load . --load-main-params-from-ckpt --no-load-optim --bf16 --use-distributed-optimizer
--load . --load-main-params-from-ckpt --no-load-optim ; --ckpt-step 10 ; --exit-on-missing-checkpoint ; --finetune
--position-embedding-type rope --no-position-embedding ; --recompute-method uniform ; --grad-reduce-in-bf16
--save-interval 10 --save-retain-interval 100 ; --load . --ckpt-step 0 ; --profile-step-start 50 ; --profile-ranks 7
--profile --profile-ranks -1 ; --use-pytorch-profiler --profile-step-start 1 --profile-step-end 2
--exit-signal-handler --exit-signal SIGUSR1
""", SAMPLES=SAMPLES)  # fmt: skip
