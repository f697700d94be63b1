"""Roles in actors of a Ray cluster of one node, which the first of them begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamrl.executor.launchers.handles import PATIENCE, Handle


async def start_actor(
    role_path: str, config: dict[str, Any], log: Path, patience: float = PATIENCE
) -> Handle:
    """Start a role."""
    import ray

    from streamrl.executor.launchers.ray_actor import RayActor, RayRole

    if not ray.is_initialized():
        ray.init("local", num_cpus=1, log_to_driver=False, include_dashboard=False)
    options = {"num_cpus": 0, "max_concurrency": 1000}
    actor = RayActor(ray.remote(RayRole).options(**options).remote(), role_path, patience)
    await actor.locate()
    await actor.begin(role_path, config, str(log), 0o077)
    return actor
