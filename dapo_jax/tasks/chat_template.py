"""Chat templates: programs from a model's directory, run in a process that cannot hang this one.

Jinja's sandbox keeps a template from the machine, but not from its time and memory: loops in loops
take forever, and `'a' * 10**10` takes all there is. The process of a template is limited in both.
Its process imports this module: a light one.
"""

import contextlib
import json
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.sandbox

from dapo_jax.tasks import interpreter

MEMORY_BYTES = 1 << 30
# Of the processor, and so not of the clock: a busy or suspended machine ends no template.
START_SECONDS = 5
PROMPTS_PER_SECOND = 100
# What a template may add to a prompt, and how many times it may repeat it.
MAX_ADDED_CHARS, MAX_REPEATS = 2**20, 8
MAX_ERROR_CHARS = 200


class ChatTemplate:
    """Renders messages by a chat template, in a process of its own.

    source: the template's text. place: where it is from, for messages. The process ends with this
    object or this process.

    Raises ValueError for a template that is broken, that refuses a prompt, that needs more than
    `seconds` and another one for each PROMPTS_PER_SECOND prompts, or MEMORY_BYTES, or that writes
    more than MAX_ADDED_CHARS beside MAX_REPEATS times the prompt.
    """

    def __init__(self, source: str, place: str, *, seconds: int = START_SECONDS):
        self._place, self._seconds = place, seconds
        self._process = subprocess.Popen(
            interpreter.command(__name__, seconds),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process
        )
        weakref.finalize(self, _end, self._process)
        self._ask({"source": source}, "is broken")

    def render(self, messages: Sequence[Mapping[str, str]], tokens: Mapping[str, str]) -> str:
        """Renders a prompt for the model's answer; tokens: texts of control tokens, by name."""
        roles = [message["role"] for message in messages]
        request = {"messages": [dict(message) for message in messages], **tokens}
        return self._ask(request, f"refuses a prompt of roles {roles}")

    def _ask(self, request: Mapping[str, object], refusal: str) -> str:
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        if not reply:
            raise ValueError(
                f"The chat template of {self._place} {self._how_it_ended()}: mend it, or set "
                'tokenizer.chat="none".'
            )
        reply = json.loads(reply)
        if "error" in reply:
            raise ValueError(
                f"The chat template of {self._place} {refusal}: {reply['error']} (tokenizer.chat)."
            )
        return reply["text"]

    def _how_it_ended(self) -> str:
        status = self._process.wait()
        if status == -signal.SIGXCPU:
            return f"takes more than {self._seconds} s"
        return f"ended its process (status {status}; it may have {MEMORY_BYTES >> 20} MiB)"


def _end(process: subprocess.Popen) -> None:
    """Ends a worker, which may be in the middle of a template."""
    process.kill()
    process.wait()
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):  # of a request that it did not take
        process.stdin.close()


def serve(start_seconds: int) -> None:
    """Runs in the worker: compiles the template of the first line, renders each one after it."""
    interpreter.ends_at(signal.SIGXCPU)
    with contextlib.suppress(ValueError, OSError):  # not every system limits memory
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    given = () if hard == resource.RLIM_INFINITY else (hard,)
    template = None
    for rendered, line in enumerate(sys.stdin.buffer):
        seconds = start_seconds + rendered // PROMPTS_PER_SECOND
        resource.setrlimit(resource.RLIMIT_CPU, (min([seconds, *given]), hard))
        request = json.loads(line)
        try:
            if template is None:
                template, text = _compiled(request["source"]), ""
            else:
                text = template.render(add_generation_prompt=True, **request)
            most = MAX_ADDED_CHARS + MAX_REPEATS * len(line)
            if len(text) > most:
                raise ValueError(f"it writes {len(text):,} characters; {most:,} are allowed")
            reply = {"text": text}
        except MemoryError:
            reply = {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB"}
        except RecursionError:
            reply = {"error": "it is nested too deeply"}
        except Exception as error:  # a template can raise anything
            reply = {"error": " ".join(str(error)[:MAX_ERROR_CHARS].split())}
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


def _compiled(source: str) -> jinja2.Template:
    """Compiles a template in the environment that transformers documents for templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)
