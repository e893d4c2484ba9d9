"""Where foreign code runs: what it sees, what it may use, and how it is asked."""
