"""Where Hugging Face tensors come from: safetensors read by slices, or fresh ones drawn by name."""

import hashlib
import json
from pathlib import Path

import torch

from .constants import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from .model_families import FAMILIES
from .weights_experts import file_parts, holds_fused_experts, named_tensors


class SafetensorsSource:
    """The tensors of a folder (or hub name) in safetensors format, read by slices.

    model_type: tells how the family's files name experts; a checkpoint that holds them fused, as transformers 5 does in memory,
    then reads as if it held each by itself.
    """

    def __init__(self, model_name_or_path: str, model_type: str | None = None):
        from safetensors import safe_open

        self.folder = resolve_folder(model_name_or_path)
        index = self.folder / SAFE_WEIGHTS_INDEX_NAME
        if (self.folder / SAFE_WEIGHTS_NAME).is_file():  # wins over an index, as in transformers
            with safe_open(self.folder / SAFE_WEIGHTS_NAME, "pt") as f:
                self._file_of = dict.fromkeys(f.keys(), SAFE_WEIGHTS_NAME)
        elif index.is_file():
            self._file_of = json.loads(index.read_text())["weight_map"]
            gone = sorted(
                name for name in set(self._file_of.values()) if not (self.folder / name).is_file()
            )
            if gone:
                raise ValueError(
                    f"{self.folder}: {SAFE_WEIGHTS_INDEX_NAME} names {', '.join(gone)}, and the folder lacks "
                    f"{'it' if len(gone) == 1 else 'them'}: copy or download the model again"
                )
        else:
            raise ValueError(
                f"{self.folder}: expected {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}, and neither is there; a "
                "model in another format can be saved anew by transformers' save_pretrained, and a model without "
                "weights starts with train_from_scratch: true"
            )
        self._open = {}
        self._safe_open = safe_open
        self._part_of: dict[str, tuple[str, tuple]] = {}  # name -> (stored tensor, index into it)
        if model_type is not None and holds_fused_experts(self._file_of):
            stored = [(n, file_parts(model_type, n, self._shape(n))) for n in self._file_of]
            self._part_of = {name: (n, index) for n, parts in stored for name, index in parts}

    def names(self) -> set[str]:
        return set(self._part_of or self._file_of)

    def in_file_order(self) -> list[str]:
        """The names, file by file."""
        stored = {name: self._part_of.get(name, (name, ()))[0] for name in self.names()}
        return sorted(stored, key=lambda name: (self._file_of[stored[name]], name))

    def _slice(self, name: str):
        file_name = self._file_of[name]
        if file_name not in self._open:
            self._open[file_name] = self._safe_open(self.folder / file_name, "pt")
        return self._open[file_name].get_slice(name)

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """The tensor, or the part of it in these rows or columns; other bytes are not read."""
        stored, index = self._part_of.get(name, (name, ()))
        part = self._slice(stored)
        if not index:
            if rows is not None:
                return part[rows]
            return part[:, columns] if columns is not None else part[:]
        expert, own = index if len(index) == 2 else (*index, slice(0, self._shape(stored)[1]))
        rows = slice(own.start + rows.start, own.start + rows.stop) if rows is not None else own
        return part[expert : expert + 1, rows, columns if columns is not None else slice(None)][0]

    def shape(self, name: str) -> tuple[int, ...]:
        stored, index = self._part_of.get(name, (name, ()))
        return tuple(torch.empty(self._shape(stored), device="meta")[index].shape)


class InitSource:
    """Freshly drawn tensors: each from a seed that its name in Hugging Face's files gives, so that no layout changes a weight.

    Matrices are normal with the config's initializer_range, norms 1 (0 where 1 is added to them), biases 0.
    """

    def __init__(self, hf_config: dict, seed: int, num_prediction_layers: int | None = 0):
        import transformers

        hf = transformers.AutoConfig.for_model(**json.loads(json.dumps(hf_config)))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(hf)
        self._shapes = {
            file_name: tuple(tensor[index].shape)
            for name, tensor in (
                *model.named_parameters(remove_duplicate=False),
                *named_tensors(model),
            )
            for file_name, index in file_parts(hf.model_type, name, tuple(tensor.shape))
        }
        last, sizes = hf.num_hidden_layers - 1, hf.hidden_size
        for layer in range(
            last + 1, last + 1 + (num_prediction_layers or 0)
        ):  # each is as the last one, and has more
            hf_name, of_last = f"model.layers.{layer}.", f"model.layers.{last}."
            of_layer = {n: s for n, s in self._shapes.items() if n.startswith(of_last)}
            self._shapes.update({hf_name + n.removeprefix(of_last): s for n, s in of_layer.items()})
            norms = dict.fromkeys(
                (f"{hf_name}{n}.weight" for n in ("enorm", "hnorm", "shared_head.norm")), (sizes,)
            )
            self._shapes.update({**norms, f"{hf_name}eh_proj.weight": (sizes, 2 * sizes)})
        self._std, self._seed = getattr(hf, "initializer_range", 0.02), seed
        constants = FAMILIES[hf.model_type].constants if hf.model_type in FAMILIES else {}
        self._norm = torch.zeros if constants.get("layernorm_zero_centered_gamma") else torch.ones

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """float32; the whole tensor is drawn, whatever part of it is asked for."""
        shape = self._shapes[name]
        if len(shape) == 1:
            full = torch.zeros(shape) if name.endswith("bias") else self._norm(shape)
        else:
            digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            full = torch.empty(shape, device="cpu").normal_(0.0, self._std, generator=generator)
        if rows is not None:
            return full[rows]
        return full[:, columns] if columns is not None else full


def resolve_folder(model_name_or_path: str, revision: str | None = None) -> Path:
    """The local folder of a model: itself, or the hub's snapshot, fetched where it is not in the cache yet."""
    if Path(model_name_or_path).is_dir():
        return Path(model_name_or_path)
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
    return Path(snapshot_download(model_name_or_path, allow_patterns=patterns, revision=revision))
