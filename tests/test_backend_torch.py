"""The fallback on models outside the families' table: the same loss as the model's own logits give,
or a refusal.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

from tests.shared import tiny, world
from tests.shared.training import assert_same_curve, refusal, train

SIZES = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
    pad_token_id=None, bos_token_id=None, eos_token_id=0,
)  # fmt: skip
OTHERS = {
    "granite": dict(logits_scaling=4.0, embedding_multiplier=3.0),
    "gemma2": dict(head_dim=8, final_logit_softcapping=2.0, sliding_window=64),
    "cohere": dict(logit_scale=0.25),
    "phi": dict(),  # its head has a bias
    "qwen3": dict(head_dim=8),
}


@pytest.mark.parametrize("family", OTHERS)
def test_token_losses_are_those_of_the_models_own_logits(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    from mca_lite.backend_torch import TokenLossModel

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**SIZES, **OTHERS[family]})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    ids, labels = torch.randint(0, 61, (2, 9)), torch.randint(0, 61, (2, 9))
    labels[:, :2] = -100
    wrapped = TokenLossModel(model, 4)
    wanted = F.cross_entropy(
        model(ids).logits.flatten(0, 1), labels.flatten(), reduction="none"
    ).view(2, 9)
    torch.testing.assert_close(wrapped(ids, labels=labels), wanted, rtol=1e-5, atol=1e-5)
    assert wrapped.head_is_plain == (family == "qwen3")


def test_a_cap_that_the_first_logits_are_far_below_is_not_lost():
    """A model as it is drawn has small logits: a cap changes them by less than rounding."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from mca_lite.backend_torch import TokenLossModel

    torch.manual_seed(0)
    sizes = {**SIZES, **OTHERS["gemma2"], "final_logit_softcapping": 30.0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma2", **sizes))
    wrapped = TokenLossModel(model, 4)
    with torch.no_grad():
        model.lm_head.weight.mul_(200)  # as after training
    ids, labels = torch.randint(0, 61, (2, 9)), torch.randint(0, 61, (2, 9))
    wanted = F.cross_entropy(
        model(ids).logits.flatten(0, 1), labels.flatten(), reduction="none"
    ).view(2, 9)
    torch.testing.assert_close(wrapped(ids, labels=labels), wanted, rtol=1e-5, atol=1e-5)


def adapted(model, saved: str, dtype: torch.dtype):
    """The model with adapters beside a module that trains whole. dtype: of frozen weights."""
    from mca_lite import part_lora

    spec = part_lora.LoraSpec(targets=("q_proj",), rank=2, alpha=4.0, modules_to_save=(saved,))
    return part_lora.inject(model, spec, dtype=dtype)


def curves_with_saved_modules(path: str, out: str) -> list:
    """Curves in float32 and in bf16, beside weights of each kind that train whole."""
    curves = []
    for saved in ("model.norm", "embed_tokens", "lm_head"):
        for dtype in (torch.float32, torch.bfloat16):
            adapt = functools.partial(adapted, saved=saved, dtype=dtype)
            kind = dict(backend="torch", steps=2, count=7, bf16=dtype == torch.bfloat16)
            curves.append(train(path, f"{out}/{len(curves)}", adapt=adapt, **kind))
    return curves


def test_modules_to_save_train_in_bf16(tmp_path):
    """They are float32 beside weights in bf16, with or without adapters."""
    path = tiny.save_model(tmp_path / "model", "qwen3", tie_word_embeddings=False)
    [curves] = world.run(curves_with_saved_modules, 1, path, str(tmp_path))
    for exact, rounded in zip(curves[::2], curves[1::2], strict=True):
        assert_same_curve(rounded, exact, tolerance=0.05)


def test_packing_over_a_sliding_window_is_refused_on_torch(tmp_path):
    path = tiny.save_model(tmp_path / "model", "mistral", sliding_window=16)
    packs = dict(sequence_packing=True, per_device_train_batch_size=4)
    assert (
        "packing: false"
        in world.run(
            refusal, 1, train, path, str(tmp_path / "a"), steps=2, backend="torch", **packs
        )[0]
    )


def test_routers_keep_nothing_of_another_backends_passes():
    from types import SimpleNamespace

    from transformers import AutoModelForCausalLM

    from mca_lite.backend_torch import TorchRouters
    from tests.shared import tiny_moe

    model = AutoModelForCausalLM.from_config(tiny_moe.hf_config("qwen3_moe")).train()
    args = SimpleNamespace(
        moe_aux_loss_coeff=0.1, moe_z_loss_coeff=None, moe_router_bias_update_rate=0.0,
        moe_router_load_balancing_type="aux_loss",
    )  # fmt: skip
    one, other = TorchRouters(model, args), TorchRouters(model, args)
    one.statistics.loss_weight = other.statistics.loss_weight = 1.0
    ids = torch.arange(5)[None]
    for routers in one, other, one:
        routers.expect(torch.zeros(1, 5, dtype=torch.bool))
        model(ids)
        losses = [float(each.losses_of_pass()) for each in (one, other)]
        assert [loss > 0 for loss in losses] == [routers is one, routers is other]


def test_a_family_whose_routers_are_not_found_is_refused():
    """Otherwise its balancing losses and biases would be left out without a word."""
    from types import SimpleNamespace

    from mca_lite.backend_torch import TorchRouters
    from tests.shared import tiny_moe

    model = torch.nn.Linear(1, 1)
    model.config = tiny_moe.hf_config("qwen3_moe_dense_layers")
    args = SimpleNamespace(
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_z_loss_coeff=None,
        moe_router_bias_update_rate=0.0,
    )
    with pytest.raises(ValueError, match="has experts in . layers, and routers .* found in 0"):
        TorchRouters(model, args)


def test_a_family_outside_the_table_starts_as_transformers_draws_it(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    from mca_lite.model import load_torch_model

    config = AutoConfig.for_model("gemma", **SIZES, head_dim=8)
    config.save_pretrained(tmp_path)
    model = load_torch_model(str(tmp_path), train_from_scratch=True, seed=5)
    torch.manual_seed(5)
    wanted = AutoModelForCausalLM.from_config(config).state_dict()
    assert not wanted["model.norm.weight"].any()  # it adds 1 to them
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
