"""Where the data files that ship with the package lie: ``configs/`` and ``recipes/``.

In a checkout (and an editable install) they stand beside the package, in a wheel inside it; ``setup.py`` copies them
there. Imports the standard library only.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def shipped_folder(name: str) -> Path:
    """The folder ``configs`` or ``recipes``.

    Raises:
        FileNotFoundError: the installation is incomplete; the message says where it was looked for.
    """
    candidates = (_PACKAGE / name, _PACKAGE.parent / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    places = " nor ".join(map(str, candidates))
    raise FileNotFoundError(
        f"the folder {name} of trn_dist is missing, neither {places} exists; install trn_dist again"
    )
