"""Averaged gradients as a measure of sensitivity."""
