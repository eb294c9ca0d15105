"""Causes planted into real runs on a CPU: does the report name each one first, and none of them in clean runs?

    python tests/planted_causes.py [FOLDER] [CAUSE ...]         all, or some; prints a table
    python tests/planted_causes.py --train CAUSE FLAGS          one run, under a launcher or alone

What only a GPU shows (tensor cores, launches, copies) has made traces instead, in finding_cases.py.
"""

import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from waiting import LIMIT_S

FLAGS = (
    "--num-layers 1 --hidden-size 256 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 4 --global-batch-size 8 --train-iters 16 --lr 1e-4 "
    "--bf16 "
    "--tokenizer-type NullTokenizer --vocab-size 1023 --mock-data --num-workers 0 --eval-iters 0 --log-interval 2 "
    "--profile --use-pytorch-profiler --profile-step-start 9 --profile-step-end 12 --profile-ranks -1 "
    "--pytorch-profiler-collect-shapes --no-report"
)
HAS_BF16_PRODUCTS = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
NEED_BF16_PRODUCTS = {"fp32", "hidden 1000"}
CLEAN = "clean"
SLEEP_S = 0.04
KEPT = []  # what the leak keeps


def after_forward(do: Callable):
    """`do(loss)` after the forward of every micro-batch."""
    from megatron_lite.train import step

    inner = step.loss_and_tokens

    def doing(model, batch):
        loss, tokens = inner(model, batch)
        do(loss)
        return loss, tokens

    step.loss_and_tokens = doing


def read_often():
    after_forward(lambda loss: [loss.item() for _ in range(42)])


def collect_garbage():
    after_forward(lambda loss: gc.collect())


def sleep_in_the_step():
    after_forward(lambda loss: time.sleep(SLEEP_S))


def log_heavily():
    logger = logging.getLogger("heavy")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(logging.FileHandler(os.devnull))
    after_forward(lambda loss: [logger.debug("value %d", index) for index in range(5000)])


def sleeping_loader():
    from megatron_lite.data import loader

    inner = loader._stack

    def slow(samples):
        time.sleep(SLEEP_S)
        return inner(samples)

    loader._stack = slow


def reduce_every_micro_batch():
    from megatron_lite.parallel.data_parallel import DataParallel

    inner = DataParallel.micro_batch
    DataParallel.micro_batch = lambda self, last: inner(self, True)


def slow_rank():
    from megatron_lite.train import step

    inner, square = step.loss_and_tokens, torch.ones(384, 384)

    def slow(model, batch):
        if os.environ["RANK"] == "1":
            until = (
                time.monotonic() + SLEEP_S
            )  # operators, as on a slow core: a sleep would be Python between operators
            while time.monotonic() < until:
                torch.mm(square, square)
        return inner(model, batch)

    step.loss_and_tokens = slow


def leak():
    from megatron_lite.train import step

    inner = step.loss_and_tokens

    def keeping(model, batch):
        KEPT.append(torch.ones(2**20))  # 4 MiB, as if outputs were kept for later
        return inner(model, batch)

    step.loss_and_tokens = keeping


def unfused_optimizer():

    from megatron_lite.optim import optimizer

    class Loop(torch.optim.AdamW):
        """What fused kernels do with the scale, by hand."""

        def step(self):
            scale, found_inf = self.__dict__.pop("grad_scale"), self.__dict__.pop("found_inf")
            for weight in self.param_groups[0]["params"]:
                weight.grad.div_(scale)
            super().step()
            self.grad_scale, self.found_inf = scale, found_inf

    optimizer.make_engine = lambda plan, masters, lr: Loop(masters, lr=lr, foreach=False, fused=False)


