"""From a config to what a run works with: the model on its mesh and its programs, weights, data."""

import concurrent.futures
import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from etils import epath
from ml_collections import ConfigDict

from configs.base import eval_settings, has_environments, mixture_settings
from dapo_jax import hub, learner
from dapo_jax.episodes import Environments
from dapo_jax.losses import takes_old_logp
from dapo_jax.rollout import StepPlan, success_by
from dapo_jax.sampler.cache import SPREAD_READERS, Cache, plan_cache, round_up
from dapo_jax.sampler.decode import Sampling
from dapo_jax.sampler.engine import Engine, token_bytes
from dapo_jax.sampler.session import Stream
from dapo_jax.setup import checks
from dapo_jax.tasks.datasets import Dataset, Mixture, load_dataset
from dapo_jax.tasks.tokenizer import Tokenizer, load_tokenizer
from models import families
from models.hf import check_files, load_params
from models.hf_config import load_config, read_config
from models.kernels import OPTIONS, Kernels, kernels_for, platform_of
from models.lora import Lora, init_adapters
from models.parameters import ModelConfig, param_axes
from models.rope import YarnScaling
from models.transformer import Transformer, abstract_params, split, unstack
from sharding import rules
from sharding.mesh import make_mesh

# Folded into the seed's key, so that no stream of randomness is used for two things.
INIT_STREAM, ROLLOUT_STREAM, EVAL_STREAM, SPREAD_STREAM = range(4)


@dataclasses.dataclass(frozen=True)
class Programs:
    """The model on the mesh: the programs of a step, how arrays are sharded, and their shapes.

    Nothing is allocated or compiled yet. state and start_weights (None where none are needed beside
    what is trained) are ShapeDtypeStructs with shardings.
    """

    config: ConfigDict
    sizes: ModelConfig
    mesh: jax.sharding.Mesh
    engine: Engine
    settings: learner.UpdateSettings
    reshard: jax.stages.Wrapped  # (trained params, start_weights) -> the sampler's weights
    update: jax.stages.Wrapped  # (state, start_weights, batch, learning_rate) -> state, metrics
    recompute_old_logp: jax.stages.Wrapped  # (params, start_weights, batch) -> old_logp_MBT
    weight_shardings: dict  # of all weights, as the learner has them
    state: learner.TrainState
    start_weights: dict | None

    def lower_learner(self, row_tokens: int) -> dict[str, jax.stages.Lowered]:
        """Lowers what takes batches with rows of one of the config's lengths.

        "old_logp", where the loss takes the learner's own, and "update".
        """
        batch = learner.abstract_batch(self.settings, row_tokens, self.mesh)
        rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=rules.replicated(self.mesh))
        lowered = {}
        if takes_old_logp(self.settings):
            policy = (self.state.params, self.start_weights)
            lowered["old_logp"] = self.recompute_old_logp.lower(*policy, batch)
        return lowered | {"update": self.update.lower(self.state, self.start_weights, batch, rate)}

    def compile_learner(self) -> dict[str, Callable]:
        """Compiles these for all lengths: what does not fit shows before anything is sampled."""
        lengths = learner.row_lengths(self.settings)
        lowered = {(n, name): it for n in lengths for name, it in self.lower_learner(n).items()}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            compiled = pool.map(jax.stages.Lowered.compile, lowered.values())
            programs = dict(zip(lowered, compiled, strict=True))

        def run(name, policy, start_weights, batch, *rate):
            return programs[batch.tokens_BT.shape[-1], name](policy, start_weights, batch, *rate)

        return {name: functools.partial(run, name) for _, name in programs}

    def load_weights(self, *, dtype: str) -> dict:
        """All weights of the start policy on the mesh: loaded, or random from the seed."""
        config = self.config
        if config.model.path:
            path = hub.local(config.model.path)
            return load_params(path, self.sizes, dtype=dtype, shardings=self.weight_shardings)

        def init():
            params = split(Transformer(self.sizes, key=key(config, INIT_STREAM)))[1]
            return optax.tree.cast(params, dtype)

        return jax.jit(init, out_shardings=self.weight_shardings)()

    def load_start_weights(self) -> dict | None:
        """The start policy's weights where they are needed beside what is trained, else None."""
        if self.start_weights is None:
            return None
        return self.load_weights(dtype=self.config.model.compute_dtype)

    def start_params(self) -> dict:
        """Makes the trained arrays of the start: all weights in float32, or LoRA factors."""
        lora = self.settings.lora
        if lora is None:
            weights = self.load_weights(dtype="float32")
            in_bfloat16 = self.config.model.compute_dtype == "bfloat16"
            spreads = in_bfloat16 and self.config.learner.spread_start
            return self._spread(weights) if spreads else weights
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state.params)
        init = functools.partial(init_adapters, self.sizes, lora)
        return jax.jit(init, out_shardings=shardings)(key=key(self.config, INIT_STREAM))

    def _spread(self, weights: dict) -> dict:
        """Spreads the start's weights, one array after the other: each needs room beside it."""
        leaves, tree = jax.tree.flatten(weights)
        keys = jax.random.split(key(self.config, SPREAD_STREAM), len(leaves))
        for i, (w, its_key) in enumerate(zip(leaves, keys, strict=True)):
            run = jax.jit(learner.spread, out_shardings=w.sharding, donate_argnums=0)
            leaves[i] = jax.block_until_ready(run(w, its_key))
        return jax.tree.unflatten(tree, leaves)

    def start_state(self) -> learner.TrainState:
        """The training state before the first step, on the mesh."""
        init = functools.partial(learner.init_state, settings=self.settings)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        return jax.jit(init, out_shardings=shardings, donate_argnums=0)(self.start_params())


