"""Service accounts, represented by small numbers that rows can store.

A step may give a token to hundreds of rows from a few tenants. Each row stores its account's number, so the tokens per
account are one `bincount`. Python code then handles accounts, not rows.
"""

from typing import NamedTuple


class Account(NamedTuple):
    """Account of a request: the groups by which a fair queue takes turns."""

    request_class: str
    tenant: str


class AccountNumbers:
    """Numbers of the accounts that are in use."""

    def __init__(self) -> None:
        self._numbers: dict[Account, int] = {}
        self._accounts: list[Account] = []
        self._users: list[int] = []
        self._unused: list[int] = []
        """Numbers without an account."""

    def __getitem__(self, number: int) -> Account:
        """Return the account with a number."""
        return self._accounts[number]

    def enter(self, account: Account) -> int:
        """Count one more use of an account; return its number."""
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
        """Decrease the use count of a number by one. At zero, another account can get the number."""
        self._users[number] -= 1
        if not self._users[number]:
            del self._numbers[self._accounts[number]]
            self._unused.append(number)
