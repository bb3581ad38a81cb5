"""The table of measured products, and how it is made of a benchmark's record."""

import runpy
from pathlib import Path

from slidedp_jax.models.measured_products import MEASURED, Measured
from slidedp_jax.models.product_forms import FORMS, PRODUCTS

MAKER = runpy.run_path(str(Path(__file__).parents[2] / "scripts/make/make_product_table.py"))


def result(form, ms, error=0.002, product="forward", **more):
    return {
        "form": form,
        "product": product,
        "experts": 8,
        "rows": 1_000_000,
        "columns": [50, 20],
        "errors": [0.0, error],
        "ms": ms,
    } | more


def test_entries_are_right_results_by_their_median_at_the_best_block():
    record = {
        "machine": {"gpus": ["NVIDIA H200", "NVIDIA H200"]},
        "results": [
            result("portable", [2.0, 1.0, 9.0], block=256),
            result("portable", [1.0, 1.0, 1.0], block=512),
            result("triton", [0.1], error=0.5),
            {"form": "mosaic", "product": "forward", "error": "no kernel"},
            {"form": "mosaic", "error": "out of time"},
            {"form": "portable", "product": "block forward", "grouped_flops": 1.0, "ms": [1.0]},
        ],
    }
    # 2 x 1,000,000 x 50 x 20 operations in a millisecond.
    entry = Measured("NVIDIA H200", "forward", 8, 1_000_000, (50, 20), "portable", 2.0)
    assert MAKER["entries_of"](record) == [entry]


def test_the_table_holds_what_is_looked_up():
    for entry in MEASURED:
        assert entry.form in FORMS
        assert entry.product in PRODUCTS
        assert entry.tflop_per_s > 0
