"""What memory is called, predicted or measured."""

# In the order of a report. A weight's gradient is a gradient from where it is computed, also one that is added to another and
# ends there. Workspace is all else that does not outlive its phase: temporaries of forward, backward and the
# optimizer, and the buffers of libraries such as cublas.
CATEGORIES = (
    "parameters",
    "gradients",
    "master weights",
    "moments",
    "activations",
    "logits and loss",
    "workspace",
    "communication",
    "other",
    "before the record",
)
