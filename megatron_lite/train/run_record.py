"""Writes run.json: the plan, versions, hardware, files of the run, and how it ended."""

import dataclasses
import os
import platform
import time
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
import torch

from megatron_lite.config.args import Args
from megatron_lite.config.environment import TELLING_VARIABLES
from megatron_lite.config.layout import count_stage_layers
from megatron_lite.config.model_size import step_flops, weigh_chunks
from megatron_lite.config.plan import Plan, plan_stages
from megatron_lite.config.shape import ModelShape
from megatron_lite.errors import UserError
from megatron_lite.formats import run_record
from megatron_lite.formats.file_names import RUN_FILE, STEPS_FILE
from megatron_lite.formats.run_record import Hardware, Model, Prediction, Process, RunRecord
from megatron_lite.machine import read_machine
from megatron_lite.pipeline_schedule import Stage
from megatron_lite.process_state import identity
from megatron_lite.run_folder import keep_previous_run, write_run
from megatron_lite.user_functions import describe_source


class RunRecorder:
    """Writes run.json when the run starts, so that a killed run has one, and when it ends. On the last rank."""

    def __init__(
        self,
        plan: Plan,
        run_dir: Path,
        parameters: int | None = None,
        peak_tflops: float | None = None,
        prediction: Prediction | None = None,
        sampled: Hardware | None = None,
    ):
        """Write the record of a run that starts.

        Args:
            plan: what was decided about it.
            run_dir: the run's folder.
            parameters: of the whole model; None for a model of the user's own.
            peak_tflops: of the run's GPU in its precision; None for unknown.
            prediction: of this rank's step; None if nothing was predicted.
            sampled: limits of the hardware that is sampled beside steps; None if none is.
        """
        self._writes = plan.world.is_last
        self._folder = run_dir
        # why training ended before the last iteration
        self.exit_reason: str | None = None
        # whether the run was not refused: everything is built and loaded
        self.has_begun = False
        # a model of which only its own code knows the shape
        custom = plan.args.model.model
        self._record = RunRecord(
            status="running",
            started=format_now(),
            process=Process(**identity()),
            plan=record_plan(plan),
            model=None if custom is None else Model(**describe_source(custom)),
            parameters=parameters,
            sample_flops_causal=step_flops(plan.shape, 1, causal=True) if custom is None else None,
            sample_flops_full=step_flops(plan.shape, 1, causal=False) if custom is None else None,
            prediction=prediction,
            versions=describe_versions(),
            hardware=describe_device(plan.world.gpu if plan.device == "cuda" else None, peak_tflops, sampled),
            environment=read_environment(),
            artefacts=_list_artefacts(plan),
        )
        if self._writes:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._previous = keep_previous_run(run_dir)
            write_run(run_dir, self._record)

    def __enter__(self) -> "RunRecorder":  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._writes:
            return
        is_refused = isinstance(error, UserError) and error.exit_code == UserError.exit_code and not self.has_begun
        if is_refused and self._previous is not None:
            # the folder is of the run before, which this one has not touched
            os.replace(self._previous, self._folder / RUN_FILE)
        else:
            status = self.exit_reason or "finished" if error is None else f"failed: {type(error).__name__}: {error}"
            status = "interrupted" if kind is KeyboardInterrupt else status
            write_run(self._folder, msgspec.structs.replace(self._record, status=status, ended=format_now()))


def record_plan(plan: Plan) -> run_record.PlanRecord:
    """The plan as run.json holds it."""
    has_stages = plan.layout.pipeline > 1
    ranks = range(plan.world.size)
    layout = plan.layout
    compilation = plan.compilation
    sharding = plan.sharding
    return run_record.PlanRecord(
        args=dataclasses.asdict(plan.args),
        settings=_record_settings(plan.args),
        world=run_record.WorldRecord(**dataclasses.asdict(plan.world)),
        layout=run_record.LayoutRecord(**dataclasses.asdict(layout)),
        stage=_record_stage(plan.stage),
        shape=_record_shape(plan.shape) if plan.args.model.model is None else None,
        vocab_size=plan.vocab_size,
        device=plan.device,
        backend=plan.backend,
        precision=plan.precision,
        fp32_gradients=plan.fp32_gradients,
        batch=run_record.BatchRecord(**dataclasses.asdict(plan.batch)),
        train_iters=plan.train_iters,
        train_samples=plan.train_samples,
        learning_rate=dataclasses.asdict(plan.learning_rate),
        profile_window=(plan.profile_window.start, plan.profile_window.stop),
        profile_ranks=sorted(plan.profile_ranks),
        compilation=run_record.CompilationRecord(**dataclasses.asdict(compilation)),
        sharding=None if sharding is None else run_record.ShardingRecord(**dataclasses.asdict(sharding)),
        loader_workers=plan.loader_workers,
        recomputed_layers=plan.recomputed_layers,
        micro_batches=plan.final_micro_batches,
        stages_of_ranks=tuple(layout.locate(rank).pipeline_rank for rank in ranks) if has_stages else (),
        stage_layers=tuple(count_stage_layers(plan.args.parallel, plan.shape.num_layers)) if has_stages else (),
        chunk_weights=tuple(weigh_chunks(plan.shape, one.stage) for one in plan_stages(plan)) if has_stages else (),
    )


