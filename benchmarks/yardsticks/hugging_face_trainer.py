"""GPT-2 from scratch by transformers.Trainer, set up as its documentation says.

[torchrun --nproc-per-node N -m] python -m benchmarks.yardsticks.hugging_face_trainer --help
"""

import os
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from benchmarks.yardsticks.task import BETAS, CLIP, WEIGHT_DECAY, RandomWindows, StepLog, read_task


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
            torch_compile=task.compile,
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
