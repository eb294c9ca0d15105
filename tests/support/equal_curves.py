"""Runs of 120 iterations on made-up source code, whose loss curves tests lay upon each other."""

import random
from dataclasses import replace
from pathlib import Path

import torch

from megatron_lite.data.indexed_writer import IndexedWriter
from megatron_lite.train.data_streams import DataStreams
from megatron_lite.train.loop import Progress
from support.launch import VOCABULARY, build_bare, flags, plan_of, quietly, steps
from support.plain_gpt import Curve, Recipe, train_plainly

STEPS = 120
FIRST_STEPS = 10
DOCUMENTS, DOCUMENT_CHARACTERS = 60, 1_000  # several epochs are read
CPU = torch.device("cpu")
# lr about as high as learns steadily (at 4e-3 the least rounding becomes 0.1 nats within 200 steps); clip among the norms that
# occur, 0.6 to 1.5: Adam does not see how low a clip is that every step meets
WORDS = (
    f"--train-iters {STEPS} --micro-batch-size 4 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant "
    "--clip-grad 0.8 --weight-decay 0.1 --seq-length 32 --max-position-embeddings 32"
)
STATEMENTS = """
def {0}({1}, {2}=None):
    \"\"\"{3} of {1} where {2} is given.\"\"\"
    if {2} is None:
        {2} = {4}({1})
    return {2}.{0}({1})

|class {4}({0}):
    def __init__(self, {1}, {2}):
        self.{1} = {1}
        self._{2} = list({2})

    def {3}(self):
        for {1} in self._{2}:
            yield {1}, self.{0}

|# {3} {0} {1} before {4}, which {2} wants
try:
    {0} = {1}.{4}({2}, {5})
except {4}Error as error:
    raise {3}Error("{1} has no {2}") from error

|while {0} < {5}:
    {0} += {1}[{2} - {6}]
    {3}.append(({0}, {4}))

|{0} = {{"{1}": {5}, "{2}": {6}, "{3}": {4}}}

|assert {0}.{1}({2}) == {5}, "{3} {4}"

""".split("|")  # noqa: SIM905
NAMES = (  # noqa: SIM905
    "name value data self_ result index count item key line text path node first last size buffer other kind state "
    "code left right total match parts start end args order"
).split()


def write_text(prefix: Path) -> Path:
    """A .bin/.idx pair of code in the manner of Python, a token per character, the same on every machine."""
    chance = random.Random(1)
    with IndexedWriter(str(prefix), VOCABULARY + 1) as writer:
        for _ in range(DOCUMENTS):
            text = ""
            while len(text) < DOCUMENT_CHARACTERS:
                numbers = chance.randrange(100), chance.randrange(100)
                text += chance.choice(STATEMENTS).format(*chance.choices(NAMES, k=5), *numbers)
            writer.add_document([ord(character) for character in text])
    return prefix


def curve_of(data: Path, folder: Path, *words: str) -> Curve:
    """Of the trainer."""
    quietly(flags(WORDS, *words, data=data), folder)
    return read_curve(folder)


def read_curve(folder: Path) -> Curve:
    """From a run's steps."""
    records = steps(folder)
    return Curve(*([record[name] for record in records] for name in ("loss", "grad_norm", "loss_scale")))


def plain_curve(data: Path, *words: str, steps: int = STEPS, **changes) -> Curve:
    """Of plain PyTorch from the same command line, with `changes` of its Recipe."""
    plan = plan_of(flags(WORDS, *words, data=data))
    o, p = plan.args.optimizer, plan.args.precision
    recipe = Recipe(
        heads=plan.shape.num_attention_heads,
        lr=o.lr,
        clip=o.clip_grad,
        decay=o.weight_decay,
        betas=(o.adam_beta1, o.adam_beta2),
        eps=o.adam_eps,
        micro_batches=plan.micro_batches(0),
        precision=plan.precision,
        first_scale=p.initial_loss_scale,
        growth_interval=int(p.loss_scale_window),
    )
    model = build_bare(plan)
    batches = DataStreams(plan).training(Progress())
    return train_plainly(dict(model.named_parameters()), batches, steps, replace(recipe, **changes))


def apart(one: list[float | None], other: list[float | None]) -> float:
    """Largest distance of what both have; infinite if they do not skip the same steps."""
    pairs = list(zip(one, other))
    if any((a is None) != (b is None) for a, b in pairs):
        return float("inf")
    return max(abs(a - b) for a, b in pairs if a is not None)


def offset(one: Curve, other: Curve) -> float:
    """Between the mean losses of the last half: rounding that adds as often as it takes away is not in it."""
    halves = [[loss for loss in curve.losses[STEPS // 2 :] if loss is not None] for curve in (one, other)]
    means = [sum(half) / len(half) for half in halves]
    return abs(means[0] - means[1])


def norms_apart(one: Curve, other: Curve) -> float:
    """Largest |a / b - 1| of the gradients' norms over the first steps, before rounding has grown."""
    pairs = list(zip(one.norms[:FIRST_STEPS], other.norms))
    return max(abs(a / b - 1) for a, b in pairs)
