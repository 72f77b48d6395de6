"""The pass of a reference model over a data set's pairs, and its log-probabilities, kept on disk
between runs.

    <cache_dir>/reference/<hash of identity>/
      meta.json         the identity: which model, in which precision, which data; size
                        and checksum of each of the other files
      part-<first>.npy  float32 [pairs, 2] from pair <first> on, written as the pass
                        goes: a run that dies goes on there
      logps.npy         all of them, when the pass is done

One process reads and writes, and tells the others.
"""

import functools
import hashlib
import io
import json
import math
import os
import time
from pathlib import Path

import numpy as np
from torch.utils.data import Subset

from . import ckpt_folder, parallel
from .ckpt_folder import CheckpointError, measure
from .constants import HF_CONFIG_NAME
from .files import describe_error, read_json, write_file, write_json
from .trainer_callbacks import Interrupted

FORMAT = 2
META_NAME = "meta.json"
SAY_EVERY_S = 10.0
PART_PAIRS = 1024  # pairs of a part that the pass keeps: what is lost when it dies
_NONE = np.zeros((0, 2), np.float32)  # of no pairs


def files_of_model(name_or_path: str | None) -> list:
    """[name, bytes, time of change] of what a model's folder loads; [] for what is no folder."""
    found: list = []
    for pattern in ("*.safetensors", "dist/*", HF_CONFIG_NAME) if name_or_path else ():
        for path in Path(name_or_path).glob(pattern):
            name, state = path.relative_to(name_or_path).as_posix(), path.stat()
            found.append([name, state.st_size, state.st_mtime_ns])
    return sorted(found)


class ReferenceStore:
    """What is on disk for one model and one data set of `num_pairs` pairs."""

    def __init__(self, cache_dir: str | os.PathLike, identity: dict, num_pairs: int):
        self.identity = {"format": FORMAT, "pairs": num_pairs, **identity}
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:32]
        self.folder = Path(cache_dir) / "reference" / digest
        self._files: dict[str, dict] = {}  # name -> size and checksum

    def load(self, say=print) -> np.ndarray:
        """float32 [n, 2] of the first n pairs, as many as are there and as they were written. What
        is not is computed again, and one line says so."""
        self._files, found = {}, [_NONE]
        if not (self.folder / META_NAME).is_file():
            return _NONE
        try:
            meta = read_json(self.folder / META_NAME)
            if meta["identity"] != self.identity:
                raise ValueError(f"{META_NAME} is of another run")
            for name, entry in sorted(meta["files"].items()):
                if measure(self.folder / Path(name).name) != entry:
                    raise ValueError(f"{name} is not as it was written")
                found.append(np.load(self.folder / Path(name).name))
                self._files[name] = entry
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            error = describe_error(error)
            say(f"{self.folder}: {error}: the reference is computed again from there")
        return np.concatenate(found)

    def add(self, start: int, logps: np.ndarray) -> None:
        """Keep the pairs from `start` on. On the disk when the call returns."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write(f"part-{start:012d}.npy", logps)

    def finish(self, logps: np.ndarray) -> None:
        """All pairs are there: one file in place of the parts."""
        self._files = {}
        self._write("logps.npy", logps)
        for part in self.folder.glob("part-*.npy"):
            part.unlink(missing_ok=True)

    def _write(self, name: str, logps: np.ndarray) -> None:
        stream = io.BytesIO()
        np.save(stream, logps.astype(np.float32))
        write_file(self.folder / name, stream.getvalue())
        self._files[name] = measure(self.folder / name)
        meta = {"identity": self.identity, "files": self._files}
        write_json(self.folder / META_NAME, meta)


# -- the pass; trainer: a DPOTrainer, whose model is not trained yet


def reference_of(trainer, pairs) -> np.ndarray:
    """float32 [pairs, 2], on every rank: what is kept on disk, checked, and the rest computed now.
    Collective."""
    args, store, num, done = trainer.args, _store_of(trainer, pairs), len(pairs), _NONE
    if store is not None:
        done = parallel.on_main(lambda: store.load(trainer.report.print), CheckpointError)
    if len(done):
        _check_kept(trainer, pairs, done, store)
    if store is not None and len(done) == num:
        trainer.report.print(f"reference model: {num:,} pairs from {store.folder}")
        return done
    per_rank = args.per_device_eval_batch_size * args.gradient_accumulation_steps
    whole_steps = per_rank * trainer.backend.dp_size
    part, said = math.ceil(PART_PAIRS / whole_steps) * whole_steps, time.monotonic()
    for start in range(len(done), num, part):
        logps = trainer._score(Subset(pairs, range(start, min(start + part, num))))
        done = np.concatenate([done, logps])
        if store is not None:
            parallel.on_main(functools.partial(store.add, start, logps), CheckpointError)
        if time.monotonic() - said > SAY_EVERY_S or len(done) == num:
            said = time.monotonic()
            trainer.report.print(f"reference model: {len(done):,} of {num:,} pairs")
        _stop_if_asked(trainer, store)
    if store is not None:
        parallel.on_main(functools.partial(store.finish, done), CheckpointError)
    return done


def is_same_model(args, ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether two passes over the same pairs differ by rounding only."""
    share = 3e-2 if args.bf16 or args.fp16 else 1e-3
    return bool(np.allclose(ours, theirs, rtol=share, atol=share))


def _check_kept(trainer, pairs, kept: np.ndarray, store: ReferenceStore) -> None:
    """CheckpointError where the model gives other log-probabilities to the first pairs than what
    was kept says."""
    count = min(len(kept), trainer.args.per_device_eval_batch_size * trainer.backend.dp_size)
    now = trainer._score(Subset(pairs, range(count)))
    if not is_same_model(trainer.args, now, kept[:count]):
        raise CheckpointError(
            f"the reference in {store.folder} is of another model: it gave {kept[0].tolist()} to "
            f"the first pair, and this model gives {now[0].tolist()}: remove the folder, and the "
            "reference is computed again"
        )


def _stop_if_asked(trainer, store: ReferenceStore | None) -> None:
    """Interrupted between two parts of the pass, which may take longer than a scheduler waits.
    Collective."""
    [number] = parallel.largest(trainer._signals.received)
    if not number:
        return
    kept = "nothing of the pass is kept"
    if store is not None:
        kept = f"the pass goes on from what is in {store.folder}"
    stop = Interrupted(number, trainer.state.global_step)
    trainer.report.print(f"{stop.signal.name}: stopped in the reference pass; {kept}")
    raise stop


def _store_of(trainer, pairs) -> ReferenceStore | None:
    """Where log-probabilities of these pairs are kept. On ranks that are not the main one its times
    of files may differ."""
    config = trainer.train_config
    fingerprint = getattr(pairs, "fingerprint", None)  # other people's datasets have none
    if config.cache_dir is None or fingerprint is None:
        return None
    name = getattr(getattr(trainer.model, "config", None), "name_or_path", None) or None
    backend = trainer.backend
    identity = {
        "model": [name, config.model_source, ckpt_folder.model_identity(backend.hf_config)],
        "files": files_of_model(name),
        "precision": backend.precision,
        "data": fingerprint,
    }
    return ReferenceStore(config.cache_dir, identity, len(pairs))
