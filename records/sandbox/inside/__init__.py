"""What runs inside a sandbox. It imports nothing of ours, for nothing of ours is there."""
