"""One wrong line at a time: which of the tests notices it?

    python -m tests.mutate [NAME...]

Copies the tree, and for each mutation below (or the named ones) changes one line of the copy and
runs the tests that should notice, the slow ones left out. Prints the first test that fails, or
SURVIVED; the exit status is 1 where one survived.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECONDS = 400  # a mutation may hang

# Of each: a name, the file, and tests/test_*.py that should notice, or one test of it; what is
# there once, and what becomes of it.
MUTATIONS = r"""
clip_bounds dapo_jax/algorithm.py algorithm losses
- jnp.clip(ratio_RT, 1.0 - eps_low, 1.0 + eps_high)
+ jnp.clip(ratio_RT, 1.0 - eps_high, 1.0 + eps_low)
dual_clip dapo_jax/algorithm.py algorithm losses
- (advantage_RT < 0) & (bound_RT < loss_RT)
+ (advantage_RT < 0) & (bound_RT > loss_RT)
ratio_upside_down dapo_jax/algorithm.py algorithm
- jnp.exp(clamped_log_ratio(logp_RT, other_logp_RT))
+ jnp.exp(clamped_log_ratio(other_logp_RT, logp_RT))
mean_of_responses dapo_jax/algorithm.py algorithm
- "token_mean": max(np.sum(mask_PGT), 1),
+ "token_mean": max(np.sum(tokens_PG1 > 0), 1),
std_without_epsilon dapo_jax/algorithm.py algorithm
- centred_reward(reward_PG) / (std_P1 + ADVANTAGE_EPSILON)
+ centred_reward(reward_PG) / np.maximum(std_P1, ADVANTAGE_EPSILON)
std_biased dapo_jax/algorithm.py algorithm
- np.std(reward_PG, axis=1, keepdims=True, ddof=1)
+ np.std(reward_PG, axis=1, keepdims=True)
kl_sign dapo_jax/algorithm.py algorithm
- clamped_log_ratio(reference_logp_RT, logp_RT)
+ clamped_log_ratio(logp_RT, reference_logp_RT)
overlong_border dapo_jax/algorithm.py algorithm
- (max_tokens - cache_tokens) - length_tokens
+ (max_tokens - cache_tokens) - length_tokens + 1
solved_groups dapo_jax/algorithm.py rollout
- correct_PG.any(axis=1) & ~correct_PG.all(axis=1)
+ correct_PG.any(axis=1)
last_groups dapo_jax/rollout.py rollout
- for group in sampled])[: plan.num_prompts]
+ for group in sampled])[-plan.num_prompts :]
truncation_cap dapo_jax/losses.py losses
- jnp.minimum(ratio, cap), ratio > cap
+ jnp.maximum(ratio, cap), ratio > cap
entropy_sign dapo_jax/losses.py learner::test_an_entropy_bonus_is_the_mean_entropy_of_the_trained_tokens
- loss -= settings.entropy_coef * entropy
+ loss += settings.entropy_coef * entropy
warm_up_one_late dapo_jax/learner.py learner::test_the_rate_warms_up_from_a_fraction_and_decays_to_the_last_step
- (step + 1) / max(s.warmup_steps, 1)
+ step / max(s.warmup_steps, 1)
optimiser_state dapo_jax/learner.py learner::test_two_updates_are_adamw_by_hand
- stepped = TrainState(params, opt_state)
+ stepped = TrainState(params, state.opt_state)
overlong_filter dapo_jax/learner.py learner::test_filtered_responses_add_nothing_and_do_not_count
- if response.stopped or not s.overlong_filtering:
+ if response.stopped or s.overlong_filtering:
temperature dapo_jax/logprobs.py logprobs::test_values_loss_and_gradients_equal_those_of_the_whole_softmax
- d_CV * d_logp_C[:, None] / self._temperature
+ d_CV * d_logp_C[:, None]
environment_trained dapo_jax/packing.py learner::test_an_environments_tokens_are_read_and_never_trained_on
- batch.is_response_BT[b, answer] = response.sampled_T
+ batch.is_response_BT[b, answer] = True
token_fed_early dapo_jax/packing.py learner
- np.append(prompt[-1:], response.tokens_T[:-1])
+ response.tokens_T
earlier_policies dapo_jax/packing.py packing
- is_on_policy_BT[b, answer] = not response.ends
+ is_on_policy_BT[b, answer] = True
causal_border models/transformer.py parity
- same_BTS & (index_T[:, None] >= index_T[None, :])
+ same_BTS & (index_T[:, None] > index_T[None, :])
segment_mask models/transformer.py parity
- segment_BT[:, :, None] == segment_BT[:, None, :]
+ segment_BT[:, :, None] >= segment_BT[:, None, :]
window_border models/transformer.py gemma3::test_a_token_sees_itself_and_the_tokens_before_it_in_its_window
- mask_BTS & (index_T[:, None] - index_T < window)
+ mask_BTS & (index_T[:, None] - index_T <= window)
norm_of_few models/transformer.py exact::test_a_norm_is_exact_whatever_is_fused_with_it
- NORM_TERMS = 64
+ NORM_TERMS = 1
norm_epsilon models/transformer.py parity::test_a_norm_of_small_numbers_has_its_epsilon
- jax.lax.rsqrt(mean_square + eps))
+ jax.lax.rsqrt(mean_square + 0 * eps))
rope_angle models/transformer.py parity
- (-np.arange(half) / half)
+ (-np.arange(half) / (half + 1))
yarn_amplitude models/rope.py parity
- self.attention_factor or 0.1 * math.log(self.factor) + 1
+ self.attention_factor or 1.0
head_grouping models/kernels/xla.py parity
- q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
+ q_BTKGH = q_BTNH.reshape(B, T, N // K, K, H).swapaxes(2, 3)
packed_branch models/kernels/packed.py kernels::test_attention_in_rows_equals_the_definition
- (tile_branch_W1 == 0) | (at("branch", query_WT) == tile_branch_W1)
+ (tile_branch_W1 == 0) | (at("branch", query_WT) >= tile_branch_W1)
flash_window models/kernels/flash_gpu.py kernels::test_attention_in_rows_equals_the_definition
- key_S >= first_Q[:, None]
+ key_S > first_Q[:, None]
flash_tpu_window models/kernels/flash_tpu.py kernels::test_attention_in_rows_equals_the_definition
- (distance_SQ < window)
+ (distance_SQ <= window)
pages_block models/kernels/paged_tpu.py kernels::test_rows_and_pages_give_the_same_bits
- jnp.where(token < begin, old, new)
+ jnp.where(token <= begin, old, new)
pages_in_window models/kernels/xla.py kernels::test_attention_over_pages_equals_the_definition
- prompt_tokens_B + tokens_B + recent_tokens_B - window, 0)
+ prompt_tokens_B + tokens_B + recent_tokens_B - window + 1, 0)
lora_scale models/lora.py lora::test_the_targets_are_adapted_as_defined_and_nothing_else
- new[w] = layer[w] + scale * change
+ new[w] = layer[w] + change
expert_weights models/qwen3_moe.py experts::test_outputs_and_gradients_equal_the_definition
- softmax(take(logits_BTX)) if c.norm_topk
+ take(softmax(logits_BTX)) if c.norm_topk
uniform_by_slot dapo_jax/sampler/decode.py engine::test_tokens_are_the_documented_function_of_seed_cursor_sample_and_position
- request_keys(run_key_B, row["cursor"], row["sample"])
+ request_keys(run_key_B, jnp.arange(B), row["sample"])
block_offset dapo_jax/sampler/decode.py engine::test_behavior_logp_equals_teacher_forcing_around_page_boundaries
- row["page"], sampled_B % cache.page_tokens
+ row["page"], sampled_B % cache.block_tokens
block_border models/kernels/xla.py engine::test_behavior_logp_equals_teacher_forcing_around_page_boundaries
- C * (table.response_tokens_B[:, None] // C > jnp.arange(J))
+ C * (table.response_tokens_B[:, None] // C >= jnp.arange(J))
kth_of_streams dapo_jax/sampler/sampling.py sampler::test_each_row_is_truncated_as_its_stream_says
- jnp.clip(k, 1, best_RK.shape[1]) - 1
+ jnp.clip(k + jnp.ndim(k) // 2, 1, best_RK.shape[1]) - 1
zero_is_the_first_token dapo_jax/sampler/sampling.py sampler::test_zero_is_a_number_like_others
- pick(sum_RN, uniform_R + UNIFORM_GRID / 2)
+ pick(sum_RN, uniform_R)
stop_token_dropped dapo_jax/sampler/session.py engine::test_the_stop_token_counts_and_ends_the_response
- used_N = np.minimum(stop_N + 1, np.minimum(plan.left_N, S))
+ used_N = np.minimum(np.maximum(stop_N, 1), np.minimum(plan.left_N, S))
copies_of_the_host dapo_jax/sampler/session.py partial_rollouts::test_a_response_goes_on_as_if_it_had_never_stopped
- table[e, to] = table[d, at]
+ table[e, to] = table[d, to]
newest_one_late dapo_jax/sampler/session.py episodes::test_given_tokens_stand_where_the_environment_put_them_and_are_seen
- plan.sampled_N % self._engine.cache.page_tokens - 1
+ plan.sampled_N % self._engine.cache.page_tokens - 2
prompt_freed_early dapo_jax/sampler/scheduler.py scheduler
- if prefix.unfinished == 0:
+ if prefix.unfinished <= 1:
oldest_preempted dapo_jax/sampler/scheduler.py scheduler
- youngest = int(admission_B.argmax())
+ youngest = int(np.where(admission_B < 0, admission_B.max(), admission_B).argmin())
quotient_fused dapo_jax/logprobs.py exact::test_heads_are_exact_at_any_temperature
- unfused(logits_BV / temperature)
+ logits_BV / temperature
whole_sum dapo_jax/logprobs.py exact::test_heads_are_exact_at_any_temperature
- self._sum_C = total(sum_CN)
+ self._sum_C = whole(self._exp_CV)
pages_reversed models/kernels/xla.py exact::test_a_slots_pages_are_added_up_as_a_rows_tiles_are
- pieces = scale_BXKG.swapaxes(0, 1), entry_BX.T
+ pieces = scale_BXKG.swapaxes(0, 1)[::-1], entry_BX.T[::-1]
branches_in_one_part models/kernels/packed.py exact::test_the_learner_computes_what_the_sampler_recorded
- jnp.diff(branch_BT, axis=1, prepend=-1) != 0
+ segment_BT < 0
products_by_shape models/kernels/cpu.py exact::test_the_learner_computes_what_the_sampler_recorded
- "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
+ # none
products_laid_out models/kernels/cpu.py exact::test_the_learner_computes_what_the_sampler_recorded
- with_layout_constraint(out_RF, Layout((0, 1)))
+ out_RF
narrow_from_left models/kernels/cpu.py exact::test_wide_models_are_exact_with_few_slots
- in_order = terms <= BLOCK_TERMS or
+ in_order = terms > 0 or
few_rows_of_experts models/precision.py exact::test_wide_models_are_exact_with_few_slots
- max(0, GROUPED_ROWS - len(x))
+ 0
turns_border dapo_jax/episodes.py episodes::test_turns_are_limited_and_a_cut_one_is_rewarded_alone
- if messages and episode.turns < self._max_turns:
+ if messages and episode.turns <= self._max_turns:
surplus_dropped dapo_jax/rollout.py rollout
- extra = {*self.usable[self.plan.num_prompts :]} - self.due
+ extra = {*self.usable[self.plan.num_prompts :]} & self.due
verdicts_at_once dapo_jax/grading.py rollout
- pending, self._pending = self._pending, []
+ pending = self._pending = []
ends_forgotten dapo_jax/checkpoints/progress.py partial_rollouts::test_what_is_between_two_steps_comes_back_from_a_checkpoint_as_it_was
- ends=tuple(it["ends"]),
+ ends=(),
cursor_one_late dapo_jax/checkpoints/progress.py partial_rollouts::test_what_is_between_two_steps_comes_back_from_a_checkpoint_as_it_was
- vars(self) | {"partial":
+ vars(self) | {"cursor": self.cursor + 1, "partial":
row_forgotten dapo_jax/checkpoints/progress.py partial_rollouts::test_what_is_between_two_steps_comes_back_from_a_checkpoint_as_it_was
- vars(self) | {"partial":
+ vars(self) | {"row": None, "partial":
run_key dapo_jax/setup/start.py train::test_stopped_and_resumed_equals_uninterrupted_bitwise
- components.key(config, components.ROLLOUT_STREAM)
+ components.key(config, components.ROLLOUT_STREAM + step)
digest_of_even_factors dapo_jax/checkpoints/digests.py checkpoint
- (z ^ (z >> np.uint64(31))) | np.uint64(1)
+ (z ^ (z >> np.uint64(31))) & ~np.uint64(1)
progress_unchecked dapo_jax/checkpoints/store.py checkpoint
- if json_digest(content[1]) != manifest["progress"]:
+ if not manifest["progress"]:
worst_is_best dapo_jax/checkpoints/progress.py checkpoint
- return max(scored, key=
+ return min(scored, key=
best_of_the_saved dapo_jax/checkpoints/store.py checkpoint
- [*steps, step])
+ steps)
scores_of_any_set dapo_jax/train.py train::test_scores_of_a_changed_set_are_not_compared
- mean = dict(scores.get(run.best, {})), f"eval/{run.config.checkpoint.best}/mean@"
+ mean = dict(scores.get(run.best, {})), "eval/"
older_snapshot dapo_jax/checkpoints/snapshots.py snapshots
- step = self._newest[-1].step if self._newest else ""
+ step = self._newest[0].step if self._newest else ""
best_not_saved dapo_jax/checkpoints/snapshots.py snapshots
- [it for it in self._newest if it.step == step]
+ [it for it in self._newest if it.step > step]
pass_at_k dapo_jax/evaluation.py train::test_scores_by_hand
- math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
+ math.comb(num_correct, k) / math.comb(num_samples, k)
mean_at_k dapo_jax/evaluation.py train::test_scores_by_hand
- f"mean@{k}": float(correct_PK.mean()),
+ f"mean@{k}": float(correct_PK[:, 0].mean()),
answers_merged dapo_jax/tasks/rows.py data
- if first != answer and not self._same
+ if first != answer and self._same
mixture_shares dapo_jax/tasks/datasets.py mixture
- {key: weight / total for key
+ {key: 1 / len(self.weights) + 0 * weight / total for key
unit_unread dapo_jax/verifier/equality.py answers
- return compatible(*units) and equal(*values, compare)
+ return equal(*values, compare)
order_unread dapo_jax/verifier/equality.py answers
- return all(equal(*pair, compare) for pair in pairs)
+ return any(equal(*pair, compare) for pair in pairs)
sign_of_ratio dapo_jax/verifier/formulas.py answers
- bool(how == "multiple" or ratios[0] > 0)
+ bool(how)
first_answer dapo_jax/verifier/math_rules.py verifier
- compare(dapo_form(answers[-1])
+ compare(dapo_form(answers[0])
alarm_one_late dapo_jax/logs/alarms.py alarms
- if count >= alarm.steps:
+ if count > alarm.steps:
unused_tokens dapo_jax/logs/metrics.py rollout
- 1 - s.rollouts.kept_tokens / max(s.spent_tokens, 1)
+ 1 - s.rollouts.kept_tokens / max(s.stats.sampled_tokens, 1)
seeds_unpaired dapo_jax/report/compare.py report sweep
- d_S = of_arm[arm] - of_arm[than]
+ d_S = of_arm[arm] - of_arm[than].to_numpy()[::-1]
environment_shares_row dapo_jax/tasks/environments.py environments
- columns = self._outside("columns", lambda: copy.deepcopy(columns))
+ columns = {**columns}
seed_of_another dapo_jax/tasks/environments.py environments
- return {name: more[name] for name in named & more.keys()} | dict(taken)
+ return dict(taken) | {name: more[name] for name in named & more.keys()}
place_of_each_call dapo_jax/tasks/environments.py environments
- if self._place.is_taken:
+ if True:
judge_without_word dapo_jax/tasks/environments.py environments
- return is_known or any(map(self._has, REWARDS))
+ return is_known or self._has("get_reward")
calls_of_thoughts dapo_jax/tasks/calls.py environments
- text = (begun + text).rpartition("</think>")[2]
+ text = begun + text
one_answer_of_two dapo_jax/tasks/turns.py environments
- way(messages, made).count(SAID) == len(roles)
+ SAID in way(messages, made)
markup_of_others dapo_jax/tasks/tokenizer.py environments
- if is_of_template and token in text
+ if not text and token in text
cut_turn_is_given dapo_jax/episodes.py environments
- messages = episode.answer(text) if stopped else []
+ messages = episode.answer(text)
place_is_lost dapo_jax/episodes.py environments
- on_failure.callback(self._may_open.release)
+ pass
reward_is_nan dapo_jax/types.py environments
- or not abs(value) <= sys.float_info.max
+ or abs(value) > sys.float_info.max
left_out_whole dapo_jax/types.py environments
- return any(response.verdict.status == LEFT_OUT for
+ return all(response.verdict.status == LEFT_OUT for
close_is_a_tool dapo_jax/tasks/environments.py episodes::test_a_class_of_trls_contract_is_played
- {"reset", "init", "step", "close", "is_done", *REWARDS}
+ {"reset", "init", "step", "is_done", *REWARDS}
environment_tokens dapo_jax/episodes.py episodes::test_turns_are_limited_and_a_cut_one_is_rewarded_alone
- float(np.sum(~response.sampled_T))
+ float(np.sum(response.sampled_T))
answers_unsorted dapo_jax/episodes.py environments::test_so_many_environments_are_open_and_answers_have_one_order
- everyone.sort(key=operator.itemgetter(0))
+ everyone.sort(key=lambda it: 0)
only_sample_gives_way dapo_jax/sampler/scheduler.py episodes::test_few_open_environments_and_few_pages_end
- younger_than=-1 if is_alone else admission_B[youngest]
+ younger_than=admission_B[youngest]
turn_without_answer dapo_jax/sampler/session.py episodes::test_an_episode_goes_on_in_other_sessions_as_if_it_had_never_stopped
- & (given_NS == 0) | is_end_NS
+ & (given_NS == 0)
loss_of_any_shape dapo_jax/losses.py losses::test_a_loss_from_outside_that_is_none_is_refused_by_name
- if jnp.shape(values) != logp.shape:
+ if False:
fed_again_is_cut dapo_jax/sampler/session.py episodes::test_an_episode_goes_on_in_other_sessions_as_if_it_had_never_stopped
- sample.prefix.parks and sample.tokens < len(known.tokens_T)
+ False
"""  # noqa: E501


class Mutation(NamedTuple):
    """One wrong line. tests: FILE or FILE::TEST for tests/test_FILE.py."""

    name: str
    file: str
    tests: tuple[str, ...]
    old: str
    new: str


def mutations() -> list[Mutation]:
    """Reads MUTATIONS."""
    heads, olds, news = (MUTATIONS.strip().split("\n")[i::3] for i in range(3))
    lines = zip(map(str.split, heads), olds, news, strict=True)
    return [Mutation(*head[:2], tuple(head[2:]), old[2:], new[2:]) for head, old, new in lines]


def mutated(mutation: Mutation, tree: pathlib.Path) -> str:
    """Returns its file's text with the wrong line; ValueError where the old is not there once."""
    text = (tree / mutation.file).read_text()
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.name}: {mutation.old!r} is {count} times in {mutation.file}")
    return text.replace(mutation.old, mutation.new)


def caught_by(mutation: Mutation, tree: pathlib.Path) -> str:
    """Runs its tests over a changed tree; returns the first that fails, "" where none does."""
    file = tree / mutation.file
    before, text = file.read_text(), mutated(mutation, tree)
    files = [f"tests/test_{re.sub('(?=::)|$', '.py', name, count=1)}" for name in mutation.tests]
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tree.parent / "compiled")}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", *files]
    file.write_text(text)
    try:
        how = {"cwd": tree, "env": env, "capture_output": True, "text": True}
        done = subprocess.run(command, timeout=SECONDS, **how)
    except subprocess.TimeoutExpired:
        return f"no end in {SECONDS} s"
    finally:
        file.write_text(before)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if not failed and done.returncode:
        raise RuntimeError(f"{mutation.name}: status {done.returncode}\n{done.stdout[-2_000:]}")
    return failed[1].removeprefix("tests/") if failed else ""


def main(names: list[str]) -> int:
    chosen = [it for it in mutations() if not names or it.name in names]
    with tempfile.TemporaryDirectory(prefix="mutate_") as folder:
        tree = pathlib.Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
        (tree.parent / "shared").symlink_to(ROOT.parent / "shared")
        survived = 0
        for mutation in chosen:
            test = caught_by(mutation, tree)
            survived += not test
            outcome = f"caught by {test}" if test else "SURVIVED"
            print(f"{mutation.name:24}{outcome}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} caught")
    return min(survived, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
