"""What the command reports of held-out rows."""

import json

import pytest
from runs import metrics, write_rows

from slidedp_jax.models import attention
from slidedp_jax.models.compute_target import ComputeTarget
from slidedp_jax.step.pipeline import Pipeline
from slidedp_jax.train import main


def evaluations(out):
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [record for record in lines if "eval_loss" in record]


@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_the_rows_of_a_step_are_evaluated_to_its_loss(inputs, tmp_path, packing):
    """All rows make one step, in their order; the weights stay as they are."""
    num_rows = 52 if packing else 16
    rows = write_rows(tmp_path / "rows.jsonl", num_rows)
    settings = {"train_file": rows, "validation_file": rows, "shuffle": False, "packing": packing}
    settings |= {"learning_rate": 0, "max_steps": 1, "save_at_end": False}
    settings |= {"per_device_train_batch_size": 1, "rows_per_microbatch": 1}
    settings |= {"max_seq_length": 256 if packing else 64}
    settings |= {} if packing else {"gradient_accumulation_steps": 2}
    inputs.train(tmp_path / "out", **settings)
    (step,), (evaluation,) = metrics(tmp_path / "out"), evaluations(tmp_path / "out")
    assert len(step["row_ids"]) == num_rows
    assert evaluation["eval_loss"] == step["loss"]
    assert evaluation["eval_supervised_tokens"] == step["num_supervised_tokens"]


@pytest.mark.thorough
def test_it_takes_as_many_rows_at_a_time_as_a_step(inputs, tmp_path, monkeypatch):
    """Not as many as the devices compute at once: each pass streams the whole model."""
    passes, losses = [], Pipeline.losses

    def counted(self, weights, some):
        passes.append([len(batch["input_ids"]) for batch in some])
        return losses(self, weights, some)

    monkeypatch.setattr(Pipeline, "losses", counted)
    held_out = write_rows(tmp_path / "held_out.jsonl", 70)
    settings = {"validation_file": held_out, "max_steps": 1, "save_at_end": False}
    settings |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    inputs.train(tmp_path / "out", **settings | {"rows_per_microbatch": 2})
    assert passes == [[16, 16], [16, 16], [16]]


def test_packed_rows_have_no_more_documents_than_those_of_training(inputs, tmp_path, monkeypatch):
    """Else attention would need other programs, and memory that was not planned."""
    shapes, losses = [], Pipeline.losses

    def noted(self, weights, some):
        shapes.extend(batch["document_lengths"].shape for batch in some)
        return losses(self, weights, some)

    monkeypatch.setattr(Pipeline, "losses", noted)
    said = {"prompt": "p", "completion": "long " * 11}
    long = tmp_path / "long.jsonl"
    long.write_text("".join(json.dumps(said) + "\n" for _ in range(48)))
    settings = {"train_file": long, "validation_file": inputs.rows, "packing": True}
    settings |= {"max_seq_length": 128, "max_steps": 1, "save_at_end": False}
    settings |= {"per_device_train_batch_size": 1, "rows_per_microbatch": 1}
    inputs.train(tmp_path / "out", **settings)
    assert set(shapes) == {(8, 2)}


def test_a_kernel_that_only_some_of_a_run_can_have_is_refused_before_it(
    inputs, tmp_path, capsys, monkeypatch
):
    """Samples have rows of unequal prompts, which older GPUs' cuDNN cannot take."""
    older = ComputeTarget(platform="cuda", compute_capability=8.0)
    monkeypatch.setattr(attention, "device_target", lambda _: older)
    settings = {"attention": "cudnn", "dtype": "bfloat16", "dry_run": True}
    settings |= {"validation_file": inputs.rows}
    assert main(inputs.command(tmp_path / "out", **settings)) == 0
    for more, what in (
        ({"packing": True}, "for the training rows"),
        ({"sample_prompts": ["a"]}, "for sample_prompts"),
    ):
        assert main(inputs.command(tmp_path / "out", **settings | more)) == 1
        error = capsys.readouterr().err
        assert f"{what}, attention 'cudnn' cannot run: packed rows need" in error


def test_the_loss_before_the_first_step(inputs, tmp_path):
    """A run that begins anew with another loss does not take it from before."""
    settings = {"validation_file": inputs.rows, "eval_at_start": True, "max_steps": 1}
    inputs.train(out := tmp_path / "out", **settings, save_at_end=False)
    first = evaluations(out)
    assert [record["step"] for record in first] == [0, 1]
    inputs.train(out, **settings, save_at_end=False, label_smoothing_factor=0.5)
    other = evaluations(out)
    assert [record["step"] for record in other] == [0, 1]
    assert other[0]["eval_loss"] != first[0]["eval_loss"]
