"""A training step: micro-batches forward and backward, then one update. The host never waits for the device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config.args import DataArgs
from megatron_lite.config.layout import Layout
from megatron_lite.config.plan import Plan
from megatron_lite.data.batch import Batch, ToDevice, make_batch
from megatron_lite.marks import STEP, mark_memory
from megatron_lite.optim.optimizer import Optimizer, Update
from megatron_lite.parallel.data_parallel import call_when_computed
from megatron_lite.parallel.pipeline import Pipeline
from megatron_lite.parallel.replica import Replica
from megatron_lite.phases import BeginPhase, Phase
from megatron_lite.pipeline_schedule import Action
from megatron_lite.train.prediction_losses import PredictionStep
from megatron_lite.train.routing import RoutingStep


@dataclass(frozen=True)
class StepResult:
    """The figures of a step; tensors are scalars on the device."""

    samples: int  # global batch
    loss_sum: Tensor  # over this rank's unmasked tokens
    tokens: Tensor  # unmasked tokens of this rank
    update: Update
    zeros: Tensor  # zeros among the gradients; 0 unless asked for
    params_norm: Tensor  # L2 norm of the updated parameters; 0 unless asked for
    routing: Tensor | None = None  # figures of routers in the order of RoutingRow; None of a dense model
    # mean losses of further tokens by depth, which all ranks' add up to; None: they are not predicted
    predictions: Tensor | None = None


class BatchMaker:
    """Makes a Batch on the device from the loader's raw tokens, with the data flags' masks and positions."""

    def __init__(self, d: DataArgs, layout: Layout, device: torch.device, eod: int | None):
        """
        Args:
            d: The data flags.
            layout: This rank's place among the others.
            device: Where the batch is needed.
            eod: The tokenizer's id of the end of a document; None if it has none.
        """
        self.device = device
        self._layout = layout
        self._to_device = ToDevice(device)
        self._data = d
        self._eod = eod

    def __call__(self, raw_BT1: Tensor) -> Batch:
        """Make the batch of raw_BT1, int64 [B, T + 1]: this rank's positions of it."""
        batch = make_batch(
            raw_BT1,
            eod=self._eod,
            eod_mask_loss=self._data.eod_mask_loss,
            reset_position_ids=self._data.reset_position_ids,
            reset_attention_mask=self._data.reset_attention_mask,
            begins_are_marked=self._data.dataloader_inter_document_masking,
            to_device=self._to_device,
        )
        if self._layout.context == 1:
            return batch
        return batch.cut(self._layout.find_chunks(batch.tokens_BT.shape[1]))


@mark_memory(STEP)
def loss_and_tokens(model: Callable[..., Tensor], batch: Batch, tells_mask: bool = False) -> tuple[Tensor, Tensor]:
    """Run the forward of a batch.

    Args:
        model: Called as GPT is.
        batch: A micro-batch on the model's device.
        tells_mask: Whether the model takes the mask of the losses, too, as multi-token prediction does.

    Returns:
        The sum of the unmasked tokens' losses in nats, and their number; scalars on the device.
    """
    inputs = [batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT]
    if tells_mask:
        inputs.append(batch.loss_mask_BT)
    losses_BT = model(*inputs)
    if not losses_BT.ndim:
        # a pipeline's stage without the loss
        return losses_BT, torch.zeros_like(losses_BT)
    if batch.loss_mask_BT is None:
        tokens = torch.full((), losses_BT.numel(), dtype=torch.float32, device=losses_BT.device)
        return losses_BT.sum(), tokens
    return (losses_BT * batch.loss_mask_BT).sum(), batch.loss_mask_BT.sum()


class MicroBatches:
    """Gives each action its batch, which is kept until the last chunk of a pipeline's stage has used it."""

    def __init__(self, batches: Iterator[Tensor], make: BatchMaker, pipeline: Pipeline, phase: BeginPhase):
        """
        Args:
            batches: This rank's raw_BT1, one after the other.
            make: Makes batches of them.
            pipeline: This rank's stage.
            phase: Marks the times in which a batch is read and copied.
        """
        self._batches = batches
        self._make = make
        self._phase = phase
        self._last = len(pipeline.stage.chunks) - 1
        # by number of the micro-batch
        self._kept: dict[int, Batch] = {}

    def take(self, action: Action) -> Batch:
        """Take the batch of the action's micro-batch."""
        if action.chunk == 0:
            self._kept[action.micro_batch] = self._read()
        if action.chunk == self._last:
            return self._kept.pop(action.micro_batch)
        return self._kept[action.micro_batch]

    def _read(self) -> Batch:
        with self._phase(Phase.DATA):
            raw_BT1 = next(self._batches)
        with self._phase(Phase.DATA_TO_DEVICE):
            batch = self._make(raw_BT1)
            del raw_BT1  # a loader's shared memory is unmapped here, not somewhere in the loop
            return batch


