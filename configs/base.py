"""Every configuration key once: default, meaning, bounds, and the section of the paper it is from.

A config (tiny.py, qwen2_5_32b.py) starts from `get_config()` and sets what differs. `FILE:PRESET`
on the command line applies a row of the paper's Table 1, or another paper's loss, to any config.
A new key is a line of KEYS; `--help`, the checks and its type on the command line follow. One that
an update reads is a field of dapo_jax.learner.UpdateSettings too.
"""

import dataclasses
import difflib
import functools
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

TINY32, MAX32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # the least normal float32, the greatest


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a config.

    default: its value where a config sets none. meaning: the text that `--help` prints.
    choices: the values that it may have, or the table of the code that lists them, "module:NAME".
    at_least, above, at_most: bounds of a number, which has to be finite in float32 too.
    kind: the type of a value whose default is None. open: the value that leaves it to the model
    and the data (dapo_jax/setup/auto_sizes.py). may_change: on resume; any other key would make it
    another run. of_policy: it makes the policy, beside the weights, and stays in a fork. custom: a
    name "module:function" of one's own is allowed too. only: another key, or the end of its name,
    then the values of it with which this one is read (without any: all but 0, False and "");
    (): always.
    """

    default: Any
    meaning: str
    choices: tuple | str = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float = MAX32
    kind: type | None = None
    open: Any = None
    may_change: bool = False
    of_policy: bool = False
    custom: bool = False
    only: tuple = ()

    def allowed(self) -> tuple:
        """Returns the values that the key may have; () where any value is."""
        if isinstance(self.choices, tuple):
            return self.choices
        module, _, name = self.choices.partition(":")
        return tuple(getattr(importlib.import_module(module), name))

    def cast(self, value: Any) -> Any:
        """Returns a value of the key's type, where an int may be a float; TypeError says which."""
        kind = self.kind or type(self.default)
        fits = {float: int | float, tuple: tuple | list}.get(kind, kind)
        if value is None is self.default:
            return None
        if isinstance(value, fits) and isinstance(value, bool) == (kind is bool):
            return kind(value)
        raise TypeError(f"{value!r}, but must be of type {kind.__name__}")

    def refusal(self, value: Any) -> str:
        """Says what the value must be; "" where it is allowed, as the default and None are."""
        if value is None or value == self.default:
            return ""
        if self.custom and ":" in value:
            return ""
        if (allowed := self.allowed()) and value not in allowed:
            more = ', or a "module:function"' if self.custom else ""
            return f"but must be one of {', '.join(map(str, allowed))}{more}"
        if self.at_least is None and self.above is None:
            return ""
        over = value >= self.at_least if self.above is None else value > self.above
        if over and (value >= TINY32 or self.above is None) and value <= self.at_most:
            return ""
        low = f"at least {self.at_least}" if self.above is None else f"greater than {self.above}"
        high = "finite in float32" if self.at_most == MAX32 else f"at most {self.at_most}"
        return f"but must be {low}, and {high} ({self.meaning})"


# Table 1 of the paper: each row adds one technique to the row before.
TABLE_1 = ("naive_grpo", "overlong_filtering", "clip_higher")
TABLE_1 += ("soft_overlong", "token_level", "dapo")

# Old names of keys: committed rows of studies have them, and a flag or file is told the new one.
RENAMED = {
    "rollout.carry_over_steps": "rollout.partial_rollout_steps",
    "algo.gate": "algo.policy_loss",
}

