"""Small training programs as strangers write them, each with a planted cause: planted_causes.py runs and reads them.

    python planted_programs.py NAME                       # under `megatron-lite watch --`, or alone
    python planted_programs.py NAME --trace FOLDER        # under torch.profiler, steps marked by a schedule
    ... --unmarked --stacks                               # without marks; with Python's stack

They know nothing of megatron_lite. All run on a CPU; those in RANKS with two ranks of gloo.
"""

import argparse
import gc
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WIDTH, STEPS = 384, 24
PROFILED = slice(8, 14)


class Profile:
    """Profiles some steps of a loop, as a program of its own would."""

    def __init__(self, folder: Path | None, unmarked: bool, stacks: bool):
        self.folder, self.unmarked, self.stacks = folder, unmarked, stacks

    def steps(self, count: int = STEPS) -> Iterator[int]:
        if self.folder is None:
            yield from range(count)
            return
        rank = os.environ.get("RANK", "0")
        path = self.folder / f"host_rank{rank}.1700000000000000000.pt.trace.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        named = {"with_stack": self.stacks, "record_shapes": True}
        if self.unmarked:
            yield from range(PROFILED.start)
            with torch.profiler.profile(**named) as profiler:
                yield from range(PROFILED.start, PROFILED.stop)
            profiler.export_chrome_trace(str(path))
            return
        schedule = torch.profiler.schedule(wait=PROFILED.start - 2, warmup=2, active=PROFILED.stop - PROFILED.start)
        kept = torch.profiler.profile(
            schedule=schedule, on_trace_ready=lambda ended: ended.export_chrome_trace(str(path)), **named
        )
        with kept as profiler:
            for number in range(PROFILED.stop + 2):
                yield number
                profiler.step()


class Samples(Dataset):
    def __init__(self, count: int = 4096, sleep_s: float = 0.0):
        self.count, self.sleep_s = count, sleep_s

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.sleep_s:
            time.sleep(self.sleep_s)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), index % 10


def make_model(depth: int = 4, width: int = WIDTH) -> nn.Sequential:
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def endless(loader):
    while True:
        yield from loader


def train(
    profile: Profile,
    model: nn.Module | None = None,
    loader=None,
    optimizer=None,
    forward=None,
    before_backward=lambda number: None,
    after_step=lambda number: None,
    set_to_none: bool = True,
    batch: int = 128,
    steps: int = STEPS,
):
    """The loop of most programs."""
    model = model if model is not None else make_model()
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = endless(loader or DataLoader(Samples(), batch_size=batch))
    forward = forward or (lambda x: model(x))
    for number in profile.steps(steps):
        x, y = next(batches)
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = F.cross_entropy(forward(x), y)
        before_backward(number)
        loss.backward()
        optimizer.step()
        after_step(number)


def in_memory(batch: int = 128, count: int = 8) -> list:
    torch.manual_seed(0)
    return [(torch.randn(batch, WIDTH), torch.randint(0, 10, (batch,))) for _ in range(count)]


def clean_loop(profile):
    train(profile, loader=in_memory(512))


def slow_samples(profile):
    train(profile, loader=DataLoader(Samples(sleep_s=0.002), batch_size=32))


def slow_collate(profile):
    def collate(samples):
        words = [str(i * i) for _ in samples for i in range(1500)]
        assert words
        return torch.utils.data.default_collate(samples)

    train(profile, loader=DataLoader(Samples(), batch_size=64, collate_fn=collate))


def slow_worker(profile):
    train(profile, loader=DataLoader(Samples(sleep_s=0.004), batch_size=32, num_workers=1))


def hand_made_loader(profile):
    """A generator of the program's own: no DataLoader."""

    def read_batches():
        while True:
            time.sleep(0.04)
            yield in_memory(128, 1)[0]

    train(profile, loader=read_batches())


def save_each_step(profile):
    model = make_model(depth=8)
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"planted_{os.getpid()}.pt"
    train(profile, model, in_memory(), after_step=lambda number: torch.save(model.state_dict(), path))
    path.unlink(missing_ok=True)


def evaluate_each_step(profile):
    model = make_model()
    held_out = in_memory(1024, 6)

    def evaluate(number):
        model.eval()
        with torch.no_grad():
            sum(F.cross_entropy(model(x), y).item() for x, y in held_out)
        model.train()

    train(profile, model, in_memory(128), after_step=evaluate)


def anomaly(profile):
    with torch.autograd.set_detect_anomaly(True):
        train(profile, loader=in_memory())


