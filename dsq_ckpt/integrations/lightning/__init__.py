"""Lightning: a `CheckpointIO` for one device and DDP, and a strategy for FSDP2.

    from dsq_ckpt.integrations.lightning import DSQCheckpointIO
    trainer = Trainer(plugins=[DSQCheckpointIO()])

Checkpoints are directories at the paths that Lightning chooses. Both classes write the same layout, so that a run may
change between one device, DDP and FSDP2.
"""

from dsq_ckpt.integrations.lightning.checkpoint_io import DSQCheckpointIO, checkpoint_file
from dsq_ckpt.integrations.lightning.strategies import DSQModelParallelStrategy

__all__ = ["DSQCheckpointIO", "DSQModelParallelStrategy", "checkpoint_file"]
