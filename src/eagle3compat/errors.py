"""The errors of this package: each says where, what was expected, what was found, what to do."""

from __future__ import annotations


class Eagle3CompatError(Exception):
    """Base of every error that this package raises on purpose; the command line exits with 2."""


class InputError(Eagle3CompatError):
    """What the user gave cannot be used (a path, an option); raised before any engine starts."""


class BuildNotFoundError(InputError):
    """A package that is needed is not installed, or its source text cannot be found."""


class InterruptedRun(RuntimeError):
    """A long run that cannot go on; what it did is kept, and a rerun goes on from there.

    Nobody's input is wrong, so the command line exits with 1.
    """


class Refusal(Eagle3CompatError):
    """A contract between consumer and provider does not hold and no shim repairs it.

    Args:
        call_site: where the consumer relies on the provider (``file:line`` or ``module.qualname``).
        expected: what the call site needs.
        found: what the provider has, or what was measured.
        remedy: what the user can do next.
    """

    def __init__(self, call_site: str, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"{call_site}: expected {expected}; found {found}. {remedy}")
        self.call_site = call_site
        self.expected = expected
        self.found = found
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[Refusal], tuple[str, str, str, str]]:
        return type(self), (self.call_site, self.expected, self.found, self.remedy)
