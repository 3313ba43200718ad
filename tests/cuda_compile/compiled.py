"""Train one model on the device that does nothing, and print what was compiled for it as one line of JSON.

python -m tests.cuda_compile.compiled gpt2 120000000    # started by `tests.cuda_compile`, which preloads the device

Each step is the genuine one: capture, plan, Inductor's code, Triton's kernels down to machine code, their launchers,
torch's allocator, copies, updates on the host. Only kernels do not run, so all values are those of fresh memory. The
folders of the caches are new, so that everything is compiled.
"""

import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.session.machine import library_bytes

NUM_WORDS = 1021
"""No multiple of 8: Inductor tries to pad the products of the head."""
NUM_STEPS = 3
TIGHT_SHARE = 0.45
"""Of what a step takes beside the workspaces of libraries if nothing moves."""
PROBLEM = "single_label_classification"
"""Named, because the model would note it in its first forward, and be captured again."""
LANGUAGE = {
    "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": NUM_WORDS,
    "intermediate_size": 512, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def gpt2() -> nn.Module:
    """Return a GPT-2 with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 256, "n_layer": 3, "n_head": 4, "vocab_size": NUM_WORDS, "n_positions": 128}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))


def llama() -> nn.Module:
    """Return a Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**LANGUAGE))


def qwen3() -> nn.Module:
    """Return a Qwen3."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(head_dim=64, **LANGUAGE))


def vit() -> nn.Module:
    """Return a vision transformer."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: LANGUAGE[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    return ViTForImageClassification(
        ViTConfig(image_size=64, patch_size=8, intermediate_size=512, problem_type=PROBLEM, **sizes)
    )


MODELS: Mapping[str, tuple[Callable[[], nn.Module], torch.dtype | None]] = {
    "gpt2": (gpt2, None),
    "llama": (llama, torch.bfloat16),
    "qwen3": (qwen3, torch.bfloat16),
    "vit": (vit, torch.float16),
}
"""By name, what makes the model, and the dtype of autocast."""


def batch_of(name: str) -> dict[str, torch.Tensor]:
    """Return a batch for the model `name`."""
    if name == "vit":
        return {
            "pixel_values": torch.zeros(8, 3, 64, 64, device="cuda"),
            "labels": torch.zeros(8, device="cuda").long(),
        }
    ids = torch.zeros(8, 128, dtype=torch.long, device="cuda")
    return {"input_ids": ids, "labels": ids}


class Training:
    """Steps of a model by one backend, the kernels that they compile, and the most bytes that they ask for at once."""

    def __init__(self, name: str, backend: str, **options: object) -> None:
        from torch._inductor import metrics

        torch._dynamo.reset()
        gc.collect()
        make, dtype = MODELS[name]
        before, began_s, model = metrics.generated_kernel_count, time.perf_counter(), make().train()
        if backend == "elixir":
            elixir.prepare(model, device="cuda")
        optimizer = (elixir.HybridAdamW if backend == "elixir" else torch.optim.AdamW)(model.to("cuda").parameters())
        compiled = torch.compile(model, backend=backend, options=options or None)
        self.step_bytes: list[int] = []
        for _ in range(NUM_STEPS):
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
                loss = compiled(**batch_of(name)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
            self.step_bytes.append(torch.cuda.memory_stats()["requested_bytes.all.peak"])
        self.num_kernels = metrics.generated_kernel_count - before
        self.took_s = time.perf_counter() - began_s
        self.plan = elixir.compilations(model)[0].plan if backend == "elixir" else None

    def row(self) -> dict[str, Any]:
        """Return the figures of the training."""
        row = {"kernels": self.num_kernels, "took_s": round(self.took_s, 1), "step_bytes": self.step_bytes}
        if self.plan is not None:
            verbs = {str(action.verb) for schedule in self.plan.schedules for action in schedule.actions}
            row |= {"regions": len(self.plan.regions), "verbs": sorted(verbs), "budget_bytes": self.plan.budget_bytes}
            row["planned_bytes"] = self.plan.prediction.device_peak_bytes
        return row


def main(name: str, budget: str = "") -> None:
    """Train the model `name` in `budget` bytes of the device; or without a budget, and then by torch's own Inductor."""
    warnings.filterwarnings("ignore", message="TensorFloat32")
    # The device has no cuDNN, whose front end reads what the library answers. Convolutions and attention have others.
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch._inductor.config.compile_threads = 1  # pyright: ignore[reportAttributeAccessIssue]
    own = Training(name, "elixir", plan_cache=False, report=False, device_memory=int(budget) if budget else None).row()
    if budget:
        print(json.dumps({"tight": own}))
        return
    floor_bytes = library_bytes(torch.device("cuda", 0))
    tight_bytes = floor_bytes + int(TIGHT_SHARE * (own["planned_bytes"] - floor_bytes))
    print(json.dumps({"free": own, "torch": Training(name, "inductor").row(), "tight_bytes": tight_bytes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
