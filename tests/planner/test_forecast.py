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
