"""Tool calls as JSON in a turn's text, the forms of models without a response_template."""

import json
import re
from collections.abc import Mapping, Sequence

Call = Mapping | str  # {"name", "arguments"}, or what is wrong with one

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
TAGGED = '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'


def said(text: str, begun: str = "") -> str:
    """Returns what a turn says behind its thoughts; begun: what the prompt has of it."""
    text = (begun + text).rpartition("</think>")[2]
    return text.partition("<think>")[0]


def tagged(text: str) -> list[Call]:
    """Reads the calls of Qwen, Hermes and SmolLM: JSON in <tool_call>, one or a list."""
    calls: list[Call] = []
    for block in _TAGGED.findall(text):
        try:
            value = json.loads(block)
        except (ValueError, RecursionError) as error:
            calls.append(f"the call is no JSON: {error}")
            continue
        calls += [_call(it) for it in (value if isinstance(value, list) else [value])]
    return calls


def bare(text: str) -> list[Call]:
    """Reads the call of Llama 3: the turn is the JSON, its arguments may be "parameters"."""
    try:
        value = json.loads(text.strip().removeprefix("<|python_tag|>"))
    except (ValueError, RecursionError):
        return []
    is_call = isinstance(value, dict) and "name" in value
    return [_call(value)] if is_call and {"arguments", "parameters"} & value.keys() else []


def either(text: str) -> Sequence[Call]:
    """Reads both forms, where no template says which one."""
    return tagged(text) or bare(text)


def _call(value: object) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return 'a call has to be {"name": ..., "arguments": {...}}'
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return f"the arguments of {value['name']} have to be an object"
    return {"name": value["name"], "arguments": arguments}
