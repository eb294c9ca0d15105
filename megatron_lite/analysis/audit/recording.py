"""What to record so that a point can be seen: for this trainer, and for any PyTorch job."""

TRACE = "a trace of some steps: --use-pytorch-profiler --profile-step-start 10 --profile-step-end 15"
GPU_TRACE = "a trace of a run on a GPU with CUDA activities: --use-pytorch-profiler"
SHAPES = "a trace with shapes: --use-pytorch-profiler --pytorch-profiler-collect-shapes (elsewhere record_shapes=True)"
SNAPSHOT = "a memory snapshot over three steps or more: --record-memory-history"
RUN_FOLDER = "the run's own record (run.json, steps.jsonl): name the run folder of this trainer, --run-dir"
LONGER_RUN = "a longer run: --train-iters"
SECOND_RUN = "a second run to compare with: --against OTHER_RUN"
