"""The figures of the GPUs, and GPUs by figures of the user."""

import json

import pytest
from real_shapes import LLAMA_31_8B_JSON

from jshadow.cli.main import main
from jshadow.planner.gpu_specs import DEFAULT_GPUS, GIB, GPUS, custom_gpu, gpu_named


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_figures_are_of_the_right_order(gpu):
    """Of a slip in a unit or a digit."""
    assert 20 <= gpu.memory_bytes / GIB <= 190
    assert 3e11 <= gpu.hbm_bytes_per_second <= 8e12
    assert gpu.pcie_bytes_per_second in (31.5e9, 63e9)
    assert 70e12 <= gpu.flops <= 2.3e15
    # operations for each byte that is read: between a card of 2020 and a card for large batches
    assert 70 <= gpu.flops / gpu.hbm_bytes_per_second <= 450


def test_cards_of_servers_and_of_desks_are_known():
    assert {"a100-80gb", "h100", "h200", "b200", "l4", "l40s", "rtx-4090", "rtx-5090"} <= set(GPUS)
    assert [gpu_named(name).name for name in DEFAULT_GPUS] == list(DEFAULT_GPUS)


def test_a_gpu_by_its_figures():
    gpu = custom_gpu(None, gib=16, bandwidth=500, link=12.5, tflops=50)
    assert (gpu.memory_bytes, gpu.hbm_bytes_per_second) == (16 * GIB, 500e9)
    assert (gpu.pcie_bytes_per_second, gpu.flops) == (12.5e9, 50e12)
    known = GPUS["h100"]
    changed = custom_gpu(known, gib=None, bandwidth=None, link=25, tflops=None)
    assert (changed.name, changed.pcie_bytes_per_second, changed.flops) == ("h100, changed", 25e9, known.flops)
    assert custom_gpu(known, gib=None, bandwidth=None, link=None, tflops=None) == known


def test_the_command_plans_a_gpu_by_its_figures(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B_JSON))

    def plan(words):
        sizes = ["--context", "8192", "--policy", "quest", "--fetch", "device_put", "--json"]
        assert main(["plan", str(tmp_path / "config.json"), *sizes, *words.split()]) == 0
        [plan] = json.loads(capsys.readouterr().out)["plans"]
        return plan

    figures = "--gpu-gib 139.8 --bandwidth 4800 --link 63 --tflops 989.5"
    gpu = plan(figures)["gpu"]
    assert gpu["nvlink_bytes_per_second"] == gpu["pcie_bytes_per_second"] == 63e9
    own, known = plan(f"{figures} --nvlink 450"), plan("--gpu h200")
    assert own["gpu"].pop("name") == "custom GPU"
    assert known["gpu"].pop("name") == "h200"
    assert own == known
