"""Turns of an episode by a chat template: how it writes calls, and what it has between two turns.

Nothing is known of any model: the template is asked. It renders a call and an answer of known
words; where they are found says by which reader calls are read, and as whose messages answers are
written. Texts in, texts out; tokens are the tokenizer's.
"""

import functools
import json
from collections.abc import Callable, Sequence

from dapo_jax.tasks import calls
from dapo_jax.tasks.calls import Call
from dapo_jax.types import Message, plain_text

ANSWER = "%an answer%"  # stands for a turn where a template is looked at
SAID = "%said%"  # and this for what the environment says
WORD = "plum"
CALL = {"name": "look_up", "arguments": {"word": WORD}}
_PROPERTIES = {"word": {"type": "string", "description": "in English"}}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["word"]}
_ABOUT = {"name": "look_up", "description": "Looks up a word.", "parameters": _PARAMETERS}
TOOL = {"type": "function", "function": _ABOUT}
QUESTION = {"role": "user", "content": "a question"}
ADVICE = (
    "take another tokenizer (tokenizer.path), as one that was saved with a response_template "
    "(trl.add_response_schema has some), or an environment with step(text)"
)


class Turns:
    """The words of a template for a turn's calls, and between two turns.

    render(messages, **arguments): the template's text; "" where it takes no such conversation.
    parse(text, tools): reads calls by the files' response_template; None: they have none. ends: the
    texts of the stop tokens. opening: what the template begins an answer with.
    """

    def __init__(self, render: Callable, parse: Callable | None, ends: Sequence[str], opening: str):
        self._render, self._ends, self._opening = render, ends, opening
        self._way_of = functools.cache(self._way)
        prompt = render([QUESTION], tools=[TOOL], add_generation_prompt=True)
        self.shows_tools = prompt != render([QUESTION], add_generation_prompt=True)
        # Most templates take arguments as an object, DeepSeek's as JSON.
        self._arguments = dict
        if not render([QUESTION, self._turn([CALL])], tools=[TOOL]):
            self._arguments = json.dumps
        self.written = self._written(prompt)
        forms = [calls.tagged, calls.bare] if self.written else [calls.either]
        if not self.written and self.shows_tools:
            forms = [calls.tagged]
        self._parse = parse
        readers = [self._parsed] if parse else [self._behind_thoughts(form) for form in forms]
        fit = (it for it in readers if not self.written or it(self.written, [TOOL]) == [CALL])
        self.read = next(fit, None)

    def _behind_thoughts(self, form: Callable) -> Callable:
        return lambda text, tools: form(calls.said(text, self._opening))

    def _parsed(self, text: str, tools) -> list[Call]:
        """Reads calls by the response_template; where it finds none, what is wrong with those."""
        wrong = calls.tagged(calls.said(text, self._opening))
        return self._parse(text, tools) or [it for it in wrong if isinstance(it, str)]

    def _turn(self, made: Sequence[Call]) -> Message:
        """Makes a turn of its calls; those that could not be read have no arguments."""
        functions = (
            {"name": "tool", "arguments": {}} if isinstance(call, str) else call for call in made
        )
        numbered = [
            {
                "type": "function",
                "id": f"call{i:05}",
                "function": call | {"arguments": self._arguments(call["arguments"])},
            }
            for i, call in enumerate(functions)
        ]
        return {"role": "assistant", "content": "", "tool_calls": numbered}

    def _written(self, prompt: str) -> str:
        """Returns the turn of CALL as a model writes it; "" where the template leaves it out."""
        text = self._render([QUESTION, self._turn([CALL])], tools=[TOOL])
        for begun in (prompt, prompt.rstrip(), prompt.removesuffix(self._opening)):
            if text.startswith(begun):
                break
        else:
            begun = ""
        # An earlier turn may have lost its thoughts, which a model closes first.
        has_lost = "<think>" in self._opening and "<think>" not in begun[-len(self._opening) :]
        turn = "</think>" * has_lost + text.removeprefix(begun)
        turn = min((turn.partition(end)[0] for end in self._ends), key=len, default=turn)
        return turn if WORD in turn else ""

    def check(self, *, with_tools: bool) -> list[str]:
        """Returns what a person should know of episodes in this template.

        Raises ValueError where the template's own calls are not read, or an answer has no place.
        """
        role = "tool" if with_tools else "user"
        if self._way_of((role,)) is None:
            raise ValueError(f"has no place for an answer of a {role}: {ADVICE}")
        if not with_tools:
            return []
        if self.read is None:
            raise ValueError(f"writes a call as {self.written!r:.200}, which is not read: {ADVICE}")
        form = "its response_template's calls" if self._parse else calls.TAGGED
        if not self.shows_tools:
            return [f"the chat template shows no tools: tell of them in prompts ({form})"]
        return [] if self.written else [f"the chat template writes no calls: read are {form}"]

    def between(self, messages: Sequence[Message], end: str, made: Sequence[Call]) -> str:
        """Writes what is behind a turn that ended with `end`: the messages, and the next's header.

        made: the turn's calls, which the messages answer. ValueError where they have no place.
        """
        roles = tuple(message["role"] for message in messages)
        if (way := self._way_of(roles)) is None:  # it may take one alone
            messages, made = [{**messages[0], "content": plain_text(messages)}], made[:1]
            way = self._way_of(roles[:1])
        if not (text := way(messages, made) if way else ""):
            raise ValueError(f"takes no such conversation: {messages!r:.200}")
        return text[text.index(end) + len(end) :] if text.lstrip().startswith(end) else text

    def _way(self, roles: tuple[str, ...]) -> Callable | None:
        """Finds the way in which messages of these roles are there; None without one."""
        ways = [self._behind_text, self._as_user]  # a user's is what most templates take
        if set(roles) == {"tool"}:
            ways[1:] = [self._behind_calls, *[self._as_user] * (not self.shows_tools)]
        messages = [{"role": role, "name": CALL["name"], "content": SAID} for role in roles]
        made = [CALL] * len(roles)
        fit = (way for way in ways if way(messages, made).count(SAID) == len(roles))
        return next(fit, None)

    def _behind_text(self, messages: Sequence[Message], made) -> str:
        turn = {"role": "assistant", "content": ANSWER}
        text = self._render([QUESTION, turn, *messages], add_generation_prompt=True)
        return text.partition(ANSWER)[2]

    def _behind_calls(self, messages: Sequence[Message], made: Sequence[Call]) -> str:
        asked = [QUESTION, self._turn(made)]
        answers = [it | {"tool_call_id": f"call{i:05}"} for i, it in enumerate(messages)]
        text = self._render([*asked, *answers], add_generation_prompt=True)
        turn = self._render(asked).rstrip()
        turn = turn.removesuffix(max(filter(turn.endswith, self._ends), key=len, default=""))
        return text.removeprefix(turn) if text.startswith(turn) else ""

    def _as_user(self, messages: Sequence[Message], made) -> str:
        return self._behind_text([{"role": "user", "content": plain_text(messages)}], made)

    def rewrites_turns(self) -> bool:
        """Returns whether the template changes earlier turns of a conversation, as Qwen3's does."""
        turn = {"role": "assistant", "content": f"<think>\nso\n</think>\n\n{ANSWER}"}
        prompt = self._render([QUESTION], add_generation_prompt=True).removesuffix(self._opening)
        more = {"role": "user", "content": "more"}
        return not self._render([QUESTION, turn, more]).startswith(prompt + turn["content"])
