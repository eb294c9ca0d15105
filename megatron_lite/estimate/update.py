"""The moments between backward and the next step at which memory can be highest."""

from collections import Counter

from megatron_lite.config.plan import Plan
from megatron_lite.estimate.moment import moment
from megatron_lite.estimate.params import parameter_count
from megatron_lite.estimate.prediction import Moment
from megatron_lite.estimate.sizes import FP32
from megatron_lite.estimate.states import of_parameters, optimizer_copies, whole_gradients
from megatron_lite.estimate.tape import Sized
from megatron_lite.phases import Phase


def update_moments(plan: Plan, always: Counter[Sized]) -> list[Moment]:
    """In the order of the step. `always`: what lives anyway."""
    states = always + whole_gradients(plan)
    ready = states + optimizer_copies(plan)
    decayed = _decayed_copies(plan)
    return [
        moment(Phase.CLIP_GRAD, "gradient norm", ready),
        moment(Phase.OPTIMIZER_STEP, "update of the weights", ready + decayed),
    ]


def _decayed_copies(plan: Plan) -> Counter[Sized]:
    """SGD's weight decay that changes is added to gradients by hand: weights times decay (optim/optimizer.py)."""
    if plan.args.optimizer.optimizer != "sgd" or plan.learning_rate.weight_decay_style == "constant":
        return Counter()
    return Counter({of_parameters("workspace", "decayed weights", FP32): parameter_count(plan.shape)})
