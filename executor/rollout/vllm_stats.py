"""What vLLM tells of its KV cache after each pass, kept until somebody asks."""

from __future__ import annotations

from typing import Any

from streamrl.executor.samples import CacheState


class CacheWatch:
    """A logger of vLLM's statistics (`StatLoggerBase`) that keeps the newest; what makes a logger is to be called first."""

    def __init__(self) -> None:
        self._use = 0.0
        self._num_preempted = 0

    def __call__(self, config: Any, engine_index: int = 0) -> CacheWatch:
        """Return itself: vLLM calls what makes a logger, once for each core."""
        return self

    def state(self, config: Any) -> CacheState:
        """Return what the cache is like, of a vLLM with this configuration."""
        cache = config.cache_config
        pages = cache.num_gpu_blocks
        tokens = None if pages is None else pages * cache.block_size
        return CacheState(tokens=tokens, use=self._use, num_preempted=self._num_preempted)

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Keep what a pass left (vllm/v1/metrics/stats.py)."""
        if scheduler_stats is not None:
            self._use = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self._num_preempted += iteration_stats.num_preempted_reqs

    def log(self) -> None:
        """Write nothing."""

    def log_engine_initialized(self) -> None:
        """Write nothing."""

    def record_sleep_state(self, *_: Any, **__: Any) -> None:
        """Keep nothing."""
