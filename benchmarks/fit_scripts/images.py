"""Trains a small model of transformers on random images: vit or resnet."""

import sys

import torch
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

MODELS = {
    "vit": lambda: ViTForImageClassification(
        ViTConfig(
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            image_size=64,
            patch_size=8,
            num_labels=10,
        )
    ),
    "resnet": lambda: ResNetForImageClassification(
        ResNetConfig(embedding_size=32, hidden_sizes=[32, 64], depths=[2, 2], layer_type="basic", num_labels=10)
    ),
}
device = "cuda" if torch.cuda.is_available() else "cpu"
model = MODELS[sys.argv[1]]().to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    images = torch.randn(4, 3, 64, 64).to(device)
    labels = torch.randint(0, 10, (4,)).to(device)
    loss = model(pixel_values=images, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
