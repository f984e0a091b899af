"""What people see of a run: progress while it lasts, then table, plots and one self-contained page."""
