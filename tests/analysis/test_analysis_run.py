"""A run folder, read: known answers from made files, damaged and foreign ones, and runs of the trainer itself."""

import json
import math
import os
import re
import time
import tracemalloc
from random import Random

import numpy as np
import pytest
from support.run_maker import MIB, PLAN, RECORD, SHAPE, folder, ranks, step
from support.wording import wording

from megatron_lite.analysis.run import step_lines
from megatron_lite.analysis.run.read import read_run
from megatron_lite.analysis.run.step_lines import MIN_RANK_LINES, StepLines
from megatron_lite.config.model_size import step_flops
from megatron_lite.config.shape import ModelShape
from megatron_lite.errors import UserError
from megatron_lite.process_state import identity, pid_space
from megatron_lite.shared_files import open_foreign


def test_ordinary_steps_are_apart_from_all_others(tmp_path):
    lines = [
        step(1, 100),
        step(2, 10),
        step(3, 12),
        step(4, 5e6 + 10, phases_ms={"eval": 5e6}),  # longer than an hour
        step(5, 60, phases_ms={"save": 49.0}),
        step(6, 15, beside_profile=True),
        step(7, 20, profiled=True),
        step(8, 22, profiled=True),
        step(9, 300, compiling=True),
        step(10, 11),
    ]
    run = read_run(folder(tmp_path, lines))
    assert [at for at, plain in zip(run.iterations, run.ordinary) if plain] == [2, 3, 10]
    assert (run.first_step_ms, run.steady_step_ms, run.profiled_step_ms) == (100, 11, 21)
    # of 10, 12, 10 without evaluating and 60 - 49, as the trainer's own line has it
    assert run.before_profile_ms == 10.5
    assert run.profiler_slowdown == 21 / 10.5
    assert [*run.training_ms[3:5], *run.step_ms[3:5]] == [10, 11, 5e6 + 10, 60]
    flags = [np.flatnonzero(which).tolist() for which in (run.evaluating, run.saving, run.compiling, run.profiled)]
    assert flags == [[3], [4], [8], [6, 7]]
    assert run.phases_ms["forward"][:4].tolist() == [5, 5, 5, 0]


def test_the_profilers_slowdown_takes_three_steps_before_and_names_its_rank(tmp_path):
    def slowdown(steps_before: int) -> float | None:
        window = [step(n, 20, profiled=True) for n in (steps_before + 2, steps_before + 3)]
        return read_run(folder(tmp_path, [*(step(n) for n in range(1, steps_before + 2)), *window])).profiler_slowdown

    assert [slowdown(before) for before in (0, 1, 2, 3)] == [None, None, None, 2.0]
    for world, words in (({"size": 2, "rank": 1}, " on rank 1"), ({"size": 1, "rank": 0}, ""), ({"size": 2}, "")):
        assert read_run(folder(tmp_path, [step(1)], RECORD | {"plan": PLAN | {"world": world}})).on_rank == words


def test_speed_and_both_conventions_of_model_flops(tmp_path):
    run = read_run(folder(tmp_path, [step(1, 500), *(step(n, 10) for n in range(2, 12))]))
    assert run.tokens_per_second == pytest.approx(4 * 16 / 0.010)
    shape = ModelShape(**SHAPE)
    for mfu, tflops, causal in ((run.mfu_causal, run.model_tflops, True), (run.mfu_full, run.model_tflops_full, False)):
        assert tflops == pytest.approx(step_flops(shape, 4, causal) / 0.010 / 2 / 1e12)
        assert mfu == pytest.approx(tflops / 0.5)
    assert run.step_spread_ms == 0


def test_what_the_folder_does_not_say_is_none_and_told(tmp_path):
    bare = {"schema": 1, "plan": {"args": {}}, "hardware": {"device": "cpu", "peak_tflops": None}}
    run = read_run(folder(tmp_path, [step(1), step(2, batch_size="x", loss=None, loss_scale=1e400)], bare))
    unknown = (run.tokens_per_second, run.mfu_causal, run.mfu_full, run.model_tflops, run.ranks, run.world_size)
    assert unknown == (None,) * 6
    assert math.isnan(run.losses[1]) and math.isnan(run.batch_sizes[1]) and math.isnan(run.loss_scale[1])
    assert run.status == "unknown" and run.args == {} and wording("analysis/shape-is-unknown") in run.notes[0]


