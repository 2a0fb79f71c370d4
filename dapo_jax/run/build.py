"""From a config to what a run works with; impossible combinations are refused before compiling."""

import dataclasses
import functools
import math
import pathlib

import jax
import jax.numpy as jnp
from etils import epath
from flax import nnx
from ml_collections import ConfigDict

from configs.base import eval_settings, train_settings
from dapo_jax import algorithm, learner
from dapo_jax.run.checkpoint import Checkpoints
from dapo_jax.sampler.decode import Sampling
from dapo_jax.sampler.engine import Engine, plan_cache
from dapo_jax.tasks import math_problems
from dapo_jax.tasks.datasets import Dataset, PromptStream, load_dataset
from dapo_jax.tasks.tokenizer import Tokenizer, load_tokenizer
from models.hf import load_config, load_params, read_config
from models.lora import MATRICES, Lora, adapter_axes, init_adapters
from models.qwen2 import (
    PRESETS,
    REMAT,
    Qwen2,
    Qwen2Config,
    abstract_params,
    param_axes,
    split,
    unstack,
)
from sharding import rules
from sharding.mesh import make_mesh

# Folded into the seed's key, so that no stream of randomness is used for two things.
INIT_STREAM, ROLLOUT_STREAM, EVAL_STREAM = range(3)

# Bounds that `check` holds settings to.
AT_LEAST_1 = (
    "num_steps",
    "updates_per_step",
    "rollout.num_prompts",
    "rollout.max_prompt_tokens",
    "rollout.max_response_tokens",
    "rollout.generation_prompts",
    "rollout.max_generation_batches",
    "learner.micro_batch_rows",
    "eval.samples_per_prompt",
    "rollout.cache_mib",
    "rollout.slot_tokens",
    "rollout.page_tokens",
    "rollout.block_tokens",
    "checkpoint.every_steps",
    "checkpoint.keep",
    "mesh.slices",
)
AT_LEAST_0 = (
    "rollout.top_k",
    "algo.eps_low",
    "algo.eps_high",
    "algo.kl_coef",
    "algo.overlong_factor",
    "algo.overlong_cache_tokens",
    "learner.warmup_steps",
    "learner.weight_decay",
    "learner.lora_rank",
    "eval.every_steps",
    "eval.max_prompts",
    "mesh.cpu_devices",
    "log.samples_every_steps",
    "log.rollouts_every_steps",
)
POSITIVE = (
    "rollout.temperature",
    "learner.learning_rate",
    "learner.adam_eps",
    "learner.max_grad_norm",
    "learner.lora_alpha",
    "eval.temperature",
)


@dataclasses.dataclass(frozen=True)
class Policy:
    """The model on the mesh: its graph, the programs that run it, and how they are sharded."""

    model_config: Qwen2Config
    graph: nnx.GraphDef
    mesh: jax.sharding.Mesh
    engine: Engine
    reshard: functools.partial  # (trained params, start_weights) -> the decoder's weights
    update: functools.partial  # (state, start_weights, batch, learning_rate) -> state, metrics
    learning: learner.Learning
    weight_shardings: dict  # of all weights, as the learner has them
    state: learner.TrainState  # ShapeDtypeStructs with shardings: what a checkpoint is read into


@dataclasses.dataclass(frozen=True)
class EvalSet:
    """An evaluation set, and how k responses to each of its prompts are sampled."""

    dataset: Dataset
    k: int
    sampling: Sampling


@dataclasses.dataclass(frozen=True)
class Data:
    """The data sets that a command reads; train and stream are None where it does not train."""

    train: Dataset | None
    stream: PromptStream | None
    eval_sets: dict[str, EvalSet]

    def report_lines(self) -> list[str]:
        """Accounts for each row of each data set."""
        sets = [s.dataset for s in self.eval_sets.values()]
        return [
            line for s in ([self.train] if self.train else []) + sets for line in s.report.lines()
        ]


def checkpoints(config: ConfigDict, workdir: pathlib.Path, *, keep: int | None) -> Checkpoints:
    """The run's checkpoints; `keep` of them, or all."""
    return Checkpoints(config.checkpoint.directory or workdir / "checkpoints", keep=keep)


