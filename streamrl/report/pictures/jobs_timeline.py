"""Draw the GPUs of each job over time, one row for each job and way of sharing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from streamrl.report.pictures.drawing import SERIES, Drawing, Picture, scale, shortened, ticks
from streamrl.runfile.units import SECONDS_PER_DAY, SECONDS_PER_HOUR

WIDTH, LEFT, RIGHT, TOP = 900.0, 150.0, 12.0, 4.0
LANE, GAP, BELOW = 64.0, 18.0, 40.0
"""Height of a way of sharing, distance to the next, and room for the time scale."""
COLUMNS = 600
"""Instants at which a lane is drawn."""
IN_DAYS = 2 * SECONDS_PER_DAY


class Block(NamedTuple):
    """A time in which a job holds the same GPUs."""

    job: int
    start: float
    end: float
    gpus: int
    is_switch: bool


class Lane(NamedTuple):
    """One way of sharing."""

    name: str
    blocks: Sequence[Block]


def jobs_picture(
    name: str, title: str, jobs: Sequence[str], lanes: Sequence[Lane], gpus: int
) -> Picture:
    """Draw who holds how many of all GPUs, one lane for each way of sharing.

    Args:
        name: id of the picture.
        title: its title.
        jobs: names of the jobs.
        lanes: the ways of sharing, each with the times in which jobs hold GPUs.
        gpus: all GPUs, which are the height of a lane.
    """
    end = max((block.end for lane in lanes for block in lane.blocks), default=1.0)
    told = "; ".join(f"{lane.name} ends after {_time(_end_of(lane), end)}" for lane in lanes)
    drawing = Drawing(name, title, f"{told}.", WIDTH)
    across = scale(0.0, end, LEFT, WIDTH - RIGHT)
    for row, lane in enumerate(lanes):
        top = TOP + row * (LANE + GAP)
        drawing.text(LEFT - 8, top + LANE / 2 + 4, shortened(lane.name, LEFT - 16), "small", "end")
        drawing.rectangle(LEFT, top, WIDTH - RIGHT - LEFT, LANE, "lane")
        for block, low in _stacked(lane.blocks, len(jobs), end):
            height = LANE * block.gpus / gpus
            left, y = across(block.start), top + LANE * (1 - low / gpus) - height
            css = "c-switch" if block.is_switch else f"s-{block.job % len(SERIES)}"
            text = f"{jobs[block.job]}: {block.gpus} GPUs for {_time(block.end - block.start, end)}"
            drawing.rectangle(left, y, across(block.end) - left, height, css, text)
    bottom = TOP + len(lanes) * (LANE + GAP) - GAP
    drawing.height = bottom + BELOW
    unit = SECONDS_PER_DAY if end >= IN_DAYS else SECONDS_PER_HOUR
    marks = [mark * unit for mark in ticks(0.0, end / unit, 9)]
    drawing.ticks_below(marks, across, (TOP, bottom), lambda t: _time(t, end), "grid over")
    legend = [(f"s-{place % len(SERIES)}", job) for place, job in enumerate(jobs)]
    caption = f"The height of a lane is {gpus} GPUs."
    return Picture(drawing, caption, [*legend, ("c-switch", "save, load and start")])


def _end_of(lane: Lane) -> float:
    return max((block.end for block in lane.blocks), default=0.0)


def _time(seconds: float, longest: float) -> str:
    """Return a time in the unit of the whole picture."""
    if longest >= IN_DAYS:
        return f"{seconds / SECONDS_PER_DAY:.3g} d"
    return f"{seconds / SECONDS_PER_HOUR:.3g} h"


def _stacked(blocks: Sequence[Block], num_jobs: int, end: float) -> Iterator[tuple[Block, int]]:
    """Yield blocks that are whole columns wide, each with the GPUs below it: those of jobs with a lower number.

    A time between two columns is not drawn. So a schedule of thousands of slices stays a small picture.
    """
    width = end / COLUMNS
    middles = (np.arange(COLUMNS) + 0.5) * width
    floors = np.zeros(COLUMNS, dtype=np.int64)
    for job in range(num_jobs):
        own = sorted(block for block in blocks if block.job == job)
        places = np.searchsorted([block.start for block in own], middles, side="right") - 1
        held = [
            own[place] if place >= 0 and middle < own[place].end else None
            for place, middle in zip(places.tolist(), middles.tolist(), strict=True)
        ]
        parts = [
            (0, 0, False) if block is None else (int(floor), block.gpus, block.is_switch)
            for block, floor in zip(held, floors, strict=True)
        ]
        at = 0
        for (low, gpus, is_switch), group in groupby(parts):
            length = len(list(group))
            if gpus:
                start = at * width
                yield Block(job, start, start + length * width, gpus, is_switch), low
            at += length
        floors += np.array([gpus for _, gpus, _ in parts])
