"""Samples responses of a policy to a question, or to questions typed in the terminal.

    python -m dapo_jax.sample --workdir=DIR [--step=N] [--prompt="What is 7 * 8?"]
    python -m dapo_jax.sample --model=DIR [--nochat] [--n=4] [--temperature=0] [--max_tokens=512]
        [--environment=module:Class --columns='{"secret": 5}']

The policy is a run's checkpoint (the newest, or that after N steps) or a Hugging Face directory.
Without --prompt each typed line is a question of its own; an empty line, or the end of the input,
ends the command. A question is in the template that training put around its problems (--template),
and in the tokenizer's chat template where training had it so, or where a model has one (--nochat).
With --environment a question begins an episode, whose turns are printed with its reward.
"""

import contextlib
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from configs import any_model
from dapo_jax.checkpoints.same_run import SAMPLE
from dapo_jax.cli import command
from dapo_jax.episodes import Environments
from dapo_jax.printable import conversation, printable_lines
from dapo_jax.process import hosts
from dapo_jax.sampler.decode import Sampling
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.setup import auto_sizes, components, policy
from dapo_jax.setup.policy import Policy
from dapo_jax.tasks.environments import Factory
from dapo_jax.tasks.math_problems import TEMPLATES_OF
from dapo_jax.tasks.templates import templated
from dapo_jax.tasks.tokenizer import Tokenizer
from dapo_jax.types import Example, Prompt, Response

TALK_TOKENS = 1_024  # of a typed question, and of an answer, at most
PAGE_TOKENS = 128
KEY = "typed"  # of the prompts


def answer(
    run: Policy, sampling: Sampling, prompt: Prompt, environments: Environments | None
) -> None:
    """Samples the responses to a prompt, and prints them.

    Another row of its example, or another --seed, has other random numbers.
    """
    start = time.perf_counter()
    key = components.key(run.config, components.EVAL_STREAM)
    stream = Stream(jax.random.fold_in(key, flags.FLAGS.seed), sampling)
    session = Session(run.programs.engine, run.weights, stream, environments=environments)
    session.submit(prompt.example.row, prompt, group_size=flags.FLAGS.n)
    while session.unfinished:
        finished = session.step()
    responses = finished[0].responses
    for i, response in enumerate(responses, start=1):
        text = printable_lines(shown(response, run.tokenizer))
        print(f"--- {i} of {len(responses)}\n{text}" if i > 1 else text, flush=True)
    seconds, tokens = time.perf_counter() - start, sum(int(r.sampled_T.sum()) for r in responses)
    cut = sum(not response.stopped for response in responses)
    note = f", {cut} cut at --max_tokens={sampling.max_response_tokens}" if cut else ""
    print(f"[{tokens} tokens in {seconds:.1f} s{note}]", file=sys.stderr, flush=True)


def shown(response: Response, tokenizer: Tokenizer) -> str:
    """Returns a response's text, or all turns of an episode, what they were and their reward."""
    if not response.measures:
        return tokenizer.decode(response.tokens_T.tolist())
    counts = ", ".join(f"{name} {value:g}" for name, value in response.measures.items())
    verdict = response.verdict
    reward = f"{verdict.status}, reward {verdict.score:g}" if verdict else "no reward of its own"
    return f"{conversation(response.turns)}\n[end] {reward}; {counts}"


def json_object(flag: str) -> dict:
    """Returns a flag's value, a JSON object; ValueError for any other."""
    text = flags.FLAGS[flag].value
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"--{flag}={text}: must be as '{{\"name\": 1}}'") from error