def key(config: ConfigDict, stream: int):
    """The root key of one stream of randomness."""
    return jax.random.fold_in(jax.random.key(config.seed), stream)


def model_sizes(config: ConfigDict) -> Qwen2Config:
    """The model's sizes, from its directory or the named preset; both must agree where both are."""
    path, preset = config.model.path, config.model.preset
    if not path and not preset:
        raise ValueError(
            "model.path and model.preset are empty: set the first to a Hugging Face directory, or "
            "the second for random weights"
        )
    if preset and preset not in PRESETS:
        raise ValueError(f"model.preset = {preset!r} is unknown; there are {', '.join(PRESETS)}")
    if not path:
        return PRESETS[preset]
    limit = read_config(path).get("max_position_embeddings")
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if limit is not None and longest > limit:
        raise ValueError(
            f"rollout.max_prompt_tokens + max_response_tokens = {longest} exceeds the "
            f"{limit} positions of {path} (max_position_embeddings in its config.json)"
        )
    sizes = load_config(path)
    if preset and sizes != PRESETS[preset]:
        ours, theirs = (dataclasses.asdict(c) for c in (PRESETS[preset], sizes))
        differing = [f"{k} is {theirs[k]}, not {v}" for k, v in ours.items() if theirs[k] != v]
        raise ValueError(
            f"{path} is no model of the sizes model.preset = {preset!r}: {'; '.join(differing)}; "
            'give another path, or set model.preset to ""'
        )
    return sizes


def tokenizer(config: ConfigDict) -> Tokenizer:
    """The tokenizer of tokenizer.path, or of model.path where that is empty."""
    path = config.tokenizer.path or config.model.path
    if not path:
        raise ValueError(
            "model.path and tokenizer.path are empty: set the first to a Hugging Face directory, "
            "or the second and model.preset for random weights"
        )
    if not epath.Path(path).exists():
        name = "tokenizer.path" if config.tokenizer.path else "model.path"
        raise FileNotFoundError(f"{name} = {path!r}: there is no such directory")
    return load_tokenizer(
        path, stop_tokens=config.tokenizer.stop_tokens or None, chat=config.tokenizer.chat
    )


def load_data(config: ConfigDict, tokenizer: Tokenizer, *, training: bool) -> Data:
    """Loads and tokenizes the evaluation sets, and the training set if `training`."""
    load = functools.partial(
        load_dataset, tokenizer=tokenizer, max_prompt_tokens=config.rollout.max_prompt_tokens
    )
    samplings = eval_samplings(config, tokenizer)
    eval_sets = {
        name: EvalSet(load(f"eval.sets.{name}", settings), settings["k"], samplings[name])
        for name, settings in eval_settings(config).items()
    }
    if not training:
        return Data(None, None, eval_sets)
    train = load("data.train", train_settings(config))
    size = "generation_prompts" if config.algo.dynamic_sampling else "num_prompts"
    if len(train.prompts) < config.rollout[size]:
        raise ValueError(
            f"data.train has {len(train.prompts)} usable prompts, fewer than one generation batch "
            f"of rollout.{size} = {config.rollout[size]}; add data or lower that key"
        )
    return Data(train, PromptStream(train.prompts, seed=config.seed), eval_sets)


def sampling(config: ConfigDict, tokenizer: Tokenizer) -> Sampling:
    """How training samples."""
    r = config.rollout
    return Sampling(
        max_response_tokens=r.max_response_tokens,
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        stop_ids=tuple(tokenizer.stop_ids),
        pad_id=tokenizer.pad_id,
        vocab_size=tokenizer.vocab_size,
    )


def eval_samplings(config: ConfigDict, tokenizer: Tokenizer) -> dict[str, Sampling]:
    """How each set is sampled: as in training, but for temperature and top-p, and never top-k."""
    training = sampling(config, tokenizer)
    return {
        name: dataclasses.replace(
            training, temperature=settings["temperature"], top_p=settings["top_p"], top_k=0
        )
        for name, settings in eval_settings(config).items()
    }


