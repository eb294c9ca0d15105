"""What stays of a text, and what stands in the place of the rest."""

import pytest
from support.paths import TESTS

from megatron_lite.analysis.kernels.kernel_names import taken_apart
from megatron_lite.bundle.clean_records import clean_record
from megatron_lite.bundle.known_words import is_known, read_known_words
from megatron_lite.bundle.last_look import list_secrets
from megatron_lite.bundle.names import Secret, Substitutes
from megatron_lite.formats.run_record import RunRecord
from megatron_lite.postmortem.evidence import ProcessStacks

KEPT = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >",
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn",
    "Memcpy HtoD (Pageable -> Device)",
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_",
    "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32",
    "autograd::engine::evaluate_function: MulBackward0",
    "torch/nn/modules/linear.py(125): forward",
    "<built-in method run_backward of torch._C._EngineBase object at 0x7f12ab>",
    "cudaLaunchKernel",
    "threading.local",
    "torch.distributed.nn.functional.all_reduce",
    "c10::add",
    "aten::mm, seq = 12, sizes = [[1024, 1024, 1024], [1024, 4096, 4096]]",
    "datasets/iterable_dataset.py(125): __iter__",
)
# a name and the part of it that must not stay
TAKEN = (
    ("acmecorp_fused_gemm_kernel", "acmecorp"),
    ("_ZN8acmecorp6zaphodEv", "acmecorp"),
    ("_ZN2at4mean a1b2c3d4e5f6", "a1b2c3d4e5f6"),
    ("acmecorp::secretop", "acmecorp"),
    ("nn.Module: AcmecorpBlock_0", "Acmecorp"),
    ("/home/zaphod/projects/moonshot/train.py(12): main", "zaphod"),
    ("/home/zaphod/projects/moonshot/train.py(12): main", "moonshot"),
    ("moonshot/model.py(3): forward", "moonshot"),
    ("wait for zaphod@example.com", "zaphod"),
    ("connect to 10.11.12.13", "10.11.12.13"),
    ("connect to fe80:0:0:0:1:2:3:4", "fe80"),
    ("sk-a1b2c3d4e5f6a7b8c9d0", "a1b2c3d4"),
    ("call 123456789012", "123456789012"),
    ("größenordnung", "größ"),
    ("https://tracker.example.com/run/17", "tracker"),
    ("gemm \u0437\u0430\u044f\u0446", "\u0437\u0430"),
    # of known words and short numbers alone
    ("connect to 10.11.12.13.", "10.11.12.13"),
    ("host_10.11.12.13_forward", "10.11.12.13"),
    ("ip-10-11-12-13 forward", "10-11-12-13"),
    ("worker-10-11-12-13", "10-11-12-13"),
    ("connect to fe80::1", "fe80::1"),
    ("connect to 2001:db8::1:2", "db8"),
    ("device ab:cd:ef:ab:cd:ef", "ab:cd"),
    ("device 0c-42-a1-b2-c3-d4", "0c-42"),
    ("node12.cluster.local", "cluster.local"),
    ("master is gpu-node.cloud:29500", "gpu-node"),
    ("git@master.com:model/train.git", "model/train"),
    ("user@node12:model/train", "model/train"),
    ("s3://model-data/train/image.tar", "model-data"),
    ("call +49 170 1234567", "170 123"),
    ("call (555) 123-4567 890", "123-45"),
    ("4111 1111 1111 1111", "4111 1111"),
    ("number 123-45-6789", "45-6789"),
    ("/mnt/datasets/patient/image.py(3): load", "patient"),
    ("C:\\Users\\patient\\train.py(3): load", "patient"),
    ("\\\\server\\patient\\train.py(3): load", "patient"),
)


@pytest.mark.parametrize("text", KEPT)
def test_a_name_of_public_software_stays(text):
    assert Substitutes().clean_name(text) == text


@pytest.mark.parametrize(("text", "secret"), TAKEN)
def test_an_unknown_part_of_a_name_goes(text, secret):
    for clean in (Substitutes.clean_name, Substitutes.clean_label, Substitutes.clean_path, Substitutes.clean_frame):
        assert secret not in clean(Substitutes(), text)


def test_the_same_name_has_the_same_substitute_in_all_files():
    names = Substitutes()
    names.enter("run.json")
    first = names.clean_path("/home/zaphod/moonshot/train.py")
    names.enter("trace of rank 0")
    assert names.clean_name("/home/zaphod/moonshot/train.py(12): main") == f"{first}(12): main"
    assert names.clean_path("/home/zaphod/other/train.py") != first


def test_different_names_have_different_substitutes():
    names = Substitutes()
    texts = [f"name{letter}quux" for letter in "abcdefghijklmnopqrstuvwxyz"] + ["zaphodquux", "quuxzaphod"]
    assert len({names.clean_name(text) for text in texts}) == len(texts)


def test_files_of_packages_keep_their_place_wherever_they_are_installed():
    names = Substitutes()
    assert names.clean_path("/home/zaphod/venv/lib/python3.11/site-packages/torch/optim/adamw.py") == (
        "/site-packages/torch/optim/adamw.py"
    )
    assert names.clean_path("/home/zaphod/Megatron-LM/megatron/core/optimizer/optimizer.py") == (
        "/path-1/megatron/core/optimizer/optimizer.py"
    )


