"""`profile_steps`, and what a run that is out of memory is told."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from mca_lite import TrainingArguments, callbacks, cli
from mca_lite.errors import ConfigError
from tests.shared import commands, tiny, world
from tests.shared.layouts import TP2_SP
from tests.shared.small_runs import save_tokenizer, write_data
from tests.shared.training import attempt


@pytest.mark.parametrize("backend, ranks", [("megatron", 2), ("torch", 1)])
def test_steps_are_profiled_on_every_rank(tmp_path, backend, ranks):
    out = tmp_path / "out"
    model = tiny.save_model(tmp_path / "hf", "qwen3", num_hidden_layers=1)
    layout = TP2_SP if ranks == 2 else {}
    keys = dict(backend=backend, profile_steps="2-3", steps=4, **layout)
    errors, printed, _ = zip(*world.run(attempt, ranks, model, str(out), **keys), strict=True)
    assert not any(errors)
    assert "profile of steps 2 to 3, rank 0" in printed[0]
    assert (
        printed[0].index("step 1/4") < printed[0].index("profile of") < printed[0].index("step 4")
    )
    for kind in ("matmul", "attention", "optimizer", "norm, elementwise", "copy", "other"):
        assert f"\n  {kind} " in printed[0], kind
    assert ("\n  communication " in printed[0]) == (ranks == 2)
    files = sorted(path.name for path in (out / "profile").iterdir())
    assert files == [f"trace_rank{rank}.json.gz" for rank in range(ranks)]
    for name in files:
        with gzip.open(out / "profile" / name, "rt") as file:
            events = json.load(file)["traceEvents"]
        # two updates: the other steps are not in the window
        assert sum("Optimizer.step" in str(event.get("name")) for event in events) == 2


def test_a_run_that_ends_in_the_window_has_its_trace(tmp_path):
    out = tmp_path / "out"
    model = tiny.save_model(tmp_path / "hf", "qwen3", num_hidden_layers=1)
    keys = dict(backend="torch", profile_steps=2, steps=1)
    error = world.run(attempt, 1, model, str(out), **keys)[0][0]
    assert "profile_steps" in error and "1 steps" in error
    keys.update(profile_steps="2-9", steps=3)
    assert "profile of steps 2 to 3" in world.run(attempt, 1, model, str(out), **keys)[0][1]


@pytest.mark.parametrize("steps", ["12-10", "0", "-3", "a", "3-", "1-2-3"])
def test_what_are_no_steps_is_refused(steps):
    with pytest.raises(ConfigError, match="profile_steps"):
        TrainingArguments(output_dir="unused", profile_steps=steps)


# names as kernels of one H200 and operations of a CPU have them
KERNELS = {
    "matmul": "nvjet_tst_128x256_64x4_1x2_h_bz_TNT sm90_xmma_gemm_bf16bf16_bf16f32 aten::addmm "
    "aten::bmm aten::mm cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>",
    "attention": "pytorch_flash::flash_bwd_kernel cudnn_generated_fort_native_sdpa_sm90_fprop "
    "aten::_scaled_dot_product_flash_attention_for_cpu fmha_cutlassF_bf16",
    "communication": "ncclDevKernel_AllReduce_Sum_f32 c10d::allreduce_ gloo:all_gather",
    "optimizer": "_adam_kernel at::native::multi_tensor_apply_kernel Optimizer.step#AdamW.step",
    "norm, elementwise": "triton_red_fused__to_copy_mean_mul_pow_rsqrt_2 _swiglu_kernel aten::mul "
    "at::native::vectorized_elementwise_kernel<4,at::native::AddFunctor> aten::_fused_rms_norm",
    "copy": "Memcpy_HtoD aten::copy_ at::native::CatArrayBatchedCopy aten::cat Memset "
    "at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>",
    "other": "aten::select autograd::engine::evaluate_function:AddBackward0 aten::embedding",
}


@pytest.mark.parametrize("kind", KERNELS)
def test_a_kernel_has_its_kind(kind):
    assert {name: callbacks.kind_of(name) for name in KERNELS[kind].split()} == dict.fromkeys(
        KERNELS[kind].split(), kind
    )


def test_of_a_gpu_kernels_alone_count():
    def event(key, cuda_us, cpu_us, is_kernel=True, is_user_annotation=False):
        kinds = torch.autograd.DeviceType
        return SimpleNamespace(
            key=key,
            device_type=kinds.CUDA if is_kernel else kinds.CPU,
            is_user_annotation=is_user_annotation,
            self_device_time_total=cuda_us,
            self_cpu_time_total=cpu_us,
        )

    events = [
        event("nvjet_a", 250e3, 0),
        event("nvjet_b", 350e3, 0),
        event("ncclDevKernel_AllGather", 100e3, 0),
        event("aten::mm", 600e3, 5e3, is_kernel=False),  # launched them
        event("nccl:all_gather", 100e3, 0, is_user_annotation=True),
    ]
    lines = callbacks.table(events, 1.0)
    assert [line.split()[:4] for line in lines] == [
        ["matmul", "600.0", "ms", "60.0%"],
        ["communication", "100.0", "ms", "10.0%"],
        ["no", "kernel", "runs", "300.0"],
    ]
    assert lines[0].endswith("nvjet_b")


# -- out of memory


def words_of(folder, more: str = "") -> list[str]:
    words = f"configs/sft.yaml model_name_or_path={folder}/hf dataset={folder}/chat.jsonl "
    words += f"output_dir={folder}/out cache_dir={folder}/cache {commands.SHORT} "
    return f"{words} {more}".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    tiny.save_model(folder / "hf", "qwen3")
    save_tokenizer(folder / "hf")
    write_data(folder)
    return folder


def run_out_of_memory(words: list[str]) -> tuple[int, str, str]:
    from mca_lite.backend_megatron import MegatronBackend

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    MegatronBackend.forward_backward = full
    return commands.ended(cli.main, words)


def test_a_run_out_of_memory_names_the_command_that_plans(folder):
    words = words_of(folder, "cutoff_len=32")
    code, _, error = world.run(run_out_of_memory, 1, words)[0]
    assert code == 2 and error.startswith("error: CUDA out of memory. Tried to")
    assert "python -m mca_lite plan CONFIG --memory" in error
