"""HTML pages from the templates beside this file. A page holds its style and its pictures itself."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import jinja2

_TEMPLATES = Path(__file__).parent / "templates"


def as_page(template: str, **values: Any) -> str:
    """The page of ``templates/<template>``; text in ``values`` is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["png"] = lambda picture: f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    return environment.get_template(template).render(values)
