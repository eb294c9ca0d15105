"""A bundle tells the same of a run, and nothing of who made it."""

import json
import zipfile

import pytest
from support.bundle_check import find_secrets, make_bundle, unzip
from support.paths import TESTS, TRACES
from support.run_maker import PLAN, RECORD, folder, ranks, step
from support.trace_maker import MadeTrace, gpu_run

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.trace.read import read_traces
from megatron_lite.bundle.archive import open_bundle, write_archive
from megatron_lite.cli.bundle import find_differences
from megatron_lite.cli.report import run
from megatron_lite.errors import UserError

SECRETS = [
    "zaphod",
    "heartofgold",
    "10.11.12.13",
    "moonshot",
    "sk-a1b2c3d4e5f6",
    "whispered",
    "magrathea",
    "gpu-node-22",
]
# a machine of known words is one because these say so; the phase is named like it
OF_HOSTS = ("--rdzv-endpoint=gpu-node-22:29400", "--note", "gpu-node-22")


def make_run(path):
    """A run folder with a trace, and secrets in many of its fields."""
    plan = PLAN | {
        "settings": {"tensorboard_dir": "/home/zaphod/moonshot/tb", "micro_batch_size": 2},
        "args": {"training": {"micro_batch_size": 2}, "data": {"data_path": ["/data/magrathea/corpus"]}},
    }
    record = RECORD | {
        "plan": plan,
        "process": {"host": "heartofgold", "pids": "pid:[17]", "pid": 3, "started_ticks": 1},
        "command": ["python", "/home/zaphod/train.py", "--key", "sk-a1b2c3d4e5f6", "--address=10.11.12.13", *OF_HOSTS],
        "environment": {"WANDB_API_KEY": "sk-a1b2c3d4e5f6", "OMP_NUM_THREADS": "4"},
        "artefacts": {"tensorboard": "/home/zaphod/moonshot/tb"},
        "magrathea": "whispered",
        "status": "failed: ValueError: he whispered of magrathea",
    }
    steps = [
        step(number, phases_ms={"forward": 5.0, "magrathea": 1.0, "gpu-node-22": 1.0}, zaphod="moonshot")
        for number in range(1, 9)
    ]
    folder(path, [*steps, ranks(1, 8, [10.0, 11.0])], record)
    made = gpu_run()
    made.header |= {"host_name": "heartofgold", "trace_id": "ABC", "magrathea": {"whispered": "zaphod"}}
    made.add("python_function", "/home/zaphod/moonshot/train.py(12): whispered", 0, 10)
    made.annotation("he whispered to zaphod@heartofgold.org", 20, 30)
    made.op("magrathea::op", 40, 50, dims=[[2, 3]], values=["whispered", "10.11.12.13"])
    made.write(path).rename(path / "heartofgold_rank0.1700000000000000000.pt.trace.json")
    return path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    place = tmp_path_factory.mktemp("bundle")
    return make_bundle([make_run(place / "zaphod")], place / "made")


def test_no_secret_stands_in_any_file(bundle):
    folder, _ = bundle
    assert find_secrets(folder, SECRETS) == []


def test_what_was_taken_out_is_listed_without_its_contents(bundle):
    folder, lines = bundle
    assert (folder / "taken_out.txt").read_text().splitlines() == lines
    assert any({"run.json", "trace"} <= set(line.replace("(", " ").split()) for line in lines)
    assert not any(secret in line for secret in SECRETS for line in lines)


def test_what_is_no_secret_stays(bundle):
    folder, _ = bundle
    record = json.loads((folder / "run.json").read_text())
    assert record["plan"]["args"]["training"] == {"micro_batch_size": 2}
    assert record["environment"]["OMP_NUM_THREADS"] == "4"
    assert record["status"].startswith("failed: ValueError")


