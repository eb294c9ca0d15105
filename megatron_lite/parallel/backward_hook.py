"""The moment in backward at which a rank has its own gradients, before it waits for those of other ranks."""

from collections.abc import Callable

from torch import Tensor
from torch.autograd import Variable


def call_when_computed(loss: Tensor, action: Callable[[], None]):
    """Call `action` within loss.backward(), on autograd's thread, when every gradient is computed.

    DistributedDataParallel waits for the reduction in a callback of the engine, queued when its last bucket is full. The
    engine runs callbacks in the order of queueing, and this one is queued when backward begins.
    """
    loss.register_hook(lambda gradient: Variable._execution_engine.queue_callback(action))
