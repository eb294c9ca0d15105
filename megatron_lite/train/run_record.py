"""Writes run.json: the plan, versions, hardware, files of the run, and how it ended."""

import dataclasses
import os
import platform
import time
from pathlib import Path

import numpy as np
import torch

from megatron_lite.config.environment import TELLING_VARIABLES
from megatron_lite.config.machine import read_machine
from megatron_lite.config.plan import Plan
from megatron_lite.errors import UserError
from megatron_lite.formats.step_records import STEPS_FILE
from megatron_lite.process_state import identity
from megatron_lite.run_folder import RUN_FILE, keep_previous_run, write_run
from megatron_lite.user_functions import describe_source


class RunRecord:
    """Writes run.json when the run starts, so that a killed run has one, and when it ends. On the last rank."""

    def __init__(
        self,
        plan: Plan,
        run_dir: Path,
        parameters: int | None = None,
        peak_tflops: float | None = None,
        prediction: dict | None = None,
    ):
        self._writes, self._folder = plan.world.is_last, run_dir
        self.exit_reason: str | None = None  # why training ended before the last iteration
        self.has_begun = False  # the run was not refused: everything is built and loaded
        custom = plan.args.model.model  # a model of which only its own code knows the shape
        artefacts = {
            "steps": STEPS_FILE,
            "tensorboard": plan.args.watch.tensorboard_dir,
            "checkpoints": plan.args.checkpoint.save,
        }
        self._record = {
            "status": "running",
            "started": format_now(),
            "process": identity(),
            "plan": _plain(dataclasses.asdict(plan)) | ({} if custom is None else {"shape": None}),
            "model": None if custom is None else describe_source(custom),
            "parameters": parameters,
            "prediction": prediction,
            "versions": describe_versions(),
            "hardware": {
                **describe_device(plan.world.gpu if plan.device == "cuda" else None),
                "peak_tflops": peak_tflops,
            },
            "environment": read_environment(),
            "artefacts": {name: path for name, path in artefacts.items() if path is not None},
        }
        if self._writes:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._previous = keep_previous_run(run_dir)
            write_run(run_dir, self._record)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if not self._writes:
            return
        is_refused = isinstance(error, UserError) and error.exit_code == UserError.exit_code and not self.has_begun
        if is_refused and self._previous is not None:
            # the folder is of the run before, which this one has not touched
            os.replace(self._previous, self._folder / RUN_FILE)
        else:
            status = self.exit_reason or "finished" if error is None else f"failed: {kind.__name__}: {error}"
            status = "interrupted" if kind is KeyboardInterrupt else status
            write_run(self._folder, self._record | {"status": status, "ended": format_now()})


def describe_device(gpu: int | None) -> dict:
    """The hardware that this process uses, as run.json holds it. gpu: its number; None for the CPU."""
    cpus = {"cpus": read_machine().cores}
    if gpu is None:
        return cpus | {
            "device": "cpu",
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            # does this processor multiply bf16 matrices faster than fp32 ones: AVX512-BF16 or AMX
            "bf16_products": torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
            # does oneDNN multiply fp16 matrices here: AVX512-FP16 or AMX-FP16; builds of torch without it do not
            "fp16_products": hasattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported")
            and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
        }
    properties = torch.cuda.get_device_properties(gpu)
    return cpus | {
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
    }


def _plain(value):
    """A value with lists in place of ranges and sets, which JSON lacks."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, range):
        return [value.start, value.stop]
    return sorted(value) if isinstance(value, frozenset) else value


def describe_versions() -> dict[str, str]:
    """Versions of Python, torch and numpy."""
    return {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}


def read_environment() -> dict[str, str]:
    """The environment variables of TELLING_VARIABLES that are set."""
    return {name: os.environ[name] for name in TELLING_VARIABLES if name in os.environ}


def format_now() -> str:
    """The current time, as run.json holds it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
