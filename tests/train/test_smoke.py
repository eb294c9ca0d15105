"""Each smoke test passes on a sound training, and fails on a defect that is planted in it."""

import itertools
import math
import re
import runpy
from collections import deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.launch import build_bare, flags, plan_of
from support.paths import REPO
from support.wording import wording
from torch import nn
from torch.profiler import schedule

from megatron_lite import smoke

VOCABULARY = 32


class Training:
    """A small language model and all around it, as sound as it gets."""

    def __init__(self, lr=1e-2):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, VOCABULARY)
        )
        self.batch = torch.arange(24).view(2, 12) * 5 % VOCABULARY
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.logged = []

    def loss(self):
        logits = self.model(self.batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), self.batch[:, 1:].flatten())

    def step(self):
        loss = self.loss()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Keep threads of small operations from waiting for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def training():
    return Training()


def said(check, *arguments, **options) -> str:
    """What a check that has to fail says, without its likely cause."""
    with pytest.raises(AssertionError) as caught:
        check(*arguments, **options)
    text = str(caught.value)
    assert re.fullmatch(r"[^;\n]+; expected [^\n]+\. Likely cause: [^\n]+\.", text)
    return text.partition(". Likely")[0]


def test_the_first_loss(training):
    smoke.check_first_loss(training.loss(), VOCABULARY)
    total = said(smoke.check_first_loss, 22 * training.loss(), VOCABULARY)
    assert re.fullmatch(r"the first loss is 7\d\.\d+; expected ln\(32\) = 3\.466 within 10%", total)
    assert said(smoke.check_first_loss, training.loss() / math.log(2), VOCABULARY).startswith(
        wording("train/first-loss-is", 5)
    )
    assert said(smoke.check_first_loss, 0.3, VOCABULARY).startswith(wording("train/first-loss-is-2", 0.3))
    assert said(smoke.check_first_loss, math.nan, VOCABULARY).startswith(wording("train/first-loss-is-nan"))
    smoke.check_first_loss(0.3, VOCABULARY, tolerance=0.95)


def test_gradients(training):
    model = training.model
    model[1].bias.grad = torch.ones(16)
    smoke.check_gradients(model, training.loss)
    assert torch.equal(model[1].bias.grad, torch.ones(16)) and model[0].weight.grad is None
    assert said(smoke.check_gradients, model, lambda: training.loss().detach()).startswith(
        wording("train/loss-has-no-graph")
    )
    model.unused = nn.Linear(2, 2)
    unused = lambda: F.cross_entropy(model[3](model[2](model[1](model[0](training.batch)))).mT, training.batch)
    assert said(smoke.check_gradients, model, unused).startswith(wording("train/no-gradient-for-unused"))
    del model.unused
    with torch.no_grad():
        model[3].weight.zero_()
    zeros = "a gradient of zeros for 0.weight, 1.weight, 1.bias; expected some that are not"
    assert said(smoke.check_gradients, model, training.loss) == zeros
    infinite = lambda: training.loss() + model[3].bias.sub(model[3].bias.detach()).abs().sqrt().sum()
    assert said(smoke.check_gradients, model, infinite).startswith(wording("train/nan-or-inf-in"))
    assert said(smoke.check_gradients, model.requires_grad_(False), training.loss).startswith(
        wording("train/no-parameter-requires")
    )


def test_many_names_are_cut(training):
    text = said(smoke.check_weights_move, training.model, lambda: None)
    assert text.startswith(wording("train/one-step-left-weight", 1))


def test_weights_move(training):
    training.model[1].weight.requires_grad_(False)
    smoke.check_weights_move(training.model, training.step)
    training.optimizer = torch.optim.AdamW(training.model[3].parameters(), lr=1e-2)
    assert said(smoke.check_weights_move, training.model, training.step).startswith(
        wording("train/one-step-left-weight-bias")
    )
    still = Training(lr=0.0)
    assert said(smoke.check_weights_move, still.model, still.step).startswith(wording("train/one-step-left-weight-2"))
    whole = Training()

    def overwrite():
        whole.step()
        with torch.no_grad():
            whole.model[1].weight.add_(1)

    whole.model[1].weight.requires_grad_(False)
    assert said(smoke.check_weights_move, whole.model, overwrite).startswith(wording("train/one-step-changed-weight"))
    wild = Training(lr=math.inf)
    assert said(smoke.check_weights_move, wild.model, wild.step).startswith("NaN or Inf in 0.weight")


