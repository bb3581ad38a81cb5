"""What tests of hosts rest on: that no collective of any thread escapes them."""

import ast

import pytest
from many_hosts import run_hosts

CODE = """
import threading
import slidedp_jax
slidedp_jax.configure(platform="cpu", num_devices=2, num_host_devices=2, num_hosts=1)
from dispatched import Dispatched
dispatched = Dispatched()
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(np.array(slidedp_jax.process.current_setup().devices()[0]), ("data",))
rows = NamedSharding(mesh, PartitionSpec("data"))
x = jax.device_put(np.ones(2, np.float32), rows)
plain, summed = jax.jit(lambda x: x + 1), jax.jit(lambda x: x.sum())
plain(x), summed(x)  # compiled here, and only dispatched elsewhere
ahead = summed.lower(x).compile()

def work(*programs):
    for program in programs:
        for _ in range(2):
            program(x)

for name, programs in (("a", [plain]), ("b", [plain, summed]), ("c", [ahead])):
    thread = threading.Thread(target=work, args=programs, name=name)
    thread.start()
    thread.join()
print("FOUND", dispatched.of_threads())
print("CALLS", len(dispatched.calls))
"""


@pytest.mark.thorough
def test_a_collective_that_another_thread_only_dispatches_is_seen():
    printed = run_hosts(1, CODE).output(0)
    found = ast.literal_eval(printed.split("FOUND ")[1].splitlines()[0])
    assert found["a"] == ["none"]
    assert found["b"] == ["all-reduce", "none"]
    assert found["c"] == ["all-reduce"]
    assert "none" in found["MainThread"]
