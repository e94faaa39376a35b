"""Pages of HTML that need no server: one template, pictures inside."""

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def render(template: str, **values: Any) -> str:
    """A template of this folder with its values; texts are escaped."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = _number
    return environment.from_string(Path(__file__).with_name(template).read_text("utf-8")).render(**values)


def svg(figure: "Figure") -> str:
    """A figure for `src`."""
    content = io.BytesIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    return source(content.getvalue(), "svg+xml")


def source(picture: bytes, kind: str) -> str:
    """A picture for `src`: `kind` is "png" or "svg+xml"."""
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def _number(value: float | None) -> str:
    return "–" if value is None or value != value else f"{value:.3g}"
