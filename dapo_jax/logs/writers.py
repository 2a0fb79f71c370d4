"""More places for a run's numbers: `log.writers`.

A writer is a class with the methods of `Writer`, named "tensorboard", "wandb", "trackio" or
"module:Class". One that fails is left out for the rest of the run, which says so once: the numbers
are in metrics.jsonl anyway.
"""

import importlib.util
import json
import pathlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dapo_jax.logs.files import write_file
from dapo_jax.outside import imported
from dapo_jax.process.failures import brief

INSTALL = {  # their init has resume="allow" by a run's own id or name, offline too
    "wandb": "wandb>=0.19,<1",
    "trackio": "trackio>=0.43,<1",
}


class Writer:
    """Takes a run's numbers; the main process alone makes and calls it, as the run goes on.

    A call that takes long holds the run up. One that gives `log` needs no `step` and `evaluation`.
    """

    def __init__(self, config: dict, workdir: pathlib.Path, resume_step: int | None):
        """config: the config, JSON-able. resume_step: the last step done; None in a new run.

        Rows up to that step were given before. A killed run gives some rows after it again, equal
        but for what was timed.
        """

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Takes numbers of a step, or of the policy after so many steps."""

    def step(self, row: Mapping[str, Any]) -> None:
        """Takes a step's row, as metrics.jsonl has it; row["step"] counts from 0."""
        # `evaluation` has had the scores in it, which are of the same step.
        values = {key: value for key, value in row.items() if not key.startswith("eval/")}
        self.log(values, values.pop("step"))

    def evaluation(self, finished_steps: int, scores: Mapping[str, float]) -> None:
        """Takes the scores (eval/<set>/<score>) of the policy after so many steps.

        The row of that step comes later, if there is one, and so may that of the step before.
        """
        self.log(scores, finished_steps)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes a few responses of a step, as rollouts/ has them; a class may lack this."""

    def close(self) -> None:
        """Ends, where the run is done or failed; a signal ends the run without this."""


class TensorBoard(Writer):
    """TensorBoard's event files, in WORKDIR/tensorboard.

    After a kill equal rows may be there twice.
    """

    def __init__(self, config: dict, workdir: pathlib.Path, resume_step: int | None):
        # Here and not above: it imports a cloud's clients, a second that readers need not wait.
        from tensorboardX import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(workdir / "tensorboard"), purge_step=purge)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        lines = (f"    {json.dumps(row)}" for row in rows)  # four spaces: code, in Markdown
        self._writer.add_text("samples", "\n".join(lines), step)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB(Writer):
    """Weights & Biases. A resumed run goes on in the same one there, by the id in wandb_id.txt.

    WANDB_MODE=offline, WANDB_PROJECT and its other variables hold.
    """

    def __init__(self, config: dict, workdir: pathlib.Path, resume_step: int | None):
        import wandb

        settings = {"id": own_id(workdir), "resume": "allow", "allow_val_change": True}
        self._table = wandb.Table
        self._run = wandb.init(config=config, dir=str(workdir), name=workdir.name, **settings)
        self._run.define_metric("*", step_metric="step")  # its own may not go back, as ours do

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = list(rows[0])
        data = [[row.get(column) for column in columns] for row in rows]
        self.log({"samples": self._table(columns=columns, data=data)}, step)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class Trackio(WandB):
    """Trackio, in its project dapo_jax. A resumed run goes on in the same one there, by its name.

    TRACKIO_SPACE_ID and its other variables hold.
    """

    def __init__(self, config: dict, workdir: pathlib.Path, resume_step: int | None):
        import trackio

        self._table, name = trackio.Table, f"{workdir.name}-{own_id(workdir)}"
        self._run = trackio.init("dapo_jax", name, config=config, resume="allow", embed=False)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self._run.log(dict(values), step=step)


def own_id(workdir: pathlib.Path) -> str:
    """Returns the run's id in other services, which the first of its writers makes."""
    file = workdir / "wandb_id.txt"
    if not file.exists():
        write_file(file, secrets.token_hex(4).encode())
    return file.read_text().strip()


BUILT_IN = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}


def find(name: str) -> Callable[..., Writer]:
    """Returns a writer's class; ValueError where log.writers names none, or it is not installed."""
    setting = f"log.writers has {name!r}"
    if (package := INSTALL.get(name)) and importlib.util.find_spec(name) is None:
        raise ValueError(f'{setting}, but that package is not installed: pip install "{package}"')
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise ValueError(f'{setting}; give one of {", ".join(BUILT_IN)}, or "module:Class"')
    return imported(setting, name, ("step", "evaluation", "close"))


class Writers:
    """All writers of a run, none of which can end it. say: is told, once each, of what failed.

    of_run: what `Writer` is made of.
    """

    def __init__(self, names: Sequence[str], say: Callable[[str], None], *of_run):
        self._say, self._writers = say, {}
        for name in names:
            self._writers[name] = self._guarded(name, lambda name=name: find(name)(*of_run))

    def __call__(self, method: str, *arguments) -> None:
        """Calls a method of all of them that have it: step, evaluation, samples or close."""
        for name, writer in self._writers.items():
            if hasattr(writer, method):
                self._guarded(name, getattr(writer, method), *arguments)

    def _guarded(self, name: str, call: Callable, *arguments) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            self._writers[name] = None  # is called no more
            self._say(
                f"note: the writer {name!r} of log.writers failed and is left out, the run goes on "
                f"({brief(error)})"
            )