def build_policy(config: ConfigDict, vocab_size: int, *, devices=None) -> Policy:
    """The mesh, the shardings and the jitted programs. No array is allocated, nothing compiled.

    devices: those of the mesh, a compile-only topology's too; None: all of this program's.
    """
    sizes = model_sizes(config)
    if vocab_size > sizes.vocab_size:
        raise ValueError(
            f"the tokenizer has {vocab_size} ids, but the model only {sizes.vocab_size} embedding "
            "rows; set tokenizer.path to the model's own tokenizer"
        )
    m = config.mesh
    mesh = make_mesh(data=m.data, model=m.model, slices=m.slices, devices=devices)
    graph, params = abstract_params(sizes)
    weight_shardings = rules.param_shardings(mesh, param_axes(params), params, rules.LEARNER)
    c, a = config.learner, config.algo
    lora = None
    if c.lora_rank:
        lora = Lora(rank=c.lora_rank, alpha=c.lora_alpha, targets=tuple(c.lora_targets))
    learning = learner.Learning(
        eps_low=a.eps_low,
        eps_high=a.eps_high,
        dual_clip=a.dual_clip,
        kl_coef=a.kl_coef,
        adam_b1=c.adam_b1,
        adam_b2=c.adam_b2,
        adam_eps=c.adam_eps,
        weight_decay=c.weight_decay,
        max_grad_norm=c.max_grad_norm,
        temperature=config.rollout.temperature,
        vocab_size=vocab_size,
        compute_dtype=config.model.compute_dtype,
        remat=c.remat,
        lora=lora,
    )
    trained, trained_shardings = params, weight_shardings
    if lora:
        trained = jax.eval_shape(lambda: init_adapters(sizes, lora, key=jax.random.key(0)))
        axes = adapter_axes(trained)
        trained_shardings = rules.param_shardings(mesh, axes, trained, rules.LEARNER)
    # The moments have the parameters' tree, so their shardings are found by its paths.
    state = jax.eval_shape(functools.partial(learner.init_state, learning=learning), trained)
    state_shardings = learner.shardings_like_params(
        state, trained_shardings, rules.replicated(mesh)
    )

    def decoder_params(params, start_weights):
        return unstack(learner.policy_weights(params, start_weights, learning))

    weights = jax.eval_shape(lambda p: learner.cast(p, config.model.compute_dtype), params)
    engine_params = jax.eval_shape(decoder_params, trained, weights)
    engine_shardings = rules.param_shardings(
        mesh, param_axes(engine_params), engine_params, rules.SAMPLER
    )
    return Policy(
        model_config=sizes,
        graph=graph,
        mesh=mesh,
        engine=build_engine(config, sizes, mesh, engine_params, engine_shardings),
        reshard=jax.jit(decoder_params, out_shardings=engine_shardings),
        update=jax.jit(
            functools.partial(learner.update, graph=graph, mesh=mesh, learning=learning),
            out_shardings=(state_shardings, rules.replicated(mesh)),
            donate_argnums=0,
        ),
        learning=learning,
        weight_shardings=weight_shardings,
        state=rules.abstract(state, state_shardings),
    )


def build_engine(config: ConfigDict, sizes: Qwen2Config, mesh, params, shardings) -> Engine:
    """The rollout engine with the slots that rollout.cache_mib holds; nothing is compiled."""
    r = config.rollout
    kernel = mesh.devices.flat[0].platform == "tpu"
    cache = plan_cache(
        sizes,
        cache_bytes=r.cache_mib * 2**20,
        slot_tokens=min(r.slot_tokens, r.max_response_tokens),
        readers=r.group_size,
        page_tokens=r.page_tokens,
        block_tokens=r.block_tokens,
        max_prompt_tokens=r.max_prompt_tokens,
        max_response_tokens=r.max_response_tokens,
        bytes_per_value=jnp.dtype(config.model.compute_dtype).itemsize,
        model_ways=mesh.shape["model"],
        copies=not kernel,
    )
    return Engine(sizes, mesh, cache, params=rules.abstract(params, shardings), kernel=kernel)


