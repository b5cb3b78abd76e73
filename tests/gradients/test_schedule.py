"""Gradients are captured shortly before checkpoints, however a run spaces them."""

from __future__ import annotations

import pytest

from dsq_ckpt.gradients.schedule import Schedule


def captured(schedule: Schedule, saves: set[int], steps: int) -> list[int]:
    """The steps (from 1) in which it is due, with a save after each step in `saves`."""
    due = []
    for step in range(1, steps + 1):
        if schedule.is_due():
            due.append(step)
        schedule.count_step()
        if step in saves:
            schedule.record_save()
    return due


def test_the_window_before_each_checkpoint():
    assert captured(Schedule(10, 3), {10, 20, 30}, 35) == [8, 9, 10, 18, 19, 20, 28, 29, 30]
    assert captured(Schedule(10, 10), {10, 20}, 25) == list(range(1, 26))
    assert captured(Schedule(10, 99), {10, 20}, 25) == list(range(1, 26))
    assert captured(Schedule(1, 1), {1, 2, 3}, 3) == [1, 2, 3]


def test_a_late_checkpoint_stays_due():
    assert captured(Schedule(10, 2), {14}, 18) == [9, 10, 11, 12, 13, 14]


def test_an_extra_checkpoint_moves_the_others_or_not():
    """Due for both until it is known."""
    assert captured(Schedule(10, 2), {4, 10, 20, 30}, 30) == [9, 10, 19, 20, 29, 30]
    assert captured(Schedule(10, 2), {4, 14, 24, 34}, 34) == [9, 10, 11, 13, 14, 23, 24, 33, 34]


def test_the_distance_is_learned():
    assert captured(Schedule(None, 2), {10, 20, 30}, 32) == [*range(1, 21), 29, 30]
    assert captured(Schedule(None, 2), {7, 17, 27}, 29) == [*range(1, 18), 26, 27], "the first save came after a resume"
    assert captured(Schedule(None, 2), {10, 20, 25, 35}, 35) == [*range(1, 21), *range(29, 36)]


def test_saving_the_same_state_twice_changes_nothing():
    schedule = Schedule(None, 2)
    for _ in range(2):
        for _ in range(10):
            schedule.count_step()
        schedule.record_save()
        schedule.record_save()
    assert captured(schedule, set(), 10) == [9, 10]


@pytest.mark.parametrize("every, window", [(0, 1), (5, 0), (None, 0), (-1, 1)])
def test_numbers_below_one(every, window):
    with pytest.raises(ValueError, match="at least 1"):
        Schedule(every, window)