def test_the_archive_is_read_as_the_run_is(tmp_path, capsys):
    place = make_run(tmp_path / "run-1")
    run([str(place), "--no-html", "--bundle", str(tmp_path / "it.zip")])
    printed = capsys.readouterr().out
    assert printed.index("taken_out" if "taken_out" in printed else "host") < printed.index("it.zip")
    opened = tmp_path / "opened"
    opened.mkdir()
    unpacked = open_bundle(tmp_path / "it.zip", opened)
    assert list(find_differences(analyze([place]), analyze([unpacked]))) == []
    assert list(find_differences(analyze([place]), analyze([unzip(tmp_path / "it.zip", tmp_path / "by hand")]))) == []
    run([str(tmp_path / "it.zip"), "--no-html"])
    assert capsys.readouterr().out


def test_a_tar_is_read_too_and_names_no_owner(tmp_path):
    import tarfile

    place = make_run(tmp_path / "run-1")
    run([str(place), "--no-html", "--bundle", str(tmp_path / "it.tar.gz")])
    with tarfile.open(tmp_path / "it.tar.gz") as archive:
        assert {entry.uname for entry in archive} == {""}
    opened = tmp_path / "opened"
    opened.mkdir()
    assert (open_bundle(tmp_path / "it.tar.gz", opened) / "run.json").is_file()


def test_a_name_that_tells_no_kind_of_archive_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(UserError, match="--bundle it.rar"):
        run([str(tmp_path / "nowhere"), "--bundle", "it.rar"])


def test_a_file_is_written_anew_as_other_outputs_are(tmp_path):
    place = make_run(tmp_path / "run-1")
    target = tmp_path / "it.zip"
    target.write_text("before")
    run([str(place), "--no-html", "--bundle", str(target)])
    assert zipfile.is_zipfile(target)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_cannot_be_written_is_one_line(tmp_path):
    place = make_run(tmp_path / "run-1")
    with pytest.raises(UserError, match="--bundle"):
        run([str(place), "--no-html", "--bundle", str(tmp_path / "nowhere" / "it.zip")])


def test_a_secret_of_the_environment_that_is_left_stops_writing(tmp_path, monkeypatch):
    place = make_run(tmp_path / "run-1")
    # known words alone, as no key is
    monkeypatch.setenv("SOME_API_KEY", "micro_batch_size")
    with pytest.raises(UserError, match="SOME_API_KEY"):
        run([str(place), "--no-html", "--bundle", str(tmp_path / "it.zip")])
    assert not (tmp_path / "it.zip").exists()


def test_an_archive_writes_nowhere_else(tmp_path):
    path = tmp_path / "evil.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in (
            "run/taken_out.txt",
            "run/../up.txt",
            "../up.txt",
            "/tmp/up.txt",
            "run/deep/up.txt",
            "run/..",
            "up",
        ):
            archive.writestr(name, "x")
    opened = tmp_path / "opened"
    opened.mkdir()
    unpacked = open_bundle(path, opened)
    assert [file.name for file in unpacked.iterdir()] == ["taken_out.txt"]
    assert {file.name for file in tmp_path.iterdir()} == {"evil.zip", "opened"}


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    from megatron_lite.bundle import archive as module

    monkeypatch.setattr(module, "MAX_BUNDLE_BYTES", 1000)
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("run/taken_out.txt", "0" * 100_000)
    opened = tmp_path / "opened"
    opened.mkdir()
    with pytest.raises(UserError):
        open_bundle(path, opened)


@pytest.mark.parametrize("ending", [".zip", ".tar.gz"])
def test_a_damaged_archive_is_one_line(tmp_path, ending):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "taken_out.txt").write_text("".join(map(str, range(2000))))
    path = tmp_path / f"it{ending}"
    write_archive(tmp_path / "run", path)
    whole = path.read_bytes()
    refused = 0
    for place in range(20, len(whole), 37):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        opened = tmp_path / f"opened-{place}"
        opened.mkdir()
        try:
            open_bundle(path, opened)
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused


def test_another_archive_is_no_bundle(tmp_path):
    path = tmp_path / "other.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("run/data.txt", "x")
    opened = tmp_path / "opened"
    opened.mkdir()
    assert open_bundle(path, opened) is None


