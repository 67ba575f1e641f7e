"""Who is next in a pool: heavy tasks one by one and largest first, light ones in handfuls."""

from __future__ import annotations

from visard.engines.pool import AHEAD, MOST, JobQueue, Pace
from visard.engines.request import Request
from visard.engines.worker import Job


def tasks(sizes: list[int]) -> list[Job]:
    return [Job([Request(client=f"c{i}")], i, size) for i, size in enumerate(sizes)]


def pace(seconds: float, size: int = 1000) -> Pace:
    made = Pace()
    made.heard(seconds)
    made.bytes = size
    return made


def positions(given: list[Job]) -> list[int]:
    return [t.position for t in given]


def test_before_anything_is_known_tasks_go_out_one_by_one() -> None:
    assert positions(JobQueue(tasks([1] * 100), Pace(), 2).next(0)) == [0]


def test_heavy_tasks_go_largest_first_but_do_not_run_far_ahead() -> None:
    line = JobQueue(tasks([1, 5, 3] + [9] * 100), pace(10.0), 1)
    assert [positions(line.next(0))[0] for _ in range(AHEAD)] == [3, 4, 5, 6, 7, 1, 2, 0]
    assert line.next(0) == [], "the next ones wait until the first replies were handed on"
    assert positions(line.next(1)) == [8]


def test_light_tasks_go_out_in_handfuls_that_shrink_towards_the_end() -> None:
    line = JobQueue(tasks([1] * 200), pace(0.005), 2)
    given, sizes = 0, []
    while batch := line.next(given):
        assert positions(batch) == list(range(given, given + len(batch)))
        given += len(batch)
        sizes.append(len(batch))
    assert given == 200
    assert sizes[0] == 20
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def test_large_replies_make_small_handfuls() -> None:
    assert pace(1e-5).batch() == MOST
    assert pace(1e-5, size=250_000_000).batch() == 1


def test_a_pace_follows_what_it_hears() -> None:
    slow = pace(1e-4)
    for _ in range(30):
        slow.heard(1.0)
    assert slow.batch() == 1


def test_what_a_lost_worker_had_not_begun_comes_back_in_its_place() -> None:
    line = JobQueue(tasks([1] * 40), pace(0.02), 1)
    batch = line.next(0)
    assert positions(batch) == [0, 1, 2, 3, 4]
    line.back(batch[1:])
    line.retry(batch[0])
    assert positions(line.next(0)) == [0], "alone"
    assert positions(line.next(0)) == [1, 2, 3, 4, 5]
