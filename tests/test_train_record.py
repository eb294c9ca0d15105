"""What run.json says of the machine, for those who read the run later."""

import json

from launch import flags, plan_of

from megatron_lite.run_folder import RUN_FILE
from megatron_lite.train.run_record import RunRecord


def test_it_names_the_cores_and_the_variables_that_matter_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    with RunRecord(plan_of(flags()), tmp_path):
        pass
    text = (tmp_path / RUN_FILE).read_text()
    record = json.loads(text)
    assert record["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "CUDA_LAUNCH_BLOCKING" not in record["environment"] and "secret" not in text
    assert record["hardware"]["cpus"] >= 1 and {
        record["hardware"][f"{name}_products"] for name in ("bf16", "fp16")
    } <= {True, False}
