"""Small offers of many kinds, to plan for each target: one node to sixteen, dense models and mixtures."""

from __future__ import annotations

from typing import Any

from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run
from streamrl.runfile.plan_config import TargetName

H20 = {"gpu": "h20", "nodes": 1, "price": 1.1}
H100 = {"gpu": "h100", "nodes": 1, "price": 2.2}
H800 = {"gpu": "h800", "nodes": 1, "price": 2.5}


def _offer(
    model: str, pools: list[dict[str, Any]], changes: dict[str, Any] | None = None, **plan: Any
) -> dict[str, Any]:
    """Return a run file with pools "a" and "b", linked if there are two."""
    names = ["a", "b"][: len(pools)]
    links = [{"between": names, "bandwidth": "80 Gbps"}] if len(pools) > 1 else []
    own = changes or {}
    return {
        "model": {"name": model},
        "cluster": {"pools": dict(zip(names, pools, strict=True)), "links": links},
        "rollout": {"pool": "a", "replicas": 1, "max_tokens": own.get("max_tokens", 4096)},
        "trainer": {"pool": "a"},
        "algorithm": {
            "name": own.get("algorithm", "grpo"),
            "steps": 20,
            "prompts_per_step": own.get("prompts", 16),
            "group_size": own.get("group", 8),
        },
        "workload": {
            "lengths": {
                "kind": "histogram",
                "source": "streamrl-codemath-20k",
                "scale": 0.1,
                "prompt_tokens": 200,
            }
        },
        "plan": {"time_limit": "8 s", "finalists": 2, **plan},
    }


OFFERS: dict[str, dict[str, Any]] = {
    "7b, two pools": _offer("qwen2.5-7b", [H20, H800], unit=4),
    "7b, one node": _offer("qwen2.5-7b", [H100], unit=1),
    "7b, nodes of six": _offer("qwen2.5-7b", [{**H100, "nodes": 2, "gpus_per_node": 6}], unit=2),
    "1.5b, single GPUs": _offer("qwen2.5-1.5b", [{**H100, "gpus_per_node": 4}], unit=1),
    "8b, critic": _offer(
        "qwen3-8b",
        [H20, {**H100, "nodes": 2}],
        {"algorithm": "ppo", "group": 1, "prompts": 128},
        unit=8,
    ),
    "32b, six nodes": _offer("qwen2.5-32b", [{**H20, "nodes": 2}, {**H800, "nodes": 4}]),
    "72b, twelve nodes": _offer(
        "qwen2.5-72b", [{**H20, "nodes": 4}, {**H800, "nodes": 8}], {"prompts": 64}
    ),
    "30b mixture": _offer("qwen3-30b-a3b", [H20, {**H800, "nodes": 4}]),
    "16b mixture, 27 layers": _offer("moonlight-16b-a3b", [{**H800, "nodes": 2}]),
    "7b, long": _offer("qwen2.5-7b", [H20, {**H800, "nodes": 2}], {"max_tokens": 32768}),
    "7b, owned and spot": _offer(
        "qwen2.5-7b",
        [{**H20, "owned": True}, {**H100, "nodes": 2, "spot_failures_per_gpu_day": 0.1}],
    ),
    "235b mixture, 94 layers": _offer(
        "qwen3-235b-a22b", [{**H20, "nodes": 4}, {**H800, "nodes": 16}], {"prompts": 64}
    ),
}


def offer_for(name: str, target: TargetName | None, **plan: Any) -> Run:
    """Return the run file of an offer, to be planned for a target."""
    table = OFFERS[name]
    return make_run({**table, "plan": {**table["plan"], "target": target, **plan}})
