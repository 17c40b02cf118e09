"""A picture of one record: its grid as it fills, as SVG or as a page that plays it. Standard library only."""

from pipejax.apps.picture.grid_svg import fill, svg
from pipejax.apps.picture.page import html

__all__ = ["fill", "html", "svg"]
