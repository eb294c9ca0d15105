"""Trains a classifier with Lightning's DDP strategy, which validates first.

torchrun --nproc-per-node 2 lightning_module.py [--plant NAME]
"""

import argparse
import os
import tempfile

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default=os.environ.get("PLANT", ""))
plant = parser.parse_args().plant


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, inputs):
        return self.layers(inputs)

    def training_step(self, batch, number):
        inputs, targets = batch
        return nn.functional.cross_entropy(self(inputs), targets)

    def validation_step(self, batch, number):
        inputs, targets = batch
        self.log("validation", nn.functional.cross_entropy(self(inputs), targets), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def build_loader(seed, shuffle):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(96, 12, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.argmax(1) % 4), batch_size=8, shuffle=shuffle)


def main():
    lightning.seed_everything(3)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            strategy="ddp",
            max_steps=4,
            gradient_clip_val=0.5,
            accumulate_grad_batches=2,
            use_distributed_sampler=plant != "no-sampler",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(Classifier(), build_loader(0, shuffle=True), build_loader(1, shuffle=False))


if __name__ == "__main__":
    main()
