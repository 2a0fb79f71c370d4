"""Every configuration key once: type, default, unit, and the section of the paper it is from.

A recipe (tiny.py, qwen2_5_32b.py) starts from `get_config()` and sets what differs. `FILE:PRESET`
on the command line applies a row of the paper's Table 1, or another paper's loss, to any recipe.
"""

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

# Table 1 of the paper: each row adds one technique to the row before.
TABLE_1 = (
    "naive_grpo",
    "overlong_filtering",
    "clip_higher",
    "soft_overlong",
    "token_level",
    "dapo",
)

NO_DUAL_CLIP = 1e9  # above the largest ratio, e^20
# The losses of other papers: what each one changes of a DAPO recipe. README.md has their index.
LOSS_PRESETS = {
    # arXiv 2503.20783: section 3.2, Listing 1, Table 6
    "dr_grpo": {
        "algo.advantage_scale": "none",
        "algo.loss_aggregation": "constant",
        "algo.eps_low": 0.2,
        "algo.eps_high": 0.2,
        "algo.dual_clip": NO_DUAL_CLIP,
    },
    # arXiv 2507.18071: Eq. 5 to 7, section 5.1
    "gspo": {
        "algo.ratio": "sequence",
        "algo.loss_aggregation": "sequence_mean",
        "algo.eps_low": 3e-4,
        "algo.eps_high": 4e-4,
        "algo.dual_clip": NO_DUAL_CLIP,
    },
    # arXiv 2506.13585: Eq. 4 and 5, without a lower bound; it keeps its upper one to itself, which
    # is ScaleRL's here.
    "cispo": {
        "algo.gate": "cispo",
        "algo.eps_low": 1.0,
        "algo.eps_high": 4.0,
    },
    # arXiv 2501.03262: section 3.2, Eq. 6 and 7; the clip is its first version's (Table 1)
    "reinforce_pp": {
        "algo.advantage_scale": "token_whiten",
        "algo.loss_aggregation": "sequence_mean",  # Eq. 1
        "algo.eps_low": 0.2,
        "algo.eps_high": 0.2,
        "algo.dual_clip": NO_DUAL_CLIP,
    },
    # arXiv 2510.13786: section 4; a weight of 5 at most (of 4, 5 and 8 in appendix A.17)
    "scalerl": {
        "algo.gate": "cispo",
        "algo.eps_low": 1.0,
        "algo.eps_high": 4.0,
        "algo.advantage_scale": "batch_std",
        "algo.loss_aggregation": "prompt_mean",
        "algo.retire_pass_rate": 0.9,
    },
    # arXiv 2505.22617: Eq. 10, 13 and 14, Listing 1; the share is its 7B model's (32B: 2e-4)
    "kl_cov": {
        "algo.gate": "kl_cov",
        "algo.kl_cov_share": 2e-3,
        "algo.kl_cov_coef": 1.0,
    },
    # fengyao.notion.site/off-policy-rl, with its C = 2
    "tis": {
        "algo.tis_cap": 2.0,
        "rollout.carry_over_steps": 1,
    },
}
PRESETS = (*TABLE_1, *LOSS_PRESETS)
# The paper's training problems and its evaluation set, where its authors publish them.
DAPO_MATH_17K = "hf://datasets/BytedTsinghua-SIA/DAPO-Math-17k/data/dapo-math-17k.parquet"
AIME_2024 = "hf://datasets/BytedTsinghua-SIA/AIME-2024/data/aime-2024.parquet"


