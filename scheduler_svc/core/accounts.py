"""To whom service is accounted, under small numbers that rows can hold.

A step may give a token to hundreds of rows of a few tenants. With the account's number in the row, what each account is
owed is one `bincount`, and Python sees accounts, not rows.
"""

from typing import NamedTuple


class Account(NamedTuple):
    """What the turns of a fair queue go by."""

    request_class: str
    tenant: str


class AccountNumbers:
    """Numbers of the accounts that are in use at the moment."""

    def __init__(self) -> None:
        self._numbers: dict[Account, int] = {}
        self._accounts: list[Account] = []
        self._users: list[int] = []
        self._unused: list[int] = []
        """Numbers that no account has."""

    def __getitem__(self, number: int) -> Account:
        """The account with a number."""
        return self._accounts[number]

    def enter(self, account: Account) -> int:
        """One more use of an account; returns its number."""
        number = self._numbers.get(account)
        if number is not None:
            self._users[number] += 1
        elif self._unused:
            number = self._numbers[account] = self._unused.pop()
            self._accounts[number], self._users[number] = account, 1
        else:
            number = self._numbers[account] = len(self._accounts)
            self._accounts.append(account)
            self._users.append(1)
        return number

    def leave(self, number: int) -> None:
        """One use less; the last one makes the number free for another account."""
        self._users[number] -= 1
        if not self._users[number]:
            del self._numbers[self._accounts[number]]
            self._unused.append(number)
