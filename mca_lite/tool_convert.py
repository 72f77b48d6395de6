"""Convert weights between formats, on the CPU, in one process.

python -m mca_lite convert SRC DST [options]
    SRC a Hugging Face folder or hub name: DST becomes a checkpoint that any layout loads
                                           (model_name_or_path: DST)
    SRC a megatron checkpoint, any layout: DST becomes a Hugging Face folder
    SRC a Hugging Face folder or hub name, with --merge ADAPTER, the folder of a PEFT adapter for
    it,
    or a checkpoint with adapters:         DST becomes a Hugging Face folder
    Tokenizer files and generation_config.json are copied too; for a checkpoint without them, from
    the model that it was trained from, if that is a folder here, but the tokenizer from its run's
    folder if that has one.
    Code (*.py) and links out of the folder (except a hub snapshot's) are not copied
"""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

from .cli import finish, parser_of
from .errors import refuse
from .families_rows import has_value_head
from .files import (
    ADAPTER_CONFIG_NAME,
    CHECKPOINT_PREFIX,
    HF_CONFIG_NAME,
    HF_GENERATION_CONFIG_NAME,
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    check_can_write,
    copy_files,
    printable,
    read_json,
    read_mca_config,
    resolve_folder,
    text_values,
    why_mcore_adapters,
)
from .tables import function_of

# a model's files other than its weights and config.json
_NO_TOKENIZERS = (*PROCESSOR_FILES, HF_GENERATION_CONFIG_NAME)
_SIDE_FILES = (*TOKENIZER_FILES, *_NO_TOKENIZERS)
_MORE_TEMPLATES = "additional_chat_templates"  # transformers' folder for named chat templates


def main(words: list[str]) -> int:
    """Convert weights as the command line says -> exit code. Uses no GPU."""
    parser = parser_of("convert", __doc__)
    add = parser.add_argument
    add("src", metavar="SRC", help="a model or a checkpoint")
    add("dst", metavar="DST", help="a new or empty folder")
    add("--merge", metavar="ADAPTER", help="put the adapter of this folder into SRC's weights")
    add("--verify", action="store_true", help="load both and compare their logits in float32")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="of a safetensors file (5GB)")
    options = parser.parse_args(words)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for a GPU
    return finish(_convert, options)


def _convert(options: Any) -> None:
    dst = Path(options.dst)
    size = options.max_shard_size
    if options.merge is None:
        report = convert(options.src, dst, size)
    else:
        report = merge(options.src, Path(options.merge), dst, size)
    print(printable(report))
    if options.verify:
        print(verify(options.src, options.dst, options.merge))


def convert(src: str, dst: Path, max_shard_size: str = "5GB") -> str:
    """Convert a Hugging Face model into a checkpoint of the megatron-core backend, or such a
    checkpoint into a Hugging Face model, and write it to `dst` -> a line to print.

    A checkpoint of an earlier version, without a manifest, becomes one of this version. Raises
    ValueError if dst is not empty, if src has neither format or holds adapters alone, or if it does
    not fit its manifest.
    """
    _refuse_full(dst)
    folder = resolve_folder(src)
    from . import ckpt, ckpt_folder, weights_convert
    from .ckpt_megatron import MegatronSnapshot

    if (folder / ckpt_folder.MANIFEST_NAME).is_file():
        ckpt_folder.refuse_damage(folder, "megatron", {})
        models = _load(folder)
        weights_convert.export_hf(models, dst, max_shard_size, beside=False)
        origin = Path(models.config.name_or_path or src)
        run = _run_of(folder)
        # a run's tokenizer may have new tokens, or another chat template
        has_tokenizer = any((run / name).is_file() for name in TOKENIZER_FILES)
        _copy_beside(origin, run if has_tokenizer else origin, dst)
        copy_files(folder, _SIDE_FILES, dst)
        note = "" if has_tokenizer else f"; its tokenizer is that of {origin}: {run} has none"
        return f"{src}, a checkpoint, is now {dst} in Hugging Face's format{note}"
    refusal = why_mcore_adapters(folder)
    if refusal:
        refuse("SRC", src, *refusal)
    models = _load(folder)
    dst.mkdir(parents=True, exist_ok=True)
    ckpt.write_weights(dst, MegatronSnapshot(models), "megatron", models.config.hf_config)
    shutil.copyfile(folder / HF_CONFIG_NAME, dst / HF_CONFIG_NAME)
    _copy_beside(folder, folder, dst)
    return f"{src} is now {dst}, a checkpoint that any layout loads"


