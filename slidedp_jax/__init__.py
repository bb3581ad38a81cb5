"""Full-parameter fine-tuning with the training state in host memory, streamed to the GPUs.

Importing this package imports no JAX, so that `slidedp_jax.configure()` can be a script's first
line. The public names below are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from slidedp_jax.process import configure

if TYPE_CHECKING:
    from slidedp_jax.adapter.adapt import Adapted, adapt
    from slidedp_jax.adapter.paths import Stacked
    from slidedp_jax.errors import TrainingStopped, UserError
    from slidedp_jax.pretrained import Pretrained, from_pretrained
    from slidedp_jax.state.starting_state import TO_BE_RESTORED
    from slidedp_jax.step.metrics import StepMetrics
    from slidedp_jax.this_machine import plan_for
    from slidedp_jax.trainer import Trainer

__version__ = "0.1.0"

_LAZY = {
    "Adapted": "slidedp_jax.adapter.adapt",
    "adapt": "slidedp_jax.adapter.adapt",
    "Stacked": "slidedp_jax.adapter.paths",
    "Pretrained": "slidedp_jax.pretrained",
    "from_pretrained": "slidedp_jax.pretrained",
    "plan_for": "slidedp_jax.this_machine",
    "Trainer": "slidedp_jax.trainer",
    "StepMetrics": "slidedp_jax.step.metrics",
    "TO_BE_RESTORED": "slidedp_jax.state.starting_state",
    "UserError": "slidedp_jax.errors",
    "TrainingStopped": "slidedp_jax.errors",
}

__all__ = [
    "TO_BE_RESTORED",
    "Adapted",
    "Pretrained",
    "Stacked",
    "StepMetrics",
    "Trainer",
    "TrainingStopped",
    "UserError",
    "__version__",
    "adapt",
    "configure",
    "from_pretrained",
    "plan_for",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'slidedp_jax' has no attribute {name!r}; it has {__all__}")