def test_overfitting(training):
    assert 2 < smoke.check_overfits(training.step, steps=200, target=0.1) < 200
    shuffled = Training()

    def other_labels():
        shuffled.batch = torch.randint(VOCABULARY, (2, 12))
        return shuffled.step()

    assert re.match(
        r"the loss of one batch fell from 3\.\d+ to \d\.\d+ in 50", said(smoke.check_overfits, other_labels, 50)
    )
    for number, values in ((1, [math.nan]), (2, [3.0, math.inf])):
        text = f"the loss of step {number} is {values[-1]}; expected a finite one"
        assert said(smoke.check_overfits, iter(values).__next__) == text


def test_the_same_loss(training):
    dropped = lambda: F.dropout(training.loss(), 0.5)
    smoke.check_same_loss(dropped, dropped)
    state = torch.get_rng_state()
    smoke.check_same_loss(training.loss, torch.compile(training.loss, backend="aot_eager"))
    assert torch.equal(torch.get_rng_state(), state)
    larger = said(smoke.check_same_loss, training.loss, lambda: training.loss() * 1.001)
    assert re.fullmatch(
        r"the largest difference is 0\.003\d+, at values up to 3\.\d+; expected at most 0\.0001 of .*", larger
    )
    other = said(smoke.check_same_loss, training.loss, lambda: training.model(training.batch))
    assert other == wording("train/shapes-and-expected-same", 2, 12, 32)


def test_batches_repeat():
    def loader(seed):
        generator, buffer = torch.Generator().manual_seed(seed), torch.empty(4)
        while True:  # into the same tensor again and again, as fast loaders do
            yield {"tokens": buffer.uniform_(generator=generator), "more": [np.array([3, math.nan]), "text", 5]}

    smoke.check_batches_repeat(loader)
    shuffled = lambda seed: torch.utils.data.DataLoader(range(50), batch_size=5, shuffle=True)
    first = "batch 1 differs when seed 7 is given again; expected the same batch"
    assert said(smoke.check_batches_repeat, shuffled, seed=7) == first
    count = itertools.count()
    second = lambda seed: ([np.zeros(2)], [np.full(2, next(count))])
    assert said(smoke.check_batches_repeat, second).startswith("batch 2 differs")
    other_lengths = lambda seed: [np.zeros(next(count))]
    assert said(smoke.check_batches_repeat, other_lengths).startswith("batch 1 differs")
    other_types = lambda seed: [torch.zeros(2, dtype=(torch.float32, torch.int64)[next(count) % 2])]
    assert said(smoke.check_batches_repeat, other_types).startswith("batch 1 differs")
    used_up = iter(range(5))
    assert said(smoke.check_batches_repeat, lambda seed: used_up).startswith(
        wording("train/batches-then-expected-as", 3, 2)
    )
    assert said(smoke.check_batches_repeat, lambda seed: ()).startswith(wording("train/loader-gave-no-batch"))


