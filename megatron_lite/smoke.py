"""Smoke tests of a training: quick checks that any PyTorch code can call on its own model, step and loader, such as in
pytest.

Each check raises an AssertionError that says what was seen, what was expected and the likely cause. They need neither
this package's trainer nor a GPU. `step` stands for a function without arguments that does one whole training step:
forward, backward, optimizer.
"""

import gc
import math
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import accumulate, islice, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.profiler import ProfilerAction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megatron_lite.tensor_holders import count_nodes, find_held_tensors
from megatron_lite.units import significant

RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
MAX_NAMED_PARAMETERS = 4  # of parameters in a message
# growth that is told from caches that fill
MIN_RISES = 3
# one training step; seconds
Step = Callable[[], object]
Clock = Callable[[], float]
Batch = TypeVar("Batch")


def _require(holds: bool, seen: str, expected: str, cause: str) -> None:
    if not holds:
        raise AssertionError(f"{seen}; expected {expected}. Likely cause: {cause}.")


def _number(value: float | Tensor) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED_PARAMETERS} more" if len(names) > MAX_NAMED_PARAMETERS else ""
    return ", ".join(names[:MAX_NAMED_PARAMETERS]) + more


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


# --- model and optimizer


def check_first_loss(loss: float | Tensor, vocab_size: int, tolerance: float = 0.1) -> None:
    """An untrained classifier of `vocab_size` words guesses: its mean loss is near ln(vocab_size).

    Args:
        loss: Mean cross entropy of the first batch in nats, before any update.
        vocab_size: Words that the model chooses from.
        tolerance: Largest difference from ln(vocab_size), as a share of it.

    Raises:
        AssertionError: The loss is further away, or no number.
    """
    seen = _number(loss)
    guess = math.log(vocab_size)
    if seen < guess:
        cause = (
            "labels that the model can see (not shifted, no causal mask), "
            "a mean over padding too, or weights that are trained"
        )
    else:
        cause = "a sum where a mean is meant, bits instead of nats, or first weights or logits that are too large"
    expected = f"ln({vocab_size}) = {significant(guess, 4)} within {tolerance:.0%}"
    _require(abs(seen - guess) <= tolerance * guess, f"the first loss is {significant(seen, 4)}", expected, cause)


