# The extension's functions are private to this package and change with it; they are typed where they are wrapped.
from typing import Any

def __getattr__(name: str) -> Any: ...
