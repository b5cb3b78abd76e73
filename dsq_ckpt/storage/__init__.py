"""Checkpoints on disk: containers, records, manifests, links, retention, collection of garbage."""