def test_scale_and_skipped_steps_and_a_resumed_run_s_last_start(tmp_path):
    lines = [step(1, loss_scale=8.0), step(2, loss_scale=4.0, skipped=True, loss=None), step(3, loss_scale=2.0)]
    run = read_run(folder(tmp_path, lines))
    assert [*run.loss_scale, *run.skipped] == [8, 4, 2, False, True, False]
    lines = [step(1, 50), step(2, 50), ranks(1, 2, [50, 50]), step(1, 99, 3), step(2, 10, 4), ranks(3, 4, [10, 11])]
    run = read_run(folder(tmp_path, lines))
    assert (*run.iterations, run.first_step_ms, run.starts, *run.ranks.intervals.last) == (3, 4, 99, 2, 4)
    assert run.notes == (wording("analysis/run-was-started-times", 2, 3, 4),)


def test_a_start_without_steps_is_not_taken_for_the_one_before(tmp_path):
    later = RECORD | {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() + 100))}
    assert wording("analysis/that-start-has-no") in read_run(folder(tmp_path, [step(1), step(2)], later)).notes[0]


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({}, "running"),
        ({"started_ticks": 1}, "killed or lost: its process is gone"),
        ({"host": "elsewhere"}, "running, or killed"),
    ],
)
@pytest.mark.skipif(pid_space() is None, reason="only Linux tells of processes")
def test_a_run_without_an_end_runs_or_was_killed(tmp_path, more, status):
    record = RECORD | {"status": "running", "process": identity() | more}
    assert read_run(folder(tmp_path, [step(1), step(2)], record)).status == status
    assert read_run(folder(tmp_path, [step(1)], record | {"process": "?"})).status == wording(
        "analysis/running-or-killed"
    )
    assert read_run(folder(tmp_path, [step(1)], record | {"status": "finished"})).status == "finished"


def test_ranks_that_died_are_told(tmp_path):
    path = folder(tmp_path, [step(1), step(2)]) / "ranks.json"
    damaged = '{"verdict": " rank 1 died ", "ranks": {"0": {"step": "x"}, "1": 3}}'
    for told in ("{", '{"verdict": 3}', "[1]", '{"verdict": "rank 1 died", "ranks": {}}', damaged):
        path.write_text(told)
        assert read_run(tmp_path).verdict_on_ranks == ("rank 1 died" if "died" in told else "")
    os.utime(path, (0, 0))
    assert read_run(tmp_path).verdict_on_ranks == "", "of an earlier start"


@pytest.mark.parametrize(
    ("lines", "record", "said"),
    [
        (
            [step(1), "garbage\n", "[1, 2]\n", step(2), '{"iteration": 3, "st'],
            RECORD,
            ["2 lines", "line 2, 3", "ends within a line"],
        ),
        ([step(1), step(2)], None, ["there is no run.json"]),
        ([step(1), step(2)], '{"schema": 1, "plan"', ["run.json is damaged"]),
        ([step(1), step(2)], "[]", ["run.json is damaged"]),
        ([step(1), step(2)], {"schema": 7, "plan": PLAN}, ["has schema 7"]),
        ([step(1), step(2)], {"schema": 1, "plan": "none"}, ["holds no plan"]),
        ([step(1), step(2)], RECORD | {"plan": PLAN | {"world": {"size": 2**20 + 1}}}, ["plan.world.size"]),
        (None, RECORD, ["there is no steps.jsonl"]),
        ([], RECORD, ["holds no step"]),
        ([step(1), step(2, ms=-1), step(3, ms=float("nan")), step(4, ms="9"), step("5"), step(6)], RECORD, ["4 lines"]),
        ([step(1), step(2, profiled=True)], RECORD, ["there is no steady step time"]),
    ],
)
def test_damage_is_a_named_gap(tmp_path, lines, record, said):
    notes = " ".join(read_run(folder(tmp_path, lines, record)).notes)
    assert all(text in notes for text in said), notes


@pytest.mark.parametrize(("lines", "record"), [(None, None), (["no json"], None), ([], "{"), (None, '"text"')])
def test_what_is_no_run_is_one_line(tmp_path, lines, record):
    for path in (folder(tmp_path, lines, record), tmp_path / "nowhere"):
        with pytest.raises(UserError, match="no run of megatron_lite can be read here") as raised:
            read_run(path)
        assert len(raised.value.lines) == 1 and "\n" not in raised.value.lines[0]


