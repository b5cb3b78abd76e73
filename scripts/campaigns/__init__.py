"""Campaigns of faults: each an idea of what may go wrong, tried thousands of times with a seed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # campaigns use what tests have
