"""The only module that imports Orbax: a run's checkpoints.

A checkpoint has a manifest: the digest of each array and of the progress, which every restore
compares, and the run's `fingerprint`. A damaged checkpoint is set aside, never deleted. Storage
that fails for a while is retried by gcsfs and TensorStore; where they give up, the command ends
with status 75, and nothing is taken for damage.
"""

import contextlib
import errno
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy as preservation

from dapo_jax.checkpoints import digests
from dapo_jax.checkpoints.progress import best_of
from dapo_jax.checkpoints.same_run import listed
from dapo_jax.logs.files import json_digest
from dapo_jax.process import hosts
from dapo_jax.process.failures import brief, is_damage, is_transient

READ, DAMAGED, TRANSIENT, REFUSED = range(4)  # what reading a checkpoint comes to, the worst last
ONE_FOLDER = "checkpoint.directory must be one that all processes see"
LISTED_SECONDS = 90  # the longest that a machine may list what another has moved (NFS: 60)


class DamagedError(ValueError):
    """A checkpoint's files are missing, cut short or not what was saved."""


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Makes a DamagedError of an error that is a fault of the files."""
    try:
        yield
    except Exception as error:
        if is_damage(error):
            raise DamagedError(brief(error)) from error
        raise


class Checkpoints:
    """Checkpoints of (state, progress) in `directory`, named by the number of finished steps.

    Each appears whole or not at all. All processes call `save` and the restores alike, and see the
    directory, a bucket's (gs://...) for instance. state: a pytree of arrays, sharded as they are.
    progress: a JSON-able dict with the host's side. The newest `keep` are kept (None: all, and
    nothing is cleaned up, for what only reads), those whose steps are multiples of `keep_period`
    (0: of none), and the best by the progress's "scores".
    fingerprint: this run's (`fingerprint.of_run`), saved with each checkpoint.
    """

    def __init__(self, directory, *, keep: int | None, keep_period: int = 0):
        place = epath.Path(directory)
        self.directory = place if "://" in str(place) else place.absolute()  # as Orbax wants it
        self.fingerprint: dict | None = None
        self._keep = keep
        hosts.on_main(lambda: self.directory.mkdir(parents=True, exist_ok=True))
        self._policies = [preservation.CustomSteps(()), preservation.LatestN(keep)]
        self._policies += [preservation.EveryNSteps(keep_period)] if keep_period else []
        # Named processes wait for each other in the key-value store. Else they would on the
        # devices, and a save would have to wait for what those are doing.
        processes = ocp.options.MultiprocessingOptions(
            active_processes=set(range(hosts.count())) if hosts.count() > 1 else None
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation.AnyPreservationPolicy(self._policies),
            create=False,
            enable_async_checkpointing=False,
            # A run has its folder to itself; what only reads may see one being written.
            cleanup_tmp_directories=keep is not None,
            multiprocessing_options=processes,
        )
        self._state_handler = ocp.StandardCheckpointHandler(multiprocessing_options=processes)
        of_json = ocp.JsonCheckpointHandler(multiprocessing_options=processes)
        handlers = {"state": self._state_handler, "progress": of_json, "manifest": of_json}
        self._manager = ocp.CheckpointManager(
            self.directory, options=options, item_handlers=handlers
        )

    def save(self, step: int, state: Any, progress: dict, arrays: Mapping | None = None) -> bool:
        """Saves, if there is no checkpoint of this step yet; returns whether it was needed.

        arrays: `digests.of_arrays` of the state; None: computed here, which waits for the devices.
        FileNotFoundError where the one before has gone, which Orbax may not notice: it makes a
        folder that was moved anew.
        """
        steps = self._manager.all_steps()
        if step in steps:
            return False
        newest = self._manager.latest_step()
        manifest = {
            "arrays": digests.of_arrays(state) if arrays is None else arrays,
            "progress": json_digest(progress),
            "fingerprint": self.fingerprint,
        }
        content = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            progress=ocp.args.JsonSave(progress),
            manifest=ocp.args.JsonSave({**manifest, "digest": json_digest(manifest)}),
        )
        place = self.directory / str(newest)
        kept = newest is not None and self._keep != 1
        best = best_of(progress.get("scores", {}), [*steps, step])
        self._policies[0] = preservation.CustomSteps([step if best is None else best])
        try:
            return self._manager.save(step, args=content, force=True)
        finally:  # an error of Orbax's is of that, then
            if kept and hosts.is_main_host() and not place.exists():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place))

    def restore_latest(self, abstract_state: Any, *, report: Callable, require=None):
        """Reads (step, state, progress) of the newest undamaged checkpoint; None without any.

        abstract_state: ShapeDtypeStructs with shardings, the mesh's of this run. All processes
        take the same: one that any of them finds damaged is reported, the one before is taken, and
        the damaged one is set aside, as `damaged.STEP.N`. require: as of `restore`. Raises
        ValueError if all are damaged (they stay), since starting anew would overwrite the run;
        OSError if they cannot be read for now.
        """
        steps, errors = self._agreed_steps(), {}
        for step in steps:
            try:
                state, progress = self._read(step, abstract_state, require)
            except DamagedError as error:
                report(f"{error}; trying the one before, which would leave it as damaged.{step}")
                errors[step] = error
            else:
                self._set_aside({*errors})
                return step, state, progress
        if steps:
            raise ValueError(
                f"none of the checkpoints {steps} in {self.directory} can be read; give another "
                "--workdir to start anew"
            ) from errors[steps[0]]
        return None

    def restore(self, step: int, abstract_state: Any, *, require: Callable | None = None):
        """Reads (state, progress) of one checkpoint; nothing is moved, whatever it is found to be.

        require(fingerprint, where=...): raises where it is not a run's that may be read. Raises
        FileNotFoundError, which names those there are, for a step without a checkpoint,
        DamagedError, and ValueError, which names the arrays that differ, for another model's.
        """
        steps = self._agreed_steps()
        if step not in steps:
            raise FileNotFoundError(f"there is no checkpoint {step}, only {sorted(steps)}")
        try:
            return self._read(step, abstract_state, require)
        except DamagedError as error:
            raise DamagedError(f"{error}; there are others: {sorted({*steps} - {step})}") from error

    def fingerprint_of(self, step: int) -> dict | None:
        """Reads whose run a checkpoint is; None where it was saved without; DamagedError."""
        file = self.directory / str(step) / "manifest" / "metadata"
        try:
            return _read_manifest(file)["fingerprint"]
        except DamagedError as error:
            raise DamagedError(f"{file} cannot be read ({error})") from error

    def latest_step(self) -> int | None:
        """Returns the newest checkpoint's step, as the main process sees it; all call it."""
        return hosts.on_main(self._manager.latest_step)

    def close(self) -> None:
        """Closes the manager; nothing is saved or restored after this."""
        self._manager.close()

    def _agreed_steps(self) -> list[int]:
        """Lists the steps that the main process sees, newest first."""
        self._manager.reload()
        return hosts.on_main(lambda: sorted(self._manager.all_steps(), reverse=True))

    def _read(self, step: int, abstract_state: Any, require: Callable | None):
        """Reads (state, progress) and compares digests; all processes return, or raise, alike."""
        with contextlib.suppress(DamagedError):  # it may have been the reading
            return self._read_once(step, abstract_state, require)
        return self._read_once(step, abstract_state, require)

    def _read_once(self, step: int, abstract_state: Any, require: Callable | None):
        """Reads as `_read` does; raises, on every process, the worst that one of them met."""
        folder, name = self.directory / str(step), f"checkpoint {step} in {self.directory}"
        content, refusal, outcome, why, parts, manifest = None, None, READ, "", {}, {}
        try:
            manifest = _read_manifest(folder / "manifest" / "metadata")
            self._require_same(step, abstract_state, manifest, require)
            with _reading():
                content = self._restored(folder, abstract_state)
            parts = digests.parts_of(content[0], replicas=True)
            if json_digest(content[1]) != manifest["progress"]:
                outcome, why = DAMAGED, "its progress is not what was saved"
        except DamagedError as error:
            outcome, why = DAMAGED, str(error)
            if not folder.is_dir():
                outcome, why = TRANSIENT, f"it is not there for all; {ONE_FOLDER}"
        except Exception as error:
            refusal, outcome = error, TRANSIENT if is_transient(error) else REFUSED
            why = brief(error)
        everyone = hosts.gather((outcome, why, manifest.get("digest"), parts))
        outcomes, _, digest_of_each, parts_of_each = map(list, zip(*everyone, strict=True))
        if worst := max(outcomes):
            first = outcomes.index(worst)
            why = (f"process {first}: " if len(everyone) > 1 else "") + everyone[first][1]
        elif len(set(digest_of_each)) > 1:
            worst, why = TRANSIENT, f"the processes read different ones; {ONE_FOLDER}"
        elif wrong := list(_differing(manifest["arrays"], parts_of_each)):
            worst, why = DAMAGED, f"not what was saved: {listed(wrong)}"
        if worst == DAMAGED:
            raise DamagedError(f"{name} cannot be read ({why})")
        if worst == TRANSIENT:
            raise OSError(errno.ETIMEDOUT, why, str(folder))
        if worst == REFUSED:
            raise refusal if outcome == REFUSED else ValueError(f"{name}: {why}")
        return content

    def _restored(self, folder: epath.Path, abstract_state: Any):
        progress = json.loads((folder / "progress" / "metadata").read_text())
        restore = ocp.args.StandardRestore(abstract_state)
        return self._state_handler.restore(folder / "state", args=restore), progress

    def _require_same(self, step, abstract_state, manifest, require) -> None:
        """Compares whose run it is, and names, shapes and dtypes: Orbax would cast, or fail."""
        fingerprint = manifest["fingerprint"]
        if require is not None and fingerprint is not None:
            require(fingerprint, where=f"checkpoint {step} in {self.directory}")
        there = {name: shape for name, (shape, _) in manifest["arrays"].items()}
        here = {name: digests.shape_text(it) for name, it in digests.named(abstract_state).items()}
        differing = [
            f"{name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here"
            for name in sorted(there.keys() | here.keys())
            if there.get(name) != here.get(name)
        ]
        if differing:
            raise ValueError(
                f"checkpoint {step} in {self.directory} is of another model: "
                f"{listed(differing)}. Give the model that it was trained from, or "
                "another --workdir"
            )

    def _set_aside(self, steps: set[int]) -> None:
        """Moves damaged checkpoints away: Orbax saves no step at or below the newest there is."""

        def move():
            for step in steps:
                # Beside the others: a bucket has no empty folders to move it into.
                places = (self.directory / f"damaged.{step}.{n}" for n in itertools.count())
                free = next(place for place in places if not place.exists())
                (self.directory / str(step)).rename(free)

        if steps:
            hosts.on_main(move)
            until = time.monotonic() + LISTED_SECONDS
            while self._manager.reload() or steps & set(self._manager.all_steps()):
                # With it in its list, this process would not save that step, and the others wait.
                if time.monotonic() > until:
                    text = "moved steps are still listed"
                    raise OSError(errno.ETIMEDOUT, text, str(self.directory))
                time.sleep(1)


@_reading()
def _read_manifest(file: epath.Path) -> dict:
    manifest = json.loads(file.read_text())
    digest = manifest.pop("digest")
    if json_digest(manifest) != digest:
        raise ValueError(f"{file} is not what was saved")
    return manifest | {"digest": digest}


def _differing(described: dict, processes: Sequence[dict]) -> Iterator[str]:
    """Yields the arrays whose digest, summed over all shards, is not the described one."""
    for name, (_, digest) in described.items():
        shards: dict[tuple[int, ...], int] = {}
        parts = [part for arrays in processes for part in arrays.get(name, ())]
        same = all(shards.setdefault(starts, part) == part for starts, part in parts)
        if not same or digests.text(sum(shards.values())) != digest:
            yield name
