"""Trainings on GPUs as their authors wrote them: a loop over simulated ranks, whose parts planted causes override.

Host clocks of ranks are their own; a collective starts on each rank when that rank has come to it, and ends on all ranks at once,
`transfer_us` after the last one has come.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from benchmarks.diagnosis.made.rank import (
    A100,
    AUTOGRAD_THREAD,
    COMPUTE_STREAM,
    H100,
    MAIN_THREAD,
    NCCL_STREAM,
    Gpu,
    Rank,
)

BF16 = "c10::BFloat16"
WARM_UP, RECORDED = 3, 5
NCCL_KERNELS = {
    "allreduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_reduce_scatter_base": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "all_to_allv": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
}
LINK_BYTES_PER_US = 180_000.0
COLLECTIVE_LATENCY_US = 18.0
LAYER_NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float, c10::BFloat16 const*, c10::BFloat16 const*, c10::BFloat16 const*, float*, float*, c10::BFloat16*)"
LAYER_NORM_BACK = "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<c10::BFloat16, float>(c10::BFloat16 const*, c10::BFloat16 const*, float const*, float const*, c10::BFloat16 const*, c10::BFloat16*, int)"
GELU = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&, at::native::GeluType)::{lambda()#2}, std::array<char*, 2ul> >(int, at::native::GeluCUDAKernelImpl)"
GELU_BACK = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluBackwardCUDAKernelImpl(at::TensorIteratorBase&, at::native::GeluType)::{lambda()#2}, std::array<char*, 3ul> >(int)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t, Flash_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t> >, false, true, false, false, true, true, false>(pytorch_flash::Flash_fwd_params)"
FLASH_BACK = "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8, 4, 4, 4, false, false, cutlass::bfloat16_t, Flash_kernel_traits<128, 64, 128, 8, cutlass::bfloat16_t> >, false, true, false, false, true, true>(pytorch_flash::Flash_bwd_params)"
LOSS = "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue>(float*, float const*, int)"
LOSS_BACK = "void at::native::(anonymous namespace)::cunn_SoftMaxBackward<4, float, float, float, at::native::(anonymous namespace)::LogSoftMaxBackwardEpilogue>(float*, float const*, float const*, int)"
FUSED_ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>, float, double>(at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>)"
EMBEDDING = "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true>(at::cuda::detail::TensorInfo<c10::BFloat16, unsigned int>)"
EMBEDDING_BACK = "void at::native::(anonymous namespace)::compute_grad_weight<c10::BFloat16, long>(long const*, c10::BFloat16 const*, long const*, long, long)"
CONV = {
    "forward": "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_stage4_warpsize2x2x1_g1_tensor16x8x16_execute_kernel__5x_cudnn",
    "data": "sm80_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_stage4_warpsize2x2x1_g1_tensor16x8x16_execute_kernel__5x_cudnn",
    "weight": "sm80_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x32_stage4_warpsize2x2x1_g1_tensor16x8x16_execute_kernel__5x_cudnn",
}
CONVOLUTIONS = ("aten::conv2d", "aten::convolution", "aten::_convolution")
NORM_FORWARD = "void cudnn::bn_fw_tr_1C11_kernel_NCHW<__nv_bfloat16, float, int, 512, true, 1, true>(cudnnTensorStruct, __nv_bfloat16 const*)"
NORM_BACK = "void cudnn::bn_bw_1C11_kernel_new<__nv_bfloat16, float, float2, 512, true, 1>(float, float, float, float, cudnnTensorStruct)"
RELU = "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::launch_clamp_scalar(at::TensorIteratorBase&, c10::Scalar, c10::Scalar)::{lambda()#1}, std::array<char*, 2ul> >(int)"


class Training(ABC):
    """A loop whose parts a cause overrides; on several ranks with gradients that are reduced beside backward.

    Attributes:
        layers: Blocks of the model.
        micro_batches: Per step.
        reads_loss: Whether the loop reads the loss at the end of each step, as loops that log do.
        batch_bytes: What is copied to the device.
        parameters: Of one layer.
        recorded: Steps in the trace.
    """

    gpu: Gpu = H100
    layers = 8
    micro_batches = 1
    reads_loss = True
    batch_bytes = 1 << 20
    parameters = 50_000_000
    optimizer = "AdamW"
    layers_per_bucket = 2
    reduces = True
    dtype = BF16
    op_us = 8.0
    has_stacks = False
    loader_us = 60.0
    recorded = RECORDED

    def __init__(self, ranks: int = 1, seed: int = 1) -> None:
        self.ranks = [Rank(number, ranks, self.gpu, seed) for number in range(ranks)]
        for rank in self.ranks:
            rank.op_us = self.op_us
            rank.has_stacks = self.has_stacks
        self.step_us: list[float] = []

    def simulate(self, records: bool = True) -> None:
        """Run the warm-up, then the recorded steps; without a record only their length is known."""
        for number in range(WARM_UP):
            self.step(number)
        self._drain()
        for rank in self.ranks:
            rank.recording = records
        began = self._end_us()
        for number in range(WARM_UP, WARM_UP + self.recorded):
            self.step(number)
        self._drain()
        self.step_us = [(self._end_us() - began) / self.recorded] * self.recorded

    def _drain(self) -> None:
        """What the profiler does before it starts and stops."""
        for rank in self.ranks:
            rank.synchronize("cudaDeviceSynchronize", None)

    def _end_us(self) -> float:
        return max(rank.host_us for rank in self.ranks)

    def step(self, number: int) -> None:
        for rank in self.ranks:
            rank.open(f"ProfilerStep#{number}")
            self.load_batch(rank, number)
        for micro in range(self.micro_batches):
            self.forward(number)
            self.backward(micro == self.micro_batches - 1)
        for rank in self.ranks:
            rank.wait_for_stream(NCCL_STREAM)
            self.before_update(rank)
            self.update(rank)
            self.after_update(rank, number)
            if self.reads_loss:
                rank.read_value()
            self.end_step(rank, number)
            rank.close()
            rank.python(4.0)

    # --- the parts

    def load_batch(self, rank: Rank, number: int) -> None:
        rank.open("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")
        rank.python(self.loader_us)
        rank.close()
        rank.copy_to_device(self.batch_bytes)

    def forward(self, number: int) -> None:
        for rank in self.ranks:
            self.before_forward(rank, number)
            rank.grad_mode = True
            self.first_layer(rank)
        for index in range(self.layers):
            self.before_layer(index)
            for rank in self.ranks:
                self.forward_layer(rank, index)
            self.behind_layer(index)
        for rank in self.ranks:
            self.loss(rank)
            rank.grad_mode = False

    def backward(self, is_last: bool) -> None:
        for rank in self.ranks:
            rank.thread = AUTOGRAD_THREAD
            self.loss_backward(rank)
        for index in reversed(range(self.layers)):
            self.before_backward_layer(index)
            for rank in self.ranks:
                self.backward_layer(rank, index)
            self.behind_backward_layer(index)
            if is_last and index % self.layers_per_bucket == 0 and self.reduces:
                self.reduce_bucket(self.layers_per_bucket * self.parameters)
        for rank in self.ranks:
            self.first_layer_backward(rank)
            rank.thread = MAIN_THREAD
            rank.saved.clear()
            rank.host_us += 10.0

    def reduce_bucket(self, elements: int) -> None:
        self.communicate("allreduce", 2 * elements, beside=True)

    def update(self, rank: Rank) -> None:
        rank.open(f"Optimizer.step#{self.optimizer}.step")
        num_bytes = self.layers * self.parameters * 14
        rank.kernel("aten::_fused_adamw_", FUSED_ADAM, num_bytes / rank.gpu.bytes_per_us)
        rank.close()
        rank.open(f"Optimizer.zero_grad#{self.optimizer}.zero_grad")
        rank.python(12.0)
        rank.close()

    # --- where causes add something; a loop as it should be has nothing there

    def before_forward(self, rank: Rank, number: int) -> None:
        """Before a micro-batch of a step."""

    def before_layer(self, index: int) -> None:
        """Before a layer's forward, on all ranks."""

    def behind_layer(self, index: int) -> None:
        """Behind a layer's forward, on all ranks."""

    def before_backward_layer(self, index: int) -> None:
        """Before a layer's backward, on all ranks."""

    def behind_backward_layer(self, index: int) -> None:
        """Behind a layer's backward, on all ranks."""

    def before_update(self, rank: Rank) -> None:
        """Between backward and the optimizer."""

    def after_update(self, rank: Rank, number: int) -> None:
        """Between the optimizer and reading the loss."""

    def end_step(self, rank: Rank, number: int) -> None:
        """Behind reading the loss."""

    # --- the model

    @abstractmethod
    def first_layer(self, rank: Rank) -> None:
        """Issue forward of what is before the layers."""

    @abstractmethod
    def first_layer_backward(self, rank: Rank) -> None:
        """Issue backward of what is before the layers."""

    @abstractmethod
    def forward_layer(self, rank: Rank, index: int) -> None:
        """Issue a layer's forward."""

    @abstractmethod
    def backward_layer(self, rank: Rank, index: int) -> None:
        """Issue a layer's backward."""

    @abstractmethod
    def loss(self, rank: Rank) -> None:
        """Issue forward of what is behind the layers."""

    @abstractmethod
    def loss_backward(self, rank: Rank) -> None:
        """Issue backward of what is behind the layers."""

    # --- between ranks

    def communicate(
        self, name: str, num_bytes: float, beside: bool, rate: float = LINK_BYTES_PER_US, ranks: Sequence[Rank] = ()
    ) -> None:
        """Issue a collective on every rank.

        Args:
            name: As PyTorch records it.
            num_bytes: Of one rank.
            beside: Whether computation goes on meanwhile; else it waits for the end.
            rate: Bytes per microsecond.
            ranks: Who takes part; all if empty.
        """
        members = list(ranks) or self.ranks
        if len(members) == 1:
            return
        length = COLLECTIVE_LATENCY_US + num_bytes / rate
        starts = []
        launches = []
        for rank in members:
            rank.open({"allreduce": "nccl:all_reduce"}.get(name, f"nccl:{name}"))
            rank.wait_for_stream(COMPUTE_STREAM, NCCL_STREAM)
            called = rank.host_us
            rank.host_us += rank.vary(6.0)
            rank.close()
            launches.append(called)
            starts.append(max(rank.host_us + 3.0, rank.free_us.get(NCCL_STREAM, 0.0) + 1.0))
        end = max(starts) + members[0].vary(length)
        for rank, called, start in zip(members, launches, starts, strict=True):
            rank.free_us[NCCL_STREAM] = end
            elements = int(num_bytes / 2)
            more = {"Collective name": name, "In msg nelems": elements, "Out msg nelems": elements}
            more |= {"dtype": "BFloat16", "Group size": len(members), "Process Group Name": "0"}
            more |= {"Process Group Description": "default_pg", "Seq": rank.next_collective()}
            more |= {"Process Group Ranks": str([one.number for one in members])}
            rank.record_launch(
                "cudaLaunchKernelExC", called, "kernel", NCCL_KERNELS[name], start, end, NCCL_STREAM, **more
            )
            if not beside:
                rank.wait_for_stream(NCCL_STREAM)


