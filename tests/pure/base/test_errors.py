"""`errors`: facts as fields, text made of them, and both survive pickling."""

import pickle
from types import ModuleType

import pytest

from elixir_compile.base import errors
from elixir_compile.base.errors import ElixirError, NoFeasiblePlan, UnknownOption
from elixir_compile.checkpoint import errors as checkpoint_errors
from elixir_compile.runtime.distributed import errors as ranks_errors

SAMPLES: list[ElixirError] = [
    errors.UnknownOption("device_memery", ["device_memory", "planner"]),
    errors.InvalidOption("planner", "best", "one of 'greedy', 'keep_all'"),
    errors.InvalidPlan("bucket b1 is listed twice."),
    errors.IllegalSchedule("b1 is read before its wait.", "  run fwd.0  <-- here"),
    errors.PlanFileError("placements[3].param", "device or host", "gpu"),
    errors.PlanMismatch("graph", "7f3a91", "0b1c2d"),
    errors.NoFeasiblePlan("bwd.mm_2", "model.py:41", 20 << 30, 23 << 30, {"saved": 18 << 30, "temp": 5 << 30}),
    errors.ContradictingFractions(0.5, 1.0, 0.25),
    errors.StateNotApart("gpt2-124m", 0.5, 124_439_808),
    errors.NotPrepared("Its parameters are on meta."),
    errors.OptimizerTooEarly("AdamW"),
    errors.WrongDtype("transformer.wte.weight", "torch.float32", "bfloat16"),
    errors.MasterIgnored("transformer.wte.weight", "torch.bfloat16", "SGD"),
    errors.MasterIgnored("transformer.wte.weight", "torch.bfloat16", "HybridAdamW", True),
    errors.MasterIgnored("transformer.wte.weight", "torch.bfloat16", "HybridProdigy", False, "aten.add joins two"),
    errors.StaleParameters("transformer.wte.weight"),
    errors.GradientsChanged("transformer.wte.weight", "was updated in its backward, and then its gradient was changed"),
    errors.ActivationsGone("h.3.matmul"),
    errors.UnsupportedModel("Embedding8bit", "its parameters are integers."),
    errors.UnsupportedWrapper("Net", "DataParallel", "it runs copies"),
    errors.UnsupportedDevice("npu", ["streams", "torch.npu.memory_allocated"]),
    errors.InvalidProfile("link", "bytes_per_s", "a positive number", -1.0),
    errors.ProfileFileError("nodes[0].h2d.bytes_per_s", "a positive number", -1.0),
    errors.TraceFileError("period_s", "a finite number", "long"),
    errors.UnknownHardware("a100-40gb", ["a100-40g", "h100-80g"]),
    errors.UnknownModel("gpt2-124", ["gpt2-124m", "llama-7b"], "there is no such file"),
    errors.UnknownSchedule("looped", ["gpipe", "looped-bfs"]),
    errors.UnknownSchedule("DualPipeV", ["gpipe", "looped-bfs"], True),
    errors.NoFeasibleStages("gpipe", "h.0 .. h.3", 3 << 30, 2 << 30, "device", 8),
    errors.NestedMeasurement("", True),
    errors.UnknownSubject("b9", ["b0", "fwd.0"]),
    errors.DiskFull("/disk", "b3.exp_avg", 3 << 30, 1 << 30, "No space left on device"),
    errors.DiskFailed("/disk/0003", "write", "Input/output error", 5),
    errors.UnforeseenState("b3", "late", "torch.float32", (768, 3072)),
    errors.OptimizerNotTensorWise(100, "aten.stack joins two parameters", "Muon"),
    errors.DiskCorrupted("/disk/0003", 2, 4 << 20),
    errors.QuestionFileError("problem.graph.ops[3].flops", "a whole number", "many"),
    checkpoint_errors.NotACheckpoint("run", "there is nothing"),
    checkpoint_errors.CheckpointCorrupted("run", "tensors/__0_0.distcp", "model.wte.weight", "is damaged"),
    checkpoint_errors.CheckpointMismatch("run", "model", ["wte.weight: only in the model"] * 9),
    checkpoint_errors.NotSavable("run", "extra.loader", "a builtins.generator"),
    ranks_errors.PeerFailed([0, 2], "the plan", "Connection closed by peer", 5.0),
    ranks_errors.RanksDiffer([1], ["op fwd.relu: only on rank 1"] * 9, "Catch it on all ranks."),
    ranks_errors.OverflowUnseen([0]),
]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_pickle_keeps_type_text_and_fields(error: ElixirError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error) != ""
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_every_error_is_also_the_builtin_a_user_would_catch(error: ElixirError) -> None:
    assert isinstance(error, ValueError | MemoryError | RuntimeError | OSError)


