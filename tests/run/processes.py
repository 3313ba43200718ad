"""Real ranks: a function of a test module in several processes, joined by a gloo group over a file.

```text
  def adds(rank: int, world_size: int, number: int) -> int: ...      # a function of the module, not a closure
  assert spawn(adds, 2, 5, folder=tmp_path) == [5, 6]                # arguments and results as JSON can hold them
  assert apart(measured_bytes, "gpt2") < budget_bytes                # one process without a group
  assert program("print(6 * 7)", folder=tmp_path) == "42\n"          # a program in a process of its own
```

The processes are forked from a server that has loaded torch, so a few of them take a fraction of a second. Warnings
are errors in them, as in pytest. Whatever goes wrong in any rank is shown with the output of all.
"""

import builtins
import gc
import importlib
import json
import multiprocessing
import os
import sys
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

_LOADED = [
    "torch",
    "torch.distributed.tensor",
    "torch._inductor.compile_fx",
    "scipy.optimize",
    "torch.distributed.tensor.experimental",  # what follows is imported by the first capture or step of a process
    "torch.export._trace",
    "torch._inductor.compiler_bisector",
    "torch.fx.experimental.validator",
    "elixir_compile.session.backend",
    "elixir_compile.session.prepare",
    "elixir_compile.optim.adamw",
    "elixir_compile.checkpoint.loading",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "pytest",
    "hypothesis",
    "tests.run.models",
    "tests.run.ranks_training",
]
"""What the server loads once, if it is there; nothing of it may start threads or a process group."""