class Clock:
    """Seconds that pass where a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def pass_by(self, seconds: float):
        self.now += seconds


def test_waiting_for_data():
    clock = Clock()

    def loader(seconds):
        clock.pass_by(100)  # starts workers
        while True:
            clock.pass_by(seconds)
            yield 1

    step = lambda batch: clock.pass_by(9)
    assert smoke.check_data_wait(loader(1), step, clock=clock) == pytest.approx(0.1)
    text = said(smoke.check_data_wait, loader(3), step, clock=clock)
    assert text == wording("train/of-time-passes-waiting", 25.0, 10)
    assert said(smoke.check_data_wait, [1], step, steps=2, clock=clock).startswith(
        wording("train/loader-has-no-second")
    )


def test_measuring_a_step():
    clock, calls = Clock(), []

    def step():
        clock.pass_by(50 if len(calls) < 2 else 2)
        calls.append(clock.now)

    assert smoke.measure_step_seconds(step, warmup=2, repeat=4, clock=clock) == 2 and len(calls) == 6
    assert said(smoke.measure_step_seconds, list, clock=clock).startswith("20 steps took 0 s")


def test_detached(training):
    smoke.check_detached([{"loss": training.loss().detach(), "step": 3}, training.loss().item(), None])
    kept = {"losses": [1.0, (training.loss(),)], "last": training.loss()}
    text = "what is logged holds a graph: ['last'], ['losses'][1][0]; expected detached tensors or numbers"
    assert said(smoke.check_detached, kept) == text
    assert said(smoke.check_detached, training.loss()).startswith(wording("train/what-is-logged-holds"))


def test_detached_in_attributes(training):
    for sound in (training, training.model, training.optimizer, training.step):
        smoke.check_detached(sound)
    training.model.last = {"loss": training.loss()}
    training.model[1].register_buffer("shift", training.model[1].bias * 2, persistent=False)
    training.optimizer.history = deque([training.loss().detach(), training.loss()], maxlen=2)
    training.model[0].weight.seen = training.loss()
    held = r"what is logged holds a graph: (.*); expected detached tensors or numbers"
    [found] = re.findall(held, said(smoke.check_detached, training))
    assert found.split(", ") == [
        "model.last['loss']",
        "optimizer.history[1]",
        "model.1.shift",
        "model.0.weight.seen",
    ]
    [found] = re.findall(held, said(smoke.check_detached, training.step))
    assert "Training.optimizer.history[1]" in found


class WithSlots:
    """Keeps a loss in a slot; one is not assigned."""

    __slots__ = ("empty", "loss")


def test_graphs_are_released(training):
    kept = []
    known = training.loss()
    smoke.check_graphs_released(training.step)
    smoke.check_graphs_released(lambda: kept.append(training.step()))
    smoke.check_graphs_released(lambda: (training.step(), training.loss())[1])
    average = {"loss": torch.zeros(())}

    def follow():
        average["loss"] = average["loss"] * 0.9 + training.step() * 0.1

    smoke.check_graphs_released(follow)
    holder = WithSlots()

    def keep():
        holder.loss = training.loss()

    where = r"steps leave \d+ nodes of autograd's graph, held in (.*); expected none once a step is over"
    assert re.findall(where, said(smoke.check_graphs_released, keep)) == ["holder.loss"]
    del holder.loss
    smoke.check_graphs_released(training.step)

    def remember(step, loss, history=[]):  # noqa: B006
        history[:] = [step, loss]

    last = lambda: remember(1, training.loss())
    assert re.findall(where, said(smoke.check_graphs_released, last)) == ["remember's default[1]"]
    remember(1, None)
    hidden = lambda: setattr(smoke.torch, "unseen_loss", training.loss())
    try:
        text = said(smoke.check_graphs_released, hidden)
    finally:
        del smoke.torch.unseen_loss
    assert wording("train/held-where-step-does") in text
    assert known.grad_fn is not None


def test_steady_memory(training):
    smoke.check_memory_steady(training.step)
    kept = []
    smoke.check_memory_steady(lambda: kept.append(training.loss().item()))
    copies = said(smoke.check_memory_steady, lambda: kept.append(training.loss().detach()))
    assert re.fullmatch(
        r"bytes of tensors grow in each of 15 steps, from [\d,]+ to [\d,]+, held in kept \(60 more\); expected as .*",
        copies,
    )
    del kept[:]
    total = torch.zeros(())

    def add_up():
        nonlocal total
        loss = training.loss()
        loss.backward()
        total += loss

    text = said(smoke.check_memory_steady, add_up)
    assert text.startswith(wording("train/nodes-of-autograd-graph", 15)) and " total (" in text
    seen = []
    training.model[2].register_forward_hook(lambda module, inputs, output: seen.append(output))
    text = said(smoke.check_memory_steady, training.step, steps=2)
    assert text.startswith(wording("train/bytes-of-tensors-grow", 2))
    # torch numbers hooks in a process
    assert re.search(r"Training\.model\.2\._forward_hooks\[\d+\]\.seen \(", text), text


@pytest.mark.parametrize(("every", "shift"), [(2, 1), (3, 0), (5, 0), (5, 1)])
def test_memory_that_grows_in_every_nth_step(training, every, shift):
    count = itertools.count(shift)

    def step():
        if next(count) % every == 0:
            training.logged.append(torch.zeros(1000))

    text = said(smoke.check_memory_steady, step)
    grown = f"{(15 + (3 + shift) % every) // every * 4000:,}"
    often = wording("train/bytes-grow-in-every", {2: "2nd", 3: "3rd"}.get(every, f"{every}th"), 15)
    assert text.startswith(often) and f" training.logged ({grown} more)" in text


def test_graphs_that_grow_in_every_nth_step(training):
    count = itertools.count()

    def step():
        if next(count) % 5 == 0:
            loss = training.loss()
            loss.backward()
            training.optimizer.total = getattr(training.optimizer, "total", 0) + loss

    text = said(smoke.check_memory_steady, step)
    assert wording("train/nodes-grow-in-every", "5th", 15) in text and "training.optimizer.total (" in text


def test_memory_that_grows_at_random(training):
    count = itertools.count()

    def step():
        if next(count) % 7 in (0, 1, 3, 4, 6):
            training.logged.append(torch.zeros(1000))

    text = said(smoke.check_memory_steady, step)
    assert text.startswith(wording("train/bytes-grow-in-some", 11, 15))


def test_buffers_that_fill_and_are_emptied_are_steady(training):
    ring = deque(maxlen=8)
    smoke.check_memory_steady(lambda: ring.append(training.loss().detach()))
    batch = []

    def flush():
        batch.append(torch.zeros(1000))
        if len(batch) == 10:
            batch.clear()

    smoke.check_memory_steady(flush)
    average = {}

    def follow():
        for name, parameter in training.model.named_parameters():
            average[name] = average.get(name, 0) * 0.9 + parameter.detach() * 0.1

    smoke.check_memory_steady(follow)
    smoke.check_graphs_released(follow)
    count = itertools.count()
    tables = {}

    def step():
        number = next(count)
        if number in (5, 9):  # longer sequences
            tables[number] = torch.zeros(1000)
        training.cycle = {"loss": torch.zeros(3)}
        training.cycle["itself"] = training.cycle

    smoke.check_memory_steady(step)


def test_peak_memory(training):
    training.step()
    idle = smoke.check_peak_memory(lambda: None, 2**40)
    peak = smoke.check_peak_memory(lambda: torch.zeros(2**20) + torch.zeros(2**20), 2**40)
    assert idle + 3 * 2**22 <= peak < idle + 3 * 2**22 + 2**16  # two addends and their sum
    one_by_one = smoke.check_peak_memory(lambda: [torch.zeros(2**20).sum() for _ in range(5)], 2**40)
    assert idle + 2**22 <= one_by_one < idle + 2**22 + 2**16
    step = smoke.check_peak_memory(training.step, 2**40)
    assert step >= idle + sum(p.nbytes for p in training.model.parameters())  # its gradients
    text = said(smoke.check_peak_memory, training.step, idle)
    assert text.startswith(wording("train/tensors-peak-at")) and text.endswith(
        wording("train/bytes-expected-at-most", f"{idle:,}")
    )


def test_on_a_gpu_its_allocator_counts(monkeypatch):
    """The calls that are made there; no GPU is needed to see them."""
    calls, gpu = [], torch.accelerator
    held = itertools.count(1000, 512)
    monkeypatch.setattr(gpu, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(gpu, "reset_peak_memory_stats", lambda: calls.append("reset"))
    monkeypatch.setattr(gpu, "max_memory_allocated", lambda: calls.append("peak") or 5000)
    monkeypatch.setattr(gpu, "memory_allocated", lambda: next(held))
    assert smoke.check_peak_memory(lambda: calls.append("step"), 5000) == 5000
    assert calls == ["reset", "step", "synchronize", "peak"]
    text = said(smoke.check_memory_steady, lambda: None, steps=2, warmup=0)
    assert text.startswith(wording("train/bytes-of-tensors-grow-in", 2, "1,000", "2,024"))
    calls.clear()
    smoke.measure_step_seconds(lambda: calls.append("step"), warmup=1, repeat=2)
    assert calls == ["step", "synchronize", "step", "step", "synchronize"]


def test_the_profilers_window():
    smoke.check_profiler_window(schedule(wait=5, warmup=1, active=3, repeat=1), 100)
    smoke.check_profiler_window(schedule(wait=0, warmup=1, active=5, repeat=2), 100)
    cases = {
        "none of 5 steps is recorded; expected 1 to 10": schedule(wait=5, warmup=1, active=3),
        "the first step is recorded; expected a later one": schedule(wait=0, warmup=0, active=3, repeat=1),
        "step 2 is recorded without a warm-up before it; expected warmup=1 at least": schedule(
            wait=2, warmup=0, active=3
        ),
    }
    for text, planned in cases.items():
        assert said(smoke.check_profiler_window, planned, 5) == text
    again = said(smoke.check_profiler_window, schedule(wait=1, warmup=1, active=8), 100)
    assert again == wording("train/of-steps-are-recorded", 80, 100, 10)
    without = torch.profiler.profile().schedule
    assert said(smoke.check_profiler_window, without, 100).startswith(
        wording("train/of-steps-are-recorded-2", 100, 100)
    )


def test_our_own_gpt_is_sound():
    plan = plan_of(flags())
    model = build_bare(plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    raw_BT1 = torch.arange(34).view(2, 17) % 128

    def step():
        loss = model(raw_BT1[:, :-1], raw_BT1[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compute_loss = lambda: model(raw_BT1[:, :-1], raw_BT1[:, 1:]).mean()
    smoke.check_first_loss(compute_loss(), 128)
    smoke.check_gradients(model, compute_loss)
    smoke.check_weights_move(model, step)
    smoke.check_memory_steady(step)
    smoke.check_overfits(step)


def test_the_pages_example_passes(tmp_path):
    page = (REPO / "docs" / "smoke.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "test_page.py").write_text(code)
    names = runpy.run_path(str(tmp_path / "test_page.py"))
    tests = [function for name, function in names.items() if name.startswith("test_")]
    assert len(tests) == 7
    for function in tests:
        function()
    checks = {name for name in vars(smoke) if name.startswith(("check_", "measure_"))}
    assert {name for name in checks if f"| `{name}(" in page} == checks
