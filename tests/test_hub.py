"""Names on the Hugging Face hub, against a server here that answers as it does."""

import json
import pathlib
import re
import shutil

import hub_server
import pytest
from huggingface_hub import constants
from processes import ROOT
from small_config import small

from dapo_jax import hub
from dapo_jax.checkpoints import fingerprint
from dapo_jax.evaluation import settings_of
from dapo_jax.process import failures
from dapo_jax.setup import components, dry_run

CHECKPOINT = ROOT / "experiments/tiny_base/checkpoint"
MODEL = {file.name: file.read_bytes() for file in CHECKPOINT.iterdir()}
PAIRS = [(a, b) for a in range(10, 30) for b in range(10, 20)]
ROWS = [json.dumps({"prompt": f"{a} + {b}", "answer": f"{a + b}"}) for a, b in PAIRS]
ROWS = "".join(f"{row}\n" for row in ROWS).encode()
TRAIN, HELD_OUT = (f"hf://datasets/someone/sums/data/{name}.jsonl" for name in ("train", "test"))


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A hub with a model and a data set, a cache that is empty, and no token."""
    with hub_server.serving() as it:
        others = {"README.md": b"#", "pytorch_model.bin": b"0" * 9, "tiny.gguf": b"0" * 9}
        it.commit("someone/tiny", MODEL | others | {"original/model.safetensors": b"0" * 9})
        files = dict.fromkeys(("data/train.jsonl", "data/test.jsonl"), ROWS)
        it.commit("someone/sums", files, kind="dataset")
        home, template = tmp_path / "home", it.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.delenv("HF_TOKEN", raising=False)
        for name, value in {  # what the library made of the environment when it was imported
            **{"ENDPOINT": it.url, "HUGGINGFACE_CO_URL_TEMPLATE": template},
            **{"HF_HUB_CACHE": str(home / "hub"), "HF_TOKEN_PATH": str(home / "token")},
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(hub, "_fetched", {})
        yield it


def fetched(path: str, key: str = "model.path") -> pathlib.Path:
    hub.fetch({key: path})
    return pathlib.Path(hub.local(path))


def test_a_model_is_downloaded_once_and_its_needed_files_alone(served, capsys):
    folder = fetched("someone/tiny")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == MODEL
    assert {path.rpartition("/")[2] for path in served.downloads()} == set(MODEL)
    assert "model.path = 'someone/tiny': downloading 2.0 MiB" in capsys.readouterr().err
    served.asked.clear()
    assert fetched("hf://someone/tiny") == folder
    assert not served.downloads() and capsys.readouterr().err == ""


def test_a_tokenizer_and_a_file_come_alone_and_at_their_revision(served):
    old, branch = {"data/train.jsonl": ROWS[: ROWS.index(b"\n") + 1]}, "v1"
    commit = served.commit("someone/sums", old, kind="dataset", branch=branch)
    for revision in (branch, commit):
        path = f"hf://datasets/someone/sums@{revision}/data/train.jsonl"
        assert fetched(path, "data.mixture.old.path").read_bytes() == old["data/train.jsonl"]
    assert fetched(TRAIN, "data.train.path").read_bytes() == ROWS
    folder = fetched("someone/tiny", "tokenizer.path")
    assert {file.name for file in folder.iterdir()} == set(MODEL) - {"model.safetensors"}


def test_an_adapter_names_its_base_as_peft_does(served, monkeypatch, tmp_path):
    """PEFT took hf://ORG/NAME@REVISION for a repository, and could not find it."""
    for name, revision in (("someone/tiny", None), ("hf://someone/tiny@main", "main")):
        fetched(name)
        assert hub.named(name) == ("someone/tiny", revision)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(CHECKPOINT, "someone/tiny")
    fetched("someone/tiny")
    assert hub.named("someone/tiny") == ("someone/tiny", None)
    assert hub.named("/a/b@c") == ("/a/b@c", None)


