"""Algorithms of codebooks that several modules use, or that are compiled."""
