"""What the manifests of a run tell: its history, the page of `dsq report`, scalars for loggers."""