def recompiles():
    from megatron_lite.train.step import BatchMaker

    inner, calls = BatchMaker.__call__, []

    def shorter(self, raw_BT1):
        calls.append(1)
        return inner(self, raw_BT1[:, : raw_BT1.shape[1] - 8 * (len(calls) // 6)])

    BatchMaker.__call__ = shorter


def nothing():
    pass


@dataclass(frozen=True)
class Cause:
    """How it is planted, and the code of the finding that must come first."""

    code: str
    plant: Callable[[], None] = nothing
    flags: str = ""
    ranks: int = 1


CAUSES = {
    "gc.collect() in every step": Cause("gc-pauses", collect_garbage),
    "a sleep in every step": Cause("host-gaps", sleep_in_the_step),
    "heavy logging": Cause("host-gaps", log_heavily),
    "a sleeping loader": Cause("starved-loader", sleeping_loader),
    "hidden 1000": Cause(
        "matmul-shapes", flags="--hidden-size 1000 --num-attention-heads 5 --micro-batch-size 16 --global-batch-size 16"
    ),
    "fp32": Cause("fp32-products", flags="!--bf16"),
    "tiny micro-batches": Cause("tiny-micro-batches", flags="--micro-batch-size 1 --global-batch-size 12"),
    "all-reduce in every micro-batch": Cause(
        "reduce-every-micro-batch",
        reduce_every_micro_batch,
        "--hidden-size 768 --num-attention-heads 12 --micro-batch-size 2 --global-batch-size 12 --profile-step-end 14",
        ranks=2,
    ),
    "a slow rank": Cause("straggler", slow_rank, "--profile-step-end 14", ranks=2),
    "a leak": Cause("memory-growth", leak),
    "an unfused optimizer": Cause(
        "unfused-optimizer",
        unfused_optimizer,
        "--hidden-size 512 --num-attention-heads 8 --micro-batch-size 1 --global-batch-size 1",
    ),
    "recompiles": Cause("recompilation", recompiles, "--torch-compile --torch-compile-backend aot_eager"),
}
PLANTED = {cause.code for cause in CAUSES.values()}
CLEAN_RUNS = {  # sound runs of several kinds
    "as it is": Cause(CLEAN),
    "values read on a CPU": Cause(CLEAN, read_often),
    "one micro-batch": Cause(CLEAN, flags="--micro-batch-size 8"),
    "RMSNorm, SwiGLU, rope": Cause(CLEAN, flags="--normalization RMSNorm --swiglu --position-embedding-type rope"),
    "recomputation": Cause(
        CLEAN, flags="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "longer sequences": Cause(
        CLEAN, flags="--seq-length 128 --max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 4"
    ),
    "two ranks": Cause(CLEAN, flags="--global-batch-size 16", ranks=2),
}


def command_line(cause: Cause, run_dir: Path) -> list[str]:
    """FLAGS, with those of the cause behind; !--flag takes one out."""
    own = cause.flags.split()
    out = {word[1:] for word in own if word.startswith("!")}
    if not HAS_BF16_PRODUCTS:  # bf16 would be the most costly cause of all
        out.add("--bf16")
    kept = [word for word in FLAGS.split() if word not in out]
    return [*kept, *(word for word in own if not word.startswith("!")), "--run-dir", str(run_dir)]


def trained(name: str, folder: Path):
    """The report of one run with the cause planted."""
    from launch import start

    from megatron_lite.analysis.analyze import analyze

    cause = (CAUSES | CLEAN_RUNS)[name]
    run_dir = folder / name.replace(" ", "-")
    argv = ["--train", name, *command_line(cause, run_dir)]
    process = start(argv, ranks=cause.ranks if cause.ranks > 1 else 0, script=Path(__file__).resolve())
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # ranks would live on
    if process.returncode:
        raise RuntimeError(f"{name}: the run ended with {process.returncode}\n{out[-2000:]}\n{err[-2000:]}")
    return analyze([run_dir])


def main(folder: Path, names: list[str]) -> int:
    wrong = 0
    for name in names or [*CAUSES, *CLEAN_RUNS]:
        try:
            report = trained(name, folder)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            wrong += 1
            print(f"WRONG {name}: {error}", flush=True)
            continue
        codes = [finding.code for finding in report.findings]
        code = (CAUSES | CLEAN_RUNS)[name].code
        good = not PLANTED & set(codes) if code == CLEAN else codes[:1] == [code]
        wrong += not good
        priced = [one.code if one.cost_ms is None else f"{one.code} {one.cost_ms:,.2f} ms" for one in report.findings]
        print(f"{'ok  ' if good else 'WRONG'} {name:34} {code:26} found: {', '.join(priced) or 'nothing'}", flush=True)
    return wrong


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        from torch.distributed.elastic.multiprocessing.errors import record

        from megatron_lite import app

        (CAUSES | CLEAN_RUNS)[sys.argv[2]].plant()
        sys.exit(record(app.main)(sys.argv[3:]))
    given = sys.argv[1:]
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(Path(given[0]) if given else Path(temporary), given[1:]))
