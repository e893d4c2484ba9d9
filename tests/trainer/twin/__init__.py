"""The twin for Macs: what it computes beside the script, and that both agree with a golden file."""
