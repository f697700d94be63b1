"""Options of exported scripts, read by the frameworks' own parsers: make test-exports.

Hydra composes verl's configuration with the options of a script. OpenRLHF's script parses and checks its own.
Neither package is imported, because both need PyTorch and Ray. So verl's checks of a composed configuration are not run.
NeMo-RL's configuration files are in no package. slime's parser imports Megatron-LM and SGLang. Both are checked against
published options in test_published_options.py.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import subprocess
import sys
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from streamrl.export.launch_file import find_arguments, launch_script
from streamrl.export.option_table import ExportName, load_options
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run
from streamrl.sim.planner.modes import keep_to_framework
from streamrl.sim.planner.space import Space
from tests.runs import small_run
from tests.target_offers import OFFERS, offer_for

pytestmark = pytest.mark.exports
PLANS_OF_EACH = 3
"""Plans of an offer that are exported to each framework."""
MAIN, COLOCATED = "examples/h20-h800.toml", "examples/colocated.toml"
GRPO = ["algorithm.name=grpo", "algorithm.group_size=8", "algorithm.kl_coefficient=0.01"]
SHARDED = ["trainer.zero=3", "trainer.tensor_parallel=1", "trainer.data_parallel=16"]
DRAFTS = [
    *("model.name=mimo-7b", "rollout.speculative.tokens=2"),
    *("rollout.speculative.acceptance=0.7", "rollout.speculative.trained=true"),
]
FILES: list[tuple[str, list[str]]] = [
    (MAIN, []),
    (COLOCATED, []),
    (MAIN, [*GRPO, "algorithm.dynamic_sampling=true", "algorithm.correction=decoupled"]),
    (MAIN, [*GRPO, "algorithm.old_log_probs=engine", "trainer.packing=padded"]),
    (MAIN, [*SHARDED, "trainer.offload=true"]),
    (MAIN, ["trainer.recompute=selective", "trainer.offload=true"]),
    (MAIN, ["sync.mode=lora", "trainer.recompute=full"]),
    (MAIN, DRAFTS),
]
"""Run files and settings that every framework starts with."""
MIXTURE: dict[str, Any] = {
    "model.name": "moonlight-16b-a3b",
    "cluster.pools.far": {"gpu": "h20", "nodes": 1},
    "cluster.pools.near": {"gpu": "h800", "nodes": 4},
    "rollout.replicas": 1,
    "rollout.tensor_parallel": 4,
    "rollout.expert_parallel": 8,
    "rollout.data_parallel": 2,
    "algorithm.name": "ppo",
    "algorithm.group_size": 1,
    "algorithm.prompts_per_step": 64,
    "policies.over_staleness": "drop",
    "policies.consumption": "greedy",
    "trainer": {
        "pool": "near",
        "data_parallel": 8,
        "context_parallel": 2,
        "pipeline_parallel": 2,
        "expert_parallel": 8,
    },
}
"""A critic, experts, context parallelism, and stages that do not divide the layers."""
VIRTUAL: dict[str, Any] = {
    **MIXTURE,
    "model.name": "qwen3-30b-a3b",
    "rollout.data_parallel": 1,
    "rollout.pipeline_parallel": 2,
    "rollout.expert_parallel": 1,
    "trainer": {**MIXTURE["trainer"], "virtual_stages": 2},
}


def arguments_of(run: Run, name: ExportName) -> list[str]:
    """Return the arguments that a shell makes of a script."""
    found = find_arguments(run, name)
    text = launch_script(found._replace(command="printf '%s\\n'"))
    environment = {**os.environ, **{each: f"/{each.lower()}" for each in found.table.variables}}
    done = subprocess.run(
        ["bash"], input=text, env=environment, text=True, check=True, capture_output=True
    )
    return done.stdout.splitlines()


# verl ---------------------------------------------------------------------------------------------


def compose_verl(arguments: list[str]) -> Any:
    """Return verl's configuration with the arguments of a script; Hydra rejects an unknown option."""
    from hydra import compose, initialize_config_dir

    spec = find_spec("verl")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "trainer" / "config"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        return compose(config_name="ppo_trainer", overrides=arguments)


def verl_runs() -> list[Run]:
    """Return runs that use every option of verl between them."""
    sglang = ["costs.engine=sglang-0.5", "sync.mode=delta", "trainer.recompute=mlp"]
    runs = [load_run(Path(path), settings) for path, settings in FILES]
    runs += [load_run(Path(MAIN), settings) for settings in (sglang, ["sync.backend=nccl-buckets"])]
    runs += [load_run(Path(MAIN), ["algorithm.correction=token-tis"])]
    runs += [load_run(Path(MAIN), [*DRAFTS, "costs.engine=sglang-0.5"])]
    return [*runs, small_run(MIXTURE), small_run(VIRTUAL)]