NO_DUAL_CLIP = 1e9  # above the largest ratio, e^20
# The clip of PPO and GRPO: both bounds alike, and no dual clip.
PPO = {"algo.eps_low": 0.2, "algo.eps_high": 0.2, "algo.dual_clip": NO_DUAL_CLIP}
# arXiv 2506.13585: Eq. 4 and 5, without a lower bound; it keeps its upper one to itself, which is
# ScaleRL's here.
CISPO = {"algo.policy_loss": "cispo", "algo.eps_low": 1.0, "algo.eps_high": 4.0}
# The losses of other papers: what each one changes of a DAPO config. README.md has their index.
LOSS_PRESETS = {
    # arXiv 2503.20783: section 3.2, Listing 1, Table 6
    "dr_grpo": {**PPO, "algo.advantage_scale": "none", "algo.loss_aggregation": "constant"},
    # arXiv 2507.18071: Eq. 5 to 7, section 5.1
    "gspo": {
        "algo.ratio": "sequence",
        "algo.loss_aggregation": "sequence_mean",
        "algo.eps_low": 3e-4,
        "algo.eps_high": 4e-4,
        "algo.dual_clip": NO_DUAL_CLIP,
    },
    "cispo": CISPO,
    # arXiv 2501.03262: section 3.2, Eq. 6 and 7; the clip is its first version's (Table 1)
    "reinforce_pp": {
        **PPO,
        "algo.advantage_scale": "token_whiten",
        "algo.loss_aggregation": "sequence_mean",  # Eq. 1
    },
    # arXiv 2510.13786: section 4; a weight of 5 at most (of 4, 5 and 8 in appendix A.17)
    "scalerl": {
        **CISPO,
        "algo.advantage_scale": "batch_std",
        "algo.loss_aggregation": "prompt_mean",
    },
    # fengyao.notion.site/off-policy-rl, with its C = 2
    "tis": {
        "algo.old_logprobs": "learner",
        "algo.tis_cap": 2.0,
        "rollout.partial_rollout_steps": 1,
    },
}
PRESETS = (*TABLE_1, *LOSS_PRESETS)
# The paper's training problems and its evaluation set, where its authors publish them.
DAPO_MATH_17K = "hf://datasets/BytedTsinghua-SIA/DAPO-Math-17k/data/dapo-math-17k.parquet"
AIME_2024 = "hf://datasets/BytedTsinghua-SIA/AIME-2024/data/aime-2024.parquet"