@pytest.mark.parametrize("module", [errors, checkpoint_errors, ranks_errors], ids=lambda module: module.__name__)
def test_the_tree_in_the_docstring_names_every_class(module: ModuleType) -> None:
    tree = module.__doc__ or ""
    classes = [
        name for name, value in vars(module).items() if isinstance(value, type) and value.__module__ == module.__name__
    ]
    assert [name for name in classes if name not in tree] == []
    assert len(classes) > len([sample for sample in SAMPLES if type(sample).__module__ == module.__name__])


def test_unknown_option_suggests_the_nearest() -> None:
    assert "Did you mean 'device_memory'?" in str(SAMPLES[0])
    assert "Did you mean" not in str(UnknownOption("zzz", ["device_memory"]))


def test_unknown_hardware_suggests_the_nearest() -> None:
    known = ["a100-40g", "rtx4090-24g"]
    assert "Did you mean 'a100-40g'?" in str(errors.UnknownHardware("A100-40GB", known))
    assert errors.UnknownHardware("4090", known).nearest == "rtx4090-24g"
    assert "Did you mean" not in str(errors.UnknownHardware("zzz", known))
    assert "a100-40g, rtx4090-24g" in str(errors.UnknownHardware("zzz", known))


def test_unknown_model_suggests_the_nearest_and_says_why() -> None:
    error = errors.UnknownModel("GPT2-124", ["gpt2-124m", "llama-7b"], "there is no such file")
    assert "unknown model 'GPT2-124' (there is no such file). Did you mean 'gpt2-124m'?" in str(error)
    assert "Did you mean" not in str(errors.UnknownModel("zzz", ["gpt2-124m"]))


def test_illegal_schedule_shows_the_line() -> None:
    assert str(SAMPLES[3]).endswith("<-- here")
    assert isinstance(SAMPLES[3], errors.InvalidPlan)


def test_plan_mismatch_names_both_fingerprints() -> None:
    assert "7f3a91" in str(SAMPLES[5])
    assert "0b1c2d" in str(SAMPLES[5])


def test_no_feasible_plan_names_op_bytes_and_budget() -> None:
    text = str(SAMPLES[6])
    assert "needs 23.0 GiB of device memory at bwd.mm_2 (model.py:41), budget 20.0 GiB, short by 3.0 GiB" in text
    assert "live: saved 18.0 GiB, temp 5.0 GiB" in text
    assert f"device_memory={23 << 30}" in text


def test_no_feasible_plan_for_the_host_names_no_op() -> None:
    text = str(NoFeasiblePlan("", "", 1 << 30, 2 << 30, {}, "host"))
    assert text.startswith("needs 2.0 GiB of host memory, budget 1.0 GiB")
    assert f"host_memory={2 << 30}" in text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([2, 0, 1], "ranks 0-2"), ([0, 1, 5], "ranks 0-1, 5"), (range(1024), "ranks 0-1023")],
)
def test_ranges_of_ranks_are_abbreviated(ranks: list[int], text: str) -> None:
    assert ranks_errors.ranks_text(ranks) == text


def test_lost_ranks_and_ranks_with_an_error_have_different_texts() -> None:
    lost = str(ranks_errors.PeerFailed([0, 2], "the plan", "Connection closed by peer.", 5.0))
    assert lost.startswith(
        "no answer from one of ranks 0, 2 in 5 s during the exchange of the plan: Connection closed by peer. It died"
    )
    said = str(ranks_errors.PeerFailed([2], "the plan", "ValueError: no idea."))
    assert said.startswith("rank 2 failed during the exchange of the plan: ValueError: no idea. All ranks stop")


def test_the_error_of_different_ranks_lists_some_differences() -> None:
    text = str(ranks_errors.RanksDiffer([1, 2], [f"op {number}" for number in range(10)]))
    assert "ranks 1-2 do not do what the others do:\n  op 0\n" in text
    assert "\n  op 7\n  and 2 more\n" in text


def test_no_graph_captured_is_a_warning() -> None:
    assert issubclass(errors.NoGraphCaptured, errors.ElixirWarning)
    assert issubclass(errors.RanksApart, errors.ElixirWarning)
    assert issubclass(errors.ElixirWarning, UserWarning)
