"""--record-memory-history on CPU ranks: what the file holds, when it is written, and that it changes nothing."""

import json
import re

import pytest
import torch
from support.launch import (
    DROPOUT,
    checkpoint,
    flags,
    losses,
    on_ranks,
    plan_of,
    quietly,
    same,
    train_all,
)
from support.snapshots import PLAIN, live_at_each_moment, live_blocks, protocol, read_snapshot, trace, types_in
from support.waiting import full_disk
from support.wording import wording
from torch.cuda import _memory_viz

from megatron_lite.errors import UserError
from megatron_lite.instruments.base import Instrument, Instruments, Window
from megatron_lite.instruments.build_instruments import build_memory_instruments
from megatron_lite.instruments.memory_summary import (
    HELD_ACTIVATIONS,
    HELD_OPTIMIZER,
    HELD_WEIGHTS,
    category,
    list_held_memory,
    peak,
    site,
    sum_by_category,
)
from megatron_lite.instruments.memory_tracker import StackRecorder

pytestmark = pytest.mark.usefixtures("process_group")

RECORD = "--record-memory-history --profile-step-start 3 --profile-step-end 5"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SHAPE = "--num-layers 4 --train-iters 6 --micro-batch-size 2 --seq-length 32 --max-position-embeddings 32"


def recorded(folder, *words, watchers=()) -> tuple[dict, str]:
    """(the snapshot of a run, the lines about it)."""
    path = folder / "memory" / "s.pickle"
    _, out = quietly(flags(SHAPE, RECORD, *DROPOUT, *words, "--memory-snapshot-path", path), folder / "run", watchers)
    return read_snapshot(path), "\n".join(re.findall("^memory snapshot.*", out, re.MULTILINE))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return folder, *recorded(folder)


def category_sizes(snapshot: dict) -> dict[str, int]:
    return sum_by_category(list_held_memory(snapshot))


def tags(snapshot: dict) -> set[str]:
    return {event["user_metadata"] for event in trace(snapshot) if event["action"] == "alloc"}


# --- the file


def test_the_file_is_plain_and_whole_and_torchs_own_functions_read_it(plain):
    """In a protocol that viewers read; memory is handed out once, and the end is what segments show."""
    folder, snapshot, _ = plain
    path = folder / "memory" / "s.pickle"
    assert protocol(path) == 4 and types_in(snapshot) <= set(PLAIN)
    assert path.stat().st_size < 100 * len(trace(snapshot)) + 200_000  # stacks are shared, not repeated
    assert [p.name for p in path.parent.iterdir()] == ["s.pickle"]
    assert len(list(live_at_each_moment(snapshot))) == len(trace(snapshot)) > 500
    times = [event["time_us"] for event in trace(snapshot)]
    assert times == sorted(times)
    text = _memory_viz.trace(snapshot)
    assert text.count("= empty_cache") == 0 and "segsum" not in text
    assert "total_reserved" in _memory_viz.segsum(snapshot)
    assert "<html>" in _memory_viz.trace_plot(snapshot) and "<html>" in _memory_viz.segment_plot(snapshot)


def test_the_window_is_in_it_and_nothing_else(plain):
    _, snapshot, line = plain
    assert {tag.split("/")[0] for tag in tags(snapshot)} == {"step 3", "step 4"}
    steps = [a for a in snapshot["external_annotations"] if a["name"] in ("step 3", "step 4")]
    inside = [f"{a['name']} {a['stage']}" for a in steps]
    assert inside == ["step 3 START", "step 3 END", "step 4 START", "step 4 END"]
    assert steps[0]["time_us"] <= trace(snapshot)[0]["time_us"] <= trace(snapshot)[-1]["time_us"]
    assert wording("instruments/holds-events-of-steps", f"{len(trace(snapshot)):,}", 3, 4) in line


def test_weights_and_optimizer_states_are_known_to_the_byte_and_by_their_code(plain):
    folder, snapshot, _ = plain
    quietly(flags(SHAPE, *DROPOUT, "--train-iters 1 --save", folder / "save"), folder / "weights")
    stored = checkpoint(folder / "save", 1)
    parameters = sum(value.numel() for name, value in stored.items() if name.startswith("model."))
    sizes, held = category_sizes(snapshot), list_held_memory(snapshot)
    assert sizes[HELD_WEIGHTS] == 4 * parameters
    states = [piece.size for piece in held if site(piece.frames).startswith("_make_adam (optim/optimizer.py:")]
    assert sum(size for size in states if size > 4) == 2 * 4 * parameters  # the others count steps
    assert 0 <= sizes[HELD_OPTIMIZER] - 2 * 4 * parameters < 2000  # step counts, the learning rate's table
    for piece in held:
        is_filled = any(frame["name"] == "fill_parameters" for frame in piece.frames)
        assert is_filled == (category(piece) == HELD_WEIGHTS)
    assert sizes.get(HELD_ACTIVATIONS, 0) == 0 and sum(sizes.values()) == sum(live_blocks(snapshot).values())