def batch_shape(config: ConfigDict) -> tuple[int, int, int]:
    """[M, B, T] of an update's batch: as many micro-batches as its responses can ever need."""
    rows = config.learner.micro_batch_rows
    responses = config.rollout.num_prompts // config.updates_per_step * config.rollout.group_size
    return -(-responses // rows), rows, config.learner.row_tokens


def lower_update(config: ConfigDict, policy: Policy, start_weights) -> jax.stages.Lowered:
    """`policy.update` for the recipe's batches; start_weights: arrays or what stands for them."""
    batch = learner.abstract_batch(batch_shape(config), policy.mesh)
    rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=rules.replicated(policy.mesh))
    return policy.update.lower(policy.state, start_weights, batch, rate)


def compile_update(config: ConfigDict, policy: Policy, start_weights):
    """`policy.update`, compiled: what does not fit shows before anything is sampled."""
    return lower_update(config, policy, start_weights).compile()


def load_weights(config: ConfigDict, policy: Policy, *, dtype: str):
    """All weights of the start policy on the mesh: loaded, or random from the seed."""
    if config.model.path:
        return load_params(
            config.model.path, policy.model_config, dtype=dtype, shardings=policy.weight_shardings
        )

    def init():
        params = split(Qwen2(policy.model_config, key=key(config, INIT_STREAM)))[1]
        return learner.cast(params, dtype)

    return jax.jit(init, out_shardings=policy.weight_shardings)()


def start_weights(config: ConfigDict, policy: Policy):
    """The start policy's weights where they are needed beside what is trained, else None.

    LoRA adapts them; the KL term is measured against them.
    """
    if not needs_start_weights(config):
        return None
    return load_weights(config, policy, dtype=config.model.compute_dtype)


def needs_start_weights(config: ConfigDict) -> bool:
    """Whether the recipe has LoRA or a KL term."""
    return config.learner.lora_rank > 0 or config.algo.kl_coef > 0


def abstract_weights(config: ConfigDict, policy: Policy):
    """What stands for the start policy's weights, in the compute dtype, with shardings."""
    _, params = abstract_params(policy.model_config)
    params = jax.eval_shape(lambda p: learner.cast(p, config.model.compute_dtype), params)
    return rules.abstract(params, policy.weight_shardings)


def start_params(config: ConfigDict, policy: Policy):
    """What is trained, before the first step: all weights in float32, or LoRA's factors."""
    lora = policy.learning.lora
    if lora is None:
        return load_weights(config, policy, dtype="float32")
    shardings = jax.tree.map(lambda leaf: leaf.sharding, policy.state.params)
    init = functools.partial(init_adapters, policy.model_config, lora)
    return jax.jit(init, out_shardings=shardings)(key=key(config, INIT_STREAM))