may_change = functools.partial(Key, may_change=True)  # declares a key of a role
of_policy = functools.partial(Key, of_policy=True)
# fmt: off
KEYS = {
    "seed": Key(0, "of the prompts' order, of all sampling and of random weights", at_least=0,
        at_most=2**32 - 1),
    "num_steps": may_change(300, "rollout steps", at_least=1),
    "updates_per_step": Key(16, "mini-batches, each one optimizer update, one pass", at_least=1),

    "model.path": of_policy("", 'the start policy: a Hugging Face directory, or ORG/NAME on its '
        'hub; "": random weights'),
    "model.family": of_policy("qwen2", 'or qwen3, llama, a custom module "my_models.x"; "": by the '
        'directory', open=""),
    "model.preset": of_policy("", "the family's name for sizes: what path has, or for random "
        "weights"),
    "model.compute_dtype": of_policy("bfloat16", 'or float32; weights and moments stay float32; '
        '"": as the device has it', choices=("float32", "bfloat16", ""), open=""),
    "model.kernels": may_change("auto", "or cpu, gpu, tpu, xla, gpu_interpret, tpu_interpret"),

    "tokenizer.path": of_policy("", 'directory, or ORG/NAME; "": model.path'),
    "tokenizer.stop_tokens": of_policy((), "token texts; (): those that the model's files name"),
    "tokenizer.chat": of_policy("none", "or \"template\": the tokenizer's chat template; \"auto\": "
        "where there is one", choices=("none", "template", "auto"), open="auto"),
    "tokenizer.chat_args": of_policy({}, "arguments of the chat template, one a flag: "
        "--config.tokenizer.chat_args.enable_thinking=False",
        only=("tokenizer.chat", "template", "auto")),
    "tokenizer.date": of_policy("", "the day, as 2026-11-27, of a chat template that writes one; "
        "\"\": the run's first", open=""),

    "data.on_bad_row": Key("error", 'or "skip": count it and go on', choices=("error", "skip")),
    "verifier.rules": Key("dapo", "the reference's rules; or strict, strict_box, symbolic, "
        "math_verify", choices="dapo_jax.verifier:RULES"),

    "rollout.num_prompts": Key(512, "informative groups that one step trains on", at_least=1),
    "rollout.group_size": Key(16, "responses a prompt (G)", at_least=2),
    "rollout.max_prompt_tokens": Key(2_048, "longer prompts are dropped at the start; 0: the "
        "data's longest, 2,048 at most", at_least=0, open=0),
    "rollout.max_response_tokens": Key(20_480, "L_max of Eq. 13; 0: the model's positions behind a "
        "prompt, in training 4,096 at most", at_least=0, open=0),
    "rollout.temperature": Key(1.0, "of training's responses", above=0),
    "rollout.top_p": Key(1.0, "1.0: off, as the update's ratio has it", above=0, at_most=1),
    "rollout.top_k": Key(0, "0: off", at_least=0),
    "rollout.generation_prompts": Key(1_536, "the first guess of how many prompts a step needs; "
        "0: twice num_prompts, as far as there are", at_least=0, open=0),
    "rollout.max_generation_batches": may_change(10, "times as many prompts at most in a step "
        "(Eq. 11)", at_least=1),
    "rollout.on_generation_cap": may_change("train", 'on what there is; or "stop" the run cleanly',
        choices=("train", "stop")),
    "rollout.cache_mib": may_change(16_384, "keys and values of prompts and responses, on each "
        "device; 0: for the first generation batch, as memory and a CPU's cores allow", at_least=0),
    "rollout.slot_tokens": may_change(4_608, "response tokens of cache a slot; longer ones take "
        "more; 0: half of the limit", at_least=0),
    "rollout.page_tokens": Key(128, "the cache is handed out in pages of so many tokens, or of "
        "what the kernels need", at_least=1),
    "rollout.block_tokens": Key(16, "decode steps per block; the scheduler runs between blocks",
        at_least=1),
    "rollout.max_turns": Key(8, "of an episode, where a data set has an environment", at_least=1,
        only=("environment",)),
    "rollout.environment_seconds": may_change(60.0, "the longest that one call of an environment "
        "may take", above=0, only=("environment",)),
    "rollout.on_environment_failure": may_change("stop", 'where it has failed for '
        'environment_seconds; or "leave_out": no update trains on its group',
        choices=("stop", "leave_out"), only=("environment",)),
    "rollout.open_environments": may_change(0, "of a process at once, as a server's sessions; "
        "0: any", at_least=0, only=("environment",)),
    "rollout.partial_rollout_steps": Key(0, "a step ends when it has enough; unfinished responses "
        "continue in the next steps, in this many at most, with tokens of several policies. The "
        "cache stays beside the update, and a run resumes at a multiple of checkpoint.every_steps "
        "only; 0: off", at_least=0),

    "algo.ratio": Key("token", "Eq. 8; or sequence, GSPO's", choices="dapo_jax.losses:RATIOS"),
    "algo.policy_loss": Key("clip", 'Eq. 8; or cispo, none, a custom "module:function"',
        choices="dapo_jax.losses:POLICY_LOSSES", custom=True),
    "algo.args": Key({}, "constants of a custom policy_loss: --config.algo.args.NAME=1",
        only=("algo.policy_loss", "a custom one")),
    "algo.advantage_scale": Key("group_std", 'Eq. 9; or batch_std, token_whiten, none, a custom '
        '"module:function"', choices="dapo_jax.losses:ADVANTAGES", custom=True),
    "algo.eps_low": Key(0.2, "Eq. 10", at_least=0, only=("algo.policy_loss", "clip", "cispo")),
    "algo.eps_high": Key(0.28, "Eq. 10, clip-higher", at_least=0,
        only=("algo.policy_loss", "clip", "cispo")),
    "algo.dual_clip": Key(10.0, "bound on the loss of negative advantages (recipe)", above=1,
        only=("algo.policy_loss", "clip")),
    "algo.loss_aggregation": Key("token_mean", "Eq. 12; or sequence_mean, prompt_mean, constant",
        choices="dapo_jax.algorithm:AGGREGATIONS"),
    "algo.old_logprobs": Key("sampler", "whose log-probabilities Eq. 8's ratio is to; or learner: "
        "a forward pass more, the first ratio is 1", choices=("sampler", "learner"),
        only=("algo.ratio", "token")),
    "algo.tis_cap": Key(0.0, "cap on a token's weight of learner to sampler, where old_logprobs = "
        "learner; 0.0: no weight", at_least=0),
    "algo.replay_routes": Key(True, "the learner sends tokens to the experts that the sampler "
        "chose, where the model has any (arXiv 2510.11370)"),
    "algo.dynamic_sampling": Key(True, "Eq. 11"),
    "algo.filter_groups": Key("correctness", "Eq. 11's; or \"reward\": lengths pass groups too",
        choices="dapo_jax.algorithm:FILTERS", only=("algo.dynamic_sampling",)),
    "algo.overlong_filtering": Key(False, "mask the loss of truncated responses"),
    "algo.overlong_cache_tokens": Key(4_096, "L_cache of Eq. 13; -1: a fifth of L_max", at_least=-1,
        open=-1, only=("algo.overlong_factor",)),
    "algo.overlong_factor": Key(1.0, "0.0: no soft overlong punishment", at_least=0),
    "algo.kl_coef": Key(0.0, "weight of GRPO's KL term to the start policy; DAPO has none",
        at_least=0),
    "algo.entropy_coef": Key(0.0, "weight of an entropy bonus; DAPO has none", at_least=0),

    "learner.learning_rate": Key(1e-6, "of AdamW, after the warm-up (section 4.1)", above=0,
        at_most=1),
    "learner.warmup_steps": Key(20, "rollout steps, linear", at_least=0),
    "learner.decay": Key("none", "of the learning rate after the warm-up, to 0 at num_steps: none, "
        "cosine or linear", choices="dapo_jax.learner:DECAYS"),
    "learner.adam_b1": Key(0.9, "decay of the first moment", at_least=0, at_most=1 - 2**-24),
    "learner.adam_b2": Key(0.999, "decay of the second moment", at_least=0, at_most=1 - 2**-24),
    "learner.adam_eps": Key(1e-8, "beside the root of the second moment", above=0),
    "learner.weight_decay": Key(0.1, "decoupled, of AdamW", at_least=0),
    "learner.max_grad_norm": Key(1.0, "global norm to which gradients are clipped", above=0),
    "learner.max_skipped_updates": may_change(3, "in a row, not being finite: then the run stops",
        at_least=1),
    "learner.row_tokens": may_change(22_528, "a packed row; holds the longest prompt and response; "
        "0: chosen by the lengths", at_least=0),
    "learner.row_lengths": may_change(1, "row lengths of which an update takes that with the least "
        "padding: row_tokens, an eighth more (in whole 1,024s, or 64s where row_tokens is less "
        "than 1,024), and so on", at_least=1, at_most=9),
    "learner.micro_batch_rows": may_change(32, "rows of one gradient-accumulation step, all "
        "devices; 0: chosen by the devices", at_least=0),
    "learner.remat": may_change("full", "what the backward pass recomputes. full: each layer from "
        "its input; none: nothing; keep_products, keep_attention; offload",
        choices="models.transformer:REMAT"),
    "learner.spread_start": may_change(True, "in bfloat16, move each weight of the start to a "
        "random one of those that round alike: the policy is the same, and follows its updates "
        "from the first step on", only=("model.compute_dtype", "bfloat16", "")),
    "learner.lora_rank": of_policy(0, "train low-rank factors instead of all weights; 0: off",
        at_least=0),
    "learner.lora_alpha": of_policy(32.0, "the factors' product counts alpha / rank", above=0,
        only=("learner.lora_rank",)),
    "learner.lora_targets": of_policy(("q", "k", "v", "o", "gate", "up", "down"), "the adapted "
        "matrices", only=("learner.lora_rank",)),

    "mesh.slices": may_change(1, "TPU slices side by side; the data centre's network is between "
        "them", at_least=1),
    "mesh.data": may_change(-1, "of a slice; -1: all devices that mesh.model leaves", at_least=-1),
    "mesh.model": may_change(1, "must divide the model's key/value heads", at_least=1),
    "mesh.cpu_devices": may_change(0, "on CPU: devices that the host counts as; 0: one, as JAX has "
        "it", at_least=0),

    "eval.every_steps": may_change(5, "beside the next step's rollout, and after training alone; "
        "0: never", at_least=0),
    "eval.samples_per_prompt": may_change(32, "k of mean@k, pass@k, maj@k; for sets that say none",
        at_least=1, only=("eval.every_steps",)),
    "eval.max_prompts": may_change(0, "the first so many of each set; 0: all", at_least=0,
        only=("eval.every_steps",)),
    "eval.temperature": may_change(1.0, "of an evaluation's responses; 0: greedy", at_least=0,
        only=("eval.every_steps",)),
    "eval.top_p": may_change(0.7, "of an evaluation's responses", above=0, at_most=1,
        only=("eval.every_steps",)),
    "eval.top_k": may_change(0, "of an evaluation's responses; 0: off", at_least=0,
        only=("eval.every_steps",)),

    "checkpoint.directory": may_change("", 'one that all hosts see, gs://...; "": '
        'WORKDIR/checkpoints'),
    "checkpoint.every_steps": may_change(5, "rollout steps from save to save; partial rollouts "
        "compute their keys and values again there", at_least=1),
    "checkpoint.keep": may_change(2, "newest checkpoints kept", at_least=1),
    "checkpoint.keep_period": may_change(0, "multiples of so many steps are kept too; 0: off",
        at_least=0),
    "checkpoint.best": may_change("", "an evaluation set's name: the policy with its best mean@k "
        "so far is saved, due or not, and kept (--step=best); \"\": off"),

    "alarms.min_entropy": may_change(1e-3, "nats; python -m dapo_jax.logs.alarms lists the alarms",
        at_least=0),
    "alarms.max_ratio_gap": may_change(0.0, "0: by the compute dtype", at_least=0),

    "log.samples_every_steps": may_change(10, "four responses, printed and given to the writers as "
        "a table; 0: never", at_least=0),
    "log.rollouts_every_steps": may_change(1, "rollouts/<step>.jsonl.gz; 0: never", at_least=0),
    "log.eval_responses": may_change(True, "eval/<finished steps>.<set>.jsonl.gz",
        only=("eval.every_steps",)),
    "log.writers": may_change(("tensorboard",), 'more places for the numbers: "tensorboard", '
        '"wandb", "trackio", a custom "module:Class"'),
    "log.metrics": may_change((), 'more numbers of a step: "module:function" of a '
        'dapo_jax.logs.metrics.Step'),
}
# The keys of a data set: data.train, data.mixture.NAME (more training sets, mixed by weight) and
# eval.sets.NAME.
DATASET = {
    "task": Key("", 'a name of dapo_jax.tasks.base, or a custom "module:Class"; "": math'),
    "kind": Key("", "the file's schema, one of dapo_jax.tasks.readers.KINDS (\"\": by the path's "
        "ending), or \"arithmetic\", which is generated"),
    "path": Key("", 'the file with its rows, or hf://datasets/ORG/NAME[@REVISION]/FILE; a "*" in '
        'its name stands for shards'),
    "prompt_field": Key("", 'of a row; "a.b" is field b of field a; "": that of the kind'),
    "answer_field": Key("", 'of a row; "": that of the kind'),
    "template": Key("", "dapo, boxed, none, or a text with {problem}; \"\": the task's own for "
        "questions, none for chats"),
    "system": Key("", "a system message before each of its prompts"),
    "environment": Key("", "module:Class, which answers the turns of its episodes"),
    "rules": Key("", 'those that grade it; "": verifier.rules', choices="dapo_jax.verifier:RULES"),
    "levels": Key((1, 2, 3, 4), "of generated problems"),
    "count": Key(10_000, "of generated problems"),
    "seed": Key(0, "of generated problems"),
    "split": Key("train", "of generated problems"),
    "args": Key({}, "more arguments of a custom task"),
    "max_prompts": Key(None, "the first so many; 0: all", at_least=0, kind=int),
    "weight": Key(None, "of a training set beside others, how often its prompts are taken; 0: it "
        "is left out; None: 1", at_least=0, kind=float),
    "k": Key(None, "of an evaluation set: responses a problem; 0: it is left out; None: "
        "eval.samples_per_prompt", at_least=0, kind=int),
    "temperature": Key(None, "of an evaluation set; None: eval.temperature", at_least=0,
        kind=float),
    "top_p": Key(None, "of an evaluation set; None: eval.top_p", above=0, at_most=1, kind=float),
    "top_k": Key(None, "of an evaluation set; 0: off; None: eval.top_k", at_least=0, kind=int),
}
# fmt: on
# Beginnings of keys by their roles; an evaluation set is free, as the keys of eval are.
MAY_CHANGE = (*(name for name, key in KEYS.items() if key.may_change), "eval.sets.")
OF_POLICY = tuple(name for name, key in KEYS.items() if key.of_policy)


