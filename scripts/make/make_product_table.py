"""Make `models/measured_products.py` of records of `scripts/bench/bench_experts.py`.

    python scripts/make/make_product_table.py docs/benchmarks/experts_*.json

Of each device, array and product every realisation that was right, at its best block, is an entry;
what was wrong or did not run is left out. The records are the whole of the table: give all of them.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

TABLE = ROOT / "models" / "measured_products.py"
LARGEST_ERROR = 0.01
"""Relative, of results in bf16: rounding is 0.002, a wrong row of many thousand 0.01."""


def main() -> None:
    """Reads the records that are named and writes the table."""
    entries = [
        entry
        for path in sys.argv[1:]
        for entry in entries_of(json.loads(pathlib.Path(path).read_text()))
    ]
    head = TABLE.read_text().split("MEASURED: tuple[Measured, ...] =")[0]
    lines = "".join(f"    {entry!r},\n" for entry in sorted(entries))
    TABLE.write_text(f"{head}MEASURED: tuple[Measured, ...] = (\n{lines})\n")
    subprocess.run([sys.executable, "-m", "ruff", "format", str(TABLE)], check=True)


def entries_of(record: Mapping[str, Any]) -> list[Any]:
    """What a record says, its device spelled as JAX does; of several blocks the fastest."""
    (device_kind,) = set(record["machine"]["gpus"]) or {"cpu"}
    from slidedp_jax.models.measured_products import Measured

    best: dict[tuple[str, str, int, int, tuple[int, int], str], float] = {}
    for result in right_results(record["results"]):
        num_out, num_in = result["columns"]
        what = result["product"], result["experts"], result["rows"], (num_out, num_in)
        key = (device_kind, *what, result["form"])
        speed = 2.0 * result["rows"] * num_out * num_in / statistics.median(result["ms"]) / 1e9
        best[key] = max(speed, best.get(key, 0.0))
    return [Measured(*key, round(speed, 1)) for key, speed in best.items()]


def right_results(results: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """Those of single products that ran and were right."""
    from slidedp_jax.models.product_forms import PRODUCTS

    return (
        result
        for result in results
        if result.get("product") in PRODUCTS
        and "ms" in result
        and max(result["errors"]) <= LARGEST_ERROR
    )


if __name__ == "__main__":
    main()
