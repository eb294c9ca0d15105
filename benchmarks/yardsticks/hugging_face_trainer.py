"""GPT-2 from scratch by transformers.Trainer, set up as its documentation says.

[torchrun --nproc-per-node N -m] python -m benchmarks.yardsticks.hugging_face_trainer --help
"""

import argparse
import json
import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
STEPS_BETWEEN_LOOKS = 10


def read_task(description: str) -> argparse.Namespace:
    """Sizes are in tokens and sequences; `accumulation` is per rank."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    for name in ("layers", "hidden", "heads", "sequence", "vocabulary", "micro-batch", "accumulation", "steps"):
        add(f"--{name}", type=int, required=True)
    add("--precision", choices=("fp32", "bf16", "fp16"), required=True)
    add("--lr", type=float, required=True)
    add("--lr-warm-up", type=int, required=True, help="steps, linear from 0")
    add("--tokens", type=Path, required=True, help="token ids, one after another and nothing else")
    add("--token-type", default="uint16", help="numpy's name of their type")
    add("--step-file", type=Path, required=True, help="gets a JSON line per step")
    add("--device", choices=("cpu", "cuda"), required=True)
    add("--seed", type=int, default=1234)
    return parser.parse_args()


class RandomWindows:
    """`[i]` is int64 [sequence + 1], cut out of the file at a random place; the index is not looked at."""

    def __init__(self, task: argparse.Namespace, rank: int):
        self.tokens = np.memmap(task.tokens, dtype=task.token_type, mode="r")
        self.length = task.sequence + 1
        self.samples = task.steps * task.accumulation * task.micro_batch * int(os.environ.get("WORLD_SIZE", "1"))
        self._random = np.random.default_rng((task.seed, rank))

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        start = self._random.integers(len(self.tokens) - self.length + 1)
        return torch.from_numpy(self.tokens[start : start + self.length].astype(np.int64))


class StepLog:
    """The figures of steps: a JSON line each (seconds since the step before ended, tokens, loss), and one to the console.

    As in nanoGPT losses are looked at every 10 steps only: on a GPU a look waits for all work, and each step would begin with
    an idle GPU. Every rank has a log, since losses are averaged over ranks; the first one's writes.
    """

    def __init__(self, task: argparse.Namespace, ranks: int):
        self._task, self._ranks = task, ranks
        self._writes = int(os.environ.get("RANK", "0")) == 0
        self._tokens = task.sequence * task.micro_batch * task.accumulation * ranks
        self._file = open(task.step_file, "w", encoding="utf-8") if self._writes else None
        self._losses: list[Tensor] = []  # of this rank, not looked at yet
        self._ends = [self._now()]
        self._written = 0

    def end_of_step(self, loss: Tensor):
        """The step is over, or on a GPU handed over; `loss`, a scalar on the device, is this rank's mean per token in nats."""
        self._ends.append(self._now())
        self._losses.append(loss.detach())
        number = self._written + len(self._losses)
        if number == 1 or number % STEPS_BETWEEN_LOOKS == 0 or number == self._task.steps:
            self._write()

    def _now(self):
        """Seconds; on a GPU an event."""
        if self._task.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _write(self):
        losses = torch.stack(self._losses).float()
        if self._ranks > 1:
            dist.all_reduce(losses)
            losses /= self._ranks
        values = losses.tolist()  # waits for the GPU
        seconds = [self._between(*pair) for pair in pairwise(self._ends)]
        self._losses, self._ends = [], self._ends[-1:]
        memory = {"peak_memory_bytes": torch.cuda.max_memory_allocated()} if self._task.device == "cuda" else {}
        for loss, taken in zip(values, seconds):
            self._written += 1
            if self._writes:
                record = {"step": self._written, "seconds": taken, "tokens": self._tokens, "loss": loss, **memory}
                self._file.write(json.dumps(record) + "\n")
                print(f"step {self._written}/{self._task.steps}: loss {loss:.4f}", flush=True)
        if self._writes:
            self._file.flush()

    @staticmethod
    def _between(before, after) -> float:
        return after - before if isinstance(after, float) else before.elapsed_time(after) / 1000


class WatchedTrainer(Trainer):
    """Keeps each micro-batch's loss: what the Trainer logs by itself it looks at, and every look waits for a GPU."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.loss = 0.0  # of the running step, a tensor on the device

    def training_step(self, *arguments, **named):
        loss = super().training_step(*arguments, **named)
        self.loss = self.loss + loss
        return loss


class Watch(TrainerCallback):
    """Ends the log's steps."""

    def __init__(self, trainer: WatchedTrainer, log: StepLog):
        self._trainer, self._log = trainer, log

    def on_step_end(self, *_, **__):
        loss, self._trainer.loss = self._trainer.loss, 0.0
        self._log.end_of_step(loss)


def main():
    task = read_task(__doc__.splitlines()[0])
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(task.seed)
    sizes = {"n_positions": task.sequence, "n_embd": task.hidden, "n_layer": task.layers, "n_head": task.heads}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    plain = {"activation_function": "gelu_new", "use_cache": False, "bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(vocab_size=task.vocabulary, **sizes, **no_dropout, **plain)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=task.steps,
            per_device_train_batch_size=task.micro_batch,
            gradient_accumulation_steps=task.accumulation,
            learning_rate=task.lr,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=task.lr_warm_up,
            optim="adamw_torch_fused",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=CLIP,
            bf16=task.precision == "bf16",
            fp16=task.precision == "fp16",
            use_cpu=task.device == "cpu",
            seed=task.seed,
            ddp_find_unused_parameters=False,
            logging_strategy="no",
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=task.device == "cuda",
        )
        model, windows = GPT2LMHeadModel(config), RandomWindows(task, rank)
        trainer = WatchedTrainer(model=model, args=arguments, data_collator=collate, train_dataset=windows)
        trainer.add_callback(Watch(trainer, StepLog(task, ranks)))
        trainer.train()


def collate(windows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model shifts labels itself: token i + 1 is the label of token i, and the last token of a window has none."""
    tokens = torch.stack(windows)[:, :-1].contiguous()
    labels = tokens.clone()
    labels[:, 0] = -100  # nothing predicts it, but the Trainer's mean over labels would count it
    return {"input_ids": tokens, "labels": labels}


if __name__ == "__main__":
    main()
