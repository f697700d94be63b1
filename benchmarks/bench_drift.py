"""Measure the drift detection of the online ranker, the effect of a refit, and the CPU time of a ranker.

    stationary      1,000 windows without drift: number of alarms, compared with the requested rate
    prompts shift   other prompts become long from one window on: windows until the alarm, recall before, at, after
    lengths grow    from 10,000 tokens to 20,000 over a training: the same, and the number of refits
    speed           scoring 1,024 prompts by text, one update of the posterior, one window judged

`benchmarks/bench_retune.py` measures how often to fit a text ranker again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from math import exp, log, sqrt
from statistics import mean, median

import numpy as np
from msgspec.structs import replace

from streamrl.engine.messages import DrawnGroup, ExpectationsChanged, Generated
from streamrl.ranker.text_ranker import fit_text
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run
from streamrl.workload.length_posterior import KnownGroup, Posterior
from streamrl.workload.online_ranker import LengthRanker, RankerMonitor

RATE = 0.01
GROUPS, SIZE = 32, 8
PROMPTS = 512
SEEDS = 20
LENGTH = 10_000
"""Mean output tokens at the start."""
SPREAD, NOISE = 0.7, 0.5
"""Standard deviations of log lengths between prompts and within one prompt, about those of
R1-Distill-1.5B on AIME.
"""
TABLE = {
    "model": {"name": "qwen2.5-7b"},
    "cluster": {"pools": {"a": {"gpu": "h800", "nodes": 2}}},
    "rollout": {"pool": "a", "replicas": 2, "max_tokens": 65536},
    "trainer": {"pool": "a", "tensor_parallel": 4},
    "algorithm": {"steps": 400, "prompts_per_step": GROUPS, "group_size": SIZE},
    "workload": {
        "ranker": {"window": GROUPS, "false_alarms": RATE},
        "lengths": {"kind": "histogram", "source": "streamrl-codemath-20k"},
    },
}


def main() -> None:
    """Print one JSON object per figure."""
    for name, value, unit in (*stationary(), *shift(), *growth(), *speed()):
        print(
            json.dumps({"name": f"drift/{name}", "value": round(value, 4), "unit": unit}),
            flush=True,
        )


def stationary() -> Iterator[tuple[str, float, str]]:
    """Yield the number of alarms in 1,000 windows without drift."""
    alarms = judged = seed = 0
    while judged < 1000:
        rng, watch = np.random.default_rng([0, seed]), RankerMonitor(RATE, seed)
        seed += 1
        for number in range(12):
            own = rng.normal(0, SPREAD, GROUPS)
            stated = 0.7 * own + rng.normal(0, 0.5, GROUPS)
            groups = [
                _group(rng, place, s, o)
                for place, (s, o) in enumerate(zip(stated, own, strict=True))
            ]
            alarms += watch.judge(groups).shift is not None
            judged += number > 1
    yield "alarms in 1,000 stationary windows", alarms, "alarms"
    yield "least that 95 % of binomials have", 1000 * RATE - 1.96 * sqrt(1000 * RATE), "alarms"
    yield "most", 1000 * RATE + 1.96 * sqrt(1000 * RATE), "alarms"


def _group(rng: np.random.Generator, prompt: int, stated: float, own: float) -> KnownGroup:
    lengths = tuple((8 + own + rng.normal(0, NOISE, SIZE)).tolist())
    return KnownGroup(
        prompt, int(exp(5 + rng.normal(0, 0.3))), (stated,) * SIZE, (stated,) * SIZE, lengths
    )


def shift() -> Iterator[tuple[str, float, str]]:
    """Yield the figures of prompts that exchange their lengths: from the third epoch on, long prompts are short."""
    at = 2 * PROMPTS // GROUPS
    runs = [
        train(seed, 6 * PROMPTS, lambda group, own: own if group < 2 * PROMPTS else -own)
        for seed in range(SEEDS)
    ]
    yield from _shift_figures("prompts shift", runs, at)


def growth() -> Iterator[tuple[str, float, str]]:
    """Yield the figures of lengths that double over twelve epochs."""
    last = 12 * PROMPTS
    runs = [
        train(seed, last, lambda group, own: own + log(2) * group / last) for seed in range(SEEDS)
    ]
    yield (
        "lengths grow: alarms of a training",
        mean(sum(bool(r) for _, r in run) for run in runs),
        "alarms",
    )
    yield "lengths grow: windows until the first", median(_first(run, 0) for run in runs), "windows"
    yield (
        "lengths grow: recall in the last epoch",
        mean(mean(x for x, _ in run[-16:]) for run in runs),
        "",
    )


def _shift_figures(
    name: str, runs: list[list[tuple[float, str]]], at: int
) -> Iterator[tuple[str, float, str]]:
    delays = [_first(run, at) for run in runs]
    yield f"{name}: windows until the alarm", median(delays), "windows"
    yield f"{name}: most", max(delays), "windows"
    yield f"{name}: recall before", mean(mean(x for x, _ in run[at - 8 : at]) for run in runs), ""
    yield f"{name}: recall at the shift", mean(run[at][0] for run in runs), ""
    yield (
        f"{name}: recall two epochs after",
        mean(mean(x for x, _ in run[-16:]) for run in runs),
        "",
    )


def _first(run: list[tuple[float, str]], at: int) -> int:
    """Return the number of windows from `at` to the next alarm; all later windows if there is none."""
    return next(
        (n + 1 for n, (_, reason) in enumerate(run[at:]) if "anew" in reason), len(run) - at
    )


def train(
    seed: int, num_groups: int, own_of: Callable[[int, float], float]
) -> list[tuple[float, str]]:
    """Train a ranker without initial knowledge; return the recall of each window and the ranker's message."""
    own = np.random.default_rng([1, seed]).normal(0, SPREAD, PROMPTS)
    groups = (
        (prompt, own_of(group, float(own[prompt])), LENGTH)
        for group, prompt in enumerate(order_of(seed, num_groups))
    )
    return learn(seed, groups)