class DoubleBlock(nn.Module):
    """Someone once looked for a NaN here."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).double()

    def forward(self, x):
        return x + self.inner(x.double()).float()


def fp64_block(profile):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), DoubleBlock(), nn.Linear(WIDTH, 10))
    train(profile, model, in_memory(512))


def fp64_model(profile):
    model = make_model(depth=4).double()
    train(profile, model, [(x.double(), y) for x, y in in_memory(512)])


class Shuffling(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(32, 32)

    def forward(self, x):
        for _ in range(6):
            x = x.transpose(1, 2).contiguous().transpose(0, 1).contiguous().transpose(0, 1).contiguous()
            x = x.transpose(1, 2).contiguous()
        return self.mix(x).mean(dim=(1,))


def contiguous_copies(profile):
    model = nn.Sequential(Shuffling(), nn.Linear(32, 10))
    data = [(torch.randn(64, 512, 32), torch.randint(0, 10, (64,))) for _ in range(4)]
    train(profile, model, data)


def second_forward(profile):
    model = make_model()

    def forward(x):
        with torch.no_grad():
            accuracy = model(x).argmax(1)
        assert len(accuracy) == len(x)
        return model(x)

    train(profile, model, in_memory(512), forward=forward)


def lbfgs_slow_closure(profile):
    model = make_model(depth=2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=4)
    batches = endless(in_memory(256))
    for _ in profile.steps():
        x, y = next(batches)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            time.sleep(0.02)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        [x] = ctx.saved_tensors
        rows = [sum(i * i for i in range(400)) for _ in range(len(x))]
        assert rows
        return gradient


def python_backward(profile):
    model = make_model()
    train(profile, model, in_memory(512), forward=lambda x: model(SlowBackward.apply(x.requires_grad_())))


def gc_thresholds(profile):
    held = [[index] for index in range(400_000)]
    gc.set_threshold(50, 2, 2)

    def forget(number):
        for _ in range(60):
            cycle = [[] for _ in range(60)]
            cycle.append(cycle)

    train(profile, loader=in_memory(), after_step=forget)
    assert held


def sleep_in_forward(profile):
    model = make_model()

    def forward(x):
        time.sleep(0.03)
        return model(x)

    train(profile, model, in_memory(256), forward=forward)


def python_metrics(profile):
    model = make_model()

    def metrics(number):
        seen = {}
        for index in range(60_000):
            seen[index % 100] = seen.get(index % 100, 0) + index

    train(profile, model, in_memory(256), after_step=metrics)


def loop_optimizer(profile):
    model = nn.Sequential(*[nn.Linear(24, 24) for _ in range(150)], nn.Linear(24, 10))
    data = [(torch.randn(8, 24), torch.randint(0, 10, (8,))) for _ in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    train(profile, model, data, optimizer)


def kept_zeros(profile):
    model = nn.Sequential(nn.EmbeddingBag(200_000, 64), nn.Linear(64, 10))
    data = [(torch.randint(0, 200_000, (64, 4)), torch.randint(0, 10, (64,))) for _ in range(4)]
    train(profile, model, data, torch.optim.SGD(model.parameters(), lr=0.1), set_to_none=False)


def same_batch(profile):
    one = in_memory(512, 1)
    train(profile, loader=one)


def leak(profile):
    kept = []
    model = make_model()

    def forward(x):
        out = model(x)
        kept.append(out.sum() + torch.ones(4 * 2**20).sum() * 0 + torch.zeros(2**20).requires_grad_().sum())
        kept.append(torch.ones(2**21))
        return out

    train(profile, model, in_memory(256), forward=forward)


def recompiling(profile):
    model = make_model(depth=2)
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    data = [(torch.randn(64 + n, WIDTH), torch.randint(0, 10, (64 + n,))) for n in range(STEPS)]
    torch._dynamo.config.recompile_limit = 64
    train(profile, model, data, forward=compiled)


def needless_checkpoint(profile):
    from torch.utils.checkpoint import checkpoint

    model = make_model(depth=6)
    train(profile, model, in_memory(1024), forward=lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=False))


def many_threads(profile):
    torch.set_num_threads(32)
    train(profile, loader=in_memory(512))


def many_workers(profile):
    train(profile, loader=DataLoader(Samples(), batch_size=64, num_workers=12))


def clipped_hard(profile):
    model = make_model()
    train(
        profile, model, in_memory(512), before_backward=lambda number: None,
        optimizer=_ClippingAdam(model.parameters(), lr=1e-3, fused=True),
    )  # fmt: skip


class _ClippingAdam(torch.optim.AdamW):
    def step(self, closure=None):
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1e-4)
        return super().step(closure)


def prints_a_lot(profile):
    sink = open(os.devnull, "w")
    model = make_model()

    def show(number):
        for name, weight in model.named_parameters():
            print(name, weight.flatten()[:400].tolist(), file=sink, flush=True)

    train(profile, model, in_memory(256), after_step=show)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


def clean_cnn(profile):
    data = [(torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))) for _ in range(8)]
    train(profile, Convolutions(), data)


class Block(nn.Module):
    def __init__(self, width=128, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class NanoGPT(nn.Module):
    def __init__(self, layers=4, width=128, vocabulary=512):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        return self.head(self.blocks(self.wte(tokens)))


def clean_nanogpt(profile):
    model = NanoGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = torch.randint(0, 512, (100_000,))
    for number in profile.steps():
        starts = torch.randint(len(data) - 129, (16,))
        x = torch.stack([data[i : i + 128] for i in starts.tolist()])
        y = torch.stack([data[i + 1 : i + 129] for i in starts.tolist()])
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if number % 10 == 0:
            print(number, loss.item())


# ---- several ranks


def start_ranks(model: nn.Module, **ddp) -> tuple[DistributedDataParallel, int]:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return DistributedDataParallel(model, **ddp), dist.get_rank()


def busy(seconds: float):
    """Operators, as on a slow core."""
    square, until = torch.ones(256, 256), time.monotonic() + seconds
    while time.monotonic() < until:
        square.exp()


def clean_ddp(profile):
    model, _ = start_ranks(make_model())
    train(profile, model, in_memory(512))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.unused = make_model(), make_model(depth=12)

    def forward(self, x):
        return self.body(x)


def unused_parameters(profile):
    model, _ = start_ranks(nn.Sequential(*[nn.Linear(32, 32) for _ in range(60)]), find_unused_parameters=True)
    data = [(torch.randn(8, 32), torch.randint(0, 10, (8,))) for _ in range(4)]
    train(profile, model, data)


def late_in_turns(profile):
    model, rank = start_ranks(make_model())
    turn = itertools.count()

    def forward(x):
        busy(0.03 if next(turn) % 2 == rank else 0)
        return model(x)

    train(profile, model, in_memory(256), forward=forward, steps=40)


def late_every_fifth(profile):
    model, rank = start_ranks(make_model())
    turn = itertools.count()

    def forward(x):
        busy(0.2 if rank == 1 and next(turn) % 5 == 4 else 0)
        return model(x)

    train(profile, model, in_memory(256), forward=forward, steps=50)


def slow_rank(profile):
    model, rank = start_ranks(make_model())

    def forward(x):
        busy(0.04 * rank)
        return model(x)

    train(profile, model, in_memory(256), forward=forward)


def reduce_each_micro_batch(profile):
    model, _ = start_ranks(make_model(depth=8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = endless(in_memory(32))
    for _ in profile.steps():
        optimizer.zero_grad()
        for _ in range(6):
            x, y = next(batches)
            (F.cross_entropy(model(x), y) / 6).backward()
        optimizer.step()


def object_gathers(profile):
    model, rank = start_ranks(make_model())

    def gather(number):
        for part in range(30):
            found = [None, None]
            dist.all_gather_object(found, {"rank": rank, "part": part, "texts": ["word"] * 2000})

    train(profile, model, in_memory(128), after_step=gather)


def sums_by_hand(profile):
    """Gradients summed one by one after backward: nothing overlaps."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model(depth=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = endless(in_memory(128))
    for _ in profile.steps():
        x, y = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()


