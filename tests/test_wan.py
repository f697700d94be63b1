"""A run whose replicas are behind an emulated link: make test-ray, as root on a machine with network namespaces."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import bench_wan
from benchmarks.core_watch import watched_cores
from benchmarks.wan_link import missing, wan_link
from streamrl.hardware.machine_profile import read_measured

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(missing() is not None, reason=f"no link can be emulated here: {missing()}"),
]


def test_deltas_cross_a_slow_link(tmp_path: Path) -> None:
    if not Path("build/quickstart/model").is_dir():
        make = ["examples/make_quickstart.py", "--out", "build/quickstart"]
        subprocess.run([sys.executable, *make], check=True)
    options = argparse.Namespace(rate=200e6, delay=0.02, steps=4)
    with watched_cores() as cores, wan_link(options.rate, options.delay), bench_wan.cluster():
        bench = bench_wan.Bench(tmp_path, cores, options)
        profile = bench.profile("full", is_quick=True)
        measured = read_measured(profile.path)
        assert measured.handling is not None and measured.handling_over_ray is not None
        assert measured.handling.seconds < measured.handling_over_ray.seconds
        figure = bench.compare(profile, "delta", "stream-async", "run")
    first, *others = figure.pushes
    assert others and all(push.num_bytes < first.num_bytes / 2 for push in others)
    assert min(push.wire_time for push in figure.pushes) > 2 * options.delay
    assert figure.push_time > 4 * options.delay
