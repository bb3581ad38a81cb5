"""What compiled programs take of a device, beside what plans say; no weights are made or read.

    python scripts/check/check_compiled_memory.py [--points qwen3-4b-whole-32k ...] [--out NAME]

For each point (`bench_plans.POINTS`) the plan for this machine is made, forward, backward and head
are compiled from shapes as the training command does before it reads weights, and both are printed
in GiB: what running a program takes beside its arguments, its temporaries, and in all the need of a
device with the compiled programs in the plan's place. `holds` is what the command decides by. At
the end a small model takes two steps with programs that were compiled beforehand: none of those may
be compiled again. Exit status 1 where one is, or where a plan does not hold.
"""

from __future__ import annotations

import argparse
import collections
import logging
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))

import bench_plans
import bench_record
import step_timing

GIB = 2**30
DEFAULT = (
    "qwen3-4b-whole-32k",
    "qwen3-8b-whole-32k",
    "qwen3-14b-32k",
    "qwen3-4b-row-64k",
    "qwen3-4b-20gib",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", nargs="*", choices=bench_plans.POINTS, default=DEFAULT)
    parser.add_argument("--host-memory-budget", type=float, help="GiB")
    parser.add_argument("--platform", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    import slidedp_jax

    # Without a cache, so that seconds are those of a first start.
    slidedp_jax.configure(num_devices=1, platform=args.platform or "auto", compilation_cache=None)
    record = bench_record.record(("jax", "optax"), results=[])
    start = time.perf_counter()
    bad = 0
    for name in args.points:
        result = checked(bench_plans.POINTS[name], args.host_memory_budget)
        record["results"].append({"point": name, **result})
        print_point(name, result)
        bad += not result["holds"]
        print(f"[{time.perf_counter() - start:.0f} s]", flush=True)
        bench_record.save(args.out, record)
    record["compiled_twice"] = twice = compiled_twice()
    for program in twice:
        print(f"COMPILED TWICE: {program[:200]}")
    print(
        f"programs that a step compiled again: {len(twice)} [{time.perf_counter() - start:.0f} s]"
    )
    bench_record.save(args.out, record)
    return 1 if bad or twice else 0


def checked(point: bench_plans.Point, host_gib: float | None) -> dict[str, Any]:
    """One point: its plan, what was compiled of it, and the seconds of both."""
    import optax

    from slidedp_jax.assembly import compile_step
    from slidedp_jax.models import decoder
    from slidedp_jax.planner.compiled_check import compiled_check
    from slidedp_jax.this_machine import plan_for
    from slidedp_jax.trainer import make_step_programs

    config = step_timing.model_config(point.model, point.layers)
    start = time.perf_counter()
    plan = plan_for(
        config,
        rows_per_step=point.rows,
        tokens_per_row=point.seq,
        documents_per_row=point.documents,
        document_lengths=bench_plans.document_lengths(point),
        max_grad_norm=None if point.eager else 1.0,
        device_memory_budget_gib=point.device_gib,
        host_memory_budget_gib=host_gib,
    )
    planned_at = time.perf_counter()
    model = decoder.build(config)
    programs = make_step_programs(model, optax.adamw(1e-5), strategy=plan.strategy)
    made_at = time.perf_counter()
    compiled = compile_step(
        programs,
        tokens_per_row=point.seq,
        packed=point.documents is not None,
        documents_per_row=point.documents or 1,
    )
    compiled_at = time.perf_counter()
    check = compiled_check(plan.job, plan.strategy, compiled)
    return {
        "strategy": plan.strategy.__dict__.copy(),
        "plan_s": planned_at - start,
        "make_s": made_at - planned_at,
        "compile_s": compiled_at - made_at,
        "holds": check.fits,
        "describe": check.describe(),
        **check.record(),
    }


def print_point(name: str, result: dict[str, Any]) -> None:
    strategy = result["strategy"]
    print(
        f"\n{name}: kept {strategy['kept_chunks']}, resident {strategy['resident_chunks']}, "
        f"{strategy['num_microbatches']} x {strategy['rows_per_microbatch']} rows; planned in "
        f"{result['plan_s']:.1f} s, made in {result['make_s']:.1f} s, compiled in "
        f"{result['compile_s']:.1f} s\n"
        f"{'':34s} planned compiled    more |    temp  output   alias arguments"
    )
    for one in result["programs"]:
        sizes = [one[size] / GIB for size in ("temp", "output", "alias", "argument")]
        print(
            f"{one['name']:34s} {one['planned'] / GIB:7.3f} {one['compiled'] / GIB:8.3f} "
            f"{(one['compiled'] - one['planned']) / GIB:+7.3f} | "
            + " ".join(f"{size:7.3f}" for size in sizes)
        )
    print(f"{'holds' if result['holds'] else 'DOES NOT HOLD'}: {result['describe']}")


def compiled_twice() -> list[str]:
    """Programs of a small step that were compiled beforehand, and again by the step."""
    import jax
    import optax

    import slidedp_jax
    from slidedp_jax.assembly import compile_step
    from slidedp_jax.models import decoder
    from slidedp_jax.this_machine import plan_for
    from slidedp_jax.trainer import make_step_programs

    point = bench_plans.POINTS["tiny"]
    config = step_timing.model_config(point.model, point.layers)
    plan = plan_for(config, rows_per_step=point.rows, tokens_per_row=point.seq)
    model, optimizer = decoder.build(config), optax.adamw(1e-5)
    programs = make_step_programs(model, optimizer, strategy=plan.strategy)
    before, after = Lowered(), Lowered()
    with jax.log_compiles(), before:
        compile_step(programs, tokens_per_row=point.seq)
    with slidedp_jax.Trainer(
        model,
        optimizer,
        strategy=plan.strategy,
        programs=programs,
        parameters=lambda write: step_timing.fill(model, write),
    ) as trainer:
        batch = bench_plans.random_batch(point, config.vocab_size)
        with jax.log_compiles(), after:
            losses = [trainer.step(batch).loss for _ in range(2)]
    assert before.found, "JAX does not tell what it compiles"
    print(f"\nlosses of a small model's steps: {losses}")
    return [*(before.found & after.found), *(t for t, n in before.found.items() if n > 1)]


class Lowered(logging.Handler):
    """Counts the programs that JAX says it compiles, by name and shapes of arguments."""

    _LOG = logging.getLogger("jax._src.interpreters.pxla")

    def __init__(self) -> None:
        super().__init__()
        self.found = collections.Counter[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Take note of one."""
        text = record.getMessage()
        if text.startswith("Compiling "):
            self.found[text.split(" Argument mapping")[0]] += 1

    def __enter__(self) -> Lowered:
        self._LOG.addHandler(self)
        self._LOG.propagate = False
        logging.getLogger("jax._src.dispatch").setLevel(logging.ERROR)  # each program's times
        return self

    def __exit__(self, *_: object) -> None:
        self._LOG.removeHandler(self)
        self._LOG.propagate = True


if __name__ == "__main__":
    sys.exit(main())