class Transformer(Training):
    """A GPT: 8 blocks of width 2,048 on an H100, 4,096 tokens per micro-batch."""

    tokens = 4096
    width = 2048
    vocabulary = 32_768

    def first_layer(self, rank: Rank) -> None:
        dims = [[self.vocabulary, self.width], [1, self.tokens]]
        us = 4.0 * self.tokens * self.width / rank.gpu.bytes_per_us + 1.5
        rank.kernel("aten::embedding", EMBEDDING, us, dims, [self.dtype, "long int"])

    def first_layer_backward(self, rank: Rank) -> None:
        with rank.node("EmbeddingBackward0"):
            dims = [[self.tokens, self.width], [1, self.tokens]]
            us = 2.0 * self.vocabulary * self.width / rank.gpu.bytes_per_us + 20.0
            rank.kernel("aten::embedding_dense_backward", EMBEDDING_BACK, us, dims, [self.dtype, "long int"])

    def forward_layer(self, rank: Rank, index: int) -> None:
        tokens, width, dtype = self.tokens, self.width, self.dtype
        rank.layer_norm(LAYER_NORM, [tokens, width], dtype)
        rank.linear(tokens, width, 3 * width, dtype)
        self.attention(rank, index)
        rank.linear(tokens, width, width, dtype)
        rank.elementwise("aten::add", ADD, [tokens, width], dtype, 3)
        rank.layer_norm(LAYER_NORM, [tokens, width], dtype)
        rank.linear(tokens, width, 4 * width, dtype)
        rank.elementwise("aten::gelu", GELU, [tokens, 4 * width], dtype)
        rank.linear(tokens, 4 * width, width, dtype)
        rank.elementwise("aten::add", ADD, [tokens, width], dtype, 3)

    def attention_us(self, rank: Rank) -> float:
        return 4.0 * self.tokens * self.tokens * self.width / 2 / rank.gpu.flops[BF16] * 1.5

    def attention(self, rank: Rank, index: int) -> None:
        heads = self.width // 128
        outer = [[1, heads, self.tokens, 128]] * 3
        dims = [[1, self.tokens, heads, 128]] * 3
        names = ("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention")
        with rank.inside(*names, outer, [BF16] * 3):
            rank.kernel("aten::_flash_attention_forward", FLASH, self.attention_us(rank), dims, [BF16] * 3)

    def attention_backward(self, rank: Rank, index: int) -> None:
        heads = self.width // 128
        outer = [[1, heads, self.tokens, 128]] * 5
        with rank.node("ScaledDotProductFlashAttentionBackward0"):
            dims = [[1, self.tokens, heads, 128]] * 5
            us = 2.6 * self.attention_us(rank)
            with rank.inside("aten::_scaled_dot_product_flash_attention_backward", outer, [BF16] * 5):
                rank.kernel("aten::_flash_attention_backward", FLASH_BACK, us, dims, [BF16] * 5)

    def backward_layer(self, rank: Rank, index: int) -> None:
        tokens, width, dtype = self.tokens, self.width, self.dtype
        self.add_backward(rank)
        self.product_backward(rank, tokens, 4 * width, width)
        with rank.node("GeluBackward0"):
            rank.elementwise("aten::gelu_backward", GELU_BACK, [tokens, 4 * width], dtype, 3)
        self.product_backward(rank, tokens, width, 4 * width)
        self.norm_backward(rank)
        self.add_backward(rank)
        self.product_backward(rank, tokens, width, width)
        self.attention_backward(rank, index)
        self.product_backward(rank, tokens, width, 3 * width)
        self.norm_backward(rank)

    def add_backward(self, rank: Rank) -> None:
        with rank.node("AddBackward0"):
            rank.elementwise("aten::add", ADD, [self.tokens, self.width], self.dtype, 3)

    def norm_backward(self, rank: Rank) -> None:
        with rank.node("NativeLayerNormBackward0"):
            dims = [self.tokens, self.width]
            rank.elementwise("aten::native_layer_norm_backward", LAYER_NORM_BACK, dims, self.dtype, 4)

    def product_backward(self, rank: Rank, tokens: int, width: int, columns: int) -> None:
        """Gradients of (tokens, width) by (width, columns)."""
        with rank.node("AddmmBackward0"):
            self.unpack(rank)
            rank.matmul(tokens, columns, width, self.dtype)
            rank.matmul(width, tokens, columns, self.dtype)

    def unpack(self, rank: Rank) -> None:
        """Get what a node of a product saved."""

    def head(self, rank: Rank) -> None:
        rank.matmul(self.tokens, self.width, self.vocabulary, self.dtype)

    def loss(self, rank: Rank) -> None:
        dims = [[self.tokens, self.width], [self.vocabulary, self.width]]
        with rank.inside("aten::linear", dims, [self.dtype] * 2):
            self.head(rank)
        rank.elementwise("aten::_log_softmax", LOSS, [self.tokens, self.vocabulary], "float")

    def loss_backward(self, rank: Rank) -> None:
        dims = [self.tokens, self.vocabulary]
        with rank.node("LogSoftmaxBackward0"):
            rank.elementwise("aten::_log_softmax_backward_data", LOSS_BACK, dims, "float", 3)
        with rank.node("MmBackward0"):
            self.head(rank)
            self.head(rank)


