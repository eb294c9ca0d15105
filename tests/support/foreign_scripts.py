"""Training scripts that know nothing of this package, each a kind of its own. They end by themselves after ten steps."""

BEGIN = """
import torch
from torch import nn
from torch.nn import functional as F
device = "cuda" if torch.cuda.is_available() else "cpu"
"""

PERCEPTRON = (
    BEGIN
    + """
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    x = torch.randn(32, 64).to(device)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{step}: {loss.item():.4f}")
"""
)

IMAGES = (
    BEGIN
    + """
from torch.utils.data import DataLoader, TensorDataset
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.scale = nn.Parameter(torch.ones(16, 1, 1))
        self.head = nn.Linear(16, 10)
    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x)) * self.scale).mean((2, 3)))
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = TensorDataset(torch.randn(80, 3, 32, 32), torch.randint(0, 10, (80,)))
for images, labels in DataLoader(data, batch_size=8, num_workers=1):
    images, labels = images.to(device), labels.to(device)
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
)

TWO_OPTIMIZERS = (
    BEGIN
    + """
maker = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 128)).to(device)
judge = nn.Sequential(nn.Linear(128, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)).to(device)
of_maker = torch.optim.Adam(maker.parameters())
of_judge = torch.optim.Adam(judge.parameters())
right, wrong = torch.ones(32, 1, device=device), torch.zeros(32, 1, device=device)
for step in range(10):
    real, noise = torch.randn(32, 128).to(device), torch.randn(32, 16, device=device)
    made = maker(noise)
    of_judge.zero_grad()
    told = F.binary_cross_entropy_with_logits(judge(real), right)
    told = told + F.binary_cross_entropy_with_logits(judge(made.detach()), wrong)
    told.backward()
    of_judge.step()
    of_maker.zero_grad()
    F.binary_cross_entropy_with_logits(judge(made), right).backward()
    of_maker.step()
"""
)

ENCODER = (
    BEGIN
    + """
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
model = nn.TransformerEncoder(layer, 2).to(device)
head = nn.Linear(64, 10).to(device)
optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
for step in range(10):
    for part in range(2):
        x, y = torch.randn(8, 16, 64).to(device), torch.randint(0, 10, (8,)).to(device)
        (F.cross_entropy(head(model(x).mean(1)), y) / 2).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
"""
)

MIXED_PRECISION = (
    BEGIN
    + """
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda")
for step in range(10):
    x = torch.randn(32, 64).pin_memory().to("cuda", non_blocking=True)
    with torch.autocast("cuda", torch.float16):
        loss = (model(x) - x).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert torch.cuda.get_device_properties(0).total_memory > 70 * 2**30
    assert torch.cuda.max_memory_allocated() > 0
"""
)

SEVERAL_RANKS = (
    BEGIN
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
assert dist.get_world_size() == 8
model = nn.Linear(256, 256, bias=False).to("cuda")
model = DistributedDataParallel(model, device_ids=[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    x = torch.randn(4, 256).to("cuda")
    loss = model(x).square().mean()
    loss.backward()
    dist.all_reduce(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
"""
)

UNEVEN_RANKS = (
    BEGIN
    + """
import os
import torch.distributed as dist
dist.init_process_group("nccl")
assert torch.cuda.device_count() == dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
assert torch.zeros(1, device="cuda").device.index == torch.cuda.current_device() == dist.get_rank()
part = nn.Sequential(*[nn.Linear(256, 256) for _ in range(2 + 2 * dist.get_rank())]).to("cuda")
optimizer = torch.optim.AdamW(part.parameters())
for step in range(4):
    part(torch.randn(16, 256).to("cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)

SCRIPTS = {"perceptron": PERCEPTRON, "images": IMAGES, "two optimizers": TWO_OPTIMIZERS, "encoder": ENCODER}
