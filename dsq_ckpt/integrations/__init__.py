"""Adapters of training frameworks, one module or subpackage each; imported by nothing else."""
