"""Campaigns of faults: each an idea of what may go wrong, tried thousands of times with a seed."""
