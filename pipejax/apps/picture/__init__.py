"""Pictures of a record: its grid while it fills, as SVG or as an animated page. Imports only the standard library."""

from pipejax.apps.picture.grid_svg import fill, svg
from pipejax.apps.picture.picture_page import html

__all__ = ["fill", "html", "svg"]