def test_a_directory_of_that_name_wins(served, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(CHECKPOINT, "someone/tiny")
    assert fetched("someone/tiny") == pathlib.Path("someone/tiny")
    for path in ("gs://bucket/tiny", "/none/tiny", "none", "a/b/c", "./tiny", "../tiny", ""):
        assert str(fetched(path)) == str(pathlib.Path(path))
    assert not served.asked


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("models/foo", "there is no such path here, and URL/models/foo .*NotFound.*HF_TOKEN"),
        ("hf://someone/tiny@v9", "URL/someone/tiny .*RevisionNotFound.*mend .* the revision"),
        ("someone/gated", "URL/someone/gated .*GatedRepo.*HF_TOKEN to a token that may read"),
        ("hf://someone", r"must be hf://ORG/NAME\[@REVISION\]"),
        ("someone/bin", r"URL/someone/bin, or offline the cache, has no model\*.safetensors"),
        (f"{TRAIN}l", "URL/datasets/someone/sums, or offline the cache, has no data/train.jsonll"),
        ("hf://someone/sums/a.csv", r"must be hf://datasets/ORG/NAME\[@REVISION\]/FILE"),
    ],
)
def test_what_is_not_there_is_one_line_with_name_key_and_setting(served, monkeypatch, path, says):
    served.tokens["someone/gated"] = "t"
    served.commit("someone/gated", MODEL)
    served.commit("someone/bin", {"config.json": b"{}", "pytorch_model.bin": b"0"})
    key = "data.train.path" if path.endswith(("csv", "jsonll")) else "model.path"
    with pytest.raises((ValueError, OSError)) as refused:
        fetched(path, key)
    text, status = failures.explain(refused.value)
    assert failures.is_refusal(refused.value) and "\n" not in text and status == 1
    assert text.startswith(f"{key} = {path!r}: ")
    assert re.search(says.replace("URL", re.escape(served.url)), text), text
    monkeypatch.setenv("HF_TOKEN", "t")
    assert path != "someone/gated" or (fetched(path) / "config.json").exists()


def test_a_hub_that_is_down_may_come_back(served):
    """A restart loop gives the command again after status 75, not after 1."""
    served.status = 503
    with pytest.raises(OSError, match=r"failed: .*503.*what `hf download` wrote") as refused:
        fetched("someone/tiny")
    assert failures.explain(refused.value)[1] == 75
    served.status = 0
    folder = fetched("someone/tiny")
    served.status = 503
    assert fetched("someone/tiny") == folder


def test_offline_the_cache_is_enough_and_what_it_lacks_is_said(served, monkeypatch):
    hub.fetch({"model.path": "someone/tiny", "data.train.path": TRAIN})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    served.asked.clear()
    hub.fetch({"model.path": "someone/tiny", "data.train.path": TRAIN})
    with pytest.raises(OSError, match=r"no such path here.*unset HF_HUB_OFFLINE") as refused:
        fetched("models/foo")
    assert failures.explain(refused.value)[1] == 1 and not served.asked


def test_a_dry_run_reads_all_by_name_and_the_commits_are_known(served, tmp_path, capsys):
    config = small(**{"model.path": "someone/tiny"})
    for of_set, path in ((config.data.train, TRAIN), (config.eval.sets.arithmetic, HELD_OUT)):
        of_set.kind, of_set.path = "jsonl", path
    dry_run.dry_run(config, tmp_path / "run", None)
    text = capsys.readouterr().out
    assert "train.jsonl: 200 rows" in text and "test.jsonl: 200 rows" in text
    data = components.load_data(config, components.tokenizer(config), training=True)
    ours = fingerprint.of_run(config, data)
    assert ours["recipe"]["model"]["path"] == "someone/tiny"
    tiny, sums = (commit for repo in served.repos.values() for commit in repo if commit != "main")
    assert hub.record()["hub"] == {TRAIN: sums, HELD_OUT: sums, "someone/tiny": tiny}
    assert set(ours["files"]["model.path"]) == set(MODEL) - {"model.safetensors"}  # of 65 GB, say
    of_set = settings_of(config, of_model=True)["arithmetic"]  # of an evaluation's results
    assert (of_set["model"], of_set["hub"]) == ("someone/tiny", hub.record()["hub"])
