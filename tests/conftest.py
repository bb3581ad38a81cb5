"""Every test process: CPU only, eight compute devices beside eight that hold the state.

Without JAX's persistent compilation cache: reading CPU programs back from it has crashed a process.
"""

import slidedp_jax

slidedp_jax.configure(platform="cpu", num_devices=8, num_host_devices=8)

import jax  # noqa: E402 - JAX is configured first

jax.config.update("jax_numpy_rank_promotion", "raise")
