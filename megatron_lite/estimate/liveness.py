"""Operations and their tensors on paper: what each makes, what it keeps for backward, and what lives at the same time.

Memory follows torch's rules: a result lives as long as a variable or a backward holds it; backward runs in the reverse
order, makes a gradient for each input, and lets go of what its operation kept as soon as it is through.
"""

from collections import Counter
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sized:
    """Memory of one tensor, or of one element of many. Equal ones are counted, not told apart."""

    category: str  # of memory_categories
    name: str  # of the ledger's row
    num_bytes: int
    formula: str  # with the numbers put in; of an element: what there are many of, "parameters"
    is_element: bool = False


@dataclass(frozen=True)
class Op:
    """One operation of forward with its backward. Values have names.

    view: the result lies in the memory of the first input. passes: backward hands the result's gradient on as it is.
    """

    name: str
    reads: tuple[str, ...]  # values that get a gradient
    makes: tuple[tuple[str, Sized], ...]
    keeps: tuple[str, ...] = ()  # values that backward needs
    keeps_too: tuple[Sized, ...] = ()  # what nothing but backward needs: masks, statistics
    weights: int = 0  # elements of the parameters whose gradients backward makes
    view: bool = False
    passes: bool = False
    holds: tuple[str, ...] = ()  # values that Python's variables hold until this operation is through
    scratch: tuple[Sized, ...] = ()  # what lives only while its forward or backward runs, before there are results
    forward_scratch: tuple[Sized, ...] = ()  # the same of forward alone, beside the results
    backward_scratch: tuple[Sized, ...] = ()


class Live:
    """What lives now, and the highest that it ever was."""

    def __init__(self):
        self.tensors: Counter[Sized] = Counter()
        self.num_bytes = self.most_bytes = 0
        self.most: Counter[Sized] = Counter()
        self.most_in = ""  # name of the operation

    def add(self, sized: Sized, op: str, times: int = 1):
        self.tensors[sized] += times
        self.num_bytes += times * sized.num_bytes
        if self.num_bytes > self.most_bytes:
            self.most_bytes, self.most, self.most_in = self.num_bytes, +self.tensors, op

    def remove(self, sized: Sized, times: int = 1):
        self.tensors[sized] -= times
        self.num_bytes -= times * sized.num_bytes

    def forget_most(self):
        """The highest from here on."""
        self.most_bytes, self.most, self.most_in = self.num_bytes, +self.tensors, ""


NO_WEIGHTS = Sized("gradients", "gradients", 0, "parameters", is_element=True)  # for who does not ask about gradients


@dataclass(eq=False)
class _Storage:
    """A tensor's memory, which views of it share."""

    sized: Sized
    holders: int = 0


class Tape:
    """Runs operations forward and backward. The gradient of a parameter's element is `weight`; it lives on if `stays`."""

    def __init__(self, ops: tuple[Op, ...], weight: Sized = NO_WEIGHTS, stays: bool = False):
        self.live = Live()
        self._ops, self._weight, self._stays = ops, weight, stays
        self._values: dict[str, _Storage] = {}
        self._sizes: dict[str, Sized] = {}
        self._kept: list[tuple[Op, list[_Storage]]] = []

    def begin(self, name: str, sized: Sized, counted: bool = True, held: bool = False):
        """A value that comes from outside. Not counted if it is elsewhere; held if it lives until backward is through."""
        self._bind(name, sized, _Storage(sized if counted else _uncounted(sized)), "")
        if held:
            self._hold(self._values[name], "")

    def forward(self, again: bool = False):
        """All operations. again: as torch's recomputation does, only until all is there that backward needs."""
        last_use = {name: at for at, op in enumerate(self._ops) for name in (*op.reads, *op.holds)}
        last_kept = max((at for at, op in enumerate(self._ops) if op.keeps or op.keeps_too), default=-1)
        for at, op in enumerate(self._ops):
            if again and at > last_kept:
                break
            kept = [self._hold(self._values[name], op.name) for name in op.keeps if name in self._values]
            self._kept.append((op, kept))
            if again and at == last_kept and len(kept) == len(op.keeps) and not op.keeps_too:
                break  # inputs are kept before an operation runs
            self._run(op, kept)
            for name in [name for name in self._values if last_use.get(name, len(self._ops)) <= at]:
                self._let_go(self._values.pop(name))
        while self._values:
            self._let_go(self._values.popitem()[1])

    def backward(self, result: str, sized: Sized, counted: bool = True):
        """From the result's gradient, of the size given, to the gradients of the values that came from outside."""
        gradient = gradient_of(sized)
        gradients = {result: self._hold(_Storage(gradient if counted else _uncounted(gradient)), "")}
        while self._kept:
            op, kept = self._kept.pop()
            incoming = [gradients.pop(name) for name, _ in op.makes if name in gradients]
            made = [(name, incoming[0] if op.passes else _Storage(gradient_of(self._sizes[name]))) for name in op.reads]
            self._pass_over(op.scratch, op.name)
            for _, storage in made:
                self._hold(storage, op.name)
            self.live.add(self._weight, op.name, op.weights)
            self._pass_over(op.backward_scratch, op.name)
            for storage in (*incoming, *kept):
                self._let_go(storage)
            for name, storage in made:  # a second gradient of one value is added to the first
                if gradients.setdefault(name, storage) is not storage:
                    self._let_go(storage)
            if not self._stays:
                self.live.remove(self._weight, op.weights)

    def _pass_over(self, scratch: tuple[Sized, ...], op: str):
        for sized in scratch:
            self.live.add(sized, op)
        for sized in scratch:
            self.live.remove(sized)

    def _run(self, op: Op, kept: list[_Storage]):
        self._pass_over(op.scratch, op.name)
        for name, sized in op.makes:
            self._bind(name, sized, self._values[op.reads[0]] if op.view else _Storage(sized), op.name)
            if name in op.keeps:
                kept.append(self._hold(self._values[name], op.name))
        kept += [self._hold(_Storage(sized), op.name) for sized in op.keeps_too]
        self._pass_over(op.forward_scratch, op.name)

    def _bind(self, name: str, sized: Sized, storage: _Storage, op: str):
        self._values[name], self._sizes[name] = self._hold(storage, op), sized

    def _hold(self, storage: _Storage, op: str) -> _Storage:
        storage.holders += 1
        if storage.holders == 1:
            self.live.add(storage.sized, op)
        return storage

    def _let_go(self, storage: _Storage):
        storage.holders -= 1
        if not storage.holders:
            self.live.remove(storage.sized)


def gradient_of(sized: Sized) -> Sized:
    """Of a value."""
    return replace(sized, category="workspace", name="gradients of activations")


def _uncounted(sized: Sized) -> Sized:
    return replace(sized, num_bytes=0)
