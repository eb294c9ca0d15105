"""The part of a step that concerns routers of experts: it scales their losses, balances them by biases, and takes their
figures."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config.plan import Plan
from megatron_lite.config.shape import ModelShape
from megatron_lite.formats.step_records import RoutingRecord
from megatron_lite.model.experts import LOSS_NAMES, Z_LOSS
from megatron_lite.parallel.replica import Replica


@dataclass(frozen=True)
class LayerLosses:
    """Balancing losses of one step."""

    means: dict[str, float]  # by Megatron-LM's names, over layers
    layers: dict[str, list[float]]  # of each layer with experts


class RoutingRow:
    """How the figures of all routers of a model lie in one row of numbers, which ranks add up.

    First the losses of each layer, one name after the other, then the assignments of each expert, layer by layer, then
    the dropped assignments of each layer.
    """

    def __init__(self, plan: Plan):
        e = plan.shape.experts
        self.layers: list[int] = []
        self.names: list[str] = []
        self.experts = 0
        self._data_ranks = plan.layout.data
        self._expert_ranks = plan.layout.expert
        if e is None:
            return
        self.experts = e.number
        # behind those of the decoder, layers of multi-token prediction
        numbers = range(plan.shape.num_layers + plan.shape.mtp_num_layers)
        self.layers = [layer for layer in numbers if plan.shape.has_experts(layer)]
        kinds = [kind for kind, _ in e.balancing]
        if e.z_loss_coeff is not None:
            kinds.insert(0, Z_LOSS)
        self.names = [LOSS_NAMES[kind] for kind in kinds]

    def read_losses(self, numbers: Sequence[float]) -> LayerLosses:
        """The losses of a step, whose numbers were summed over all ranks."""
        layers = {}
        for place, name in enumerate(self.names):
            row = numbers[place * len(self.layers) : (place + 1) * len(self.layers)]
            layers[name] = [number / self._data_ranks for number in row]
        means = {name: sum(row) / len(row) for name, row in layers.items()}
        return LayerLosses(means, layers)

    def read_record(self, numbers: Sequence[float]) -> RoutingRecord | None:
        """The figures of a step for steps.jsonl; None of a dense model. numbers: summed over all ranks."""
        if not self.layers or not numbers:
            return None
        start = len(self.names) * len(self.layers)
        tokens = [0] * self.experts
        busiest = []
        of_ranks = []
        each = self.experts // self._expert_ranks
        for place in range(len(self.layers)):
            row = numbers[start + place * self.experts : start + (place + 1) * self.experts]
            tokens = [before + round(one) for before, one in zip(tokens, row)]
            busiest.append(max(row) * self.experts / max(sum(row), 1))
            loads = [sum(row[first : first + each]) for first in range(0, self.experts, each)]
            of_ranks.append(max(loads) * self._expert_ranks / max(sum(row), 1))
        dropped = numbers[start + len(self.layers) * self.experts :]
        return RoutingRecord(
            expert_tokens=tokens,
            busiest=busiest,
            busiest_ranks=sum(of_ranks) / len(of_ranks),
            dropped=round(sum(dropped)),
            losses=self.read_losses(numbers).means,
        )


def number_layer(name: str, shape: ModelShape) -> int:
    """Number the layer of a module, from 0 over the decoder and the layers of multi-token prediction.

    Args:
        name: Name of the module, such as "decoder.layers.3.mlp", or "mtp.layers.0.transformer_layer.mlp".
        shape: The model's.
    """
    block, _, number, *_ = name.split(".")
    return int(number) + (shape.num_layers if block == "mtp" else 0)


class RoutingStep:
    """The part of a training step that concerns routers."""

    def __init__(self, plan: Plan, replica: Replica):
        self._plan = plan
        self._row = RoutingRow(plan)
        # (place among all layers with experts, state of its router) of this rank's
        self._states = [
            (self._row.layers.index(number_layer(name, plan.shape)), mixture.router.state)
            for name, mixture in replica.list_mixtures()
        ]
        self._group = replica.stage_group
        self._micro_batches = 1

    def begin(self, loss_scale: Tensor, micro_batches: int) -> None:
        """Begin a step; called before its first forward.

        Args:
            loss_scale: Loss scale of the optimizer.
            micro_batches: Micro-batches of the step.
        """
        self._micro_batches = micro_batches
        per_token = self._plan.args.training.calculate_per_token_loss
        # as the main loss is scaled: its mean over micro-batches is averaged over data and context parallel ranks, and
        # each context parallel rank has a part of a balancing loss
        factor = 1.0 if per_token else self._plan.layout.context / micro_batches
        for _, state in self._states:
            state.prepare(loss_scale.device)
            state.begin_step()
            state.per_token = per_token
            state.loss_scale = loss_scale * factor

    @torch.no_grad()
    def end(self) -> Tensor | None:
        """End a step; called after its update: move the biases that balance experts. Collective where there are biases.

        Returns:
            This rank's figures in the order of RoutingRow, fp32 on the device; None of a dense model.
        """
        row = self._row
        if not row.layers or not self._states:
            return None
        tokens_LE = torch.stack([state.tokens_E for _, state in self._states if state.tokens_E is not None])
        if any(state.bias_E is not None for _, state in self._states):
            everyones_LE = tokens_LE.clone()
            if self._group is not None:
                dist.all_reduce(everyones_LE, group=self._group)
            rate = self._plan.args.experts.moe_router_bias_update_rate
            for (_, state), tokens_E in zip(self._states, everyones_LE):
                state.balance(tokens_E, rate)
        losses = tokens_LE.new_zeros(len(row.names), len(row.layers))
        tokens = tokens_LE.new_zeros(len(row.layers), row.experts)
        dropped = tokens_LE.new_zeros(len(row.layers))
        for (place, state), tokens_E in zip(self._states, tokens_LE):
            tokens[place] = tokens_E
            dropped[place] = 0 if state.dropped is None else state.dropped
            for line, name in enumerate(row.names):
                if name in state.losses:
                    losses[line, place] = state.losses[name] / self._micro_batches
        return torch.cat((losses.flatten(), tokens.flatten(), dropped))
