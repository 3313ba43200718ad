"""`search.stages.choose`: the slowest stage is as fast as in any cut that fits."""

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.search.shares.choose import Budget
from elixir_compile.search.stages.choose import Cut, Option, Options, best_split, slowest_s

Layers = list[tuple[int, int, int]]
"""Seconds, bytes that stay and passing bytes of each layer."""
LAYERS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 4)), min_size=4, max_size=6)


def options_of(layers: Layers) -> Options:
    """A stage keeps its bytes, or half of them for a half more of its seconds, or a quarter with as much on the host
    for twice its seconds."""

    def options(stage: int, first: int, end: int) -> Sequence[Option]:
        own = layers[first:end]
        seconds, added = sum(each for each, _, _ in own), sum(each for _, each, _ in own)
        passing = max(each for _, _, each in own)
        return [
            Option(seconds=float(seconds), added_bytes=added, passing_bytes=passing, host_bytes=0),
            Option(seconds=1.5 * seconds, added_bytes=added // 2, passing_bytes=passing, host_bytes=0, way=1),
            Option(seconds=2.0 * seconds, added_bytes=added // 4, passing_bytes=passing, host_bytes=added, way=2),
        ]

    return options


def every_split(num_layers: int, num_stages: int, options: Options) -> Iterator[tuple[Cut, ...]]:
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        bounds = list(itertools.pairwise((0, *inner, num_layers)))
        each = [options(stage, first, end) for stage, (first, end) in enumerate(bounds)]
        for chosen in itertools.product(*each):
            yield tuple(
                Cut(first=first, end=end, option=option) for (first, end), option in zip(bounds, chosen, strict=True)
            )


def fits(cuts: Sequence[Cut], rooms: Sequence[Budget]) -> bool:
    for rank, room in enumerate(rooms):
        own = [cut.option for cut in cuts[rank :: len(rooms)]]
        device = sum(option.added_bytes for option in own) + max(option.passing_bytes for option in own)
        if device > room.device_bytes or sum(option.host_bytes for option in own) > room.host_bytes:
            return False
    return True


def squares(cuts: Sequence[Cut]) -> float:
    return sum(cut.option.seconds**2 for cut in cuts)


@given(LAYERS, st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2), (1, 3)]), st.data())
def test_no_cut_that_fits_is_better(layers: Layers, sizes: tuple[int, int], data: st.DataObject) -> None:
    num_ranks, loops = sizes
    rooms = [
        Budget(device_bytes=data.draw(st.integers(0, 40)), host_bytes=data.draw(st.integers(0, 20)))
        for _ in range(num_ranks)
    ]
    options = options_of(layers)
    found = best_split(len(layers), num_ranks * loops, rooms, options)
    legal = [cuts for cuts in every_split(len(layers), num_ranks * loops, options) if fits(cuts, rooms)]
    if not legal:
        assert found is None
        return
    assert found is not None
    assert fits(found, rooms)
    least_s = min(map(slowest_s, legal))
    assert slowest_s(found) == least_s
    assert squares(found) == min(squares(cuts) for cuts in legal if slowest_s(cuts) == least_s)


def test_equal_layers_with_room_make_equal_stages() -> None:
    found = best_split(12, 4, [Budget(device_bytes=100, host_bytes=0)] * 2, options_of([(2, 1, 1)] * 12))
    assert found is not None
    assert [(cut.first, cut.end) for cut in found] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert {cut.option.way for cut in found} == {0}


def test_many_layers_and_stages_with_little_room_are_cut_too() -> None:
    """Half of the bytes do not fit on all ranks, so that some stages must be lean."""
    layers: Layers = [(3, 8, 2), *[(2, 4, 2)] * 30, (5, 9, 4)]
    rooms = [Budget(device_bytes=sum(each for _, each, _ in layers) * 5 // 32, host_bytes=0)] * 4
    found = best_split(len(layers), 8, rooms, options_of(layers))
    assert found is not None
    assert fits(found, rooms)
