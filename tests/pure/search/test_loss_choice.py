"""One function decides whether the loss is computed in chunks, by the plans of both forms of the step."""

from dataclasses import dataclass, field, replace

import pytest

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Options
from elixir_compile.base.units import MIB
from elixir_compile.ir import Activations, GroupId, OpId, Plan, Prediction, Saving, StorageId
from elixir_compile.ir.graph import LossRegion
from elixir_compile.search.joint.variants import LossAttempt, decided_chunks, possible_chunks, with_chosen_loss

REGION = LossRegion(name="l", nodes=("l",), num_tokens=4096, num_classes=32_000, logits_bytes=500 * MIB, source="")
CHUNKS = possible_chunks(REGION, Options())
EASY = Plan(
    name="step",
    graph="",
    cluster="1 x cpu",
    budget_bytes=1,
    buckets=(),
    placements=(),
    regions=(),
    schedules=(),
    decisions=(),
    prediction=Prediction(
        step_s=1.0, exposed_s=0.0, hidden_share=1.0, device_peak_bytes=1, device_peak_at=OpId(""), host_peak_bytes=0
    ),
)
GROUP = Activations(id=GroupId("a"), storages=(StorageId("s"),), nbytes=1, saving=Saving.RECOMPUTE)
PRESSED = replace(EASY, activations=(GROUP,))
FASTER = replace(PRESSED, prediction=replace(PRESSED.prediction, step_s=0.9))
NOTHING_FITS = NoFeasiblePlan("op", "", 1, 3, {})
LESS_NEEDED = NoFeasiblePlan("op", "", 1, 2, {})
Outcome = Plan | NoFeasiblePlan


@dataclass
class Steps:
    """Makes the plans of both forms of a step, and notes the numbers of chunks that were asked for."""

    whole: Outcome
    chunked: Outcome = PRESSED
    asked: list[int | None] = field(default_factory=list)

    def make(self, attempt: LossAttempt) -> Plan:
        self.asked.append(attempt.num_chunks)
        found = self.whole if attempt.cut is None else self.chunked
        if isinstance(found, NoFeasiblePlan):
            raise found
        return found if attempt.review is None else attempt.review(found)


def test_without_a_loss_to_chunk_one_form_is_planned() -> None:
    steps = Steps(PRESSED)
    assert with_chosen_loss(None, steps.make) is PRESSED
    assert steps.asked == [None]


@pytest.mark.parametrize(
    ("whole", "chunked", "asked", "num_chunks"),
    [
        (EASY, FASTER, [1], 1),
        (PRESSED, FASTER, [1, 8], 8),
        (PRESSED, PRESSED, [1, 8, 1], 1),
        (PRESSED, NOTHING_FITS, [1, 8, 1], 1),
        (NOTHING_FITS, PRESSED, [1, 8], 8),
    ],
)
def test_chunks_are_planned_if_memory_is_short_and_taken_if_faster(
    whole: Outcome, chunked: Outcome, asked: list[int], num_chunks: int
) -> None:
    steps = Steps(whole, chunked)
    assert with_chosen_loss(CHUNKS, steps.make).loss_chunks == num_chunks
    assert steps.asked == asked


def test_if_nothing_fits_the_error_is_of_the_smaller_need() -> None:
    with pytest.raises(NoFeasiblePlan) as caught:
        with_chosen_loss(CHUNKS, Steps(NOTHING_FITS, LESS_NEEDED).make)
    assert caught.value.needed_bytes == LESS_NEEDED.needed_bytes


def test_in_inference_a_pressed_plan_is_taken_whole() -> None:
    steps = Steps(PRESSED, FASTER)
    assert with_chosen_loss(CHUNKS, steps.make, is_training=False) is PRESSED
    assert steps.asked == [1]


@pytest.mark.parametrize(
    ("fitting", "expected"),
    [
        ({(1, True)}, [(1, True)]),
        ({(8, True)}, [(1, True), (8, True)]),
        ({(1, False)}, [(1, True), (8, True), (1, False)]),
        ({(8, False)}, [(1, True), (8, True), (1, False), (8, False)]),
    ],
)
def test_if_the_whole_batch_comes_first_it_is_divided_only_if_it_fits_with_neither_form_of_the_loss(
    fitting: set[tuple[int, bool]], expected: list[tuple[int, bool]]
) -> None:
    """An attempt is the number of chunks, and whether the batch stays whole."""
    asked: list[tuple[int | None, bool]] = []

    def make(attempt: LossAttempt) -> Plan:
        asked.append((attempt.num_chunks, attempt.keeps_whole))
        if asked[-1] not in fitting:
            raise NOTHING_FITS
        return EASY if attempt.review is None else attempt.review(EASY)

    made = with_chosen_loss(CHUNKS, make, is_whole_first=True)
    assert asked == expected
    assert made.loss_chunks == expected[-1][0]


@pytest.mark.parametrize("decided", [1, 4])
def test_a_decided_number_of_chunks_is_not_decided_again(decided: int) -> None:
    steps = Steps(PRESSED, FASTER)
    assert with_chosen_loss(CHUNKS, steps.make, decided=decided).loss_chunks == decided
    assert steps.asked == [decided]


def test_the_plan_of_the_user_decides_before_earlier_graphs() -> None:
    assert decided_chunks(replace(EASY, loss_chunks=2), [4]) == 2
    assert decided_chunks(None, [None, 4, 8]) == 4
    assert decided_chunks(None, []) is None


def test_small_losses_are_never_chunked() -> None:
    assert possible_chunks(replace(REGION, logits_bytes=MIB), Options()) is None
    assert possible_chunks(REGION, Options(activations="keep")) is None
    assert possible_chunks(None, Options()) is None


def test_on_several_ranks_only_the_classes_decide() -> None:
    found = [possible_chunks(replace(REGION, logits_bytes=size), Options(), is_shared=True) for size in (1, MIB << 20)]
    assert [chunks and chunks.num_chunks for chunks in found] == [16, 16]
    assert possible_chunks(replace(REGION, num_classes=10), Options(), is_shared=True) is None
