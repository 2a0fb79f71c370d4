"""The data types that modules pass to each other, from an example to a packed batch.

NumPy and plain Python, no jax; a `Batch` alone goes to the devices. Axis letters end a field's
name: P prompts, G responses of one prompt, T tokens, M micro-batches, B packed rows, L layers, A
experts of a token.
"""

import dataclasses
import enum
import numbers
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

Message = Mapping[str, str]  # {"role", "content"}


def plain_text(messages) -> str:
    """The contents of the messages, one empty line between them; roles are not shown."""
    return "\n\n".join(message["content"] for message in messages)


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """One problem of a task and its ground truth; a prompt that is a text is a user's message.

    source: name of the file, or of the generator. row: line of a jsonl file counted from 1, else
    row counted from 0. extra: what else the task needs to grade a response. opening: what its
    environment says first, the end of its prompt; None: it has not been asked.
    """

    prompt: tuple[Message, ...]
    answer: str
    source: str
    row: int
    extra: Any = None
    opening: str | None = None

    def __post_init__(self):
        if isinstance(self.prompt, str):
            object.__setattr__(self, "prompt", ({"role": "user", "content": self.prompt},))

    @property
    def text(self) -> str:
        """The prompt as a person reads it: the contents of its messages."""
        return plain_text(self.prompt)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """A tokenized example; token_ids is int32 [prompt tokens].

    example: None where nothing is graded, as in benchmarks. key: the config key of its data set.
    """

    token_ids: np.ndarray
    example: Example | None = None
    key: str = ""


# Statuses without a judgement of the answer; LEFT_OUT: the environment failed.
LEFT_OUT = "left_out"
GAVE_UP = ("too_large", "timeout", "memory", "crashed", LEFT_OUT)
REWARDED = "rewarded"  # by an environment that does not say what is right
# Statuses that need no prediction: an environment looks for no answer.
UNSEARCHED = ("correct", "wrong", REWARDED, LEFT_OUT)


class Verdict(NamedTuple):
    """The grade of one response.

    correct: whether it counts as right; dynamic sampling (Eq. 11) looks at it (`Group.success_G`).
    prediction: the answer found in the response, in the normal form of the rules; None where there
    is none. status: a word for why. score: the reward of a task with a graded one; None: Eq. 7's,
    +1 for a correct response and -1 for any other. measures: numbers of the task's own, by name;
    the metrics `task/<name>` are means over the responses that have one.
    """

    correct: bool
    prediction: str | None
    status: str
    score: float | None = None
    measures: Mapping[str, float] | None = None

    @property
    def has_no_answer(self) -> bool:
        """Returns whether no answer was found; an environment looks for none."""
        return self.prediction is None and self.status not in UNSEARCHED


def finite_number(value: Any) -> float:
    """Returns a reward, score or measure of a task or an environment; ValueError for no number."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value  # an array's
    if not isinstance(value, numbers.Real) or not abs(value) <= sys.float_info.max:
        raise ValueError("it has to be a finite number")
    return float(value)


def true_or_false(value: Any) -> bool:
    """Returns a bool of a task or an environment; ValueError for other values, also 0 and 1."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError("it has to be True or False")
    return bool(value)


class Status(enum.Enum):
    """The state of a response: unfinished in two ways, or ended in two."""

    RUNNING = "more of it is to be sampled"
    WAITING = "its turn ended, and its environment has not answered yet"
    STOPPED = "it ended with a stop token, or as its environment said"
    CUT = "it was cut off at the length limit"


