"""Builds the user's model in place of the GPT: --model FILE.py:FUNCTION or MODULE:FUNCTION.

    def build(shape):
        '''A torch module, with its first weights. shape: a ModelShape, the sizes that the flags give.'''

The module is called as GPT is, with tokens_BT, labels_BT, positions_BT and documents_BT, and returns losses_BT: the
loss of each token in nats, fp32. torch's generator has --seed's state when FUNCTION is called, so that all ranks begin
with the same weights.
"""

import logging
from collections.abc import Callable, Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn

from megatron_lite.config.shape import ModelShape
from megatron_lite.errors import UserError
from megatron_lite.units import count, short_count
from megatron_lite.user_functions import find_function, why_not_callable

logger = logging.getLogger(__name__)
FLAG = "--model"
INPUTS = ("tokens", "labels", "positions", "documents")


class CustomModel(nn.Module):
    """The user's module, whose parameters are custom.NAME, with its losses checked."""

    def __init__(self, custom: nn.Module, spelled: str):
        """Wrap a module. spelled: the value of --model, for messages."""
        super().__init__()
        self.custom = custom
        self.spelled = spelled
        self._is_first = True

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss of each token, losses_BT, fp32 in nats.

        Args:
            tokens_BT: int64, the inputs.
            labels_BT: int64, the token that each position is to predict.
            positions_BT: int64, positions within documents; None: within the sequence.
            documents_BT: int64, the number of each token's document; None: all tokens are of one.

        Raises:
            UserError: The module returns something else.
        """
        if documents_BT is not None:
            documents_BT = documents_BT.to(tokens_BT.device)
        losses_BT: Tensor = self.custom(tokens_BT, labels_BT, positions_BT, documents_BT)
        if not isinstance(losses_BT, Tensor):
            self._refuse(f"returns a {type(losses_BT).__name__}; return the loss of each token")
        if losses_BT.shape != labels_BT.shape:
            sizes = f"{list(losses_BT.shape)}; return the loss of each token, {list(labels_BT.shape)}"
            self._refuse(f"returns losses of the shape {sizes}")
        if losses_BT.dtype != torch.float32:
            self._refuse(f"returns losses in {losses_BT.dtype}; compute them in torch.float32, of logits.float()")
        if self._is_first and torch.is_grad_enabled():
            self._is_first = False
            name = find_unused(losses_BT, dict(self.custom.named_parameters()))
            if name is not None:
                self._refuse(
                    f"does not use its parameter {name} for the losses; drop it, or freeze it: requires_grad_(False)"
                )
        return losses_BT

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(f"{FLAG} {self.spelled}: its module {what}")


def find_unused(loss: Tensor, named: Mapping[str, Tensor]) -> str | None:
    """The first parameter that requires a gradient and gets none from the loss, by autograd's graph.

    Args:
        loss: The loss, with its graph.
        named: Parameters by name.

    Returns:
        Its name; None if there is none, or the graph does not show it.
    """
    nodes = [loss.grad_fn]
    seen = set()
    reached = set()  # identities of the parameters that the graph leads to
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":  # reentrant: what is behind it shows in backward only
            return None
        seen.add(node)
        variable = getattr(node, "variable", None)
        reached.add(id(variable))
        nodes += [after for after, _ in node.next_functions]
    for name, parameter in named.items():
        if parameter.requires_grad and id(parameter) not in reached:
            return name
    return None


def find_custom_model(spelled: str) -> Callable[..., nn.Module]:
    """The function that --model names. UserError if there is none that can be called."""
    return find_function(FLAG, spelled, ("shape",))


def build_custom_model(
    spelled: str,
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
) -> CustomModel:
    """Call the function that --model names, and wrap the module that it returns.

    Args:
        spelled: The value of --model.
        shape: The sizes that the flags give, with which the function is called.
        dtype: The precision of parameters.
        device: Where the module is put.

    Raises:
        UserError: It is no module that this trainer can call, train and save.
    """
    custom = find_custom_model(spelled)(shape)

    def refuse(what: str) -> NoReturn:
        raise UserError(f"{FLAG} {spelled}: {what}")

    if not isinstance(custom, nn.Module):
        refuse(f"returned a {type(custom).__name__}; return a torch.nn.Module")
    why = why_not_callable(custom.forward, INPUTS)
    if why:
        refuse(f"its module {why}")
    named = dict(custom.named_parameters())
    if not any(parameter.requires_grad for parameter in named.values()):
        refuse("its module has no parameter that requires a gradient; there is nothing to train")
    for name, parameter in named.items():
        if not parameter.ndim:
            refuse(f"its parameter {name} has no dimension; give it the shape [1]")
    number = sum(parameter.numel() for parameter in named.values())
    logger.info(f"  model: {spelled} | number of parameters: {count(number)} ({short_count(number)})")
    saved = custom.state_dict(keep_vars=True)
    for name, _ in custom.named_buffers():
        if name in saved:
            refuse(
                f"its buffer {name} would be in no checkpoint; register it with persistent=False, or make it a "
                "parameter"
            )
    return CustomModel(custom, spelled).to(device=device, dtype=dtype)
