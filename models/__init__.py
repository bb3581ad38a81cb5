"""Models as data and pure functions: configurations, a Flax NNX decoder, Hugging Face in and out.

Importing this package imports no JAX; `models.config` never does.
"""
