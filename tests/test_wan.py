"""A run whose replicas are behind an emulated link: make test-ray, as root on a machine with network namespaces."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import bench_wan
from benchmarks.core_watch import watched_cores
from benchmarks.pooled_profiles import pooled
from benchmarks.wan_link import missing, wan_link
from streamrl.hardware.measured_profile import read_measured
from tests.test_ray import prepare

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(missing() is not None, reason=f"no link can be emulated here: {missing()}"),
]

CHANGES = {
    'dtype = "float32"': 'dtype = "bfloat16"',
    "max_tokens = 12": "max_tokens = 48\nshares_prefixes = false",  # a profile's least context with its prompt
    "micro_batch = 4": "micro_batch = 4\nmax_tokens_per_pass = 256",
    "learning_rate = 1e-3": "learning_rate = 1e-6",  # few values change
    "nodes = 2": "nodes = 1",
}


def test_deltas_cross_a_slow_link(tmp_path: Path) -> None:
    prepare(tmp_path)
    run_file = tmp_path / "run.toml"
    text = run_file.read_text()
    for old, new in CHANGES.items():
        assert old in text
        text = text.replace(old, new)
    run_file.write_text(text)
    options = argparse.Namespace(rate=200e6, delay=0.02, steps=4)
    with (
        watched_cores() as cores,
        wan_link(options.rate, options.delay),
        bench_wan.cluster("local", "far"),
    ):
        bench = bench_wan.Bench(tmp_path, cores, options, run_file)
        profile = bench.profile("full", "0", is_quick=True)
        measured = read_measured(profile.path)
        assert measured.handling is not None and measured.handling_over_ray is not None
        assert sum(measured.handling.seconds) < sum(measured.handling_over_ray.seconds)
        run = bench.execute("delta", "stream-async", "run")
    figure = bench_wan.compare(run, pooled([profile], [], run.work_time), run.work_time)
    first, *others = figure.pushes
    assert others and all(push.num_bytes < first.num_bytes / 2 for push in others)
    assert min(push.wire_time for push in figure.pushes) > 2 * options.delay
    assert figure.push_time > 4 * options.delay
