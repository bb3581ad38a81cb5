"""Every test process: CPU only, eight compute devices beside the host devices that hold the state."""

import slidedp_jax

slidedp_jax.configure(platform="cpu", num_devices=8, num_host_devices=8)

import jax  # noqa: E402 - JAX is configured first

jax.config.update("jax_numpy_rank_promotion", "raise")