class TrainingStep:
    """Runs training steps on the replica."""

    def __init__(
        self,
        plan: Plan,
        replica: Replica,
        optimizer: Optimizer,
        make: BatchMaker,
        computed: Callable[[], None] | None = None,
    ):
        """
        Args:
            plan: This rank's.
            replica: The model.
            optimizer: Updates the replica's parameters.
            make: Makes batches.
            computed: Called within backward when this rank has its gradients and begins to wait for those of others;
                None if nobody wants to know.
        """
        self.plan = plan
        self.replica = replica
        self.optimizer = optimizer
        self.make = make
        self._computed = computed
        self._per_token = plan.args.training.calculate_per_token_loss
        self._left_out = frozenset(plan.args.training.iterations_to_skip)
        self._routing = RoutingStep(plan, replica)
        self._predictions = PredictionStep(plan, replica)

    def leaves_out(self, iteration: int) -> bool:
        """Tell whether --iterations-to-skip names this iteration."""
        return iteration in self._left_out

    def draw(self, batches: Iterator[Tensor], consumed: int, phase: BeginPhase) -> int:
        """Draw the batch of a step that is left out; returns its samples. The arguments are those of Step.draw."""
        with phase(Phase.DATA):
            for _ in range(self.plan.micro_batches(consumed)):
                next(batches)
        return self.plan.batch.size(consumed)

    def __call__(self, batches: Iterator[Tensor], consumed: int, phase: BeginPhase) -> StepResult:
        """Run the step that starts after `consumed` samples.

        Args:
            batches: This rank's raw_BT1, one micro-batch after the other.
            consumed: Samples of all ranks.
            phase: Marks the parts of the step.
        """
        number = self.plan.micro_batches(consumed)
        self._routing.begin(self.optimizer.loss_scale, number)
        self._predictions.begin(self.optimizer.loss_scale, number)
        sums = torch.zeros(2, dtype=torch.float32, device=self.make.device)
        # by micro-batch and chunk: those that are still to go backward
        objectives: dict[tuple[int, int], Tensor] = {}
        feed = MicroBatches(batches, self.make, self.replica.pipeline, phase)
        for action in self.replica.pipeline.take_actions(number, phase):
            if action.is_forward:
                figures, objectives[action.micro_batch, action.chunk] = self._forward(feed.take(action), number, phase)
                sums += figures
            elif action.of_weights:
                weights = self.replica.pipeline.weights
                assert weights is not None, "only a split backward has actions of weights"
                with self.replica.backward(False), phase(Phase.BACKWARD):
                    weights.add()
            else:
                self._backward(objectives, action, action.micro_batch == number - 1, phase)
        return self._update(sums, self.plan.batch.size(consumed), phase)

    def _forward(self, batch: Batch, micro_batches: int, phase: BeginPhase) -> tuple[Tensor, Tensor]:
        """Run the forward of one action.

        Args:
            batch: The action's micro-batch.
            micro_batches: Micro-batches of the step.
            phase: Marks the forward.

        Returns:
            A tensor of two numbers, the sum of losses and the tokens, and the objective that backward starts from.
        """
        with phase(Phase.FORWARD):
            loss_sum, tokens = loss_and_tokens(self.replica, batch, self._predictions.is_used)
            # gradients: the mean over micro-batches of each one's mean over tokens, as in Megatron
            divisor = tokens if batch.mean_tokens is None else batch.mean_tokens
            objective = loss_sum if self._per_token else loss_sum / divisor.clamp(min=1) / micro_batches
            return torch.stack((loss_sum.detach(), tokens)), objective

    def _backward(
        self, objectives: dict[tuple[int, int], Tensor], action: Action, last: bool, phase: BeginPhase
    ) -> None:
        """Run the backward of one action.

        Args:
            objectives: What to call backward on, by micro-batch and chunk; the action's is taken from it.
            action: The action.
            last: Whether it is the step's last micro-batch.
            phase: Marks the backward.
        """
        with self.replica.backward(last), phase(Phase.BACKWARD):
            scaled = objectives.pop((action.micro_batch, action.chunk)) * self.optimizer.loss_scale
            # other chunks' backward waits for no rank
            if self._computed is not None and last and action.chunk == 0:
                call_when_computed(scaled, self._computed)
            scaled.backward()
            # autograd's graph goes here, not somewhere in the loop
            del scaled

    def _update(self, sums: Tensor, samples: int, phase: BeginPhase) -> StepResult:
        """Update the parameters after the last backward.

        Args:
            sums: Two numbers, the sum of this rank's losses and its tokens.
            samples: Samples of the global batch.
            phase: Marks the parts of the update.
        """
        watch = self.plan.args.watch
        nothing = torch.zeros((), device=self.make.device)
        # what is left of it: buckets were reduced while backward ran
        with phase(Phase.GRAD_SYNC):
            gradients = self.replica.gradients()
            divisor = None
            if self._per_token:
                # gradients are sums over tokens, averaged over ranks
                total = sums[1].clone()
                with torch.no_grad():
                    dist.all_reduce(total)
                # one stage has the tokens
                divisor = (total / self.plan.layout.stage_size).clamp(min=1)
        zeros = nothing
        if watch.log_num_zeros_in_grad:
            zeros = self.optimizer.count_zeros(gradients)
        update = self.optimizer.step(gradients, samples, phase, divisor)
        routing = self._routing.end()
        predictions = self._predictions.end(self.make.device)
        self.replica.clear()
        params_norm = nothing
        if watch.log_params_norm:
            params_norm = self.optimizer.measure_norm(self.replica.parameters)
        return StepResult(
            samples=samples,
            loss_sum=sums[0],
            tokens=sums[1],
            update=update,
            zeros=zeros,
            params_norm=params_norm,
            routing=routing,
            predictions=predictions,
        )
