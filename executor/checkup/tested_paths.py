"""Which paths of execution this project has run, on a CPU and on a GPU, and by which test or check.

docs/tested.md shows `PATHS` as a table. `streamrl doctor` names the paths of a run file that were never run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from streamrl.executor.launchers.placement import PlacedRoles
from streamrl.runfile.config import Run
from streamrl.runfile.findings import Finding, Level

NEVER = "never"
BY_HAND = "by hand"
ANYWHERE = "no GPU work"
"""What `ran_on` says of a path that computes nothing on a GPU."""
H200 = "one H200"
"""The GPU on which checks ran, on the dates that docs/running.md names."""


class RunPath(NamedTuple):
    """A path of execution, and where it was run."""

    topic: str
    path: str
    """A choice of a run file (`is_chosen`), or in words what a run does."""
    command: str
    """The make target whose tests run it on a CPU, `BY_HAND`, or `NEVER`."""
    test: str = ""
    """The test, as "test_FILE.py::NAME" below tests/."""
    check: str = ""
    """The part of `make gpu` that checks it on a GPU."""
    ran_on: str = NEVER
    """The GPU on which it has run, or `NEVER`: a check that exists may have run on no GPU yet."""

    @property
    def on_cpu(self) -> str:
        """What ran it on a CPU."""
        return f"`make {self.command}`" if self.test else self.command

    @property
    def on_gpu(self) -> str:
        """What ran it on a GPU."""
        if self.check:
            part = f"`make gpu`, part {self.check}"
            return f"{part}: not run yet" if self.ran_on == NEVER else f"{part}: {self.ran_on}"
        return self.ran_on if self.ran_on in (NEVER, ANYWHERE) else f"{BY_HAND}, {self.ran_on}"


ENGINES = "Engines that generate"
SAMPLING = "Sampling"
TRAINERS = "Trainers"
OPTIMIZATION = "Optimization"
EVALUATION = "Evaluation"
CHECKPOINTS = "Checkpoints"
LAUNCHERS = "Launchers and devices"
WEIGHTS = "Weights from trainer to replicas"
LOSSES = "Lost, hung and slow roles"
WATCHING = "Messages, records and the run guard"
RUN_FILES = "Run files, rewards and environments"

_ON_EVERY_ENGINE = "test_end_to_end.py::test_a_run_file_executes_on_every_engine_and_the_trainer_finds_its_logprobs_the_same"
_ON_EVERY_TRAINER = "test_engine_runs.py::test_every_trainer_trains"
_FIVE_STEPS = "test_engine_runs.py::test_every_algorithm_makes_five_steps_on_every_back_end"
_WHOLE_RUN = "test_end_to_end.py::test_a_real_run_trains_resumes_replays_and_compares"
_MATRIX = "test_fault_matrix.py::test_a_role_with_a_fault_costs_neither_the_run_nor_a_rollout"
_TRUNCATED = "test_sampling.py::test_engine_and_trainer_agree_on_logprobs"
_SAVING = (
    "test_ranks.py::test_the_gradient_is_that_of_one_rank_that_keeps_all_activations_and_logits"
)
_WEIGHTS = "test_engine_runs.py::test_weights_go_every_way"

# fmt: off
PATHS = (
    RunPath(ENGINES, "rollout.backend = transformers", "test", _WHOLE_RUN, "replica", H200),
    RunPath(ENGINES, "rollout.backend = static", "test", "test_replica.py::test_a_static_batch_takes_nothing_in_until_all_of_it_is_over", "replica", H200),
    RunPath(ENGINES, "rollout.backend = vllm", "test-vllm", _ON_EVERY_ENGINE, ran_on=H200),
    RunPath(ENGINES, "rollout.backend = sglang", BY_HAND),
    RunPath(ENGINES, "rollout.backend = external", "test", "test_external.py::test_a_run_generates_on_external_servers_and_replaces_a_dead_one_by_a_spare"),
    RunPath(ENGINES, "rollout.external.weights = distributed", "test", "test_external.py::test_a_server_takes_weights_over_a_group_without_files"),
    RunPath(ENGINES, "vLLM's V2 model runner", "test-vllm", "test_vllm.py::test_the_v2_model_runner_keeps_the_contract_of_a_replica"),
    RunPath(ENGINES, "rollout.tensor_parallel > 1", "test-vllm", "test_vllm.py::test_a_replica_takes_its_shards_of_every_version_and_nothing_outlives_it_where_it_is_killed"),
    RunPath(ENGINES, "rollout.others", NEVER),
    RunPath(SAMPLING, "rollout.temperature", "test", "test_replica.py::test_logprobs_are_those_of_a_full_forward_pass"),
    RunPath(SAMPLING, "rollout.top_p", "test", _TRUNCATED),
    RunPath(SAMPLING, "rollout.top_k", "test", _TRUNCATED),
    RunPath(SAMPLING, "rollout.min_p", "test", _TRUNCATED),
    RunPath(SAMPLING, "rollout.stop", "test", "test_sampling.py::test_a_stop_string_ends_a_rollout_with_the_token_that_completes_it"),
    RunPath(SAMPLING, "rollout.stop_token_ids", "test", "test_special_tokens.py::test_replicas_get_the_ends_of_all_files"),
    RunPath(SAMPLING, "rollout.seed_rollouts", "test", "test_sampling.py::test_a_seed_of_its_own_makes_a_rollout_independent_of_others"),
    RunPath(SAMPLING, "execute.deterministic", "test", "test_deterministic.py::test_two_runs_make_the_same_tokens_and_weights"),
    RunPath(TRAINERS, "trainer.backend = torch", "test", _WHOLE_RUN, "trainer", H200),
    RunPath(TRAINERS, "trainer.backend = deepspeed", "test-deepspeed", _FIVE_STEPS),
    RunPath(TRAINERS, "trainer.backend = fsdp2", "test-fsdp2", _FIVE_STEPS, "fsdp2"),
    RunPath(TRAINERS, "trainer.data_parallel > 1", "test", _ON_EVERY_TRAINER),
    RunPath(TRAINERS, "trainer.tensor_parallel > 1", "test-fsdp2", _SAVING),
    RunPath(TRAINERS, "trainer.context_parallel > 1", "test-fsdp2", _SAVING),
    RunPath(TRAINERS, "trainer.recompute = none", "test", _WHOLE_RUN, "trainer", H200),
    RunPath(TRAINERS, "trainer.recompute = full", "test", _SAVING, "trainer", H200),
    RunPath(TRAINERS, "trainer.recompute = selective", "test", _SAVING, "memory", H200),
    RunPath(TRAINERS, "trainer.recompute = mlp", "test", _SAVING, "memory", H200),
    RunPath(TRAINERS, "trainer.logits = chunked", "test", _SAVING, "memory", H200),
    RunPath(TRAINERS, "trainer.logits = fused", "test", _SAVING, "memory", H200),
    RunPath(TRAINERS, "trainer.packing = packed", "test", "test_passes.py::test_packed_rollouts_have_the_log_probabilities_and_the_gradient_of_padded_ones", "trainer", H200),
    RunPath(TRAINERS, "trainer.packing = padded", "test", "test_passes.py::test_packed_rollouts_have_the_log_probabilities_and_the_gradient_of_padded_ones", "trainer", H200),
    RunPath(TRAINERS, "trainer.reshard_after_forward = false", "test-fsdp2", "test_ranks.py::test_weights_are_the_same_with_all_that_saves_memory_or_time"),
    RunPath(TRAINERS, "trainer.shard_ranks", "test-fsdp2", "test_ranks.py::test_the_gradient_is_that_of_one_rank_that_keeps_all_activations_and_logits"),
    RunPath(TRAINERS, "trainer.resize", "test", "test_elastic_ranks.py::test_weights_are_those_of_a_trainer_whose_ranks_never_changed"),
    RunPath(TRAINERS, "trainer.borrows", "test-fsdp2", "test_elastic_ranks.py::test_gpus_of_replicas_train_in_an_executed_run"),
    RunPath(TRAINERS, "trainer.offload", "test-fsdp2", "test_ranks.py::test_weights_are_the_same_with_all_that_saves_memory_or_time"),
    RunPath(TRAINERS, "followers", "test", "test_secondary_trainers_executed.py::test_every_trainer_learns_from_one_stream_and_leaves_its_own_record"),
    RunPath(OPTIMIZATION, "algorithm.optimizer.name = muon", "test", "test_optimizers.py::test_muon_moves_matrices_of_layers_and_adamw_moves_the_rest"),
    RunPath(OPTIMIZATION, "algorithm.optimizer.name = adamw-8bit", "test", "test_optimizers.py::test_8_bit_moments_are_close_to_32_bit_ones_and_those_of_embeddings_are_not_in_8_bits"),
    RunPath(OPTIMIZATION, "algorithm.optimizer.name = adamw-paged", NEVER),
    RunPath(OPTIMIZATION, "algorithm.optimizer.name = adamw-8bit-paged", NEVER),
    RunPath(OPTIMIZATION, "learning-rate schedules", "test", "test_optimizers.py::test_schedules_fall_as_those_of_transformers", ran_on=ANYWHERE),
    RunPath(OPTIMIZATION, "every algorithm for five steps", "test-engines", _FIVE_STEPS),
    RunPath(OPTIMIZATION, "each `algorithm.loss_mean`, as written out", "test", "test_trainer.py::test_the_step_is_that_of_the_written_out_loss"),
    RunPath(OPTIMIZATION, "losses and gradients beside TRL's", "test-trl", "test_trl_losses.py::test_the_loss_and_its_gradient_are_trls"),
    RunPath(OPTIMIZATION, "algorithm.clip_dual", "test", "test_optimizers.py::test_the_dual_clip_bounds_the_loss_of_bad_tokens"),
    RunPath(OPTIMIZATION, "algorithm.kl_coefficient", "test", "test_trainer.py::test_the_kl_penalty_pulls_towards_the_initial_weights"),
    RunPath(OPTIMIZATION, "overlong prompts left out and counted", "test", "test_special_tokens.py::test_overlong_prompts_are_refused_or_left_out_and_counted", ran_on=ANYWHERE),
    RunPath(OPTIMIZATION, "arguments of the chat template", "test", "test_special_tokens.py::test_the_chat_template_gets_the_arguments_of_the_run", ran_on=ANYWHERE),
    RunPath(EVALUATION, "evaluation", "test", "test_evaluation_executed.py::test_an_executed_run_evaluates_each_due_version_and_replays", "evaluation"),
    RunPath(EVALUATION, "evaluation of episodes", "test", "test_episodes_executed.py::test_held_out_episodes_are_evaluated_and_recorded_turn_by_turn"),
    RunPath(EVALUATION, "`streamrl evaluate`", "test", "test_end_to_end.py::test_an_evaluation_names_the_step_of_its_checkpoint"),
    RunPath(CHECKPOINTS, "resume of a killed run", "test", "test_end_to_end.py::test_a_real_run_trains_resumes_replays_and_compares"),
    RunPath(CHECKPOINTS, "resume in another layout or with another back end", "test-deepspeed", "test_ranks.py::test_training_goes_on_in_another_layout"),
    RunPath(CHECKPOINTS, "execute.checkpoints.keep_best", "test", "test_checkpoint_export.py::test_old_checkpoints_are_removed_when_a_better_one_has_its_score", ran_on=ANYWHERE),
    RunPath(CHECKPOINTS, "execute.checkpoints.export", "test", "test_checkpoint_export.py::test_an_export_has_no_state_of_a_resume_and_refuses_a_full_directory", ran_on=ANYWHERE),
    RunPath(CHECKPOINTS, "upload to a hub, beside a hub that answers", "test", "test_checkpoint_export.py::test_a_checkpoint_is_pushed_to_a_repository", ran_on=ANYWHERE),
    RunPath(LAUNCHERS, "execute.launcher = local", "test", _WHOLE_RUN, "run", H200),
    RunPath(LAUNCHERS, "execute.launcher = in-process", "test", "test_evaluation_executed.py::test_an_executed_run_evaluates_each_due_version_and_replays"),
    RunPath(LAUNCHERS, "execute.launcher = ray", "test-ray", "test_ray.py::test_one_run_file_executes_on_every_trainer_with_weights_every_way"),
    RunPath(LAUNCHERS, "policies.system = colocated", "test", "test_device_sharing.py::test_a_colocated_run_never_has_both_sides_awake", "run", H200),
    RunPath(LAUNCHERS, "lending", "test-vllm", "test_engine_runs.py::test_a_trainer_lends_its_gpus_to_a_replica_of_this_engine"),
    RunPath(LAUNCHERS, "lending with rollout.backend transformers", BY_HAND),
    RunPath(LAUNCHERS, "lent GPUs whose role dies at a switch, with roles that compute nothing", "test", "test_lending.py::test_an_executed_run_survives_a_death_at_each_switch"),
    RunPath(LAUNCHERS, "replicas that are added and given back", "test", "test_resize.py::test_a_real_run_adds_replicas_or_gives_them_back"),
    RunPath(LAUNCHERS, "notices of spot machines, with roles that compute nothing", "test", "test_spot_executed.py::test_no_rollout_is_lost_or_trained_twice_whenever_machines_leave"),
    RunPath(LAUNCHERS, "notices of spot machines (`streamrl notice`), with rollout.backend transformers", BY_HAND),
    RunPath(LAUNCHERS, "nodes of Ray that drain", "test-ray", "test_ray.py::test_replicas_of_a_node_that_drains_move_their_rollouts"),
    RunPath(LAUNCHERS, "little shared memory", "test", "test_transfer.py::test_what_has_no_room_in_shared_memory_goes_through_files", ran_on=ANYWHERE),
    RunPath(WEIGHTS, "sync.mode = full", "test", _WHOLE_RUN, "run", H200),
    RunPath(WEIGHTS, "sync.mode = delta", "test", _WEIGHTS),
    RunPath(WEIGHTS, "sync.mode = lora", "test", _WEIGHTS),
    RunPath(WEIGHTS, "sync.merge_adapters = false", "test-vllm", "test_vllm.py::test_adapters_are_computed_with_beside_the_weights_and_replaced_under_what_runs"),
    RunPath(WEIGHTS, "sync.wire = broadcast", "test", "test_deterministic.py::test_two_runs_make_the_same_tokens_and_weights"),
    RunPath(WEIGHTS, "sync.wire = broadcast to nodes of a Ray cluster", NEVER),
    RunPath(WEIGHTS, "sync.wire = cuda-ipc", NEVER, check="weights"),
    RunPath(WEIGHTS, "relays to other machines", "test", "test_relayed_transfer.py::test_every_place_has_what_was_written", ran_on=ANYWHERE),
    RunPath(LOSSES, "each role, dead, hung or slow, at each command", "matrix", _MATRIX),
    RunPath(LOSSES, "an idle replica whose engine dies", "test", "test_hangs.py::test_a_replica_whose_engine_died_is_replaced_though_its_process_lives"),
    RunPath(LOSSES, "a node of a Ray cluster that dies and comes back", "test-ray", "test_ray.py::test_all_nodes_of_the_replicas_die_and_are_back_after_eight_seconds"),
    RunPath(LOSSES, "a stopped prefork server, and a bound for every wait", "test", "test_waits.py::test_every_wait_has_a_bound_or_a_reason", ran_on=ANYWHERE),
    RunPath(LOSSES, "a driver that is killed", "test", "test_faults_executed.py::test_a_driver_that_was_killed_resumes_and_is_not_killed_again", ran_on=ANYWHERE),
    RunPath(WATCHING, "one line for each loss and its repair", "test", "test_logging.py::test_a_killed_replica_is_one_line_and_its_replacement_another", ran_on=ANYWHERE),
    RunPath(WATCHING, "a run that cannot learn", "test", "test_run_guard.py::test_a_run_that_cannot_learn_says_so_after_a_few_steps_and_at_the_end_with_the_cause", ran_on=ANYWHERE),
    RunPath(WATCHING, "the run guard: plan and measurement, by stage", "test", "test_run_guard.py::test_the_stages_of_a_run_are_those_of_its_own_simulation", ran_on=ANYWHERE),
    RunPath(WATCHING, "execute.deadline", "test", "test_run_guard.py::test_a_run_that_reaches_its_limit_is_saved_and_stopped", ran_on=ANYWHERE),
    RunPath(WATCHING, "execute.budget", "test", "test_run_guard.py::test_a_budget_is_a_time_at_the_price_of_the_gpus_and_the_earlier_limit_counts", ran_on=ANYWHERE),
    RunPath(WATCHING, "execute.trackers", "test", "test_monitoring.py::test_figures_go_to_tensorboard_and_to_weights_and_biases_too", ran_on=ANYWHERE),
    RunPath(RUN_FILES, "bases, overlays and secrets", "test", "test_bases.py::test_no_record_has_a_secret", ran_on=ANYWHERE),
    RunPath(RUN_FILES, "reward functions of verl and TRL", "test", "test_rewards.py::test_functions_of_verl_and_trl_score_as_they_are", ran_on=ANYWHERE),
    RunPath(RUN_FILES, "reward functions outside the sandbox", "test", "test_rewards.py::test_a_function_outside_the_sandbox_has_files_processes_and_the_environment", ran_on=ANYWHERE),
    RunPath(RUN_FILES, "programs of rollouts in the sandbox", "test", "test_unit_tests.py::test_what_the_sandbox_refuses_a_program_goes_on_without", ran_on=ANYWHERE),
    RunPath(RUN_FILES, "verifier.pool", "test", "test_reward_run.py::test_a_reward_model_scores_beside_other_scorers_and_its_seconds_show"),
    RunPath(RUN_FILES, "environment", "test", "test_episodes_executed.py::test_what_is_trained_on_is_what_was_sampled_and_the_environment_hears_each_turn"),
)
# fmt: on

_CHOICE = re.compile(r"([a-z0-9_]+(?:\.[a-z0-9_]+)*)(?: ([=>]) (\S+))?")
_OF_REPLICAS = ("rollout", "evaluation", "environment")
"""Sections whose paths run on the devices of the replicas; others run on those of the trainer."""


def is_chosen(path: str, sections: Mapping[str, tuple[Any, ...]]) -> bool:
    """Return whether sections choose a path: "KEY = VALUE", "KEY > NUMBER", or "KEY" for any value but the default.

    Several sections of a name are those of all kinds of replicas, or of all trainers. A path in words is no choice.
    """
    match = _CHOICE.fullmatch(path)
    if match is None:
        return False
    key, sign, wanted = match.groups()
    section, *names = key.split(".")
    return any(_is_set(each, names, sign, wanted) for each in sections.get(section, ()))


def _is_set(section: Any, names: list[str], sign: str | None, wanted: str) -> bool:
    owner, value = section, section
    for name in names:
        if value is None:
            return False
        owner, value = value, getattr(value, name)
    if sign == "=":
        return str(value).lower() == wanted
    if sign == ">":
        return bool(value > float(wanted))
    return value is not None and (not names or bool(value != _default(owner, names[-1])))


def _default(section: Any, name: str) -> Any:
    """Return the default of a key; None if it has none."""
    (field,) = (field for field in msgspec.structs.fields(section) if field.name == name)
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default is msgspec.NODEFAULT else field.default


def chosen_paths(
    sections: Mapping[str, tuple[Any, ...]], roles: PlacedRoles
) -> Iterator[tuple[RunPath, str]]:
    """Yield each path that sections choose, with its torch device; classes of other packages have run nowhere."""
    on = {True: roles.device_of(roles.rollout.pool), False: roles.device_of(roles.trainer.pool)}
    for path in PATHS:
        if is_chosen(path.path, sections):
            yield path, on[path.path.split(".")[0] in _OF_REPLICAS]
    known = {path.path for path in PATHS}
    for topic, section in ((ENGINES, "rollout"), (TRAINERS, "trainer")):
        for choice in {f"{section}.backend = {own.backend}": None for own in sections[section]}:
            if choice not in known:
                yield RunPath(topic, choice, NEVER), on[section == "rollout"]


def find(run: Run) -> Iterator[Finding]:
    """Yield a warning with the paths that were never run on the run's devices; skip a run without weights."""
    if run.model.path is None:
        return
    roles = PlacedRoles.of(run)
    sections: dict[str, tuple[Any, ...]] = {
        **{name: (getattr(run, name),) for name in msgspec.structs.asdict(run)},
        "rollout": roles.rollout.kinds,
        "trainer": roles.trainers,
        "followers": roles.followers,
    }
    chosen = list(chosen_paths(sections, roles))
    for device, name in (("cpu", "a CPU"), ("cuda", "a GPU")):
        own = [path for path, where in chosen if (where == "cpu") == (device == "cpu")]
        never = [path for path in own if not _has_run(path, device)]
        if never:
            yield _warning(never, name)
        elif own:
            text = f"each path of this run was run on {name} before: {', '.join(path.path for path in own)}"
            yield _finding("ok", text)


def _warning(never: list[RunPath], name: str) -> Finding:
    """Return the warning of paths that were never run."""
    text = f"never run on {name} by this project: {', '.join(path.path for path in never)} (docs/tested.md)"
    fix = "begin with a few steps, and look at logprob_gap and reward"
    if name == "a GPU" and any(path.check for path in never):
        fix = f"run `make gpu` first; then {fix}"
    return _finding("warning", text, fix)


def _has_run(path: RunPath, device: str) -> bool:
    return path.command != NEVER if device == "cpu" else path.ran_on != NEVER


def _finding(level: Level, text: str, fix: str = "") -> Finding:
    return Finding(level=level, topic="versions", name="where-run", text=text, fix=fix)
