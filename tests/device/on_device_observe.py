"""The bytes of a step by kind, from the history that the allocator of the second device type keeps."""

from tests.gpu import test_accelerator_memory


def test_kinds_add_up_to_the_allocators_peak_and_are_those_of_the_plan() -> None:
    test_accelerator_memory.test_kinds_add_up_to_the_allocators_peak_and_are_those_of_the_plan("zero3_offload")
