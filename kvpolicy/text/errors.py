"""The errors and the warning category of kvpolicy.

Every error that a user can correct is a `KVPolicyError`, so that one `except` clause catches all of them. Its
subclasses are also the exception that Python raises in the same situation, so that `except TypeError` and
`except RuntimeError` work too.

    >>> try:
    ...     import kvpolicy
    ...     kvpolicy.Policy.parse("h2o@0")
    ... except kvpolicy.KVPolicyError as error:
    ...     print(type(error).__name__)
    KVPolicyError
"""

from __future__ import annotations

import re

_OUT_OF_MEMORY = re.compile("(?i)out of memory|not enough memory|can't allocate memory")


class KVPolicyError(ValueError):
    """An argument, a model or a state that kvpolicy refuses; the message says what to do instead, in one line.

    Examples:
        >>> issubclass(KVPolicyError, ValueError)
        True
    """

    # Not `__init__`, which torch.compile (2.13) cannot trace where a compiled forward is refused.
    def __str__(self) -> str:
        """Join the lines of the message, which a value that it repeats may have, such as a tensor or a config."""
        return " ".join(line.strip() for line in super().__str__().splitlines())


class KVPolicyTypeError(KVPolicyError, TypeError):
    """An argument of a type that is not accepted.

    Examples:
        >>> issubclass(KVPolicyTypeError, TypeError) and issubclass(KVPolicyTypeError, KVPolicyError)
        True
    """


class KVPolicyStateError(KVPolicyError, RuntimeError):
    """A cache or a model in a state in which the call is not possible, such as a forward that was interrupted.

    Examples:
        >>> issubclass(KVPolicyStateError, RuntimeError) and issubclass(KVPolicyStateError, KVPolicyError)
        True
    """


class KVPolicyWarning(UserWarning):
    """The category of every warning of kvpolicy: something works differently than its user may expect.

    Examples:
        >>> import warnings
        >>> warnings.simplefilter("error", KVPolicyWarning)  # in a program that must stop at each of them
        >>> warnings.simplefilter("default", KVPolicyWarning)
    """


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out; PyTorch has no class of its own for it on the CPU.

    Examples:
        >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory")), is_out_of_memory(OSError())
        (True, False)
    """
    said = isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    return said or isinstance(error, MemoryError)


for _kind in (KVPolicyError, KVPolicyTypeError, KVPolicyStateError, KVPolicyWarning):
    _kind.__module__ = "kvpolicy"  # the name that users import and that tracebacks show
