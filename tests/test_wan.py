"""A run whose replicas are behind an emulated link: make test-ray, as root on a machine with network namespaces."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import bench_wan
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
    profile = tmp_path / "profile.toml"
    with wan_link(options.rate, options.delay), bench_wan.cluster():
        bench_wan.profile(profile, is_quick=True)
        assert read_measured(profile).handling_over_ray is not None
        figure = bench_wan.compare(tmp_path, profile, "delta", "stream-async", options, 1.0)
    first, *others = figure.pushes
    assert others and all(push.num_bytes < first.num_bytes / 2 for push in others)
    assert min(push.wire_time for push in figure.pushes) > 2 * options.delay
    assert figure.push_time > 4 * options.delay
