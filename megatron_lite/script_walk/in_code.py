"""Fits what a program has at hand into a GPU that is not there: a function that trains, or a model with a batch.

A walk changes torch for the rest of its process, and takes the values of the weights away. So it happens in a copy of
this process (a fork), which ends with it; this process and its objects stay as they are.
"""

import multiprocessing
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from megatron_lite.errors import UserError
from megatron_lite.formats.fit_record import FitRecord, FitRequest
from megatron_lite.planner.find_processors import find_processor
from megatron_lite.planner.script_walks import make_request
from megatron_lite.script_walk.this_process import FittedScript

DEVICE = "cuda"
MAX_CALLS = 100  # of a function that trains, in which its optimizers must have stepped twice
LOSS_OF_OUTPUT = "loss"  # where models of transformers return it
MOVE = "to"  # the method of batches of transformers that moves them
MakeLoss = Callable[[object, object], Tensor]


def fit(
    step: Callable[[], object] | nn.Module,
    batch: object = None,
    optimizer: Optimizer | None = None,
    *,
    loss: MakeLoss | None = None,
    gpu: str = "H100",
) -> FitRecord:
    """Find out what a training holds of a GPU, on a machine without one.

        found = megatron_lite.fit(train)                    # a function that trains on "cuda"
        found = megatron_lite.fit(model, batch, optimizer)  # on the CPU as they are: they are moved for the walk
        print(found.reserved_peak_bytes, found.where)

    Nothing is trained, and nothing of this process is changed: the walk happens in a fork of it.

    Args:
        step: A function without arguments. torch finds the GPU in it, and it makes its model there. It is called until
            each of its optimizers has stepped twice, within itself or in calls that follow each other. Or a model, on
            the CPU.
        batch: What the model is called with: a mapping of its arguments by name, a tuple of them, or the only one.
        optimizer: That of the model.
        loss: Makes the loss of the model's output and the batch; None: the output's `loss`, or the output itself where
            it is one number.
        gpu: The GPU's name, as in `megatron-lite fit --gpu`.

    Returns:
        Memory at the peak, where it is, and what holds it.

    Raises:
        UserError: The GPU is not known, or it cannot be walked; the message names line and remedy.
    """
    train = _train_model(step, batch, optimizer, loss) if isinstance(step, nn.Module) else step
    processor = find_processor(gpu)
    with tempfile.TemporaryDirectory() as name:
        answer = Path(name) / "answer.json"
        request = make_request(processor, str(answer))
        # not spawned: the copy has all objects of this process
        process = multiprocessing.get_context("fork").Process(target=_walk_copy, args=(request, train))
        process.start()
        try:
            process.join()
        finally:
            process.kill()
        if not answer.exists():
            raise UserError(f"megatron_lite.fit: the walk ended without an answer (exit code {process.exitcode}).")
        record = msgspec.json.decode(answer.read_bytes(), type=FitRecord)
    if record.failure:
        raise UserError(f"megatron_lite.fit: {record.failure}")
    return record


def _walk_copy(request: FitRequest, train: Callable[[], object]) -> NoReturn:
    """Walk in this process, which is a copy and ends here.

    Args:
        request: What is to be found out.
        train: Trains on the GPU.
    """
    # threads of the process that was copied are not here
    torch.set_num_threads(1)
    script = FittedScript(request)
    script.start()
    try:
        for _ in range(MAX_CALLS):
            train()
    except Exception as error:  # noqa: BLE001 - whatever went wrong is the answer
        script.fail(error)
    script.end_early()


def _train_model(
    model: nn.Module, batch: object, optimizer: Optimizer | None, make_loss: MakeLoss | None
) -> Callable[[], object]:
    """Make the function that trains a model: at first it is moved to the GPU.

    Args:
        model: On the CPU.
        batch: As for `fit`, like the rest.
        optimizer: Its optimizer.
        make_loss: Makes the loss.

    Raises:
        UserError: There is no optimizer.
    """
    if optimizer is None:
        raise UserError("megatron_lite.fit: a model needs its batch and optimizer; give fit(model, batch, optimizer).")
    moved: list[nn.Module] = []

    def compute_loss() -> Tensor:
        given = _move_batch(batch)
        output = _call(model, given)
        return find_loss(output) if make_loss is None else make_loss(output, given)

    def train() -> None:
        if not moved:
            moved.append(model)
            move_model(model, optimizer)
        compute_loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def move_model(model: nn.Module, optimizer: Optimizer) -> None:
    """Move a model to the GPU that is not there, with the state of its optimizer.

    Args:
        model: On the CPU, with data.
        optimizer: Its optimizer; it keeps the same weights.

    Raises:
        UserError: Something holds on to the weights.
    """
    # gradients belong to graphs and hold on to weights; the walk makes them anew
    model.zero_grad(set_to_none=True)
    for name, weight in model.named_parameters():
        try:
            torch.utils.swap_tensors(weight, nn.Parameter(weight.detach(), weight.requires_grad))
        except RuntimeError as error:
            remedy = "delete the losses and outputs that were computed with it (del loss), and fit again"
            raise UserError(f"the weight {name} cannot be moved ({error}); {remedy}.") from None
    model.to(DEVICE)
    optimizer.load_state_dict(optimizer.state_dict())


def _move_batch(batch: object) -> object:
    """Move a batch to the GPU: a tensor, a collection of tensors, or what can move itself."""
    if not isinstance(batch, Tensor) and hasattr(batch, MOVE):
        move: Callable[[str], object] = getattr(batch, MOVE)
        return move(DEVICE)
    moved: object = tree_map_only(Tensor, lambda tensor: tensor.to(DEVICE), batch)
    return moved


def _call(model: nn.Module, batch: object) -> object:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def find_loss(output: object) -> Tensor:
    """Find the loss in what a model returns.

    Args:
        output: Has a `loss`, as models of transformers return it, or is the loss.

    Raises:
        UserError: Neither is so.
    """
    loss = output.get(LOSS_OF_OUTPUT) if isinstance(output, Mapping) else getattr(output, LOSS_OF_OUTPUT, output)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    raise UserError("the model returns no loss; give loss=lambda output, batch: ...")