def spawn(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    folder: Path,
    limit_s: float = 60.0,
    timeout_s: float = 30.0,
    lost: Collection[int] = (),
) -> list[Any]:
    """Return what `function(rank, world_size, *args)` returns on each rank, within a default group of gloo.

    Ranks in `lost` may end in any way, and have no result: None. `timeout_s` is that of the group. After `limit_s`
    those still running are killed. AssertionError with the output of all ranks where a rank fails.
    """
    place = folder / f"ranks-{len(list(folder.glob('ranks-*')))}"
    place.mkdir()
    context = _forks()
    texts = json.dumps(args)
    ranks = [
        context.Process(target=_rank, args=(function, rank, world_size, texts, str(place), timeout_s), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    late = _wait([process for rank, process in enumerate(ranks) if rank not in lost], limit_s)
    for process in ranks:
        process.kill()
        process.join()
    results = [_result(place, rank) if rank not in lost else None for rank in range(world_size)]
    failed = [rank for rank, found in enumerate(results) if found is None and rank not in lost]
    if late or failed:
        why = f"not done in {limit_s} s" if late else f"failed on {failed}"
        raise AssertionError(f"{function.__name__} on {world_size} ranks: {why}{_outputs(place, world_size)}")
    return [None if found is None else found["result"] for found in results]


def in_turn(rank: int, world_size: int, module: str, checks: Sequence[Sequence[Any]]) -> list[Any]:
    """Return what each of `checks`, the name of a function of `module` and its arguments, returns, one after another in
    the same processes: `spawn(in_turn, 2, ranks_checks.__name__, [["trains", "odd", {}]], folder=tmp_path)`."""
    found = []
    for name, *arguments in checks:
        print(f"{name} {arguments}", flush=True)
        found.append(getattr(importlib.import_module(module), name)(rank, world_size, *arguments))
    return found


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Return what `function(*args)` returns in a process of its own, which holds no tensor of an earlier test.

    It is forked from the server, which saves the 5 s that a new interpreter takes to load torch. If the default device
    of this process is an accelerator, it is that of the other process, which is none of a fork: torch refuses CUDA
    there.
    """
    import torch

    device = torch.get_default_device()
    context = _forks() if device.type == "cpu" else multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=_begin, initargs=(str(device),)) as pool:
        return pool.submit(function, *args).result()


def _begin(device: str) -> None:
    """Begin a process of `apart`."""
    _start_quick()
    if device != "cpu":
        import torch

        torch.set_default_device(device)


def programs(text: str, *arguments: object, folder: Path, environments: Sequence[Mapping[str, str]]) -> list[str]:
    """Return what the Python program `text` prints in a process for each of `environments`, all at once.

    AssertionError with the output of all if one of them fails.
    """
    outputs = [folder / f"program-{number}.txt" for number in range(len(environments))]
    started = [
        start_program(text, *arguments, output=output, environment=environment)
        for output, environment in zip(outputs, environments, strict=True)
    ]
    is_late = _wait(started, 120.0)
    for process in started:
        process.kill()
        process.join()
    said = [output.read_text(encoding="utf-8") for output in outputs]
    assert not is_late, said
    assert not any(process.exitcode for process in started), "\n---\n".join(said)
    return said


def program(text: str, *arguments: object, folder: Path) -> str:
    """Return what the Python program `text` prints in a process of its own; see `start_program`."""
    return programs(text, *arguments, folder=folder, environments=[{}])[0]


def start_program(text: str, *arguments: object, output: Path, environment: Mapping[str, str] | None = None) -> Any:
    """Start a process that runs the Python program `text` and prints to `output`; return the process.

    It is forked from the server, so it takes none of the 5 s in which a new interpreter loads torch, and it ends as
    forks do: without exit handlers.
    """
    argv = ["program", *map(str, arguments)]
    output.touch()
    process = _forks().Process(target=_program, args=(text, argv, dict(environment or {}), str(output)), daemon=True)
    process.start()
    return process


def _program(text: str, argv: list[str], environment: Mapping[str, str], name: str) -> None:
    _start_quick()
    output = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    sys.argv = argv
    exec(compile(text, "program", "exec"), {"__name__": "__main__"})


def _start_quick() -> None:
    """Let no collection look at the 500,000 objects of loaded modules, and at others as rarely as `tests/conftest.py`:
    collections took 7 % of the time of a capture. Leave out what Dynamo only logs."""
    leave_out_what_is_logged()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def leave_out_what_is_logged() -> None:
    """Let Dynamo do nothing that only lines of its logs need.

    It would measure how long the guards of a graph take: before each measurement it empties the caches of the
    processor, in 18 ms. It would look up the function of each line that it traces, for which each process reads source
    files of torch token by token: 1 % of the seconds of tests of several ranks. AOTAutograd would write each graph as
    text: another 1 %.
    """
    guards: Any = importlib.import_module("torch._dynamo.guards")
    guards.profile_guard_manager = lambda *_: 0.0
    tracer: Any = importlib.import_module("torch._dynamo.symbolic_convert")
    tracer.get_funcname = lambda *_: None
    graphs: Any = importlib.import_module("torch._functorch._aot_autograd.graph_compile")
    graphs._log_joint_graph = lambda *_: None
    graphs._log_fw_bw_graphs = lambda *_: (None, None)


def let_forks_use_cuda() -> None:
    """Let torch count the devices without the runtime of CUDA, behind which no fork can use them.

    Inductor counts them when it is imported.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def _forks() -> Any:
    """Return the context whose processes are forked from the server."""
    let_forks_use_cuda()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    return context


def _wait(processes: Collection[Any], limit_s: float) -> bool:
    """Wait until all `processes` have ended; return whether any has not in `limit_s`."""
    end_s = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.0, end_s - time.monotonic()))
    return any(process.is_alive() for process in processes)


def _result(place: Path, rank: int) -> Any:
    path = place / f"{rank}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _outputs(place: Path, world_size: int) -> str:
    texts = ((place / f"{rank}.txt", rank) for rank in range(world_size))
    return "".join(
        f"\n--- rank {rank}\n{path.read_text(encoding='utf-8', errors='replace') if path.exists() else 'not started'}"
        for path, rank in texts
    )


def filter_warnings() -> None:
    """Treat warnings as pytest does by pyproject.toml, except that warnings of its own classes are errors too."""
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    for line in pyproject["tool"]["pytest"]["ini_options"]["filterwarnings"]:
        action, message, category = [*line.split(":"), "", "Warning"][:3]
        if hasattr(builtins, category or "Warning"):
            warnings.filterwarnings(action, message, getattr(builtins, category or "Warning"))


def _rank(function: Callable[..., Any], rank: int, world_size: int, texts: str, place: str, timeout_s: float) -> None:
    """One process: everything it prints goes to a file, and so does its result once it is whole."""
    _start_quick()
    output = os.open(f"{place}/{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import torch
    from torch import distributed

    try:
        torch.set_num_threads(1)
        filter_warnings()
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{place}/group",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        found = function(rank, world_size, *json.loads(texts))
        part = Path(f"{place}/{rank}.part")
        part.write_text(json.dumps({"result": found}), encoding="utf-8")
        part.rename(f"{place}/{rank}.json")
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # No exit handlers: those of gloo wait for ranks that a test has killed.
    os._exit(0)
