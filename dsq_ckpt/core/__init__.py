"""Tools for every other package: array types, threads, nested states, signals, warnings, arguments."""
