"""From measurements to a profile, by hand; what was not measured is said."""

import dataclasses

import pytest

from slidedp_jax.measure.dispatch import DEPTHS
from slidedp_jax.measure.stopwatch import Measurement, Stopwatch
from slidedp_jax.measure.to_profile import to_profile
from slidedp_jax.planner.presets import named_hardware


def watch_of(*measured: Measurement) -> Stopwatch:
    watch = Stopwatch(100.0)
    for one in measured:
        watch.keep(one)
    return watch


def link(name: str, size: int, seconds: float, devices=(0, 1), copies=1) -> Measurement:
    company = "all" if len(devices) > 1 else "each"
    about = {"at_once": company, "devices": list(devices), "size": size}
    work = float(size * len(devices) * copies)
    return Measurement(name=name, seconds=(seconds,), work=work, about=about)


def profile_of(watch: Stopwatch, num_devices: int = 2):
    base = named_hardware("h100", num_devices=num_devices)
    base = dataclasses.replace(base, stated_pinned_limit_bytes=9e9)  # of the process that measures
    found, assumed = to_profile(watch, base, num_host_devices=30, provenance="measured")
    return found, assumed, base


def test_nothing_measured_is_the_preset_and_says_so():
    found, assumed, base = profile_of(watch_of())
    assert found.h2d == base.h2d
    assert found.provenance == "measured"
    assert found.stated_pinned_limit_bytes is None
    assert {"h2d", "d2h", "bf16_matmul_flops_per_s", "host_update_params_per_s"} <= set(assumed)
    assert "h2d was not measured" in assumed["h2d"]


def test_links_are_those_of_one_device_while_all_copy():
    sizes = ((1000, 1e-3), (4000, 2e-3), (8000, 1.9e-3))  # the second took longer than the third
    watch = watch_of(
        *(link("h2d", size, seconds) for size, seconds in sizes),
        link("h2d", 8000, 1e-9, devices=(0,)),  # alone: not what a run sees
        link("both ways", 8000, 4e-3, copies=4),
    )
    found, assumed, _ = profile_of(watch)
    assert found.h2d.points == ((1000, pytest.approx(1e6)), (8000, pytest.approx(8000 / 1.9e-3)))
    assert found.duplex_bytes_per_s == pytest.approx(4 * 8000 / 4e-3)
    assert "d2h" in assumed and "h2d" not in assumed


def test_python_is_told_from_two_depths():
    few, many = DEPTHS
    watch = watch_of(
        Measurement(name="upload call", seconds=(50e-6,), about={"devices": 1}),
        Measurement(name="upload call", seconds=(70e-6,), about={"devices": 2}),
        # Issued in 2 ms a visit, of which 15 pieces of 70 us; with updates 3, and 40 ms at the end.
        *(
            Measurement(
                name=name, seconds=(end + (2 * depth + 2) * visit,), about={"layers": depth}
            )
            for depth in (few, many)
            for name, visit, end in (
                ("tiny step", 3e-3, 40e-3),
                ("tiny step, issuing", 2e-3, 1e-3),
            )
        ),
    )
    found, assumed, _ = profile_of(watch)
    assert found.upload_call_s + 2 * found.upload_call_per_device_s == pytest.approx(70e-6)
    assert found.visit_dispatch_s == pytest.approx(2e-3 - 15 * 70e-6)
    assert found.step_end_s == pytest.approx(40e-3)
    assert not {"visit_dispatch_s", "step_end_s", "upload_call_s"} & set(assumed)


def test_host_memory_is_the_triad_or_what_update_and_copies_move_together():
    def update(rate, beside):
        about = {"beside": beside}
        return Measurement(name="update", seconds=(1.0,), work=rate, unit="parameters", about=about)

    triad = Measurement(name="triad", seconds=(1.0,), work=100e9, about={"beside": "nothing"})
    copies = Measurement(
        name="copies beside update", seconds=(2.0,), work=120e9, about={"which": "uploads"}
    )
    found, _, _ = profile_of(watch_of(triad, update(3e9, "nothing")))
    assert (found.host_memory_bytes_per_s, found.host_update_params_per_s) == (100e9, 3e9)
    more = watch_of(triad, update(3e9, "nothing"), update(2e9, "uploads"), copies)
    found, _, _ = profile_of(more)
    assert found.host_memory_bytes_per_s == 2e9 * 26 + 60e9
    assert found.host_update_params_per_s == 3e9


def test_one_device_gathers_nothing():
    gather = Measurement(name="gather", seconds=(1.0,), work=1e9)
    scatter = Measurement(name="scatter", seconds=(2.0,), work=1e9)
    found, assumed, base = profile_of(watch_of(gather, scatter), num_devices=1)
    assert found.gather_bytes_per_s == base.gather_bytes_per_s
    assert "gathers nothing" in assumed["gather_bytes_per_s"]
    found, assumed, _ = profile_of(watch_of(gather, scatter))
    assert found.gather_bytes_per_s == 0.5e9 and "gather_bytes_per_s" not in assumed


def test_medians_and_spread():
    one = Measurement(name="x", seconds=(1.0, 4.0, 2.0), work=8.0)
    assert (one.median_s, one.rate, one.spread) == (2.0, 4.0, 1.5)
    assert one.record()["seconds"] == [1.0, 4.0, 2.0]


def test_a_part_that_fails_or_has_no_time_is_told_and_the_rest_goes_on():
    said: list[str] = []
    watch = Stopwatch(10.0, said.append)
    watch.attempt("broken", lambda: 1 / 0, needs_s=1)
    watch.attempt("long", lambda: None, needs_s=1000)
    watch.attempt("fine", lambda: watch.time("sum", lambda: sum(range(10))), needs_s=1)
    assert watch.left_out["broken"].startswith("ZeroDivisionError")
    assert watch.left_out["long"].startswith("no time")
    assert len(watch.one("sum").seconds) == 9
    assert len(said) == 3
