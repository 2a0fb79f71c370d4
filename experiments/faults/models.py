"""Hostile model directories, chat templates and files of rows: refused in one line, or harmless.

Each is made and loaded in a child process, which is stopped where it takes too long; more memory
than a refusal needs counts as lost. What loads must be what undamaged files give.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import random
import re
import resource
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from experiments.faults.hostile import SLOW_TEMPLATES, Case, cases, damaged_parquet
from experiments.faults.parts import Outcome, Part

DEADLINE_SECONDS = 60.0  # of the clock, on a machine that is busy; START_SECONDS are 5 of them
MEMORY_BYTES = 512 * 2**20
MAX_TEXT = 3000
ROOT = pathlib.Path(__file__).resolve().parents[2]
# One child for all: a fault takes milliseconds, and a fresh process seconds.
CHILD = "from experiments.faults.models import serve; serve()"
OF_FOLDER = ("model", "tokenizer", "template")
SHORT_SHARE = (22, 2, 2)  # of a short run: directories, templates and texts; the rest is parquet


def chosen(count: int, seed: int) -> list[Case]:
    """Chooses so many cases: all there are, then parquet; a share of each where they are few."""
    folders, templates, rows = cases()
    if count < len(folders) + len(templates) + len(rows):
        rng = random.Random(seed)
        groups = (folders, templates[:-SLOW_TEMPLATES], rows)
        some = [rng.sample(g, n) for g, n in zip(groups, SHORT_SHARE, strict=True)]
        folders, templates, rows = some
    found = [*folders, *templates, *rows]
    parquet = Case("rows: parquet", "rows", damaged_parquet, "damaged.parquet")
    return (found + [parquet] * max(0, count - len(found)))[:count]


# In the child.


def serve() -> None:
    """Makes and loads the cases whose numbers come line by line; answers each with a line."""
    root, count, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if not (root / "good").exists():
        make_good(root)
    readers, every = loads(), chosen(count, seed)
    good = {name: read(root / "good") for name, read in readers.items() if name in OF_FOLDER}
    good |= {"cache": good["model"], "rows": readers["rows"](root / "rows")}
    size = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 4 * MEMORY_BYTES, resource.RLIM_INFINITY))
    for line in sys.stdin:
        number = int(line)
        case, folder = every[number], root / "cases" / str(number)
        if case.load == "rows":
            folder.mkdir(parents=True)
        else:
            shutil.copytree(root / "good", folder)
        case.make(folder, random.Random(f"{seed}/{number}"))
        answer = tried(readers[case.load], folder, good[case.load])
        shutil.rmtree(folder)
        print(json.dumps(answer), flush=True)


def loads() -> dict[str, Callable[[pathlib.Path], str]]:
    """Gives what reads a directory, and makes a digest of what it read, by name."""
    import jax
    import numpy as np

    from dapo_jax.tasks.readers import read
    from dapo_jax.tasks.tokenizer import load_tokenizer
    from models.hf import check_files, load_params
    from models.hf_config import load_config

    def model(folder):
        sizes = load_config(folder)
        check_files(folder, sizes)
        params = load_params(folder, sizes, dtype="float32")
        return digest(sizes, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)])

    def tokenizer(folder, chat="none"):
        loaded = load_tokenizer(folder, stop_tokens=None, chat=chat)
        messages = [{"role": "user", "content": "What is 1 + 2?\nAnswer:" + "a" * 40}]
        ids = loaded.encode_chat(messages)
        return digest(loaded.vocab_size, loaded.stop_ids, loaded.pad_id, ids, loaded.decode(ids))

    def rows(folder):
        (file,) = folder.iterdir()
        examples, _ = read(str(file))
        return digest([(example.prompt, example.answer, example.row) for example in examples])

    return {
        "model": model,
        "cache": lambda folder: model(folder / "snapshots" / "main"),
        "tokenizer": tokenizer,
        "template": lambda folder: tokenizer(folder, chat="template"),
        "rows": rows,
    }


def digest(*values: object) -> str:
    """Makes a digest of values by how Python writes them."""
    return hashlib.sha256(repr(values).encode()).hexdigest()


def make_good(root: pathlib.Path) -> None:
    """Writes good/ (a model with its tokenizer) and rows/good.parquet, for damaging."""
    import jax
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import tokenizers

    from models.hf import save_hf
    from models.qwen2 import Qwen2Config
    from models.transformer import abstract_params

    sizes = Qwen2Config(260, 16, 24, 2, 2, 1, 8, True)
    rng, (_, abstract) = np.random.default_rng(0), abstract_params(sizes)
    folder = root / "good"
    save_hf(jax.tree.map(lambda a: rng.normal(size=a.shape), abstract), sizes, folder)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: id for id, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}{% endfor %}"
    content = {"chat_template": template, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    rows = [
        {"prompt": f"{i} + {i % 7}?", "reward_model": {"ground_truth": str(i)}} for i in range(60)
    ]
    file = root / "rows" / "good.parquet"
    file.parent.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=20, write_page_checksum=True)


def tried(load: Callable[[pathlib.Path], str], folder: pathlib.Path, good: str) -> dict:
    """Loads a directory; says what became of it, with how many bytes of memory."""
    from dapo_jax.run.failures import raised_by_us

    before = peak_bytes()
    try:
        became, text = ("same" if load(folder) == good else "changed"), ""
    except (ValueError, OSError) as error:
        became, text = ("refused" if raised_by_us(error) else "raised"), str(error)
    except BaseException as error:
        became, text = "raised", repr(error)
    return {"became": became, "text": text[:MAX_TEXT], "bytes": peak_bytes() - before}


def peak_bytes() -> int:
    """Gives the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# In the parent.


class Child:
    """A process that makes and loads cases, and is ended where one takes too long."""

    def __init__(self, *arguments: object):
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )

    def ask(self, number: int) -> dict | None:
        """Asks for a case; None where the process died of it, or was too late and is killed."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{number}\n".encode())
            self._process.stdin.flush()
        in_time, *_ = select.select([self._process.stdout], [], [], DEADLINE_SECONDS)
        if in_time and (line := self._process.stdout.readline()):
            return json.loads(line)
        self.end()
        return None

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def inject(count: int, seed: int, folder: pathlib.Path) -> Iterator[Outcome]:
    """Has a child make and load the cases one by one."""
    every, child = chosen(count, seed), Child(folder, count, seed)
    for number, case in enumerate(every):
        began = time.monotonic()
        answer = child.ask(number)
        if answer is None:
            seconds = time.monotonic() - began
            yield Outcome(case.name, False, False, f"the process ended after {seconds:.0f} s")
            child = Child(folder, count, seed)
        else:
            yield outcome_of(case, answer)
    child.end()


def outcome_of(case: Case, answer: dict) -> Outcome:
    """Judges a child's answer: refused in one line that says why, or loaded as if undamaged."""
    became, text, lost = answer["became"], answer["text"], ""
    allowed = ("refused",) if case.said else ("same",)
    if case.make is damaged_parquet:
        allowed = ("refused", "same")
    if became not in allowed:
        lost = f"{became}: {text[:200]}"
    elif answer["bytes"] > MEMORY_BYTES:
        lost = f"{answer['bytes'] >> 20} MiB of memory"
    said = None
    if became == "refused":
        said = "\n" not in text and len(text) < MAX_TEXT and bool(re.search(case.said, text))
        lost = lost or ("" if said else f"says: {text[:200]}")
    return Outcome(case.name, not lost, said, lost)


PART = Part("hostile models, templates and data files", 400, 30, inject)
