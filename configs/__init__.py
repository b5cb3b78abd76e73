"""Presets, packaged so that `DSQConfig.preset(name)` finds them wherever the package is installed."""
