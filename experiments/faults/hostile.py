"""Hostile model directories, chat templates and files of rows, for experiments.faults.models.

Each damages a copy of a good directory in one way, and says what the refusal must say.
"""

import base64
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEEP = b"[" * 100_000
HUGE = 2**40  # bytes of a file without blocks on the disk


@dataclasses.dataclass(frozen=True)
class Case:
    """One hostile thing: `make(folder, rng)` damages a copy of a good directory.

    load: which of LOADS reads it. said: a pattern of the message; "" where the damage is harmless.
    """

    name: str
    load: str
    make: Callable[[pathlib.Path, random.Random], None]
    said: str = ""


# Making a directory hostile.


def put(name: str, content: bytes | str):
    """Replaces a file."""
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder, _: (folder / name).write_bytes(data)


def fresh(name: str, make: Callable[[pathlib.Path], object]):
    """Puts what `make` makes in a file's place."""

    def damage(folder, _):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


def sparse(file: pathlib.Path) -> None:
    """Makes a file of a terabyte that takes no disk."""
    with file.open("wb") as out:
        out.truncate(HUGE)


def link(target: str):
    """Makes a link."""
    return lambda file: file.symlink_to(target)


def moved(place: str):
    """Moves a file out of its directory and leaves a link to it."""

    def make(folder, _, name="model.safetensors"):
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        (folder / name).rename(target)
        (folder / name).symlink_to(place)

    return make


def edit(name: str, **changes):
    """Changes keys of a JSON file; `...` removes one."""

    def damage(folder, _):
        file = folder / name
        value = (json.loads(file.read_text()) if file.is_file() else {}) | changes
        file.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))

    return damage


def config(**changes):
    """Changes keys of config.json."""
    return edit("config.json", **changes)


def index(name: object, *, make: Callable[[pathlib.Path], object] | None = None):
    """Puts an index in the place of one file, which it says is `name`."""

    def damage(folder, _):
        weights = folder / "model.safetensors"
        names = list(header_of(weights)[0])
        for target in ("a.safetensors", "../outside.safetensors", "sub/a.safetensors"):
            (folder / target).parent.mkdir(exist_ok=True)
            shutil.copy(weights, folder / target)
        weights.unlink()
        if make:
            make(folder / name)
        text = json.dumps({"weight_map": dict.fromkeys(names, name)})
        (folder / "model.safetensors.index.json").write_text(text)

    return damage


def no_names(folder: pathlib.Path, _) -> None:
    """Puts an index in the place of the weights that has a list for its map."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')


def header_of(file: pathlib.Path) -> tuple[dict, bytes]:
    """Reads a safetensors file's header and data."""
    data = file.read_bytes()
    stop = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:stop])
    entries.pop("__metadata__", None)
    return entries, data[stop:]


def header(change: Callable[[dict], object]):
    """Changes a header: `change` has its entries, and may return a text in its place."""

    def damage(folder, _):
        file = folder / "model.safetensors"
        entries, data = header_of(file)
        text = change(entries)
        text = text if isinstance(text, bytes) else json.dumps(entries).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data)

    return damage


def first(entries: dict) -> dict:
    """Returns the entry of the tensor at the data's beginning."""
    return next(e for e in entries.values() if e["data_offsets"][0] == 0)


def twice(entries: dict) -> bytes:
    """Writes a header with its first name twice."""
    return (
        b"{"
        + json.dumps(dict([next(iter(entries.items()))])).encode()[1:-1]
        + (b", " + json.dumps(entries).encode()[1:])
    )


def length(number: int):
    """Changes the length of a header."""
    return lambda folder, _: overwrite(folder / "model.safetensors", number.to_bytes(8, "little"))


def overwrite(file: pathlib.Path, start: bytes) -> None:
    """Changes a file's first bytes."""
    file.write_bytes(start + file.read_bytes()[len(start) :])


def cut(name: str):
    """Cuts a file anywhere."""

    def damage(folder, rng):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: rng.randrange(len(data) - 1)])

    return damage


def tokenizer(change: Callable[[dict], object]):
    """Changes tokenizer.json."""

    def damage(folder, _):
        file = folder / "tokenizer.json"
        spec = json.loads(file.read_text())
        change(spec)
        file.write_text(json.dumps(spec))

    return damage