def check_gradients(model: nn.Module, compute_loss: Callable[[], Tensor]) -> None:
    """Backward gives every trainable parameter a gradient that is finite and not zero throughout.

    Projections that start at zero keep those before them from a gradient: call this after one step then. Gradients that
    parameters had before are put back.

    Args:
        model: Whose parameters are looked at.
        compute_loss: One forward; returns a scalar.

    Raises:
        AssertionError: A parameter has no gradient, one that is zero throughout, or NaN or Inf in it.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    _require(bool(named), "no parameter requires a gradient", "some to train", "requires_grad_(False) on all of them")
    before = {name: p.grad for name, p in named.items()}
    for parameter in named.values():
        parameter.grad = None
    try:
        loss = compute_loss()
        cause = "detach(), item(), torch.no_grad() or a conversion to numpy on the way"
        _require(loss.requires_grad, "the loss has no graph", "one that leads to the parameters", cause)
        loss.backward()
        found = {name: p.grad for name, p in named.items()}
    finally:
        for name, parameter in named.items():
            parameter.grad = before[name]
    absent = [name for name, gradient in found.items() if gradient is None]
    cause = "they take no part in the loss: a branch that is not called, or detach() on the way"
    _require(not absent, f"no gradient for {_list_names(absent)}", "one for every trainable parameter", cause)
    present = {name: gradient for name, gradient in found.items() if gradient is not None}
    wrong = [name for name, gradient in present.items() if not bool(torch.isfinite(gradient).all())]
    cause = "overflow in 16 bits, a logarithm or root of 0, or a whole row that is masked in softmax"
    _require(not wrong, f"NaN or Inf in the gradient of {_list_names(wrong)}", "finite gradients", cause)
    zero = [name for name, gradient in present.items() if not bool(gradient.any())]
    cause = "a factor of 0, units that are never active, or a projection behind them that starts at zero"
    _require(not zero, f"a gradient of zeros for {_list_names(zero)}", "some that are not", cause)


def check_weights_move(model: nn.Module, step: Step) -> None:
    """Check that a training step changes every trainable parameter, and no frozen one.

    The learning rate must not be 0 in this step, as it is in the first one of some warm-ups, and a loss scale must not
    skip it.

    Args:
        model: Whose parameters are looked at.
        step: One training step.

    Raises:
        AssertionError: A trainable parameter stayed as it was, a frozen one changed, or one has NaN or Inf in it.
    """
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step()
    named = dict(model.named_parameters())
    wrong = [name for name, p in named.items() if not bool(torch.isfinite(p).all())]
    cause = "too large a learning rate, or an optimizer that steps on gradients with NaN"
    _require(not wrong, f"NaN or Inf in {_list_names(wrong)} after one step", "finite weights", cause)
    still = []
    moved = []
    for name, parameter in named.items():
        is_same = torch.equal(parameter, before[name])
        if parameter.requires_grad and is_same:
            still.append(name)
        elif not parameter.requires_grad and not is_same:
            moved.append(name)
    cause = "the optimizer was not given them, they have no gradient, or the learning rate is 0"
    _require(not still, f"one step left {_list_names(still)} as before", "every trainable parameter to change", cause)
    cause = "they were frozen after their gradient was there, or are written elsewhere"
    _require(not moved, f"one step changed {_list_names(moved)}", "frozen parameters to stay", cause)


def check_overfits(step: Callable[[], float | Tensor], steps: int = 100, target: float = 0.1) -> int:
    """Training on one small batch again and again learns it by heart.

    Args:
        step: One training step on the same batch each time; returns its loss.
        steps: At most.
        target: The loss to come down to, as a share of the first one.

    Returns:
        How many steps it took.

    Raises:
        AssertionError: The loss did not get there, or became NaN or Inf.
    """
    first = lowest = math.inf
    for number in range(1, steps + 1):
        loss = _number(step())
        cause = "too large a learning rate, or overflow in 16 bits"
        _require(math.isfinite(loss), f"the loss of step {number} is {loss}", "a finite one", cause)
        first = loss if number == 1 else first
        lowest = min(lowest, loss)
        if loss <= target * first:
            return number
    cause = "too small a learning rate, labels that do not belong to the inputs, or gradients that are never cleared"
    seen = f"the loss of one batch fell from {significant(first, 4)} to {significant(lowest, 4)} in {steps} steps"
    _require(False, seen, f"at most {significant(target * first, 4)}", cause)
    return steps


def check_same_loss(
    compute: Callable[[], Tensor], compute_other: Callable[[], Tensor], rtol: float = 1e-4, atol: float = 1e-4
) -> None:
    """An optimization (torch.compile, 16 bits, fusion, another layout) leaves the loss as it was. Both see the same
    random numbers.

    Args:
        compute: One forward of the original; returns its loss, or any tensor.
        compute_other: Computes the loss in the other way, on the same batch.
        rtol: Largest difference relative to the first.
        atol: Largest difference besides.

    Raises:
        AssertionError: The two differ by more, or in their shapes.
    """
    found = []
    with torch.no_grad(), torch.random.fork_rng():
        for function in (compute, compute_other):
            torch.manual_seed(0)
            found.append(function().detach().double().cpu())
    one, other = found
    cause = "the other one computes something else: another mask, reduction or batch"
    _require(one.shape == other.shape, f"shapes {[*one.shape]} and {[*other.shape]}", "the same", cause)
    most = float((one - other).abs().max())
    close = torch.allclose(other, one, rtol=rtol, atol=atol)
    cause = "too few digits (a softmax or sum in 16 bits), another order of random numbers, or another computation"
    seen = f"the largest difference is {significant(most)}, at values up to {significant(float(one.abs().max()), 4)}"
    _require(close, seen, f"at most {rtol:g} of them and {atol:g}", cause)


# --- data


def check_batches_repeat(make_loader: Callable[[int], Iterable[object]], batches: int = 3, seed: int = 1234) -> None:
    """A loader that is made anew with the same seed gives the same batches.

    Args:
        make_loader: Seeds what it has to, and returns an iterable of batches: tensors, arrays, or nested lists and
            dicts of them.
        batches: How many are compared.
        seed: Handed to `make_loader` both times.

    Raises:
        AssertionError: There is no batch, or one differs.
    """
    first = _copy_batches(make_loader(seed), batches)
    second = _copy_batches(make_loader(seed), batches)
    _require(bool(first), "the loader gave no batch", "some", "an empty data set, or drop_last with too few samples")
    cause = "a loader that is an iterator which is used up, or samples that are dropped at random"
    _require(len(first) == len(second), f"{len(first)} batches, then {len(second)}", "as many", cause)
    for number, (one, other) in enumerate(zip(first, second), 1):
        leaves = tree_leaves(one)
        others = tree_leaves(other)
        same = len(leaves) == len(others) and all(map(_are_equal, leaves, others))
        cause = (
            "shuffling or augmentation by a generator that the seed does not reach, "
            "or workers that finish in another order"
        )
        _require(same, f"batch {number} differs when seed {seed} is given again", "the same batch", cause)


def _copy_batches(loader: Iterable[object], number: int) -> list[object]:
    """Copies of the first batches of a loader, which may fill the same tensors again."""
    return [tree_map(_copy_leaf, batch) for batch in islice(loader, number)]


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.clone()
    return leaf.copy() if hasattr(leaf, "copy") else leaf


def _are_equal(one: Any, other: Any) -> bool:
    if not hasattr(one, "dtype"):
        return type(one) is type(other) and bool(one == other)
    alike = one.dtype == getattr(other, "dtype", None) and one.shape == other.shape
    # a NaN, which differs from itself, is the same as another here
    return alike and bool(((one == other) | (one != one) & (other != other)).all())  # noqa: PLR0124


def check_data_wait(
    loader: Iterable[Batch],
    step: Callable[[Batch], object],
    steps: int = 20,
    max_share: float = 0.1,
    clock: Clock = time.perf_counter,
) -> float:
    """Training does not wait for its data. The first batch and its step, which start workers and compile, do not count.

    Args:
        loader: Yields batches.
        step: One training step on a batch.
        steps: Steps that are timed.
        max_share: Share of their time that may pass in the loader.
        clock: Tells seconds.

    Returns:
        The share.

    Raises:
        AssertionError: It is larger, or the loader has no second batch.
    """
    waited = computed = 0.0
    batches = iter(loader)
    for number in range(steps + 1):
        asked = clock()
        batch = next(batches, None)
        if batch is None:
            break
        came = clock()
        step(batch)
        _synchronize()
        if number:
            waited = waited + came - asked
            computed = computed + clock() - came
    _require(waited + computed > 0, "the loader has no second batch", f"{steps + 1} batches", "too small a data set")
    share = waited / (waited + computed)
    cause = "too few workers, costly decoding or collating for each sample, or a slow disk"
    _require(share <= max_share, f"{share:.1%} of the time passes waiting for data", f"at most {max_share:.0%}", cause)
    return share


# --- memory


def check_detached(logged: object) -> None:
    """Check that what is kept for logging holds no graph of autograd.

    Args:
        logged: Tensors and numbers, in nested lists, tuples and dicts; or whatever keeps them: a model, an optimizer,
            an object for metrics, a function. Its attributes and closures are looked through.

    Raises:
        AssertionError: A tensor among them has a graph.
    """
    found = [held.path or "it" for held in find_held_tensors(logged) if held.tensor.grad_fn is not None]
    cause = "a loss or output that was kept as it is; keep loss.detach() or loss.item()"
    _require(not found, f"what is logged holds a graph: {_list_names(found)}", "detached tensors or numbers", cause)


def check_graphs_released(step: Step, steps: int = 3) -> None:
    """Check that steps leave no graph of autograd behind: in an attribute, a closure, a dict, or anywhere else.

    What `step` returns may have one. Graphs that were there before are not looked at, as long as steps leave them.

    Args:
        step: One training step, with all that is done around it: logging, hooks, evaluation.
        steps: How many are run.

    Raises:
        AssertionError: Afterwards there is a tensor with a graph that was not there before.
    """
    gc.collect()
    before = [one for one in _list_tensors() if one.grad_fn is not None]
    known = set(map(id, before))
    for _ in range(steps):
        step()
    _synchronize()
    gc.collect()
    kept = [one for one in _list_tensors() if one.grad_fn is not None and id(one) not in known]
    places = {id(held.tensor): held.path for held in find_held_tensors(step)}
    named = [places[id(one)] for one in kept if id(one) in places]
    where = f"in {_list_names(named)}" if named else "where step does not lead to"
    seen = f"steps leave {count_nodes(kept)} nodes of autograd's graph, held {where}"
    cause = "a loss or output that is kept as it is, keep loss.detach(), or a hook that keeps outputs"
    _require(not kept, seen, "none once a step is over", cause)


def check_memory_steady(step: Step, steps: int = 15, warmup: int = 3) -> None:
    """Steps leave no memory behind: neither tensors nor autograd's graph grow from each step to the next, nor from
    every n-th step to the next one, as where only logging or evaluation keeps something.

    A buffer that fills and is then full is steady, and so is one that is emptied again within these steps. A leak of
    every n-th step takes 3 n steps to be told from that: raise `steps` for n above 5.

    Args:
        step: One training step, with all that is done around it: logging, hooks, evaluation.
        steps: Steps that are compared.
        warmup: Steps before, in which optimizers and caches get their memory.

    Raises:
        AssertionError: One of the two grew again and again. The message says where it is held.
    """
    for _ in range(warmup):
        step()
    live = _LiveTensors()
    try:
        step()
        seen = [live.measure()]
        held_before = _measure_holders(step)
        for _ in range(steps):
            step()
            seen.append(live.measure())
        held_after = _measure_holders(step)
    finally:
        live.close()
    for at, what in enumerate(("bytes of tensors", "nodes of autograd's graph")):
        values = [figures[at] for figures in seen]
        often = _describe_growth(values)
        grown = [
            f"{holder} ({figures[at] - held_before.get(holder, (0, 0))[at]:,} more)"
            for holder, figures in held_after.items()
            if figures[at] > held_before.get(holder, (0, 0))[at]
        ]
        where = f", held in {_list_names(grown)}" if grown else ", held where step does not lead to"
        words = f"{what} grow in {often}, from {values[0]:,} to {values[-1]:,}{where}"
        cause = (
            "losses or outputs kept without detach(), total += loss, "
            "a hook that keeps outputs, or evaluation with gradients"
        )
        _require(not often, words, "as many after each step", cause)


def _describe_growth(values: list[int]) -> str:
    """Say how often a value that was measured after each step grows for good; "": it does not grow steadily."""
    steps = len(values) - 1
    # what is not given back in any later step
    lasting = list(accumulate(reversed(values), min))[::-1]
    rises = [number for number in range(1, steps + 1) if lasting[number] > lasting[number - 1]]
    if len(rises) == steps:
        return f"each of {steps} steps" if steps else ""
    if len(rises) < MIN_RISES:
        return ""
    gaps = [after - before for before, after in pairwise(rises)]
    period = max(gaps)
    # a buffer that is emptied now and then rises at the end only, one that fills up at the beginning only
    is_throughout = rises[0] <= period and steps - rises[-1] < period
    if not is_throughout:
        return ""
    if min(gaps) == period:
        return f"every {_name_ordinal(period)} of {steps} steps"
    return f"{len(rises)} of {steps} steps" if len(rises) * 2 > steps else ""


def _name_ordinal(number: int) -> str:
    suffix = {2: "nd", 3: "rd"}.get(number, "th")
    return f"{number}{suffix}"


def _measure_holders(step: Step) -> dict[str, tuple[int, int]]:
    """Measure bytes of tensors and nodes of their graphs by what holds them, as far as a step leads to it."""
    tensors = defaultdict(list)
    for held in find_held_tensors(step):
        tensors[held.holder].append(held.tensor)
    return {holder: (sum(_find_storages(some).values()), count_nodes(some)) for holder, some in tensors.items()}


class _LiveTensors:
    """Measures the tensors that are alive, without collecting what was there before as garbage each time."""

    def __init__(self) -> None:
        gc.collect()
        self._before = [weakref.ref(one) for one in _list_tensors()]
        self._is_frozen = gc.get_freeze_count() == 0
        if self._is_frozen:
            gc.freeze()

    def close(self) -> None:
        if self._is_frozen:
            gc.unfreeze()

    def measure(self) -> tuple[int, int]:
        """Measure bytes of all tensors, and count the nodes of the graphs that they keep."""
        _synchronize()
        gc.collect()
        tensors = _list_tensors()
        if self._is_frozen:
            tensors += [one for one in (reference() for reference in self._before) if one is not None]
        nodes = count_nodes(tensors)
        if torch.accelerator.is_available():
            return torch.accelerator.memory_allocated(), nodes
        return sum(_find_storages(tensors).values()), nodes


def _list_tensors() -> list[Tensor]:
    # by type: asking an object for its class may run code of its own
    return [one for one in gc.get_objects() if issubclass(type(one), Tensor)]


def _find_storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Find the memory of tensors: bytes by identity."""
    storages = [one.untyped_storage() for one in tensors if one.layout == torch.strided]
    return {storage._cdata: storage.nbytes() for storage in storages}


