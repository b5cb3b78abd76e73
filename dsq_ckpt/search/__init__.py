"""Search of the smallest configuration that keeps a quality bound. It proposes trials, which the caller runs."""

from dsq_ckpt.config.space import Axis, Point, Space, Variant
from dsq_ckpt.search.guided import Search, drive, guided_exhaustive
from dsq_ckpt.search.neighbourhood import neighbourhood

__all__ = ["Axis", "Point", "Search", "Space", "Variant", "drive", "guided_exhaustive", "neighbourhood"]
