# The extension, built from csrc/. Its functions are private to the package; each is called in one place, next to a
# docstring, so that types are stated there and not a second time here.
from typing import Any

def __getattr__(name: str) -> Any: ...
