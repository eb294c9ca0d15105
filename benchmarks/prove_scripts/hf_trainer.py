"""Trains a small GPT-2 with Hugging Face's Trainer, which evaluates first.

torchrun --nproc-per-node 2 hf_trainer.py [--plant NAME]
"""

import argparse
import os
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default=os.environ.get("PLANT", ""))
plant = parser.parse_args().plant
VOCABULARY, LENGTH, SAMPLES = 64, 16, 96


class Sequences(torch.utils.data.Dataset):
    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class SummedTrainer(Trainer):
    """Trains on the sum of the ranks' gradients."""

    def training_step(self, model, inputs, *arguments):
        loss = super().training_step(model, inputs, *arguments)
        if self.accelerator.sync_gradients:
            for parameter in model.parameters():
                parameter.grad.mul_(self.args.world_size)
        return loss


def main():
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4)
    if plant != "dropout":
        # the Trainer gives all ranks one random state
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=4,
            learning_rate=1e-3,
            eval_strategy="steps",
            eval_steps=1,
            eval_on_start=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=11,
        )
        trainer_class = SummedTrainer if plant == "sum" else Trainer
        trainer_class(model=model, args=options, train_dataset=Sequences(1), eval_dataset=Sequences(2)).train()


if __name__ == "__main__":
    main()