def key(config: ConfigDict, stream: int):
    """The root key of one stream of randomness."""
    return jax.random.fold_in(jax.random.key(config.seed), stream)


def model_sizes(config: ConfigDict) -> ModelConfig:
    """The model's sizes, from its directory or the named preset; both must agree where both are."""
    path, preset = hub.local(config.model.path), config.model.preset
    if not path and not preset:
        raise ValueError("model.path and model.preset are empty: set one of them")
    family = families.load(config.model.family)
    if preset and preset not in family.presets:
        known = ", ".join(family.presets) or "none"
        raise ValueError(f"model.preset = {preset!r} is unknown; {config.model.family} has {known}")
    sizes = load_config(path) if path else family.presets[preset]
    checks.check_lora(config.learner, sizes)
    if path:
        checks.check_model(config, family, sizes, positions_of(path, sizes))
        check_files(path, sizes)
    return sizes


def positions_of(path: str, sizes: ModelConfig) -> int | None:
    """Returns the number of positions that a model directory names; None where it names none."""
    key = "max_position_embeddings"
    positions = read_config(path).get(key, sizes.defaults.get(key))
    if positions and isinstance(sizes.rope_scaling, YarnScaling):
        # Qwen's model cards add the scaling and leave the number as it was.
        positions = max(positions, sizes.rope_scaling.positions)
    return positions


def tokenizer(config: ConfigDict) -> Tokenizer:
    """Returns the tokenizer of tokenizer.path or model.path."""
    path = hub.local(config.tokenizer.path or config.model.path)
    if not path:
        raise ValueError("model.path and tokenizer.path are empty: set one of them")
    if not epath.Path(path).exists():
        name = "tokenizer.path" if config.tokenizer.path else "model.path"
        raise FileNotFoundError(f"{name} = {path!r}: there is no such directory")
    settings = config.tokenizer
    return load_tokenizer(
        path,
        stop_tokens=settings.stop_tokens or None,
        chat=settings.chat,
        rows=model_sizes(config).vocab_size,
        date=settings.date,
        chat_args=settings.chat_args.to_dict(),
    )


@dataclasses.dataclass(frozen=True)
class Data:
    """The data sets that a command reads; those that it does not read are left out."""

    train: Mixture
    eval_sets: dict[str, Dataset]

    @property
    def sets(self) -> dict[str, Dataset]:
        """All data sets: training's by their keys, then those that are evaluated by their names."""
        return {**self.train.sets, **self.eval_sets}

    def longest_prompt(self) -> int:
        """Counts the tokens of the longest prompt."""
        prompts = (prompt for dataset in self.sets.values() for prompt in dataset.prompts)
        return max((len(prompt.token_ids) for prompt in prompts), default=1)

    def report_lines(self) -> list[str]:
        """Accounts for each row of each data set."""
        lines = [line for dataset in self.sets.values() for line in dataset.report.lines()]
        if len(self.train.sets) > 1:
            shares = [f"{share:.1%} {key}" for key, share in self.train.shares.items()]
            lines.append(f"training prompts: {', '.join(shares)}")
        return lines