class ConvNet(Training):
    """A network of convolutions on an A100: 12 blocks, 256 images of 3 x 224 x 224."""

    gpu = A100
    layers = 12
    parameters = 2_000_000
    optimizer = "SGD"
    batch_bytes = 256 * 3 * 224 * 224
    images = 256

    def shape(self, index: int) -> list[int]:
        size = 56 >> (index // 3)
        return [self.images, 64 << (index // 3), size, size]

    def convolve(self, rank: Rank, op: str, kind: str, index: int) -> None:
        """Issue a convolution of a block."""
        images, channels, size, _ = self.shape(index)
        us = 2.0 * images * size * size * channels * channels * 9 / rank.gpu.flops[self.dtype] * 1.4
        dims = [self.shape(index), [channels, channels, 3, 3]]
        rank.kernel(op, CONV[kind], us, dims, [self.dtype] * 2)

    def first_layer(self, rank: Rank) -> None:
        dims = [[self.images, 3, 224, 224], [64, 3, 7, 7]]
        with rank.inside(*CONVOLUTIONS, dims, [self.dtype] * 2):
            rank.kernel("aten::cudnn_convolution", CONV["forward"], 800.0, dims, [self.dtype] * 2)

    def first_layer_backward(self, rank: Rank) -> None:
        with rank.node("ConvolutionBackward0"):
            dims = [[self.images, 64, 112, 112], [self.images, 3, 224, 224], [64, 3, 7, 7]]
            rank.kernel("aten::convolution_backward", CONV["weight"], 800.0, dims, [self.dtype] * 3)

    def forward_layer(self, rank: Rank, index: int) -> None:
        for _ in range(2):
            channels = self.shape(index)[1]
            with rank.inside(*CONVOLUTIONS, [self.shape(index), [channels, channels, 3, 3]], [self.dtype] * 2):
                self.convolve(rank, "aten::cudnn_convolution", "forward", index)
            with rank.inside("aten::batch_norm", "aten::_batch_norm_impl_index", [self.shape(index)], [self.dtype]):
                rank.elementwise("aten::cudnn_batch_norm", NORM_FORWARD, self.shape(index), self.dtype, 3)
            rank.elementwise("aten::clamp_min_", RELU, self.shape(index), self.dtype)

    def backward_layer(self, rank: Rank, index: int) -> None:
        for _ in range(2):
            with rank.node("ReluBackward0"):
                rank.elementwise("aten::threshold_backward", RELU, self.shape(index), self.dtype, 3)
            with rank.node("CudnnBatchNormBackward0"):
                rank.elementwise("aten::cudnn_batch_norm_backward", NORM_BACK, self.shape(index), self.dtype, 4)
            with rank.node("ConvolutionBackward0"):
                self.convolve(rank, "aten::convolution_backward", "data", index)
                self.convolve(rank, "aten::convolution_backward", "weight", index)

    def loss(self, rank: Rank) -> None:
        rank.linear(self.images, 512, 1000, self.dtype)
        rank.elementwise("aten::_log_softmax", LOSS, [self.images, 1000], "float")

    def loss_backward(self, rank: Rank) -> None:
        with rank.node("LogSoftmaxBackward0"):
            rank.elementwise("aten::_log_softmax_backward_data", LOSS_BACK, [self.images, 1000], "float", 3)
        with rank.node("AddmmBackward0"):
            rank.matmul(self.images, 1000, 512, self.dtype)