def test_files_cut_anywhere_raise_nothing_else(tmp_path):
    whole = folder(tmp_path, [step(1), step(2), ranks(1, 2, [1.0, None], phases_ms={"forward": [1.0, 2.0]})])
    contents = {name: (whole / name).read_bytes() for name in ("run.json", "steps.jsonl")}
    for name, data in contents.items():
        for length in range(0, len(data), 19):
            (whole / name).write_bytes(data[:length] + b"\xff\x00" * (length % 2))
            try:
                read_run(whole)
            except UserError as error:
                assert len(error.lines) == 1
            (whole / name).write_bytes(data)


def test_ranks_are_medians_of_lines_with_ordinary_steps(tmp_path):
    lines = [
        step(1, 99),
        *(step(n) for n in range(2, 5)),
        step(5, profiled=True),
        step(6, profiled=True),
        *(step(n) for n in (7, 8)),
        ranks(1, 1, [99, 99]),
        ranks(2, 4, [10, 20], phases_ms={"forward": [4, 8], "odd": [1]}, host_memory_bytes=[5, 6]),
        ranks(5, 6, [70, 70]),
        ranks(7, 8, [12, None], phases_ms={"forward": [6, 10]}),
        {"ranks": {"iterations": "x"}},
        {"ranks": 3},
    ]
    run = read_run(folder(tmp_path, lines))
    assert run.ranks.step_ms == (11, 20) and run.ranks.phases_ms == {"forward": (5, 9)}
    assert [*run.ranks.intervals.first, *run.ranks.intervals.last] == [2, 7, 4, 8]
    assert [*run.ranks.host_memory_bytes[1]] == [5, 6] and len(run.ranks.host_memory_bytes) == 4
    assert run.ranks.gpu_ms == () and run.ranks.own_ms("forward") == (5, 9) and "2 lines" in run.notes[0]


def test_long_runs_are_read_in_little_memory(tmp_path):
    """Steps take some 80 bytes each, and a batch of lines; as objects they took 3,000."""
    phases = {name: 1.25 for name in ("data", "forward", "backward", "grad_sync", "optimizer_step", "log")}
    number, lines = 40_000, []
    for at in range(1, number + 1):
        lines.append(step(at, 10 + at / number, loss=9 - at / number, phases_ms=phases | {"forward": at % 7 + 0.125}))
        if at % 100 == 0:
            lines.append(ranks(at - 99, at, [10.5] * 8, phases_ms={name: [1.25] * 8 for name in phases}))
    path = folder(tmp_path, lines)
    del lines
    tracemalloc.start()
    run = read_run(path)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert run.steps == number and run.phases_ms["forward"][-1] == number % 7 + 0.125
    assert run.steady_step_ms == pytest.approx(10.5, abs=0.01) and len(run.ranks.intervals.last) == number / 100
    assert kept < 120 * number and peak < 240 * number


def test_a_line_without_an_end_is_not_held(tmp_path, monkeypatch):
    """A file with a hole of many GiB is one line."""
    monkeypatch.setattr(step_lines, "MAX_STEP_LINE_BYTES", 2**14)
    path = folder(tmp_path, [step(1), step(2)]) / "steps.jsonl"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 2**22)
    lines = StepLines(path)
    tracemalloc.start()
    lines.read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(lines.read_steps().iterations) == 2 and lines.unread and peak < 2**20


def tell(lines: StepLines) -> dict:
    """All that was read, as texts: NaN is like itself, and nothing of the arrays is held."""
    found = {"starts": lines.starts, "cut": lines.cut, "unread": lines.unread}
    found |= {
        name: str(np.asarray(column).tolist())
        for name, column in vars(lines.read_steps()).items()
        if name[-9:] != "phases_ms"
    }
    found |= {name: str(ms.tolist()) for name, ms in lines.read_steps().phases_ms.items() if ms.any()}
    for recent in (False, True):
        said = lines.read_ranks(recent)
        found[f"ranks {recent}"] = said and {
            name: str(np.asarray(table).tolist()) for name, table in vars(said).items()
        }
    return found


