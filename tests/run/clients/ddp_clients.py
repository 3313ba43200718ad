"""Training by other libraries on several ranks, which wrap the model in DistributedDataParallel by themselves."""

import gc
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.runtime.measure import Resident
from tests.run.clients.client_runs import eager_adamw, hybrid_adamw, own_copy, rows, weights
from tests.run.models import small_gpt2

NUM_STEPS, BATCH = 4, 8
SHARE = 0.75
"""The budget as a share of the peak of `aot_eager`."""
OPTIONS: Mapping[str, Any] = {"inner": "aot_eager", "report": False, "plan_cache": False, "search_timeout": 1}
Measure = Callable[[Callable[[], Any]], Any]
"""Runs the last forward and backward, and returns their result."""


def by_trainer(model: nn.Module, optimizer: Any, measured: Measure, folder: str) -> None:
    """Train by the Trainer of transformers, clipped."""
    import transformers

    class Trainer(transformers.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            def run() -> Any:
                return super(Trainer, self).training_step(*args, **kwargs)

            return measured(run) if self.state.global_step == NUM_STEPS - 1 else run()

    arguments = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH,
        max_steps=NUM_STEPS,
        max_grad_norm=0.1,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        lr_scheduler_type="constant",
        seed=5,
    )
    data: Any = rows(2 * NUM_STEPS * BATCH)
    Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None)).train()


def by_accelerate(model: nn.Module, optimizer: Any, measured: Measure, folder: str) -> None:
    """Train by Accelerate, two micro-batches a step, clipped."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = DataLoader(rows(2 * NUM_STEPS * BATCH), batch_size=BATCH)  # type: ignore[arg-type]
    own, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, batch in enumerate(loader):

        def run(batch: Any = batch) -> None:
            accelerator.backward(own(**batch).loss)

        with accelerator.accumulate(own):
            measured(run) if number == NUM_STEPS - 1 else run()
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(own.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


def by_lightning(model: nn.Module, optimizer: Any, measured: Measure, folder: str) -> None:
    """Train by Lightning's strategy `ddp`, clipped; it shuffles nothing."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def configure_optimizers(self) -> Any:
            return optimizer

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.model(**batch).loss

    class Strategy(lightning.pytorch.strategies.DDPStrategy):
        def backward(self, *args: Any, **kwargs: Any) -> Any:
            return super().backward(*args, **kwargs)

    data: Any = rows(2 * NUM_STEPS * BATCH)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=distributed.get_world_size(),
        strategy=Strategy(process_group_backend="gloo"),
        max_steps=NUM_STEPS,
        gradient_clip_val=0.1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False))
    module = Module()
    trainer.fit(module, loader)
    # The loop of the library is over: one more step of the same model, in the wrapper of its own.
    wrapped = nn.parallel.DistributedDataParallel(model)
    batch = next(iter(loader))
    measured(lambda: wrapped(**batch).loss.backward())


CLIENTS: Mapping[str, Callable[[nn.Module, Any, Measure, str], None]] = {
    "Trainer": by_trainer,
    "Accelerate": by_accelerate,
    "Lightning": by_lightning,
}


def trained(client: str, backend: str, budget_bytes: int, folder: str) -> tuple[nn.Module, int]:
    """Return a model that `client` trained, and the peak of its last forward and backward, with the buckets of the
    wrapper, which torch tells nobody of later."""
    gc.collect()
    with Resident() as before:
        others_bytes = before.nbytes  # the weights of the other run
    torch.manual_seed(0)
    model = own_copy(small_gpt2(num_layers=2))
    is_ours = backend == "elixir"
    options = {"options": {**OPTIONS, "device_memory": budget_bytes}} if is_ours else {}
    model.compile(backend=backend, **options)
    peaks: list[int] = []

    def measured(run: Callable[[], Any]) -> Any:
        found: list[Any] = []
        peaks.append(elixir.measure_step(lambda: found.append(run()), device="cpu").device_peak_bytes)
        assert not is_ours or executor_of(model).reducers, "the wrapper of the library reduces no gradient"
        return found[0]

    CLIENTS[client](model, (hybrid_adamw if is_ours else eager_adamw)(model), measured, folder)
    (peak_bytes,) = peaks
    return model, peak_bytes - others_bytes + sum(param.nbytes for param in model.parameters())


def trains(rank: int, world_size: int, client: str, folder: str) -> dict[str, Any]:
    """Train by `client` under `aot_eager` and under a budget; return how far both are apart, on ranks and in bytes."""
    warnings.simplefilter("ignore")
    here = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29511,
    }
    os.environ.update({name: str(value) for name, value in here.items()})
    eager, eager_bytes = trained(client, "aot_eager", 0, folder)
    expected = weights(eager)
    del eager
    budget_bytes = int(SHARE * eager_bytes)
    model, peak_bytes = trained(client, "elixir", budget_bytes, folder)
    got = weights(model)
    total = torch.stack([value.double().sum() for value in got.values()])
    everyone = [torch.zeros_like(total) for _ in range(world_size)]
    distributed.all_gather(everyone, total)
    return {
        "apart": [name for name in expected if not torch.equal(expected[name], got[name])],
        "ranks_differ": not torch.equal(*everyone),
        "peak_bytes": peak_bytes,
        "budget_bytes": budget_bytes,
        "eager_bytes": eager_bytes,
    }
