"""Trains two networks against each other, each with an optimizer of its own."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
maker = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 784), nn.Tanh()).to(device)
judge = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)).to(device)
of_maker = torch.optim.Adam(maker.parameters(), 2e-4, betas=(0.5, 0.999))
of_judge = torch.optim.Adam(judge.parameters(), 2e-4)
compare = nn.BCEWithLogitsLoss()
for step in range(20):
    real = torch.randn(128, 784).to(device)
    made = maker(torch.randn(128, 64, device=device))
    right = torch.ones(128, 1, device=device)
    of_judge.zero_grad()
    judged = compare(judge(real), right) + compare(judge(made.detach()), torch.zeros(128, 1, device=device))
    judged.backward()
    of_judge.step()
    of_maker.zero_grad()
    fooled = compare(judge(made), right)
    fooled.backward()
    of_maker.step()
    print(step, judged.item(), fooled.item())