@dataclasses.dataclass(frozen=True)
class Response:
    """One sampled response: its tokens, the stop token included, and what was found in it.

    tokens_T int32, behavior_logp_T float32 (nats, under the sampling distribution). text and
    verdict are None until it is graded. ends: its length at the end of each earlier step (partial
    rollouts). given_T bool: True for the tokens of an environment, between the turns of an episode,
    which have no loss; None: all are sampled. route_TLA uint8: the experts of each token and layer,
    first the prompt's, less its last token, then the response's; None: the model has none.
    measures: of the episode, as `Verdict.measures`. turns: what its sides said.
    """

    tokens_T: np.ndarray
    behavior_logp_T: np.ndarray
    status: Status
    text: str | None = None
    verdict: Verdict | None = None
    ends: tuple[int, ...] = ()
    given_T: np.ndarray | None = None
    route_TLA: np.ndarray | None = None
    measures: Mapping[str, float] | None = None
    turns: Sequence[Message] | None = None

    @property
    def stopped(self) -> bool:
        """Returns whether it ended, and was not cut off."""
        return self.status is Status.STOPPED

    @property
    def is_unfinished(self) -> bool:
        """Returns whether it may still have more tokens."""
        return self.status in (Status.RUNNING, Status.WAITING)

    @property
    def sampled_T(self) -> np.ndarray:
        """True for the tokens that a policy sampled."""
        return np.ones(len(self.tokens_T), bool) if self.given_T is None else ~self.given_T

    @property
    def turns_T(self) -> list[np.ndarray]:
        """The tokens of each turn, and between two those that an environment gave."""
        return np.split(self.tokens_T, np.flatnonzero(np.diff(self.sampled_T)) + 1)

    @property
    def sampled_tokens(self) -> int:
        """Counts the tokens that a policy sampled."""
        return self.sampled_before(len(self.tokens_T))

    @property
    def stale_tokens(self) -> int:
        """Counts the tokens that earlier policies sampled."""
        return self.sampled_before(max(self.ends, default=0))

    def sampled_before(self, end: int) -> int:
        """Counts the sampled ones of the first so many tokens."""
        return end - (0 if self.given_T is None else int(self.given_T[:end].sum()))

    def continued(self) -> "Response":
        """The response, ended or not, as the next step finds it.

        Its grade is not kept, but for that of an episode, which its environment may have given.
        """
        verdict = None if self.turns is None else self.verdict
        ends = (*self.ends, len(self.tokens_T))
        return dataclasses.replace(self, ends=ends, text=None, verdict=verdict)


TRAINING = 0  # of a session's streams the one that is trained on


@dataclasses.dataclass(frozen=True)
class Group:
    """One prompt and its G responses, by sample index; `cursor` is its place in the stream.

    Properties named _G are arrays [G]; correct_G and score_G need graded responses. prompt: None
    where a checkpoint has been read, and not the data. stream: the session's that it was sampled
    for.
    """

    cursor: int
    prompt: Prompt | None
    responses: tuple[Response, ...]
    stream: int = 0

    def graded(self, texts: Sequence[str], verdicts: Sequence[Verdict]) -> "Group":
        """The group with a text and a verdict of each response."""
        grades = zip(self.responses, texts, verdicts, strict=True)
        responses = (dataclasses.replace(r, text=t, verdict=v) for r, t, v in grades)
        return dataclasses.replace(self, responses=tuple(responses))

    @property
    def grades(self) -> tuple[list[str], list[Verdict]]:
        """The texts and verdicts of graded responses."""
        return [it.text for it in self.responses], [it.verdict for it in self.responses]

    @property
    def is_unfinished(self) -> bool:
        """Returns whether a response may still have more tokens."""
        return any(response.is_unfinished for response in self.responses)

    @property
    def sampled_tokens(self) -> int:
        """Counts the tokens that a policy sampled."""
        return sum(response.sampled_tokens for response in self.responses)

    def continued(self) -> "Group":
        """The group, ended or not, as the next step finds it."""
        responses = tuple(response.continued() for response in self.responses)
        return dataclasses.replace(self, responses=responses)

    @property
    def length_G(self) -> np.ndarray:
        """The tokens of each response, an environment's among them."""
        return np.array([len(response.tokens_T) for response in self.responses])

    @property
    def stopped_G(self) -> np.ndarray:
        """False where a response was cut off at the length limit."""
        return np.array([response.stopped for response in self.responses])

    @property
    def is_left_out(self) -> bool:
        """Returns whether an environment failed, so that the group teaches nothing."""
        return any(response.verdict.status == LEFT_OUT for response in self.responses)

    @property
    def success_G(self) -> np.ndarray:
        """Marks the successes of dynamic sampling (Eq. 11): correctness.

        Where environments say no more than a reward: one above the group's lowest.
        """
        if all(response.verdict.status == REWARDED for response in self.responses):
            return self.score_G > self.score_G.min()
        return self.correct_G

    @property
    def correct_G(self) -> np.ndarray:
        """Raw correctness of each response."""
        return np.array([response.verdict.correct for response in self.responses])

    @property
    def score_G(self) -> np.ndarray:
        """The task's own reward of each response; NaN where it has none beside correctness."""
        scores = [response.verdict.score for response in self.responses]
        return np.array([np.nan if score is None else score for score in scores])


