"""From values to codes: sketches, groups, scales, codebooks, chunks, on the CPU and on a GPU."""