def load_data(
    config: ConfigDict, tokenizer: Tokenizer, *, training: bool, evaluates: bool = True
) -> Data:
    """Loads and tokenizes the training sets if `training`, the evaluation sets if `evaluates`."""
    r = config.rollout

    def load(key, settings):
        return load_dataset(
            key,
            settings | {"path": hub.local(settings["path"])},
            tokenizer,
            max_prompt_tokens=r.max_prompt_tokens,
            environment_seconds=r.environment_seconds,
            open_environments=r.open_environments,
        )

    settings = eval_settings(config) if evaluates else {}
    eval_sets = {name: load(f"eval.sets.{name}", of_set) for name, of_set in settings.items()}
    settings = mixture_settings(config) if training else {}
    sets = {key: load(key, of_set) for key, of_set in settings.items()}
    train = Mixture(sets, {key: of_set["weight"] for key, of_set in settings.items()})
    for key, share in train.shares.items():
        checks.check_enough_prompts(config, key, len(sets[key].prompts), share)
    return Data(train, eval_sets)


def environments(config: ConfigDict, data: Data, tokenizer: Tokenizer) -> Environments:
    """Makes what answers the turns of a session's episodes."""
    return Environments(
        {it.prompts[0].key: it.environment for it in data.sets.values() if it.environment},
        tokenizer,
        max_turns=config.rollout.max_turns,
        on_failure=config.rollout.on_environment_failure,
        most_open=config.rollout.open_environments,
    )


def overlong(config: ConfigDict) -> dict[str, float]:
    """Returns the settings of the soft overlong punishment (Eq. 13)."""
    return {
        "max_tokens": config.rollout.max_response_tokens,
        "cache_tokens": config.algo.overlong_cache_tokens,
        "factor": config.algo.overlong_factor,
    }


def step_plan(config: ConfigDict, data: Data) -> StepPlan:
    """Makes the plan of what each training step samples."""
    r = config.rollout
    return StepPlan(
        prompt_at=data.train.stream(config.seed).__getitem__,
        grade=data.train.grade,
        group_size=r.group_size,
        num_prompts=r.num_prompts,
        max_prompts=r.generation_prompts * r.max_generation_batches,
        max_tokens=r.max_response_tokens,
        dynamic_sampling=config.algo.dynamic_sampling,
        partial_rollout_steps=r.partial_rollout_steps,
        success=success_by(config.algo.filter_groups, **overlong(config)),
    )


def sampling(config: ConfigDict, tokenizer: Tokenizer, **changes) -> Sampling:
    """Makes training's sampling settings, with changes; a temperature of 0 decodes greedily."""
    r = config.rollout
    chosen = {"temperature": r.temperature, "top_p": r.top_p, "top_k": r.top_k} | changes
    if chosen["temperature"] == 0:
        chosen = {"temperature": 1.0, "top_p": 1.0, "top_k": 1}
    return Sampling(
        max_response_tokens=r.max_response_tokens,
        **chosen,
        stop_ids=tuple(tokenizer.stop_ids),
        vocab_size=tokenizer.vocab_size,
    )


def eval_streams(
    config: ConfigDict, tokenizer: Tokenizer, sets: Mapping[str, Dataset]
) -> list[Stream]:
    """Returns the evaluation sets' streams: each has its own randomness, temperature and top-p."""
    root_key, streams = key(config, EVAL_STREAM), []
    for name, settings in eval_settings(config).items():
        of_set = {it: settings[it] for it in ("temperature", "top_p", "top_k")}
        own_key = jax.random.fold_in(root_key, zlib.crc32(name.encode()))
        own_sampling = sampling(config, tokenizer, **of_set)
        streams.append(Stream(own_key, own_sampling, name, sets.get(name)))
    return streams


