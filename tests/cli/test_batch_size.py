"""Rows of a step by the planner; what packing and larger batches would give; padding apart."""

import json
import math
import re
import shutil

import numpy as np
import pytest
from runs import losses, metrics, write_rows

from slidedp_jax import pretrained
from slidedp_jax.data import BatchSource, Examples, ExamplesBuilder, StepSize
from slidedp_jax.errors import UserError
from slidedp_jax.run import batch_size
from slidedp_jax.run.arguments import parse_arguments
from slidedp_jax.run.checks import load_inputs, make_plan
from slidedp_jax.train import main

AUTO = {"per_device_train_batch_size": "auto", "rows_per_microbatch": "null"}


@pytest.fixture(scope="module")
def many_rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "many.jsonl", 400)


def rates(inputs, rows, **settings) -> dict[int, float]:
    """Size -> predicted tokens/s of a whole search, for all sizes that the data fills."""
    words = inputs.command(inputs.model / "none", train_file=rows, dry_run=True, **settings)
    args = parse_arguments(words)
    loaded = load_inputs(args, 8)
    sizes = [2**n for n in range(20) if 8 * 2**n <= loaded.source.num_rows]
    return {
        size: make_plan(args, loaded, 8, rows_per_step=8 * size).chosen.time.tokens_per_s
        for size in sizes
    }


@pytest.mark.parametrize("hardware", ["rtx4090", pytest.param("cpu", marks=pytest.mark.thorough)])
def test_auto_is_the_smallest_that_is_nearly_the_fastest(
    hardware, inputs, many_rows, tmp_path, capsys
):
    settings = AUTO | {"hardware": hardware, "layers_per_chunk": "null"}
    found = rates(inputs, many_rows, **settings)
    words = inputs.command(tmp_path / "out", train_file=many_rows, dry_run=True, **settings)
    assert main(words) == 0
    said = capsys.readouterr().out
    size = int(re.search(r"per_device_train_batch_size auto is (\d+) ", said)[1])
    assert f" steps of {8 * size} rows," in said
    near = batch_size.GAIN ** (1 + math.log2(max(found)))
    assert found[size] >= max(found.values()) / near
    assert size == 1 or found[size] > batch_size.GAIN * found[size // 2]
    if hardware == "rtx4090":  # a step of one row is all overhead
        assert size > 8 and found[size] > 4 * found[1]


@pytest.mark.thorough
def test_what_auto_has_found_is_recorded_and_obeyed(inputs, tmp_path, capsys, monkeypatch):
    def searches_find(size):
        found = batch_size._Found(size=size, tokens_per_s=1.0)
        monkeypatch.setattr(batch_size, "_fastest", lambda *_: found)

    fixed, auto = tmp_path / "fixed", tmp_path / "auto"
    searches_find(2)
    settings = {"save_steps": 2, "max_steps": 3}
    inputs.train(auto, **settings | AUTO)
    assert (
        json.loads((auto / "run.json").read_text())["arguments"]["per_device_train_batch_size"] == 2
    )
    assert "auto is 2" in capsys.readouterr().out
    searches_find(1)
    inputs.train(fixed, **settings | AUTO | {"per_device_train_batch_size": 2})
    whole = losses(auto)
    assert whole == losses(fixed)
    shutil.rmtree(auto / "checkpoints" / "step_00000003")
    (auto / "run.json").unlink()  # then the checkpoint's record is asked
    capsys.readouterr()
    inputs.train(auto, **settings | AUTO)
    said = capsys.readouterr().out
    assert "auto is 2 (as it was)" in said
    assert "planned anew" not in said and "steps have" not in said
    assert losses(auto) == whole
    inputs.train(fixed, **settings | AUTO | {"max_steps": 4})  # from a number to auto
    assert [len(record["row_ids"]) for record in metrics(fixed)] == [16, 16, 16, 16]
    again = tmp_path / "again"
    inputs.train(again, **settings | AUTO, plan_from=auto / "run.json")
    assert losses(again) == whole


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("many", "per_device_train_batch_size is 'many'; it can be auto, a number"),
        ("0", "per_device_train_batch_size is 0; it must be at least 1, or auto"),
        ("1.5", "a whole number is expected"),
    ],
)
def test_other_sizes_are_refused(value, message, inputs, tmp_path):
    words = inputs.command(tmp_path, per_device_train_batch_size=value)
    with pytest.raises(UserError, match=re.escape(message)):
        parse_arguments(words)


def test_auto_with_fewer_rows_than_devices_is_refused(inputs, tmp_path, capsys):
    rows = write_rows(tmp_path / "few.jsonl", 5)
    assert main(inputs.command(tmp_path / "out", train_file=rows, **AUTO)) == 1
    assert "the training data has 5 rows, fewer than one optimizer step" in capsys.readouterr().err


