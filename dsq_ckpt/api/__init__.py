"""Functions for training loops: save, load, Compressor, compress."""
