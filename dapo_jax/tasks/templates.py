"""Texts around a problem that say where the answer goes."""

from dapo_jax.tasks.rows import DataError
from dapo_jax.types import Message

# The prompt of DAPO, section 4.1.
PROMPT_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    "{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
TEMPLATES = {
    "none": "{problem}",
    "dapo": PROMPT_TEMPLATE,
    "boxed": "{problem}\n\nReason step by step, and put your final answer within \\boxed{}.",
}


def template_text(template: str) -> str:
    """Returns the text of a name of TEMPLATES, or a custom text; DataError for another."""
    if template in TEMPLATES:
        return TEMPLATES[template]
    if "{problem}" not in template:
        raise DataError(
            f"template = {template!r}: must be one of {', '.join(TEMPLATES)}, or a text of your "
            "own that has {problem} where the problem goes."
        )
    return template


def problem_of(prompt: str) -> str:
    """A prompt without the words that DAPO's template puts around the problem."""
    before, after = PROMPT_TEMPLATE.split("{problem}")
    return prompt.removeprefix(before).removesuffix(after)


def templated(problem: str, template: str) -> tuple[Message, ...]:
    """Makes a user's message of a problem in plain text; template: as `template_text` reads it."""
    return ({"role": "user", "content": template_text(template).replace("{problem}", problem)},)
