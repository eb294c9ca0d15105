"""Configurations of Megatron-LM's own functional tests train with their flags and layouts, at reduced sizes."""

import pytest
from support.megatron_functional import read_configurations
from train_configurations import reduce_sizes, train

CONFIGURATIONS = read_configurations()
# kinds of layouts and of models; python tests/train_configurations.py trains all that need at most four ranks
SAMPLE = [
    "gpt/gpt3_mcore_te_tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce",
    "gpt/gpt3_mcore_reruns_resume_check_grads#MODEL_ARGS_4",
    "gpt/gpt3_mcore_reruns_persistent_1_1node",
    "moe/gpt3_mcore_te_tp1_pp1_te_4experts_groupedGEMM_op_fuser",
    "moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_muon_param_layout_1node",
    "moe/gpt3_mcore_te_tp2_pp1_te_a2a_ovlp_8experts_etp1_ep4",
]


def test_what_a_configuration_is_about_stays():
    words = reduce_sizes(CONFIGURATIONS["moe/gpt3_mcore_te_tp2_pp1_te_a2a_ovlp_8experts_etp1_ep4"])
    flags = "--tensor-model-parallel-size --expert-model-parallel-size --moe-router-load-balancing-type --bf16"
    assert all(flag in words for flag in flags.split()) and "--save" not in words and "--data-path" not in words


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_it_trains(name, tmp_path):
    code, text = train(CONFIGURATIONS[name], tmp_path)
    assert code == 0, text
