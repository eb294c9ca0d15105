"""Operations on paper: what lives when, on chains small enough to count by hand."""

from megatron_lite.estimate.liveness import Op, Sized, Tape

WEIGHT = Sized("gradients", "gradients", 1, "parameters", is_element=True)


def sized(num_bytes: int) -> Sized:
    return Sized("activations", "rows", num_bytes, f"{num_bytes} bytes")


# in (10) -> wide (40), kept with its input -> out (10), a product with the kept wide
CHAIN = (
    Op("up", ("in",), (("wide", sized(40)),), ("in",), weights=4),
    Op("curve", ("wide",), (("curved", sized(40)),), ("wide",)),
    Op("down", ("curved",), (("out", sized(10)),), ("curved",), weights=4),
)


def run(ops: tuple[Op, ...], stays: bool = False, again: bool = False) -> Tape:
    tape = Tape(ops, WEIGHT, stays)
    tape.begin("in", sized(10))
    tape.forward(again)
    return tape


def test_forward_keeps_what_backward_needs():
    tape = run(CHAIN)
    assert tape.live.num_bytes == 10 + 40 + 40
    assert (tape.live.most_bytes, tape.live.most_in) == (100, "down")


def test_backward_lets_go_of_it_on_its_way():
    tape = run(CHAIN)
    tape.live.forget_most()
    tape.backward("out", sized(10))
    # the gradients of out and of curved, and the last operation's weights, while nothing is gone yet: 90 + 10 + 40 + 4;
    # then curved and out's gradient are gone: 50 + 40 + 40
    assert (tape.live.most_bytes, tape.live.most_in) == (144, "down")
    assert tape.live.num_bytes == 10  # in's gradient


def test_weights_gradients_stay_where_nothing_else_holds_them():
    tape = run(CHAIN, stays=True)
    tape.backward("out", sized(10))
    assert tape.live.num_bytes == 10 + 2 * 4


def test_recomputation_stops_once_all_is_there():
    """The last product need not run: what it keeps is its input."""
    tape = run(CHAIN, again=True)
    assert (tape.live.most_bytes, tape.live.num_bytes) == (90, 90)
    mask = Op("drop", ("out",), (("dropped", sized(10)),), keeps_too=(sized(5),))
    assert run((*CHAIN, mask), again=True).live.most_bytes == 90 + 10 + 10 + 5


def test_views_share_memory_and_their_gradients_do_not():
    halves = (
        Op("split", ("in",), (("left", sized(5)),), view=True),
        Op("split", ("in",), (("right", sized(5)),), view=True),
        Op("mix", ("left", "right"), (("out", sized(5)),), ("left", "right")),
    )
    tape = run(halves)
    assert (tape.live.num_bytes, tape.live.most_bytes) == (10, 15)
    tape.live.forget_most()
    tape.backward("out", sized(5))
    # at first in, and the gradients of out and of both halves; each half's then becomes one of the whole, of 10, and the
    # second is added to the first
    assert (tape.live.most_bytes, tape.live.num_bytes) == (10 + 3 * 5, 10)


def test_a_sum_hands_its_gradient_on():
    tape = run(
        (
            Op("curve", ("in",), (("curved", sized(10)),), ("in",)),
            Op("add", ("in", "curved"), (("out", sized(10)),), passes=True),
        )
    )
    assert tape.live.num_bytes == 10
    tape.live.forget_most()
    tape.backward("out", sized(10))
    assert (tape.live.most_bytes, tape.live.num_bytes) == (30, 10)


def test_what_variables_hold_lives_until_they_are_gone():
    loose = tuple(Op(op.name, op.reads, op.makes) for op in CHAIN)
    held = (*loose[:2], Op("down", ("curved",), (("out", sized(10)),), holds=("in", "wide")))
    assert (run(loose).live.most_bytes, run(held).live.most_bytes) == (40 + 40, 10 + 40 + 40 + 10)
    assert run(loose).live.num_bytes == run(held).live.num_bytes == 0
