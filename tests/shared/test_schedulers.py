"""Which of several schedulers a worker or front end stays with."""

from shared.schedulers import Schedulers


def test_a_setting_names_one_or_more_addresses() -> None:
    """Without a standby, there is one."""
    one, two = Schedulers("tcp://a:1"), Schedulers("tcp://a:1, tcp://b:2")

    assert (one.addresses, one.are_several) == (("tcp://a:1",), False)
    assert (two.addresses, two.are_several) == (("tcp://a:1", "tcp://b:2"), True)
    assert one.accepts(0)


def test_a_scheduler_with_a_lower_number_is_not_accepted() -> None:
    """A scheduler without a number has no standby, so it is accepted."""
    schedulers = Schedulers("tcp://a:1,tcp://b:2")
    assert [schedulers.accepts(number) for number in (7, 6, 7, 8, 7, 0)] == [True, False, True, True, False, True]
