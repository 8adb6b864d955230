"""One file per algorithm: what differs, nothing else."""
