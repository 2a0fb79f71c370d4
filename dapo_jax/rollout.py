"""One step's rollouts: sample, verify, and keep sampling until enough groups are informative."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from dapo_jax.algorithm import first_informative
from dapo_jax.data import Prompt
from dapo_jax.metrics import Stopwatch
from dapo_jax.sampler.decode import Sampling
from dapo_jax.sampler.host import Sampler
from dapo_jax.tokenizer import Tokenizer
from dapo_jax.verifier import Verdict, verify_many


@dataclasses.dataclass(frozen=True)
class Group:
    """One prompt and its G responses, on the host. `cursor` is the prompt's place in the stream.

    responses, behavior_logp: G arrays of a response's tokens and their log-probabilities, the stop
    token included. stopped_G: False where the response was cut off at the length limit.
    """

    cursor: int
    prompt: Prompt
    responses: list[np.ndarray]
    behavior_logp: list[np.ndarray]
    stopped_G: np.ndarray
    texts: list[str]
    verdicts: list[Verdict]

    @property
    def length_G(self) -> np.ndarray:
        """Generated tokens of each response."""
        return np.array([len(response) for response in self.responses])

    @property
    def correct_G(self) -> np.ndarray:
        """Raw correctness of each response."""
        return np.array([verdict.correct for verdict in self.verdicts])


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """What one step sampled (in prompt order), and which of it the update trains on.

    sampled: P groups. kept: indices into `sampled`, ascending. cursor: of the next unseen prompt.
    """

    sampled: list[Group]
    kept: np.ndarray
    cursor: int
    generation_batches: int

    @property
    def correct_PG(self) -> np.ndarray:
        """Raw correctness of everything sampled."""
        return np.stack([group.correct_G for group in self.sampled])

    @property
    def length_PG(self) -> np.ndarray:
        """Tokens of everything sampled."""
        return np.stack([group.length_G for group in self.sampled])

    @property
    def stopped_PG(self) -> np.ndarray:
        """False where a response ran into the length limit."""
        return np.stack([group.stopped_G for group in self.sampled])


def generate_groups(
    sampler: Sampler,
    params,
    run_key,
    prompts: Sequence[Prompt],
    cursors: Sequence[int],
    *,
    group_size: int,
    sampling: Sampling,
    tokenizer: Tokenizer,
    rules: str,
    watch: Stopwatch,
) -> list[Group]:
    """Sample `group_size` responses to each prompt, then decode and verify them on the host."""
    with watch("rollout"):
        samples = sampler(
            params,
            run_key,
            [prompt.token_ids for prompt in prompts],
            cursors,
            group_size=group_size,
            sampling=sampling,
        )
    with watch("verify"):
        lengths = samples.length_R.tolist()
        responses = [row[:n] for row, n in zip(samples.tokens_RT, lengths, strict=True)]
        logps = [row[:n] for row, n in zip(samples.behavior_logp_RT, lengths, strict=True)]
        texts = [tokenizer.decode(response.tolist()) for response in responses]
        truths = [prompt.example.answer for prompt in prompts for _ in range(group_size)]
        verdicts = verify_many(texts, truths, rules=rules)
    groups = []
    for p, (prompt, cursor) in enumerate(zip(prompts, cursors, strict=True)):
        r = slice(p * group_size, (p + 1) * group_size)
        groups.append(
            Group(
                cursor=int(cursor),
                prompt=prompt,
                responses=responses[r],
                behavior_logp=logps[r],
                stopped_G=samples.stopped_R[r],
                texts=texts[r],
                verdicts=verdicts[r],
            )
        )
    return groups


def collect(
    generate_groups: Callable[[range], list[Group]],
    cursor: int,
    *,
    num_prompts: int,
    generation_prompts: int,
    max_generation_batches: int,
    dynamic_sampling: bool,
    report: Callable[[str], None],
) -> Rollouts:
    """Dynamic sampling (Eq. 11): generate until `num_prompts` groups are informative.

    A group is informative if some but not all of it is correct. The policy is frozen meanwhile.
    The first informative groups in prompt order are kept, so that neither length nor speed of a
    response decides; surplus groups are discarded. At the cap there may be fewer than
    `num_prompts`, or none: the caller decides what to do then. Without dynamic sampling it is one
    batch of `num_prompts` prompts, all kept.

    generate_groups(cursors) samples and verifies the prompts at these places of the stream.
    """
    if not dynamic_sampling:
        report(f"rollout: {num_prompts} prompts")
        sampled = generate_groups(range(cursor, cursor + num_prompts))
        return Rollouts(sampled, np.arange(num_prompts), cursor + num_prompts, 1)
    sampled: list[Group] = []
    kept = np.arange(0)
    batches = 0
    while len(kept) < num_prompts and batches < max_generation_batches:
        report(
            f"rollout: {len(kept)}/{num_prompts} informative groups, generation batch "
            f"{batches + 1}/{max_generation_batches}"
        )
        sampled += generate_groups(range(cursor, cursor + generation_prompts))
        cursor += generation_prompts
        batches += 1
        correct_PG = np.stack([group.correct_G for group in sampled])
        kept = first_informative(correct_PG, num_prompts=num_prompts)
    return Rollouts(sampled, kept, cursor, batches)


def minibatches(kept: np.ndarray, *, groups_per_update: int) -> list[np.ndarray]:
    """Consecutive chunks of at most `groups_per_update` groups, as even as can be.

    Adam takes a full step whatever the mini-batch's size: one left-over group must not make one.
    """
    chunks = -(-len(kept) // groups_per_update)
    return np.array_split(kept, chunks) if chunks else []


def rollout_rows(groups: Sequence[Group], reward_PG: np.ndarray, kept: np.ndarray):
    """The step's responses for rollouts/<step>.jsonl.gz, one dict each."""
    trained = set(kept.tolist())
    for p, group in enumerate(groups):
        for g, (text, verdict) in enumerate(zip(group.texts, group.verdicts, strict=True)):
            yield {
                "cursor": group.cursor,
                "sample": g,
                "source": group.prompt.example.source,
                "row": group.prompt.example.row,
                "prompt": group.prompt.example.text,
                "response": text,
                "ground_truth": group.prompt.example.answer,
                "prediction": verdict.prediction,
                "correct": verdict.correct,
                "status": verdict.status,
                "reward": float(reward_PG[p, g]),
                "tokens": len(group.responses[g]),
                "truncated": not bool(group.stopped_G[g]),
                "trained": p in trained,
            }
