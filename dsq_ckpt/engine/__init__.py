"""One save, step by step, and what a process remembers of its run."""
