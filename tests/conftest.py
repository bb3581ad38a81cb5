"""Every test process: CPU only, eight compute devices beside eight that hold the state."""

import atexit
import shutil
import tempfile

import slidedp_jax

# Many tests compile the same programs for trainers of their own; a fresh folder per process, so
# that nothing outlives a change of the code or of JAX.
COMPILED = tempfile.mkdtemp(prefix="slidedp_jax_compiled_")
atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)

slidedp_jax.configure(platform="cpu", num_devices=8, num_host_devices=8, compilation_cache=COMPILED)

import jax  # noqa: E402 - JAX is configured first

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_numpy_rank_promotion", "raise")