def test_hydra_composes_verls_configuration_with_the_options_of_every_script() -> None:
    from omegaconf import OmegaConf

    for run in verl_runs():
        arguments = arguments_of(run, "verl")
        config = compose_verl(arguments)
        OmegaConf.to_container(config, resolve=True)
        for name, _, _ in (each.lstrip("+").partition("=") for each in arguments):
            if name != "model_engine":
                assert OmegaConf.select(config, name, throw_on_missing=True) is not None, name
        nodes = int(OmegaConf.select(config, "trainer.nnodes"))
        per_node = int(OmegaConf.select(config, "trainer.n_gpus_per_node"))
        assert nodes * per_node == run.trainer.num_gpus


def test_the_runs_for_verl_use_every_option_of_its_table() -> None:
    check_coverage("verl", verl_runs())


def test_an_option_that_verl_does_not_have_is_rejected() -> None:
    with pytest.raises(Exception, match="no_such_option"):
        compose_verl(["trainer.no_such_option=1"])


# OpenRLHF -----------------------------------------------------------------------------------------


def parse_with_openrlhf(arguments: list[str], patch: pytest.MonkeyPatch) -> Any:
    """Return the arguments of a script as OpenRLHF reads and checks them before training.

    The statements of its main block are executed, except the last one, which trains.
    """
    spec = find_spec("openrlhf.cli.train_ppo_ray")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin)
    *_, main = ast.parse(path.read_text(encoding="utf-8")).body
    assert isinstance(main, ast.If) and ast.unparse(main.body[-1]) == "train(args)"
    # The package openrlhf.utils imports PyTorch; only its module config is needed.
    package = ModuleType("openrlhf.utils")
    package.__path__ = [str(path.parents[1] / "utils")]
    patch.setitem(sys.modules, package.__name__, package)
    patch.setattr(sys, "argv", ["train_ppo_ray", *arguments])
    names: dict[str, Any] = {"argparse": argparse, "datetime": datetime}
    exec(compile(ast.Module(main.body[:-1], []), str(path), "exec"), names)
    return names["args"]


def openrlhf_runs() -> list[Run]:
    """Return runs that use every option of OpenRLHF between them."""
    runs = [load_run(Path(path), settings) for path, settings in FILES]
    in_flight = ["policies.system=fully-async", "trainer.context_parallel=2"]
    disaggregated = [*GRPO, "policies.system=disaggregated", "trainer.recompute=full"]
    runs += [load_run(Path(MAIN), [*in_flight, "trainer.data_parallel=2"])]
    runs += [load_run(Path(MAIN), disaggregated)]
    return [*runs, load_run(Path(MAIN), ["algorithm.correction=token-tis"])]


def test_openrlhf_parses_the_options_of_every_script(monkeypatch: pytest.MonkeyPatch) -> None:
    for run in openrlhf_runs():
        parsed = parse_with_openrlhf(arguments_of(run, "openrlhf"), monkeypatch)
        assert parsed.actor.num_nodes * parsed.actor.num_gpus_per_node == run.trainer.num_gpus
        assert parsed.ds.tensor_parallel_size == run.trainer.tensor_parallel
        assert parsed.ds.ring_attn_size == run.trainer.context_parallel
        assert parsed.ds.zero_stage == run.trainer.zero


def test_the_runs_for_openrlhf_use_every_option_of_its_table() -> None:
    check_coverage("openrlhf", openrlhf_runs())


def test_an_option_that_openrlhf_does_not_have_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        parse_with_openrlhf(["--no.such_option", "1"], monkeypatch)


# Both ---------------------------------------------------------------------------------------------


def planned_runs(name: ExportName, offer: str) -> list[Run]:
    """Return a few of the plans that are searched for a framework, as `plan --for` does."""
    space = Space.open(keep_to_framework(offer_for(offer, name)).run)
    places = random.Random(0).sample(range(len(space)), PLANS_OF_EACH)
    return [space.candidate(place).apply(space.run) for place in places]


@pytest.mark.parametrize("offer", OFFERS)
def test_the_parsers_take_what_is_planned_for_verl_and_openrlhf(
    offer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in planned_runs("verl", offer):
        config = compose_verl(arguments_of(run, "verl"))
        gpus = int(config.trainer.nnodes) * int(config.trainer.n_gpus_per_node)
        assert gpus == run.trainer.num_gpus
    for run in planned_runs("openrlhf", offer):
        parsed = parse_with_openrlhf(arguments_of(run, "openrlhf"), monkeypatch)
        assert parsed.actor.num_nodes * parsed.actor.num_gpus_per_node == run.trainer.num_gpus
        engines = parsed.vllm.num_engines * parsed.vllm.tensor_parallel_size
        assert engines == run.rollout.num_gpus


def check_coverage(name: ExportName, runs: list[Run]) -> None:
    """Check that every option of a framework's table is in the script of at least one run."""
    used = {each.option.name for run in runs for each in find_arguments(run, name).arguments}
    assert {option.name for option in load_options(name).options} == used
