"""Test the phases of a request."""

from __future__ import annotations

from kvant.engine.timeline import MAX_PHASES, Timeline


def test_phases_are_in_the_order_of_their_starts() -> None:
    timeline = Timeline()
    timeline.begin_phase("prefix_lookup")
    timeline.end_phase("prefix_lookup")
    timeline.begin_phase("store")
    timeline.end_phase("queue")
    timeline.end_phase("decode")  # has not begun
    assert [phase.name for phase in timeline.phases] == ["queue", "prefix_lookup"]
    timeline.end_all_phases()
    timeline.end_phase("store")  # has ended
    phases = timeline.phases
    assert [phase.name for phase in phases] == ["queue", "prefix_lookup", "store"]
    assert all(phase.start_ns <= phase.end_ns for phase in phases)


def test_many_lookups_leave_room_for_the_other_phases() -> None:
    timeline = Timeline()
    for _ in range(2 * MAX_PHASES):
        timeline.begin_phase("prefix_lookup")
        timeline.end_phase("prefix_lookup")
    timeline.end_phase("queue")
    for name in ("prefill", "decode"):
        timeline.begin_phase(name)
        timeline.end_phase(name)
    names = [phase.name for phase in timeline.phases]
    assert len(names) == MAX_PHASES and names[0] == "queue" and names[-2:] == ["prefill", "decode"]
