"""The update kernel's form comes from a table, whatever a stopwatch would say."""

import itertools
import random
import time

import jax
import optax
import pytest
from streamed_training import small_config, strategy

from slidedp_jax import Trainer
from slidedp_jax.models import decoder
from slidedp_jax.update.kernel_form import kernel_form


@pytest.mark.parametrize(
    ("version", "form"),
    [
        ("0.10.0", "whole"),
        ("0.10.2", "whole"),
        ("0.11.2", "fused"),
        ("0.11.3.dev20260101", "fused"),
        ("0.12.0.1", "blocked"),
        ("0.19", "blocked"),
        ("1.0.0", "blocked"),
        ("0.9.1", "whole"),
    ],
)
@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "anything"])
def test_the_newest_row_that_is_not_newer(version, form, machine):
    assert kernel_form(version, machine) == form


def test_timing_does_not_decide(monkeypatch):
    """With a clock that runs backwards and jumps, as beside other work, all trainers are alike."""
    chance = random.Random(0)
    monkeypatch.setattr(time, "perf_counter", lambda: chance.uniform(-1, 1))
    forms = set()
    for seed in range(2):
        with Trainer(
            decoder.build(small_config(layers=1)),
            optax.adamw(1e-3),
            strategy=strategy(num_host_devices=1 + seed),
            num_devices=1,
        ) as it:
            forms.add(it.kernel_form)
    assert forms == {kernel_form(jax.__version__)}


def test_versions_in_order_never_go_back():
    """A row holds until the next one begins."""
    versions = [f"0.{minor}.{patch}" for minor, patch in itertools.product(range(8, 16), (0, 9))]
    runs = [form for form, _ in itertools.groupby(map(kernel_form, versions))]
    assert len(runs) == len(set(runs))
