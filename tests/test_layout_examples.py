"""Run files of published layouts: they load, fit, have costs, and say whose they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.runfile.files import load_run
from streamrl.runfile.gpu_pools import sides_of
from streamrl.sim.costs.costs import Costs

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "examples" / "layouts").glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_published_layout_fits_128_to_512_gpus_and_has_costs(path: Path) -> None:
    run = load_run(path)
    costs = Costs.load(run)
    assert 128 <= sum(side.num_gpus for side in sides_of(run)) <= 512
    assert costs.kv_capacity > 0 and costs.decode.base[1] > 0
    head = path.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())


def test_every_published_layout_is_compared_on_its_page() -> None:
    page = (ROOT / "docs" / "layouts.md").read_text()
    assert len(FILES) == 5
    assert all(f"| {path.stem} |" in page for path in FILES)
