"""What a training loop calls: save, load, Compressor, compress."""
