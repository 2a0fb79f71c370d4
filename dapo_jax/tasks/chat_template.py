"""Chat templates: programs from a model's directory, which run in a limited process.

Jinja's sandbox keeps a template from the machine, but not from its time and memory: loops in loops
take forever, and `'a' * 10**10` takes all there is. The process imports this module: a light one.
"""

import json
from collections.abc import Callable, Mapping, Sequence

import jinja2
import jinja2.sandbox

from dapo_jax.tasks import isolated

# Of the processor, and so not of the clock: a busy or suspended machine ends no template.
START_SECONDS, SECONDS_PER_PROMPT = 5.0, 0.01
# Characters that a template may add to a prompt, and times that it may repeat the prompt.
MAX_ADDED_CHARS, MAX_REPEATS = 2**20, 8
MAX_ERROR_CHARS = 200


class ChatTemplate:
    """Renders messages by a chat template, in a process of its own.

    source: the template's text. place: its directory, for messages.

    Raises ValueError for a template that is broken, that refuses a prompt, that needs more memory
    than isolated.MEMORY_BYTES or more CPU time than `seconds` and SECONDS_PER_PROMPT for each
    prompt, or that writes more than MAX_ADDED_CHARS beside MAX_REPEATS times the prompt.
    """

    def __init__(self, source: str, place: str, *, seconds: float = START_SECONDS):
        self._place, self._seconds = place, seconds
        self._worker = isolated.Worker(f"{__name__}:renderer", forks=False)
        self._ask({"source": source}, "is broken", seconds)

    def render(self, messages: Sequence[Mapping[str, str]], tokens: Mapping[str, str]) -> str:
        """Renders a prompt for the model's answer; tokens: texts of control tokens, by name."""
        roles = [message["role"] for message in messages]
        request = {"messages": [dict(message) for message in messages], **tokens}
        return self._ask(request, f"refuses a prompt of roles {roles}", SECONDS_PER_PROMPT)

    def _ask(self, request: Mapping[str, object], refusal: str, cpu_seconds: float) -> str:
        status, answer = self._worker.ask(json.dumps(request).encode(), cpu_seconds)
        if status in ("timeout", "killed"):
            late = f"takes more than {self._seconds:g} s"
            ended = f"ended its process ({self._worker.failure})"
            raise ValueError(
                f"The chat template of {self._place} {late if status == 'timeout' else ended}: "
                'mend it, or set tokenizer.chat="none".'
            )
        full = {"error": f"it needs more than {isolated.MEMORY_BYTES >> 20} MiB"}
        reply = full if status == "memory" else json.loads(answer)
        if "error" in reply:
            raise ValueError(
                f"The chat template of {self._place} {refusal}: {reply['error']} (tokenizer.chat)."
            )
        return reply["text"]


def renderer() -> Callable[[bytes], Callable[[], bytes]]:
    """Returns a function that compiles its first request and renders each later one."""
    templates = []

    def rendered(request: bytes) -> str:
        given = json.loads(request)
        if not templates:
            templates.append(_compiled(given["source"]))
            return ""
        text = templates[0].render(add_generation_prompt=True, **given)
        most = MAX_ADDED_CHARS + MAX_REPEATS * len(request)
        if len(text) > most:
            raise ValueError(f"it writes {len(text):,} characters; {most:,} are allowed")
        return text

    def reply(request: bytes) -> bytes:
        try:
            answer = {"text": rendered(request)}
        except MemoryError:
            raise
        except RecursionError:
            answer = {"error": "it is nested too deeply"}
        except Exception as error:  # a template can raise anything
            answer = {"error": " ".join(str(error)[:MAX_ERROR_CHARS].split())}
        return json.dumps(answer).encode()

    return lambda request: lambda: reply(request)


def _compiled(source: str) -> jinja2.Template:
    """Compiles a template in the environment that transformers documents for templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)
