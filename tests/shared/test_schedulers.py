"""Which of several schedulers a worker or front end connects to."""

from shared.schedulers import Schedulers


def test_one_address_is_used_again_and_again() -> None:
    """Without a standby, nothing changes."""
    schedulers = Schedulers("tcp://a:1")
    schedulers.leave()
    assert (schedulers.address, schedulers.are_several) == ("tcp://a:1", False)
    assert schedulers.accepts(0)


def test_addresses_are_tried_in_turn_with_growing_timeouts() -> None:
    """Two tries per address take less than two seconds; a response makes the timeout short again."""
    schedulers = Schedulers("tcp://a:1, tcp://b:2")
    tried = []
    for _ in range(6):
        tried.append((schedulers.address, schedulers.timeout_s))
        schedulers.leave()
    assert [address for address, _ in tried] == ["tcp://a:1", "tcp://b:2"] * 3
    assert [timeout_s for _, timeout_s in tried] == [0.3, 0.3, 0.6, 0.6, 1.2, 1.2]
    assert schedulers.accepts(5)
    assert schedulers.timeout_s == 0.3


def test_a_scheduler_with_a_lower_number_is_not_accepted() -> None:
    """A scheduler without a number has no standby, so it is accepted."""
    schedulers = Schedulers("tcp://a:1,tcp://b:2")
    assert [schedulers.accepts(number) for number in (7, 6, 7, 8, 7, 0)] == [True, False, True, True, False, True]