SLOWER = [pytest.param(name, marks=pytest.mark.slow) for name in ("v100_dlrm_8ranks", "a100_ddp_nccl_rank0of2")]


@pytest.mark.parametrize("name", ["h100_qwen_stacks", *SLOWER])
def test_a_public_trace_tells_the_same(name, tmp_path):
    if not (TRACES / name).is_dir():
        pytest.skip("public traces are not part of the project")
    folder, _ = make_bundle([TRACES / name], tmp_path / "made")
    assert find_secrets(folder, ["moca/", "D74EA3FAC1814011AB8FC4FC00427B48"]) == []


@pytest.mark.parametrize("ending", ["json.gz", "pftrace.gz"])
def test_counters_of_a_device_stay(ending, tmp_path):
    folder, _ = make_bundle([TESTS / f"analysis/traces/torch_2_14_rank0.{ending}"], tmp_path / "made")
    [before] = read_traces(TESTS / f"analysis/traces/torch_2_14_rank0.{ending}")
    [after] = read_traces(next(folder.glob("*.pt.trace.json.gz")))
    assert after.counters.names == before.counters.names
    assert len(after.counters.value) == len(before.counters.value) > 0


def test_a_bundle_of_a_bundle_is_refused(tmp_path):
    run([str(make_run(tmp_path / "run-1")), "--no-html", "--bundle", str(tmp_path / "it.zip")])
    with pytest.raises(UserError, match="it.zip"):
        run([str(tmp_path / "it.zip"), "--no-html", "--bundle", str(tmp_path / "again.zip")])
    assert not (tmp_path / "again.zip").exists()


def test_ranks_without_a_number_stay_apart(tmp_path):
    made = MadeTrace(rank=None)
    made.step(1, 0, 100)
    made.op("aten::mm", 10, 20)
    made.write(tmp_path)
    make_bundle([tmp_path], tmp_path / "made")


def test_phases_of_unknown_labels_stay_apart(tmp_path):
    """A number at the end of a label is that of a step: labels that differ in it alone are one phase."""
    made = MadeTrace()
    for number in range(5):
        at = number * 1000.0
        made.step(number, at, at + 995)
        for place, label in enumerate(("zaphod whispered", "magrathea whispered", "moonshot whispered")):
            with made.phase(label, at + 10 + 300 * place, at + 290 + 300 * place):
                made.op("aten::mm", at + 20 + 300 * place, at + 280 + 300 * place)
    folder, _ = make_bundle([made.write(tmp_path)], tmp_path / "made")
    [one] = analyze([folder]).facts.ranks_seen
    assert len([phase for phase in one.time.phases if phase.name.startswith("label")]) == 3
    assert find_secrets(folder, SECRETS) == []


# of known words alone, which stay in labels and names unless a file says that they name somebody
OWNERS = ["gpu-node-17", "gpu-node-18", "login_node2", "node.cluster", "model_user", "test-user"]


def make_foreign_ranks(path):
    """Traces of two ranks on machines and of users that only other places of the same files name."""
    path.mkdir()
    for rank in range(2):
        made = gpu_run(steps=4, rank=rank, world_size=2)
        made.header["host_name"] = f"gpu-node-{17 + rank}.node.cluster"
        made.annotation("forward on gpu-node-17", 10, 20)
        made.annotation("backward of gpu-node-18.node.cluster", 30, 40)
        made.annotation("test-user on login_node2", 45, 46)
        made.op("node::model_user", 50, 60)
        made.add("python_function", "/home/model_user/train.py(12): test-user", 70, 80)
        made.add("python_function", "C:\\Users\\test-user\\train.py(12): forward", 82, 84)
        made.write(path)
    # as torch's handler for TensorBoard names files
    one = next(iter(path.glob("*0*.json*")))
    one.rename(path / "login_node2_1234.1700000000000000000.pt.trace.json")
    return path


def test_machines_and_users_of_foreign_traces_go_though_their_words_are_known(tmp_path):
    made, _ = make_bundle([make_foreign_ranks(tmp_path / "ranks")], tmp_path / "made")
    assert find_secrets(made, OWNERS) == []
