"""Algorithms of codebooks that other packages use too, or that are compiled."""
