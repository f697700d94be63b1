"""What a replica on vLLM imports, for a nursery of workers on CPUs: it takes nine seconds of a core, and starts no thread."""

import os

from streamrl.executor.rollout.vllm_settings import ANYWHERE, ON_CPUS

os.environ.update({**ANYWHERE, **ON_CPUS})

import vllm.engine.arg_utils
import vllm.v1.engine.async_llm  # noqa: F401
