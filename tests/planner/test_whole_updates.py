"""Muon's products on the host, by hand and against the one measurement that there is."""

from dataclasses import replace

import pytest

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.durations import chunk_durations
from slidedp_jax.planner.optimizers import state_bytes
from slidedp_jax.planner.presets import PRESETS
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.planner.whole_updates import (
    update_flops,
    whole_parameters,
    with_update_flops,
)
from slidedp_jax.planner.workload import BatchShape, Workload


def test_operations_by_hand():
    shapes = {
        "model.layers.0.mlp.up_proj.weight": (6, 2),  # 5 * (4 * 4 * 6 + 2 * 8)
        "model.layers.0.input_layernorm.weight": (6,),
        "model.embed_tokens.weight": (100, 6),
    }
    assert update_flops("muon", shapes) == 5 * (96 + 16)
    assert update_flops("adafactor", shapes) == update_flops(None, shapes) == 0.0


def test_nineteen_seconds_a_step_of_qwen3_06b_on_sixteen_cores():
    """Measured beside an H200 at 32,768 tokens; the update is by far the longest lane."""
    config = named_config("qwen3-0.6b")
    shapes = config.parameter_shapes()
    per_parameter = state_bytes("muon", shapes) / config.num_parameters
    flops = update_flops("muon", shapes)
    assert flops == pytest.approx(1.11e13, rel=0.01)
    hardware = with_update_flops(
        PRESETS["h200"],
        flops,
        num_parameters=config.num_parameters,
        optimizer_state_bytes=per_parameter,
    )
    chunks = chunk_durations(
        Workload.from_config(config),
        BatchShape(num_rows=8, seq_length=4096),
        Strategy(layers_per_chunk=1, rows_per_microbatch=8, num_microbatches=1),
        hardware,
        optimizer_state_bytes=per_parameter,
    )
    assert sum(chunk.update_s for chunk in chunks) == pytest.approx(19, rel=0.06)
    assert (
        with_update_flops(PRESETS["h200"], 0.0, num_parameters=1, optimizer_state_bytes=8)
        is PRESETS["h200"]
    )


def test_adafactors_time_by_hand():
    """Half a second for 71 M parameters on two cores, as measured, beside state and gradients."""
    shapes = {"model.layers.0.mlp.up_proj.weight": (7_131, 10_000), "model.norm.weight": (10_000,)}
    count = 71_320_000
    assert whole_parameters("adafactor", shapes) == count
    assert whole_parameters("muon", shapes) == whole_parameters(None, shapes) == 0
    traffic = 1.0e-9
    for cores, each in ((2, 7.1e-9), (16, traffic + 1.5e-9 + 9.2e-9 / 16)):
        seconds = count * each
        usual = replace(PRESETS["cpu"], num_host_cores=cores, host_update_params_per_s=1 / 2.6e-9)
        hardware = with_update_flops(
            usual, 0.0, num_parameters=count, optimizer_state_bytes=0, num_whole=count
        )
        # Traffic of 10 bytes per parameter at the rate of AdamW's 26.
        found = count * 10 / (26 * hardware.host_update_params_per_s)
        assert found == pytest.approx(seconds, rel=1e-3)
