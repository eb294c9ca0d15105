"""Trains torch's TransformerEncoder by Lightning, on as many devices as torchrun starts ranks."""

import os

import lightning
import torch
from torch import nn


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(64, 10)

    def training_step(self, batch, index):
        vectors, labels = batch
        loss = nn.functional.cross_entropy(self.head(self.encoder(vectors).mean(1)), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


data = torch.utils.data.TensorDataset(torch.randn(256, 16, 64), torch.randint(0, 10, (256,)))
devices = int(os.environ.get("WORLD_SIZE", "1"))
trainer = lightning.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, devices=devices)
trainer.fit(Classifier(), torch.utils.data.DataLoader(data, 16))
