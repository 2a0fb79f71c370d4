"""Samples responses of a policy to a question, or to questions typed in the terminal.

    python -m dapo_jax.sample --workdir=DIR [--step=N] [--prompt="What is 7 * 8?"]
    python -m dapo_jax.sample --model=DIR [--nochat] [--n=4] [--temperature=0] [--max_tokens=512]

The policy is a run's checkpoint (the newest, or that after N steps) or a Hugging Face directory.
Without --prompt each typed line is a question of its own; an empty line, or the end of the input,
ends the command. A question is in the template that training put around its problems (--template),
and in the tokenizer's chat template where training had it so, or where a model has one (--nochat).
"""

import ast
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from configs import any_model
from dapo_jax.cli import command
from dapo_jax.printable import printable_lines
from dapo_jax.sampler.decode import Sampling
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.setup import auto_sizes, components, policy
from dapo_jax.setup.policy import Policy
from dapo_jax.tasks.math_problems import TEMPLATES_OF
from dapo_jax.tasks.readers import templated
from dapo_jax.tasks.tokenizer import Tokenizer
from dapo_jax.types import Example, Message, Prompt, Response
from sharding import hosts

TALK_TOKENS = 1_024  # of a typed question, and of an answer, at most
PAGE_TOKENS = 128


def answers(
    run: Policy, sampling: Sampling, messages: Sequence[Message], *, n: int, cursor: int, seed: int
) -> list[Response]:
    """Samples n responses to a prompt.

    cursor: names the prompt; another one, or another seed, has other random numbers.
    """
    prompt = Prompt(
        np.asarray(run.tokenizer.encode_chat(messages), np.int32),
        Example(tuple(messages), "", "typed", cursor),
        "typed",
    )
    key = jax.random.fold_in(components.key(run.config, components.EVAL_STREAM), seed)
    session = Session(run.programs.engine, run.weights, Stream(key, sampling))
    session.submit(cursor, prompt, group_size=n)
    while session.unfinished:
        finished = session.step()
    return list(finished[0].responses)


def answer(run: Policy, sampling: Sampling, messages, *, n: int, cursor: int, seed: int) -> None:
    """Samples the responses and prints them."""
    start = time.perf_counter()
    responses = answers(run, sampling, messages, n=n, cursor=cursor, seed=seed)
    for i, response in enumerate(responses, start=1):
        text = printable_lines(run.tokenizer.decode(response.tokens_T.tolist()))
        print(f"--- {i} of {n}\n{text}" if i > 1 else text, flush=True)
    seconds, tokens = time.perf_counter() - start, sum(len(r.tokens_T) for r in responses)
    cut = sum(not response.stopped for response in responses)
    note = f", {cut} cut at --max_tokens={sampling.max_response_tokens}" if cut else ""
    print(f"[{tokens} tokens in {seconds:.1f} s{note}]", file=sys.stderr, flush=True)


