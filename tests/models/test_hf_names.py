"""Experts in files: a matrix each by two sets of names, or as they are in memory."""

import numpy as np
import pytest
from folders import QWEN2, read_index, write_folder
from safetensors.numpy import load_file

from slidedp_jax.models.hf_config import parse_config
from slidedp_jax.models.hf_export import export
from slidedp_jax.models.hf_load import check_folder, load_parameters

EXPERTS = {"num_experts_per_tok": 2, "num_hidden_layers": 2, "hidden_size": 8}
RAW = {
    "qwen3_moe": QWEN2
    | EXPERTS
    | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 3}
    | {"moe_intermediate_size": 6, "mlp_only_layers": [0], "head_dim": 4},
    "mixtral": QWEN2
    | EXPERTS
    | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 3}
    | {"intermediate_size": 6, "head_dim": 4},
}
NAMES = {
    ("qwen3_moe", "apart"): ("mlp.experts.{}.{}_proj.weight", ("gate", "up", "down")),
    ("mixtral", "apart"): ("block_sparse_moe.experts.{}.{}.weight", ("w1", "w3", "w2")),
}


def values_of(family):
    rng = np.random.default_rng(0)
    shapes = parse_config(RAW[family]).parameter_shapes()
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def in_files(family, layout, values):
    """The tensors of such files, made by hand."""
    if layout == "fused":
        return dict(values)
    pattern, (gate, up, down) = NAMES[family, layout]
    tensors = {}
    for name, value in values.items():
        layer, _, inner = name.rpartition("mlp.")
        if inner == "gate.weight" and family == "mixtral":
            tensors[layer + "block_sparse_moe.gate.weight"] = value
        elif not inner.startswith("experts."):
            tensors[name] = value
        for expert in range(3 if inner.startswith("experts.") else 0):
            own = value[expert]
            if inner == "experts.down_proj":
                parts = {down: own}
            else:
                parts = {gate: own[:6], up: own[6:]}
            for part, matrix in parts.items():
                tensors[layer + pattern.format(expert, part)] = np.ascontiguousarray(matrix)
    return tensors


@pytest.mark.parametrize("family", RAW)
@pytest.mark.parametrize("layout", ["apart", "fused"])
def test_in_and_out_again_is_bitwise_in_the_same_layout(tmp_path, family, layout):
    values = values_of(family)
    tensors = in_files(family, layout, values)
    assert (tensors.keys() == values.keys()) == (layout == "fused")
    raw = RAW[family]
    folder = write_folder(tmp_path / "in", raw, tensors)
    config = parse_config(raw)
    check_folder(folder, config)
    shapes, loaded = config.parameter_shapes(), {}
    load_parameters(folder, shapes, lambda name, value: loaded.update({name: value}))
    assert loaded.keys() == values.keys()
    for name, value in values.items():
        assert loaded[name].tobytes() == value.tobytes(), name
        assert not loaded[name].flags.writeable
    reads = []

    def read(name):
        reads.append(name)
        return loaded[name]

    export(tmp_path / "out", folder, shapes, read, dtype="float32", max_shard_bytes=2_000)
    written = {
        name: value
        for file in (tmp_path / "out").glob("*.safetensors")
        for name, value in load_file(file).items()
    }
    assert written.keys() == tensors.keys()
    for name, value in tensors.items():
        assert written[name].tobytes() == value.tobytes(), name
    assert sorted(reads) == sorted(shapes)  # each parameter once, its experts together


@pytest.mark.parametrize("family", RAW)
def test_without_the_sources_weights_experts_are_written_apart(tmp_path, family):
    values = values_of(family)
    folder = write_folder(tmp_path / "in", RAW[family], values)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    shapes = parse_config(RAW[family]).parameter_shapes()
    export(tmp_path / "out", folder, shapes, values.__getitem__, dtype="float32")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == (
        in_files(family, "apart", values).keys()
    )


def test_what_is_missing_is_called_as_in_the_files(tmp_path):
    tensors = in_files("qwen3_moe", "apart", values_of("qwen3_moe"))
    lost = "model.layers.1.mlp.experts.2.up_proj.weight"
    del tensors[lost]
    folder = write_folder(tmp_path, RAW["qwen3_moe"], tensors)
    with pytest.raises(ValueError, match=rf"Missing: {lost}. Unexpected: none"):
        check_folder(folder, parse_config(RAW["qwen3_moe"]))
    assert lost not in read_index(folder)


def test_experts_of_several_dtypes_are_refused(tmp_path):
    tensors = in_files("mixtral", "apart", values_of("mixtral"))
    odd = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    tensors[odd] = tensors[odd].astype(np.float16)
    folder = write_folder(tmp_path, RAW["mixtral"], tensors)
    with pytest.raises(ValueError, match=r"w1.weight in .* is F16, other experts of .* are F32"):
        check_folder(folder, parse_config(RAW["mixtral"]))