def get_config() -> ConfigDict:
    """The defaults: DAPO's settings (paper, section 4.1) where it has one.

    It takes any value of any key. All that is wrong in a config is said when it is read.
    """
    config = ConfigDict(type_safe=False)
    for name, key in KEYS.items():
        section, _, last = name.rpartition(".")
        if section and section not in config:
            config[section] = ConfigDict(type_safe=False)
        (config[section] if section else config)[last] = key.default
    config.data.train = dataset()
    config.data.mixture = ConfigDict(type_safe=False)  # name -> dataset(...)
    config.eval.sets = ConfigDict(type_safe=False)  # name -> dataset(...)
    return config


def on_dapo_math(path: str, preset: str, family: str = "qwen2") -> ConfigDict:
    """Returns the defaults for a chat model on the hub, with the paper's problems and AIME 2024."""
    config = get_config()
    config.model.path, config.model.preset, config.model.family = path, preset, family
    config.tokenizer.chat = "template"
    config.data.train.path = DAPO_MATH_17K
    config.eval.sets.aime24 = dataset(kind="dapo_parquet", path=AIME_2024)
    return config


def dataset(**given) -> ConfigDict:
    """One data set: its task, where its rows are, and how an evaluation set is sampled.

    given: keys of DATASET with their values. Raises TypeError for another key.
    """
    if unknown := given.keys() - DATASET.keys():
        raise TypeError(f"a data set has no {', '.join(sorted(unknown))}: {', '.join(DATASET)}")
    values = {name: given.get(name, key.default) for name, key in DATASET.items()}
    # What is open (None) has a type on the command line nevertheless.
    opened = {name: placeholder(DATASET[name].kind) for name in values if values[name] is None}
    return ConfigDict(values | opened, type_safe=False)


