"""One tiny model folder and one file of rows for all tests of the command."""

import pytest
from runs import Inputs, write_model, write_rows


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    return Inputs(
        model=write_model(folder / "model"),
        rows=write_rows(folder / "rows.jsonl"),
    )


@pytest.fixture(scope="session")
def straight(inputs, tmp_path_factory):
    """Twelve steps in one go, all checkpoints kept, and the export."""
    out = tmp_path_factory.mktemp("straight") / "run"
    inputs.train(out, save_steps=2, save_total_limit=6, export=True)
    return out