class _PeakOnCPU(TorchDispatchMode):
    """Follows the bytes of all tensors from operation to operation."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self._live = _find_storages(_list_tensors())
        self._held = self.peak = sum(self._live.values())

    def __torch_dispatch__(
        self,
        func: "OpOverload[..., object]",
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.layout == torch.strided:
                self._follow(one.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is gone."""
        identity = storage._cdata
        if identity in self._live:
            return
        self._live[identity] = storage.nbytes()
        self._held += storage.nbytes()
        self.peak = max(self.peak, self._held)
        weakref.finalize(storage, self._forget, identity)

    def _forget(self, identity: int) -> None:
        self._held -= self._live.pop(identity, 0)


def check_peak_memory(step: Step, max_bytes: int) -> int:
    """The tensors of a step, weights and optimizer included, take at most `max_bytes`.

    Args:
        step: One training step; call it once before, so that the optimizer has its state.
        max_bytes: Bytes, on a GPU as torch's allocator counts them, on a CPU as operations return them.

    Returns:
        The peak in bytes.

    Raises:
        AssertionError: It is higher.
    """
    if torch.accelerator.is_available():
        torch.accelerator.reset_peak_memory_stats()
        step()
        _synchronize()
        peak = torch.accelerator.max_memory_allocated()
    else:
        gc.collect()
        with _PeakOnCPU() as mode:
            step()
        peak = mode.peak
    cause = (
        "a larger batch, sequence or model, activations that were recomputed before, "
        "or something that is kept from earlier steps"
    )
    _require(peak <= max_bytes, f"tensors peak at {peak:,} bytes", f"at most {max_bytes:,}", cause)
    return peak


