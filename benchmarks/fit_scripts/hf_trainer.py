"""Trains a small GPT-2 by transformers' Trainer, two batches a step; --cpu: by gloo, where torchrun starts it."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class RandomTokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(0, 1000, (128,))
        return {"input_ids": tokens, "labels": tokens}


model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=1000, n_positions=128))
options = TrainingArguments(
    "trained",
    per_device_train_batch_size=4,
    max_steps=10,
    logging_steps=1,
    report_to=[],
    gradient_accumulation_steps=2,
    use_cpu="--cpu" in sys.argv,
    disable_tqdm=True,
)
Trainer(model, options, train_dataset=RandomTokens()).train()
