"""Causes that are planted in simulated trainings, each a part of the loop done otherwise, and sound variations.

A class is mixed into a training: `build_training("transformer", ["SlowLoader"], ranks=4)`. Where the training without the cause is not
the healthy one (a model whose work is tiny is slow whatever its loop does), `cure` has the attributes of the healthy twin.
"""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

from benchmarks.diagnosis.made.rank import COPY_STREAM, MAIN_THREAD
from benchmarks.diagnosis.made.training import (
    ADD,
    BF16,
    COMPUTE_STREAM,
    ConvNet,
    Training,
    Transformer,
)

COPY_KERNEL = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>(at::TensorIteratorBase&)>"
MULTIPLY = "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int)"
NORM = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float, float, float>, unsigned int, float, 4> >(at::native::ReduceOp<float>)"
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 12, false, false>(c10::BFloat16*, c10::BFloat16 const*, int, int, int)"
SOFTMAX_BACK = "void (anonymous namespace)::softmax_warp_backward<c10::BFloat16, c10::BFloat16, float, 12, false, false>(c10::BFloat16*, c10::BFloat16 const*, c10::BFloat16 const*, int, int, int)"
DROPOUT = "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<c10::BFloat16, float, unsigned int, 1, 4, bool>(at::cuda::detail::TensorInfo<c10::BFloat16 const, unsigned int>)"
NOT_EQUAL = "void at::native::vectorized_elementwise_kernel<4, at::native::CompareEqFunctor<c10::BFloat16>, std::array<char*, 3ul> >(int)"
ANY = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<bool, at::native::func_wrapper_t<bool>, unsigned int, bool, 4> >(at::native::ReduceOp<bool>)"
UNALIGNED = "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align1>(cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align1::Params)"
NONZERO = "void at_cuda_detail::cub::DeviceSelectSweepKernel<at_cuda_detail::cub::DispatchSelectIf>(int)"


class SlowLoader(Training):
    """Workers deliver a batch 12 ms after the loop asks for it."""

    loader_us = 12_000.0


