"""Whether a layout computes what plain torch computes: the first step of a run, both ways.

torchrun --nproc_per_node N -m mca_lite parity config.yaml [key=value ...]
    losses, outputs of layers, logits and gradients by parameter, beside transformers' model in a
    higher precision on rank 0; the first part of the model that differs, and what it most likely
    means. One rank needs no torchrun: python -m mca_lite parity config.yaml

A smaller step shows as much: global_batch_size=8 cutoff_len=512. The model on rank 0 computes in
float32 for a run in bf16, in float64 for one in float32, and once more in the run's own precision:
what that changes is rounding. A layout may be three times as far off, plus 1e-4; of experts in bf16
one token may go elsewhere. Rank 0 needs 8 bytes for each parameter of the whole model beside its
part of the layout, and the activations of a micro-batch in float32, twice that for a run in
float32; in host memory 4 bytes for each parameter. Dropout and multi-token prediction are off;
adapters that would begin at 0 get small values. Nothing is written.

Exit code: 0 where they agree, 3 where they differ.
"""

from . import world
from .args import RunArguments, parse_args
from .cli import finish, parser_of
from .errors import refuse

DIFFERS = 3
_WORST = 10

# by the last or first word of what differs first
_CAUSES = {
    "embedding": "the rows of the embedding, their scale, or how the vocabulary is cut",
    "attention": "rotary base or scaling, the size or the groups of heads, the mask or window, "
    "norms of queries and keys, or the weights of q, k, v and o",
    "mlp": "the activation, the order of gate and up, their weights; with experts the router's "
    "scores, its choice, or the way of tokens to experts and back",
    "layer": "what stands between attention and MLP: norms after them, a multiplier of residuals",
    "norm": "the weight or epsilon of the last norm",
    "logits": "the head's weight, its tie to the embedding, a scale or cap of logits",
    "micro-batch": "labels, the mask of trained tokens, or what the loss is a mean over",
    "gradients": "the forward pass agrees to its bounds: the backward pass of these modules, or "
    "the sum of their gradients over ranks (tensor, sequence, context, expert or data parallel)",
}


def main(words: list[str]) -> int:
    """Compare as the words say -> exit code, the same on every rank."""
    _, words = parser_of("parity", __doc__).parse_known_args(words)
    return finish(_compare, words)


def _compare(words: list[str]) -> int:
    world.settle()
    arguments = parse_args(words)
    _leave_out_chance(arguments)
    from . import parallel, parity
    from .run import make_plan

    plan = make_plan(arguments)
    if plan.model.source is None and not plan.model.from_scratch:
        reason = "transformers cannot read a checkpoint of ours"
        remedy = "a Hugging Face folder of it, python -m mca_lite convert"
        refuse("model_name_or_path", str(plan.model.folder), reason, remedy)
    rows = parity.compare(plan)
    if rows:
        verdict = _verdict(rows, arguments.training.bf16)
        print("\n".join([*_table(rows), "", *verdict]), flush=True)
    return max(parallel.gather(DIFFERS * any(row.differs for row in rows)))


def _leave_out_chance(arguments: RunArguments) -> None:
    """Switch off dropout, and what transformers' models do not have."""
    args = arguments.training
    finetuning = arguments.finetuning
    for key in ("fp16", "fp8"):
        if value := getattr(args, key):
            refuse(key, value, "its rounding is not measured here", "bf16: true, or float32")
    if arguments.backend.use_mca:
        args.attention_dropout = args.hidden_dropout = 0.0
        args.mtp_num_layers = 0
    if finetuning.finetuning_type == "lora":
        finetuning.lora_dropout = 0.0


def _table(rows) -> list[str]:
    gradients = [row for row in rows if row.kind == "gradients"]
    groups: dict[str, list] = {}
    for row in gradients:
        groups.setdefault(row.group, []).append(row)
    worst = sorted(gradients, key=_excess, reverse=True)[:_WORST]
    lines = [f"{'':52}{'size':>10}{'distance':>10}{'rounding':>10}{'bound':>10}"]
    lines += [_line(row, row.name) for row in rows if row.kind != "gradients"]
    lines.append(f"gradients: the worst of each kind, of {len(gradients)}")
    lines += [_line(max(of, key=_excess), f"{name} ({len(of)})") for name, of in groups.items()]
    return [*lines, "the worst of all", *(_line(row, row.name) for row in worst)]


def _excess(row) -> float:
    return row.distance / row.bound


def _line(row, name: str) -> str:
    numbers = (row.size, row.distance, row.noise, row.bound)
    line = f"  {name:50}" + "".join(f"{number:10.1e}" for number in numbers)
    return line + "  differs" * row.differs


def _verdict(rows, bf16: bool) -> list[str]:
    wrong = [row for row in rows if row.differs]
    gradients = [row for row in rows if row.kind == "gradients"]
    hint = []
    if bf16:
        hidden = max(row.bound for row in rows if row.kind == "outputs")
        hint.append(
            f"rounding hides errors below {hidden:.1e} of an output: bf16=false shows smaller ones"
        )
    if not wrong:
        return ["right: the layout computes what plain torch does, to rounding", *hint]
    first = wrong[0]
    words = wrong[0].name.split()
    cause = _CAUSES["gradients"]
    shares = [row.distance for row in gradients]
    if first.kind != "gradients":
        cause = _CAUSES[words[-1] if words[-1] in _CAUSES else words[0]]
    elif wrong == gradients and max(shares) < 1.05 * min(shares):
        cause = f"every gradient is off by {shares[0]:.0%}: the mean over ranks or over tokens"
    count = sum(row.differs for row in gradients)
    return [
        f"wrong: {first.name} differs first, by {first.distance:.1e} where rounding explains "
        f"{first.bound:.1e}; {count} of {len(gradients)} gradients differ",
        f"most likely: {cause}",
        *hint,
    ]