def key_of(name: str) -> Key | None:
    """Returns the declaration of a dotted key; None where a config has no such key."""
    section, _, last = name.rpartition(".")
    if section == "data.train" or section.startswith(("data.mixture.", "eval.sets.")):
        return DATASET.get(last)
    return KEYS.get(name)


def leaves(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of a config; the arguments of a task, or a template, are one."""
    for name, value in config.items():
        if isinstance(value, ConfigDict) and not name.endswith("args"):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value.to_dict() if isinstance(value, ConfigDict) else value


def without_effect(config: ConfigDict, names: Iterable[str] | None = None) -> dict[str, str]:
    """Says of these keys that nobody reads under the config's other settings who would, by key.

    names: None: those whose values are not the default.
    """
    values, unread = dict(leaves(config)), {}
    changed = (name for name, value in values.items() if value != key_of(name).default)
    for name in changed if names is None else names:
        if not (declared := key_of(name)) or not declared.only:
            continue
        other, *reading = declared.only
        settings = [it for key, it in values.items() if f".{key}".endswith(f".{other}")]
        if not any(it in reading or ":" in str(it) if reading else it for it in settings):
            what = f" = {' or '.join(filter(None, reading))}" if reading else ""
            unread[name] = f"{name} = {values[name]!r} has no effect without {other}{what}"
    return unread


def mixture_settings(config: ConfigDict) -> dict[str, dict]:
    """Returns the settings of each training set that is not left out, by its config key."""
    mixture = {f"data.mixture.{name}": it for name, it in sorted(config.data.mixture.items())}
    sets = {
        key: _filled(config, settings, max_prompts=0, weight=1.0)
        for key, settings in ({"data.train": config.data.train} | mixture).items()
    }
    return {key: settings for key, settings in sets.items() if settings["weight"] != 0}


def eval_settings(config: ConfigDict) -> dict[str, dict]:
    """Returns the settings of each evaluation set with k > 0, those it leaves open filled in."""
    e = config.eval
    of_all = {name: e[name] for name in ("max_prompts", "temperature", "top_p", "top_k")}
    of_all["k"] = e.samples_per_prompt
    return {name: _filled(config, it, **of_all) for name, it in e.sets.items() if it.k != 0}


def has_environments(config: ConfigDict) -> bool:
    """Returns whether a data set of the config has an environment."""
    sets = [*mixture_settings(config).values(), *eval_settings(config).values()]
    return any(settings["environment"] for settings in sets)


def _filled(config: ConfigDict, settings: ConfigDict, **defaults) -> dict:
    filled = {**settings, "args": settings.args.to_dict(), "on_bad_row": config.data.on_bad_row}
    filled["rules"] = settings.rules or config.verifier.rules
    if "weight" not in defaults:
        del filled["weight"]  # of training sets
    return filled | {name: value for name, value in defaults.items() if filled[name] is None}


def apply_preset(config: ConfigDict, preset: str) -> ConfigDict:
    """Makes a DAPO config one of PRESETS; "" changes nothing.

    A row of Table 1 takes away what it does not have yet. Soft overlong punishment replaces
    overlong filtering, as in the best published run.
    """
    config.update_from_flattened_dict(LOSS_PRESETS.get(preset, {}))
    if preset in ("", *LOSS_PRESETS):
        return config
    if preset not in TABLE_1:
        near = difflib.get_close_matches(preset, PRESETS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"preset {preset!r} is unknown; did you mean {near!r}? There are {', '.join(PRESETS)}"
        )
    row, algo = TABLE_1.index(preset), config.algo
    algo.overlong_filtering = preset in ("overlong_filtering", "clip_higher")
    if row < TABLE_1.index("clip_higher"):
        algo.eps_high = algo.eps_low
    if row < TABLE_1.index("soft_overlong"):
        algo.overlong_factor = 0.0
    if row < TABLE_1.index("token_level"):
        algo.loss_aggregation = "sequence_mean"
    algo.dynamic_sampling = preset == "dapo"
    return config