def _run_of(folder: Path) -> Path:
    """The folder with the tokenizer of a checkpoint's run: the parent of one named checkpoint-N or
    set-aside-checkpoint-N; any other folder itself."""
    prefixes = f"{CHECKPOINT_PREFIX}-", f"set-aside-{CHECKPOINT_PREFIX}-"
    whole = folder.absolute()  # of "." too
    return whole.parent if whole.name.startswith(prefixes) else folder


def _copy_beside(model: Path, tokenizer: Path, dst: Path) -> None:
    """Copy the files that accompany weights to `dst`: generation and processor files from folder
    `model`, the tokenizer's from folder `tokenizer`."""
    copy_files(model, _NO_TOKENIZERS, dst)
    templates = [path.name for path in (tokenizer / _MORE_TEMPLATES).glob("*.jinja")]
    names = [f"{_MORE_TEMPLATES}/{name}" for name in sorted(templates)]
    if names:
        (dst / _MORE_TEMPLATES).mkdir(exist_ok=True)
    copy_files(tokenizer, [*TOKENIZER_FILES, *names], dst)


def merge(src: str, adapter: Path, dst: Path, max_shard_size: str = "5GB") -> str:
    """Merge a LoRA adapter into the weights of the Hugging Face model `src`, and write the result
    to `dst` -> a line to print. src: a folder or hub name. adapter: the adapter's folder.

    W + scale * B A is computed in float32 and stored in W's dtype; for a quantised base in the
    dtype that config.json names. Raises ValueError if dst is not empty, if src is missing or has no
    safetensors, or if the adapter does not fit src. An adapter with a manifest must fit that too.
    OSError if src has no config.json.
    """
    _refuse_full(dst)
    resolve_folder(src)
    from . import ckpt_folder, weights_files

    if (adapter / ckpt_folder.MANIFEST_NAME).is_file():
        backend = ckpt_folder.read_manifest(adapter)["backend"]
        ckpt_folder.refuse_damage(adapter, backend, {})
    base = weights_files.SafetensorsSource(src)
    config = read_json(base.folder / HF_CONFIG_NAME)
    # from transformers, for the family's default if config.json lacks the key
    hf = _config_of(base.folder, adapter)
    tied = hf.tie_word_embeddings
    source = base
    if has_value_head(hf.architectures):
        values = hf.to_dict()
        config |= {key: values[key] for key in weights_files.OF_VALUE_HEAD if key in values}
        source = weights_files.ScoredSource(base, values, seed=0)  # the adapter brings the head
    shapes = {name: source.shape(name) for name in source.names()}
    file_merger = function_of("part_lora_files:file_merger")
    change, vocab_size = file_merger(adapter, base.folder, shapes, tied)
    if vocab_size:
        text_values(config)["vocab_size"] = vocab_size
    dtype = _dtype_of(base.folder)
    words = function_of("part_lora_files:merged_into")(config)

    def merged(name: str) -> Any:
        tensor = change(name, source.read(name))
        # matrices of nf4 are read as float32, so that they are rounded once
        return tensor.to(dtype) if words and tensor.dim() > 1 else tensor

    changed = ((name, merged(name)) for name in source.names())
    tensors = weights_files.in_words_of(src, config, changed)
    weights_files.write_safetensors(tensors, dst, max_shard_size)
    weights_files.write_hf_config(config, str(base.folder), dst, dtype)
    for folder in (base.folder, _run_of(adapter), adapter):
        _copy_beside(folder, folder, dst)
    report = f"{src} with the adapter {adapter} in its weights is now {dst}"
    return f"{report}; {words}" if words else report