def check(config: ConfigDict) -> None:
    """Refuse settings that cannot work, with the values and the key to change (ValueError)."""
    r, a, c = config.rollout, config.algo, config.learner

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(message)

    def value(name: str):
        return functools.reduce(getattr, name.split("."), config)

    for name, choices in (
        ("model.compute_dtype", ("float32", "bfloat16")),
        ("algo.loss_aggregation", algorithm.AGGREGATIONS),
        ("verifier.rules", math_problems.RULES),
        ("rollout.on_generation_cap", ("train", "stop")),
        ("data.on_bad_row", ("error", "skip")),
        ("tokenizer.chat", ("none", "template")),
    ):
        message = f"{name} = {value(name)!r}; choose one of {', '.join(choices)}"
        require(value(name) in choices, message)
    for name in AT_LEAST_1:
        require(value(name) >= 1, f"{name} = {value(name)}, but must be at least 1")
    for name in AT_LEAST_0:
        require(value(name) >= 0, f"{name} = {value(name)}, but must be at least 0")
    for name in POSITIVE:
        message = f"{name} = {value(name)}, but must be greater than 0 and finite"
        require(0 < value(name) < math.inf, message)
    for name in ("rollout.top_p", "eval.top_p"):
        require(0 < value(name) <= 1, f"{name} = {value(name)}, but must be over 0 and at most 1")
    for name in ("learner.adam_b1", "learner.adam_b2"):
        require(0 <= value(name) < 1, f"{name} = {value(name)}, but must be from 0 to below 1")
    for name, chosen in eval_settings(config).items():
        check_eval_set(f"eval.sets.{name}", chosen)
    for name in ("k", "temperature", "top_p"):
        message = f"data.train.{name} is set, but is for evaluation sets; set rollout's keys"
        require(config.data.train[name] is None, message)
    require(0 <= config.seed < 2**32, f"seed = {config.seed}, but must be from 0 to {2**32 - 1}")
    require(
        r.group_size >= 2,
        f"rollout.group_size = {r.group_size}, but a group of 1 has no advantage; use 2 or more",
    )
    require(a.eps_low < 1, f"algo.eps_low = {a.eps_low}, but the ratio's bound 1 - eps_low is > 0")
    require(a.dual_clip > 1, f"algo.dual_clip = {a.dual_clip}, but must be greater than 1")
    require(
        r.num_prompts % config.updates_per_step == 0,
        f"rollout.num_prompts = {r.num_prompts} does not divide by updates_per_step = "
        f"{config.updates_per_step}; each update takes the same number of groups",
    )
    capacity = r.generation_prompts * r.max_generation_batches
    require(
        not a.dynamic_sampling or capacity >= r.num_prompts,
        f"rollout.generation_prompts * max_generation_batches = {r.generation_prompts} * "
        f"{r.max_generation_batches} = {capacity} prompts can never give rollout.num_prompts = "
        f"{r.num_prompts} informative groups; raise one of the first two",
    )
    require(
        a.overlong_cache_tokens <= r.max_response_tokens,
        f"algo.overlong_cache_tokens = {a.overlong_cache_tokens} exceeds "
        f"rollout.max_response_tokens = {r.max_response_tokens}",
    )
    require(
        c.remat in REMAT,
        f"learner.remat = {c.remat!r} is unknown; there are {', '.join(REMAT)}",
    )
    for target in c.lora_targets:
        require(
            target in MATRICES,
            f"learner.lora_targets has {target!r}, which is unknown; there are "
            f"{', '.join(MATRICES)}",
        )
    require(
        c.lora_rank == 0 or len(c.lora_targets) > 0,
        f"learner.lora_rank = {c.lora_rank}, but learner.lora_targets is empty; name some of "
        f"{', '.join(MATRICES)}",
    )
    longest = r.max_prompt_tokens + r.max_response_tokens - 1
    require(
        c.row_tokens >= longest,
        f"learner.row_tokens = {c.row_tokens} does not hold the longest sequence: "
        f"rollout.max_prompt_tokens + max_response_tokens - 1 = {longest}",
    )


def check_eval_set(key: str, settings: dict) -> None:
    """Refuses an evaluation set that cannot be sampled or graded (ValueError)."""
    for name, works, wanted in (
        ("k", settings["k"] >= 1, "at least 1"),
        ("max_prompts", settings["max_prompts"] >= 0, "at least 0"),
        ("temperature", 0 < settings["temperature"] < math.inf, "greater than 0 and finite"),
        ("top_p", 0 < settings["top_p"] <= 1, "over 0 and at most 1"),
        ("rules", settings["rules"] in math_problems.RULES, ", ".join(math_problems.RULES)),
    ):
        if not works:
            raise ValueError(f"{key}.{name} = {settings[name]!r}, but must be {wanted}")


def check_divides(config: ConfigDict, mesh: jax.sharding.Mesh) -> None:
    """Refuse a training batch that the mesh's groups of devices do not divide (ValueError)."""
    ways, rows = rules.row_ways(mesh), config.learner.micro_batch_rows
    if rows % ways:
        shape = " * ".join(f"{axis} {mesh.shape[axis]}" for axis in rules.ROW_AXES)
        raise ValueError(
            f"learner.micro_batch_rows = {rows} does not divide over the mesh's {shape} = {ways} "
            f"groups of devices; the nearest that does is {max(ways, round(rows / ways) * ways)}"
        )
