"""The command on CPU devices, and its parts on small sizes."""

import json
import os
import subprocess
import sys

import pytest

from slidedp_jax.measure import dispatch, host, links
from slidedp_jax.measure.stopwatch import Stopwatch
from slidedp_jax.planner.machine_profile import read_profile
from slidedp_jax.process import current_setup


def test_links_and_collectives_of_two_devices(monkeypatch):
    monkeypatch.setattr(links, "SIZES", {"cpu": (1 << 16, 1 << 18)})
    monkeypatch.setattr(links, "GATHERED", {"cpu": (1 << 16,)})
    watch, devices = Stopwatch(60.0), current_setup().devices()[0][:2]
    links.measure_links(watch, devices)
    links.measure_collectives(watch, devices)
    links.measure_peer_copies(watch, devices)
    dispatch.measure_uploads(watch, devices)
    assert [one.about["size"] for one in links.link_points(watch, "h2d")] == [1 << 16, 1 << 18]
    assert [one.work for one in links.link_points(watch, "h2d")] == [1 << 17, 1 << 19]
    assert len(watch.all("h2d", at_once="each")) == 2
    assert watch.one("both ways").work == 4 * 2 * (1 << 18) / 2  # the last: one device
    assert watch.one("gather").work == watch.one("scatter").work == (1 << 16) / 2
    assert watch.one("upload call", devices=2).median_s > 0


def test_the_host_update_is_the_one_of_training(monkeypatch):
    monkeypatch.setattr(host, "PER_DEVICE", 1 << 14)
    watch = Stopwatch(60.0)
    devices, host_devices = current_setup().devices()
    host.measure_host(watch, devices, host_devices)
    assert watch.one("update", beside="nothing").work == len(host_devices) * (1 << 14)
    assert watch.one("triad", beside="nothing").rate > 0
    with host.running([lambda: None]) as counts:
        while not counts[0]:
            pass
    done = counts[0]
    assert counts[0] == done  # nothing runs on


@pytest.mark.thorough
def test_the_command_writes_what_plans_read(tmp_path):
    path = tmp_path / "p.json"
    words = [sys.executable, "-m", "slidedp_jax.cli", "measure", "--platform", "cpu"]
    words += ["--out", str(path), "--budget_s", "25"]
    done = subprocess.run(words, capture_output=True, text=True, env=dict(os.environ), timeout=900)
    assert done.returncode == 0, done.stderr
    profile = read_profile(path)
    record = json.loads(path.read_text())
    assert profile.hardware.unified_memory and profile.hardware.provenance.startswith("measured")
    assert record["samples"] and all(one["seconds"] for one in record["samples"])
    assert profile.hardware.h2d.points != record["preset"]["h2d"]["points"]
    assert set(record["machine"]["versions"]) >= {"jax", "jaxlib"}
    assert "host update, AdamW" in done.stdout and str(path) in done.stdout
    wrong = subprocess.run([*words, "--num_devices", "0"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "num_devices" in wrong.stderr