def load() -> tuple[Policy, Callable, Environments | None]:
    """Opens the policy that the flags name: (its run, asked, environments).

    asked(text, cursor, tokenizer): a question's prompt. environments: answer the turns.
    """
    given = flags.FLAGS
    if bool(given.workdir) == bool(given.model):
        raise ValueError("give --workdir=DIR, a run's, or --model=DIR, a model's: one of the two")
    workdir = pathlib.Path(given.workdir) if given.workdir else None
    if workdir:
        config = policy.run_config(workdir, trust_code=given.trust_code)
    else:
        config = any_model.get_config()
        config.model.path = given.model
    r = config.rollout
    template = given.template or (trained_with(config) if workdir else "none")
    if given.chat is not None:
        config.tokenizer.chat = "template" if given.chat else "none"
    config.tokenizer.chat_args.update(json_object("chat_args"))
    columns, factory = json_object("columns"), None
    if given.environment:
        # The cache is then made with turns.
        config.data.train.update(environment=given.environment, weight=None)
        factory = Factory.of("sample", given.environment, r.environment_seconds)

    def asked(text: str, cursor: int, tokenizer: Tokenizer) -> Prompt:
        example = Example(tuple(templated(text, template)), "", KEY, cursor, columns)
        example = factory.introduced(example) if factory else example
        ids = tokenizer.encode_chat(example.prompt, factory and factory.schemas)
        return Prompt(np.asarray(ids, np.int32), example, KEY)

    r.max_response_tokens = given.max_tokens or r.max_response_tokens
    r.page_tokens = PAGE_TOKENS
    r.partial_rollout_steps = r.cache_mib = r.slot_tokens = 0
    config.algo.overlong_cache_tokens = config.learner.row_tokens = 0
    if config.model.path:
        r.max_prompt_tokens = 0

    def fit(config: ConfigDict, tokenizer: Tokenizer, _) -> None:
        """Makes room for the prompt, or a typed one, and for responses behind it."""
        r = config.rollout
        if config.model.path:
            most = r.max_prompt_tokens
            tokens = min(TALK_TOKENS, most if r.max_response_tokens else most // 2)
            if given.prompt is not None:
                tokens = len(asked(given.prompt, 0, tokenizer).token_ids)
            if tokens > most:
                response = f"a response of --max_tokens={r.max_response_tokens or 1}"
                raise ValueError(f"--prompt has {tokens} tokens; {most} fit before {response}")
            auto_sizes.fit_lengths(config, max(1, tokens), most=TALK_TOKENS)
        auto_sizes.fit_cache(config, given.n)

    run = policy.open_policy(config, workdir, fit, step=given.step, question=SAMPLE)
    where = f"{workdir} after {run.step} steps" if workdir else given.model
    asks = f"--template={template!r}, chat {run.config.tokenizer.chat}"
    print(f"{where}, {asks}", file=sys.stderr)
    environments = factory and Environments({KEY: factory}, run.tokenizer, max_turns=r.max_turns)
    return run, asked, environments


def trained_with(config: ConfigDict) -> str:
    """The template of the run's training prompts; "none" where the task makes them itself."""
    train = config.data.train
    if train.template:
        return train.template
    if train.task in ("", "math") and train.kind != "arithmetic":
        asks = TEMPLATES_OF[train.rules or config.verifier.rules][0]
        return "none" if train.environment else asks
    return "dapo" if train.task in ("", "arithmetic") else "none"


def main(_):
    hosts.start(several=False, cpu_devices=0)
    given = flags.FLAGS
    if sys.stdin:
        sys.stdin.reconfigure(errors="replace")
    start = time.perf_counter()
    run, asked, environments = load()
    changes = {it: given[it].value for it in ("temperature", "top_p", "top_k") if given[it].present}
    sampling = components.sampling(run.config, run.tokenizer, **changes)
    run.programs.engine.compile(sampling)
    print(f"ready after {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    most = run.config.rollout.max_prompt_tokens
    for cursor, line in enumerate(typed() if given.prompt is None else [given.prompt]):
        prompt = asked(line, cursor, run.tokenizer)
        if (tokens := len(prompt.token_ids)) > most:
            print(f"[{tokens:,} tokens, of {most:,} at most: not answered]", file=sys.stderr)
        else:
            answer(run, sampling, prompt, environments)


def typed() -> Iterator[str]:
    """Yields the lines that are typed, up to an empty one or the end of the input."""
    if not sys.stdin:  # it was closed
        return
    shown = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(EOFError):
        while line := input(shown).strip():
            yield line


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "A run's directory.")
    flags.DEFINE_string("step", None, "Of a run: finished steps of the checkpoint, or best.")
    flags.DEFINE_string("model", None, "A Hugging Face directory, or ORG/NAME on its hub.")
    flags.DEFINE_string("prompt", None, "One question; without it, those that are typed.")
    flags.DEFINE_bool("chat", None, "Put questions into the tokenizer's chat template, or do not.")
    flags.DEFINE_string("chat_args", "{}", "Its arguments, as '{\"enable_thinking\": false}'.")
    flags.DEFINE_string("template", None, "dapo, boxed, none, or a text with {problem}.")
    flags.DEFINE_string("environment", None, "module:Class, which answers the turns of an episode.")
    flags.DEFINE_string("columns", "{}", "JSON, the row that the environment begins with.")
    flags.DEFINE_integer("n", 1, "Responses to each prompt.", lower_bound=1)
    flags.DEFINE_float("temperature", None, "0: greedy. Default: the run's, or 1.", lower_bound=0)
    flags.DEFINE_float("top_p", None, "Default: the run's, or 1.", lower_bound=1e-6, upper_bound=1)
    flags.DEFINE_integer("top_k", None, "Default: the run's, or 0, which is off.", lower_bound=0)
    flags.DEFINE_integer("max_tokens", None, "Of a response, at most.", lower_bound=1)
    seeds = {"lower_bound": 0, "upper_bound": 2**32 - 1}
    flags.DEFINE_integer("seed", 0, "Another one, other random numbers.", **seeds)
    command.define_trust_code()
    command.run(main)
