"""Adapters for training frameworks, one module or subpackage each; no other part of the package imports them."""
