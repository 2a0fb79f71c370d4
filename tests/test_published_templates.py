"""The chat templates that TRL ships, each with its own call and what a tool says to it.

Needs the wheel of trl, which `make test-all` puts beside the environment.
"""

import importlib
import json
import pathlib
import re
import sys
import types

import pytest
from byte_tokenizers import bpe, load, written
from test_environments import Shop

from dapo_jax.tasks.environments import Factory

PUBLISHED = pathlib.Path(sys.prefix) / "published"
TEMPLATES = PUBLISHED / "trl" / "chat_templates"
pytestmark = pytest.mark.slow

# What tools' calls and answers become, by the names of files: without and with the
# response_template that TRL gives the template ("-": it gives none).
READ, AS_USER, TOLD = "read", "a user's", "told of in prompts"
UNREAD, NO_PLACE = "refused: a call", "refused: an answer"
EXPECTED = {
    "cohere cohere2 gemma gemma3 phi3 phi3_5": (AS_USER, "-"),
    "llama3 qwen2_5_vl lfm2": (TOLD, "-"),
    "deepseek_r1_distill": (TOLD, TOLD),
    "qwen2_5 qwen3 qwen3_instruct_2507 qwen3_vl llama3_1 llama3_2": (READ, READ),
    "glm4moe gptoss gemma4 gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5": (UNREAD, READ),
    "lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl lfm2_v2": (UNREAD, READ),
    "nemotron_3_nano nemotron_3_super nemotron_3_ultra nemotron_3_5_lightning": (UNREAD, READ),
    "qwen3_5_nothink qwen3_5_think qwen3_6 qwen3_8": (UNREAD, READ),
    "deepseekv3 diffusion_gemma muse_glimmer": (UNREAD, "-"),
    "idefics3 llava_next smolvlm": (NO_PLACE, "-"),
}
CASES = [(name, of) for names, of in EXPECTED.items() for name in names.split()]
TOKEN = re.compile(
    r"<\|[^|<>]{1,40}\|>|<\|[a-z_]+>|<[a-z_]+\|>|<\uff5c[^\uff5c<>]{1,40}\uff5c>|<\w+_of_turn>"
)
ENDS = ("<|call|>", "<|tool_response>", "<|observation|>", "<|im_end|>", "<|eot_id|>", "<turn|>")


@pytest.fixture(scope="module")
def schema_of():
    """TRL's add_response_schema, from the one file that has it: the package imports torch."""
    if not TEMPLATES.is_dir():
        pytest.skip(f"needs the wheel of trl in {PUBLISHED} (make test-all)")
    for name, of in (("trl", {"__path__": [str(TEMPLATES.parent)]}), ("trl.data_utils", {})):
        module = types.ModuleType(name)
        vars(module).update({"prepare_multimodal_messages": None} | of)
        sys.modules[name] = module
    return importlib.import_module("trl.chat_template_utils").add_response_schema


def tokenizer_of(name, folder, schema_of):
    """A tokenizer of bytes and the template's own tokens; None where TRL reads no calls of it."""
    given = types.SimpleNamespace(chat_template=(TEMPLATES / f"{name}.jinja").read_text())
    config = {"bos_token": "<bos>", "eos_token": "<eos>"}
    if schema_of:
        try:
            config["response_template"] = schema_of(given).response_template
        except ValueError:
            return None
    special = ["<|endoftext|>", "<bos>", "<eos>"]
    special += sorted({*TOKEN.findall(given.chat_template)} - {*special})
    made = bpe(special=special)
    ends = [made.token_to_id(end) for end in ENDS if end in special]
    written(folder, given.chat_template, made, **config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return load(folder, chat="template")


def outcome(tokenizer):
    """What becomes of a call and of what the tool says; the tokens are those of the template."""
    if tokenizer is None:
        return "-"
    factory = Factory("x", Shop, 1.0)
    try:
        notes = tokenizer.check_turns(with_tools=True)
    except ValueError as error:
        return NO_PLACE if "no place" in str(error) else UNREAD
    call = {"name": "price", "arguments": {"thing": "a ripe plum"}}
    message = {"role": "tool", "name": "price", "content": "seventeen"}
    library, turns, asked = (
        tokenizer._tokenizer,
        tokenizer._turns,
        [{"role": "user", "content": "Buy."}],
    )
    made, how = turns._turn([call]), {"tools": factory.schemas, "tokenize": False}
    if turns.shows_tools and turns.written:
        whole = library.apply_chat_template([*asked, made], **how)
        prompt = library.apply_chat_template(asked, add_generation_prompt=True, **how)
        begun = next(it for it in (prompt, prompt.rstrip()) if whole.startswith(it))
        turn, ends = whole.removeprefix(begun), library.convert_ids_to_tokens(tokenizer.stop_ids)
        text, end = min(((turn.partition(it)[0], it) for it in ends), key=lambda it: len(it[0]))
        assert tokenizer.tool_calls(text, factory.schemas) == [call]
        end = "<|observation|>" if end not in turn else end
        between = tokenizer.between([message], library.convert_tokens_to_ids(end), call)
        answers = [*asked, made, message | {"tool_call_id": "call00000"}]
        expected = library.apply_chat_template(answers, add_generation_prompt=True, **how)
        if expected.startswith(begun + text):  # Qwen3 takes thoughts out of what lies behind
            assert begun + text + end + library.decode(between) == expected
        return READ
    end = tokenizer.stop_ids[0]
    said = library.decode(tokenizer.between([message], end, call))
    as_user = library.decode(tokenizer.between([{**message, "role": "user"}], end))
    assert said.count("seventeen") == 1 and notes
    return AS_USER if said == as_user else TOLD


@pytest.mark.parametrize(("name", "expected"), CASES, ids=[name for name, _ in CASES])
def test_a_published_template_has_its_calls_read_and_answered_or_is_refused(
    name, expected, schema_of, tmp_path
):
    for how, outcome_of in zip((None, schema_of), expected, strict=True):
        folder = tmp_path / f"{how is None}"
        assert outcome(tokenizer_of(name, folder, how)) == outcome_of


def test_all_templates_of_the_wheel_are_in_the_table(schema_of):
    names = {it.stem for it in TEMPLATES.glob("*.jinja") if "_training" not in it.stem}
    assert names == {name for name, _ in CASES}