def load(prompt: str | None, *, n: int) -> tuple[Policy, str]:
    """Opens the policy that the flags name: (its run, the template around a question)."""
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
    try:
        config.tokenizer.chat_args.update(ast.literal_eval(given.chat_args))
    except (SyntaxError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"--chat_args={given.chat_args}: must be as \"{{'name': 1}}\"") from error
    r.max_response_tokens = given.max_tokens or r.max_response_tokens
    r.page_tokens = PAGE_TOKENS
    r.partial_rollout_steps = r.cache_mib = r.slot_tokens = 0
    config.algo.overlong_cache_tokens = config.learner.row_tokens = 0
    if config.model.path:
        r.max_prompt_tokens = 0

    def fit(tokenizer: Tokenizer, _) -> None:
        """Makes room for the prompt, or a typed one, and for responses behind it."""
        if config.model.path:
            most = r.max_prompt_tokens
            tokens = min(TALK_TOKENS, most if r.max_response_tokens else most // 2)
            if prompt is not None:
                tokens = len(tokenizer.encode_chat(templated(prompt, template)))
            if tokens > most:
                response = f"a response of --max_tokens={r.max_response_tokens or 1}"
                raise ValueError(f"--prompt has {tokens} tokens; {most} fit before {response}")
            auto_sizes.fit_lengths(config, max(1, tokens), most=TALK_TOKENS)
        auto_sizes.fit_cache(config, n)

    may_differ = ("tokenizer.chat", "tokenizer.date")  # chat_args among them
    run = policy.open_policy(config, workdir, fit, step=given.step, may_differ=may_differ)
    where = f"{workdir} after {run.step} steps" if workdir else given.model
    asks = f"--template={template!r}, chat {config.tokenizer.chat}"
    print(f"{where}, {asks}", file=sys.stderr)
    return run, template


def trained_with(config: ConfigDict) -> str:
    """The template of the run's training prompts; "none" where the task makes them itself."""
    train = config.data.train
    if train.template:
        return train.template
    if train.task in ("", "math") and train.kind != "arithmetic":
        return TEMPLATES_OF[train.rules or config.verifier.rules][0]
    return "dapo" if train.task in ("", "arithmetic") else "none"


def main(_):
    hosts.start(several=False, cpu_devices=0)
    given = flags.FLAGS
    if sys.stdin:
        sys.stdin.reconfigure(errors="replace")
    start = time.perf_counter()
    run, template = load(given.prompt, n=given.n)
    how = {name: given[name].value for name in ("temperature", "top_p", "top_k")}
    sampling = components.sampling(
        run.config,
        run.tokenizer,
        **{name: value for name, value in how.items() if value is not None},
    )
    run.programs.engine.compile(sampling)
    print(f"ready after {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    if given.prompt is not None:
        turn = templated(given.prompt, template)
        answer(run, sampling, turn, n=given.n, cursor=0, seed=given.seed)
        return
    most = run.config.rollout.max_prompt_tokens
    for cursor, line in enumerate(typed()):
        turn = templated(line, template)
        if (tokens := len(run.tokenizer.encode_chat(turn))) > most:
            print(f"[{tokens:,} tokens, of {most:,} at most: not answered]", file=sys.stderr)
        else:
            answer(run, sampling, turn, n=given.n, cursor=cursor, seed=given.seed)


def typed() -> Iterator[str]:
    """Yields the lines that are typed, up to an empty one or the end of the input."""
    while sys.stdin:  # None where it was closed
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "A run's directory.")
    flags.DEFINE_integer("step", None, "Of a run: finished steps of the checkpoint.")
    flags.DEFINE_string("model", None, "A Hugging Face directory, or ORG/NAME on its hub.")
    flags.DEFINE_string("prompt", None, "One question; without it, those that are typed.")
    flags.DEFINE_bool("chat", None, "Put questions into the tokenizer's chat template, or do not.")
    flags.DEFINE_string("chat_args", "{}", "Its arguments, as \"{'enable_thinking': False}\".")
    flags.DEFINE_string("template", None, "dapo, boxed, none, or a text with {problem}.")
    flags.DEFINE_integer("n", 1, "Responses to each prompt.", lower_bound=1)
    flags.DEFINE_float("temperature", None, "0: greedy. Default: the run's, or 1.", lower_bound=0)
    flags.DEFINE_float("top_p", None, "Default: the run's, or 1.", lower_bound=1e-6, upper_bound=1)
    flags.DEFINE_integer("top_k", None, "Default: the run's, or 0, which is off.", lower_bound=0)
    flags.DEFINE_integer("max_tokens", None, "Of a response, at most.", lower_bound=1)
    seeds = {"lower_bound": 0, "upper_bound": 2**32 - 1}
    flags.DEFINE_integer("seed", 0, "Another one, other random numbers.", **seeds)
    command.define_trust_code()
    command.run(main)
