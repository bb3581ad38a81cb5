"""Results of a layer that have a name, by which the runtime chooses what it does not compute again.

Between forward and backward only the inputs of a chunk stay on the device, and the results whose
names were chosen; the rest is computed again. A layer gives a result a name with
`jax.ad_checkpoint.checkpoint_name`, and whatever is computed from what that returns reads the one
that stayed. Names mean nothing where there is no backward.

What is computed again is another program than the first time, so its last bits may differ. That is
harmless for numbers, not for choices: where a top-k falls otherwise, backward differentiates
another function than the one whose loss it is given. Choices are therefore `DECIDED`:

```
chosen = decided(lax.top_k(lax.stop_gradient(scores), k)[1])
weights = jnp.take_along_axis(scores, chosen, axis=-1)
```

The scores keep their gradient through `weights`. What chooses must not be differentiated itself:
the derivative of `lax.top_k` reads its indices before they have a name.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from slidedp_jax.jax_internals import inner_programs, jaxpr_of

DECIDED = "decided"
"""What backward must be given: it stays of every chunk, whatever else does."""

PRODUCTS = "products"
"""Results of products with weights. Plain products (`dot_general` without batch dimensions) are
recognised and need no name, others do (grouped products, kernels)."""

ATTENTION = "attention"
"""What attention's backward needs of its forward. JAX's fused attention is recognised."""


def decided(values: Any) -> Any:
    """Names a pytree of arrays [B, ...] that backward is given instead of computing it again.

    They take memory from forward to backward, for every layer and microbatch, so they should be
    small: the planner counts them (`planner.workload.StageWork.decided_elements`).
    """
    return checkpoint_name(values, DECIDED)


def named_bytes(program: Any, name: str) -> int:
    """Bytes of all results of that name in a traced program; each turn of a loop has its own."""
    is_named = jax.checkpoint_policies.save_only_these_names(name)
    total = 0
    for equation in jaxpr_of(program).eqns:
        if is_named(equation.primitive, **equation.params):
            total += sum(_bytes(result.aval) for result in equation.outvars)
        turns = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        total += turns * sum(named_bytes(p, name) for p in inner_programs(equation))
    return total


def _bytes(aval: Any) -> int:
    return int(math.prod(aval.shape) * aval.dtype.itemsize)
