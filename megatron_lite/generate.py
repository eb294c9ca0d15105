"""Text from a trained model, token by token.

Letters: B sequences, T positions, H hidden, V padded vocabulary, N query heads, G key/value heads, D width of one head.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.checkpoint.find import open_newest
from megatron_lite.checkpoint.training_state import CheckpointRecord
from megatron_lite.config.shape import ModelShape
from megatron_lite.convert.folders import import_hf
from megatron_lite.cpu_kernels.install import choose_cpu_kernels, install_kernels
from megatron_lite.errors import UserError
from megatron_lite.model.attention import Attend, Scope, explicit_attention, sdpa_attention
from megatron_lite.model.experts import list_expert_biases, list_mixtures
from megatron_lite.model.gpt import DTYPES, GPT


class Generator(GPT):
    """A GPT that goes on with sequences: it keeps keys and values of all their tokens so far.

    Calling it with the next tokens of each sequence, (B, T), gives the logits after the last of them, (B, V).
    """

    def __init__(self, shape: ModelShape):
        super().__init__(shape, Attend(self._attend, "with kept keys and values"))
        self.start = 0  # tokens so far
        self.layer = 0  # whose turn it is to attend
        self.cache: Tensor | None = None  # (layers, 2, B, G, T, D)

    def reset(self, batch: int, length: int) -> None:
        """Make room for so many sequences of at most so many tokens."""
        weight = self.output_weight
        shape = self.shape
        sizes = (shape.num_layers, 2, batch, shape.num_query_groups, length, shape.kv_channels)
        self.cache = torch.empty(sizes, dtype=weight.dtype, device=weight.device)
        self.start = 0

    def advance(self, tokens_BT: Tensor) -> Tensor:
        """Read tokens, several at the beginning of the sequences, then one at a time.

        Returns:
            logits_BV after the last of them.
        """
        self.layer = 0
        logits_BV: Tensor = self(tokens_BT)
        self.start += tokens_BT.shape[1]
        return logits_BV

    def number_positions(self, length: int, device: torch.device) -> Tensor:
        return torch.arange(self.start, self.start + length, device=device)

    def finish(self, hidden_BTH: Tensor, labels_BT: Tensor | None) -> Tensor:
        last_B1V = super().finish(hidden_BTH[:, -1:], labels_BT)
        return last_B1V[:, 0]

    def _attend(
        self,
        q_BNTD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        scope: Scope,
        dropout: float,
        layer_number: int,
    ) -> Tensor:
        assert self.cache is not None
        end = self.start + q_BNTD.shape[2]
        keys, values = self.cache[self.layer]
        keys[:, :, self.start : end] = k_BGTD
        values[:, :, self.start : end] = v_BGTD
        self.layer += 1
        window = self.shape.find_window(self.layer - 1)
        if scope.offset_N is not None:
            first = 0 if window is None else max(self.start - window, 0)
            return explicit_attention(
                q_BNTD,
                keys[:, :, first:end],
                values[:, :, first:end],
                scope,
                0.0,
                layer_number,
                fp32_softmax=False,
                scale_by_layer=False,
            )
        if not self.start:
            return sdpa_attention(q_BNTD, k_BGTD, v_BGTD, scope, 0.0, layer_number, backend=None, expand=True)
        # one query of each head, together with those that share its keys: they attend to all tokens so far
        groups = k_BGTD.shape[1]
        q_BGKD = q_BNTD.squeeze(2).unflatten(1, (groups, -1))
        first = 0 if window is None else max(end - 1 - window, 0)
        seen_keys = keys[:, :, first:end]
        seen_values = values[:, :, first:end]
        out_BGKD = F.scaled_dot_product_attention(q_BGKD, seen_keys, seen_values)
        return out_BGKD.flatten(1, 2).unsqueeze(2)


def choose_device(cpu: bool) -> str:
    """The GPU, where there is one and `cpu` does not ask for the CPU."""
    return "cuda" if torch.cuda.is_available() and not cpu else "cpu"


def load_generator(
    load: Path, is_hugging_face: bool, step: int | None, device: str, say: Callable[[str], None]
) -> tuple[Generator, CheckpointRecord, dict[str, object]]:
    """Build a model with the weights of a checkpoint.

    Args:
        load: A folder that --save wrote to, or one of Hugging Face's.
        is_hugging_face: Whether it is one of Hugging Face's.
        step: The iteration of the checkpoint; None: the newest.
        device: cpu or cuda.
        say: Takes a line on what is read.

    Returns:
        The model, the checkpoint's record, and the flags of its training, which Hugging Face's folders have none of.
    """
    if is_hugging_face:
        record, tensors = import_hf(load, divisible_by=1)
        flags = {}
    else:
        stored = open_newest(load, step, say)
        record = stored.record
        flags = stored.arguments
    try:
        shape = record.model_shape
    except TypeError as error:
        raise UserError(f"--load {load}: its model cannot be read ({error}); it is of another version.") from None
    with torch.device("meta"):
        model = Generator(shape)
    # CPUs have no arithmetic in 16-bit floating point other than bf16
    precision = "fp32" if device == "cpu" and record.precision == "fp16" else record.precision
    model = model.to(DTYPES[precision]).to_empty(device=device).eval()
    if device == "cpu":
        install_kernels(model, choose_cpu_kernels(shape, precision))
    parameters = {f"model.{name}": parameter.data for name, parameter in model.named_parameters()}
    biases = list_expert_biases(list_mixtures(model), device)
    weights = parameters | {f"model.{name}": bias for name, bias in biases.items()}
    if is_hugging_face:
        for name, weight in weights.items():
            weight.copy_(tensors[name])
    else:
        held = stored.names()
        # a checkpoint of a run without them has no biases of experts
        wanted = [name for name in weights if name in parameters or name in held]
        stored.read_into({name: weights[name] for name in wanted})
    return model, record, flags


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 1.0  # 0: always the most probable
    top_k: int = 0  # of so many most probable only; 0: of all
    top_p: float = 0.0  # of the fewest that together are at least so probable; 0: of all
    seed: int = 1234  # of the first prompt; each further one has the next


def draw(logits_BV: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """Draw the next token of each text.

    A row's draw depends on its own generator only, so that a prompt is continued alike in any company.

    Args:
        logits_BV: Logits of the next token.
        sampling: How it is drawn.
        generators: One for each row.

    Returns:
        tokens_B, int64.
    """
    if not sampling.temperature:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV.float() / sampling.temperature
    if sampling.top_k:
        least_B1 = logits_BV.topk(min(sampling.top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    probabilities_BV = logits_BV.softmax(-1)
    if sampling.top_p:
        ordered_BV, order_BV = probabilities_BV.sort(-1, descending=True)
        before_BV = ordered_BV.cumsum(-1) - ordered_BV
        ordered_BV[before_BV >= sampling.top_p] = 0.0
        probabilities_BV = torch.zeros_like(ordered_BV).scatter(-1, order_BV, ordered_BV)
    drawn = [torch.multinomial(row, 1, generator=own) for row, own in zip(probabilities_BV, generators)]
    return torch.cat(drawn)


@dataclass(frozen=True)
class Generated:
    """Token ids that follow each prompt, without the end of text, and how long it took."""

    continuations: list[list[int]]
    prefill_tokens: int  # of all prompts, read at once
    prefill_s: float
    decode_tokens: int  # of all continuations
    decode_s: float
    cache_tokens: int  # of each sequence
    cache_bytes: int


@torch.inference_mode()
def generate(
    model: Generator,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    vocab_size: int,
    end: int | None,
    tell: Callable[[int, list[int]], None] = lambda row, continuation: None,
) -> Generated:
    """Continue all prompts together.

    As in Megatron-LM, all are read as far as the shortest one goes; from there on a token is given or drawn. So all
    have the same positions, and nothing is padded.

    Args:
        model: The model, with its weights.
        prompts: Token ids of each prompt, at least one.
        max_new_tokens: Tokens after which a continuation ends.
        sampling: How tokens are drawn.
        vocab_size: Ids that are drawn are below it: the vocabulary without its padding.
        end: The id of the end of text, with which a continuation ends, too; None: there is none.
        tell: Takes a prompt's number and its continuation so far, after each token.
    """
    device = model.output_weight.device
    lengths = [len(prompt) for prompt in prompts]
    shortest = min(lengths)
    total = max(lengths) + max_new_tokens
    tokens_BT = _pad_prompts(prompts, total)
    generators = [torch.Generator(device).manual_seed(sampling.seed + row) for row in range(len(prompts))]
    model.reset(len(prompts), total)
    began = time.perf_counter()
    logits_BV = model.advance(tokens_BT[:, :shortest].to(device))
    _wait_for(device)
    read = time.perf_counter()
    text = _Continuations(tokens_BT, lengths, max_new_tokens, end, tell)
    for at in range(shortest, total):
        due = text.list_due(at)
        if due:
            own_generators = [generators[row] for row in due]
            drawn_B = draw(logits_BV[due, :vocab_size], sampling, own_generators)
            text.write(at, due, drawn_B.tolist())
        if not text.open_rows:
            break
        logits_BV = model.advance(tokens_BT[:, at : at + 1].to(device))
    _wait_for(device)
    assert model.cache is not None
    return Generated(
        continuations=text.continuations,
        prefill_tokens=shortest * len(prompts),
        prefill_s=read - began,
        decode_tokens=text.count_tokens(),
        decode_s=time.perf_counter() - read,
        cache_tokens=total,
        cache_bytes=model.cache.nbytes,
    )


class _Continuations:
    """The texts that are written, and which of them go on."""

    def __init__(
        self,
        tokens_BT: Tensor,
        lengths: Sequence[int],
        max_new_tokens: int,
        end: int | None,
        tell: Callable[[int, list[int]], None],
    ):
        """
        Args:
            tokens_BT: int64, the prompts, with room behind them.
            lengths: Tokens of each prompt.
            max_new_tokens: Tokens after which a continuation ends.
            end: The id of the end of text.
            tell: Is told of each continuation.
        """
        self._tokens_BT = tokens_BT
        self._lengths = lengths
        self._max_new_tokens = max_new_tokens
        self._end = end
        self._tell = tell
        self.continuations: list[list[int]] = [[] for _ in lengths]
        self.open_rows = set(range(len(lengths)))

    def list_due(self, at: int) -> list[int]:
        """The texts whose token at this position is to be drawn; others have it from their prompt, or have ended."""
        return [row for row in sorted(self.open_rows) if at >= self._lengths[row]]

    def count_tokens(self) -> int:
        """Tokens of all continuations."""
        return sum(len(own) for own in self.continuations)

    def write(self, at: int, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Add a token to each of some texts.

        Args:
            at: Position of the tokens.
            rows: Numbers of the texts.
            tokens: A token for each of them.
        """
        for row, token in zip(rows, tokens, strict=True):
            self._tokens_BT[row, at] = token
            own = self.continuations[row]
            if token != self._end:
                own.append(token)
                self._tell(row, own)
            if token == self._end or len(own) == self._max_new_tokens:
                self.open_rows.discard(row)


def _pad_prompts(prompts: Sequence[Sequence[int]], length: int) -> Tensor:
    """The prompts as rows of so many tokens; what follows them is 0."""
    tokens_BT = torch.zeros(len(prompts), length, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, : len(prompt)] = torch.tensor(prompt)
    return tokens_BT


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
