"""Two sets of runs side by side: what differs, and which differences are more than noise."""
