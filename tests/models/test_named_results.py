"""Names of results, and how many bytes have them."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from slidedp_jax.models.named_results import DECIDED, PRODUCTS, decided, named_bytes


def test_bytes_of_a_name_are_counted_wherever_it_is_given():
    def turn(x, _):
        return x * decided(x > 0), checkpoint_name(x, PRODUCTS)

    @jax.jit
    def inner(x):
        return decided({"chosen": lax.top_k(x, 2)[1], "weights": x[:, :1]})

    def function(x):
        chosen = inner(x)
        x, kept = lax.scan(turn, x + chosen["weights"], None, length=3)
        return x, kept, chosen

    program = jax.make_jaxpr(function)(jnp.ones((4, 5)))
    # int32 [4, 2] and float32 [4, 1], and three times bool [4, 5] and float32 [4, 5].
    assert named_bytes(program, DECIDED) == 4 * 2 * 4 + 4 * 1 * 4 + 3 * 4 * 5
    assert named_bytes(program, PRODUCTS) == 3 * 4 * 5 * 4
    assert named_bytes(program, "another") == 0