def test_what_packing_would_give_is_said_and_true(inputs, many_rows, tmp_path, capsys):
    settings = {"train_file": many_rows, "max_seq_length": 256, "max_steps": "null"}
    settings |= {"per_device_train_batch_size": 1, "rows_per_microbatch": 1}

    def said(**more):
        assert main(inputs.command(tmp_path / "out", dry_run=True, **settings | more)) == 0
        return capsys.readouterr().out

    unpacked = said()
    note = re.search(
        r"note: rows fill ([\d.]+) % of 256 tokens: --packing would need (\d+) steps per epoch "
        r"instead of 50",
        unpacked,
    )
    tokens = int(re.search(r"tokens   ([\d,]+),", unpacked)[1].replace(",", ""))
    assert float(note[1]) == pytest.approx(100 * tokens / (400 * 256), rel=0.05)
    packed = said(packing=True)
    assert f"{note[2]} steps of 8 packed rows, 1.00 epochs" in packed
    assert "--packing" not in packed
    # Rows that nothing can be put beside have nothing to gain.
    assert "--packing" not in said(max_seq_length=48, over_long="truncate")


def test_fewer_packed_rows_than_a_step_takes_come_with_a_smaller_batch(
    inputs, many_rows, tmp_path, capsys
):
    settings = {"train_file": many_rows, "max_seq_length": 1024, "max_steps": "null"}
    words = inputs.command(tmp_path / "out", dry_run=True, **settings)
    assert main(words) == 0
    said = capsys.readouterr().out
    more = re.search(r"--packing --per_device_train_batch_size (\d) would need (\d) step", said)
    settings |= {"packing": True, "per_device_train_batch_size": int(more[1])}
    words = inputs.command(tmp_path / "out", dry_run=True, rows_per_microbatch=1, **settings)
    settings.pop("rows_per_microbatch", None)
    assert main(words) == 0
    assert f"{more[2]} steps of {8 * int(more[1])} packed rows" in capsys.readouterr().out


def test_a_larger_batch_that_is_much_faster_is_named(inputs, many_rows, tmp_path, capsys):
    settings = {"train_file": many_rows, "hardware": "rtx4090", "packing": True}
    settings |= {"rows_per_microbatch": "null", "layers_per_chunk": "null"}

    def said(size):
        words = inputs.command(
            tmp_path / "out", dry_run=True, per_device_train_batch_size=size, **settings
        )
        assert main(words) == 0
        printed = capsys.readouterr().out
        return printed, float(re.search(r"predicted, ([\d,]+) tok", printed)[1].replace(",", ""))

    small, rate = said(1)
    note = re.search(r"--per_device_train_batch_size (\d+) would be ([\d.]+) times as fast", small)
    _, larger_rate = said(int(note[1]))
    assert larger_rate / rate == pytest.approx(float(note[2]), rel=0.05)


@pytest.mark.thorough
def test_padding_is_counted_apart(inputs, tmp_path, capsys):
    out = tmp_path / "out"
    inputs.train(out, max_steps=4, max_seq_length=256, save_steps=2)
    said = capsys.readouterr().out
    base = pretrained.from_pretrained(inputs.model)
    source, _ = base.rows(inputs.rows, rows_per_step=24, max_seq_length=256, seed=42)
    tokens = padding = 0
    for record in metrics(out):
        batch = next(source)
        tokens += batch.num_tokens
        padding += batch.arrays["input_ids"].size - batch.num_tokens
        assert (record["num_tokens"], record["num_padding_tokens"]) == (tokens, padding)
        rate = record["tokens_per_second"] * record["step_time_s"]
        assert rate == pytest.approx(batch.num_tokens)
    assert f"{tokens:,} tokens seen; padding took {padding / (tokens + padding):.0%} of" in said
    assert "tokens/s without padding" in said
    shutil.rmtree(out / "checkpoints" / "step_00000004")
    inputs.train(out, max_steps=4, max_seq_length=256, save_steps=2)
    assert metrics(out)[-1]["num_padding_tokens"] == padding


@pytest.mark.parametrize("rows_per_step", [1, 16])
def test_width_shares_are_those_of_many_epochs(rows_per_step):
    lengths = np.random.default_rng(0).integers(1, 512, 160) ** 2 // 512 + 1
    examples = examples_of(lengths)
    source = BatchSource(examples, max_seq_length=512, step_size=1)
    source.resize(StepSize(per_device=rows_per_step))
    assert source.density == pytest.approx(lengths.sum() / (160 * 512))
    widths = [
        batch.arrays["input_ids"].shape[1]
        for epoch in range(1 if rows_per_step == 1 else 60)
        for batch in source.one_epoch(epoch)
        if len(batch.arrays["input_ids"]) == rows_per_step
    ]
    shares = source.width_shares()
    assert sum(shares.values()) == pytest.approx(1)
    for width in source.widths:
        assert shares.get(width, 0) == pytest.approx(widths.count(width) / len(widths), abs=0.05)


def examples_of(lengths) -> Examples:
    builder = ExamplesBuilder()
    for row, length in enumerate(lengths):
        builder.append(np.ones(length, np.int32), np.ones(length, bool), row)
    return builder.finish()
