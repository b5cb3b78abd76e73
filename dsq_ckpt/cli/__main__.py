"""`python -m dsq_ckpt.cli` is `dsq`."""

from dsq_ckpt.cli import main

main()