@dataclasses.dataclass
class RolloutStats:
    """The work that sampling a step's groups took, other streams' beside it included."""

    sampled_tokens: int = 0  # for training
    decode_steps: int = 0
    slot_steps: int = 0  # decode steps times slots
    busy_slot_steps: int = 0  # those that sampled a token of a response
    waiting_slot_steps: int = 0  # slot_steps while requests waited for a slot
    busy_waiting_slot_steps: int = 0  # busy_slot_steps then
    requests: int = 0
    prefilled_prompts: int = 0
    cache_use: float = 0.0  # the greatest share of pages taken
    # The engine's: prefill, decode, host, environment. verify: behind it; verify_wait: until then.
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def add_block(
        self, steps: int, slots: int, useful_N, trains_N, *, waiting: bool, cache_use: float
    ) -> None:
        """Adds a block of decode steps.

        useful_N: the tokens that each occupied slot sampled; trains_N: whether for training.
        """
        self.sampled_tokens += int(useful_N[trains_N].sum())
        self.decode_steps += steps
        self.slot_steps += steps * slots
        self.busy_slot_steps += int(useful_N.sum())
        self.waiting_slot_steps += steps * slots * waiting
        self.busy_waiting_slot_steps += int(useful_N.sum()) * waiting
        self.cache_use = max(self.cache_use, cache_use)


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """The groups that one step sampled, in prompt order, and those of them that it trains on.

    sampled: P graded groups. kept: indices into it, ascending. informative: what dynamic sampling
    calls so, bool [P]. cursor: of the next unseen prompt. issued: groups sampled or cancelled.
    partial: the groups that go on in the next step (partial rollouts). continued_tokens: sampled by
    earlier steps in the groups that this step took up.
    """

    sampled: list[Group]
    kept: np.ndarray
    informative: np.ndarray
    cursor: int
    issued: int
    stats: RolloutStats
    partial: Sequence[Group] = ()
    continued_tokens: int = 0

    @property
    def correct_PG(self) -> np.ndarray:
        """Raw correctness of everything sampled."""
        return np.stack([group.correct_G for group in self.sampled])

    @property
    def score_PG(self) -> np.ndarray:
        """The task's own rewards of everything sampled, NaN where there are none."""
        return np.stack([group.score_G for group in self.sampled])

    @property
    def length_PG(self) -> np.ndarray:
        """Tokens of everything sampled."""
        return np.stack([group.length_G for group in self.sampled])

    @property
    def sampled_tokens_PG(self) -> np.ndarray:
        """Tokens of everything sampled but those of environments, which have no loss."""
        return np.array([[r.sampled_tokens for r in group.responses] for group in self.sampled])

    @property
    def kept_tokens(self) -> int:
        """Response tokens that the update trains on."""
        return int(self.sampled_tokens_PG[self.kept].sum())


Ints = Annotated[Any, np.dtype(np.int32)]
Floats = Annotated[Any, np.dtype(np.float32)]
Bools = Annotated[Any, np.dtype(np.bool_)]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows of tokens: [M, B, T] for a mini-batch, [B, T] for one of its micro-batches.

    The one list of the fields of a trained token; a loss gets a micro-batch, or a chunk [C] of it.
    Entry t belongs to target t, the token that comes next. segment numbers a row's pieces from 1; 0
    is padding. branch numbers a row's responses from 1; 0 is a prompt, which all responses of its
    piece follow. position counts from 0 along a prompt and each of its responses. weight: of the
    token's loss in the whole mini-batch (Eq. 12). old_logp: the sampler's, behavior_logp, unless
    the learner has recomputed it. is_on_policy: tokens of groups that began in this step.
    is_response: tokens that a policy sampled. reference_logp: the start policy's, for a KL term.
    route_BTLA: the experts that the sampler sent each token to, uint8; None without any. Of the
    micro-batches the first `num_micro` are in use.
    """

    tokens_BT: Ints
    target_BT: Ints
    position_BT: Ints
    segment_BT: Ints
    branch_BT: Ints
    behavior_logp_BT: Floats
    old_logp_BT: Floats
    advantage_BT: Floats
    weight_BT: Floats
    is_response_BT: Bools
    is_on_policy_BT: Bools
    num_micro: Any
    reference_logp_BT: Any = None
    route_BTLA: Any = None

    @classmethod
    def row_fields(cls, routes: tuple[int, ...] = ()) -> dict[str, np.dtype]:
        """Name -> dtype of the arrays of rows; routes: (L, A) of a token, where there are any."""
        fields = [it for it in dataclasses.fields(cls) if hasattr(it.type, "__metadata__")]
        own = {it.name: it.type.__metadata__[0] for it in fields}
        return own | ({"route_BTLA": np.dtype((np.uint8, routes))} if routes else {})