# --- measuring


def measure_step_seconds(step: Step, warmup: int = 5, repeat: int = 20, clock: Clock = time.perf_counter) -> float:
    """Mean seconds of a step, after a warm-up, with the device waited for before and after.

    Args:
        step: What is timed.
        warmup: Calls before, which compile kernels and fill caches.
        repeat: Calls that are timed together: the device is not waited for in between.
        clock: Tells seconds.

    Raises:
        AssertionError: The clock did not move.
    """
    for _ in range(warmup):
        step()
    _synchronize()
    started = clock()
    for _ in range(repeat):
        step()
    _synchronize()
    seconds = (clock() - started) / repeat
    _require(
        seconds > 0,
        f"{repeat} steps took {seconds:g} s",
        "more than 0",
        "a step that does nothing, or a clock that stands",
    )
    return seconds


def check_profiler_window(schedule: Callable[[int], ProfilerAction], steps: int, max_recorded: int = 10) -> None:
    """A profile records a few settled steps: not none, not all, not the first, and warmed up.

    Args:
        schedule: What torch.profiler.profile gets as `schedule`, such as torch.profiler.schedule(wait=1, warmup=1,
            active=3, repeat=1).
        steps: Steps of the whole run.
        max_recorded: Steps that may be recorded.

    Raises:
        AssertionError: The window is empty, too long, begins with the first step, or has no warm-up before it.
    """
    actions = [schedule(number) for number in range(steps)]
    recorded = [number for number, action in enumerate(actions) if action in RECORDING]
    cause = "a window behind the run's end: wait, skip_first and warmup are too long"
    _require(bool(recorded), f"none of {steps} steps is recorded", f"1 to {max_recorded}", cause)
    cause = "active times repeat is large, or repeat=0, which begins again until the run ends"
    seen = f"{len(recorded)} of {steps} steps are recorded, which slows them down and makes a large trace"
    _require(len(recorded) <= max_recorded, seen, f"at most {max_recorded}", cause)
    cause = "wait and warmup are 0; a first step compiles and allocates, so it is not typical"
    _require(recorded[0] > 0, "the first step is recorded", "a later one", cause)
    ready = (*RECORDING, ProfilerAction.WARMUP)
    began = [number for number in recorded if actions[number - 1] not in ready]
    cause = "warmup=0; what the profiler itself costs when it starts is then in the trace"
    _require(
        not began,
        f"step {began[0] if began else 0} is recorded without a warm-up before it",
        "warmup=1 at least",
        cause,
    )
