"""What one device computes: products, attention, element-wise programs, a layer and the head.

Layers and heads are compiled as in training (`step.programs`). Inputs are random: with constant
ones a GPU draws less power and runs up to 10 % faster. Every program runs for a while, because
clocks settle in a second or two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from slidedp_jax.measure.links import mesh_of, platform_of
from slidedp_jax.measure.stopwatch import Measurement, Stopwatch
from slidedp_jax.models import decoder
from slidedp_jax.models.attention import attend, device_target, resolve_attention
from slidedp_jax.models.config import ModelConfig, named_config
from slidedp_jax.planner.flops import attention_forward_flops, row_pairs
from slidedp_jax.step.batch import prepare
from slidedp_jax.step.layer_functions import ChunkKind
from slidedp_jax.step.programs import ComputePrograms
from slidedp_jax.transfer.device_map import DeviceMap
from slidedp_jax.transfer.routes import GradientPath, weight_path
from slidedp_jax.transfer.wire_programs import WirePrograms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """What is measured on a kind of machine.

    Attributes:
      model: a named model; one of its layers, and its head.
      seq_length: tokens of a row.
      rows: numbers of rows of which a layer is timed.
      loss_tokens: tokens whose logits exist at once.
      elements: of the element-wise program.
      sample_s: seconds of calls in a row that make one sample.
    """

    model: str
    seq_length: int
    rows: tuple[int, ...]
    loss_tokens: int
    elements: int
    sample_s: float


SHAPES = {
    "gpu": Shapes(
        model="qwen3-4b",
        seq_length=4096,
        rows=(2, 4),
        loss_tokens=4096,
        elements=1 << 28,
        sample_s=0.35,
    ),
    "cpu": Shapes(
        model="smollm2-135m",
        seq_length=512,
        rows=(1, 2),
        loss_tokens=512,
        elements=1 << 24,
        sample_s=0.2,
    ),
}


class _Backward:
    """Calls a backward program, whose gradient is donated: what comes out goes in next.

    Now and then it begins anew, so that numbers stay of their size.
    """

    def __init__(self, backward: Callable[..., Any], dy: jax.Array, batch: Any):
        self._backward, self._first, self._batch = backward, dy, batch
        self._dy, self._calls = dy + 0, 0

    def __call__(self) -> Any:
        self._calls += 1
        if self._calls % 8 == 0:
            self._dy = self._first + 0
        self._dy, sums = self._backward(self._dy, self._batch, None)
        return sums


class Compute:
    """Timing on the first device."""

    def __init__(self, watch: Stopwatch, devices: Sequence[jax.Device]):
        self._watch = watch
        self.shapes = SHAPES[platform_of(devices)]
        self.device = devices[0]
        self.config: ModelConfig = named_config(self.shapes.model)
        self._mesh = mesh_of(devices[:1])
        self._sharding = NamedSharding(self._mesh, PartitionSpec())
        self._key = jax.random.key(0)

    def normal(self, shape: Sequence[int], dtype: Any, scale: float = 1.0) -> jax.Array:
        """Random numbers on the device."""
        self._key, key = jax.random.split(self._key)

        def draw(key: jax.Array) -> jax.Array:
            return (scale * jax.random.normal(key, tuple(shape), jnp.float32)).astype(dtype)

        made: jax.Array = jax.jit(draw, out_shardings=self._sharding)(
            jax.device_put(key, self._sharding)
        )
        return made

    def time(
        self,
        name: str,
        call: Callable[[], Any],
        *,
        work: float,
        unit: str = "operations",
        samples: int = 5,
        **about: Any,
    ) -> Measurement:
        """Samples of many calls issued one after the other."""
        jax.block_until_ready(call())
        once = self._watch
        start = once.elapsed_s
        jax.block_until_ready(call())
        count = max(1, min(200, round(self.shapes.sample_s / max(once.elapsed_s - start, 1e-6))))

        def burst() -> None:
            for _ in range(count):
                result = call()
            jax.block_until_ready(result)

        seconds = []
        for number in range(samples + 1):
            begin = once.elapsed_s
            burst()
            if number:
                seconds.append((once.elapsed_s - begin) / count)
        return once.keep(
            Measurement(
                name=name,
                seconds=tuple(seconds),
                work=work,
                unit=unit,
                about=about | {"calls": count},
            )
        )

    def products(self) -> None:
        """Products of the layer's shapes, forward and both of backward, and some in fp32."""
        tokens = self.shapes.rows[-1] * self.shapes.seq_length
        hidden, width = self.config.hidden_size, self.config.intermediate_size
        for dtype, kinds in ((jnp.bfloat16, "forward dgrad wgrad"), (jnp.float32, "forward")):
            x = self.normal((tokens, hidden), dtype)
            weight = self.normal((width, hidden), dtype, 0.02)
            dy = self.normal((tokens, width), dtype, 0.01)
            operands = {"forward": (x, weight, 1, 1), "dgrad": (dy, weight, 1, 0)}
            operands["wgrad"] = (dy, x, 0, 0)
            precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
            for kind in kinds.split():
                left, right, of_left, of_right = operands[kind]
                contracted = (((of_left,), (of_right,)), ((), ()))
                program = jax.jit(
                    partial(lax.dot_general, dimension_numbers=contracted, precision=precision)
                )
                self.time(
                    "product",
                    partial(program, left, right),
                    work=2.0 * tokens * hidden * width,
                    samples=3,
                    dtype=jnp.dtype(dtype).name,
                    kind=kind,
                    shape=[tokens, hidden, width],
                )

    def attention(self) -> None:
        """Forward and backward of rows of one document, as operations of visible pairs."""
        rows, length, config = self.shapes.rows[-1], self.shapes.seq_length, self.config
        heads, keys, dtype = config.num_attention_heads, config.num_key_value_heads, jnp.bfloat16
        kernel = self._attention_kernel(dtype)
        q, k, v, dy = (
            self.normal((rows, length, count, config.head_dim), dtype)
            for count in (heads, keys, keys, heads)
        )

        def attention(q: Any, k: Any, v: Any) -> Any:
            return attend(q, k, v, {}, window=None, implementation=kernel)

        def both(dy: Any, *qkv: Any) -> Any:
            out, pullback = jax.vjp(attention, *qkv)
            return out, *pullback(dy)

        flops = attention_forward_flops(row_pairs(length), heads, config.head_dim) * rows
        marks: dict[str, Any] = {
            "dtype": "bfloat16",
            "kernel": kernel,
            "rows": rows,
            "tokens": length,
        }
        forward = partial(jax.jit(attention), q, k, v)
        self.time("attention forward", forward, work=flops, samples=3, **marks)
        backward = partial(jax.jit(both), dy, q, k, v)
        self.time("attention forward and backward", backward, work=3.5 * flops, **marks)

    def _attention_kernel(self, dtype: Any) -> str:
        choice = resolve_attention(
            "auto",
            target=device_target(self.device),
            dtype=dtype,
            head_dim=self.config.head_dim,
            rows="whole",
        )
        return choice.name

    def elementwise(self) -> None:
        """Reading and writing device memory: a scaled sum of two arrays.

        On CPUs in float32: in bfloat16, which they emulate, it is arithmetic that takes the time.
        """
        dtype: Any = jnp.float32 if platform_of([self.device]) == "cpu" else jnp.bfloat16
        a, b = (self.normal((self.shapes.elements,), dtype) for _ in range(2))
        program = jax.jit(lambda a, b: a * dtype(0.5) + b)
        self.time(
            "elementwise",
            partial(program, a, b),
            work=3.0 * a.nbytes,
            unit="bytes",
            dtype=jnp.dtype(dtype).name,
        )

    def layer(self, dtype: Any, rows: int) -> None:
        """One layer, forward and backward with recomputation."""
        programs, model = self._programs(dtype)
        layer_fns = (model.layer_fns[0],)
        trees = (self._params(model.layers[0], dtype),)
        forward = programs.forward(layer_fns)
        backward = programs.backward(ChunkKind(layer_fns=layer_fns, widen=False))
        batch = self._batch(rows)
        shape = (rows, self.shapes.seq_length, self.config.hidden_size)
        x = self.normal(shape, dtype)
        again = _Backward(partial(backward, trees, x), self.normal(shape, dtype, 0.01), batch)
        marks: dict[str, Any] = {"dtype": jnp.dtype(dtype).name, "rows": rows, "tokens": shape[1]}
        self.time("layer forward", partial(forward, trees, x, batch), work=0.0, **marks)
        self.time("layer backward", again, work=0.0, **marks)

    def head(self, dtype: Any) -> None:
        """Head and loss, forward and backward."""
        programs, model = self._programs(dtype)
        rows = self.shapes.rows[0]
        embed, head = self._params(model.embed, dtype), self._params(model.head, dtype)
        x = self.normal((rows, self.shapes.seq_length, self.config.hidden_size), dtype)
        tied = embed if model.tied else None
        scale = jax.device_put(np.float32(1e-4), self._sharding)
        program = programs.head_backward(False)
        call = partial(program, head, tied, x, self._batch(rows), scale, None)
        marks: dict[str, Any] = {
            "dtype": jnp.dtype(dtype).name,
            "rows": rows,
            "tokens": self.shapes.seq_length,
        }
        self.time("head", call, work=0.0, samples=3, **marks)

    def _programs(self, dtype: Any) -> tuple[ComputePrograms, Any]:
        model = decoder.build(self.config)
        on_devices = DeviceMap(self._mesh, dtype)
        gradients = GradientPath("reduce_scatter", self._mesh, self._sharding, jnp.dtype(dtype))
        wire = WirePrograms(on_devices, weight_path("replicate", self._mesh), gradients)
        programs = ComputePrograms(
            model, on_devices, wire, loss_chunk_tokens=self.shapes.loss_tokens
        )
        return programs, model

    def _params(self, stage: Any, dtype: Any) -> Any:
        """Random parameters of a stage: norms about 1, matrices about 0."""

        def leaf(leaf: Any) -> jax.Array:
            small = self.normal(leaf.shape, dtype, 0.02)
            return 1 + small if len(leaf.shape) == 1 else small

        return jax.tree.map(leaf, stage.shapes)

    def _batch(self, rows: int) -> dict[str, jax.Array]:
        """Rows of random tokens as the programs take them."""
        random = np.random.default_rng(1)
        shape = (rows, self.shapes.seq_length)
        ids = random.integers(0, self.config.vocab_size, shape).astype(np.int32)
        arrays = prepare(
            {"input_ids": ids, "labels": ids},
            vocab_size=self.config.vocab_size,
            num_devices=1,
            rows_per_microbatch=rows,
        )
        return {
            name: jax.device_put(array, self._sharding)
            for name, array in arrays.microbatches[0].items()
        }