# --- the story it tells


def test_activations_climb_to_the_loss_and_fall(plain):
    _, snapshot, line = plain
    live = [(event["user_metadata"], at) for event, at in live_at_each_moment(snapshot) if event["action"] == "alloc"]
    highest, found = peak(snapshot), tags(snapshot)
    assert highest.size == max(total for _, total in live)
    # where GELU works in pieces, so small a model's last MLP may hold more than the loss
    where = r"step [34]/(forward|backward)/(GPT|decoder\.layers\.3\.mlp)"
    assert re.fullmatch(where, highest.tag) and "of step" in line
    for phase in ("forward", "backward"):  # up through the layers, down through them backwards
        starts = [f"step 3/{phase}/decoder.layers.{n}." for n in range(4)]
        layers = [max(total for tag, total in live if tag.startswith(start)) for start in starts]
        assert layers == sorted(layers)
        assert {f"{start}self_attention" for start in starts} <= found and f"step 4/{phase}/GPT" in found
    assert "step 3/optimizer_step" in found and not any("/recompute" in tag for tag in found)


def test_the_peak_is_what_torchs_own_allocator_counted(tmp_path, plain):
    """torch.profiler's running total of the same steps, in a run that is not recorded."""
    profile = f"--use-pytorch-profiler --pytorch-profiler-collect-memory --no-profile-gzip {RECORD.partition(' ')[2]}"
    quietly(flags(SHAPE, *DROPOUT, profile, "--tensorboard-dir", tmp_path), tmp_path / "run")
    [path] = tmp_path.glob("*.pt.trace.json")
    counted = [event["args"] for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "[memory]"]
    start = counted[0]["Total Allocated"] - counted[0]["Bytes"]
    moments = list(live_at_each_moment(plain[1]))
    ours = peak(plain[1]).size - (moments[0][1] - moments[0][0]["size"])
    assert abs(ours - (max(event["Total Allocated"] for event in counted) - start)) <= 64  # a scalar or two


def test_recomputing_lowers_the_peak_and_shows_itself(tmp_path, plain):
    snapshot, _ = recorded(tmp_path, RECOMPUTE)
    base = sum(live_blocks(snapshot).values())
    assert peak(snapshot).size - base < 0.6 * (peak(plain[1]).size - base)
    # recomputing leaves the last module early, and the next must not inherit its name
    for phase in ("recompute", "backward"):
        for module in ("self_attention", "mlp.linear_fc1", "input_layernorm"):
            assert {f"step 3/{phase}/decoder.layers.{n}.{module}" for n in range(4)} <= tags(snapshot)
    assert len(list(live_at_each_moment(snapshot))) > 500


@pytest.mark.parametrize(
    "words", [RECOMPUTE, "--num-workers 1", *(pytest.param(words, marks=pytest.mark.slow) for words in ("", "--bf16"))]
)
def test_recording_changes_no_bit(tmp_path, words):
    argv = flags(SHAPE, *DROPOUT, "--eval-interval 2 --eval-iters 1", words)
    quietly([*argv, "--save", str(tmp_path / "off")], tmp_path / "off")
    window = "--record-memory-history --profile-step-start 1" if "workers" in words else RECORD
    recording = [*window.split(), "--memory-snapshot-path", str(tmp_path / "s"), "--save", str(tmp_path / "on")]
    quietly([*argv, *recording], tmp_path / "on")
    assert losses(tmp_path / "off") == losses(tmp_path / "on") and (tmp_path / "s").exists()
    one, other = (checkpoint(tmp_path / name, 6) for name in ("off", "on"))
    assert one.keys() == other.keys() and all(same(one[key], other[key]) for key in one if key != "record")


# --- when it is written


SHORT = {
    "--exit-interval 3": ("step 3", "events of step 3 of this run"),
    "--train-iters 3": ("step 3", "events of step 3 of this run"),
    "--train-iters 2": ("setup", "events of setup, since the run ended before step 3"),
}


@pytest.mark.parametrize("words", SHORT)
def test_a_run_that_ends_inside_the_window_or_before_writes_what_it_has(tmp_path, plain, words):
    snapshot, line = recorded(tmp_path, words)
    assert {tag.split("/")[0] for tag in tags(snapshot)} == {SHORT[words][0]} and SHORT[words][1] in line
    assert (
        category_sizes(snapshot)[HELD_WEIGHTS] == category_sizes(plain[1])[HELD_WEIGHTS]
    )  # of the step, not of the run's end
    assert len(list(live_at_each_moment(snapshot))) == len(trace(snapshot))


class Fails(Instrument):
    def begin(self, step):
        self.step = step

    def begin_phase(self, name):
        if self.step == 4 and name == "backward":
            raise KeyboardInterrupt  # as from the training itself: no Exception, so no instrument's failure