def states_of_a_growing_file(random) -> list[bytes]:
    """steps.jsonl of two starts of a trainer on two ranks, which writes ahead; then another run's; looked at at any time."""
    text, states = b"", []
    for _, number in (("first", 30), ("resumed", 25)):
        ahead = text
        for at in range(1, number + 1):
            loss, more = (
                random.uniform(1, 9),
                {"phases_ms": {"forward": at / 8} | ({"save": 9.0} if at % 9 == 0 else {})},
            )
            ahead += json.dumps(step(at, loss=loss / 2, local=True, **more)).encode() + b"\n"
            states += [ahead[: random.randint(len(text), len(ahead))], ahead]
            if at % 7 == 0 or at == number:
                first = at - (at - 1) % 7
                for one in range(first, at + 1):
                    text += json.dumps(step(one, loss=loss, skipped=one % 5 == 0)).encode() + b"\n"
                text += json.dumps(ranks(first, at, [10.0, at])).encode() + b"\n" + (b"garbage\n" if at == 14 else b"")
                ahead = text
                states += [text[: random.randint(0, len(text))] if random.random() < 0.1 else text, text]
    another = b"".join(json.dumps(step(at, ms=3.0)).encode() + b"\n" for at in range(1, 200))
    return [*states, another[: len(another) // 2], another]


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({}, "full"),
        ({"settings": {"recompute_granularity": "selective"}}, "selective"),
        ({"settings": {}}, None),
        ({"args": [], "settings": {}}, None),
        ({"args": {"model": 3}}, None),
    ],
)
def test_a_run_without_settings_has_those_of_its_flags(tmp_path, plan, expected):
    """Runs recorded before there were settings: what they set does not count as left out."""
    before = {name: part for name, part in PLAN.items() if name != "settings"}
    before["args"] = {"model": {"recompute_granularity": "full", "hidden_size": 32}}
    run = read_run(folder(tmp_path, [step(1)], RECORD | {"plan": before | plan}))
    assert run.plan.settings.recompute_granularity == expected


@pytest.mark.parametrize("seed", range(5))
def test_a_growing_file_is_read_as_if_at_once(tmp_path, seed):
    random = Random(seed)
    path, states = tmp_path / "steps.jsonl", states_of_a_growing_file(random)
    path.write_bytes(b"")
    followed = StepLines(path)
    for state in states:
        path.write_bytes(state)
        if random.random() < 0.5:
            once = StepLines(path)
            once.read()
            followed.read()
            assert tell(followed) == tell(once)
            assert followed.read() is False


def test_only_new_lines_are_read(tmp_path, monkeypatch):
    read, path = [], folder(tmp_path, [step(n) for n in range(1, 2001)]) / "steps.jsonl"
    lines = StepLines(path)
    monkeypatch.setattr(step_lines, "open_foreign", lambda path: read.append(Counted(open_foreign(path))) or read[-1])
    assert lines.read() is True and read[-1].bytes >= path.stat().st_size
    with open(path, "a") as file:
        file.write(json.dumps(step(2001)) + "\n" + json.dumps(step(2002))[:-9])
    assert lines.read() is True and lines.cut and read[-1].bytes < 1000
    assert len(lines.read_steps().iterations) == 2001


class Counted:
    """A file that counts what is read of it."""

    def __init__(self, file):
        self.file, self.bytes = file, 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def seek(self, at):
        self.file.seek(at)

    def read(self, number):
        text = self.file.read(number)
        self.bytes += len(text)
        return text

    def readline(self, number):
        text = self.file.readline(number)
        self.bytes += len(text)
        return text


def test_of_many_console_lines_evenly_chosen_ones_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(step_lines, "MAX_KEPT_RANK_NUMBERS", 2 * 10 * 100)
    lines = [line for n in range(1, 1001) for line in (step(n), ranks(n, n, [10.0, 10.0 + n / 1000]))]
    run = read_run(folder(tmp_path, lines))
    kept = run.ranks.intervals.last
    assert MIN_RANK_LINES < len(kept) <= 112 and len(set(np.diff(kept))) == 1
    assert run.ranks.step_ms[1] == pytest.approx(10.5, abs=0.01)
    assert run.notes[-1].startswith(wording("analysis/ranks-are-compared-by", np.diff(kept)[0], "1,000"))
    followed = StepLines(tmp_path / "steps.jsonl")
    followed.read()
    assert followed.read_ranks(recent=True).last.tolist() == list(range(993, 1001))


def test_a_run_that_ends_while_it_is_read_was_not_killed(tmp_path, monkeypatch):
    record = RECORD | {"status": "running"}
    folder(tmp_path, [step(1)], record)

    def end(process):
        folder(tmp_path, None, RECORD)
        return False

    monkeypatch.setattr("megatron_lite.analysis.run.read_record.is_there", end)
    assert read_run(tmp_path).status == "finished"