class LoaderInMainThread(Training):
    """num_workers=0: samples are decoded and stacked in the training thread."""

    samples = 64

    def load_batch(self, rank, number):
        rank.open("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
        for _ in range(self.samples):
            rank.python(70.0)
            rank.host_op("aten::to", 60.0, [[3, 224, 224]], ["unsigned char"])
        rank.host_op("aten::stack", 1800.0)
        rank.close()
        rank.copy_to_device(self.batch_bytes)


class TinyWork(Training):
    """A small model and a small batch, launched operation by operation: the GPU waits for launches."""

    tokens = 128
    width = 512
    layers = 24
    vocabulary = 4096
    parameters = 3_000_000
    op_us = 26.0
    cure: ClassVar[dict] = {"op_us": 0.2}


class SlowModules(Training):
    """Modules do a lot of Python between operations."""

    work_us = 1_900.0

    def forward_layer(self, rank, index):
        rank.python(self.work_us)
        super().forward_layer(rank, index)


class MetricsInPython(Training):
    """Metrics are computed in Python behind each step's read of the loss."""

    work_us = 9_000.0

    def end_step(self, rank, number):
        rank.python(self.work_us)


class LogsToDisk(Training):
    """Each step writes thousands of log lines, flushed; the trace has stacks."""

    has_stacks = True
    lines = 40

    def end_step(self, rank, number):
        start = rank.host_us
        for _ in range(self.lines):
            rank.python(180.0, "logging/__init__.py(1113): emit")
        rank.record("python_function", "train.py(212): log_step", start - 1, rank.host_us + 1)


class PythonInBackward(Training):
    """A custom autograd.Function whose backward loops in Python, in one layer."""

    work_us = 8_000.0

    def backward_layer(self, rank, index):
        if index == self.layers // 2:
            rank.synchronize()  # it reads a tensor, as such functions do
            with rank.node("SegmentScanBackward"):
                rank.python(self.work_us)
        super().backward_layer(rank, index)


class ReadsInLayers(Training):
    """Each layer reads a value of its activations, and keeps a running mean of it in Python."""

    op_us = 40.0
    work_us = 220.0
    cure: ClassVar[dict] = {"op_us": 40.0}

    def forward_layer(self, rank, index):
        super().forward_layer(rank, index)
        rank.kernel("aten::max", NORM, 12.0)
        rank.read_value()
        rank.python(self.work_us)

    def backward_layer(self, rank, index):
        super().backward_layer(rank, index)
        rank.kernel("aten::max", NORM, 12.0)
        rank.read_value()
        rank.python(self.work_us)


class ClipReadsNorms(Training):
    """Gradients are clipped by a loop that reads each norm."""

    tensors = 12  # of a layer

    def before_update(self, rank):
        for _ in range(self.tensors * self.layers):
            rank.kernel("aten::linalg_vector_norm", NORM, 14.0, [[2048, 2048]], [BF16])
            rank.read_value()
            rank.python(12.0)


class SelectsByMask(Training):
    """Boolean indexing in each layer: its size is read by the host."""

    work_us = 700.0

    def forward_layer(self, rank, index):
        rank.open("aten::nonzero", "cpu_op")
        rank.kernel("aten::nonzero", NONZERO, 25.0)
        rank.copy("Memcpy DtoH (Device -> Pageable)", 4, 1.5)
        rank.synchronize()
        rank.close()
        rank.python(self.work_us)
        super().forward_layer(rank, index)


class SynchronizesPhases(Training):
    """torch.cuda.synchronize() behind each layer, for timers that were left in."""

    op_us = 40.0
    work_us = 200.0
    cure: ClassVar[dict] = {"op_us": 40.0}

    def forward_layer(self, rank, index):
        super().forward_layer(rank, index)
        rank.synchronize("cudaDeviceSynchronize", None)
        rank.python(self.work_us)

    def backward_layer(self, rank, index):
        super().backward_layer(rank, index)
        rank.synchronize("cudaDeviceSynchronize", None)
        rank.python(self.work_us)


class SavesEachStep(Training):
    """A checkpoint in every step; the trace has stacks."""

    has_stacks = True
    tensors = 24

    def end_step(self, rank, number):
        start = rank.host_us
        for _ in range(self.tensors):
            rank.copy("Memcpy DtoH (Device -> Pageable)", 4 << 20, 760.0)
            rank.synchronize()
            rank.python(500.0, "<built-in method write_record of torch._C.PyTorchFileWriter object at 0x7f20>")
        rank.record("python_function", "torch/serialization.py(966): save", start - 1, rank.host_us + 1)
        rank.record("python_function", "train.py(140): save_checkpoint", start - 2, rank.host_us + 2)


class EvaluatesEachStep(Training):
    """Two batches of held-out data run forward in each step."""

    batches = 2

    def end_step(self, rank, number):
        for _ in range(self.batches):
            self.first_layer(rank)
            for index in range(self.layers):
                self.forward_layer(rank, index)
            self.loss(rank)
            rank.read_value()


class CapturesEachStep(Training):
    """A CUDA graph is captured in each step, since shapes change."""

    operations = 300

    def before_forward(self, rank, number):
        rank.synchronize("cudaDeviceSynchronize", None)
        rank.runtime("cudaStreamBeginCapture_v10000", 20.0)
        for _ in range(self.operations):
            rank.host_op("aten::mm", 18.0)
        rank.runtime("cudaStreamEndCapture_v10000", 400.0)
        rank.runtime("cudaGraphInstantiateWithFlags_v11040", 3_500.0)


class EmptiesTheCache(Training):
    """torch.cuda.empty_cache() in each step: the driver gives all memory again."""

    segments = 20

    def end_step(self, rank, number):
        rank.synchronize("cudaDeviceSynchronize", None)
        for _ in range(self.segments):
            rank.runtime("cudaFree", 210.0)

    def forward_layer(self, rank, index):
        for _ in range(2):
            rank.synchronize()
            rank.runtime("cudaMalloc", 260.0)
        super().forward_layer(rank, index)


class ReducesBehindBackward(Training):
    """Gradients are reduced in one piece when backward has ended."""

    parameters = 220_000_000

    def reduce_bucket(self, elements):
        return

    def backward(self, is_last):
        super().backward(is_last)
        if is_last:
            self.communicate("allreduce", 2.0 * self.layers * self.parameters, beside=False)


class GathersInSight(Training):
    """Sharded weights are gathered when a layer needs them, and nothing is prefetched."""

    reduces = False
    layer_bytes = 100e6

    def before_layer(self, index):
        self.communicate("_allgather_base", self.layer_bytes, beside=False)

    def before_backward_layer(self, index):
        self.communicate("_allgather_base", self.layer_bytes, beside=False)

    def behind_backward_layer(self, index):
        self.communicate("_reduce_scatter_base", self.layer_bytes, beside=False)


class SplitsLayersOverSlowLinks(Training):
    """Tensor parallel ranks on two nodes: two all-reduces per layer and direction, in sight."""

    reduces = False
    rate = 45_000.0

    def behind_layer(self, index):
        for _ in range(2):
            self.communicate("allreduce", 16.8e6, beside=False, rate=self.rate)

    behind_backward_layer = behind_layer


class ExchangesTokens(Training):
    """Experts on other ranks: tokens travel before and behind each layer, and nothing runs meanwhile."""

    rate = 70_000.0

    def before_layer(self, index):
        self.communicate("all_to_allv", 33.6e6, beside=False, rate=self.rate)

    behind_layer = before_layer
    before_backward_layer = before_layer
    behind_backward_layer = before_layer


class ReducesTensorByTensor(Training):
    """A reduction of its own for each small tensor, behind backward."""

    tensors = 40  # of a layer

    def reduce_bucket(self, elements):
        return

    def backward(self, is_last):
        super().backward(is_last)
        for _ in range(self.tensors * self.layers if is_last else 0):
            self.communicate("allreduce", 4096.0, beside=True)


class SlowGpu(Training):
    """Rank 2's GPU is clocked down: its kernels take 1.35 times as long."""

    late = 2
    slowness = 1.35

    def __init__(self, ranks=1, seed=1):
        super().__init__(ranks, seed)
        self.ranks[self.late].slowness = self.slowness


class SlowReaderOnOneRank(Training):
    """Rank 1 waits 11 ms for each batch: its disk is slow."""

    late = 1
    late_us = 11_000.0

    def load_batch(self, rank, number):
        self.loader_us = self.late_us if rank.number == self.late else 60.0
        super().load_batch(rank, number)


class LateInTurns(Training):
    """Each step, another rank works 9 ms longer on its host before it goes on."""

    late_us = 9_000.0

    def before_forward(self, rank, number):
        if number % len(self.ranks) == rank.number:
            rank.synchronize()
            rank.python(self.late_us)


class LateAtTimes(Training):
    """Rank 3 is 30 ms late in every second step."""

    late = 3
    every = 2
    late_us = 30_000.0

    def before_forward(self, rank, number):
        if rank.number == self.late and number % self.every == 0:
            rank.python(self.late_us)


class PageableCopies(Training):
    """A large batch is copied from pageable memory, on the compute stream."""

    batch_bytes = 40 << 20
    cure: ClassVar[dict] = {"batch_bytes": 1 << 20}

    def load_batch(self, rank, number):
        rank.open("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")
        rank.python(self.loader_us)
        rank.close()
        rank.copy_to_device(self.batch_bytes, pinned=False)


class OffloadsActivations(Training):
    """Each layer's activations are copied to the host and back, and the layers wait for the copies."""

    copy_us = 1_050.0

    def forward_layer(self, rank, index):
        super().forward_layer(rank, index)
        rank.wait_for_stream(COMPUTE_STREAM, COPY_STREAM)
        rank.copy("Memcpy DtoH (Device -> Pinned)", 24 << 20, self.copy_us, COPY_STREAM)
        rank.wait_for_stream(COPY_STREAM)

    def backward_layer(self, rank, index):
        rank.copy("Memcpy HtoD (Pinned -> Device)", 24 << 20, self.copy_us, COPY_STREAM)
        rank.wait_for_stream(COPY_STREAM)
        super().backward_layer(rank, index)


class SinglePrecision(Training):
    """The whole model in fp32, without TF32."""

    dtype = "float"


class DoubleBlock(Training):
    """Someone computes a small correction in fp64."""

    rows = 4096

    def forward_layer(self, rank, index):
        super().forward_layer(rank, index)
        if index % 4 == 1:
            rank.matmul(self.rows, 2048, 2048, "double")
            rank.matmul(self.rows, 2048, 4096, "double")


class ChainsElementwise(Training):
    """A hand-written activation and norm: twenty elementwise kernels per layer and direction."""

    kernels = 20

    def forward_layer(self, rank, index):
        super().forward_layer(rank, index)
        for number in range(self.kernels):
            op, kernel = ("aten::mul", MULTIPLY) if number % 2 else ("aten::add", ADD)
            rank.elementwise(op, kernel, [4096, 8192], BF16, 3)

    def backward_layer(self, rank, index):
        for number in range(self.kernels):
            op, node = ("aten::mul", "MulBackward0") if number % 2 else ("aten::add", "AddBackward0")
            with rank.node(node):
                rank.elementwise(op, MULTIPLY if number % 2 else ADD, [4096, 8192], BF16, 3)
        super().backward_layer(rank, index)


class CopiesLayouts(Training):
    """.contiguous() behind each transposition, six per layer."""

    copies = 6

    def forward_layer(self, rank, index):
        super().forward_layer(rank, index)
        for _ in range(self.copies):
            rank.open("aten::contiguous", "cpu_op", [[256, 64, 56, 56]], [BF16])
            rank.open("aten::clone", "cpu_op", [[256, 64, 56, 56]], [BF16])
            rank.kernel("aten::copy_", COPY_KERNEL, 190.0, [[256, 64, 56, 56]] * 2, [BF16] * 2)
            rank.close()
            rank.close()


class WritesScores(Transformer):
    """Attention by hand: scores are written, scaled, masked, normalized and dropped out."""

    def attention(self, rank, index):
        heads = self.width // 128
        dims = [heads, self.tokens, self.tokens]
        rank.matmul(self.tokens, 128, self.tokens, BF16, "aten::bmm", batch=heads)
        rank.elementwise("aten::div", MULTIPLY, dims, BF16)
        rank.elementwise("aten::masked_fill", MULTIPLY, dims, BF16, 3)
        rank.elementwise("aten::_softmax", SOFTMAX, dims, BF16)
        rank.elementwise("aten::native_dropout", DROPOUT, dims, BF16, 2.5)
        rank.matmul(self.tokens, self.tokens, 128, BF16, "aten::bmm", batch=heads)

    def attention_backward(self, rank, index):
        heads = self.width // 128
        dims = [heads, self.tokens, self.tokens]
        with rank.node("BmmBackward0"):
            rank.matmul(self.tokens, 128, self.tokens, BF16, "aten::bmm", batch=heads)
            rank.matmul(self.tokens, self.tokens, 128, BF16, "aten::bmm", batch=heads)
        for node, op, kernel, passes in (
            ("NativeDropoutBackward0", "aten::native_dropout_backward", MULTIPLY, 2.5),
            ("SoftmaxBackward0", "aten::_softmax_backward_data", SOFTMAX_BACK, 3),
            ("MaskedFillBackward0", "aten::masked_fill", MULTIPLY, 3),
            ("DivBackward0", "aten::div", MULTIPLY, 2),
        ):
            with rank.node(node):
                rank.elementwise(op, kernel, dims, BF16, passes)
        with rank.node("BmmBackward0"):
            for _ in range(2):
                rank.matmul(self.tokens, self.tokens, 128, BF16, "aten::bmm", batch=heads)


class Recomputes(Training):
    """Each block runs again in backward (torch.utils.checkpoint), while 70 of 80 GiB are free; stacks and memory are recorded."""

    has_stacks = True
    activation_bytes = 16 << 20
    due = None  # the layer whose activations are wanted next

    def forward_layer(self, rank, index):
        super().forward_layer(rank, index)
        if rank.thread == MAIN_THREAD:
            rank.record_memory(self.activation_bytes)

    def backward_layer(self, rank, index):
        self.due = index
        super().backward_layer(rank, index)
        rank.record_memory(-self.activation_bytes)

    def unpack(self, rank):
        if self.due is None:
            return
        start = rank.host_us
        rank.python(2.0)
        begun = rank.host_us
        rank.python(2.0)
        with rank.recording_again():
            self.forward_layer(rank, self.due)
        rank.record("python_function", "torch/utils/checkpoint.py(1521): recompute_fn", begun, rank.host_us)
        rank.python(2.0)
        rank.record("python_function", "torch/utils/checkpoint.py(1124): unpack_hook", start, rank.host_us)
        rank.python(2.0)
        self.due = None


class AnomalyMode(Training):
    """torch.autograd.set_detect_anomaly(True): every gradient is searched for NaN, and the host reads the answer."""

    def __init__(self, ranks=1, seed=1):
        super().__init__(ranks, seed)
        for rank in self.ranks:
            rank.check_node = partial(self.check_gradients, rank)

    def check_gradients(self, rank):
        for dims in ([4096, 2048], [2048, 4096]):
            rank.kernel("aten::isnan", NOT_EQUAL, 9.0, [dims], [BF16])
            rank.open("aten::_is_any_true", "cpu_op")
            rank.kernel("aten::any", ANY, 6.0, [dims], ["bool"])
            rank.close()
            rank.read_value(1)


class OddVocabulary(Transformer):
    """50,257 rows of the vocabulary: products that tensor cores take badly."""

    vocabulary = 50_257
    cure: ClassVar[dict] = {"vocabulary": 50_304}

    def head(self, rank):
        rank.matmul(self.tokens, self.width, self.vocabulary, BF16, efficiency=0.22, kernel=UNALIGNED)


class LoopingOptimizer(Training):
    """Adam tensor by tensor (foreach=False): six kernels for each of 400 tensors."""

    tensors = 400

    def update(self, rank):
        rank.open("Optimizer.step#AdamW.step")
        share = self.layers * self.parameters / self.tensors
        for _ in range(self.tensors):
            for op in ("aten::mul_", "aten::lerp_", "aten::addcmul_", "aten::sqrt", "aten::add_", "aten::addcdiv_"):
                us = 9.0 * share / rank.gpu.bytes_per_us + 1.5
                rank.kernel(op, MULTIPLY, us, [[int(share)]], ["float"])
        rank.close()


# --- sound variations


class ReadsNoLoss(Training):
    """The host is always ahead."""

    reads_loss = False


class AccumulatesGradients(Training):
    """Four micro-batches, one reduction."""

    micro_batches = 4


class ShardsWithPrefetch(Training):
    """Sharded weights, gathered a layer ahead, beside computation."""

    reduces = False

    def before_layer(self, index):
        self.communicate("_allgather_base", 60e6, beside=True)

    def before_backward_layer(self, index):
        self.communicate("_allgather_base", 60e6, beside=True)

    def behind_backward_layer(self, index):
        self.communicate("_reduce_scatter_base", 60e6, beside=True)


class RecomputesForWant(Recomputes):
    """Blocks run again in backward, in memory that is full: 78 of 79 GiB."""

    activation_bytes = 448 << 20

    def __init__(self, ranks=1, seed=1):
        super().__init__(ranks, seed)
        for rank in self.ranks:
            rank.allocated_bytes = 74 << 30


class LoaderNearlyLate(Training):
    """A batch is waited for, for 2% of the step."""

    loader_us = 500.0


class FusedBlocks(Training):
    """Blocks with a Triton kernel of their own."""

    def forward_layer(self, rank, index):
        super().forward_layer(rank, index)
        rank.kernel("triton_poi_fused_add_gelu_mul_0", "triton_poi_fused_add_gelu_mul_0", 20.0)


WORKLOADS: dict[str, type[Training]] = {"transformer": Transformer, "convnet": ConvNet}


def build_training(workload: str, parts: list[str], ranks: int = 1, seed: int = 1) -> Training:
    """Build a simulated training with planted parts.

    A name may be followed by other values of its attributes: "MetricsInPython:work_us=6000".

    Args:
        workload: Name in WORKLOADS.
        parts: Names of classes of this module, the outermost first.
        ranks: How many.
        seed: Of all that varies.
    """
    mixed = [change_attributes(part, globals()) for part in parts]
    base = change_attributes(workload, WORKLOADS)
    kind = type("_".join([*(one.__name__ for one in mixed), base.__name__]), (*mixed, base), {})
    return kind(ranks, seed)


def change_attributes(text: str, classes: Mapping[str, type]) -> type:
    """Find a class, with other values where the text has any.

    Args:
        text: "Name" or "Name:attribute=number,attribute=number".
        classes: By name.
    """
    name, _, settings = text.partition(":")
    kind = classes[name]
    values = {}
    for setting in settings.split(",") if settings else ():
        attribute, _, number = setting.partition("=")
        values[attribute] = type(getattr(kind, attribute))(float(number))
    return type(kind.__name__, (kind,), values) if values else kind


def build_twin(workload: str, parts: list[str], ranks: int = 1, seed: int = 1) -> Training:
    """Build the same training without the planted parts.

    Args:
        workload: Name in WORKLOADS.
        parts: Names of classes of this module.
        ranks: How many.
        seed: Of all that varies.
    """
    cures: dict = {}
    kept = []
    for part in parts:
        kind = change_attributes(part, globals())
        cures |= getattr(kind, "cure", {})
        kept += [kind] if issubclass(kind, TinyWork) else []
    twin = type("Twin", (*kept, change_attributes(workload, WORKLOADS)), cures)
    return twin(ranks, seed)


def measure_share(workload: str, parts: list[str], ranks: int = 1, seed: int = 1) -> float:
    """Measure how much of the step the planted parts take: 1 - step of the twin / step.

    Args:
        workload: Name in WORKLOADS.
        parts: Names of classes of this module.
        ranks: How many.
        seed: Of all that varies.
    """
    planted = build_training(workload, parts, ranks, seed)
    twin = build_twin(workload, parts, ranks, seed)
    planted.simulate(records=False)
    twin.simulate(records=False)
    return 1.0 - twin.step_us[0] / planted.step_us[0]