def get_config() -> ConfigDict:
    """The defaults: DAPO's settings (paper, section 4.1) where it has one."""
    config = ConfigDict()
    config.seed = 0  # of the prompts' order, of all sampling and of random weights
    config.num_steps = 300  # rollout steps
    config.updates_per_step = 16  # mini-batches, each one optimizer update, one pass

    config.model = ConfigDict()
    # The start policy: a Hugging Face directory, or ORG/NAME on its hub; "": random weights
    config.model.path = ""
    config.model.family = "qwen2"  # or qwen3, llama, a module of one's own "my_models.x"
    config.model.preset = ""  # the family's name for sizes: what path has, or for random weights
    config.model.compute_dtype = "bfloat16"  # or float32; weights and moments stay float32
    config.model.kernels = "auto"  # or cpu, gpu, tpu, xla, gpu_interpret, tpu_interpret

    config.tokenizer = ConfigDict()
    config.tokenizer.path = ""  # directory, or ORG/NAME; "": model.path
    config.tokenizer.stop_tokens = ()  # token texts; (): the base model's end of text
    config.tokenizer.chat = "none"  # or "template": the tokenizer's chat template

    config.data = ConfigDict()
    config.data.train = dataset()  # the training prompts
    # More training sets, mixed by weight: name -> dataset(...); --config.data.mixture.NEW.path=FILE
    config.data.mixture = ConfigDict()
    config.data.on_bad_row = "error"  # or "skip": count and go on

    config.verifier = ConfigDict()
    config.verifier.rules = "dapo"  # the reference's rules; or strict, strict_box, math_verify

    config.rollout = ConfigDict()
    config.rollout.num_prompts = 512  # informative groups that one step trains on
    config.rollout.group_size = 16  # responses a prompt (G)
    config.rollout.max_prompt_tokens = 2_048  # longer prompts are dropped at the start
    config.rollout.max_response_tokens = 20_480  # L_max of Eq. 13
    config.rollout.temperature = 1.0  # of training's responses
    config.rollout.top_p = 1.0  # 1.0: off, as the update's ratio has it
    config.rollout.top_k = 0  # 0: off
    config.rollout.generation_prompts = 1_536  # the first guess of how many prompts a step needs
    config.rollout.max_generation_batches = 10  # times as many prompts at most in a step (Eq. 11)
    config.rollout.on_generation_cap = "train"  # on what there is; or "stop" the run cleanly
    config.rollout.cache_mib = 16_384  # keys and values of prompts and responses, on each device
    config.rollout.slot_tokens = 4_608  # response tokens of cache a slot; longer ones take more
    config.rollout.page_tokens = 128  # the cache is handed out in pages of so many tokens
    config.rollout.block_tokens = 16  # decode steps between looks at which responses ended
    # Tried beside a slot's next token while slots are idle, at most: 1, 3 or 7; the samples are the
    # same. 0: off.
    config.rollout.draft_tokens = 0
    # A step ends when it has enough; unfinished responses go on in the next steps, so many at most,
    # with tokens of several policies. 0: off, every step finishes what it trains on.
    config.rollout.carry_over_steps = 0

    config.algo = ConfigDict()
    # "dapo" is Eq. 8, or what the four choices of dapo_jax/losses.py make of it: ratio, gate,
    # advantage_scale, loss_aggregation. Or another name of its LOSSES.
    config.algo.loss = "dapo"
    config.algo.ratio = "token"  # Eq. 8; or sequence, GSPO's
    config.algo.gate = "clip"  # Eq. 8; or cispo; none; kl_cov
    config.algo.advantage_scale = "group_std"  # Eq. 9; or batch_std; token_whiten; none
    config.algo.eps_low = 0.2  # Eq. 10
    config.algo.eps_high = 0.28  # Eq. 10, clip-higher
    config.algo.dual_clip = 10.0  # bound on the loss of negative advantages (recipe)
    config.algo.loss_aggregation = "token_mean"  # Eq. 12; or sequence_mean, prompt_mean, constant
    config.algo.kl_cov_share = 2e-3  # of a mini-batch's tokens, which the gate kl_cov holds back
    config.algo.kl_cov_coef = 1.0  # weight of their KL penalty
    # Tokens that earlier policies sampled (carry-over) weigh their ratio, so much at most, in place
    # of the gate. 0.0: the gate is theirs too.
    config.algo.tis_cap = 0.0
    # Prompts of which so many responses were right are left out of later epochs. 0.0: none are.
    config.algo.retire_pass_rate = 0.0
    config.algo.dynamic_sampling = True  # Eq. 11
    config.algo.filter_groups = "correctness"  # Eq. 11's; or "reward": lengths pass groups too
    config.algo.overlong_filtering = False  # mask the loss of truncated responses
    config.algo.overlong_cache_tokens = 4_096  # L_cache of Eq. 13
    config.algo.overlong_factor = 1.0  # 0.0: no soft overlong punishment
    config.algo.kl_coef = 0.0  # weight of GRPO's KL term to the start policy; DAPO has none

    config.learner = ConfigDict()
    config.learner.learning_rate = 1e-6  # of AdamW, after the warm-up (section 4.1)
    config.learner.warmup_steps = 20  # rollout steps, linear
    config.learner.adam_b1 = 0.9  # decay of the first moment
    config.learner.adam_b2 = 0.999  # decay of the second moment
    config.learner.adam_eps = 1e-8  # beside the root of the second moment
    config.learner.weight_decay = 0.1  # decoupled, of AdamW
    config.learner.max_grad_norm = 1.0  # global norm to which gradients are clipped
    config.learner.max_skipped_updates = 3  # in a row, not being finite: then the run stops
    config.learner.row_tokens = 22_528  # a packed row; holds the longest prompt and response
    config.learner.micro_batch_rows = 32  # rows of one gradient-accumulation step, all devices
    config.learner.remat = "full"  # recomputed: all; none, keep_products, keep_attention, offload
    config.learner.lora_rank = 0  # train low-rank factors instead of all weights; 0: off
    config.learner.lora_alpha = 32.0  # the factors' product counts alpha / rank
    config.learner.lora_targets = ("q", "k", "v", "o", "gate", "up", "down")  # the adapted matrices

    config.mesh = ConfigDict()
    config.mesh.slices = 1  # TPU slices side by side; the data centre's network is between them
    config.mesh.data = -1  # of a slice; -1: all devices that mesh.model leaves
    config.mesh.model = 1  # must divide the model's key/value heads
    config.mesh.cpu_devices = 0  # on CPU: devices that the host counts as; 0: one, as JAX has it

    config.eval = ConfigDict()
    config.eval.sets = ConfigDict()  # name -> dataset(...); --config.eval.sets.NEW.path=FILE adds
    # Beside the next step's rollout; also before training, and after it alone. 0: never.
    config.eval.every_steps = 5
    # What a set does not say itself:
    config.eval.samples_per_prompt = 32  # k of mean@k, pass@k, maj@k
    config.eval.max_prompts = 0  # the first so many of each set; 0: all
    config.eval.temperature = 1.0  # of an evaluation's responses
    config.eval.top_p = 0.7  # of an evaluation's responses

    config.checkpoint = ConfigDict()
    config.checkpoint.directory = ""  # one that all hosts see, gs://...; "": WORKDIR/checkpoints
    config.checkpoint.every_steps = 5  # rollout steps from save to save
    config.checkpoint.keep = 2  # newest checkpoints kept
    # "stop": a failed save ends the run. "continue": it is said, and a run of one process goes on;
    # of several, which wait for each other in a save, it ends all.
    config.checkpoint.on_failed_save = "stop"

    config.alarms = ConfigDict()  # the table of them is in dapo_jax/run/README.md
    config.alarms.min_entropy = 1e-3  # nats
    config.alarms.max_ratio_gap = 0.0  # 0: by the compute dtype

    config.log = ConfigDict()
    config.log.samples_every_steps = 10  # a table of completions; 0: never
    config.log.rollouts_every_steps = 1  # rollouts/<step>.jsonl.gz; 0: never
    config.log.eval_responses = True  # eval/<finished steps>.<set>.jsonl.gz
    config.log.writers = ()  # more places for the numbers: "wandb", "module:Class" of one's own
    return config


