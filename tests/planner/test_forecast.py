"""When the forecast is looked at."""

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.presets import named_hardware
from slidedp_jax.planner.search import plan
from slidedp_jax.planner.workload import BatchShape, Workload
from slidedp_jax.run.forecast import STEPS, Forecast


def test_it_is_due_once_also_where_a_new_width_compiles_right_after():
    workload = Workload.from_config(named_config("qwen3-0.6b"))
    batch = BatchShape(num_rows=8, seq_length=1024)
    forecast = Forecast(plan(workload, batch, named_hardware("h200")))
    widths = [1024] * (STEPS + 1) + [512, 256, 1024, 512]
    due = []
    for number, width in enumerate(widths, start=1):
        forecast.step(width, 1.0, {})
        if forecast.is_due:
            due.append(number)
    assert due == [STEPS + 1]


def compared(hardware, steps):
    workload = Workload.from_config(named_config("smollm2-135m"))
    batch = BatchShape(num_rows=1, seq_length=256)
    forecast = Forecast(plan(workload, batch, named_hardware(hardware)))
    for _ in range(steps + 1):
        forecast.step(256, 1000.0, {})
    return forecast.comparison()


def test_a_cpu_machine_without_a_profile_is_compared_with_nothing():
    text = compared("cpu", 1).describe(measured=False)
    assert text.startswith("forecast: 1 step of 1e+03 s (median), and none to compare with")
    assert "slidedp measure" in text and "%" not in text
    for hardware, measured in (("cpu", True), ("h200", False)):
        text = compared(hardware, 2).describe(measured=measured)
        assert text.startswith("forecast: 2 steps of 1e+03 s (median), predicted") and "%" in text
        assert ("slidedp measure" in text) == (not measured)
    assert compared("cpu", 0) is None
