"""Search for the smallest configuration that meets a quality bound: says which to try; the caller tries them."""

from dsq_ckpt.search.guided import Search, drive, guided_exhaustive
from dsq_ckpt.search.neighbourhood import neighbourhood
from dsq_ckpt.search.space import Axis, Point, Space, Variant

__all__ = ["Axis", "Point", "Search", "Space", "Variant", "drive", "guided_exhaustive", "neighbourhood"]