def dataset(
    *,
    task: str = "",
    kind: str = "",
    path: str = "",
    prompt_field: str = "",
    answer_field: str = "",
    template: str = "",
    rules: str = "",
    levels: tuple[int, ...] = (1, 2, 3, 4),
    count: int = 10_000,
    seed: int = 0,
    split: str = "train",
    args: Mapping = MappingProxyType({}),
    max_prompts: int | None = None,
    weight: float | None = None,
    k: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
) -> ConfigDict:
    """One data set: whose task it is, where its rows are, and how an evaluation set is sampled.

    task: "module:Class" (`dapo_jax.tasks.base`); "": math problems of the kind.
    kind: the file's schema, one of `dapo_jax.tasks.readers.KINDS` ("": by the path's ending), or
        "arithmetic", which is generated.
    path: the file with its rows, or hf://datasets/ORG/NAME[@REVISION]/FILE.
    prompt_field, answer_field: of a row; "a.b" is field b of field a. "": those of the kind.
    template: dapo, boxed, none, or a text with {problem}. "": the task's own for
        questions, none for chats.
    rules: those that grade it; "": verifier.rules.
    levels, count, seed, split: of generated problems.
    args: more arguments of a task of one's own.
    max_prompts: the first so many; 0: all.
    weight: of a training set beside others, how often its prompts are taken; 0: it is left out.
        None: 1.
    k, temperature, top_p: of an evaluation set alone; with k = 0 it is left out. None: what
        config.eval says.
    """
    return ConfigDict(
        {
            "task": task,
            "kind": kind,
            "path": path,
            "prompt_field": prompt_field,
            "answer_field": answer_field,
            "template": template,
            "rules": rules,
            "levels": levels,
            "count": count,
            "seed": seed,
            "split": split,
            "args": dict(args),
            "max_prompts": _open(max_prompts, int),
            "weight": _open(weight, float),
            "k": _open(k, int),
            "temperature": _open(temperature, float),
            "top_p": _open(top_p, float),
        }
    )


