"""What tests share: texts, runs of the real script, a tiny track, a hub, faults."""