def test_a_failure_inside_the_window_leaves_the_file(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        recorded(tmp_path, watchers=[Fails()])
    snapshot = read_snapshot(tmp_path / "memory" / "s.pickle")
    assert {tag.split("/")[0] for tag in tags(snapshot)} == {"step 3", "step 4"}
    assert not any(tag.startswith("step 4/backward") for tag in tags(snapshot))
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_window_asked_for_later_has_a_file_of_its_own(tmp_path):
    plan = plan_of(flags(RECORD, "--memory-snapshot-path", tmp_path / "s.pickle"))
    window, said, kept = Window(range(3, 5)), [], []
    with Instruments(build_memory_instruments(plan, window, said.append), said.append) as watching:
        for step in range(1, 12):
            if step == 6:
                window.steps, window.on_demand = range(8, 10), True
            with watching.step(step), watching.phase("forward"):
                kept.append(torch.ones(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.pickle", "s_steps8-9.pickle"]
    for name, steps in (("s.pickle", (3, 4)), ("s_steps8-9.pickle", (8, 9))):
        allocated = [event for event in trace(read_snapshot(tmp_path / name)) if event["action"] == "alloc"]
        made = [(event["user_metadata"], event["size"]) for event in allocated]
        assert made == [(f"step {step}/forward", 4 * step) for step in steps]
    assert len(said) == 2 and wording("instruments/steps-of-this-run", 8, 9) in said[1]


def test_each_of_several_ranks_has_its_file(tmp_path):
    argv = {
        name: flags(SHAPE, RECORD, *DROPOUT, f"--profile-ranks {ranks} --memory-snapshot-path {name}/deep/s.pickle")
        for name, ranks in (("all", "-1"), ("one", "1"))
    }
    (tmp_path / "argv.json").write_text(json.dumps(argv))
    outputs = on_ranks(train_all, tmp_path, str(tmp_path / "argv.json"))
    assert sorted(p.name for p in (tmp_path / "all/deep").iterdir()) == ["s_rank0.pickle", "s_rank1.pickle"]
    assert [p.name for p in (tmp_path / "one/deep").iterdir()] == ["s.pickle"]
    assert [output.count("memory snapshot: ") for output in outputs] == [1, 2]
    assert not any("Exception ignored" in output for output in outputs)
    sizes = [category_sizes(read_snapshot(tmp_path / "all/deep" / f"s_rank{rank}.pickle")) for rank in (0, 1)]
    assert sizes[0] == sizes[1]  # buckets that C++ made and freed on other threads included


# --- what may go wrong


@pytest.mark.parametrize(("kept_steps", "words"), [(2.5, "steps 4-5"), (1.5, "step 5"), (0.3, "the end of step 5")])
def test_a_small_ring_keeps_the_newest_events_and_all_stacks_of_weights(tmp_path, plain, kept_steps, words):
    """And what is left of the window is said."""

    def count(snapshot: dict) -> int:
        return len([e for e in trace(snapshot) if e["action"] in ("alloc", "free_completed")])

    kept = int(kept_steps * count(plain[1]) / 2)
    snapshot, line = recorded(tmp_path, f"--profile-step-end 6 --memory-history-events {kept}")
    assert count(snapshot) == kept and len(list(live_at_each_moment(snapshot))) == len(trace(snapshot))
    assert f" events of {words}, peak " in line
    assert wording("instruments/earlier-ones-were-dropped", "--memory-history-events") in line
    assert category_sizes(snapshot) == category_sizes(plain[1])
    assert all(piece.frames for piece in list_held_memory(snapshot))


def test_a_full_disk_costs_the_file_only(tmp_path, plain):
    with full_disk(20_000):
        argv = flags(SHAPE, RECORD, *DROPOUT, "--memory-snapshot-path", tmp_path / "s.pickle")
        _, out = quietly(argv, tmp_path / "run")
    lines = [line for line in out.splitlines() if "memory" in line]
    lost = f"--memory-snapshot-path: {tmp_path / 's.pickle'} could not be written (File too large) and is lost; "
    assert lines == [lost + wording("instruments/training-goes-on")]
    assert losses(tmp_path / "run") == losses(plain[0] / "run") and [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("frees", [False, True], ids=["at an allocation", "at the end of one"])
def test_a_tracker_that_fails_says_so_and_training_goes_on(tmp_path, plain, monkeypatch, frees):
    capture, calls = StackRecorder.capture, []

    def failing(self, operation=""):
        calls.append(operation)
        if len(calls) > 300 and frees is not bool(operation):
            raise ValueError("no stack")
        return capture(self, operation)

    monkeypatch.setattr(StackRecorder, "capture", failing)
    _, line = recorded(tmp_path)
    assert line.count(wording("instruments/recording-stopped-early-no")) == 1
    assert losses(tmp_path / "run") == losses(plain[0] / "run")


def test_a_folder_in_the_files_place_is_refused(tmp_path):
    told = rf"^--memory-snapshot-path {tmp_path} is a folder; name a file in it, such as "
    with pytest.raises(UserError, match=told):
        quietly(flags(SHAPE, RECORD, "--memory-snapshot-path", tmp_path), tmp_path / "run")