def order_of(seed: int, num_groups: int) -> Iterator[int]:
    """Yield prompts; each epoch has every prompt once."""
    rng = np.random.default_rng([3, seed])
    for group in range(num_groups):
        if not group % PROMPTS:
            order = rng.permutation(PROMPTS)
        yield int(order[group % PROMPTS])


def learn(
    seed: int, groups: Iterable[tuple[int, float, int]], *, has_history: bool = True
) -> list[tuple[float, str]]:
    """Train a ranker on groups; return the recall of each window and the ranker's message.

    Args:
        seed: seed of the lengths.
        groups: prompt, its own part of the log length, and the tokens that are expected of it.
        has_history: whether past lengths of prompts count.
    """
    rng = np.random.default_rng([4, seed])
    run = make_run({**TABLE, "seed": seed})
    config = with_history(run, has_history=has_history).workload.ranker
    assert config is not None, "it has one"
    size, most = run.algorithm.prompts_per_step, run.rollout.max_tokens
    ranker = LengthRanker(config, prompts_per_step=size, max_tokens=most, seed=run.seed)
    said: list[tuple[float, str]] = []
    for group, (prompt, own, expected) in enumerate(groups):
        rollouts = tuple(range(SIZE * group, SIZE * group + SIZE))
        ranker.draw(DrawnGroup(group, rollouts, 200, (expected,) * SIZE), prompt)
        mean_log = log(LENGTH) - (SPREAD**2 + NOISE**2) / 2 + own
        for rollout in rollouts:
            tokens = round(exp(mean_log + rng.normal(0, NOISE)))
            news = ranker.learn(Generated(rollout, tokens, "stop", 0, 1.0, 0.1))
            if isinstance(news, ExpectationsChanged) and news.recall is not None:
                said.append((news.recall, news.reason))
    return said


def with_history(run: Run, *, has_history: bool) -> Run:
    """Return a run whose ranker remembers the past lengths of prompts, or does not."""
    assert run.workload.ranker is not None
    ranker = replace(run.workload.ranker, history=has_history)
    return replace(run, workload=replace(run.workload, ranker=ranker))


def speed() -> Iterator[tuple[str, float, str]]:
    """Yield the CPU time of scoring and learning."""
    rng = np.random.default_rng(0)
    words = [f"word{n}" for n in range(3000)]
    texts = [" ".join(rng.choice(words, 60)) + f" {n}?" for n in range(1024)]
    ranker = fit_text(texts, rng.normal(8, 1, 1024))
    yield (
        "scoring 1,024 prompts of 60 words by text",
        1e3 * _best(lambda: ranker.score(texts)),
        "ms",
    )
    posterior = Posterior()
    groups = [_group(rng, place, 0.0, rng.normal()) for place in range(1024)]
    yield (
        "an update of the posterior, by rollout",
        1e6 * _best(lambda: posterior.learn(groups)) / (1024 * SIZE),
        "us",
    )
    prompts = range(1024)
    ask = 1e6 * _best(lambda: [posterior.expect(8.0, prompt) for prompt in prompts]) / 1024
    yield "a question to the posterior", ask, "us"
    watch = RankerMonitor(RATE, 0)
    window = groups[:GROUPS]
    yield (
        "judging a window, by rollout",
        1e6 * _best(lambda: watch.judge(window)) / (GROUPS * SIZE),
        "us",
    )


def _best(work: Callable[[], object]) -> float:
    took = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took)


if __name__ == "__main__":
    main()
