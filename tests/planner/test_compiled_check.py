"""Plans with the memory of compiled programs in them: as measured on an H200, and by hand.

`docs/benchmarks/plans_h200_*.json` hold what XLA said of each program of a job, and the peak of the
device's allocator.
"""

from dataclasses import replace

import pytest
from test_measured import PLANS, _job

from slidedp_jax.planner.compiled_check import UNLISTED, ProgramMemory, compiled_check
from slidedp_jax.planner.hardware import GIB
from slidedp_jax.planner.job import Job
from slidedp_jax.planner.presets import named_hardware


def job_of(result, budget=None):
    workload, batch, strategy = _job(result)
    hardware = named_hardware("h200")
    job = Job(
        workload=workload,
        batch=batch,
        hardware=hardware,
        optimizer_state_bytes=8.0,
        device_budget_bytes=budget or hardware.device_memory_bytes,
        host_budget_bytes=hardware.host_memory_bytes,
    )
    return job, strategy


def programs_of(result, strategy):
    """Those of forward, backward and head among what was recorded, told by name and sizes."""
    job, _ = job_of(result)
    projection = job.workload.vocab_size * job.workload.hidden_size
    num_chunks = -(-len(job.workload.layers) // strategy.layers_per_chunk)
    below = num_chunks - min(strategy.kept_chunks, num_chunks)
    found = []
    for raw in result["programs"]:
        sizes = {name: raw[name] for name in ("temp", "output", "alias")}
        sizes["argument"] = raw["arguments"]
        kept, recomputed = tuple(range(below, num_chunks)), tuple(range(below))
        x = 2 * strategy.rows_per_microbatch * result["job"]["seq"] * job.workload.hidden_size
        if raw["name"] == "jit__forward":
            found.append(ProgramMemory(name="f", work="forward", chunks=kept, **sizes))
        elif raw["name"] == "jit__backward":
            adds = raw["alias"] > x
            found.append(ProgramMemory(name="b", work="backward", chunks=kept, adds=adds, **sizes))
        elif raw["name"] != "jit_body" or not raw["temp"]:
            continue
        elif any(abs(raw["output"] - x - size * projection) < 1e5 for size in (2, 4)):
            adds = raw["alias"] > 0
            found.append(ProgramMemory(name="head", work="head", adds=adds, **sizes))
        elif raw["alias"]:
            adds = raw["alias"] > x
            found.append(
                ProgramMemory(name="b", work="backward", chunks=recomputed, adds=adds, **sizes)
            )
        elif raw["output"] == x:
            found.append(ProgramMemory(name="f", work="forward", chunks=recomputed, **sizes))
    return found


@pytest.mark.parametrize("result", PLANS, ids=lambda result: result["point"])
def test_what_was_measured(result):
    """Programs as planned or less; with them the plan holds, and comes closer to the peak."""
    job, strategy = job_of(result)
    programs = programs_of(result, strategy)
    works = {program.work for program in programs}
    assert works == {"forward", "backward", "head"}
    check = compiled_check(job, strategy, programs)
    for one in check.programs:
        assert one.more_bytes < 0.1 * GIB + 0.02 * one.planned_bytes, one
        assert one.more_bytes > -0.3 * one.planned_bytes or one.program.work == "forward", one
    assert check.fits
    arrays = (check.need_bytes - job.hardware.device_reserve_bytes) / (1 + UNLISTED)
    # What is beyond is the share of what is not listed, and what the reserve is for.
    assert 0.98 < result["memory"]["peak_bytes_in_use"] / arrays < 1.016
    assert check.need_bytes < check.planned_bytes
    # With a budget of what it was planned for, it holds as well: no false alarm.
    assert replace(check, budget_bytes=check.planned_bytes).fits


BY_HAND = next(result for result in PLANS if result["point"] == "qwen3-8b-whole-32k")
"""36 layer chunks, of which 14 are kept; loss is the largest phase."""


def as_planned(work, chunks=(), *, more=0.0, **flags):
    """A program that takes what is planned for it, and `more`; its results take half of it."""
    job, strategy = job_of(BY_HAND)

    def sized(size):
        sizes = {"temp": size // 2, "output": size // 2, "alias": 0, "argument": 1}
        return ProgramMemory(name=f"{work} {chunks}", work=work, chunks=chunks, **sizes, **flags)

    (planned,) = compiled_check(job, strategy, [sized(2)]).programs
    return sized(2 * int((planned.planned_bytes + more) / 2))


def need(*programs, **options):
    job, strategy = job_of(BY_HAND)
    check = compiled_check(job, strategy, programs, **options)
    return check, (check.need_bytes - job.hardware.device_reserve_bytes) / (1 + UNLISTED) / GIB


def test_programs_as_planned_change_nothing_but_the_share_that_is_left():
    check, arrays = need(
        as_planned("forward", tuple(range(22))),
        as_planned("forward", tuple(range(22, 36))),
        as_planned("head"),
        as_planned("backward", tuple(range(22))),
        as_planned("backward", tuple(range(22, 36))),
    )
    assert check.fits and check.beyond_bytes < 10
    job, strategy = job_of(BY_HAND)
    parts = job.memory(strategy).device
    listed = sum(parts.values()) - parts["allocator_fragmentation"] - parts["runtime_reserve"]
    assert arrays == pytest.approx(listed / GIB, abs=1e-6)
    assert check.phase == "loss" == job.memory(strategy).device_phase


def test_what_a_program_takes_more_counts_in_its_own_phases():
    """Of the phases the loss is largest; where chunks below the kept ones run, far less is live."""
    _, planned = need(as_planned("head"))
    check, arrays = need(as_planned("head", more=3 * GIB))
    assert arrays - planned == pytest.approx(3) and check.phase == "loss"
    assert check.beyond_bytes == pytest.approx(3 * GIB, abs=10)
    # Kept chunks run backward beside all that is kept, those below when it is gone.
    kept, below = range(22, 36), range(22)
    check, arrays = need(as_planned("backward", tuple(kept), more=20 * GIB))
    assert check.phase == "backward" and planned + 10 < arrays < planned + 20
    check, arrays = need(as_planned("backward", tuple(below[1:]), more=20 * GIB))
    assert check.phase == "loss" and arrays == pytest.approx(planned)
    check, _ = need(as_planned("backward", tuple(below[1:]), more=60 * GIB))
    assert check.phase == "recompute" and not check.fits
    check, _ = need(as_planned("backward", (0,), more=60 * GIB))
    assert check.phase in ("recompute", "first_backward")
    check, _ = need(as_planned("forward", tuple(kept), more=20 * GIB))
    assert check.phase == "forward"
    # Less than planned makes room, where nothing else needs as much.
    check, arrays = need(as_planned("head", more=-1 * GIB))
    assert arrays < planned and check.beyond_bytes == 0


def test_the_lowest_chunk_runs_backward_beside_gradients_of_resident_ones():
    job, strategy = job_of(BY_HAND)
    strategy = replace(strategy, kept_chunks=0, resident_chunks=37)
    for chunks, phase in (((1, 0), "first_backward"), ((1,), "backward")):
        sizes = {"temp": 200 * GIB, "output": 1, "alias": 0, "argument": 1}
        program = ProgramMemory(name="", work="backward", chunks=chunks, **sizes)
        assert compiled_check(job, strategy, [program]).phase == phase


def test_gradients_that_a_program_is_given_are_not_its_own():
    """Of a sum over microbatches, in fp32, it makes no second one."""
    result = next(result for result in PLANS if result["point"] == "mistral-7b-32gib")
    job, strategy = job_of(result)
    sizes = {"temp": 1, "output": 1, "alias": 0, "argument": 1}
    for work, parameters in (("backward", 218_112_000), ("head", 32_768 * 4096 + 4096)):
        first, later = (
            compiled_check(
                job,
                strategy,
                [ProgramMemory(name="", work=work, chunks=(3,), adds=adds, **sizes)],
            ).programs[0]
            for adds in (False, True)
        )
        assert first.planned_bytes - later.planned_bytes == 4 * parameters


def test_memory_that_is_held_back_is_there_for_programs():
    """A plan with 3 GiB held back has them in its reserve."""
    job, strategy = job_of(BY_HAND)
    head = as_planned("head", more=3 * GIB)
    hardware = replace(
        job.hardware, device_reserve_bytes=job.hardware.device_reserve_bytes + 3 * GIB
    )
    held = replace(job, hardware=hardware, seen=type(job.seen)())
    plain = compiled_check(job, strategy, [head])
    check = compiled_check(held, strategy, [head], held_back=3 * GIB)
    assert check.need_bytes == pytest.approx(plain.need_bytes)
    assert check.planned_bytes == pytest.approx(plain.planned_bytes)


def test_what_is_said_names_the_program_that_the_plan_fails_by():
    job, strategy = job_of(BY_HAND)
    programs = [as_planned("forward", (35,)), as_planned("head", more=9 * GIB)]
    check = compiled_check(job, strategy, programs)
    assert not check.fits
    text = check.exceeded()
    assert text.index("head () 15.30 GiB (planned 6.30 GiB)") < text.index("forward (35,)")
    assert "has 129.38 GiB" in text and "(loss)" in text
    recorded = check.record()
    assert [one["compiled"] for one in recorded["programs"]] == [p.own_bytes for p in programs]
    assert recorded["compiled"] > recorded["budget"]
