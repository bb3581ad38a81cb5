"""Which realisation of experts' products is chosen, and that each is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slidedp_jax.jax_internals import RAGGED_DOT_FUSION
from slidedp_jax.models.compute_target import ComputeTarget
from slidedp_jax.models.grouped_products import grouped_product
from slidedp_jax.models.measured_products import Measured
from slidedp_jax.models.product_forms import (
    FORMS,
    PORTABLE,
    Forms,
    obstacles,
    resolve_forms,
)

KIND = "NVIDIA H200"
HOPPER = ComputeTarget(platform="cuda", compute_capability=9.0, device_kind=KIND)
CPU = ComputeTarget(platform="cpu", device_kind="cpu")


def entry(product, form, speed, rows=1024, columns=(64, 32), kind=KIND):
    return Measured(kind, product, 8, rows, columns, form, speed)


TABLE = (
    entry("forward", "portable", 100.0),
    entry("forward", "ragged_dot", 300.0),
    entry("forward", "mosaic", 400.0),
    entry("dgrad", "portable", 100.0),
    entry("dgrad", "ragged_dot", 90.0),
    entry("dgrad", "portable", 100.0, rows=64_000),
    entry("dgrad", "ragged_dot", 200.0, rows=64_000),
)


def resolved(table=TABLE, requested="auto", target=HOPPER, dtype="bfloat16", rows=2048):
    shape = {"experts": 8, "rows": rows, "columns": (64, 32)}
    return resolve_forms(requested, target=target, dtype=dtype, table=table, **shape)


def test_without_a_measurement_on_such_a_device_all_is_portable(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", RAGGED_DOT_FUSION)
    other = [row._replace(device_kind="NVIDIA H100") for row in TABLE]
    assert resolved(()) == resolved(other) == resolved(target=CPU) == PORTABLE
    assert resolved(dtype="float32") == PORTABLE


def test_the_fastest_that_can_run_at_the_nearest_shape_is_taken(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--other {RAGGED_DOT_FUSION}")
    assert resolved() == Forms("ragged_dot", "portable", "portable")
    assert resolved(rows=50_000) == Forms("ragged_dot", "ragged_dot", "portable")
    monkeypatch.setenv("XLA_FLAGS", "")
    assert resolved() == PORTABLE
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert resolved() == Forms("mosaic", "portable", "portable")
    old = ComputeTarget(platform="cuda", compute_capability=8.0, device_kind=KIND)
    assert resolved(target=old) == PORTABLE


def test_what_is_asked_for_runs_or_says_why_not(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(ValueError, match=r"'ragged_dot' cannot run: XLA_FLAGS lacks --xla_gpu"):
        resolved(requested="ragged_dot")
    with pytest.raises(ValueError, match=r"platform is cpu.*tokamax is not installed"):
        resolved(requested="triton", target=CPU)
    with pytest.raises(ValueError, match=r"dtype is float32"):
        resolved(requested="mosaic", dtype="float32")
    with pytest.raises(ValueError, match=r"'fast'; supported: 'auto', 'portable'"):
        resolved(requested="fast")
    assert resolved(requested="portable", dtype="float32") == PORTABLE
    assert resolved(requested="ragged_dot", target=CPU) == Forms(*["ragged_dot"] * 3)


def test_portable_has_no_obstacles_anywhere():
    for target in (CPU, HOPPER, ComputeTarget(platform="rocm")):
        for dtype in ("float32", "bfloat16"):
            assert not obstacles("portable", target, dtype)
    assert FORMS[0] == "portable"


@pytest.mark.parametrize(
    "forms", [Forms(*["ragged_dot"] * 3), Forms("portable", *["ragged_dot"] * 2)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ragged_dot_is_the_portable_product(forms, dtype):
    rng = np.random.default_rng(0)
    sizes = jnp.asarray([8, 0, 24, 4], jnp.int32)
    x, dy = (jnp.asarray(rng.standard_normal((36, n)), dtype) for n in (5, 7))
    weights = jnp.asarray(rng.standard_normal((4, 7, 5)), dtype)

    def products(forms):
        y, pullback = jax.vjp(
            lambda x, w: grouped_product(x, w, sizes, block=4, forms=forms), x, weights
        )
        return (y, *pullback(dy))

    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for one, other in zip(products(forms), products(PORTABLE), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), tolerance, tolerance
        )
