"""What is known to differ from the CPU, by name and with the reason. The list only shrinks: an entry that passes fails.

A key is ``operator:dtype:check``.
"""

from __future__ import annotations


def key_of(operator: str, dtype: str, check: str) -> str:
    return f"{operator}:{dtype}:{check}"


EXPECTED_FAILURES: dict[str, str] = {}
