"""The collectives of a save: one process, torch.distributed, MPI."""
