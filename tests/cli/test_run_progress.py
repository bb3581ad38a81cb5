"""What a run says while it loads."""

import numpy as np

from slidedp_jax.run.progress import LoadProgress


def test_loading_is_handed_on_and_its_share_said(capsys):
    taken = {}
    progress = LoadProgress(taken.__setitem__, 4_000_000_000, every_s=0.0)
    progress("a", np.broadcast_to(np.float32(1), (1000, 1_000_000)))
    progress("b", np.broadcast_to(np.float32(2), (3000, 1_000_000)))
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "weights: 25% of 4.0 G parameters",
        "weights: 100% of 4.0 G parameters",
    ]
    assert list(taken) == ["a", "b"]


def test_quick_loading_says_nothing(capsys):
    progress = LoadProgress(lambda name, values: None, 10, every_s=60.0)
    progress("a", np.ones(10))
    assert capsys.readouterr().out == ""