def programs(config: ConfigDict, vocab_size: int, *, devices=None) -> Programs:
    """Makes the mesh and the config's programs on it. ValueError where the model does not fit.

    vocab_size: the tokenizer's ids. devices: those of the mesh, a compile-only topology's too;
    None: all of this program's.
    """
    sizes = model_sizes(config)
    mesh = mesh_of(config, devices)
    kernels = kernels_for(config.model.kernels, platform_of(mesh))
    kernels = kernels.of_pages(kernels.page_tokens(config.rollout.page_tokens, sizes.head_dim))
    r, row_tokens, multiple = config.rollout, config.learner.row_tokens, kernels.part_multiple
    longest = round_up(r.max_prompt_tokens - 1, multiple) + r.max_response_tokens
    if multiple > 1 and 0 < row_tokens < longest:
        raise ValueError(
            f"learner.row_tokens = {row_tokens} does not hold the longest response, which begins "
            f"behind its prompt at a multiple of {multiple}: set {longest} or more"
        )
    settings = update_settings(config, vocab_size, kernels, routes=sizes.routes)
    graph, params = abstract_params(sizes)
    shardings = rules.param_shardings(mesh, param_axes(params), params, rules.LEARNER)
    weights = jax.eval_shape(lambda p: optax.tree.cast(p, config.model.compute_dtype), params)
    trained = params
    if lora := settings.lora:
        trained = jax.eval_shape(lambda: init_adapters(sizes, lora, key=jax.random.key(0)))
    state = jax.eval_shape(functools.partial(learner.init_state, settings=settings), trained)
    state_shardings = rules.param_shardings(mesh, param_axes(state), state, rules.LEARNER)

    def sampler_weights(params, start_weights):
        return unstack(learner.sampled_weights(params, start_weights, settings))

    of_engine = jax.eval_shape(sampler_weights, state.params, weights)
    engine_shardings = rules.param_shardings(mesh, param_axes(of_engine), of_engine, rules.SAMPLER)
    engine_params = rules.abstract(of_engine, engine_shardings)
    cache_bytes = config.rollout.cache_mib * 2**20
    cache = cache_of(config, sizes, mesh, kernels, cache_bytes=cache_bytes)
    # Alone a forward pass has the bits of the one in an update only without excess precision.
    as_written = options = OPTIONS.get(platform_of(mesh), {})
    if takes_old_logp(settings):
        as_written = options | {"xla_allow_excess_precision": False}
    of_update = {"graph": graph, "mesh": mesh, "settings": settings}
    needs_start_weights = settings.lora is not None or settings.kl_coef > 0
    return Programs(
        config=config,
        sizes=sizes,
        mesh=mesh,
        engine=Engine(sizes, mesh, cache, params=engine_params, kernels=kernels),
        settings=settings,
        reshard=jax.jit(sampler_weights, out_shardings=engine_shardings, compiler_options=options),
        update=jax.jit(
            functools.partial(learner.update, **of_update),
            out_shardings=(state_shardings, rules.replicated(mesh)),
            donate_argnums=0,
            compiler_options=as_written | dict(kernels.update_options),
        ),
        recompute_old_logp=jax.jit(
            functools.partial(learner.recompute_old_logp, **of_update),
            out_shardings=rules.micro_batches(mesh),
            compiler_options=as_written,
        ),
        weight_shardings=shardings,
        state=rules.abstract(state, state_shardings),
        start_weights=rules.abstract(weights, shardings) if needs_start_weights else None,
    )


def mesh_of(config: ConfigDict, devices=None) -> jax.sharding.Mesh:
    """Makes the config's mesh. devices: as of `programs`."""
    m = config.mesh
    return make_mesh(data=m.data, model=m.model, slices=m.slices, devices=devices)


def lora_of(config: ConfigDict) -> Lora | None:
    """Returns the config's LoRA; None where all weights are trained."""
    c = config.learner
    if not c.lora_rank:
        return None
    return Lora(rank=c.lora_rank, alpha=c.lora_alpha, targets=tuple(c.lora_targets))


def update_settings(
    config: ConfigDict, vocab_size: int, kernels: Kernels, *, routes: tuple[int, ...] = ()
) -> learner.UpdateSettings:
    """Returns the constants of the config's updates; routes: the model's."""
    r, keys = config.rollout, config.algo.to_dict() | config.learner.to_dict()
    fields = {field.name for field in dataclasses.fields(learner.UpdateSettings)}
    return learner.UpdateSettings(
        **{name: value for name, value in keys.items() if name in fields},
        compute_dtype=config.model.compute_dtype,
        temperature=r.temperature,
        max_response_tokens=r.max_response_tokens,
        update_responses=r.num_prompts // config.updates_per_step * r.group_size,
        vocab_size=vocab_size,
        lora=lora_of(config),
        routes=routes,
        kernels=kernels,
    )


def cache_of(
    config: ConfigDict, sizes: ModelConfig, mesh, kernels: Kernels, *, cache_bytes: int
) -> Cache:
    """The slots and pages that so many bytes of a device hold. ValueError where they hold none."""
    r, width = config.rollout, jnp.dtype(config.model.compute_dtype).itemsize
    spread = rules.row_degree(mesh) > 1 and kernels.attend_pages is not None
    limits = Cache(
        readers=min(r.group_size, SPREAD_READERS) if spread else r.group_size,
        page_tokens=kernels.page_tokens(r.page_tokens, sizes.head_dim),
        block_tokens=r.block_tokens,
        max_prompt_tokens=r.max_prompt_tokens,
        max_response_tokens=r.max_response_tokens,
        partial_rollouts=r.partial_rollout_steps > 0,
        turns=has_environments(config),
    )
    return plan_cache(
        limits,
        cache_bytes=cache_bytes,
        token_bytes=token_bytes(sizes, bytes_per_value=width, model_degree=mesh.shape["model"]),
        slot_tokens=min(r.slot_tokens, r.max_response_tokens),
        copies=kernels.attend_pages is None,
    )
