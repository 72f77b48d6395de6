"""The log-probabilities that a reference model gives to a data set's pairs, kept on disk between runs.

    <cache_dir>/reference/<hash of identity>/
      meta.json         the identity: which model, in which precision, which data
      part-<first>.npy  float32 [pairs, 2] from pair <first> on, written as the pass goes: a run that dies goes on there
      logps.npy         all of them, when the pass is done

One process reads and writes, and tells the others.
"""

import hashlib
import json
import os
from pathlib import Path

import numpy as np

from .ckpt_folder import CheckpointError
from .constants import HF_CONFIG_NAME

FORMAT = 1


def files_of_model(name_or_path: str | None) -> list:
    """[name, bytes, time of change] of what a model's folder loads; [] for what is no folder."""
    folder = Path(name_or_path or "")
    if not name_or_path or not folder.is_dir():
        return []
    files = sorted(
        [*folder.glob("*.safetensors"), *folder.glob("dist/*"), *folder.glob(HF_CONFIG_NAME)]
    )
    return [
        [path.relative_to(folder).as_posix(), path.stat().st_size, path.stat().st_mtime_ns]
        for path in files
    ]


class ReferenceStore:
    """What is on disk for one model and one data set of `num_pairs` pairs."""

    def __init__(self, cache_dir: str | os.PathLike, identity: dict, num_pairs: int):
        self.identity = {"format": FORMAT, "pairs": num_pairs, **identity}
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:32]
        self.folder, self.num_pairs = Path(cache_dir) / "reference" / digest, num_pairs

    def load(self) -> np.ndarray:
        """float32 [n, 2] of the first n pairs, as many as are there. CheckpointError for files of another model or data."""
        meta, whole = self.folder / "meta.json", self.folder / "logps.npy"
        if not meta.is_file():
            return np.zeros((0, 2), np.float32)
        try:
            found = dict(json.loads(meta.read_text()))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{meta} is damaged ({error}): remove {self.folder}") from None
        if found != self.identity:
            other = [key for key in self.identity if found.get(key) != self.identity[key]]
            raise CheckpointError(
                f"{self.folder} is the reference of another run: its {', '.join(other)} differ from this run's: remove the "
                "folder, and the reference is computed again"
            )
        if whole.is_file():
            return self._read(whole, self.num_pairs)
        parts, count = [np.zeros((0, 2), np.float32)], 0
        while (part := self._part(count)).is_file():
            parts.append(self._read(part))
            count += len(parts[-1])
        return np.concatenate(parts)

    def add(self, start: int, logps: np.ndarray) -> None:
        """Keep the pairs from `start` on."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "meta.json").is_file():
            self._replace(
                self.folder / "meta.json",
                lambda file: file.write(json.dumps(self.identity, indent=1).encode()),
            )
        self._replace(self._part(start), lambda file: np.save(file, logps.astype(np.float32)))

    def finish(self, logps: np.ndarray) -> None:
        """All pairs are there: one file in place of the parts."""
        self._replace(
            self.folder / "logps.npy", lambda file: np.save(file, logps.astype(np.float32))
        )
        for part in self.folder.glob("part-*.npy"):
            part.unlink(missing_ok=True)

    def _part(self, start: int) -> Path:
        return self.folder / f"part-{start:012d}.npy"

    def _read(self, path: Path, count: int | None = None) -> np.ndarray:
        try:
            values = np.load(path)
            if values.ndim != 2 or values.shape[1] != 2 or count not in (None, len(values)):
                raise ValueError(f"shape {values.shape}")
        except (ValueError, EOFError, OSError) as error:
            raise CheckpointError(f"{path} is damaged ({error}): remove {self.folder}") from None
        return values

    @staticmethod
    def _replace(path: Path, write) -> None:
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        with open(temporary, "wb") as file:
            write(file)
        os.replace(temporary, path)
