"""Streams and lanes of an accelerator that several threads use."""

import threading

import torch

from elixir_compile.runtime.lanes import StreamLane
from tests.device import emulated

DEVICE = torch.device(emulated.NAME, 0)
OTHER = torch.device(emulated.NAME, 1)


def test_the_current_device_and_stream_belong_to_a_thread() -> None:
    seen = []
    with torch.accelerator.device_index(1), torch.Stream(OTHER):
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_device_index()))
        thread.start()
        thread.join()
        assert torch.accelerator.current_device_index() == 1
    assert seen == [0]


def test_two_threads_in_blocks_of_a_lane_get_back_their_own_streams() -> None:
    lane, first = StreamLane(DEVICE, "h2d"), torch.Stream(DEVICE)
    lane_stream = lane._stream
    first_entered, second_entered, first_left = threading.Event(), threading.Event(), threading.Event()
    seen: dict[str, list[torch.Stream]] = {"step": [], "updates": []}

    def enters_first() -> None:
        with first:
            with lane.beside_compute():
                seen["step"].append(torch.accelerator.current_stream(DEVICE))
                first_entered.set()
                assert second_entered.wait(10)
            seen["step"].append(torch.accelerator.current_stream(DEVICE))
        first_left.set()

    def enters_second() -> None:
        before = torch.accelerator.current_stream(DEVICE)
        assert first_entered.wait(10)
        with lane.beside_compute():
            seen["updates"].append(torch.accelerator.current_stream(DEVICE))
            second_entered.set()
            assert first_left.wait(10)
        seen["updates"] += [torch.accelerator.current_stream(DEVICE), before]

    threads = [threading.Thread(target=enters_first), threading.Thread(target=enters_second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen["step"] == [lane_stream, first]
    inside, after, before = seen["updates"]
    assert inside == lane_stream
    assert after == before