def test_names_that_differ_where_they_cannot_be_printed_stay_apart():
    names = Substitutes()
    texts = ["\0", "\n", "\ud800", "\u2192", "gemm" * 600, "gemm" * 600 + "add", "gemm" * 600 + "mul"]
    cleaned = [names.clean_name(text) for text in texts]
    assert len(set(cleaned)) == len(texts)
    assert all(text.isascii() and text.isprintable() for text in cleaned)


def test_what_is_hidden_is_found_in_known_words():
    names = Substitutes()
    names.hide(Secret.HOST, "gpu-node-17")
    assert names.clean_label("gpu-node-17") == "labelA"
    assert names.clean_name("forward gpu-node-17.node.cluster") == "forward host-1"
    assert "gpu-node-17" not in names.clean_name("forward gpu-node-17")


@pytest.mark.parametrize(
    "label", ["forward", "ProfilerStep#12", "data loading", "enumerate(DataLoader)#_Iter.__next__"]
)
def test_a_short_label_of_known_words_stays(label):
    assert Substitutes().clean_label(label) == label


@pytest.mark.parametrize(
    "label", ["loading zaphod", "run 3xk2j9ab", "run ab12cd34", "the one who said what the other who said", "a\x1b[31m"]
)
def test_any_other_label_is_replaced(label):
    assert Substitutes().clean_label(label) == "labelA"


def test_a_command_keeps_its_known_flags_and_numbers():
    words = ["python", "/home/zaphod/train.py", "--lr", "1e-3", "--wandb-api-key=a1b2c3d4e5f6a7b8", "--zaphod", "quux"]
    cleaned = Substitutes().clean_command(words)
    assert cleaned[:4] == ["python", "/path-1/train.py", "--lr", "1e-3"]
    assert not any(secret in " ".join(cleaned) for secret in ("zaphod", "quux", "a1b2c3"))


def test_a_script_behind_a_machine_stays():
    words = ["torchrun", "--master-addr", "node12", "train.py", "--lr", "1"]
    assert Substitutes().clean_command(words) == ["torchrun", "--master-addr", "text-1", "train.py", "--lr", "1"]


def test_a_text_among_the_words_of_a_command_goes():
    words = ["train.py", "--prompt", "the patient has no name", "--keys", "dragon", "tiger"]
    cleaned = Substitutes().clean_command(words)
    assert cleaned[:2] == ["train.py", "--prompt"]
    assert not {"patient", "dragon", "tiger"} & set(" ".join(cleaned).split())
    stacks = ProcessStacks(source="", threads=(), command="python train.py --prompt the patient has no name --lr 1")
    assert clean_record(stacks, Substitutes()).command == "python train.py --prompt text-1 --lr 1"


def test_the_list_of_words_has_no_names_of_people():
    # as far as they are no words of software
    common = {"alice", "bob", "carol", "dave", "maria", "anna", "hans", "peter", "john", "michael", "thomas", "chen"}
    assert not common & read_known_words()
    assert is_known("gemm")


# told from products by one word
HELPERS = (
    "void cudnn::cnn::im2col4d_kernel<float, long>(cudnn::cnn::im2col4d_params, cudnnConvolutionStruct, float*)",
    "void at::native::im2col_kernel<float>(long, float const*, long, long, long, long, long, long, long, float*)",
    "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(cudnn::winograd_nonfused::WinogradDataParams)",
)


def test_kernels_stay_what_they_are():
    lines = (TESTS / "analysis/kernel_names.tsv").read_text().splitlines()[1:]
    substitutes = Substitutes()
    for name in [*(line.partition("\t")[0].encode().decode("unicode_escape") for line in lines), *HELPERS]:
        before = taken_apart(name)
        after = taken_apart(substitutes.clean_name(name))
        assert (before.role, before.family, before.precision) == (after.role, after.family, after.precision), name
        assert before.tensor_cores is after.tensor_cores, name


FLAGS_OF_KEYS = (
    "--wandb-api-key",
    "--hf-token",
    "--password",
    "--db_passwd",
    "--auth",
    "--aws-access-key-id",
    # names of people, projects and machines
    "--wandb-project",
    "--wandb-exp-name",
    "--name",
    "--user",
    "--master-addr",
)


@pytest.mark.parametrize("flag", FLAGS_OF_KEYS)
def test_no_key_stays_however_plain_its_words_are(flag):
    cleaned = Substitutes().clean_command(
        [flag, "dragon", f"{flag}=dragon", f"{flag[2:].upper()}=dragon", "--tokens", "8"]
    )
    assert "dragon" not in str(cleaned) and cleaned[-2:] == ["--tokens", "8"]
    record = RunRecord(command=["train.py", flag, "dragon"], environment={"HF_TOKEN": "dragon", "OMP_NUM_THREADS": "4"})
    found = clean_record(record, Substitutes())
    assert "dragon" not in str(found.command) and "dragon" not in str(found.environment)
    assert found.environment["OMP_NUM_THREADS"] == "4" and is_known("dragon")


@pytest.mark.parametrize(
    "name", ["BORG_PASSPHRASE", "HF_TOKEN", "SLACK_TOKENS", "API_KEY_2", "PGPASSWORD", "AWS_CREDENTIALS", "NPM_AUTH"]
)
def test_the_last_look_knows_every_kind_of_key(name):
    assert list_secrets({name: "a1b2c3d4e5f6", "OMP_NUM_THREADS": "a1b2c3d4e5f6" * 2}).keys() == {"a1b2c3d4e5f6"}
