"""The planner that a run is handed: what observers ask of it, answered by planner/."""

from megatron_lite.observers import Planner
from megatron_lite.planner.run_prediction import predict_run
from megatron_lite.planner.what_if import predict_peak

RUN_PLANNER = Planner(predict_run, predict_peak)