def _open(value, kind: type):
    """Makes a setting that may be None, of which flags know the type nevertheless."""
    return placeholder(kind) if value is None else value


def train_settings(config: ConfigDict) -> dict:
    """Returns the training set's settings with those that it leaves open filled in."""
    return _filled(config, config.data.train, max_prompts=0, weight=1.0)


def mixture_settings(config: ConfigDict) -> dict[str, dict]:
    """Returns the settings of each training set that is not left out, by its config key."""
    sets = {"data.train": train_settings(config)} | {
        f"data.mixture.{name}": _filled(
            config, config.data.mixture[name], max_prompts=0, weight=1.0
        )
        for name in sorted(config.data.mixture)
    }
    return {key: settings for key, settings in sets.items() if settings["weight"] != 0}


def eval_settings(config: ConfigDict) -> dict[str, dict]:
    """Returns the settings of each evaluation set with k > 0, those it leaves open filled in."""
    e = config.eval
    return {
        name: _filled(
            config,
            settings,
            max_prompts=e.max_prompts,
            k=e.samples_per_prompt,
            temperature=e.temperature,
            top_p=e.top_p,
        )
        for name, settings in e.sets.items()
        if settings.k != 0
    }


def _filled(config: ConfigDict, settings: ConfigDict, **defaults) -> dict:
    filled = {**settings, "args": settings.args.to_dict(), "on_bad_row": config.data.on_bad_row}
    filled["rules"] = settings.rules or config.verifier.rules
    if "weight" not in defaults:
        del filled["weight"]  # of training sets
    return filled | {name: value for name, value in defaults.items() if filled[name] is None}


def apply_preset(config: ConfigDict, preset: str) -> ConfigDict:
    """Makes a DAPO recipe one of PRESETS; "" changes nothing.

    A row of Table 1 takes away what it does not have yet. Soft overlong punishment replaces
    overlong filtering, as in the best published run. One of LOSS_PRESETS changes the loss, and
    leaves data, lengths and dynamic sampling as they are. Raises ValueError for an unknown name.
    """
    if preset == "":
        return config
    if preset in LOSS_PRESETS:
        config.update_from_flattened_dict(LOSS_PRESETS[preset])
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
