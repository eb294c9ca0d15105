"""What memory is called, predicted or measured."""

# In the order of a report.
# A weight's gradient is a gradient from where it is computed, also one that is added to another and
# ends there. Workspace is all else that does not outlive its phase: temporaries of forward, backward and the
# optimizer, and the buffers of libraries such as cublas. Gathered parameters are whole weights that each rank keeps
# a part of, and the buffers that gather them. Memory that awaits its free was given back by the program, and another
# stream may still use it (Tensor.record_stream). A KV cache is an inference server's.
CATEGORIES = (
    "parameters",
    "gradients",
    "master weights",
    "moments",
    "activations",
    "logits and loss",
    "workspace",
    "communication",
    "gathered parameters",
    "awaiting free",
    "KV cache",
    "other",
    "before the record",
)