def _record_settings(args: Args) -> run_record.Settings:
    """The flags that a report asks for."""
    return run_record.Settings(
        micro_batch_size=args.training.micro_batch_size,
        seq_length=args.model.seq_length,
        kv_channels=args.model.kv_channels,
        max_position_embeddings=args.model.max_position_embeddings,
        hidden_dropout=args.model.hidden_dropout,
        attention_dropout=args.model.attention_dropout,
        recompute_granularity=args.model.recompute_granularity,
        loss_scale=args.precision.loss_scale,
        clip_grad=args.optimizer.clip_grad,
        seed=args.training.seed,
        dataloader_type=args.data.dataloader_type,
        mock_data=args.data.mock_data,
        eod_mask_loss=args.data.eod_mask_loss,
        ddp_bucket_size=args.parallel.ddp_bucket_size,
        grad_reduce_in_bf16=args.precision.grad_reduce_in_bf16,
        num_distributed_optimizer_instances=args.parallel.num_distributed_optimizer_instances,
        pipeline_model_parallel_layout=args.parallel.pipeline_model_parallel_layout,
        account_for_embedding_in_pipeline_split=args.parallel.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=args.parallel.account_for_loss_in_pipeline_split,
        manual_gc=args.training.manual_gc,
        log_interval=args.watch.log_interval,
        log_params_norm=args.watch.log_params_norm,
        log_num_zeros_in_grad=args.watch.log_num_zeros_in_grad,
        async_save=args.checkpoint.async_save,
        tensorboard_dir=args.watch.tensorboard_dir,
        record_memory_history=args.profile.record_memory_history,
        memory_snapshot_path=args.profile.memory_snapshot_path,
        pytorch_profiler_collect_callstack=args.profile.pytorch_profiler_collect_callstack,
        pytorch_profiler_collect_memory=args.profile.pytorch_profiler_collect_memory,
        pytorch_profiler_collect_shapes=args.profile.pytorch_profiler_collect_shapes,
    )


def _record_shape(shape: ModelShape) -> run_record.Shape:
    fields = dataclasses.asdict(shape)
    experts = fields.pop("experts")
    latent = fields.pop("latent")
    return run_record.Shape(
        **fields,
        experts=None if experts is None else run_record.ExpertsRecord(**experts),
        latent=None if latent is None else run_record.Latent(**latent),
    )


def _record_stage(stage: Stage) -> run_record.StageRecord:
    return run_record.StageRecord(
        number=stage.number,
        stages=stage.stages,
        chunks=tuple((chunk.start, chunk.stop) for chunk in stage.chunks),
        splits_backward=stage.splits_backward,
        micro_batch_group_size=stage.micro_batch_group_size,
    )


def _list_artefacts(plan: Plan) -> dict[str, str]:
    """Where the run writes what."""
    places = {
        "steps": STEPS_FILE,
        "tensorboard": plan.args.watch.tensorboard_dir,
        "checkpoints": plan.args.checkpoint.save,
    }
    return {name: path for name, path in places.items() if path is not None}


def describe_device(gpu: int | None, peak_tflops: float | None = None, sampled: Hardware | None = None) -> Hardware:
    """The hardware that this process uses.

    Args:
        gpu: its number; None for the CPU.
        peak_tflops: of the GPU in the run's precision; None for unknown.
        sampled: limits of the hardware that is sampled beside steps; None if none is.
    """
    device = _describe_processor(gpu, peak_tflops)
    if sampled is None:
        return device
    return msgspec.structs.replace(device, limits=sampled.limits, mig=sampled.mig, unread=sampled.unread)


def _describe_processor(gpu: int | None, peak_tflops: float | None) -> Hardware:
    """Describe the GPU, or the CPU where gpu is None."""
    cpus = read_machine().cores
    if gpu is None:
        return Hardware(
            cpus=cpus,
            device="cpu",
            processor=platform.processor() or platform.machine(),
            threads=torch.get_num_threads(),
            # AVX512-BF16 or AMX
            bf16_products=torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
            # AVX512-FP16 or AMX-FP16, by oneDNN; builds of torch without it do not
            fp16_products=hasattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported")
            and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
            peak_tflops=peak_tflops,
        )
    properties = torch.cuda.get_device_properties(gpu)
    return Hardware(
        cpus=cpus,
        device=properties.name,
        memory_bytes=properties.total_memory,
        cuda=torch.version.cuda,
        peak_tflops=peak_tflops,
    )


def describe_versions() -> dict[str, str]:
    """Versions of Python, torch and numpy."""
    return {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}


def read_environment() -> dict[str, str]:
    """The environment variables of TELLING_VARIABLES that are set."""
    return {name: os.environ[name] for name in TELLING_VARIABLES if name in os.environ}


def format_now() -> str:
    """The current time, as run.json holds it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
