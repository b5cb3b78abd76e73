"""What every other package may use: threads, nested states, signals, warnings, arguments."""
