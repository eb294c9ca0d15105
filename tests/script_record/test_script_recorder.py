"""Steps of a script are recorded as they are: all that is updated, and what is not."""

import os

import msgspec
import pytest
import torch
from torch import nn

from megatron_lite.formats.prove_record import ProveRecord, ProveRequest
from megatron_lite.script_record.this_process import ProvedScript


@pytest.fixture
def record(tmp_path):
    """Records a script, a function, in a process of its own."""

    def start(script):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        process = os.fork()
        if not process:
            try:
                proved = ProvedScript(ProveRequest(folder=str(folder)))
                proved.start()
                script()
                proved._end_early()
            finally:
                os._exit(0)
        os.waitpid(process, 0)
        return msgspec.json.decode((folder / "rank0.json").read_bytes(), type=ProveRecord)

    return start


def train(model, parameters, loss, is_updated=True, clears_late=False):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(3):
        if not clears_late:
            optimizer.zero_grad()
        result = loss(model(torch.ones(2, 3) * (step + 1)))
        if clears_late:
            optimizer.zero_grad()
        result.backward()
        if is_updated:
            optimizer.step()


def list_names(parts):
    return [part.name for part in parts if part.key]


def test_modules_beside_a_model_are_recorded(record):
    """Both have names of their own, so that neither gets a prefix."""
    scale = nn.Sequential()
    scale.register_parameter("scale", nn.Parameter(torch.ones(4)))

    def script():
        model = nn.Linear(3, 4)
        train(model, [*model.parameters(), *scale.parameters()], lambda output: (scale(output) * scale.scale).sum())

    found = record(script)
    assert set(list_names(found.weights)) == {"weight", "bias", "scale"}
    assert set(list_names(found.steps[0].gradients)) == {"weight", "bias", "scale"}


def test_parameters_that_no_model_holds_are_recorded_by_their_place(record):
    def script():
        model = nn.Linear(3, 4)
        temperature = nn.Parameter(torch.ones(()))
        train(model, [*model.parameters(), temperature], lambda output: (output * temperature).sum())

    found = record(script)
    assert set(list_names(found.weights)) == {"weight", "bias", "optimizer.0.2"}
    assert "optimizer.0.2" in list_names(found.steps[0].weights)
    assert all("optimizer.0.2" in list_names(step.gradients) for step in found.steps)


def test_copies_that_an_optimizer_updates_are_no_parameters(record):
    def script():
        model = nn.Linear(3, 4)
        copies = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
        train(model, copies, torch.sum)

    found = record(script)
    assert set(list_names(found.weights)) == set(list_names(found.steps[0].gradients)) == {"weight", "bias"}


@pytest.mark.parametrize("clears_late", [True, False])
def test_steps_without_an_update_are_recorded(record, clears_late):
    """As on a rank that never steps, which would go on when its peers have gone."""

    def script():
        model = nn.Linear(3, 4)
        train(model, model.parameters(), torch.sum, is_updated=False, clears_late=clears_late)

    found = record(script)
    assert not found.failure
    first, second = found.steps[:2]
    assert set(list_names(first.gradients)) == set(list_names(first.weights)) == {"weight", "bias"}
    assert set(list_names(second.gradients)) == {"weight", "bias"}
    assert len(first.micro_batches) == len(second.micro_batches) == 1
    assert {output.micro_batch for output in found.outputs} == {0}
    assert found.notes


def test_gradients_that_are_cleared_between_two_optimizers_end_no_step(record):
    def script():
        first, second = nn.Linear(3, 3), nn.Linear(3, 4)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
        for _ in range(3):
            output = second(first(torch.ones(2, 3)))
            output.sum().backward(retain_graph=True)
            optimizers[1].zero_grad()
            output.square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    found = record(script)
    assert not found.notes
    assert len(found.steps) == 2


@pytest.mark.parametrize("is_named", [True, False])
def test_gradients_of_a_closure_are_those_that_it_computes(record, is_named):
    """Lightning computes the last micro-batch of a step within the optimizer's step."""

    def script():
        model = nn.Linear(3, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def compute(inputs):
            loss = model(inputs).sum()
            loss.backward()
            return loss

        for _ in range(3):
            compute(torch.ones(2, 3))
            given = {"closure": lambda: compute(torch.ones(2, 3))}
            optimizer.step(**given) if is_named else optimizer.step(*given.values())
            optimizer.zero_grad()

    found = record(script)
    assert [len(step.micro_batches) for step in found.steps] == [2, 2]
    assert [step.kept_norm for step in found.steps] == pytest.approx([4 * 12**0.5] * 2)
