"""A user's own model as what the runtime trains: `slidedp_jax.adapt`."""
