"""The race of attention kernels: who wins, and what is made of it. Times are given here; on a GPU they are measured."""

from dataclasses import replace

import pytest
import torch
from support.launch import on_ranks
from support.model_variants import PLAIN
from support.wording import wording
from torch.nn.attention import SDPBackend

from megatron_lite.model import attention_choice
from megatron_lite.model.attention_choice import Race, choose_attention, fastest, make_trials, race
from megatron_lite.train import choose_kernels

CPU = torch.device("cpu")


def failing():
    raise torch.OutOfMemoryError("CUDA out of memory")


def raced(times, preferred, broken=()):
    trials = {name: failing if name in broken else (lambda ms=ms: ms) for name, ms in times.items()}
    return race(trials, preferred, time_ms=lambda trial: trial())


@pytest.mark.parametrize(
    ("times", "preferred", "winner"),
    [
        ({"flash": 1.60, "cudnn": 1.21}, "flash", "cudnn"),
        ({"flash": 1.60, "cudnn": 1.21}, "cudnn", "cudnn"),
        ({"flash": 1.049, "cudnn": 1.0}, "flash", "flash"),  # too little to change sides
        ({"flash": 1.051, "cudnn": 1.0}, "flash", "cudnn"),
        ({"efficient": 2.0, "flash": 1.5, "cudnn": 1.4}, "efficient", "cudnn"),
        ({"flash": 1.0, "cudnn": 0.5}, None, "cudnn"),  # torch would take its plain kernel
    ],
)
def test_torchs_own_choice_stays_unless_another_is_clearly_faster(times, preferred, winner):
    assert raced(times, preferred) == Race(winner, times)


def test_a_kernel_that_fails_is_out_and_one_is_not_timed():
    assert raced({"flash": 1.6, "cudnn": 1.0}, "flash", broken=["cudnn"]) == Race("flash", {"flash": 1.6})
    assert raced({"flash": 1.6, "cudnn": 1.0}, "cudnn", broken=["cudnn"]) == Race("flash", {"flash": 1.6})
    assert raced({"flash": 1.6, "cudnn": 1.0}, "cudnn", broken=["cudnn", "flash"]) == Race("cudnn", {})
    assert raced({"flash": 1.0}, "flash") == fastest(None, ("flash",), "flash") == Race("flash", {})
    assert raced({}, None) == Race(None, {}) and Race(None, {}).words == Race("flash", {}).words == ""
    found = Race("cudnn", {"flash": 1.604, "cudnn": 1.21, "efficient": 1.5})
    assert found.words == wording("model/ms-efficient-ms-flash", 1.21, "1.50", "1.60")


def test_trials_run_forward_and_backward_on_numbers_like_the_models(monkeypatch):
    """Both kernels that a CPU has."""
    calls = []
    inner = attention_choice.sdpa_attention

    def note(q, *more, **how):
        calls.append((q, how))
        return inner(q, *more, **how)

    monkeypatch.setattr(attention_choice, "sdpa_attention", note)
    probes = attention_choice._probes(PLAIN, 2, CPU, torch.float32)
    [probe] = probes
    for trial in make_trials(probe, ("flash", "math")).values():
        assert trial() is None
    assert [how["backend"] for _, how in calls] == [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    query = calls[0][0]
    assert query.shape == probe.q_BNTD.shape and query.stride() == probe.q_BNTD.stride()
    assert 0.5 < query.std() < 1.5 and query.grad is None
    [masked] = attention_choice._add_mask(probes)
    make_trials(masked, ("math",))["math"]()


def chosen(winner, able=("flash",)):
    asked = []

    def pick(probe, names, own):
        asked.append((names, own))
        return Race(winner, {"flash": 2.0, winner: 1.0})

    found = choose_attention("auto", PLAIN, batch=2, device="cpu", dtype=torch.float32, masked=False, pick=pick)
    assert asked == [(able, "flash")]
    return found


def test_the_winner_is_taken_and_said_if_it_can_run_here():
    found = chosen("flash")
    assert (found.name, found.timed) == ("sdpa flash", wording("model/ms-forward-and-backward", "1.00"))
    assert found.function.keywords["backend"] is None  # torch's own choice, as without a race
    found = chosen("cudnn")  # of another rank
    assert (found.name, found.timed, found.function.keywords["backend"]) == ("sdpa flash", "", None)


def test_another_winner_is_forced(monkeypatch):
    real = attention_choice._ask_torch

    def asked(probe, backend=None):
        return (backend, "") if backend == SDPBackend.EFFICIENT_ATTENTION else real(probe, backend)

    monkeypatch.setattr(attention_choice, "_ask_torch", asked)
    found = chosen("efficient", ("flash", "efficient"))
    assert found.name == "sdpa efficient" and found.function.keywords["backend"] == SDPBackend.EFFICIENT_ATTENTION
    assert found.timed == wording("model/ms-flash-ms-forward", "1.00", "2.00")


def test_only_gpus_race_and_not_where_runs_must_repeat():
    gpu = torch.device("cuda", 0)
    assert choose_kernels.make_race(gpu, deterministic=False, is_first=True) is not None
    assert choose_kernels.make_race(CPU, deterministic=False, is_first=True) is None
    assert choose_kernels.make_race(gpu, deterministic=True, is_first=True) is None


def one_race_for_all(world):
    """For on_ranks: each rank would find another kernel the fastest."""
    choose_kernels.fastest = lambda probe, able, own: Race(f"of rank {world.rank}", {})
    pick = choose_kernels.make_race(torch.device("cuda"), False, world.is_first)
    print("took", pick(None, (), None).winner)


@pytest.mark.slow
def test_the_first_rank_decides_for_all(tmp_path):
    assert all("took of rank 0" in out for out in on_ranks(one_race_for_all, tmp_path))


def test_flash_is_chosen_without_the_mask_of_a_long_sequence():
    """A mask of 2^22 positions takes 16 TiB."""
    shape = replace(PLAIN, seq_length=2**22)
    chosen = choose_attention("auto", shape, batch=1, device="cpu", dtype=torch.bfloat16, masked=True)
    assert chosen.name == "sdpa flash"
