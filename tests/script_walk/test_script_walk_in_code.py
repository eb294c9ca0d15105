"""`megatron_lite.fit`: what a function that trains holds of a GPU, a model holds too, and nothing here is changed."""

import pytest
import torch
from torch import Tensor, nn

import megatron_lite
from megatron_lite.errors import UserError


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def compute_loss(output: Tensor, batch: Tensor) -> Tensor:
    return (output - batch).square().mean()


def train() -> None:
    model = make_model().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        batch = torch.randn(32, 64).to("cuda")
        loss = compute_loss(model(batch), batch)
        del batch
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()


def test_a_model_with_its_batch_holds_what_a_function_that_trains_it_holds():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(32, 64)
    loss = compute_loss(model(batch), batch)
    with pytest.raises(UserError) as refused:
        megatron_lite.fit(model, batch, optimizer, loss=compute_loss)
    assert "del loss" in str(refused.value)
    loss.backward()
    optimizer.zero_grad()
    before = [weight.clone() for weight in model.parameters()]
    of_model = megatron_lite.fit(model, batch, optimizer, loss=compute_loss)
    of_function = megatron_lite.fit(train)
    assert of_model.categories == of_function.categories
    assert of_model.reserved_peak_bytes == of_function.reserved_peak_bytes
    assert of_model.batch == of_function.batch == 32
    # as it was: weights, gradients, torch
    assert all(torch.equal(weight, kept) for weight, kept in zip(model.parameters(), before))
    assert {weight.grad for weight in model.parameters()} == {None}
    assert not optimizer.state
    assert not torch.cuda.is_available()
    compute_loss(model(batch), batch).backward()
    optimizer.step()
    # moments that exist are moved, and are no batch
    again = megatron_lite.fit(model, batch, optimizer, loss=compute_loss)
    assert again.categories["moments"] == of_model.categories["moments"]
    assert again.batch == 32


def diverge() -> None:
    raise FloatingPointError("diverged")


def train_on_the_cpu() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.randn(32, 64)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((diverge,), "FloatingPointError: diverged"),
        ((lambda: None,), "stepped twice"),
        ((train_on_the_cpu,), '"cuda"'),
        ((make_model(),), "fit(model, batch, optimizer)"),
        ((make_model(), torch.randn(2, 64), torch.optim.SGD([torch.ones(1)])), "loss="),
    ],
)
def test_what_cannot_be_fitted_is_refused(given, named):
    with pytest.raises(UserError) as refused:
        megatron_lite.fit(*given)
    (line,) = refused.value.lines
    assert line.startswith("megatron_lite.fit: ")
    assert named in line
    assert line.count("megatron_lite.fit: ") == 1
