"""Launch scripts of the kinds that people publish, written for tests: their files, the size of the job, and flags that they compute."""

from dataclasses import dataclass, field

MODEL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 1 --lr 1e-4"
)
ON_MOCK_DATA = f"{MODEL} --mock-data --tokenizer-type NullTokenizer --vocab-size 32000"


@dataclass(frozen=True)
class ClusterScript:
    """A script, the files beside it, its arguments, and what a plan of it must say."""

    text: str
    size: int
    flags: dict[str, str]
    arguments: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    launches: int = 1
    name: str = "job.sh"


SCRIPTS = {
    "Megatron's example": ClusterScript(
        f"""#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
MASTER_ADDR=localhost
NUM_NODES=2
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
DATA_PATH=$1
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr $MASTER_ADDR
)
GPT_MODEL_ARGS=({MODEL} --train-iters 100)
torchrun ${{DISTRIBUTED_ARGS[@]}} pretrain_gpt.py ${{GPT_MODEL_ARGS[@]}} --data-path $DATA_PATH
""",
        16,
        {"--train-iters": "100", "--data-path": "corpus_text_document"},
        ("corpus_text_document",),
    ),
    "an exported command under srun": ClusterScript(
        f"""#!/bin/bash
#SBATCH --job-name=tr11
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1          # crucial
#SBATCH --cpus-per-task=40
#SBATCH --gres=gpu:8
#SBATCH --output=%x-%j.out
set -x -e
source $HOME/start-prod-of-nobody
echo "START TIME: $(date)"
GPUS_PER_NODE=8
NNODES=$SLURM_NNODES
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
MASTER_PORT=6000
GLOBAL_BATCH_SIZE=$(($NNODES * $GPUS_PER_NODE * 2))
config_json="./ds_config.$SLURM_JOBID.json"
cat <<EOT > $config_json
{{ "train_batch_size": $GLOBAL_BATCH_SIZE }}
EOT
export LAUNCHER="python -u -m torch.distributed.run \\
    --nproc_per_node $GPUS_PER_NODE \\
    --nnodes $NNODES \\
    --rdzv_endpoint $MASTER_ADDR:$MASTER_PORT \\
    "
export CMD=" \\
    `pwd`/pretrain_gpt.py \\
    {ON_MOCK_DATA} --train-iters 100 \\
    --global-batch-size $GLOBAL_BATCH_SIZE \\
    "
clear; srun --jobid $SLURM_JOBID bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID $CMD" 2>&1 | tee -a main_log.txt
""",
        32,
        {"--global-batch-size": "64"},
    ),
    "a container on an AMD machine": ClusterScript(
        f"""#!/bin/bash
#SBATCH --job-name=train-gpt
#SBATCH --cpus-per-task=7
#SBATCH --ntasks-per-node=8
#SBATCH --nodes=8
#SBATCH --mem=480G
#SBATCH --gpus-per-node=mi250:8
#SBATCH --output logs/%j.out
if [ -z $SLURM_JOB_ID ]; then
    mkdir -p logs
    sbatch "$0" "$@"
    exit
fi
set -euo pipefail
ln -f -s "${{SLURM_JOB_ID}}.out" logs/latest.out
module purge
CONTAINER="/scratch/somebody/containers/megatron.sif"
c="fe"
BIND_MASK="0x${{c}}000000000000,0x${{c}}00000000000000"
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
export MASTER_PORT=9999
export WORLD_SIZE=$SLURM_NTASKS
GLOBAL_BATCH_SIZE=128
TOTAL_TOKENS=100_000_000
TOTAL_TOKENS=${{TOTAL_TOKENS//_}}
TRAIN_ITERS=$(echo "$TOTAL_TOKENS/(256*$GLOBAL_BATCH_SIZE)" | bc)
WARMUP=$(echo "$TRAIN_ITERS * 0.1 / 1" | bc)
COMMAND=" pretrain_gpt.py {ON_MOCK_DATA} --global-batch-size $GLOBAL_BATCH_SIZE \\
  --train-iters $TRAIN_ITERS --lr-warmup-iters $WARMUP "
echo "$COMMAND"
srun --label --cpu-bind=mask_cpu:$BIND_MASK singularity exec -B /scratch "$CONTAINER" ./launch.sh $COMMAND
echo "END $SLURM_JOBID: $(date)"
""",
        64,
        {"--train-iters": "3051", "--lr-warmup-iters": "305"},
    ),
    "addresses and ports from the job": ClusterScript(
        f"""#!/bin/bash -x
#SBATCH --account=project --nodes=2
#SBATCH --gres=gpu:4
#SBATCH --ntasks-per-node=1
#SBATCH --threads-per-core=1
NNODES=$SLURM_NNODES
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
MASTER_ADDR="${{MASTER_ADDR}}i"
MASTER_IP="$(nslookup "$MASTER_ADDR" | grep -oP '(?<=Address: ).*')"
export MASTER_PORT=$(expr 10000 + $(echo -n $SLURM_JOB_ID | tail -c 4))
TP=2
FORMAT=torch
if (( TP > 1 )); then FORMAT=torch_dist; fi
ARGS=({ON_MOCK_DATA} --train-iters 100 --tensor-model-parallel-size $TP --ckpt-format $FORMAT --seed $MASTER_PORT)
LAUNCHER="apptainer exec --nv image.sif python -u -m torch.distributed.run --nproc-per-node 4 --nnodes $NNODES \\
    --rdzv_endpoint $MASTER_IP:$MASTER_PORT --tee 3 "
srun --wait=60 --jobid $SLURM_JOB_ID bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID \\
    --role \\$SLURMD_NODENAME: pretrain_gpt.py ${{ARGS[*]}}"
""",
        8,
        {"--ckpt-format": "torch_dist", "--seed": "13456"},
    ),
    "a head node": ClusterScript(
        f"""#!/usr/bin/bash
#SBATCH -J GPT2-Pretrain
#SBATCH -N 4
#SBATCH --gpus-per-node=A100:4
#SBATCH -t 40:00:00
#SBATCH -o log/%A/log.out
set -u
nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
nodes_array=($nodes)
head_node=${{nodes_array[0]}}
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)
mkdir -p log/$SLURM_JOB_ID
srun torchrun --nnodes=${{#nodes[@]}} --nproc_per_node=$SLURM_GPUS_ON_NODE --rdzv-id=$RANDOM \\
    --rdzv-endpoint=$head_node_ip:28052 pretrain_gpt.py {ON_MOCK_DATA} --train-iters $((100 * ${{#nodes[@]}}))
""",
        16,
        {"--train-iters": "400"},
    ),
    "a free port, conda and a count of devices": ClusterScript(
        f"""#!/bin/bash
#SBATCH -n 1 # Number of tasks
#SBATCH --gres=gpu:4
#SBATCH --mem=250G # Memory
source ~/.bashrc_of_nobody
conda activate sys
module load cuda/12.4.1-fasrc01
PORT=$(comm -23 <(seq 49152 65535 | sort) <(ss -Htan | awk '{{print $4}}' | cut -d':' -f2 | sort -u) | shuf | head -n 1)
PORT=${{PORT:-29500}}
if [ -z "${{SLURM_GPUS_ON_NODE:-}}" ]; then
    GPUS=$(nvidia-smi -L | wc -l)
else
    GPUS=$(echo $CUDA_VISIBLE_DEVICES | tr ',' '\\n' | wc -l)
fi
export OMP_NUM_THREADS=$(( ${{SLURM_CPUS_PER_TASK:-8}} / 2 ))
torchrun --standalone --nproc_per_node=$GPUS --master_port $PORT pretrain_gpt.py {ON_MOCK_DATA} --train-iters 100
""",
        4,
        {},
    ),
    "a list of nodes in a file": ClusterScript(
        f"""#!/bin/bash
#SBATCH -A stf006
#SBATCH -N 2
#SBATCH -t 02:00:00
set -e
scontrol show hostnames $SLURM_NODELIST > job.node.list
input="./job.node.list"
readarray -t arr <"$input"
first=${{arr[0]}}
count=$(wc -l < job.node.list)
echo "first=$first of $count"
while read -r node; do echo "$node slots=8"; done < job.node.list > hostfile
export MASTER_ADDR=$(hostname -i)
ranks_per_node=8
ranks_total=$((ranks_per_node*count))
srun -u -n$ranks_total -c2 --ntasks-per-node=8 --gpus-per-node=8 --gpu-bind=closest python3 pretrain_gpt.py \\
   {ON_MOCK_DATA} --train-iters $(($ranks_total * 10)) --save $first
""",
        16,
        {"--train-iters": "160", "--save": "node1"},
    ),
    "PBS": ClusterScript(
        f"""#!/bin/bash
#PBS -l walltime=01:00:00
#PBS -l select=4:system=polaris
#PBS -l filesystems=home:eagle
#PBS -A datascience
#PBS -o results/out
cd $PBS_O_WORKDIR
export PBS_JOBID_NUMBER=$(echo $PBS_JOBID | cut -d'.' -f1)
export FILENAME_DATE=$(date +"%Y-%m-%d_%H%M").jid${{PBS_JOBID_NUMBER}}
{{
   module load conda/2023-10-04
   conda activate
   cat $PBS_NODEFILE
   NUM_NODES=$(cat $PBS_NODEFILE| wc -l)
   HOSTS=$(sort -u "$PBS_NODEFILE" | wc -l)
   TOTAL_MPI_RANKS=$((4 * NUM_NODES))
   mpiexec -n $TOTAL_MPI_RANKS --ppn 4 --depth=8 --cpu-bind depth --hostfile $PBS_NODEFILE \\
     python pretrain_gpt.py {ON_MOCK_DATA} --train-iters $((HOSTS * 25)) --seed $PBS_JOBID_NUMBER
}} 2>&1 | tee results/$FILENAME_DATE.log
""",
        16,
        {"--train-iters": "100", "--seed": "123456"},
        name="polaris.pbs",
    ),
    "Torque's nodes": ClusterScript(
        f"""#!/bin/bash
#PBS -N gpt
#PBS -l nodes=2:ppn=4:gpus=4
NNODES=$(sort -u "$PBS_NODEFILE" | wc -l)
NP=$(wc -l < $PBS_NODEFILE)
hosts=( $(sort -u "$PBS_NODEFILE") )
NODE_RANK=0
for idx in "${{!hosts[@]}}"; do
  if [[ "${{hosts[idx]}}" == "$(hostname)" ]]; then NODE_RANK=$idx; break; fi
done
mpirun -np $NP -N 4 --hostfile $PBS_NODEFILE -x PATH python pretrain_gpt.py {ON_MOCK_DATA} --train-iters $NP
""",
        8,
        {"--train-iters": "8"},
    ),
    "Grid Engine": ClusterScript(
        f"""#!/bin/bash
#$ -l rt_F=2
#$ -l h_rt=1:00:00
#$ -cwd
source /etc/profile.d/modules_of_nobody.sh
export NUM_GPU_PER_NODE=4
NUM_NODES=$NHOSTS
NUM_GPUS=$((${{NUM_NODES}} * ${{NUM_GPU_PER_NODE}}))
mkdir -p ./hostfile
HOSTFILE_NAME=./hostfile/hostfile_${{JOB_ID}}
while read -r line; do
  echo "${{line}} slots=${{NUM_GPU_PER_NODE}}"
done <"$SGE_JOB_HOSTLIST" >"$HOSTFILE_NAME"
DATA_PATH='
  1 a_text_document
  2 b_text_document
'
mpirun -np $NUM_GPUS -npernode $NUM_GPU_PER_NODE -hostfile $HOSTFILE_NAME python pretrain_gpt.py {MODEL} \\
  --data-path $DATA_PATH --train-iters 100 --tokenizer-type Llama2Tokenizer --tokenizer-model /groups/x/tokenizer.model
""",
        8,
        {},
    ),
    "LSF": ClusterScript(
        f"""#!/bin/bash
#BSUB -P project
#BSUB -W 2:00
#BSUB -nnodes 2
#BSUB -J gpt
nnodes=$(cat ${{LSB_DJOB_HOSTFILE}} | sort | uniq | grep -v login | grep -v batch | wc -l)
export MASTER_ADDR=$(cat $LSB_DJOB_HOSTFILE | sort | uniq | head -1)
jsrun --smpiargs="off" -n $((nnodes * 6)) -r 6 -a 1 -g 1 -c 7 python pretrain_gpt.py {ON_MOCK_DATA} --train-iters 100
""",
        12,
        {},
        name="summit.lsf",
    ),
    "a job that is written and submitted, several times": ClusterScript(
        f"""#!/bin/bash
mkdir -p jobs
for lr in 1e-4 3e-4 1e-3; do
  job=jobs/lr_${{lr}}.sbatch
  cat > $job <<EOL
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --output=%j.out
export NCCL_DEBUG=INFO
srun python pretrain_gpt.py {ON_MOCK_DATA} --train-iters \\$((SLURM_NTASKS * 10)) --min-lr 1e-6 --lr $lr
EOL
  chmod +x $job
  sbatch $job
  sleep 1
done
""",
        8,
        {"--train-iters": "80", "--lr": "1e-4"},
        launches=3,
    ),
    "a job by a here-document": ClusterScript(
        f"""#!/bin/bash
NODES=${{1:-2}}
sbatch --job-name=x <<EOF
#!/bin/bash
#SBATCH --nodes=$NODES
#SBATCH --gpus-per-node=8
srun bash -c 'torchrun --nnodes $NODES --nproc_per_node \\$SLURM_GPUS_PER_NODE pretrain_gpt.py {ON_MOCK_DATA} --train-iters 100'
EOF
""",
        24,
        {},
        ("3",),
    ),
    "sbatch --wrap": ClusterScript(
        f"""for tp in 1 2; do
sbatch -N 1 --ntasks-per-node=8 --gpus-per-node=8 --export=ALL,TP=$tp \\
  --wrap="srun python pretrain_gpt.py {ON_MOCK_DATA} --train-iters 100 --tensor-model-parallel-size \\$TP"
done
""",
        8,
        {"--tensor-model-parallel-size": "1"},
        launches=2,
    ),
    "a script that submits itself with options": ClusterScript(
        f"""#!/bin/bash
if [[ -z "$SLURM_JOB_ID" ]]; then
  sbatch --nodes=2 --ntasks-per-node=4 --gres=gpu:4 "$0" "$@"
  exit 0
fi
srun python pretrain_gpt.py {ON_MOCK_DATA} --train-iters $1
""",
        8,
        {"--train-iters": "77"},
        ("77",),
    ),
    "docker": ClusterScript(
        f"""#!/bin/bash
set -e
IMAGE=nvcr.io/nvidia/pytorch:24.01-py3
docker run --gpus all --rm -v $(pwd):/workspace -w /workspace $IMAGE \\
  bash -c "pip install -e . && torchrun --nproc_per_node 8 pretrain_gpt.py {ON_MOCK_DATA} --train-iters 100"
""",
        8,
        {},
    ),
    "pyxis": ClusterScript(
        f"""#!/bin/bash
#SBATCH -p luna -A adlr -t 4:00:00 --nodes=4 --exclusive --mem=0 --overcommit --ntasks-per-node=8 --dependency=singleton
NAME="gpt"
DIR=`pwd`
DATETIME=`date +'date_%y-%m-%d_time_%H-%M-%S'`
mkdir -p $DIR/logs
. ${{DIR}}/blend.sh
options=" {MODEL} --train-samples 6400 --global-batch-size 64 --data-path ${{DATA_BLEND}} --split 98,2,0 \\
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B "
run_cmd="python -u ${{DIR}}/pretrain_gpt.py ${{options}}"
srun -l --container-image "nvcr.io/nvidia/pytorch:23.04-py3" --container-mounts "/lustre:/lustre" \\
  --output=$DIR/logs/%x_%j_$DATETIME.log sh -c "${{run_cmd}}"
set +x
""",
        32,
        {"--split": "98,2,0"},
        files={"blend.sh": 'DATA_BLEND="0.3 a_text_document 0.7 b_text_document"\n'},
    ),
    "a common launcher": ClusterScript(
        """#!/bin/bash
export GBS=16
SEQ_LEN=256
. scripts/common.sh
export LAUNCH_CMD=" pretrain_gpt.py $GPT_ARGS "
bash scripts/launch.sh
SEQ_LEN=512
. scripts/common.sh
export LAUNCH_CMD=" pretrain_gpt.py $GPT_ARGS "
bash scripts/launch.sh
""",
        8,
        {"--seq-length": "256"},
        files={
            "scripts/common.sh": f'GPT_ARGS="{ON_MOCK_DATA} --max-position-embeddings 512 --seq-length $SEQ_LEN '
            '--global-batch-size $GBS --train-iters 100"\n',
            "scripts/launch.sh": "torchrun --nproc_per_node 8 $LAUNCH_CMD 2>&1 | tee log.txt\n",
        },
        launches=2,
    ),
    "numbers from a settings file": ClusterScript(
        f"""#!/bin/bash
set -eo pipefail
HIDDEN=$(grep '^hidden_size' model.conf | cut -d= -f2)
LAYERS=$(awk -F: '/num_layers/ {{ print $2 }}' model.yaml | tr -d ' ')
HEADS=$(sed -n 's/^heads: *//p' model.yaml)
LR=$(awk -v n="$LAYERS" 'BEGIN {{ printf "%.5f", 0.01 / n }}')
HALF=$(python3 -c "print(int($HIDDEN * 4 / 2))")
CORPORA=$(ls -1 data | xargs)
torchrun --nproc_per_node 2 pretrain_gpt.py {ON_MOCK_DATA} --hidden-size $HIDDEN --num-layers $LAYERS \\
  --num-attention-heads $HEADS --lr $LR --ffn-hidden-size $HALF --train-iters 100
""",
        2,
        {"--num-layers": "12", "--lr": "0.00083", "--hidden-size": "768", "--ffn-hidden-size": "1536"},
        files={"model.conf": "hidden_size=768\n", "model.yaml": "num_layers: 12\nheads: 12\n"},
    ),
    "ssh to each node": ClusterScript(
        f"""#!/bin/bash
NNODES=$(wc -l < hosts.txt)
MASTER=$(head -n 1 hosts.txt | awk '{{print $1}}')
rank=0
while read -r host slots; do
  ssh -n $host "cd $PWD && torchrun --nnodes $NNODES --node_rank $rank --nproc_per_node 8 --master_addr $MASTER \\
    pretrain_gpt.py {ON_MOCK_DATA} --train-iters 100" &
  rank=$((rank + 1))
done < hosts.txt
wait
""",
        16,
        {},
        files={"hosts.txt": "a slots=8\nb slots=8\n"},
    ),
    "files that must be there": ClusterScript(
        f"""#!/bin/bash
DATA=/scratch/nobody/pile_text_document
for ending in bin idx; do
  if [ ! -f "$DATA.$ending" ]; then
    echo "ERROR: $DATA.$ending not found" >&2
    exit 1
  fi
done
[[ -d /scratch/nobody/megatron ]] || {{ echo "no code"; exit 1; }}
cd /scratch/nobody/megatron
torchrun --nproc_per_node 8 pretrain_gpt.py {MODEL} --data-path $DATA --train-iters 100 \\
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen2.5-7B
""",
        8,
        {"--data-path": "/scratch/nobody/pile_text_document"},
    ),
    "an array of jobs": ClusterScript(
        f"""#!/bin/bash
#SBATCH --array=1-3%1
#SBATCH --nodes=1
#SBATCH --ntasks=2
#SBATCH --gpus-per-task=1
LRS=(0 1e-4 3e-4 1e-3)
LR=${{LRS[$SLURM_ARRAY_TASK_ID]}}
SEED=$(sed -n "${{SLURM_ARRAY_TASK_ID}}p" seeds.txt)
srun python pretrain_gpt.py {ON_MOCK_DATA} --train-iters 100 --lr $LR --seed $SEED --save out/$SLURM_ARRAY_JOB_ID
""",
        2,
        {"--lr": "1e-4", "--seed": "11", "--save": "out/123456"},
        files={"seeds.txt": "11\n22\n33\n"},
    ),
    "a template": ClusterScript(
        """#!/bin/bash
sed -e "s/@NODES@/$1/" -e 's/@LR@/2e-4/' template.sbatch | sbatch
""",
        16,
        {"--lr": "2e-4"},
        ("2",),
        {
            "template.sbatch": "#!/bin/bash\n#SBATCH --nodes=@NODES@\n#SBATCH --ntasks-per-node=8\n"
            f"srun python pretrain_gpt.py {ON_MOCK_DATA} --train-iters 100 --lr @LR@\n"
        },
    ),
    "deepspeed with a list of hosts": ClusterScript(
        f"""#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gres=gpu:8
#SBATCH --job-name=ds
HOSTFILE=$(mktemp)
for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  echo "$host slots=8" >> $HOSTFILE
done
PORT=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
STEPS=$(expr $(cat $HOSTFILE | wc -l) \\* 50)
deepspeed --hostfile $HOSTFILE --num_gpus 8 --num_nodes $SLURM_NNODES --master_port $PORT pretrain_gpt.py \\
  {ON_MOCK_DATA} --train-iters $STEPS
""",
        16,
        {"--train-iters": "100"},
    ),
}
