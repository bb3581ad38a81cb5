"""Small schedules worked out by hand."""

import pytest

from slidedp_jax.planner.timeline import Task, simulate


def _task(lane, work_s, after=(), order=(0,), **demands):
    return Task(lane=lane, work_s=work_s, after=after, order=order, demands=demands)


def test_a_chain_runs_one_after_the_other():
    line = simulate([_task("h2d", 2.0), _task("compute", 3.0, (0,)), _task("d2h", 1.0, (1,))], {})
    assert line.starts == (0.0, 2.0, 5.0)
    assert line.ends == (2.0, 5.0, 6.0)
    assert line.waits == ((0.0, 2.0, "h2d"),)


def test_lanes_overlap_and_keep_their_order():
    tasks = [
        _task("h2d", 1.0, order=(0,)),
        _task("compute", 4.0, (0,), order=(0,)),
        _task("h2d", 1.0, order=(1,)),
        _task("compute", 4.0, (2,), order=(1,)),
    ]
    line = simulate(tasks, {})
    assert line.ends == (1.0, 5.0, 2.0, 9.0)


def test_a_copy_lane_does_not_overtake_but_updates_do():
    blocked_first = [
        _task("compute", 5.0),
        _task("d2h", 1.0, (0,), order=(0,)),
        _task("d2h", 1.0, order=(1,)),
        _task("host_update", 1.0, (0,), order=(0,)),
        _task("host_update", 1.0, order=(1,)),
    ]
    line = simulate(blocked_first, {})
    assert (line.starts[1], line.starts[2]) == (5.0, 6.0)
    assert (line.starts[3], line.starts[4]) == (5.0, 0.0)


def test_ready_updates_run_lowest_order_first():
    tasks = [
        _task("compute", 1.0),
        _task("host_update", 1.0, (0,), order=(2,)),
        _task("host_update", 1.0, (0,), order=(1,)),
    ]
    assert simulate(tasks, {}).starts == (0.0, 2.0, 1.0)


def test_two_copies_share_the_link_in_proportion():
    # 60 + 40 units/s on 50: half speed until the shorter copy is through at 2 s, then full speed.
    tasks = [_task("h2d", 1.0, link=60.0), _task("d2h", 3.0, link=40.0)]
    line = simulate(tasks, {"link": 50.0})
    assert line.ends[0] == pytest.approx(2.0)
    assert line.ends[1] == pytest.approx(4.0)


def test_the_scarcest_resource_decides():
    tasks = [
        _task("h2d", 1.0, link=10.0, host=10.0),
        _task("host_update", 1.0, host=30.0),
    ]
    # host: 40 of 20 -> half speed for both until both end at 2 s.
    line = simulate(tasks, {"link": 100.0, "host": 20.0})
    assert line.ends == (pytest.approx(2.0), pytest.approx(2.0))


def test_waits_blame_the_lane_at_the_root():
    # compute waits for the upload, which waits for the update.
    tasks = [
        _task("host_update", 3.0),
        _task("h2d", 1.0, (0,)),
        _task("compute", 1.0, (1,)),
    ]
    line = simulate(tasks, {})
    assert line.waited_s("host_update", 0, 10) == pytest.approx(3.0)
    assert line.waited_s("h2d", 0, 10) == pytest.approx(1.0)
    assert line.waited_s("h2d", 3.5, 10) == pytest.approx(0.5)


def test_a_circle_is_an_error_and_no_endless_loop():
    with pytest.raises(ValueError, match="wait for one another"):
        simulate([_task("h2d", 1.0, (1,)), _task("d2h", 1.0, (0,))], {})


def test_work_of_no_length_takes_no_time():
    line = simulate([_task("h2d", 0.0), _task("compute", 1.0, (0,))], {})
    assert line.ends == (0.0, 1.0)
