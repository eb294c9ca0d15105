"""What memory is called, predicted or measured."""

# In the order of a report. Workspace is all that does not outlive its phase: temporaries of forward, backward and the
# optimizer, and the buffers of libraries such as cublas.
CATEGORIES = (
    "parameters", "gradients", "master weights", "moments", "activations", "logits and loss", "workspace", "communication",
    "other", "before the record",
)