def piece_model(damage: Callable[[bytes], bytes]):
    """Puts a damaged sentencepiece model in the place of tokenizer.json."""
    source = ROOT / "experiments" / "tiny_base" / "checkpoint" / "tokenizer.model"

    def make(folder, _):
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.model").write_bytes(damage(source.read_bytes()))

    return make


def cache(blob: str):
    """Lays the directory out as Hugging Face's cache does: its files are links to `blob`."""

    def make(folder, _):
        snapshot = folder / "snapshots" / "main"
        snapshot.mkdir(parents=True)
        (folder / "blobs").mkdir()
        (folder / "private").mkdir()
        for file in [path for path in folder.iterdir() if path.is_file()]:
            file.rename(folder / blob / file.name)
            (snapshot / file.name).symlink_to(f"../../{blob}/{file.name}")

    return make


KINDS_OF_FILE = {
    "a pipe": (os.mkfifo, "is a pipe"),
    "/dev/zero": (link("/dev/zero"), "is a device"),
    "a directory": (pathlib.Path.mkdir, "is a directory"),
    "a link to itself": (lambda file: file.symlink_to(file.name), "cannot be read"),
    "a link to nothing": (link("nowhere"), "cannot be read"),
    "a link to /etc/passwd": (link("/etc/passwd"), "is a link to /etc/passwd"),
    "a terabyte": (sparse, r"bytes"),
}
FILES = {
    "config.json": "model",
    "model.safetensors": "model",
    "model.safetensors.index.json": "model",
    "tokenizer.json": "tokenizer",
    "tokenizer_config.json": "tokenizer",
    "generation_config.json": "template",
    "chat_template.jinja": "template",
}
JSON_TEXTS = {
    "empty": (b"", "is not JSON"),
    "100,000 brackets": (DEEP, "nested too deeply"),
    "100,000 objects": (b'{"a":' * 100_000, "nested too deeply"),
    "a list": (b"[1]", "JSON list"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "is not JSON"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "BOM"),
    "5,000 digits": (b'{"a": ' + b"9" * 5_000 + b"}", "digits"),
}
CONFIGS = (
    ("2^62 layers", config(num_hidden_layers=2**62), "num_hidden_layers is 46116.*no model"),
    ("2^62 columns", config(hidden_size=2**62), "hidden_size is 46116.*no model"),
    ("10^4000 rows", config(vocab_size=10**4000), "vocab_size is 1000.*no model"),
    (
        "the largest sizes",
        config(num_hidden_layers=1024, hidden_size=2**18, vocab_size=2**24),
        "tensors do not fit",
    ),
    ("a size as text", config(hidden_size="16"), "hidden_size is '16'"),
    ("a size of true", config(num_hidden_layers=True), "num_hidden_layers is True"),
    ("a size of 2.0", config(num_hidden_layers=2.0), "num_hidden_layers is 2.0"),
    ("a size below zero", config(num_hidden_layers=-2), "num_hidden_layers is -2"),
    ("NaN", config(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
    ("infinity", config(rope_theta=float("inf")), "rope_theta is inf"),
    ("a list for a text", config(model_type=["qwen2"]), "model_type is \\['qwen2'\\]"),
    ("positions as text", config(max_position_embeddings="many"), "max_position_embeddings is"),
    ("layer_types of objects", config(layer_types=[{}]), "layer_types is"),
    ("a sliding window", config(use_sliding_window=True), "use_sliding_window is True"),
    ("rope_scaling without a type", config(rope_scaling={"factor": 4.0}), "rope_scaling is"),
    (
        "two kinds of RoPE",
        config(
            rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
            rope_scaling={"rope_type": "yarn", "factor": 4.0},
        ),
        "rope_scaling is .*yarn",
    ),
    (
        "two bases of RoPE",
        config(rope_parameters={"rope_theta": 5e5}),
        "rope_parameters.rope_theta is 500000.0, but must be rope_theta",
    ),
    ("RoPE as a list", config(rope_scaling=["yarn"]), "rope_scaling is"),
    ("a RoPE of type 5", config(rope_scaling={"rope_type": 5}), "rope_scaling is"),
    ("partial RoPE", config(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    ("quantised", config(quantization_config={"bits": 4}), "quantization_config is"),
    ("experts", config(num_experts=8), "num_experts is 8"),
    ("its own code", config(auto_map={"AutoModelForCausalLM": "x.Y"}), "auto_map is"),
    ("another head", config(architectures=["Qwen2ForTokenClassification"]), "architectures is"),
)
INDEXES = (
    ("a path upwards", index("../outside.safetensors"), "of its own directory"),
    ("an absolute path", index("/etc/passwd"), "of its own directory"),
    ("a path into a folder", index("sub/a.safetensors"), "of its own directory"),
    ("its parent", index(".."), "no file's name"),
    ("a number", index(5), "no file's name"),
    ("a name with a zero byte", index("a\0b"), "no file's name"),
    ("a pipe", index("b", make=os.mkfifo), "is a pipe"),
    ("a device", index("b", make=link("/dev/zero")), "is a device"),
    ("a link upwards", index("b", make=link("../outside.safetensors")), "outside its directory"),
    ("a list", no_names, "weight_map is \\['a'\\]"),
)
HEADERS = (
    ("2^63 bytes", length(2**63), "header is cut off"),
    ("2^62 bytes below", length(2**64 - 1), "header is cut off"),
    ("no bytes", length(0), "no whole safetensors file"),
    ("no JSON", header(lambda e: b"\xff" * 64), "no whole safetensors file"),
    ("a list", header(lambda e: b"[]"), "no JSON object"),
    ("100,000 brackets", header(lambda e: DEEP), "nested too deeply"),
    ("a name twice", header(twice), "a name twice"),
    ("an entry that is a number", header(lambda e: e.update(a=5)), "a is 5 in its header"),
    ("no offsets", header(lambda e: first(e).pop("data_offsets")), "data_offsets None"),
    ("overlapping", header(lambda e: e.update(a=first(e))), "begins at byte 0"),
    ("out of the file", header(lambda e: first(e)["data_offsets"].__setitem__(1, 2**62)), "bytes"),
    ("below zero", header(lambda e: first(e).update(data_offsets=[-8, 0])), r"\[-8, 0\]"),
    ("offsets as text", header(lambda e: first(e).update(data_offsets=["0", "8"])), "'0', '8'"),
    ("2^62 rows", header(lambda e: first(e).update(shape=[2**62, 8])), "not "),
    ("2^62 rows of nothing", header(lambda e: e.update(first(e) and {
        "a": {"dtype": "F32", "shape": [2**62, 0], "data_offsets": [0, 0]}})), "unexpected: a"),
    ("rows below zero", header(lambda e: first(e).update(shape=[-4, -4])), r"\[-4, -4\]"),
    ("rows as text", header(lambda e: first(e).update(shape=["4"])), "shape"),
    ("rows of true", header(lambda e: first(e).update(shape=[True])), "shape"),
    ("1,000 axes", header(lambda e: first(e).update(shape=[1] * 1000)), "shape"),
    ("integers", header(lambda e: first(e).update(dtype="I8")), "wrong dtype"),
    ("a number for a dtype", header(lambda e: first(e).update(dtype=32)), "dtype 32"),
    ("a name that rings", header(lambda e: e.update({"\x1b[2J\x07\n": e.pop(next(iter(e)))})),
        r"unexpected: '\\x1b"),
    ("10,000 names", header(lambda e: e.update({f"a{i}": {
        "dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(10_000)})),
        "10000 tensors do not fit.* and 9992 more"),
    ("cut", cut("model.safetensors"), "no whole safetensors file"),
)  # fmt: skip
TOKENIZERS = (
    ("a map of 4 GiB", tokenizer(lambda spec: spec.update(normalizer={
        "type": "Precompiled",
        "precompiled_charsmap": base64.b64encode(b"\0\0\0\xff").decode()})), "charsmap is cut off"),
    ("no unknown token", tokenizer(lambda spec: spec.update(model={
        "type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"})), "cannot encode"),
    ("nothing replaced", tokenizer(lambda spec: spec.update(normalizer={
        "type": "Replace", "pattern": {"String": ""}, "content": "x"})), "cannot encode"),
    ("a pattern that never ends", tokenizer(lambda spec: spec.update(pre_tokenizer={
        "type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated",
        "invert": False})), "cannot encode"),
    ("100,000 brackets", put("tokenizer.json", DEEP), "nested too deeply"),
    ("UTF-16", put("tokenizer.json", "{}".encode("utf-16")), "is not a tokenizer"),
    ("a list", put("tokenizer.json", "[]"), "is not a tokenizer"),
    ("an id of 10^12", tokenizer(lambda spec: spec["added_tokens"][0].update(id=10**12)),
        "is not a tokenizer"),
    ("an eos_token of 5", edit("tokenizer_config.json", eos_token=5), "eos_token is 5"),
    ("a pad_token of {}", edit("tokenizer_config.json", pad_token={"content": 1}), "pad_token is"),
    ("a cut sentencepiece model", piece_model(lambda data: data[:1000]), "is not a sentencepiece"),
    ("an empty sentencepiece model", piece_model(lambda data: b""), "sentencepiece|end-of-seq"),
    ("no sentencepiece model", piece_model(lambda data: DEEP), "is not a sentencepiece"),
)  # fmt: skip
GROWING = "{% set n = namespace(s='aaaaaaaaaa') %}"
TEMPLATES = (
    ("does not compile", "{% if %}", "is broken"),
    ("2,000 brackets", "{{ " + "(" * 2000 + ")" * 2000 + " }}", "is broken|ended its process"),
    ("divides by zero", "{{ 1 / 0 }}", "division by zero"),
    ("reads what is not there", "{{ messages[9].content.x }}", "refuses a prompt"),
    ("calls itself", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
    ("repeats itself", "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "nested|takes"),
    ("multiplies a text", "{{ 'a' * 10**10 }}", "needs more than|ended its process"),
    ("multiplies a list", "{{ ([0] * 10**10) | length }}", "needs more than|ended its process"),
    ("multiplies output", "{{ 'a' * 10**8 }}", "characters|needs more|ended"),
    ("centres a text", "{{ 'a' | center(10**10) }}", "needs more than|ended its process"),
    ("formats a text", "{{ '%09999999999d' | format(1) }}", "refuses|ended its process"),
    ("doubles a text", GROWING + "{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
        "{{ n.s }}", "needs more than|ended its process"),
    ("replaces in turn", "{{ ('a' * 100000).replace('a', 'a' * 100000) }}", "needs more|ended"),
    ("includes a file", "{% include '/etc/passwd' %}", "refuses a prompt"),
    ("imports", "{% import 'os' as os %}", "refuses a prompt"),
    ("looks at a class", "{{ messages.__class__.__mro__ }}", "unsafe"),
    ("looks at globals", "{{ raise_exception.__globals__.x }}", "unsafe"),
    ("formats attributes", "{{ '{0.__class__.__mro__}'.format(messages) }}", "unsafe|refuses"),
    ("takes 10^6 numbers", "{{ range(1000000) | list }}", "Range too big"),
    ("says much", "{{ raise_exception('x\n' * 10**6) }}", "refuses a prompt"),
    ("is a list", None, "has no chat template"),
    ("loops in loops", "{% for a in range(100000) %}{% for b in range(100000) %}"
        "{% endfor %}{% endfor %}", "takes more than"),
    ("takes a power", "{{ 9 ** (9 ** 9) }}", "takes more than"),
)  # fmt: skip
SLOW_TEMPLATES = 2  # the last ones take all their seconds
ROWS = (
    ("deep.jsonl", DEEP, "nested too deeply"),
    ("deep.json", DEEP, "nested too deeply"),
    ("zeros.jsonl", b"\0" * 1000, "invalid JSON"),
    ("utf16.jsonl", '{"prompt": "a", "answer": "1"}'.encode("utf-16"), "decode|UTF-8"),
    ("latin.csv", "prompt,answer\n\xe9,1\n".encode("latin1"), "no readable CSV"),
    ("utf16.csv", "prompt,answer\na,1\n".encode("utf-16"), "no readable CSV"),
    ("line.jsonl", b'{"prompt": "' + b"a" * 2**24, "invalid JSON"),
    ("line.csv", b"prompt,answer\n" + b"a" * 2**24, "field larger"),
    ("quote.csv", b'prompt,answer\n"a,1\n', "no readable CSV"),
    ("number.json", b"5", "is a int"),
    ("digits.jsonl", b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}", "digits"),
    ("infinite.jsonl", b'{"prompt": "a", "answer": 1e999}', "answer is inf"),
    ("half.jsonl", b'{"prompt": "\\ud800", "answer": "1"}', "not valid Unicode"),
    ("keys.jsonl", json.dumps({f"k{i}": i for i in range(10**5)}).encode(), "'prompt' is missing"),
    ("text.parquet", b"PAR1" + b"\0" * 100 + b"PAR1", "not a readable parquet"),
    ("empty.parquet", b"", "not a readable parquet"),
)
HARMLESS = (
    ("nothing", "model", lambda folder, _: None),
    ("keys that mean nothing here", "model", config(unsloth_version="1", x=[{}], is_causal=None)),
    ("RoPE in three places", "model", config(
        rope_scaling=None, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})),
    ("RoPE by its older name", "model", config(rope_scaling={"type": "default"})),
    ("a key twice", "model", lambda folder, _: (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace("{", '{"vocab_size": 5,', 1))),
    ("a link inside", "model", moved("inside/model.safetensors")),
    ("an index", "model", index("a.safetensors")),
    ("Hugging Face's cache", "cache", cache("blobs")),
)  # fmt: skip


def cases() -> tuple[list[Case], list[Case], list[Case]]:
    """Lists the directories, the templates and the texts of rows, each that is hostile once."""
    folders = [Case(f"directory: {name}", load, make) for name, load, make in HARMLESS]
    away = moved("../away/model.safetensors")
    folders.append(Case("weights: a link upwards", "model", away, "is a link to"))
    folders.append(Case("cache: a link out of it", "cache", cache("private"), "is a link to"))
    for file, load in FILES.items():
        for name, (make, said) in KINDS_OF_FILE.items():
            said = f"{re.escape(file)}.*{said}"
            if file == "model.safetensors.index.json":
                folders.append(Case(f"{file}: {name}", load, without_weights(file, make), said))
            else:
                folders.append(Case(f"{file}: {name}", load, fresh(file, make), said))
    for file in ("config.json", "tokenizer_config.json"):
        for name, (content, said) in JSON_TEXTS.items():
            said = f"{re.escape(file)}.*{said}"
            folders.append(Case(f"{file}: {name}", FILES[file], put(file, content), said))
    for file, load, group in (
        ("config.json", "model", CONFIGS),
        ("index", "model", INDEXES),
        ("header", "model", HEADERS),
        ("tokenizer", "tokenizer", TOKENIZERS),
    ):
        folders += [Case(f"{file}: {name}", load, make, said) for name, make, said in group]
    for ids in ("x", [10**9], [True], {"a": 1}):
        make = edit("generation_config.json", eos_token_id=ids)
        said = r"generation_config.json: eos_token_id is"
        folders.append(Case(f"generation_config.json: {ids}", "template", make, said))
    templates = []
    for name, text, said in TEMPLATES:
        make = edit("tokenizer_config.json", chat_template=text or [])
        templates.append(Case(f"template: {name}", "template", make, said))
    rows = [Case(f"rows: {file}", "rows", put(file, content), said) for file, content, said in ROWS]
    return folders, templates, rows


def without_weights(file: str, make: Callable[[pathlib.Path], object]):
    """Puts what `make` makes in the index's place, beside no weights in one file."""

    def damage(folder, _):
        (folder / "model.safetensors").unlink()
        make(folder / file)

    return damage


def damaged_parquet(folder: pathlib.Path, rng: random.Random) -> None:
    """Damages a parquet file: bits, bytes, a stretch of zeros, a cut, or bytes of its footer."""
    good = folder.parent.parent / "rows" / "good.parquet"
    data = bytearray(good.read_bytes())
    kind, place = rng.choice(("bit", "bytes", "zeros", "cut", "footer")), rng.randrange(len(data))
    if kind == "bit":
        data[place] ^= 1 << rng.randrange(8)
    elif kind == "bytes":
        for _ in range(rng.randrange(2, 20)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == "zeros":
        data[place : place + 64] = bytes(len(data[place : place + 64]))
    elif kind == "cut":
        del data[place:]
    else:
        footer = int.from_bytes(data[-8:-4], "little")
        data[len(data) - 8 - rng.randrange(1, footer + 1)] = rng.randrange(256)
    (folder / "damaged.parquet").write_bytes(data)