@pytest.mark.parametrize(
    ("held", "grows"),
    [
        (lambda n: 500 * MIB + n * 2 * MIB, True),  # a leak
        (lambda n: 500 * MIB + 300 * MIB * (n > 20) + n * 1000, False),  # one jump
        (lambda n: 500 * MIB + 400 * MIB * min(n, 6) // 6, False),  # warming up
        (lambda n: 500 * MIB + (n % 5) * 30 * MIB, False),  # up and down
        (lambda n: 5000 * MIB + n * MIB // 4, False),  # noise of an allocator
    ],
)
def test_growth_is_steady_or_none(tmp_path, held, grows):
    run = read_run(folder(tmp_path, [step(n, host_memory_bytes=held(n)) for n in range(1, 41)]))
    assert bool(run.growths) == grows and run.gpu_growths == ()
    if grows:
        assert run.growths[0].rank is None and run.growths[0].bytes_per_step == pytest.approx(2 * MIB)


@pytest.mark.parametrize(("after", "grows"), [(16, True), (60, False)])
def test_growth_that_a_profile_interrupts_is_growth_unless_it_has_ended(tmp_path, after, grows):
    """What grows fills what the profile has left, as measured: 8 MiB per step up to 414, then 626 for long."""
    lines = [step(n, host_memory_bytes=(261 + 8 * n) * MIB) for n in range(1, 20)]
    lines += [step(n, host_memory_bytes=(450 + 40 * (n - 20)) * MIB, profiled=True) for n in range(20, 24)]
    lines += [step(n, host_memory_bytes=626 * MIB) for n in range(24, 24 + after)]
    growths = read_run(folder(tmp_path, lines)).growths
    assert [round(one.bytes_per_step / MIB) for one in growths] == ([8] if grows else [])


def test_growth_names_the_rank(tmp_path):
    lines = [step(n) for n in range(1, 61)]
    lines += [ranks(n, n + 4, [9, 9], host_memory_bytes=[100 * MIB, (100 + 3 * n) * MIB]) for n in range(1, 60, 5)]
    [growth] = read_run(folder(tmp_path, lines)).growths
    assert growth.rank == 1 and growth.bytes_per_step == pytest.approx(3 * MIB, rel=0.01)


@pytest.mark.slow
def test_the_trainers_own_run_and_its_own_figures(tmp_path):
    from support.launch import flags, pretrain  # torch: not for the fast tests

    window = "--profile --use-pytorch-profiler --profile-step-start 8 --profile-step-end 11 --run-dir"
    argv = flags("--train-iters 14 --log-interval 4 --eval-interval 5 --eval-iters 1", window, tmp_path)
    ended = pretrain(argv)
    assert ended.code == 0, ended.err
    run = read_run(tmp_path)
    assert [*run.iterations] == [*range(1, 15)] and run.status == "finished" and run.notes == ()
    told = re.search(r"took ([\d.]+) x .*median ([\d.]+) ms.* against ([\d.]+) ms", ended.out)
    slower, during, before = map(float, told.groups())
    assert [run.profiled_step_ms, run.before_profile_ms] == pytest.approx([during, before], abs=0.06)
    assert run.profiler_slowdown == pytest.approx(slower, abs=0.02)
    assert run.args["micro_batch_size"] == 1 and run.world_size == 1 and run.mfu_causal is None
    assert run.evaluating[4] and not run.ordinary[4] and run.profiled[7:10].all()
    assert run.tokens_per_second > 0 and len(run.ranks.step_ms) == 1
    resumed = pretrain([*argv, "--train-iters", "16"])  # starts anew: nothing was saved
    assert resumed.code == 0 and read_run(tmp_path).starts == 2 and os.path.exists(tmp_path / "run.json")


@pytest.mark.slow
def test_runs_without_a_step_timeline_and_failed_ones(tmp_path):
    from support.launch import flags, pretrain

    assert pretrain(flags("--no-step-timeline", "--run-dir", tmp_path / "plain")).code == 0
    plain = read_run(tmp_path / "plain")
    assert plain.steps == 6 and plain.ranks is None and not plain.phases_ms and plain.steady_step_ms > 0
    assert pretrain(flags("--lr 1e30", "--run-dir", tmp_path / "failed")).code != 0
    assert read_run(tmp_path / "failed").status.startswith("failed: DivergedError")
