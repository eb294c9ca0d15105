"""The recorder of a rehearsal. A file of its own, since its frames are left out of stacks."""

import torch

from megatron_lite.instruments.memory_tracker import StorageTracker


class RehearsalTracker(StorageTracker):
    """A recorder that answers by itself on which device a tensor without data is: three of four of autograd's questions,
    which would go through all modes."""

    STORAGES = "meta"  # of tensors without data

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device
        return super().__torch_dispatch__(func, types, args, kwargs)
