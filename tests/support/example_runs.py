"""Starts of the example scripts, and what they leave."""

from pathlib import Path

from megatron_lite.run_folder import TRACKER_FILE
from support.paths import REPO

SLURM = REPO / "examples" / "gpt3" / "slurm.sbatch"


OURS = (
    "TP",
    "CP",
    "PP",
    "GPUS_PER_NODE",
    "NUM_NODES",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "STEPS",
    "OMP_NUM_THREADS",
)


TINY = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "32",
    "--max-position-embeddings", "32", "--num-workers", "0",
]  # fmt: skip


def read_tracker(save: Path) -> int:
    """The iteration of the newest checkpoint."""
    return int((save / TRACKER_FILE).read_text())
