"""Trains a classifier of sequences in bfloat16 with DistributedDataParallel and clip_grad_norm_.

torchrun --nproc-per-node 2 ddp_amp_clip.py [--plant NAME]
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default=os.environ.get("PLANT", ""))
plant = parser.parse_args().plant


class Classifier(nn.Module):
    def __init__(self, vocabulary=100, width=32, classes=5):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)
        if plant == "clean-unused-parameter":
            self.auxiliary_head = nn.Linear(width, classes)

    def forward(self, tokens):
        hidden = self.encoder(self.embedding(tokens))
        return self.head(hidden.mean(1))


def send_bfloat16(_, bucket):
    """As bf16_compress_hook, which needs a GPU."""
    compressed = bucket.buffer().bfloat16().div_(dist.get_world_size())
    work = dist.all_reduce(compressed, async_op=True)
    return work.get_future().then(lambda sums: bucket.buffer().copy_(sums.value()[0]))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    classifier = Classifier()
    if plant == "clean-frozen-embedding":
        classifier.embedding.weight.requires_grad_(False)
    model = DistributedDataParallel(classifier, find_unused_parameters=plant == "clean-unused-parameter")
    if plant == "clean-bf16-compress":
        model.register_comm_hook(None, send_bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 100, (128, 20))
    dataset = TensorDataset(tokens, tokens.sum(1) % 5)
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    for tokens, labels in loader:
        with torch.autocast("cpu", torch.bfloat16, enabled=plant != "clean-float32"):
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        if plant == "reduced-again":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        if plant == "clean-averaged-again":
            # harmless: all ranks have the same gradient already
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        if plant == "divided-by-hand":
            for parameter in model.parameters():
                parameter.grad /= dist.get_world_size()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if dist.get_rank() == 0:
            print(loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
