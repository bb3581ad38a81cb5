"""What rounding weights to bf16 costs in learning: fp32 compute, dither and nearest side by side.

    python scripts/bench/bench_weight_rounding.py --out docs/benchmarks/NAME
    python scripts/bench/bench_weight_rounding.py --rates 1e-4 --steps 3000 --seeds 0 1 2
        --settings dither nearest --text stdlib --out docs/benchmarks/NAME

Fine-tunes SmolLM2-135M (or another folder), brought to the bf16 grid first as published weights
are, on the texts of `pydoc_data.topics`, or on the sources of Python's library, which are twenty
times as many: AdamW with decay 0.1, clip 1.0, a constant rate. Every run of a seed takes the same
rows in the same order. Records the loss of each step, the loss on held-out
rows along the way, and at the end the held-out loss of what could be exported: the fp32 masters and
those rounded to bf16 either way, all computed in fp32. Writes OUT.json after every evaluation and
OUT.svg at the end; `--plot OUT.json` draws it anew. Without --model, SmolLM2 is made of the
packages that scripts/make/make_smollm2_folder.py names.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import pathlib
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "make"))

import bench_record
import loss_plot
import numpy as np

import slidedp_jax
from slidedp_jax.planner.hardware import ComputeDtype
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.state.weight_rounding import Rounding, WeightRounding

if TYPE_CHECKING:
    from slidedp_jax.pretrained import Pretrained

SETTINGS: dict[str, tuple[ComputeDtype, Rounding]] = {
    "fp32": ("float32", "nearest"),
    "dither": ("bfloat16", "dither"),
    "nearest": ("bfloat16", "nearest"),
}
"""Name -> compute dtype and rounding, which fp32 compute makes no use of."""

EXPORTS: dict[str, Rounding | None] = {
    "fp32": None,
    "bf16 nearest": "nearest",
    "bf16 dither": "dither",
}
"""What could be exported -> how masters are rounded for it, if they are."""

HELD_OUT_EVERY = 8
"""One text of so many is held out."""
SMOOTHED = 20
"""Steps whose mean loss is shown."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="writes OUT.json and OUT.svg")
    parser.add_argument("--plot", type=pathlib.Path, help="only draw what an OUT.json holds")
    parser.add_argument("--model", type=pathlib.Path, help="model folder; default: SmolLM2-135M")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--rates", nargs="+", type=float, default=[5e-6, 1e-5, 5e-5])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of rows and dither")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text", choices=("topics", "stdlib"), default="topics")
    parser.add_argument("--rows", type=int, default=4, help="per step")
    parser.add_argument("--tokens", type=int, default=512, help="per row")
    parser.add_argument("--held-out-rows", type=int, default=32)
    parser.add_argument("--eval-every", type=int, default=100, help="steps; and at both ends")
    parser.add_argument("--layers-per-chunk", type=int, default=10)
    parser.add_argument("--state", choices=("device", "host"), help="default: device on GPUs")
    parser.add_argument("--platform", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--budget-s", type=float, help="starts no run after this")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.plot is not None:
        draw(args.plot, json.loads(args.plot.read_text()))
        return
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        # Every run has a trainer of its own, whose programs are those of the last one.
        slidedp_jax.configure(
            platform=args.platform, num_devices=1, compilation_cache=f"{work}/programs"
        )
        bench = Bench(args, pathlib.Path(work))
        record = bench_record.record(("jax", "optax"), settings=bench.facts(), results=[])
        record["start"] = bench.losses_of_exports(bench.start, seed=0)
        print(f"start: held-out loss {record['start']}", flush=True)
        runs = itertools.product(args.seeds, args.rates, args.settings)
        for seed, rate, setting in runs:
            if args.budget_s and time.perf_counter() - start > args.budget_s:
                print(f"{setting} at {rate:g}, seed {seed}: not run, out of time", flush=True)
                continue
            result: dict[str, Any] = {"setting": setting, "rate": rate, "seed": seed}
            record["results"].append(result)
            for _ in bench.run(result):
                bench_record.save(args.out, record)
            print(line(result), f"[{time.perf_counter() - start:.0f} s]", flush=True)
        bench_record.save(args.out, record)
    print(table(record))
    if args.out is not None:
        draw(args.out, record)


class Bench:
    """Model, rows and a trainer in fp32 that only evaluates."""

    def __init__(self, args: argparse.Namespace, work: pathlib.Path):
        import optax

        self.args = args
        self.base = slidedp_jax.from_pretrained(args.model or smollm2(work))
        self.start = on_the_grid(self.base)
        self.train, self.held_out = rows_of(self.base, texts(args.text), args.tokens)
        self.held_out = self.held_out[: args.held_out_rows]
        self.evaluator = slidedp_jax.Trainer(
            self.base.model(),
            optax.sgd(0.0),
            strategy=self.strategy("float32", device_state=False),
            parameters=self.start,
            max_grad_norm=None,
            weight_rounding="nearest",
            inference_only=True,
        )

    def facts(self) -> dict[str, Any]:
        """What the figures depend on, beside the command."""
        import jax

        return {
            "device": jax.devices()[0].device_kind,
            "model": self.base.folder.name,
            "text": self.args.text,
            "num_parameters": self.base.config.num_parameters,
            "train_rows": len(self.train),
            "held_out_rows": len(self.held_out),
            "steps": self.args.steps,
            "rows": self.args.rows,
            "tokens": self.args.tokens,
        }

    def strategy(self, dtype: ComputeDtype, *, device_state: bool) -> Strategy:
        """One microbatch; with the state on the device, nothing is copied or recomputed."""
        from slidedp_jax.process import current_setup

        layers = min(self.args.layers_per_chunk, self.base.config.num_hidden_layers)
        chunks = 2 + -(-self.base.config.num_hidden_layers // layers)
        return Strategy(
            layers_per_chunk=layers,
            rows_per_microbatch=self.args.rows,
            num_microbatches=1,
            resident_chunks=chunks if device_state else 0,
            kept_chunks=chunks - 2 if device_state else 0,
            compute_dtype=dtype,
            num_host_devices=current_setup().num_host_devices,
        )

    def run(self, result: dict[str, Any]) -> Iterator[None]:
        """One training; `result` grows, and is worth saving whenever this yields."""
        import jax
        import optax

        args, seed = self.args, result["seed"]
        dtype, rounding = SETTINGS[result["setting"]]
        on_gpu = jax.devices()[0].platform != "cpu"
        device_state = (args.state or ("device" if on_gpu else "host")) == "device"
        result |= {"losses": [], "held_out": []}
        order = rows_in_order(len(self.train), seed)
        with slidedp_jax.Trainer(
            self.base.model(),
            optax.adamw(result["rate"], b1=0.9, b2=0.95, weight_decay=0.1),
            strategy=self.strategy(dtype, device_state=device_state),
            parameters=self.start,
            weight_rounding=rounding,
            seed=seed,
        ) as trainer:
            begun = time.perf_counter()
            pending = None
            for step in range(args.steps + 1):
                if step % args.eval_every == 0 or step == args.steps:
                    if pending is not None:
                        result["losses"].append(pending.loss)
                        pending = None
                    result["held_out"].append([step, self.held_out_loss(trainer)])
                    result["seconds"] = time.perf_counter() - begun
                    yield
                if step == args.steps:
                    break
                batch = batch_of(self.train[list(itertools.islice(order, args.rows))])
                metrics = trainer.step(batch)
                if pending is not None:  # read only when the next step is on its way
                    result["losses"].append(pending.loss)
                pending = metrics
            result["exports"] = self.losses_of_exports(trainer.parameters(), seed)
        yield

    def held_out_loss(self, trainer: slidedp_jax.Trainer) -> float:
        """Mean over the held-out rows, under the weights that training computes with."""
        return trainer.evaluate(batch_of(self.held_out))[0]

    def losses_of_exports(self, masters: dict[str, np.ndarray], seed: int) -> dict[str, float]:
        """Held-out losses of fp32 masters and of both roundings to bf16, computed in fp32."""
        found, gate = {}, self.evaluator.gate
        for name, rounding in EXPORTS.items():
            how = None if rounding is None else WeightRounding.of(rounding, seed)
            with gate.writing(gate.rounding) as writer, ThreadPoolExecutor() as pool:
                list(pool.map(functools.partial(written, writer, how), masters.items()))
                writer.finish(0, gate.shared)
            found[name] = self.held_out_loss(self.evaluator)
        return found


def written(writer: Any, how: WeightRounding | None, item: tuple[str, np.ndarray]) -> None:
    """Set a parameter to its masters, rounded if they are to be."""
    from slidedp_jax.state.split_float import rounded

    name, values = item
    writer.write(name, values if how is None else rounded(values, how, name))


def smollm2(work: pathlib.Path) -> pathlib.Path:
    from make_smollm2_folder import make_folder

    return pathlib.Path(make_folder(work / "SmolLM2-135M-Instruct"))


def on_the_grid(base: Pretrained) -> dict[str, np.ndarray]:
    """Weights as a folder in bf16 would hold them."""
    import ml_dtypes

    weights: dict[str, np.ndarray] = {}

    def write(name: str, values: np.ndarray) -> None:
        weights[name] = values.astype(ml_dtypes.bfloat16)

    base.load_parameters(write)
    return weights


def texts(what: str) -> list[str]:
    """Help topics, or the modules of Python's library."""
    if what == "topics":
        from pydoc_data import topics

        return [topics.topics[name] for name in sorted(topics.topics)]
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "site-packages", "dist-packages", "idlelib", "pydoc_data"}
    files = sorted(
        path.relative_to(library)
        for path in library.rglob("*.py")
        if not left_out & {*path.relative_to(library).parts}
    )
    return [(library / path).read_text(errors="replace") for path in files]


def rows_of(base: Pretrained, texts: list[str], tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Whole rows of training and held-out texts, int32 [rows, tokens] each."""
    assert base.tokenizer is not None, "the model folder has no tokenizer"
    split: tuple[list[int], list[int]] = ([], [])
    for number, text in enumerate(texts):
        ids = base.tokenizer.encode(f"{text.strip()}\n\n")
        split[number % HELD_OUT_EVERY == 0].extend(ids)
    train, held_out = (
        np.asarray(ids[: len(ids) // tokens * tokens], np.int32).reshape(-1, tokens)
        for ids in split
    )
    return train, held_out


def rows_in_order(count: int, seed: int) -> Iterator[int]:
    """Indices of rows, every epoch in an order of its own."""
    for epoch in itertools.count():
        yield from np.random.default_rng([seed, epoch]).permutation(count).tolist()


def batch_of(rows: np.ndarray) -> dict[str, np.ndarray]:
    return {"input_ids": rows, "labels": rows}


def line(result: dict[str, Any]) -> str:
    """One line of the table."""
    last = np.mean(result["losses"][-SMOOTHED:])
    exports = result.get("exports", {})
    return (
        f"{result['seed']:4d}  {result['rate']:7.0e}  {result['setting']:8s}  {last:9.4f}  "
        f"{result['held_out'][-1][1]:9.4f}  "
        + "  ".join(f"{exports.get(name, float('nan')):12.4f}" for name in EXPORTS)
    )


def table(record: dict[str, Any]) -> str:
    """Train loss over the last steps, held-out loss of the forward weights and of exports."""
    head = f"{'seed':4s}  {'rate':7s}  {'forward':8s}  {'last loss':9s}  {'held out':9s}  "
    head += "  ".join(f"{name:>12s}" for name in EXPORTS)
    start = f"start: {record['start']}"
    done = [result for result in record["results"] if result["losses"]]
    return "\n".join([start, head, *map(line, done)])


def draw(out: pathlib.Path, record: dict[str, Any]) -> None:
    """OUT.svg: a panel per rate, training loss over steps, means over `SMOOTHED` steps."""
    results = [result for result in record["results"] if result["losses"]]
    panels = []
    for rate in dict.fromkeys(result["rate"] for result in results):
        own = [result for result in results if result["rate"] == rate]
        lines = {}
        for setting in dict.fromkeys(result["setting"] for result in own):
            runs = [result["losses"] for result in own if result["setting"] == setting]
            mean = np.mean([run[: min(map(len, runs))] for run in runs], axis=0)
            window = max(1, min(SMOOTHED, len(mean) // 5))
            smooth = np.convolve(mean, np.ones(window) / window, mode="valid")
            steps = np.arange(len(smooth)) + (window + 1) / 2
            lines[setting] = list(zip(steps.tolist(), smooth.tolist(), strict=True))
        panels.append(loss_plot.Panel(title=f"learning rate {rate:g}", lines=lines))
    target = out.with_name(out.name.removesuffix(".json") + ".svg")
    target.write_text(loss_plot.svg(panels, x_label="step", y_label="training loss"))


if __name__ == "__main__":
    main()