def sharded(profile):
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    model = make_model(depth=8, width=WIDTH)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(profile, model, in_memory(32), torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True))


# ---- other trainers


def lightning_trainer(profile, model, loader, steps=STEPS):
    import lightning

    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader)


def lightning_model(sleep_s=0.0, depth=4):
    import lightning

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_model(depth)

        def training_step(self, batch, batch_index):
            if sleep_s:
                time.sleep(sleep_s)
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

    return Task()


def clean_lightning(profile):
    lightning_trainer(profile, lightning_model(), DataLoader(Samples(), batch_size=64))


def lightning_slow_step(profile):
    lightning_trainer(profile, lightning_model(sleep_s=0.04), DataLoader(Samples(), batch_size=64))


def lightning_slow_loader(profile):
    lightning_trainer(profile, lightning_model(), DataLoader(Samples(sleep_s=0.001), batch_size=64))


def hf_trainer(profile, collate=None, steps=STEPS, **arguments):
    import tempfile

    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(n_layer=2, n_head=4, n_embd=128, vocab_size=512, n_positions=64)

    class Texts(Dataset):
        def __len__(self):
            return 4096

        def __getitem__(self, index):
            tokens = torch.randint(0, 512, (64,))
            return {"input_ids": tokens, "labels": tokens}

    with tempfile.TemporaryDirectory() as folder:
        given = {"logging_steps": 10, "save_strategy": "no"} | arguments
        setting = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **given,
        )
        Trainer(GPT2LMHeadModel(config), setting, train_dataset=Texts(), data_collator=collate).train()


def clean_hf(profile):
    hf_trainer(profile)


def hf_slow_collator(profile):
    from transformers import default_data_collator

    def collate(samples):
        time.sleep(0.1)
        return default_data_collator(samples)

    hf_trainer(profile, collate)


def hf_saves_each_step(profile):
    hf_trainer(profile, save_strategy="steps", save_steps=1)


def accelerate_slow_loader(profile):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loader = DataLoader(Samples(sleep_s=0.001), batch_size=64)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = endless(loader)
    for _ in profile.steps():
        x, y = next(batches)
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()


RANKS = {
    "clean_ddp", "unused_parameters", "late_in_turns", "late_every_fifth", "slow_rank", "reduce_each_micro_batch",
    "object_gathers", "sums_by_hand", "sharded",
}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--unmarked", action="store_true")
    parser.add_argument("--stacks", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.name not in RANKS and given.name != "many_threads":
        torch.set_num_threads(1)
    globals()[given.name](Profile(given.trace, given.unmarked, given.stacks))
    if dist.is_initialized():
        dist.destroy_process_group()