def _config_of(folder: Path, adapter: Path | str | None) -> Any:
    """Load the transformers config of a model folder. If `adapter` (a folder or None) has a value
    head, the config gets one too."""
    from .model_config import add_value_head, load_hf_config

    config = load_hf_config(str(folder))
    if adapter is not None and function_of("part_lora_files:brings_value_head")(adapter):
        add_value_head(config)
    return config


def verify(src: str, dst: str, adapter: str | None = None) -> str:
    """Compare the models src and dst: run the same tokens through each model in float32 -> a line
    with the largest difference between logits (of reward models: scores).

    adapter: folder of an adapter that dst has merged into its weights; src runs with it unmerged,
    and the two tokens that differ most do not count: rounded weights may send a token to another
    expert. None: src runs alone. Raises ValueError if the difference is more than rounding
    explains.
    """
    import torch

    vocab_size = text_values(read_json(Path(dst) / HF_CONFIG_NAME))["vocab_size"]
    tokens = torch.randint(0, vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    tolerance = 1e-4
    counted = 32  # of 2 x 16 tokens
    if adapter is not None:
        # the merged weights are rounded to their dtype, each by up to half of its eps
        tolerance = max(tolerance, 10 * torch.finfo(_dtype_of(Path(dst))).eps)
        counted = 30
    with torch.no_grad():
        one = _logits(src, tokens, vocab_size, adapter)
        other = _logits(dst, tokens, vocab_size)
    difference = float((one - other).abs().view(32, -1).amax(1).kthvalue(counted)[0])
    largest = float(other.abs().max())
    if not difference <= tolerance * max(largest, 1.0):
        raise ValueError(
            f"the logits of {src} and {dst} differ by {difference:.1e} (largest: {largest:.1e}): "
            f"do not use {dst}"
        )
    return f"verified: the logits differ by at most {difference:.1e} (largest: {largest:.1e})"


def _logits(folder: str, tokens: Any, vocab_size: int, adapter: str | None = None) -> Any:
    """Run tokens through the model in `folder` -> its logits in float32; for a reward model, its
    scores. tokens: [b, s]. vocab_size: with an adapter, the vocabulary grows to this size if it is
    smaller. adapter: folder of a LoRA adapter to add unmerged; None: none."""
    import torch

    from .model import load_torch_model  # supports types that transformers lacks

    if (Path(folder) / "dist").is_dir():
        models = _load(Path(folder), torch.float32).eval()
        return models.gather_logits(models(tokens))
    model = load_torch_model(folder, config=_config_of(resolve_folder(folder), adapter)).eval()
    if adapter is not None:
        if (
            vocab_size > model.config.get_text_config().vocab_size
        ):  # the adapter brings the new rows
            model.resize_token_embeddings(vocab_size, mean_resizing=False)
        part_lora = function_of("part_lora")
        spec, source = part_lora.read_adapter(adapter, 0.0)
        for name in source.whole_weights():
            model.get_parameter(name).copy_(source.read(name))
        part_lora.inject(model, spec).eval()
        source.unjoin(part_lora.spec_of(model))
        part_lora.fill_adapters(model, source)
    if has_value_head(model.config.architectures):
        return model.score(model.base_model(tokens).last_hidden_state)[..., 0]
    return model(tokens).logits


def _refuse_full(dst: Path) -> None:
    check_can_write(dst, "DST")
    if dst.exists() and any(dst.iterdir()):
        raise ValueError(f"{dst} is not empty: name a folder that is not there yet")


def _load(folder: Path, dtype: Any = None) -> Any:
    """Load a Hugging Face model or a checkpoint of this package as a whole megatron-core model, in
    this process. dtype: None keeps the folder's dtype."""
    import torch

    from .args import TrainingArguments
    from .model import AutoModel

    dtype = dtype or _dtype_of(folder)
    half = dict(bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    args = TrainingArguments(output_dir="unused", **half)
    index = folder / "dist" / "index.json"
    is_earlier = index.with_name(".metadata").is_file() and not index.is_file()
    if is_earlier and not (folder / ADAPTER_CONFIG_NAME).is_file():
        return _load_earlier(folder, args)
    return AutoModel.from_pretrained(str(folder), args)


# -- checkpoints of earlier versions, whose index is a pickle


def _load_earlier(folder: Path, args: Any) -> Any:
    """Load the model from a checkpoint folder that an earlier version of this package wrote, with a
    pickled index. args: TrainingArguments. Raises ValueError for an index that cannot be trusted.
    """
    from . import parallel
    from .ckpt_megatron import DIST_NAME, OLD_INDEX_NAME, load_megatron
    from .model import build_chunks
    from .model_config import AutoConfig

    parallel.initialize(args)
    models = build_chunks(AutoConfig.from_pretrained(str(folder), args))
    path = folder / DIST_NAME / OLD_INDEX_NAME
    try:
        index = _read_pickled_index(path)
    except Exception as error:  # whatever a crafted pickle leads to
        raise ValueError(f"{path} is not an index that can be trusted: {error!r:.200}") from None
    load_megatron(folder, models, index=index)
    return models


class _Inert:
    """A stand-in for an instance of any class in an untrusted pickle: it keeps the pickled state
    and runs none of the class's code."""

    def __init__(self, *arguments: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    """An unpickler for untrusted files, which runs no code that the pickle names. Objects become
    stand-ins (_Inert); torch.Size becomes list, and another name in torch becomes its text."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return list
        if module == "torch":
            return name  # the name of a dtype
        return type(name, (_Inert,), {})


def _read_pickled_index(path: Path) -> dict[str, Any]:
    """Read the pickled index of a torch distributed checkpoint -> a dict in the format of this
    package's index.json."""
    with open(path, "rb") as file:
        index = _InertUnpickler(file).load().state
    places = {}
    for part, place in index["storage_data"].items():
        where = [place.state[key] for key in ("relative_path", "offset", "length")]
        places[part.state["fqn"], tuple(part.state["offset"])] = where
    tensors = {}
    for name, entry in index["state_dict_metadata"].items():
        chunks = []
        for chunk in entry.state["chunks"]:
            offsets = chunk.state["offsets"]
            where = places[name, tuple(offsets)]
            chunks.append([offsets, chunk.state["sizes"], *where])
        dtype = entry.state["properties"].state[0]
        tensors[name] = {"dtype": dtype, "shape": entry.state["size"], "chunks": chunks}
    return {"optimizer_steps": None, "tensors": tensors}


def _dtype_of(folder: Path) -> Any:
    """The torch.dtype of the weights in a folder, from its config: float32, bfloat16 or float16.
    ValueError for another dtype, or a folder without a config."""
    import torch

    values = read_mca_config(folder)
    if values:
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return next((dtype for key, dtype in half.items() if values.get(key)), torch.float32)
    if not (folder / HF_CONFIG_NAME).is_file():
        reason = f"it has no {HF_CONFIG_NAME}, and is no checkpoint"
        refuse("SRC", str(folder), reason, "a folder in Hugging Face's format, or a checkpoint's")
    values = read_json(folder / HF_CONFIG_NAME)
    # quantised weights are read in bf16
    default = "bfloat16" if values.get("quantization_config") else "float32"
    texts = text_values(values)  # models with pictures may have it there alone
    named = (of.get(key) for of in (values, texts) for key in ("dtype", "torch_dtype"))
    name = next(filter(None, named), default)
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"{folder}: dtype {name} in {HF_CONFIG_NAME}, expected float32, bfloat16 or float16"
        )
    return getattr(torch, name)
