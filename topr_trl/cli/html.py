"""Render HTML pages with embedded images, so that a page is a single file."""

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def render(template: str, **values: Any) -> str:
    """Render a template from the folder of this module. Text values are escaped.

    Args:
        template (`str`): File name of the template.
        values (`Any`): Values of the template's variables.

    Returns:
        `str`: the page as HTML.
    """
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = _format_number
    return environment.from_string(Path(__file__).with_name(template).read_text("utf-8")).render(**values)


def figure_source(figure: "Figure") -> str:
    """Return a figure as an SVG data URI for the `src` of an image."""
    content = io.BytesIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    return picture_source(content.getvalue(), "svg+xml")


def picture_source(picture: bytes, kind: str) -> str:
    """Return an image file as a data URI for the `src` of an HTML image.

    Args:
        picture (`bytes`): Content of the image file.
        kind (`str`): `"png"` or `"svg+xml"`.
    """
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def _format_number(value: float | None) -> str:
    return "–" if value is None or value != value else f"{value:.3g}"
