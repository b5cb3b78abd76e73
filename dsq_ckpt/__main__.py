"""`python -m dsq_ckpt` is `dsq`."""

from dsq_ckpt.cli import main

main()
